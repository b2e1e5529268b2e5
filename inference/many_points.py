"""Regression with many points (docs/sparse.md): how each method learns its model and what it keeps of the rows.

A method has a bound of log p(y) to learn by, `condition` to take in rows, and `predict`. A model seen through M
features keeps sums over the rows only (P10), so that its memory does not grow with their number.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree
from scipy.optimize import minimize

from fewshot.inference import sparse
from fewshot.models.gaussian import Observed, highest_precision, normal_log_density, observe
from fewshot.models.inducing import (
    InducingProcess,
    Parameters,
    Sums,
    View,
    Weights,
    fitc_evidence,
    sums_of,
    titsias_bound,
)
from fewshot.models.kernels import Kernel
from fewshot.models.random_features import RandomFourier
from fewshot.models.regression import Noise, Prediction

BLOCK = 2048  # rows whose features are held at once
# Of standardised targets: how far a logarithm may go from its start, and the logarithm of the noise variance.
REACH, NOISE = 9.2, (-13.8, 2.3)
AT_ONCE = 1000  # rows up to which an exact process learns from all of them in every iteration


class Posterior(NamedTuple):
    """What a method made of the rows: its state for `predict`, and the bound of log p(y) at them."""

    state: PyTree
    bound: Float[Array, ""]


@runtime_checkable
class Method(Protocol):
    """One way to do regression; hashable, since compiled functions are kept by it."""

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """Where learning starts, from standardised rows in random order."""
        ...

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """What learning raises: log p(y) or what stands for it."""
        ...

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """The posterior given rows."""
        ...

    def predict(self, parameters: Parameters, state: Any, x: Float[Array, "Q D"]) -> Prediction:
        """Marginals of f at new inputs."""
        ...


def noise_of(parameters: Parameters) -> Float[Array, ""]:
    """s2."""
    return jnp.exp(parameters.log_noise)


class Rows(NamedTuple):
    """The rows that an exact posterior is about, as the kernel sees them, and that posterior."""

    x: Float[Array, "N D"]
    observed: Observed


@dataclass(frozen=True)
class Exact:
    """The process itself, O(N^3) (P2)."""

    kernel: Kernel

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """No inducing points."""
        return InducingProcess(self.kernel).initial(x[:0])

    @highest_precision
    def noisy(self, parameters: Parameters, x: Float[Array, "N D"]) -> Float[Array, "N N"]:
        """A = K + s2 I of weighted inputs."""
        weighted = parameters.weighted(x)
        covariance = self.kernel.gram(parameters.hyper, weighted, weighted)
        return covariance + noise_of(parameters) * jnp.eye(len(x), dtype=covariance.dtype)

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """log p(y), whose derivatives are in closed form."""
        return normal_log_density(self.noisy(parameters, x), y)

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """The posterior of f at the rows."""
        found = observe(self.noisy(parameters, x), y)
        return Posterior(Rows(parameters.weighted(x), found), found.log_density)

    def predict(self, parameters: Parameters, state: Rows, x: Float[Array, "Q D"]) -> Prediction:
        """(G7)."""
        weighted, kernel, hyper = parameters.weighted(x), self.kernel, parameters.hyper
        cross = kernel.gram(hyper, weighted, state.x)
        return Prediction(*state.observed.predict(cross, kernel.diagonal(hyper, weighted)))


class Seen(NamedTuple):
    """Root P of the inducing variables ([0, 0] where the features need none), and the posterior of v."""

    whitener: Float[Array, "M M"]
    weights: Weights


@dataclass(frozen=True)
class Inducing:
    """Through `count` inducing points, which are learned; Titsias' bound, or FITC: O(N M^2) (P5, P6)."""

    process: InducingProcess
    count: int
    fitc: bool = False

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """Inducing points at the first rows: where the data are dense, while rows that lie apart seek out outliers."""
        return self.process.initial(x[: self.count])

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """(P5), or (P6)."""
        seen = self.process.view(parameters, self.process.whitening(parameters), x)
        return (fitc_evidence if self.fitc else titsias_bound)(seen, y, noise_of(parameters))

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """(P4) by sums over blocks of rows."""
        whitener = self.process.whitening(parameters)
        look = partial(self.process.view, parameters, whitener)
        return seen_rows(whitener, look, noise_of(parameters), x, y, self.fitc)

    def predict(self, parameters: Parameters, state: Seen, x: Float[Array, "Q D"]) -> Prediction:
        """phi.v + rest."""
        return state.weights.predict(self.process.view(parameters, state.whitener, x))


@dataclass(frozen=True)
class Features:
    """By random Fourier features, O(N M^2) (P9)."""

    features: RandomFourier

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """No inducing points."""
        return InducingProcess(self.features.base).initial(x[:0])

    def view(self, parameters: Parameters, x: Float[Array, "N D"]) -> View:
        """The features."""
        return self.features.view(parameters.hyper, parameters.weighted(x))

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """log p(y) of the process that the features are."""
        return titsias_bound(self.view(parameters, x), y, noise_of(parameters))

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """(P4) by sums over blocks of rows."""
        look = partial(self.view, parameters)
        return seen_rows(jnp.zeros((0, 0), x.dtype), look, noise_of(parameters), x, y, False)

    def predict(self, parameters: Parameters, state: Seen, x: Float[Array, "Q D"]) -> Prediction:
        """phi.v."""
        return state.weights.predict(self.view(parameters, x))


