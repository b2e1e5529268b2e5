"""An inference for use, not for training: run to its tolerance, or a sampler until its chains have mixed.

A sampler takes 12, 24 or 48 sweeps, and ends once those of its second half are `mixed` beyond doubt. It gives draws of
that half, SAMPLER_DRAWS or more, for a posterior of few chains alone is a mixture of few draws.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Int, Key, PyTree

from fewshot.inference.inner.base import Code, Inference, Info, Mask, State, fit, fit_to_tolerance, prepared
from fewshot.inference.inner.mixing import mixed
from fewshot.models.gaussian import GaussianPrior
from fewshot.models.likelihoods.base import Labels

SAMPLER_DRAWS = 64
SWEEPS_A_BLOCK = 6
HALVES = (6, 12, 24)  # sweeps by which mixing is judged, after as many of warm-up
SAMPLER_STEPS = 2 * HALVES[-1]
# To end before all sweeps: SAMPLER_DRAWS effective draws or more, and a correlation of .4 or less where halves have 3
# sweeps, .53 or less where they have 6. What is left of where a chain began is then 0.4%, and less.
EARLY_R_HAT = 1.2
LANES = 8  # tasks that a processor works on at a time

Sweep: TypeAlias = Callable[[State, Key[Array, ""]], tuple[State, tuple[State, Info, Array | None]]]


def settle(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
) -> tuple[State, Int[Array, ""]]:
    """State and code of an inference for use: run to TOLERANCE, or a sampler's draws once its chains have mixed.

    The code of a sampler is NOT_MIXED where nothing else went wrong and they have not after SAMPLER_STEPS sweeps.
    """
    if not inference.traits.sampled:
        state, info, _ = fit_to_tolerance(key, inference, prior, y, mask)
        return state, info.code
    if inference.pool is None or inference.statistics is None:
        state, infos = fit_pooled(key, inference, prior, y, mask)
        return state, jnp.max(infos.code)
    state, code, _ = fit_until_mixed(key, inference, prior, y, mask)
    return state, code


class _Work(NamedTuple):
    """Tasks, with the keys of where their chains start and of all sweeps, and what the functions of `_opened` hid."""

    prior: GaussianPrior
    y: Labels
    mask: Mask | None
    start: Key[Array, " T"]
    keys: Key[Array, "T 8 6"]
    hidden: PyTree


class _Progress(NamedTuple):
    """Blocks of sweeps so far, the last state, the states and statistics of the last sweeps [24, ...], and verdicts."""

    blocks: Int[Array, ""]
    state: State
    states: State
    traces: Array
    code: Int[Array, ""]
    mixed: Bool[Array, ""]


# Pooled state, code and number of sweeps: of one task, and of several.
Answer: TypeAlias = tuple[State, Int[Array, ""], Int[Array, ""]]
Answers: TypeAlias = tuple[State, Int[Array, " T"], Int[Array, " T"]]


class _Lanes(NamedTuple):
    """The task of every lane and how far it is, the first task that no lane has begun, and the answers so far.

    Lanes without a task, at the end, have numbers beyond those of the tasks.
    """

    task: Int[Array, " L"]
    progress: _Progress
    following: Int[Array, ""]
    answers: Answers


def fit_until_mixed(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
) -> Answer:
    """A sampler's pooled state, its code, and how many sweeps it took; the keys of its sweeps are those of `fit`.

    A half of fewer sweeps than are pooled is not judged. Under vmap on a processor a task begins as soon as another has
    ended, so that few wait for the slowest; elsewhere all do.
    """
    prior = prepared(inference, prior)
    start, loop = jax.random.split(key)
    keys = jax.random.split(loop, SAMPLER_STEPS).reshape(-1, SWEEPS_A_BLOCK)
    opened, hidden = _opened(inference, start, prior, y, mask)
    alone = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], _Work(prior, y, mask, start, keys, hidden))
    return jax.tree.map(lambda leaf: leaf[0], _all_until_mixed(opened)(alone))


def _opened(
    inference: Inference, key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None
) -> tuple[Callable[[PyTree], Inference], PyTree]:
    """The inference as a function of the numbers in it, and these: they may differ between the tasks of a vmap.

    The likelihood has them, which its functions hide.
    """
    assert inference.statistics is not None
    init, of_init = jax.closure_convert(inference.init, key, prior, y, mask)
    first = jax.eval_shape(init, key, prior, y, mask, *of_init)
    step, of_step = jax.closure_convert(inference.step, key, first, prior, y, mask)
    statistics, of_statistics = jax.closure_convert(inference.statistics, first, y, mask)

    def at(hidden: PyTree) -> Inference:
        return inference._replace(
            init=lambda *given: init(*given, *hidden[0]),
            step=lambda *given: step(*given, *hidden[1]),
            statistics=lambda *given: statistics(*given, *hidden[2]),
        )

    return at, (of_init, of_step, of_statistics)


def _all_until_mixed(opened: Callable[[PyTree], Inference]) -> Callable[[_Work], Answers]:
    """The answers of tasks; a vmap of it is a call of more tasks."""
    several = custom_vmap(partial(_in_lanes, opened))

    @several.def_vmap
    def _(size: int, batched: Any, work: _Work) -> tuple[Any, Any]:
        whole = jax.tree.map(
            lambda leaf, own: leaf if own else jnp.broadcast_to(leaf, (size, *leaf.shape)), work, batched[0]
        )
        found = several(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), whole))
        parted = jax.tree.map(lambda leaf: leaf.reshape(size, -1, *leaf.shape[1:]), found)
        return parted, jax.tree.map(lambda leaf: True, found)

    return several


def _in_lanes(opened: Callable[[PyTree], Inference], work: _Work) -> Answers:
    """The answers of T tasks, a fixed number of which is worked on at a time."""
    count = len(work.keys)
    width = min(LANES, count) if jax.default_backend() == "cpu" else count
    held = _nothing_held(opened, _row(work, 0))
    inference = opened(_row(work.hidden, 0))  # for the shapes of states alone

    def chains(task: Array) -> State:
        one = _row(work, task)
        return opened(one.hidden).init(one.start, one.prior, one.y, one.mask)

    # As many at a time as are worked on: the compiler finds draws of that shape compiled.
    in_turn = jnp.arange(-(-count // width) * width).reshape(-1, width)
    first = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), jax.lax.map(jax.vmap(chains), in_turn))
    kept = _number_kept(inference, _row(first, 0))

    def begun(task: Array) -> _Progress:
        return _Progress(jnp.asarray(0), _row(first, task), *held, jnp.asarray(int(Code.OK)), jnp.asarray(False))

    def answer(progress: _Progress) -> Answer:
        sweeps = progress.blocks * SWEEPS_A_BLOCK
        code = jnp.where((progress.code == Code.OK) & ~progress.mixed, Code.NOT_MIXED, progress.code)
        return _pooled(inference, progress.states, sweeps // 2, kept), code, sweeps

    def once(lanes: _Lanes) -> _Lanes:
        own = jax.vmap(lambda task: _row(work, task))(lanes.task)
        moved = jax.vmap(partial(_advanced, opened, kept))(own, lanes.progress)
        ended = moved.mixed | (moved.blocks >= SAMPLER_STEPS // SWEEPS_A_BLOCK)
        so_far = jax.vmap(answer)(moved)
        answers = jax.tree.map(lambda old, new: old.at[lanes.task].set(new, mode="drop"), lanes.answers, so_far)
        task = jnp.where(ended, lanes.following + jnp.cumsum(ended) - 1, lanes.task)
        progress = jax.tree.map(partial(_chosen, ended), jax.vmap(begun)(task), moved)
        return _Lanes(task, progress, lanes.following + jnp.sum(ended), answers)

    shapes = jax.eval_shape(lambda: answer(begun(jnp.asarray(0))))
    unknown = jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), shapes)
    task = jnp.arange(width)
    start = _Lanes(task, jax.vmap(begun)(task), jnp.asarray(width), unknown)
    return jax.lax.while_loop(lambda lanes: jnp.any(lanes.task < count), once, start).answers


def _row(tree: PyTree, number: int | Array) -> PyTree:
    """That row of every array, the last one beyond the end."""
    return jax.tree.map(lambda leaf: leaf[jnp.minimum(number, len(leaf) - 1)], tree)


def _chosen(which: Array, one: Array, other: Array) -> Array:
    """Rows of `one` where `which`, else of `other`."""
    return jnp.where(which.reshape(-1, *[1] * (one.ndim - 1)), one, other)


def _nothing_held(opened: Callable[[PyTree], Inference], work: _Work) -> tuple[State, Array]:
    """Zeros in place of the states and statistics [24, ...] of the last sweeps of a task."""

    def swept() -> tuple[State, Array | None]:
        inference = opened(work.hidden)
        first = inference.init(work.start, work.prior, work.y, work.mask)
        _, (state, _, trace) = _sweep(inference, work.prior, work.y, work.mask)(first, work.keys[0, 0])
        return state, trace

    return jax.tree.map(lambda leaf: jnp.zeros((HALVES[-1], *leaf.shape), leaf.dtype), jax.eval_shape(swept))


def _advanced(opened: Callable[[PyTree], Inference], kept: int, work: _Work, progress: _Progress) -> _Progress:
    """A block of sweeps later, judged where it ends two halves."""
    sweep = _sweep(opened(work.hidden), work.prior, work.y, work.mask)
    state, (states, infos, traces) = jax.lax.scan(sweep, progress.state, work.keys[progress.blocks])
    blocks, held = progress.blocks + 1, jax.tree.map(_last, (progress.states, progress.traces), (states, traces))
    verdicts = [(blocks * SWEEPS_A_BLOCK == 2 * half) & _enough(held[1][-half:]) for half in HALVES if half >= kept]
    code = jnp.maximum(progress.code, jnp.max(infos.code))
    return _Progress(blocks, state, held[0], held[1], code, jnp.any(jnp.stack(verdicts)))


def _enough(traces: Array) -> Array:
    return mixed(traces) if len(traces) == HALVES[-1] else mixed(traces, EARLY_R_HAT, SAMPLER_DRAWS)


def fit_pooled(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
) -> tuple[State, Info]:
    """A sampler's state after all SAMPLER_STEPS sweeps, pooled from their second half, and the Info of every sweep.

    One that cannot pool keeps its last state.
    """
    if inference.pool is None:
        return fit(key, inference, prior, y, mask, steps=SAMPLER_STEPS)
    prior = prepared(inference, prior)
    start, loop = jax.random.split(key)
    first = inference.init(start, prior, y, mask)
    sweep = _sweep(inference, prior, y, mask)
    _, (states, infos, _) = jax.lax.scan(sweep, first, jax.random.split(loop, SAMPLER_STEPS))
    return _pooled(inference, states, HALVES[-1], _number_kept(inference, first)), infos


def _sweep(inference: Inference, prior: GaussianPrior, y: Array, mask: Mask | None) -> Sweep:
    """A step that also gives the state, its Info, and what mixing is judged by: None of an inference without that."""

    def sweep(state: State, key: Array) -> tuple[State, tuple[State, Info, Array | None]]:
        state, info = inference.step(key, state, prior, y, mask)
        traces = None if inference.statistics is None else inference.statistics(state, y, mask)
        return state, (state, info, traces)

    return sweep


def _number_kept(inference: Inference, state: State) -> int:
    """Sweeps whose draws are pooled: as many as make SAMPLER_DRAWS with all chains, at most the longest half."""
    chains = 1 if inference.sites is None else jax.tree.leaves(jax.eval_shape(inference.sites, state))[0].shape[0]
    return min(HALVES[-1], -(-SAMPLER_DRAWS // chains))


def _pooled(inference: Inference, states: PyTree, half: int | Array, kept: int) -> State:
    """One state of `kept` of the last `half` of these sweeps, at even distances, the last among them."""
    assert inference.pool is not None
    last = jax.tree.leaves(states)[0].shape[0] - 1
    numbers = last - half // kept * jnp.arange(kept)[::-1]
    return inference.pool(jax.tree.map(lambda leaf: leaf[numbers], states))


def _last(old: Array, new: Array) -> Array:
    """As many rows as `old` has, the last of both together."""
    return jnp.concatenate([old[len(new) :], new])
