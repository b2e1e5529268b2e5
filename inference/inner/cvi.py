"""Mirror-descent / conjugate-computation variational inference (MD section 3.3): C1, C2, with a safe step size.

q(f) is the prior times diagonal sites. A step moves the sites towards the target of C1 by a fraction rho:

    (C1)  W^ = -2 g_v,  h^ = g_m + W^ m,   g = gradient of E_q[log p(y | f)] in the marginal means and variances
    (C2)  (h, W) <- (1 - rho) (h, W) + rho (h^, W^)

That is a natural-gradient step of length rho. The full step oscillates where the output scale is large, so rho is
chosen by the Barzilai-Borwein secant rule in the (diagonal) Fisher metric, rho = <s, s> / <s, y> with s the last step
and y the change of the direction; at most three times the last one, and FIRST_STEP at first: from the prior, whose
variances are the largest, the full step overshoots most. Lengths beyond 1 shorten the slow directions of large output
scales; a precision that such a step would make negative becomes 0. A step that would lower the ELBO is refused and
retried at half its length. Each step costs one factorisation and one gradient, refused or not.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from inference.inner.base import (
    InferenceKernel,
    Info,
    Mask,
    Traits,
    classes_of,
    finite_code,
    gaussian_posterior,
    mask_sites,
    require,
    sum_over_points,
)
from models.expectations import ExpectationRule, MonteCarlo, Points
from models.gaussian import GaussianPosterior, GaussianPrior, Marginals, Sites, condition, prior_marginals, zero_sites
from models.likelihoods.base import Likelihood

FIRST_STEP = 0.2  # of 0.1, 0.2, 0.3, 0.5 and 1 the one with the smallest gap after 3 and 5 steps, on average
SHORTEST_STEP, LONGEST_STEP = 0.02, 8.0


class CVIState(NamedTuple):
    """Sites, the target C1 computed at them, and what the step-size rule remembers.

    elbo and residual belong to the sites; rho is the length of the next step; points are the nodes of the task's
    expectations (None: deterministic).
    """

    sites: Sites
    target: Sites
    elbo: Float[Array, ""]
    residual: Float[Array, ""]
    rho: Float[Array, ""]
    points: Points | None


def cvi(
    likelihood: Likelihood, *, rho: float | None = None, expectation: ExpectationRule | None = None
) -> InferenceKernel:
    """Conjugate-computation VI for any tier-1 likelihood.

    rho: None chooses every step's length; a number in (0, 1] is used as it is, without a safeguard (as published).
    expectation: rule for E_q[log p(y | f)]; default MonteCarlo(256), which leaves 0.05 to 0.4 nats against Exact().
    Raises TypeError for an object that is no likelihood, ValueError for rho outside (0, 1].
    """
    require(
        isinstance(likelihood, Likelihood), "cvi", likelihood, "log_prob, expected_log_prob and predict", "a Likelihood"
    )
    if rho is not None and not 0 < rho <= 1:
        raise ValueError(f"rho must lie in (0, 1], got {rho}; None chooses it at every step")
    rule = MonteCarlo() if expectation is None else expectation

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None) -> CVIState:
        points = rule.points(key, prior.mean.shape[0], prior.mean.dtype)
        first = jnp.asarray(FIRST_STEP if rho is None else rho, prior.mean.dtype)
        target, data, _, _ = _target(likelihood, prior_marginals(prior), y, mask, points)
        return CVIState(zero_sites(prior), target, data, jnp.full_like(data, jnp.inf), first, points)

    def step(
        key: Key[Array, ""], state: CVIState, prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None
    ) -> tuple[CVIState, Info]:
        del key
        direction = _subtract(state.target, state.sites)
        proposal = _add(state.sites, state.rho, direction)
        posterior = condition(prior, proposal)
        target, data, slope, clipped = _target(likelihood, posterior.marginals, y, mask, state.points)
        elbo = data - posterior.kl
        if rho is not None:
            accepted, following = jnp.asarray(True), state.rho
        else:
            # A bound is a difference of sums of N C terms of order one: that is what its rounding is relative to.
            magnitude = jnp.abs(data) + posterior.kl + y.size * prior.mean.shape[0]
            rounding = 100 * jnp.finfo(elbo.dtype).eps * magnitude
            accepted = elbo >= state.elbo - rounding
            change = _subtract(direction, _subtract(target, proposal))
            secant = _secant_length(state.rho, direction, change, posterior.variance)
            following = jnp.where(accepted, secant, jnp.maximum(0.5 * state.rho, SHORTEST_STEP))
        moved = CVIState(proposal, target, elbo, _residual(posterior, proposal, slope, target), following, state.points)
        state = jax.tree.map(partial(jnp.where, accepted), moved, state._replace(rho=following))
        return state, Info(state.elbo, state.residual, finite_code(elbo, *proposal), clipped)

    def elbo(state: CVIState, posterior: GaussianPosterior, y: Int[Array, " N"], mask: Mask | None = None) -> Array:
        data = likelihood.expected_log_prob(y, posterior.marginals, state.points, classes_of(mask))
        return sum_over_points(data, mask) - posterior.kl

    return InferenceKernel(init, step, gaussian_posterior, elbo, Traits("cvi"))


def _target(
    likelihood: Likelihood, marginals: Marginals, y: Array, mask: Mask | None, points: Points | None
) -> tuple[Sites, Array, Array, Array]:
    """Target sites (C1), E_q[log p(y | f)], its slope g_m [C, N], and how many precisions were clipped at 0."""

    def data(inner: Marginals) -> Array:
        return sum_over_points(likelihood.expected_log_prob(y, inner, points, classes_of(mask)), mask)

    value, (slope, curvature) = jax.value_and_grad(data)(marginals)
    precision = jnp.maximum(-2 * curvature, 0.0)
    sites = mask_sites(Sites(slope + precision * marginals.mean, precision), mask)
    return sites, value, slope, jnp.sum(curvature > 0)


def _residual(posterior: GaussianPosterior, sites: Sites, slope: Array, target: Sites) -> Array:
    """max(|alpha - g_m|, |W - W^| v), relative to max(1, |g_m|): zero exactly at the fixed point."""
    scale = jnp.maximum(1.0, jnp.abs(slope))
    mean_part = jnp.abs(posterior.alpha - slope) / scale
    variance_part = jnp.abs(sites.precision - target.precision) * posterior.variance / scale
    return jnp.maximum(jnp.max(mean_part), jnp.max(variance_part))


def _secant_length(rho: Array, direction: Sites, change: Sites, variance: Array) -> Array:
    """Barzilai-Borwein length <s, s> / <s, y> with s = rho direction and y = change, at most 3 rho.

    It divides only where the ratio is below that, so that unrolling past the fixed point has a finite derivative.
    """
    squared, curvature = rho * _inner(variance, direction, direction), _inner(variance, direction, change)
    longest = jnp.minimum(LONGEST_STEP, 3.0 * rho)
    curved = squared < longest * curvature
    length = jnp.where(curved, squared / jnp.where(curved, curvature, 1.0), longest)
    return jnp.where(squared > 0, jnp.maximum(length, SHORTEST_STEP), 1.0)


def _inner(variance: Array, left: Sites, right: Sites) -> Array:
    """Inner product in the Fisher metric of independent normals: v for shifts, v^2 / 2 for precisions."""
    shifts = variance * left.shift * right.shift
    return jnp.sum(shifts + 0.5 * variance**2 * left.precision * right.precision)


def _subtract(left: Sites, right: Sites) -> Sites:
    return jax.tree.map(jnp.subtract, left, right)


def _add(sites: Sites, length: Array, direction: Sites) -> Sites:
    moved = jax.tree.map(lambda site, part: site + length * part, sites, direction)
    return moved._replace(precision=jnp.maximum(moved.precision, 0.0))