def seen_rows(
    whitener: Float[Array, "K K"],
    look: Callable[[Array], View],
    noise: Noise,
    x: Float[Array, "N D"],
    y: Float[Array, " N"],
    fitc: bool,
) -> Posterior:
    """Posterior and bound (P4 to P6) from sums over blocks of rows (P10): memory for one block and M^2 numbers.

    Rows that fill the last block up have no weight.
    """
    blocks = -(-len(x) // BLOCK)
    filling = blocks * BLOCK - len(x)
    parts = (jnp.pad(x, ((0, filling), (0, 0)), mode="edge"), jnp.pad(y, (0, filling)))
    real = jnp.arange(blocks * BLOCK) < len(x)
    blocked = [part.reshape(blocks, BLOCK, *part.shape[1:]) for part in (*parts, real)]

    def one(rows: Array, targets: Array, present: Array) -> Sums:
        seen = look(rows)
        return sums_of(seen, targets, noise + (seen.rest if fitc else 0.0), present)

    first, rest = one(*(part[0] for part in blocked)), tuple(part[1:] for part in blocked)
    total, _ = jax.lax.scan(lambda carry, block: (carry.plus(one(*block)), None), first, rest)
    bound = total.log_density() - (0.0 if fitc else 0.5 * total.rest)
    return Posterior(Seen(whitener, total.weights()), bound)


def stages(rows: int, steps: int) -> list[tuple[int, int]]:
    """(rows, iterations) of learning that costs the cube of the rows: most of the way on few, the end on all.

    Above AT_ONCE rows a quarter, a half and all of them have 5/8, 2/8 and 1/8 of the iterations (docs/sparse.md).
    """
    if rows <= AT_ONCE:
        return [(rows, steps)]
    return [(rows // 4, -(-5 * steps // 8)), (rows // 2, -(-steps // 4)), (rows, -(-steps // 8))]


def learn(
    method: Method, steps: int, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]
) -> tuple[Parameters, Float[Array, ""]]:
    """At most `steps` iterations of L-BFGS-B on -bound / N of all rows given; the parameters and their bound.

    The bound is not estimated from batches, so that curvature can be learned: Adam takes several times as many
    gradients. Logarithms stay within REACH of their start, that of the noise within NOISE.
    """
    leaves, tree = jax.tree.flatten(jax.tree.map(np.asarray, parameters))
    ends = np.cumsum([leaf.size for leaf in leaves])

    def rebuilt(point: np.ndarray) -> Parameters:
        parts = np.split(point, ends[:-1])
        same = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
        return jax.tree.unflatten(tree, same)

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = jax.device_get(_loss_and_slope(method, rebuilt(point), x, y))
        return float(value), _flat(slope)

    reach = jax.tree.map(lambda leaf: np.full_like(leaf, REACH), jax.tree.unflatten(tree, leaves))
    far = _flat(reach._replace(inputs=np.full_like(parameters.inputs, np.inf)))
    start = _flat(jax.tree.unflatten(tree, leaves))
    is_noise = _flat(jax.tree.map(np.zeros_like, reach)._replace(log_noise=np.ones(()))) > 0
    low, high = np.where(is_noise, NOISE[0], start - far), np.where(is_noise, NOISE[1], start + far)
    bounds = list(zip(low, high, strict=True))
    end = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})
    return jax.tree.map(jnp.asarray, rebuilt(end.x)), jnp.asarray(-end.fun * len(y))


def _flat(parameters: Parameters) -> np.ndarray:
    """All numbers in one vector of double precision; on the host, where nothing is compiled for it."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(parameters)]).astype(np.float64)


@partial(jax.jit, static_argnames=("method",))
def _loss_and_slope(method: Method, parameters: Parameters, x: Array, y: Array) -> tuple[Array, Parameters]:
    return jax.value_and_grad(lambda moved: -method.bound(moved, x, y) / len(y))(parameters)


@cache
def falling_adam(steps: int, rate: float) -> optax.GradientTransformation:
    """Adam whose rate falls to 0 as a cosine; one object for equal numbers, so that nothing is compiled again."""
    return optax.adam(optax.cosine_decay_schedule(rate, steps))


def learn_from_batches(
    key: Key[Array, ""],
    process: InducingProcess,
    steps: int,
    rate: float,
    parameters: Parameters,
    x: Float[Array, "N D"],
    y: Float[Array, " N"],
    batch: int,
) -> tuple[Parameters, Float[Array, " steps"]]:
    """Natural-gradient steps of q(u) and Adam on batches (P8); the parameters and the bound before every step."""
    optimiser = falling_adam(steps, rate)
    state = sparse.init(optimiser, parameters)
    state, info = sparse.run(key, process, optimiser, state, x, y, min(batch, len(y)), steps)
    return state.parameters, info.bound


@partial(jax.jit, static_argnames=("method",))
def condition(method: Method, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
    """`method.condition`, compiled."""
    return method.condition(parameters, x, y)


@partial(jax.jit, static_argnames=("method",))
def predict(method: Method, parameters: Parameters, state: PyTree, x: Float[Array, "Q D"]) -> Prediction:
    """Marginals of y = f + noise at new inputs, compiled."""
    return method.predict(parameters, state, x).noisy(noise_of(parameters))


@partial(jax.jit, static_argnames=("method",))
def predict_mean(method: Method, parameters: Parameters, state: PyTree, x: Float[Array, "Q D"]) -> Float[Array, " Q"]:
    """The means alone, compiled: what only the variances need is left out."""
    return method.predict(parameters, state, x).mean
