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


class _Fineness(NamedTuple):
    """Of sums over a maximum of normals plus Gumbels: nodes of its grid, and of what is summed at each of them.

    Where the grid ends beyond the largest class, how many nodes it has, deviations below, and the scale of its spacing;
    first, last and number of nodes of a normal and of a Gumbel.
    """

    tail: float
    nodes: int
    deviations: float
    scale: float
    normal: tuple[float, float, int]
    gumbel: tuple[float, float, int]


DOUBLE = _Fineness(30.0, 400, 8.5, 25.0, (-8.5, 8.5, 61), (-3.8, 34.0, 109))
SINGLE = _Fineness(17.0, 160, 5.6, 15.0, (-5.6, 5.6, 25), (-3.2, 17.0, 35))
COARSE = _Fineness(14.0, 96, 5.6, 15.0, (-5.4, 5.4, 19), (-3.0, 15.0, 26))  # for probabilities, in float32


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
                f"GaussHermite is a product rule for at most 3 classes, got {classes}; use MonteCarlo or Exact, and "
                "fixed_points in a likelihood without a formula"
            )
        return product_rule(self.order, classes, dtype)


@dataclass(frozen=True)
class Exact:
    """The likelihood's own deterministic formula: closed form, or one-dimensional sums to rounding."""

    def points(self, key: Key[Array, ""], classes: int, dtype: DTypeLike = jnp.float32) -> None:
        """No nodes."""
        del key, classes, dtype


