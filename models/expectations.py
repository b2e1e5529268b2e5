"""E_q[g(f)] over independent normal logits: sampled, product Gauss-Hermite, and the exact route for log-sum-exp.

An *expectation rule* turns a key and a number of classes into `Points`, nodes shared by all labelled points of a task
(common random numbers), or into None where a likelihood's own deterministic formula is wanted.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.gaussian import JointMarginals, Marginals, highest_precision
from fewshot.models.gaussian.factors import standard_deviation

FEW_POINTS = 16  # the width of the widest vector instructions, in float32


class Points(NamedTuple):
    """Nodes z [M, C] and weights [M] with E[g(z)] = sum_m weights_m g(z_m) for z ~ N(0, I)."""

    nodes: Float[Array, "M C"]
    weights: Float[Array, " M"]


@runtime_checkable
class ExpectationRule(Protocol):
    """What an inference kernel takes as `expectation`."""

    def points(self, key: Key[Array, ""], classes: int, dtype: DTypeLike) -> Points | None:
        """Nodes for one task, or None for the likelihood's deterministic formula."""
        ...


@dataclass(frozen=True)
class MonteCarlo:
    """Antithetic, randomly shifted Sobol points: unbiased, with far less noise than independent draws."""

    draws: int = 256

    def __post_init__(self) -> None:
        if self.draws < 2 or self.draws % 2:
            raise ValueError(
                f"MonteCarlo needs an even number of draws (they come in antithetic pairs), got {self.draws}"
            )

    def points(self, key: Key[Array, ""], classes: int, dtype: DTypeLike = jnp.float32) -> Points:
        """z [M, C], first half and its mirror image."""
        half = self.draws // 2
        shifted = jnp.asarray(_sobol(half, classes), dtype) + jax.random.uniform(key, (classes,), dtype)
        # The centre of the cells keeps the uniforms away from 0 and 1 in every precision.
        uniform = jnp.clip(shifted % 1.0, 0.5 / 2**20, 1 - 0.5 / 2**20)
        nodes = ndtri(uniform)
        return Points(jnp.concatenate([nodes, -nodes]), jnp.full((self.draws,), 1 / self.draws, dtype))


@dataclass(frozen=True)
class GaussHermite:
    """Product Gauss-Hermite rule: order^C nodes, for C <= 3."""

    order: int = 20

    def points(self, key: Key[Array, ""], classes: int, dtype: DTypeLike = jnp.float32) -> Points:
        """z [order^C, C]; the key is not used."""
        del key
        if classes > 3:
            raise ValueError(
                f"GaussHermite is a product rule for at most 3 classes, got {classes}; use MonteCarlo or Exact"
            )
        return product_rule(self.order, classes, dtype)


@dataclass(frozen=True)
class Exact:
    """The likelihood's own deterministic formula: closed form, or one-dimensional sums to rounding."""

    def points(self, key: Key[Array, ""], classes: int, dtype: DTypeLike = jnp.float32) -> None:
        """No nodes."""
        del key, classes, dtype


@functools.cache
def _sobol(count: int, classes: int) -> np.ndarray:
    """First `count` points of the Sobol sequence in C dimensions (a power of two is balanced)."""
    from scipy.stats import qmc

    return qmc.Sobol(classes, scramble=False).random_base2(math.ceil(math.log2(count)))[:count]


