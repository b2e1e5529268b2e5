"""Elliptical slice sampling: transitions for any likelihood under a Gaussian prior, without a step length."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

MOST_TRIES = 200  # of a slice: the bracket shrinks to nothing long before, unless the log likelihood is NaN


class _Slice(NamedTuple):
    """Where a chain is, the number of its slice, the angle to try next within the bracket, and the tries so far."""

    u: Float[Array, "..."]
    value: Float[Array, ""]
    number: Int[Array, ""]
    angle: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]
    tries: Int[Array, ""]
    all_tries: Int[Array, ""]


class Part(NamedTuple):
    """What a slice moves, by its number: of(number, u) = P u, and fresh(number, drawn) = P nu, nu a draw of the prior.

    P is a projection with P u and u - P u independent under the prior.
    """

    of: Callable[[Int[Array, ""], Array], Array]
    fresh: Callable[[Int[Array, ""], Array], Array]


def elliptical_slice(
    key: Key[Array, ""],
    u: Float[Array, "..."],
    value: Float[Array, ""],
    log_likelihood: Callable[[Array], Float[Array, ""]],
    draw: Callable[[Key[Array, ""]], Float[Array, "..."]] | None = None,
    count: int = 1,
    taken: Int[Array, ""] | None = None,
    part: Part | None = None,
) -> tuple[Float[Array, "..."], Float[Array, ""], Int[Array, ""]]:
    """`count` transitions that leave N(u; 0, I) exp(log_likelihood(u)) invariant; u, its value, points tried.

    With nu ~ N(0, I) the ellipse u cos(t) + nu sin(t) is invariant under the prior, so on it the target is the
    likelihood alone: slice it at a uniform height, draw t uniformly, and shrink the bracket around t = 0, where the
    chain is, until a point lies on the slice (Murray, Adams & MacKay 2010). After MOST_TRIES the chain stays, and so
    does one whose value is NaN. `draw` is for a prior N(0, K) in place of N(0, I). A chain goes on to its next slice at
    once: under vmap chains wait for one another at the end only, not at every slice. Where the number of slices is
    known only when the program runs, it is `taken`, and `count` is the most that it can be.

    part: what a slice moves: u - P u + P u cos(t) + P nu sin(t), an elliptical slice of P u given the rest. `draw` then
    gives what `part.fresh` makes P nu of. None for all of u.
    """
    normal_key, height_key, angle_key, shrink_key = jax.random.split(key, 4)
    fresh = (lambda one: jax.random.normal(one, u.shape, u.dtype)) if draw is None else draw
    ellipses = jax.vmap(fresh)(jax.random.split(normal_key, count))
    depths = jax.random.exponential(height_key, (count,), u.dtype)
    angles = jax.random.uniform(angle_key, (count,), u.dtype, 0.0, 2 * jnp.pi)

    last = count if taken is None else jnp.minimum(taken, count)
    part = part or Part(of=lambda number, whole: whole, fresh=lambda number, drawn: drawn)

    def unfinished(state: _Slice) -> Array:
        return state.number < last

    def once(state: _Slice) -> _Slice:
        moved, towards = part.of(state.number, state.u), part.fresh(state.number, ellipses[state.number])
        point = (state.u - moved) + moved * jnp.cos(state.angle) + towards * jnp.sin(state.angle)
        found = log_likelihood(point)
        on_slice = found >= state.value - depths[state.number]
        ended = on_slice | (state.tries + 1 >= MOST_TRIES)
        number = state.number + ended
        low = jnp.where(state.angle < 0, state.angle, state.low)
        high = jnp.where(state.angle < 0, state.high, state.angle)
        uniform = jax.random.uniform(jax.random.fold_in(shrink_key, state.all_tries), (), u.dtype)
        following = angles[jnp.minimum(number, count - 1)]
        return _Slice(
            u=jnp.where(on_slice, point, state.u),
            value=jnp.where(on_slice, found, state.value),
            number=number,
            angle=jnp.where(ended, following, low + (high - low) * uniform),
            low=jnp.where(ended, following - 2 * jnp.pi, low),
            high=jnp.where(ended, following, high),
            tries=jnp.where(ended, 0, state.tries + 1),
            all_tries=state.all_tries + 1,
        )

    zero = jnp.asarray(0)
    begun = jnp.where(jnp.isnan(value), last, zero)  # on no slice: such a chain stays, and none waits for it
    start = _Slice(u, value, begun, angles[0], angles[0] - 2 * jnp.pi, angles[0], zero, zero)
    end = jax.lax.while_loop(unfinished, once, start)
    return end.u, end.value, end.all_tries
