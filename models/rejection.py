"""Exact draws by rejection, many at once: every entry has its own random numbers, so no draw depends on another.

The random numbers of a try are a hash (Threefry) of the key, the number of the entry, that of its draw and that of the
try. So an entry's draw is the same whichever entries are worked on beside it, and under vmap a batch is one longer
array: where each loop would run until the slowest entry of its own small array is done, all share the work.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

_LANES, _ROWS = (512, 4096), (8, 128)  # entries worked on at a time, entries for one lane; see `lanes`
_FEW = 8
_TRIES, _BLOCKS = (
    np.uint32(1 << 16),
    np.uint32(1 << 3),
)  # of a draw, before its random numbers repeat; blocks of two words for a try


class Stream(NamedTuple):
    """Where the random numbers of each entry come from: two words that the entries of one key share, and a number."""

    first: UInt32[Array, " n"]
    second: UInt32[Array, " n"]
    number: UInt32[Array, " n"]


class Try(NamedTuple):
    """A function of random numbers: `uniforms` of them make one try.

    once(uniforms, draw, *parameters) -> (value, accepted), all elementwise; draw is the number of the draw, from 0.
    """

    uniforms: int
    once: Callable[..., tuple[Float[Array, " L"], Bool[Array, " L"]]]


def stream(key: Key[Array, ""], count: int) -> Stream:
    """The stream of `count` entries under one key."""
    first, second = (jnp.broadcast_to(word, (count,)) for word in jax.random.bits(key, (2,), jnp.uint32))
    return Stream(first, second, jnp.arange(count, dtype=jnp.uint32))


def first_uniform(source: Stream, dtype: Any) -> Float[Array, " n"]:
    """The first random number of every entry, in [0, 1); its first try begins with the same."""
    zero = jnp.zeros_like(source.number)
    return _uniforms(source, zero, zero, 1, dtype)[0]


def as_one_array(draws: Callable[..., Array]) -> Callable[..., Array]:
    """An elementwise function of arrays [n] under which a vmap is a longer array."""
    flat = custom_vmap(draws)

    @flat.def_vmap
    def _(size: int, batched: Any, *arguments: Any) -> tuple[Array, bool]:
        whole = jax.tree.map(
            lambda leaf, own: leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape)), arguments, tuple(batched)
        )
        return flat(*jax.tree.map(lambda leaf: leaf.reshape(-1), whole)).reshape(size, -1), True

    return flat


def lanes(size: int) -> int:
    """Entries worked on at a time: an eighth of a short array, at least 512; 4096 of a long one, more from 2^19 on."""
    (fewest, enough), (few, many) = _LANES, _ROWS
    return max(1, min(size, max(fewest, min(size // few, enough), size // many)))


class _Lanes(NamedTuple):
    """What every lane is at: the place of its entry among those that want any, that entry's state, and all sums."""

    place: Int[Array, " L"]
    entry: Int[Array, " L"]
    draw: Int[Array, " L"]
    attempt: UInt32[Array, " L"]
    total: Float[Array, " L"]
    sums: Float[Array, " n"]


def sums(
    tries: Try, source: Stream, wanted: Int[Array, " n"], parameters: tuple[Float[Array, " n"], ...], few: bool = False
) -> Float[Array, " n"]:
    """Each entry's sum of `wanted` accepted values.

    A fixed number of lanes, small enough for a processor's cache, works through the entries: in each pass every lane
    makes one try for its entry, and goes on to the next when that has its draws. few: where few entries want any, but
    these want many draws, an eighth of the lanes goes through these alone.
    """
    size, dtype = wanted.size, parameters[0].dtype
    zeros = jnp.zeros_like(parameters[0] * wanted)  # in a shard_map it varies over the axes that the arguments do
    if not size:
        return zeros
    width = max(1, lanes(size) // _FEW) if few else lanes(size)
    work = jnp.nonzero(wanted > 0, size=size, fill_value=size)[0] if few else jnp.arange(size)
    count = jnp.sum(wanted > 0) if few else size

    def unfinished(state: _Lanes) -> Bool[Array, ""]:
        return jnp.any(state.place < count)

    def once(state: _Lanes) -> _Lanes:
        at = jnp.minimum(state.entry, size - 1)
        own = Stream(*(leaf[at] for leaf in source))
        uniforms = _uniforms(own, state.draw, state.attempt, tries.uniforms, dtype)
        value, accepted = tries.once(uniforms, state.draw, *(leaf[at] for leaf in parameters))
        needed = wanted[at]
        accepted &= state.draw < needed
        total = state.total + jnp.where(accepted, value, 0.0)
        draw = state.draw + accepted
        done = draw >= needed
        sums = state.sums.at[jnp.where(done, state.entry, size)].set(total, mode="drop", unique_indices=True)
        place = state.place + jnp.where(done, width, 0)
        entry = jnp.where(done, work.at[place].get(mode="fill", fill_value=size), state.entry)
        return _Lanes(
            place,
            entry,
            jnp.where(done, 0, draw),
            jnp.where(accepted, 0, state.attempt + 1),
            jnp.where(done, 0.0, total),
            sums,
        )

    lane = jnp.arange(width)
    nothing = zeros[:1] + jnp.zeros(width, dtype)
    start = _Lanes(
        lane + nothing.astype(lane.dtype),
        work[:width] + nothing.astype(work.dtype),
        nothing.astype(wanted.dtype),
        nothing.astype(jnp.uint32),
        nothing,
        zeros,
    )
    return lax.while_loop(unfinished, once, start).sums


def _uniforms(source: Stream, draw: Array, attempt: Array, count: int, dtype: Any) -> list[Float[Array, " L"]]:
    """Numbers in [0, 1), with as many random bits as the mantissa has."""
    base = (draw.astype(jnp.uint32) * _TRIES + attempt) * _BLOCKS
    words: list[Array] = []
    needed = count if dtype == jnp.float32 else 2 * count
    for block in range(-(-needed // 2)):
        words += threefry2x32_p.bind(source.first, source.second, source.number, base + np.uint32(block))
    if dtype == jnp.float32:
        return [
            lax.bitcast_convert_type((word >> 9) | np.uint32(0x3F800000), jnp.float32) - 1 for word in words[:count]
        ]
    pairs = zip(words[::2], words[1::2], strict=True)
    long = [(high.astype(jnp.uint64) << 32) | low.astype(jnp.uint64) for high, low in pairs]
    return [
        lax.bitcast_convert_type((word >> 12) | np.uint64(0x3FF0000000000000), jnp.float64) - 1 for word in long[:count]
    ]
