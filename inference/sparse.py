"""Stochastic variational Gaussian processes (docs/sparse.md): sites at the inducing points, updated by (C1, C2).

q(u) is the prior times a Gaussian site. It is held on K_zz^-1 u, where a point's site exp(h f - 1/2 W f^2) has shift
h k(Z, x) and precision W k(Z, x) k(x, Z): no K_zz^-1 enters, and fixed sites serve other kernel parameters too (E1).
With P P^T = (K_zz + e I)^+ the posterior of the whitened v is that of `models.inducing.weights_of`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from fewshot.models import inducing
from fewshot.models.gaussian import highest_precision
from fewshot.models.inducing import InducingProcess, Parameters, View, Weights
from fewshot.models.regression import Prediction

# E_q[log p(y | f)] [B] from y, mean and variance, all [B].
ExpectedLogProb = Callable[[Array, Array, Array], Array]
Scalar = Float[Array, ""] | float


class DualSites(NamedTuple):
    """The site of all points together, on K_zz^-1 u."""

    shift: Float[Array, " M"]
    precision: Float[Array, "M M"]

    @highest_precision
    def weights(self, whitener: Float[Array, "M M"]) -> Weights:
        """q(v) = N(0, I) times the site: shift P^T h, precision P^T W P."""
        return inducing.weights_of(whitener.T @ self.shift, whitener.T @ self.precision @ whitener)


class State(NamedTuple):
    """Parameters, the optimiser's state and the sites."""

    parameters: Parameters
    optimiser: optax.OptState
    sites: DualSites


class Info(NamedTuple):
    """The bound (to be raised) on log p(y), estimated from the batch."""

    bound: Float[Array, ""]


def zero_sites(inputs: Float[Array, "M D"]) -> DualSites:
    """Sites that say nothing: q is the prior."""
    count = inputs.shape[0]
    return DualSites(jnp.zeros(count, inputs.dtype), jnp.zeros((count, count), inputs.dtype))


def normal_noise(noise: Scalar) -> ExpectedLogProb:
    """E_q log N(y | f, s2) = -1/2 [ log 2 pi s2 + ((y - m)^2 + v) / s2 ]."""
    return lambda y, mean, variance: -0.5 * (jnp.log(2 * jnp.pi * noise) + ((y - mean) ** 2 + variance) / noise)


def elbo(
    weights: Weights, seen: View, y: Float[Array, " B"], expected: ExpectedLogProb, weight: Scalar = 1.0
) -> Float[Array, ""]:
    """weight sum_n E_q[log p(y_n | f_n)] - KL(q(v) || N(0, I)) (E1); of a batch with weight = N / B."""
    found = weights.predict(seen)
    return weight * jnp.sum(expected(y, found.mean, found.variance)) - weights.kl()


@highest_precision
def target_sites(
    weights: Weights, seen: View, y: Float[Array, " B"], expected: ExpectedLogProb, weight: Scalar = 1.0
) -> tuple[DualSites, Int[Array, ""]]:
    """(C1): W^ = -2 g_v, h^ = g_m + W^ m at every point, summed over the batch; and clips of W^ at 0.

    Only likelihoods that are not log-concave clip: their sites then rest on the Gauss-Newton side of the curvature.
    """
    found = weights.predict(seen)
    total = lambda mean, variance: jnp.sum(expected(y, mean, variance))  # noqa: E731
    slope, curvature = jax.grad(total, argnums=(0, 1))(found.mean, found.variance)
    precision = -2 * curvature
    clips = jnp.sum(precision < 0)
    precision = jnp.maximum(precision, 0.0)
    shift = slope + precision * (found.mean - seen.mean)
    spread = seen.cross.T * precision
    return DualSites(weight * (seen.cross.T @ shift), weight * (spread @ seen.cross)), clips


def natural_step(sites: DualSites, target: DualSites, rate: float) -> DualSites:
    """(C2): (1 - rho) sites + rho target, a step of length rho along the natural gradient."""
    return jax.tree.map(lambda old, new: (1 - rate) * old + rate * new, sites, target)


def init(optimiser: optax.GradientTransformation, parameters: Parameters) -> State:
    """Start from the prior."""
    return State(parameters, optimiser.init(parameters), zero_sites(parameters.inputs))


def step(
    process: InducingProcess,
    optimiser: optax.GradientTransformation,
    rate: float,
    state: State,
    x: Float[Array, "B D"],
    y: Float[Array, " B"],
    weight: Scalar = 1.0,
) -> tuple[State, Info]:
    """One natural-gradient step of the sites, then one step of the optimiser on the bound with the sites held."""
    sites = natural_step(state.sites, best_sites(process, state.parameters, x, y, weight), rate)
    value, slopes = jax.value_and_grad(lambda parameters: -bound(process, parameters, sites, x, y, weight))(
        state.parameters
    )
    changes, memory = optimiser.update(slopes, state.optimiser, state.parameters)
    return State(optax.apply_updates(state.parameters, changes), memory, sites), Info(-value)


def bound(
    process: InducingProcess,
    parameters: Parameters,
    sites: DualSites,
    x: Float[Array, "B D"],
    y: Float[Array, " B"],
    weight: Scalar = 1.0,
) -> Float[Array, ""]:
    """The ELBO of normal noise at the given sites (E1)."""
    whitener = process.whitening(parameters)
    seen = process.view(parameters, whitener, x)
    return elbo(sites.weights(whitener), seen, y, normal_noise(jnp.exp(parameters.log_noise)), weight)


@highest_precision
def best_sites(
    process: InducingProcess,
    parameters: Parameters,
    x: Float[Array, "B D"],
    y: Float[Array, " B"],
    weight: Scalar = 1.0,
) -> DualSites:
    """`target_sites` of normal noise, which no q enters: W^ = 1 / s2, h^ = y / s2 (P1). Of all points: the optimum."""
    cross = process.cross(parameters, x)
    precision = weight * jnp.exp(-parameters.log_noise)
    return DualSites(precision * (cross.T @ y), precision * (cross.T @ cross))


def predict(process: InducingProcess, state: State, x: Float[Array, "Q D"]) -> Prediction:
    """Marginals of f at new inputs."""
    whitener = process.whitening(state.parameters)
    return state.sites.weights(whitener).predict(process.view(state.parameters, whitener, x))


@partial(jax.jit, static_argnames=("process", "optimiser", "batch", "steps", "rate"))
def run(
    key: Key[Array, ""],
    process: InducingProcess,
    optimiser: optax.GradientTransformation,
    state: State,
    x: Float[Array, "N D"],
    y: Float[Array, " N"],
    batch: int,
    steps: int,
    rate: float = 0.1,
) -> tuple[State, Info]:
    """`steps` steps on batches drawn with replacement; a batch of N takes all points every time."""
    points = x.shape[0]

    def one(state: State, key: Array) -> tuple[State, Info]:
        rows = jnp.arange(points) if batch == points else jax.random.randint(key, (batch,), 0, points)
        return step(process, optimiser, rate, state, x[rows], y[rows], points / batch)

    return jax.lax.scan(one, state, jax.random.split(key, steps))
