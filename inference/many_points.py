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
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key, PyTree
from scipy.optimize import minimize

from fewshot.inference import sparse
from fewshot.models import regression
from fewshot.models.gaussian import GaussianPrior, Query, highest_precision
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
    """The rows that an exact posterior is about, and that posterior."""

    x: Float[Array, "N D"]
    posterior: Any


@dataclass(frozen=True)
class Exact:
    """The process itself, O(N^3) (P2)."""

    kernel: Kernel

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """No inducing points."""
        return InducingProcess(self.kernel).initial(x[:0])

    def prior(self, parameters: Parameters, x: Float[Array, "N D"]) -> GaussianPrior:
        """N(0, K) of weighted inputs."""
        weighted = parameters.weighted(x)
        return GaussianPrior(jnp.zeros((1, len(x)), x.dtype), self.kernel.gram(parameters.hyper, weighted, weighted))

    @highest_precision
    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """log p(y), as (G6) whose derivatives are in closed form."""
        noise = noise_of(parameters)
        sites = regression.noise_sites(y, noise)
        return self.prior(parameters, x).log_normaliser(sites) + regression.noise_scale(y, noise)

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """The posterior of f at the rows."""
        found = regression.regress(self.prior(parameters, x), y, noise_of(parameters))
        return Posterior(Rows(parameters.weighted(x), found.posterior), found.log_evidence)

    def predict(self, parameters: Parameters, state: Rows, x: Float[Array, "Q D"]) -> Prediction:
        """(G7)."""
        weighted, kernel, hyper = parameters.weighted(x), self.kernel, parameters.hyper
        level = jnp.zeros((1, len(x)), x.dtype)
        query = Query(level, kernel.gram(hyper, weighted, state.x), kernel.diagonal(hyper, weighted))
        return regression.predict(state.posterior, query)


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


def learn(
    method: Method, steps: int, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]
) -> tuple[Parameters, Float[Array, ""]]:
    """At most `steps` iterations of L-BFGS-B on -bound / N of all rows given; the parameters and their bound.

    The bound is not estimated from batches, so that curvature can be learned: Adam takes several times as many
    gradients. Logarithms stay within REACH of their start, that of the noise within NOISE.
    """
    start, rebuilt = ravel_pytree(parameters)
    free = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.inf), parameters)
    scales = jax.tree.map(lambda leaf: jnp.full_like(leaf, REACH), parameters)
    reach, _ = ravel_pytree(scales._replace(inputs=free.inputs))
    low, high = np.array(start - reach), np.array(start + reach)
    is_noise, _ = ravel_pytree(jax.tree.map(jnp.zeros_like, parameters)._replace(log_noise=jnp.ones_like(start[0])))
    noise = np.flatnonzero(np.asarray(is_noise))
    low[noise], high[noise] = NOISE

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _loss_and_slope(method, rebuilt(jnp.asarray(point, start.dtype)), x, y)
        return float(value), np.asarray(ravel_pytree(slope)[0], np.float64)

    bounds = list(zip(low, high, strict=True))
    end = minimize(
        loss, np.asarray(start, np.float64), jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps}
    )
    return rebuilt(jnp.asarray(end.x, start.dtype)), jnp.asarray(-end.fun * len(y))


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
