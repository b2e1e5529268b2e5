"""Draws of Polya-Gamma variables: `sample_polya_gamma` in polya_gamma.py is their use.

Let c = |z|/2 and x = 4 w. With b = 1,

    p(x) = 2 cosh(c) exp(-c^2 x/2) r(x) (2 pi x^3)^-1/2 exp(-1/(2x)),   r(x) = sum_n (-1)^n (2n + 1) exp(-2n(n + 1)/x)

(Polson, Scott & Windle 2013, their series for J*(1, c)). So an inverse Gaussian of mean 1/d and shape 1 is a proposal;
one with d^2 = c^2 + delta is accepted with probability r(x) exp(delta x/2) / sup_x(...), 0.85 at z = 0 and 1 for large
|z|: two uniforms a try, no branch. r is evaluated to rounding by this series or its theta dual, so nothing else is
needed. Sums of such draws serve integers b, a series of gamma variables with a remainder any other. One call handles
any mixture of b, and a batch of calls is one (rejection.py).
"""

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from fewshot.models.rejection import Stream, Try, as_one_array, sums

_TERMS = 16  # of the sum of gammas, before its remainder
_BLOCK = 64  # entries whose remainders are computed together
_REMAINDER_ONLY = 1000  # above this b the remainder is the whole sum
_MANY, _BEYOND = (
    16,
    np.uint32(1 << 31),
)  # draws of an entry that all lanes take part in; the first number of a stream beyond them
_DELTA, _BOUND = 0.7, (0.2535, 0.27)  # of the proposal: the largest delta, and log sup_x <= delta (.2535 + .27 delta)
_PI2 = math.pi**2
_LEGENDRE = tuple((float(x + 1) / 2, float(w) / 2) for x, w in zip(*np.polynomial.legendre.leggauss(6), strict=True))


@as_one_array
def draws_of_one(source: Stream, c: Float[Array, " n"]) -> Float[Array, " n"]:
    """PG(1, 2c)."""
    return sums(_INVERSE_GAUSSIAN, source, jnp.ones(c.shape, jnp.int32), (c,)) / 4


@as_one_array
def draws_of(
    exact: Stream, series: Stream, counts: Int[Array, " n"], b: Float[Array, " n"], c: Float[Array, " n"]
) -> Float[Array, " n"]:
    """PG(counts, 2c) by sums of draws, plus PG(b, 2c) by a series of gamma variables; PG(0, .) = 0.

    The first _MANY draws of a sum are made by all lanes. Where nothing is left to do the rest costs nothing.
    """
    most = jnp.minimum(counts, _MANY)
    found = sums(_INVERSE_GAUSSIAN, exact, most, (c,)) / 4
    beyond = exact._replace(number=exact.number + _BEYOND)

    def add_draws(found: Array) -> Array:
        return found + sums(_INVERSE_GAUSSIAN, beyond, counts - most, (c,), few=True) / 4

    def add_gammas(found: Array) -> Array:
        return found + _sum_of_gammas(series, b, c)

    found = lax.cond(jnp.any(counts > _MANY), add_draws, lambda found: found, found)
    return lax.cond(jnp.any(b > 0), add_gammas, lambda found: found, found)