def product_rule(order: int, dimensions: int, dtype: DTypeLike) -> Points:
    """Product Gauss-Hermite rule for N(0, I): order^dimensions nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack(np.meshgrid(*[nodes] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    product = np.prod(np.meshgrid(*[weights / weights.sum()] * dimensions, indexing="ij"), axis=0).reshape(-1)
    return Points(jnp.asarray(grid, dtype), jnp.asarray(product, dtype))


@highest_precision
def expect(function: Callable[[Array], Array], marginals: Marginals | JointMarginals, points: Points) -> Array:
    """E_q[function(f)] for f [C, N], independent or coupled between classes; function maps [C, N] to any array.

    Compilers for processors make vector instructions of the last axes: of few points these are nodes and points.
    """
    if marginals.mean.shape[1] <= FEW_POINTS:
        values = jax.vmap(function, in_axes=1)(marginals.at(points.nodes))
    else:
        at_node = marginals.at_node()
        values = jax.vmap(lambda node: function(at_node(node)))(points.nodes)
    return jnp.tensordot(points.weights, values, 1)


def expected_log_sum_exp(marginals: Marginals, classes: Bool[Array, " C"] | None = None) -> Float[Array, " N"]:
    """E log sum_c exp f_c for independent normal f_c, by one-dimensional sums.

    With G standard Gumbel, log-sum-exp(f) + G is distributed as max_c (f_c + G_c), so its distribution function is
    F(t) = prod_c H_c(t), H_c(t) = E exp(-exp(f_c - t)), and the wanted mean is the mean of F less Euler's constant.
    The trapezoidal rule converges geometrically: with spacing d its error is of order exp(-pi^2 / d), the decay of the
    Gumbel's characteristic function. About 1e-10 in float64 up to a standard deviation of 3. The gradient in the mean
    is E[softmax(f)].
    """
    grid, spacing = _maximum_grid(marginals, classes)
    log_factors = _log_gumbel_cdf(grid[:, None, :] - marginals.mean, standard_deviation(marginals.variance))
    if classes is not None:
        log_factors = jnp.where(classes[:, None], log_factors, 0.0)
    cumulative = jnp.exp(jnp.sum(log_factors, axis=1))
    # mean of F = top - integral of F below the top of the grid, where F is 1 to rounding
    top = grid[-1] + 0.5 * spacing
    return top - spacing * jnp.sum(cumulative, axis=0) - np.euler_gamma


def expected_log_sigmoid(mean: Float[Array, "C N"], variance: Float[Array, "C N"]) -> Float[Array, "C N"]:
    """E log s(f) = -E log(1 + exp(-f)) for normal f: log-sum-exp over two classes, one of them certain."""
    flat = -jnp.ravel(mean)
    two = Marginals(jnp.stack([flat, jnp.zeros_like(flat)]), jnp.stack([jnp.ravel(variance), jnp.zeros_like(flat)]))
    return -expected_log_sum_exp(two).reshape(mean.shape)


def expected_log_sum_sigmoid(marginals: Marginals, classes: Bool[Array, " C"] | None = None) -> Float[Array, " N"]:
    """E log sum_c s(f_c) for independent normal f_c, by one-dimensional sums.

    With log S = int (exp(-t) - exp(-t S)) / t dt and t = e^u, E log S = int exp(-e^u) - prod_c E exp(-e^u s(f_c)) du;
    both integrals by the trapezoidal rule. To 1e-9 in float64 up to a standard deviation of 8.
    """
    double = marginals.mean.dtype == jnp.float64
    left, count = (30.0, 400) if double else (17.0, 160)
    reach, nodes = (8.5, 401) if double else (5.6, 121)
    mean, deviation = marginals.mean, standard_deviation(marginals.variance)
    lowest = mean - reach * deviation
    if classes is not None:
        lowest = jnp.where(classes[:, None], lowest, -jnp.inf)
    top = jax.lax.stop_gradient(4.5 + jax.nn.softplus(-jnp.max(lowest, axis=0)))
    spacing = (top + left) / (count - 1)
    rates = jnp.exp(-left + spacing * jnp.arange(count, dtype=mean.dtype)[:, None])  # e^u [G, N]

    def over_normal(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = pair
        # 1 - exp(-t s): the difference from 1 is what the integral is made of where t is small
        return total - weight * jnp.expm1(-rates[:, None] * jax.nn.sigmoid(mean + deviation * node)), None

    z = np.linspace(-reach, reach, nodes)
    weights = np.exp(-0.5 * z**2)
    rule = jnp.asarray(z, mean.dtype), jnp.asarray(weights / weights.sum(), mean.dtype)
    missing, _ = jax.lax.scan(over_normal, jnp.zeros((count, *mean.shape), mean.dtype), rule)
    logs = jnp.log1p(-jnp.minimum(missing, 1.0 - jnp.finfo(mean.dtype).epsneg))
    if classes is not None:
        logs = jnp.where(classes[:, None], logs, 0.0)
    return spacing * jnp.sum(jnp.expm1(-rates) - jnp.expm1(jnp.sum(logs, axis=1)), axis=0)


def _maximum_grid(marginals: Marginals, classes: Array | None) -> tuple[Array, Array]:
    """Grid t [G, N] and its spacing [N] over the support of max_c (f_c + Gumbel), to the rounding of the dtype."""
    double = marginals.mean.dtype == jnp.float64
    tail, count = (30.0, 400) if double else (17.0, 160)
    deviations = 8.5 if double else 5.6
    mean, spread = marginals.mean, deviations * jnp.sqrt(marginals.variance)
    if classes is not None:
        mean = jnp.where(classes[:, None], mean, -jnp.inf)
    bottom = jnp.max(mean - spread, axis=0) - 4.5
    top = jnp.max(mean + spread, axis=0) + tail
    bottom, top = jax.lax.stop_gradient((bottom, top))
    spacing = (top - bottom) / (count - 1)
    return bottom + spacing * jnp.arange(count, dtype=mean.dtype)[:, None], spacing


def _log_gumbel_cdf(threshold: Array, deviation: Array) -> Array:
    """log P(deviation z + Gumbel <= threshold): sums over z where the normal is narrow, over the Gumbel else."""
    double = threshold.dtype == jnp.float64
    wide = jax.lax.stop_gradient(deviation) > 1.0
    narrow_deviation, wide_deviation = jnp.where(wide, 1.0, deviation), jnp.where(wide, deviation, 1.0)
    nodes, weights = _normal_trapezoid(threshold.dtype, double)

    def over_normal(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = pair
        return total + weight * jnp.exp(-jnp.exp(jnp.minimum(narrow_deviation * node - threshold, 80.0))), None

    def over_gumbel(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = pair
        return total + weight * jax.scipy.special.ndtr((threshold - node) / wide_deviation), None

    zero = jnp.zeros(jnp.broadcast_shapes(threshold.shape, deviation.shape), threshold.dtype)
    narrow, _ = jax.lax.scan(over_normal, zero, (nodes, weights))
    broad, _ = jax.lax.scan(over_gumbel, zero, _gumbel_trapezoid(threshold.dtype, double))
    tiny = jnp.finfo(threshold.dtype).tiny
    return jnp.log(jnp.maximum(jnp.where(wide, broad, narrow), tiny))


def _normal_trapezoid(dtype: DTypeLike, double: bool) -> tuple[Array, Array]:
    nodes = np.linspace(-8.5, 8.5, 61) if double else np.linspace(-5.6, 5.6, 25)
    weights = np.exp(-0.5 * nodes**2)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)


def _gumbel_trapezoid(dtype: DTypeLike, double: bool) -> tuple[Array, Array]:
    nodes = np.linspace(-3.8, 34.0, 109) if double else np.linspace(-3.2, 17.0, 35)
    weights = np.exp(-nodes - np.exp(-nodes))
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)
