"""Estimates of the log evidence log p(y), by which bounds are judged: annealed importance sampling, and quadrature.

Both integrate the un-augmented model in its whitened basis, p(y) = E p(y | a + S u) with u ~ N(0, I) (G8). They share
nothing with the algorithms that they judge. For one-vs-each p(y) is the composite evidence E prod_n p(y_n | f_n).

    log p(y) = ELBO + KL(q || p(f | y))

turns an evidence and the bound of a Gaussian q, without augmentation, into the distance of q from the exact posterior.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Key

from fewshot.inference.inner.base import Mask, classes_of, expected_data, sum_over_points
from fewshot.inference.mcmc import elliptical_slice
from fewshot.models.expectations import MonteCarlo, product_rule
from fewshot.models.gaussian import (
    GaussianPrior,
    Posterior,
    highest_precision,
    root_of,
)
from fewshot.models.likelihoods.base import Labels, Likelihood

MOST_DIMENSIONS = 4  # of the product rule
SHIFTS = 16  # independent random shifts of the nodes of a bound, from which its error is known


class Estimate(NamedTuple):
    """A number in nats, its standard error, and how many independent draws of equal weight would know as much."""

    value: Float[Array, ""]
    error: Float[Array, ""]
    effective: Float[Array, ""]


@highest_precision
def annealed_evidence(
    key: Key[Array, ""],
    prior: GaussianPrior,
    likelihood: Likelihood,
    y: Labels,
    mask: Mask | None = None,
    *,
    particles: int = 256,
    steps: int = 200,
) -> Estimate:
    """log p(y) by annealed importance sampling (Neal 2001) from the prior to the posterior.

    The mean weight is an unbiased estimate of p(y) for any number of steps; its log lies below log p(y) on average, by
    half the squared error. The error is that of independent particles and can be trusted where `effective` is not
    small. Raises ValueError for fewer than two particles or no steps.
    """
    if particles < 2 or steps < 1:
        raise ValueError(f"expected at least two particles and one step, got {particles} and {steps}")
    root, (classes, _) = root_of(prior), prior.mean.shape
    data = _log_likelihood(prior, root, likelihood, y, mask)

    def log_weight(one: Array) -> Array:
        start_key, path_key = jax.random.split(one)
        start = jax.random.normal(start_key, (classes, root.shape[-1]), root.dtype)
        return _annealed_log_weight(path_key, data, start, steps)

    return _mean_weight(jax.vmap(log_weight)(jax.random.split(key, particles)))


def _annealed_log_weight(
    key: Array, data: Callable[[Array], Array], start: Float[Array, "C R"], steps: int
) -> Float[Array, ""]:
    """Log weight of a particle along the geometric path p_b(u) ~ N(u; 0, I) p(y | a + S u)^b, b from 0 to 1.

    sum_t (b_t - b_{t-1}) log p(y | u_{t-1}), u_0 from the prior, then one elliptical slice that leaves p_{b_t}
    invariant. b_t = (t / T)^2: log p(y | u) varies most near the prior, the chain moves least near the posterior.
    """
    temperatures = jnp.linspace(0.0, 1.0, steps + 1, dtype=start.dtype) ** 2

    def advance(carry: tuple[Array, Array, Array], step: tuple[Array, ...]) -> tuple[tuple[Array, Array, Array], None]:
        u, value, weight = carry
        slice_key, before, now = step
        weight = weight + (now - before) * value
        u, tempered, _ = elliptical_slice(slice_key, u, now * value, lambda point: now * data(point))
        return (u, tempered / now, weight), None

    path = jax.random.split(key, steps), temperatures[:-1], temperatures[1:]
    (_, _, weight), _ = jax.lax.scan(advance, (start, data(start), jnp.zeros((), start.dtype)), path)
    return weight


def _mean_weight(log_weights: Float[Array, " M"]) -> Estimate:
    """Log of the mean of M independent weights; its error is that of the mean relative to the mean."""
    count = log_weights.shape[0]
    relative = jnp.exp(log_weights - jnp.max(log_weights))
    error = jnp.std(relative, ddof=1) / jnp.mean(relative) / jnp.sqrt(count)
    effective = jnp.sum(relative) ** 2 / jnp.sum(relative**2)
    return Estimate(logsumexp(log_weights) - jnp.log(count), error, effective)


@highest_precision
def quadrature_evidence(
    prior: GaussianPrior,
    likelihood: Likelihood,
    y: Labels,
    mask: Mask | None = None,
    *,
    order: int = 24,
) -> Float[Array, ""]:
    """log p(y) by product Gauss-Hermite quadrature over u. Raises ValueError for more than four dimensions C R."""
    root, (classes, _) = root_of(prior), prior.mean.shape
    size = classes * root.shape[-1]
    if size > MOST_DIMENSIONS:
        raise ValueError(
            f"quadrature is a product rule for at most {MOST_DIMENSIONS} latents, got {size}; use annealed_evidence"
        )
    points = product_rule(order, size, root.dtype)
    data = _log_likelihood(prior, root, likelihood, y, mask)
    values = jax.lax.map(lambda node: data(node.reshape(classes, -1)), points.nodes, batch_size=4096)
    return logsumexp(values, b=points.weights)


def bound(
    key: Key[Array, ""],
    likelihood: Likelihood,
    posterior: Posterior,
    y: Labels,
    mask: Mask | None = None,
    *,
    draws: int = 2**14,
) -> Estimate:
    """E_q log p(y | f) - KL(q || p), without augmentation, over nodes that q was not fitted to.

    The bound that an inference kernel reports is over its own few nodes, which it has been raised on, or includes
    augmented latents. Its difference from log p(y) is KL(q || p(f | y)).
    """
    marginals, classes = posterior.marginals, posterior.marginals.mean.shape[0]

    def once(one: Array) -> Array:
        points = MonteCarlo(draws // SHIFTS).points(one, classes, marginals.mean.dtype)
        return expected_data(likelihood, y, marginals, points, mask)

    values = jax.lax.map(once, jax.random.split(key, SHIFTS))
    error = jnp.std(values, ddof=1) / jnp.sqrt(SHIFTS)
    return Estimate(jnp.mean(values) - posterior.kl, error, jnp.asarray(draws, values.dtype))


def _log_likelihood(
    prior: GaussianPrior, root: Array, likelihood: Likelihood, y: Array, mask: Mask | None
) -> Callable[[Array], Array]:
    """u [C, R] -> log p(y | a + u S^T), summed over the points."""

    def value(u: Array) -> Array:
        return sum_over_points(likelihood.log_prob(y, prior.mean + u @ root.T, classes_of(mask)), mask)

    return value