def _try(
    uniforms: Sequence[Float[Array, " n"]], draw: Array, c: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """One proposal x for each c and whether it is accepted.

    x is the smaller root of (d x - 1)^2 / x = y, y = N(0, 1)^2, with probability 1/(1 + d x), else the larger one
    (Michael, Schucany & Haas 1976). Accepted with probability r(x) exp(delta x/2) over a bound of its supremum.
    """
    delta = _DELTA * jnp.exp(-0.75 * c * c)
    d = jnp.maximum(c, jnp.sqrt(jnp.minimum(c, 1e3) ** 2 + delta))
    del draw
    first, second = uniforms
    y = 2 * lax.erf_inv(first) ** 2
    x = 2 / (2 * d + y + jnp.sqrt(y * (y + 4 * d)))
    ratio = d * x
    scaled = second * (1 + ratio)
    smaller = scaled < 1
    uniform = jnp.where(smaller, scaled, (scaled - 1) / ratio)  # what is left of it is uniform again
    x = jnp.where(smaller, x, 1 / (d * ratio))
    rejected = uniform * jnp.exp(delta * (_BOUND[0] + _BOUND[1] * delta - x / 2)) >= _ratio(x)
    return x, ~rejected  # this way around a NaN ends the loop


def _ratio(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """r(x) = sum_n (-1)^n (2n+1) q^(n(n+1)/2), q = exp(-4/x); above x = 2 by its theta dual. Errors below 2e-16."""
    left = x < 2
    e = jnp.exp(jnp.where(left, -4 / x, 0.5 / x - _PI2 / 8 * x))
    e3 = e * e * e
    series = 1 - 3 * e + e3 * (5 - e3 * (7 - e3 * e * (9 - e3 * e * e * 11)))
    dual = (math.pi / 2) ** 1.5 * x * jnp.sqrt(x) * e
    if x.dtype == jnp.float64:
        dual *= 1 - 3 * jnp.exp(-_PI2 * x)
        series += 13 * jnp.exp(-84 / x)
    return jnp.where(left, series, dual)


def _sum_of_gammas(source: Stream, b: Float[Array, " n"], c: Float[Array, " n"]) -> Float[Array, " n"]:
    """PG(b, 2c) by `_TERMS` gamma variables and a remainder; 0 where b = 0."""
    squared = (c / math.pi) ** 2
    terms = jnp.where(b > _REMAINDER_ONLY, 0, _TERMS)
    shift, shape, scale = _in_blocks(_remainder, b, jnp.sqrt(squared), terms)
    wanted = jnp.where(b > 0, terms + 1, 0)
    found = sums(_GAMMA, source, wanted, (b, squared, terms.astype(b.dtype), shape, scale), few=True)
    return found + jnp.where(b > 0, shift, 0.0)


def _try_gamma(
    uniforms: Sequence[Float[Array, " n"]],
    draw: Int[Array, " n"],
    b: Float[Array, " n"],
    squared: Float[Array, " n"],
    terms: Float[Array, " n"],
    shape: Float[Array, " n"],
    scale: Float[Array, " n"],
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """One proposal for the next gamma variable of the series, times its factor (Marsaglia & Tsang 2000)."""
    last = draw.astype(b.dtype) >= terms
    shape = jnp.where(last, shape, b)
    factor = jnp.where(last, scale, 0.5 / (_PI2 * ((draw + 0.5) ** 2 + squared)))
    d = jnp.where(shape < 1, shape + 1, shape) - 1 / 3
    first, second, third = uniforms
    t = math.sqrt(2) * lax.erf_inv(2 * first - 1) / (3 * jnp.sqrt(d))
    inside = jnp.maximum(t, -0.999)
    # log(v)/d + (1 - v) + x^2/(2d), v = (1 + t)^3, x = 3 t sqrt(d): for large d its leading terms cancel.
    tail = -(inside**4) * polynomial((3 / 4, -3 / 5, 3 / 6, -3 / 7, 3 / 8, -3 / 9), inside)
    closed = 3 * (jnp.log1p(inside) - inside) + inside**2 * (1.5 - inside)
    log_accept = d * jnp.where(jnp.abs(inside) < 0.05, tail, closed)
    power = jnp.where(shape < 1, 1 / shape, 0.0)
    value = d * (1 + inside) ** 3 * (1 - third) ** power  # Gamma(a) = Gamma(a + 1) U^(1/a)
    # This way around a shape that overflowed ends the loop: its comparisons are all false.
    return factor * value, ~((t <= -0.999) | (second >= jnp.exp(log_accept)))


def _in_blocks(function: Callable[..., tuple[Array, ...]], *arrays: Shaped[Array, " n"]) -> tuple[Array, ...]:
    """An elementwise function on blocks of one size, by one program: those for other sizes round otherwise."""
    size = arrays[0].size
    count = max(2, -(-size // _BLOCK))  # of a single block the compiler makes another program
    blocks = (jnp.pad(array, (0, count * _BLOCK - size)).reshape(count, _BLOCK) for array in arrays)
    found = lax.map(lambda rows: function(*rows), tuple(blocks))
    return tuple(array.reshape(-1)[:size] for array in found)


def _remainder(b: Array, theta: Array, terms: Array) -> tuple[Array, Array, Array]:
    """Shift, shape and scale of the shifted gamma variable with the remainder's first three cumulants.

    S_n = sum_{k > terms} 1/((k - 1/2)^2 + theta^2)^n gives cumulants (n - 1)! b S_n / (2 pi^2)^n. All S_n are sums of
    positive numbers; shift >= 0 because S_2^2 <= S_1 S_3.
    """
    k = jnp.arange(_TERMS, dtype=theta.dtype) + 0.5
    head = jnp.where((terms == 0)[..., None], 1 / (k**2 + theta[..., None] ** 2), 0.0)
    s1, s2, s3 = (_tail(theta, n) + jnp.sum(head**n, -1) for n in (1, 2, 3))
    return b * (s1 - s2 * (s2 / s3)) / (2 * _PI2), b * (s2 / s3) ** 2 * s2, s3 / s2 / (2 * _PI2)


def _tail(theta: Array, n: int) -> Array:
    """sum_{k > K} f(k - 1/2), f(t) = (t^2 + theta^2)^-n, K = `_TERMS`, by the Euler-Maclaurin formula.

    It is the integral of f from K, plus f'(K)/24 - 7 f'''(K)/5760. With t = theta / tan(phi) the integral is
    theta^(1-2n) times that of sin^(2n-2) from 0 to atan(theta/K).
    """
    theta = jnp.maximum(theta, 1e-3)  # moves the sum by less than 1e-8 of itself
    angle, square = jnp.arctan(theta / _TERMS), _TERMS**2 + theta**2
    integral = sum(w * (jnp.sin(angle * u) / theta) ** (2 * n - 2) for u, w in _LEGENDRE) * angle / theta
    first = -2 * n * _TERMS / square ** (n + 1)
    third = 4 * n * (n + 1) * _TERMS * (3 * square - 2 * (n + 2) * _TERMS**2) / square ** (n + 3)
    return integral + first / 24 - 7 * third / 5760


def polynomial(coefficients: Sequence[float] | np.ndarray, x: Array) -> Array:
    """Horner's rule, constant term first."""
    total = jnp.zeros_like(x)
    for coefficient in reversed(tuple(coefficients)):
        total = total * x + coefficient
    return total


_INVERSE_GAUSSIAN, _GAMMA = Try(2, _try), Try(3, _try_gamma)
