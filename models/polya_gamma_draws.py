"""Draws of Polya-Gamma variables: `sample_polya_gamma` in polya_gamma.py is their use.

Let c = |z|/2 and x = 4 w. With b = 1,

    p(x) = 2 cosh(c) exp(-c^2 x/2) r(x) (2 pi x^3)^-1/2 exp(-1/(2x)),   r(x) = sum_n (-1)^n (2n + 1) exp(-2n(n + 1)/x)

(Polson, Scott & Windle 2013, their series for J*(1, c)). So an inverse Gaussian of mean 1/d and shape 1 is a proposal;
one with d^2 = c^2 + delta is accepted with probability r(x) exp(delta x/2) / sup_x(...), 0.85 at z = 0 and 1 for large
|z|: two uniforms a try, no branch. r is evaluated to rounding by this series or its theta dual, so nothing else is
needed. Sums of such draws serve integers b, a series of gamma variables with a remainder any other. Everything is
elementwise loops over what is still missing, so one call handles any mixture of b; under vmap a loop runs until the
slowest element of the batch is done.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

_TERMS = 16  # of the sum of gammas, before its remainder
_REMAINDER_ONLY = 1000  # above this b the remainder is the whole sum
_LANES, _ROWS = (512, 4096), (8, 128)  # entries worked on at a time, entries for one lane; see `_lanes`
_DELTA, _BOUND = 0.7, (0.2535, 0.27)  # of the proposal: the largest delta, and log sup_x <= delta (.2535 + .27 delta)
_PI2 = math.pi**2
_LEGENDRE = tuple((float(x + 1) / 2, float(w) / 2) for x, w in zip(*np.polynomial.legendre.leggauss(6), strict=True))


def sum_of_draws(key: Key[Array, ""], c: Float[Array, " n"], count: Int[Array, " n"]) -> Float[Array, " n"]:
    """Sums of `count` draws of x = 4 PG(1, 2c).

    A fixed number of lanes, small enough for a processor's cache, works down the columns of c as a table: in each pass
    every lane makes one try for its entry, and goes on to the next row when the entry has its `count` draws.
    """
    lanes = _lanes(c.size)
    rows = max(1, -(-c.size // lanes))
    padding = (0, rows * lanes - c.size)
    table, wanted = (jnp.pad(value, padding).reshape(rows, lanes) for value in (c, count))
    lane = jnp.arange(lanes, dtype=count.dtype)

    def unfinished(state: tuple[Array, ...]) -> Bool[Array, ""]:
        return jnp.any(state[1] < rows)

    def once(state: tuple[Array, ...]) -> tuple[Array, ...]:
        key, row, missing, entry, total, sums = state
        key, now = jax.random.split(key)
        x, accepted = _try(now, entry)
        total += jnp.where(accepted & (missing > 0), x, 0.0)
        missing -= accepted
        sums = sums.at[row, lane].set(total, mode="drop", unique_indices=True)
        done = missing <= 0
        row += done
        entry = table.at[row, lane].get(mode="clip")
        missing = jnp.where(done, wanted.at[row, lane].get(mode="clip"), missing)
        return key, row, missing, entry, jnp.where(done, 0.0, total), sums

    zero = _zeros(key, table)
    first = zero[0].astype(count.dtype)
    start: tuple[Array, ...] = (key, first, wanted[0] + first, table[0] + zero[0], zero[0], zero)
    return lax.while_loop(unfinished, once, start)[-1].reshape(-1)[: c.size]


def _lanes(size: int) -> int:
    """Entries worked on at a time: an eighth of a short array, at least 512; 4096 of a long one, more from 2^19 on."""
    (fewest, enough), (few, many) = _LANES, _ROWS
    return max(1, min(size, max(fewest, min(size // few, enough), size // many)))


def _zeros(key: Key[Array, ""], like: Array) -> Array:
    """Zeros which in a surrounding shard_map vary over the axes of the key and of `like`, as a draw does."""
    return like * (jax.random.key_data(key).reshape(-1)[0] * 0).astype(like.dtype)


def _try(key: Key[Array, ""], c: Float[Array, " n"]) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """One proposal x for each c and whether it is accepted.

    x is the smaller root of (d x - 1)^2 / x = y, y = N(0, 1)^2, with probability 1/(1 + d x), else the larger one
    (Michael, Schucany & Haas 1976). Accepted with probability r(x) exp(delta x/2) over a bound of its supremum.
    """
    delta = _DELTA * jnp.exp(-0.75 * c * c)
    d = jnp.maximum(c, jnp.sqrt(jnp.minimum(c, 1e3) ** 2 + delta))
    first, second = jax.random.uniform(key, (2, *c.shape), c.dtype)
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


def add_sum_of_gammas(
    key: Key[Array, ""], b: Float[Array, " n"], c: Float[Array, " n"], draws: Float[Array, " n"]
) -> Float[Array, " n"]:
    """`draws` plus PG(b, 2c) by `_TERMS` gamma variables and a remainder; PG(0, .) = 0.

    Where b = 0 everywhere this is free, under vmap nearly so: the condition becomes a selection there, and the
    elementwise `_remainder` is paid, but the loop makes no pass.
    """

    def series(draws: Array) -> Array:
        squared = (c / math.pi) ** 2
        terms = jnp.where(b > _REMAINDER_ONLY, 0, _TERMS)
        shift, shape, scale = _remainder(b, jnp.sqrt(squared), terms)

        def add(k: Array, total: Array) -> Array:
            last, used = k == terms, (b > 0) & (k <= terms)
            gamma = _gamma(jax.random.fold_in(key, k), jnp.where(last, shape, b), used)
            factor = jnp.where(last, scale, 0.5 / (_PI2 * ((k + 0.5) ** 2 + squared)))
            return total + jnp.where(used, factor * gamma, 0.0)

        passes = jnp.max(jnp.where(b > 0, terms + 1, 0), initial=0)
        return lax.fori_loop(0, passes, add, draws + jnp.where(b > 0, shift, 0.0))

    return lax.cond(jnp.any(b > 0), series, lambda draws: draws, draws)


def _gamma(key: Key[Array, ""], shape: Float[Array, " n"], used: Bool[Array, " n"]) -> Float[Array, " n"]:
    """Gamma(shape, 1) where `used`, else 0 (Marsaglia & Tsang 2000, a rejection from a cubed normal)."""
    d = jnp.where(shape < 1, shape + 1, shape) - 1 / 3
    power = jnp.where(shape < 1, 1 / jnp.where(used, shape, 1.0), 0.0)

    def once(state: tuple[Array, ...]) -> tuple[Array, ...]:
        key, missing, gamma = state
        key, now = jax.random.split(key)
        first, second, third = jax.random.uniform(now, (3, *d.shape), d.dtype)
        t = math.sqrt(2) * lax.erf_inv(2 * first - 1) / (3 * jnp.sqrt(d))
        inside = jnp.maximum(t, -0.999)
        # log(v)/d + (1 - v) + x^2/(2d), v = (1 + t)^3, x = 3 t sqrt(d): for large d its leading terms cancel.
        tail = -(inside**4) * polynomial((3 / 4, -3 / 5, 3 / 6, -3 / 7, 3 / 8, -3 / 9), inside)
        closed = 3 * (jnp.log1p(inside) - inside) + inside**2 * (1.5 - inside)
        log_accept = d * jnp.where(jnp.abs(inside) < 0.05, tail, closed)
        # This way around a shape that overflowed ends the loop: its comparisons are all false.
        accepted = missing & ~((t <= -0.999) | (second >= jnp.exp(log_accept)))
        value = d * (1 + inside) ** 3 * (1 - third) ** power  # Gamma(a) = Gamma(a + 1) U^(1/a)
        return key, missing & ~accepted, jnp.where(accepted, value, gamma)

    zero = _zeros(key, d)
    start: tuple[Array, ...] = (key, used | (zero > 0), zero)
    return lax.while_loop(lambda state: jnp.any(state[1]), once, start)[-1]


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
