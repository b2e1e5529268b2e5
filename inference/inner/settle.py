"""An inference for use, not for training: run to its tolerance, or a sampler until its chains have mixed.

A sampler takes 12, 24 or 48 sweeps, and ends once those of its second half are `mixed` beyond doubt. It gives draws of
that half, SAMPLER_DRAWS or more, for a posterior of few chains alone is a mixture of few draws.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
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


class _Progress(NamedTuple):
    """Blocks of sweeps so far, the last state, the states and statistics of the last sweeps [24, ...], and verdicts."""

    blocks: Int[Array, ""]
    state: State
    states: State
    traces: Array
    code: Int[Array, ""]
    mixed: Bool[Array, ""]


def fit_until_mixed(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
) -> tuple[State, Int[Array, ""], Int[Array, ""]]:
    """A sampler's pooled state, its code, and how many sweeps it took; the keys of its sweeps are those of `fit`.

    A half of fewer sweeps than are pooled is not judged. Under vmap all tasks wait for the slowest.
    """
    prior = prepared(inference, prior)
    start, loop = jax.random.split(key)
    first = inference.init(start, prior, y, mask)
    keys = jax.random.split(loop, SAMPLER_STEPS).reshape(-1, SWEEPS_A_BLOCK)
    sweep, kept = _sweep(inference, prior, y, mask), _number_kept(inference, first)

    halves = [half for half in HALVES if half >= kept]

    def enough(traces: Array) -> Array:
        return mixed(traces) if len(traces) == HALVES[-1] else mixed(traces, EARLY_R_HAT, SAMPLER_DRAWS)

    def advance(progress: _Progress) -> _Progress:
        state, (states, infos, traces) = jax.lax.scan(sweep, progress.state, keys[progress.blocks])
        blocks, held = progress.blocks + 1, jax.tree.map(_last, (progress.states, progress.traces), (states, traces))
        verdicts = [(blocks * SWEEPS_A_BLOCK == 2 * half) & enough(held[1][-half:]) for half in halves]
        code = jnp.maximum(progress.code, jnp.max(infos.code))
        return _Progress(blocks, state, held[0], held[1], code, jnp.any(jnp.stack(verdicts)))

    _, (states, _, traces) = jax.eval_shape(sweep, first, keys[0, 0])
    held = jax.tree.map(lambda leaf: jnp.zeros((HALVES[-1], *leaf.shape), leaf.dtype), (states, traces))
    begun = _Progress(jnp.asarray(0), first, held[0], held[1], jnp.asarray(int(Code.OK)), jnp.asarray(False))
    end = jax.lax.while_loop(lambda progress: ~progress.mixed & (progress.blocks < len(keys)), advance, begun)
    sweeps = end.blocks * SWEEPS_A_BLOCK
    code = jnp.where((end.code == Code.OK) & ~end.mixed, Code.NOT_MIXED, end.code)
    return _pooled(inference, end.states, sweeps // 2, kept), code, sweeps


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
