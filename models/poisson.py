"""Poisson counts, many at once: each from one uniform number where that is cheap, by rejection between.

Rates below 10: the quantile of a uniform u, by adding probabilities from 0 on; all entries do so together.

Rates from 10 to 1e4: transformed rejection (Hoermann 1993, Insurance: Mathematics and Economics 12, algorithm PTRS).
With U uniform on (-1/2, 1/2) and r = 1/2 - |U|, the proposal is the floor of G(U) = (2 a / r + b) U + rate + 0.43,
whose density is 1 / G'(U), G'(U) = a / r^2 + b. It is accepted with probability p(count) G'(U) / c, where c bounds
p G'. His c is too small by up to 0.6% at one count far above the rate; ours is 1.006 times as large, 1.34 at most. His
two squeezes save a logarithm but cost a branch, and are left out.

Rates above 1e4: rate + rate^1/2 z + (z^2 - 1)/6, rounded, z the normal quantile of u (Cornish & Fisher). The
distribution function is off by less than 2e-6 at 1e4, falling like 1/rate.

Where the random numbers come from, rejection.py says: an entry's count depends on its own rate alone.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.rejection import Stream, Try, as_one_array, first_uniform, stream, sums

INVERTED, COUNTED = 10.0, 1e4  # rates up to where a count is found by inversion, and by rejection
_LOG_FACTORIALS = tuple(math.lgamma(k + 1) for k in range(10))


def sample_poisson(key: Key[Array, ""], rate: Float[Array, "..."]) -> Float[Array, "..."]:
    """Poisson counts as floats, one for each rate; NaN for rates that are NaN or negative. No gradient passes through.

    In single precision the uniform numbers have 23 bits, so that probabilities below 1e-7 are not resolved.
    """
    rate = lax.stop_gradient(rate)
    flat = rate.reshape(-1)
    valid = (flat >= 0) & jnp.isfinite(flat)
    counts = _counts(stream(key, flat.size), jnp.where(valid, flat, 0.0))
    return jnp.where(valid, counts, jnp.nan).reshape(rate.shape)


@as_one_array
def _counts(source: Stream, rate: Float[Array, " n"]) -> Float[Array, " n"]:
    uniform = first_uniform(source, rate.dtype) + jnp.finfo(rate.dtype).eps / 2  # the middle of its cell
    small, large = rate < INVERTED, rate > COUNTED
    count = _inverted(uniform, jnp.where(small, rate, 0.0))
    z = math.sqrt(2) * lax.erf_inv(2 * uniform - 1)
    quantile = jnp.round(rate + (jnp.sqrt(rate) * z + (z**2 - 1) / 6))
    between = ~small & ~large

    def rejected(count: Array) -> Array:
        return jnp.where(between, sums(_TRANSFORMED, source, between.astype(jnp.int32), (rate,), few=True), count)

    count = jnp.where(large, quantile, count)
    return lax.cond(jnp.any(between), rejected, lambda count: count, count)


def _inverted(uniform: Float[Array, " n"], rate: Float[Array, " n"]) -> Float[Array, " n"]:
    """The least k with P(count <= k) >= uniform; ends too where what is left is lost in rounding."""
    least = jnp.finfo(rate.dtype).eps / 4

    def goes_on(state: tuple[Array, Array, Array]) -> Bool[Array, " n"]:
        count, probability, below = state
        return (uniform > below) & ((count < rate) | (probability > least))

    def once(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, probability, below = state
        on, following = goes_on(state), count + 1
        probability = jnp.where(on, probability * rate / following, probability)
        return jnp.where(on, following, count), probability, jnp.where(on, below + probability, below)

    none = jnp.exp(-rate)
    return lax.while_loop(lambda state: jnp.any(goes_on(state)), once, (jnp.zeros_like(rate), none, none))[0]


def _try(
    uniforms: list[Float[Array, " n"]], draw: Array, rate: Float[Array, " n"]
) -> tuple[Float[Array, " n"], Bool[Array, " n"]]:
    """One proposal for each rate, from 10 on, and whether it is accepted."""
    del draw
    u, v = uniforms[0] - 0.5, 1 - uniforms[1]  # v in (0, 1]
    left = jnp.maximum(0.5 - jnp.abs(u), jnp.finfo(rate.dtype).eps)
    a, b, log_bound = _hat(rate)
    count = jnp.floor((2 * a / left + b) * u + rate + 0.43)
    accepted = jnp.log(v) + log_bound - jnp.log(a / left**2 + b) <= _log_probability(jnp.maximum(count, 0.0), rate)
    return count, accepted & (count >= 0)


def _hat(rate: Float[Array, " n"]) -> tuple[Array, Array, Array]:
    """a and b of the proposal (Hoermann 1993), and log c."""
    b = 0.931 + 2.53 * jnp.sqrt(rate)
    return 0.02483 * b - 0.059, b, jnp.log(1.006 * (1.1239 + 1.1328 / (b - 3.4)))


def _log_probability(count: Float[Array, " n"], rate: Float[Array, " n"]) -> Float[Array, " n"]:
    """log p(count), by Stirling's series from 10 on: -rate phi(t) - log(2 pi count)/2 - 1/(12 count) + ...

    t = (count - rate) / rate and phi(t) = (1 + t) log(1 + t) - t: rounding is that of rate t, not of count log rate.
    """
    few = count < len(_LOG_FACTORIALS)
    exact = (
        count * jnp.log(rate) - rate - jnp.asarray(_LOG_FACTORIALS, rate.dtype)[jnp.where(few, count, 0).astype(int)]
    )
    many = jnp.where(few, 10.0, count)
    t = (many - rate) / rate
    inverse = 1 / many
    series = inverse * (1 / 12 - inverse**2 * (1 / 360 - inverse**2 * (1 / 1260 - inverse**2 / 1680)))
    stirling = -rate * ((1 + t) * jnp.log1p(t) - t) - 0.5 * jnp.log(2 * math.pi * many) - series
    return jnp.where(few, exact, stirling)


_TRANSFORMED = Try(2, _try)
