"""Elliptical slice sampling: a transition for any likelihood under a Gaussian prior, without a step length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

MOST_TRIES = 200  # of a slice: the bracket shrinks to nothing long before, unless the log likelihood is NaN


def elliptical_slice(
    key: Key[Array, ""],
    u: Float[Array, "..."],
    value: Float[Array, ""],
    log_likelihood: Callable[[Array], Float[Array, ""]],
    draw: Callable[[Key[Array, ""]], Float[Array, "..."]] | None = None,
) -> tuple[Float[Array, "..."], Float[Array, ""], Int[Array, ""]]:
    """One transition that leaves N(u; 0, I) exp(log_likelihood(u)) invariant; next u, its value, points tried.

    With nu ~ N(0, I) the ellipse u cos(t) + nu sin(t) is invariant under the prior, so on it the target is the
    likelihood alone: slice it at a uniform height, draw t uniformly, and shrink the bracket around t = 0, where the
    chain is, until a point lies on the slice (Murray, Adams & MacKay 2010). After MOST_TRIES the chain stays. `draw` is
    for a prior N(0, K) in place of N(0, I).
    """
    normal_key, height_key, angle_key, shrink_key = jax.random.split(key, 4)
    nu = jax.random.normal(normal_key, u.shape, u.dtype) if draw is None else draw(normal_key)
    height = value - jax.random.exponential(height_key, (), u.dtype)
    first = jax.random.uniform(angle_key, (), u.dtype, 0.0, 2 * jnp.pi)

    def at(angle: Array) -> tuple[Array, Array]:
        point = u * jnp.cos(angle) + nu * jnp.sin(angle)
        return point, log_likelihood(point)

    def outside(carry: tuple[Array, ...]) -> Array:
        *_, found, tries = carry
        return ~(found >= height) & (tries < MOST_TRIES)

    def shrink(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        angle, low, high, _, _, tries = carry
        low, high = jnp.where(angle < 0, angle, low), jnp.where(angle < 0, high, angle)
        uniform = jax.random.uniform(jax.random.fold_in(shrink_key, tries), (), u.dtype)
        angle = low + (high - low) * uniform
        return (angle, low, high, *at(angle), tries + 1)

    start: tuple[Array, ...] = (first, first - 2 * jnp.pi, first, *at(first), jnp.asarray(1))
    *_, point, found, tries = jax.lax.while_loop(outside, shrink, start)
    on_slice = found >= height
    return jnp.where(on_slice, point, u), jnp.where(on_slice, found, value), tries