def fixed_points(classes: int, dtype: DTypeLike = jnp.float32) -> Points:
    """Nodes that are always the same, for a likelihood that has no formula of its own to be `Exact` with.

    Of up to three classes 24 Gauss-Hermite nodes each, of more 8,192 Sobol points.
    """
    rule: ExpectationRule = GaussHermite(24) if classes <= 3 else MonteCarlo(8192)
    found = rule.points(jax.random.key(0), classes, dtype)
    assert found is not None
    return found


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
    F(t) = prod_c H_c(t), H_c(t) = E exp(-exp(f_c - t)), and the wanted mean is the mean of F less Euler's constant:
    that of a normal distribution function G less the integral of F - G, which vanishes at both ends. The trapezoidal
    rule converges geometrically: with spacing d its error is of order exp(-pi^2 / d), the decay of the Gumbel's
    characteristic function. The gradient in the mean is E[softmax(f)].

    Accuracy at any mixture of standard deviations from 0 to 100 (measured, docs/softmax.md): 1e-10 in float64, in
    float32 3e-6 of the largest |mean| or standard deviation.
    """
    fineness = DOUBLE if marginals.mean.dtype == jnp.float64 else SINGLE
    grid, slope, reference = _maximum_grid(marginals, classes, fineness)
    log_factors = _log_gumbel_cdf(grid[:, None, :] - marginals.mean, standard_deviation(marginals.variance), fineness)
    if classes is not None:
        log_factors = jnp.where(classes[:, None], log_factors, 0.0)
    cumulative = jnp.exp(jnp.sum(log_factors, axis=1))
    centre, width = reference
    return centre - jnp.sum(slope * (cumulative - jax.scipy.special.ndtr((grid - centre) / width)), 0) - np.euler_gamma


def expected_softmax(marginals: Marginals, classes: Bool[Array, " C"] | None = None) -> Float[Array, "C N"]:
    """E softmax_k(f) for independent normal f_c, by one-dimensional sums; they add up to 1.

    It is the probability that f_k + G_k is the largest (`expected_log_sum_exp`): int h_k(t) prod_{c != k} H_c(t) dt
    with h the density of H. In float64 logarithms are within 1e-9; in float32 (measured, docs/softmax.md) within 3e-4
    where a probability is above 1e-3, and within 0.03 above 1e-5.
    """
    fineness = DOUBLE if marginals.mean.dtype == jnp.float64 else COARSE
    real = marginals.mean if classes is None else jnp.where(classes[:, None], marginals.mean, -jnp.inf)
    largest = jax.lax.stop_gradient(jnp.max(real, axis=0))  # 0 of them, so that the grid keeps its digits
    marginals = marginals._replace(mean=marginals.mean - largest)
    grid, slope, _ = _maximum_grid(marginals, classes, fineness)
    threshold, deviation = grid[:, None, :] - marginals.mean, standard_deviation(marginals.variance)
    cumulative, density = _gumbel(threshold, deviation, fineness, with_density=True)
    logs = jnp.log(jnp.maximum(cumulative, jnp.finfo(grid.dtype).tiny))
    if classes is not None:
        logs, density = jnp.where(classes[:, None], logs, 0.0), jnp.where(classes[:, None], density, 0.0)
    others = jnp.exp(jnp.sum(logs, axis=1, keepdims=True) - logs)
    found = jnp.sum(slope[:, None] * density * others, axis=0)
    return found / jnp.sum(found, axis=0)


def expected_log_sigmoid(mean: Float[Array, "C N"], variance: Float[Array, "C N"]) -> Float[Array, "C N"]:
    """E log s(f) = -E log(1 + exp(-f)) for normal f, by one-dimensional sums.

    log(1 + exp(x)) is E max(x, L) for a standard logistic L. Where f is wide, with standard deviation v, the sum is
    over L, of E max(-f, L) = L + (-m - L) Phi(r) + v phi(r) with r = (-m - L) / v; where it is narrow, over f. At
    standard deviations from 0 to 100 (measured) within 1e-12 in float64, in float32 3e-7 of the largest of |mean|, v
    and 1.
    """
    double = mean.dtype == jnp.float64
    deviation = standard_deviation(variance)
    wide = jax.lax.stop_gradient(deviation) > 1.0
    narrow_deviation, wide_deviation = jnp.where(wide, 1.0, deviation), jnp.where(wide, deviation, 1.0)
    z, weights = _normal_trapezoid(mean.dtype, DOUBLE if double else SINGLE)
    levels = np.linspace(-40.0, 40.0, 161) if double else np.linspace(-19.0, 19.0, 61)
    share = 0.25 / np.cosh(0.5 * levels) ** 2
    above = -mean - jnp.asarray(levels, mean.dtype)[:, None, None]  # how far -f lies above L in the mean
    ratio = above / wide_deviation
    density = jnp.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    excess = above * jax.scipy.special.ndtr(ratio) + wide_deviation * density  # E max(-f - L, 0); E L = 0
    broad = jnp.tensordot(jnp.asarray(share / share.sum(), mean.dtype), excess, 1)
    narrow = jnp.tensordot(weights, jax.nn.softplus(-mean - narrow_deviation * z[:, None, None]), 1)
    return -jnp.where(wide, broad, narrow)


def expected_log_sum_sigmoid(marginals: Marginals, classes: Bool[Array, " C"] | None = None) -> Float[Array, " N"]:
    """E log sum_c s(f_c) for independent normal f_c, by one-dimensional sums.

    With log S = int (exp(-t) - exp(-t S)) / t dt and t = e^u, E log S = int exp(-e^u) - prod_c E exp(-e^u s(f_c)) du;
    both integrals by the trapezoidal rule. At standard deviations from 0 to 100 (measured, docs/logistic_softmax.md)
    within 1e-9 in float64, in float32 3e-6 of the largest of |mean|, standard deviation and 1.
    """
    mean, deviation = marginals.mean, standard_deviation(marginals.variance)
    grid, slope = _laplace_grid(marginals, classes)
    logs = _log_laplace_of_sigmoid(grid, mean, deviation)
    if classes is not None:
        logs = jnp.where(classes[:, None], logs, 0.0)
    rates = jnp.exp(jnp.minimum(grid, 80.0))
    return jnp.sum(slope * (jnp.expm1(-rates) - jnp.expm1(jnp.sum(logs, axis=1))), axis=0)


def _laplace_grid(marginals: Marginals, classes: Array | None) -> tuple[Array, Array]:
    """Grid u [G, N] and its slope: from where e^u is 0 to where exp(-e^u s(f)) is, finer at both ends.

    Beyond its ends at distance D only classes whose deviation is of the order of D change anything.
    """
    double = marginals.mean.dtype == jnp.float64
    left, count, reach, fine = (30.0, 800, 8.5, 10.0) if double else (17.0, 320, 5.6, 6.0)
    lowest = marginals.mean - reach * standard_deviation(marginals.variance)
    if classes is not None:
        lowest = jnp.where(classes[:, None], lowest, -jnp.inf)
    top = jax.lax.stop_gradient(4.5 + jax.nn.softplus(-jnp.max(lowest, axis=0)))
    begin, whole = -left - fine, top + left + 2 * fine
    edge = jnp.log(whole / fine - 1.0)  # u = begin + whole / (1 + e^-s), s from -edge to edge
    s = jnp.linspace(-1.0, 1.0, count, dtype=top.dtype)[:, None] * edge
    share = jax.nn.sigmoid(s)
    return begin + whole * share, whole * share * (1.0 - share) * 2.0 * edge / (count - 1)


def _log_laplace_of_sigmoid(grid: Array, mean: Array, deviation: Array) -> Array:
    """log E exp(-e^u s(f)) [G, C, N] at u [G, N]: sums over f where it is narrow, by parts over its range else."""
    double = mean.dtype == jnp.float64
    wide = jax.lax.stop_gradient(deviation) > 1.0
    narrow_deviation, wide_deviation = jnp.where(wide, 1.0, deviation), jnp.where(wide, deviation, 1.0)
    u = grid[:, None, :]

    def missing(f: Array) -> Array:
        """1 - exp(-e^u s(f)): the difference from 1 is what the integral is made of where e^u is small."""
        return -jnp.expm1(-jnp.exp(jnp.minimum(u + jax.nn.log_sigmoid(f), 80.0)))

    def over_normal(total: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        node, weight = pair
        return total + weight * missing(mean + narrow_deviation * node), None

    tail, spacing, nodes = (34.0, 0.36, 220) if double else (17.0, 0.6, 68)
    first = -jax.nn.softplus(u) - tail

    def over_range(total: Array, number: Array) -> tuple[Array, None]:
        x = first + spacing * number
        rate = jnp.minimum(u + jax.nn.log_sigmoid(x), 80.0)
        slope = jnp.exp(rate - jnp.exp(rate) + jax.nn.log_sigmoid(-x))  # of `missing` in f
        return total + spacing * slope * jax.scipy.special.ndtr((mean - x) / wide_deviation), None

    zero = jnp.zeros(jnp.broadcast_shapes(u.shape, mean.shape), mean.dtype)
    narrow, _ = jax.lax.scan(over_normal, zero, _normal_trapezoid(mean.dtype, DOUBLE if double else SINGLE))
    broad, _ = jax.lax.scan(over_range, zero, jnp.arange(nodes, dtype=mean.dtype))
    return jnp.log1p(-jnp.minimum(jnp.where(wide, broad, narrow), 1.0 - jnp.finfo(mean.dtype).epsneg))


def _maximum_grid(
    marginals: Marginals, classes: Array | None, fineness: _Fineness
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Grid t [G, N] over the support of max_c (f_c + Gumbel), its slope, and the normal G: centre [N] and width.

    Where it begins the narrowest class may; at a distance D only classes are left whose deviation is of the order of D.
    So the spacing grows in proportion: t = bottom + scale (e^s - 1).
    """
    tail, count, deviations, scale, _, _ = fineness
    mean, spread = marginals.mean, deviations * jnp.sqrt(marginals.variance)
    if classes is not None:
        mean = jnp.where(classes[:, None], mean, -jnp.inf)
    bottom = jnp.max(mean - spread, axis=0) - 4.5
    top = jnp.max(mean + spread, axis=0) + tail
    bottom, top = jax.lax.stop_gradient((bottom, top))
    step = jnp.log1p((top - bottom) / scale) / (count - 1)
    s = step * jnp.arange(count, dtype=mean.dtype)[:, None]
    middle = 0.5 * (4.5 + tail)
    reference = bottom + middle, jnp.asarray(middle / deviations, mean.dtype)
    return bottom + scale * jnp.expm1(s), scale * step * jnp.exp(s), reference


def _log_gumbel_cdf(threshold: Array, deviation: Array, fineness: _Fineness) -> Array:
    """log P(deviation z + Gumbel <= threshold)."""
    cumulative, _ = _gumbel(threshold, deviation, fineness, with_density=False)
    return jnp.log(jnp.maximum(cumulative, jnp.finfo(threshold.dtype).tiny))


def _gumbel(threshold: Array, deviation: Array, fineness: _Fineness, with_density: bool) -> tuple[Array, Array]:
    """P(deviation z + Gumbel <= threshold), and its density there or 0.

    Sums over z where the normal is narrow, over the Gumbel else.
    """
    wide = jax.lax.stop_gradient(deviation) > 1.0
    narrow_deviation, wide_deviation = jnp.where(wide, 1.0, deviation), jnp.where(wide, deviation, 1.0)

    def over_normal(total: tuple[Array, Array], pair: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        node, weight = pair
        rate = jnp.exp(jnp.minimum(narrow_deviation * node - threshold, 80.0))
        below = weight * jnp.exp(-rate)
        return (total[0] + below, total[1] + below * rate if with_density else total[1]), None

    def over_gumbel(total: tuple[Array, Array], pair: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        node, weight = pair
        ratio = (threshold - node) / wide_deviation
        cumulative = total[0] + weight * jax.scipy.special.ndtr(ratio)
        if not with_density:
            return (cumulative, total[1]), None
        return (
            cumulative,
            total[1] + weight * jnp.exp(-0.5 * ratio**2) / (math.sqrt(2 * math.pi) * wide_deviation),
        ), None

    whole = jnp.zeros(jnp.broadcast_shapes(threshold.shape, deviation.shape), threshold.dtype)
    zero = whole, whole if with_density else jnp.zeros((), threshold.dtype)
    narrow, _ = jax.lax.scan(over_normal, zero, _normal_trapezoid(threshold.dtype, fineness))
    broad, _ = jax.lax.scan(over_gumbel, zero, _gumbel_trapezoid(threshold.dtype, fineness))
    return jnp.where(wide, broad[0], narrow[0]), jnp.where(wide, broad[1], narrow[1])


def _normal_trapezoid(dtype: DTypeLike, fineness: _Fineness) -> tuple[Array, Array]:
    nodes = np.linspace(*fineness.normal)
    weights = np.exp(-0.5 * nodes**2)
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)


def _gumbel_trapezoid(dtype: DTypeLike, fineness: _Fineness) -> tuple[Array, Array]:
    nodes = np.linspace(*fineness.gumbel)
    weights = np.exp(-nodes - np.exp(-nodes))
    return jnp.asarray(nodes, dtype), jnp.asarray(weights / weights.sum(), dtype)
