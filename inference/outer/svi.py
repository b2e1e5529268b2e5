"""The outer loop: `numpyro.infer.SVI` with an optax optimiser learns a module over batches of tasks.

Everything random is a function of (seed, step, task), so neither the number of devices that share the tasks nor that of
steps that are dispatched together changes it. The loss of a step is that of loss.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, PyTree
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState

from fewshot.inference.outer.devices import TASKS, SharedOptimiser, over_tasks, own, replicate, total
from fewshot.inference.outer.loss import LOG, NETWORK, Learnable, Outcome, OuterLoss, Reduction, StepLog, outer_model

Sampler = Callable[[Key[Array, ""]], PyTree]


class Trainer(NamedTuple):
    """Pure functions of the outer loop, built by `make_trainer`.

    init() -> state; step(state, index) -> (state, StepLog), one optimiser step, `state` is donated;
    module(state) -> the module with its learned values.

    `step` can also take many optimiser steps in one dispatch, see `Step`.
    """

    init: Callable[[], SVIState]
    step: "Step"
    module: Callable[[SVIState], PyTree]


def make_trainer(
    key: Key[Array, ""],
    module: Learnable,
    sampler: Sampler,
    optimiser: optax.GradientTransformation,
    *,
    tasks_per_step: int = 1,
    mesh: Mesh | None = None,
) -> Trainer:
    """Outer loop over the tasks that `sampler` draws, one from each key, shared between the devices of a `task_mesh`.

    The task of (step, index) is a function of `key` and nothing else. A sampler that holds images should be a
    `jax.tree_util.Partial` of them: its arrays are arguments of the compiled step, those of a closure constants in it.
    """
    network = _Network.of(module)
    # The devices of one process round as one device does; processes wait for each other and take the faster form.
    alone = tasks_per_step == jax.process_count() == (1 if mesh is None else mesh.size)
    for_each = _for_one_task if alone else jax.vmap

    def model(*tasks_and_keys: PyTree) -> Outcome:
        return outer_model(network.module(), for_each, *tasks_and_keys)

    shared = optimiser if mesh is None else SharedOptimiser(optimiser, partial(_combined, module.diagnostics))
    svi = SVI(model, _no_guide, shared, OuterLoss())
    loop = _OuterLoop(svi, network, jax.random.split(key, 3), tasks_per_step, mesh)
    sampler = sampler if isinstance(sampler, jax.tree_util.Partial) else jax.tree_util.Partial(sampler)
    jax.eval_shape(loop.init, sampler)  # SVI learns the constraints of its parameters when it is initialised
    init, step = jax.jit(loop.init), jax.jit(loop.step, donate_argnums=0, static_argnums=3)
    return Trainer(lambda: replicate(mesh, init(sampler)), Step(step, replicate(mesh, sampler)), loop.module)


class Step(NamedTuple):
    """Optimiser steps: step(state, index) -> (state, StepLog), the state donated.

    With a count, steps index..index + count - 1 run as one program, and the log's fields are [count]. Python then waits
    between dispatches only, which a GPU needs; on CPU, XLA runs a convolution inside a loop many times slower.
    """

    jitted: jax.stages.Wrapped
    sampler: Callable

    def __call__(
        self, state: SVIState, index: Int[Array, ""] | int, count: int | None = None
    ) -> tuple[SVIState, StepLog]:
        return self.jitted(state, index, self.sampler, count)

    def lower(self, state: SVIState, index: Int[Array, ""] | int, count: int | None = None) -> PyTree:
        """`jax.jit`'s `lower`; what it compiles to takes (state, index, sampler)."""
        return self.jitted.lower(state, index, self.sampler, count)


class _Network(NamedTuple):
    """A module as NumPyro registers it, in parts: its structure, its parameters, its running statistics."""

    graph: nnx.GraphDef
    params: nnx.State
    statistics: nnx.State

    @classmethod
    def of(cls, module: Learnable) -> "_Network":
        """The parts of a module."""
        graph, params, *others = nnx.split(module, nnx.Param, ...)
        return cls(graph, params, others[0])

    def module(self) -> Learnable:
        """Merged anew each time: NumPyro's registration writes traced values into the module that it is given."""
        return nnx.merge(self.graph, self.params, self.statistics, copy=True)

    def learned(self, values: dict[str, PyTree], mutable_state: dict[str, PyTree]) -> Learnable:
        """The module at learned values and running statistics, as SVI holds them."""
        module = self.module()
        if f"{NETWORK}$params" in values:
            nnx.update(module, _restored(self.params, values[f"{NETWORK}$params"]))
        if f"{NETWORK}$state" in mutable_state:
            nnx.update(module, _restored(self.statistics, mutable_state[f"{NETWORK}$state"]["state"]))
        return module


@dataclass(frozen=True, eq=False)
class _OuterLoop:
    """What a `Trainer` compiles. The three keys start SVI, draw the tasks and run their inner loops."""

    svi: SVI
    network: _Network
    keys: Key[Array, " 3"]
    tasks_per_step: int
    mesh: Mesh | None

    def init(self, sampler: Sampler) -> SVIState:
        """The state before the first step."""
        data_keys, loop_keys = self._keys(jnp.asarray(0))
        state = self.svi.init(self.keys[0], jax.vmap(sampler)(data_keys), loop_keys)
        statistics = nnx.to_pure_dict(self.network.statistics)
        if not statistics:
            return state
        # One batch has been recorded in the running statistics by then: training starts from the module's own.
        initial = {**state.mutable_state, f"{NETWORK}$state": {"state": statistics}}
        return state._replace(mutable_state=jax.tree.map(jnp.asarray, initial))

    def step(
        self, state: SVIState, index: Int[Array, ""], sampler: Sampler, count: int | None = None
    ) -> tuple[SVIState, StepLog]:
        """One optimiser step, or `count` of them."""
        if count is None:
            return self._one(state, index, sampler)
        return jax.lax.scan(lambda now, i: self._one(now, i, sampler), state, index + jnp.arange(count))

    def module(self, state: SVIState) -> Learnable:
        """The module with its learned values."""
        # A copy: the next step is given the state's own arrays, and they are gone with it.
        optim_state, mutable_state = jax.tree.map(lambda leaf: jnp.copy(own(leaf)), state[:2])
        return self.network.learned(self.svi.optim.get_params(optim_state), mutable_state)

    def _keys(self, index: Int[Array, ""]) -> tuple[Array, Array]:
        """Keys [T] of the tasks of a step, and of their inner loops."""
        data, loop = (jax.random.split(jax.random.fold_in(key, index), self.tasks_per_step) for key in self.keys[1:])
        return data, loop

    def _one(self, state: SVIState, index: Int[Array, ""], sampler: Sampler) -> tuple[SVIState, StepLog]:
        following = over_tasks(self.mesh, self._update)(state, *self._keys(index), sampler)
        return following, following.mutable_state[LOG]["row"]

    def _update(self, state: SVIState, data_keys: Array, loop_keys: Array, sampler: Sampler) -> SVIState:
        """The state after one step on the tasks of these keys, which are those of one device; the same on all."""
        following, _ = self.svi.update(state, jax.vmap(sampler)(data_keys), loop_keys)
        # SVI's own key plays no part: held fixed, a state is a function of parameters and step alone.
        return following._replace(rng_key=state.rng_key)


def _combined(
    reductions: Mapping[str, Reduction], loss: Array, state: dict[str, PyTree], gradients: PyTree
) -> tuple[Array, dict[str, PyTree], PyTree]:
    """Loss, mutable state and gradients of all tasks, from those of each device's own.

    Running statistics move by a mean over tasks, so the mean over devices of equal shares is what one device records.
    """
    row = state[LOG]["row"]
    devices = jax.lax.psum(1, TASKS)

    def of(how: Reduction) -> dict[str, Array]:
        return {name: row.diagnostics[name] for name, kind in reductions.items() if kind is how}

    statistics = {name: value for name, value in state.items() if name != LOG}
    means = (loss, statistics, gradients, row[:3], of(Reduction.MEAN))
    every = {
        name: jnp.zeros(devices).at[jax.lax.axis_index(TASKS)].set(value) for name, value in of(Reduction.MAX).items()
    }
    means, every, sums = total((means, every, of(Reduction.SUM)))
    loss, statistics, gradients, parts, averages = jax.tree.map(lambda leaf: leaf / devices, means)
    found = averages | {name: values.max() for name, values in every.items()} | sums
    row = StepLog(parts[0], parts[1], parts[2], {name: found[name] for name in reductions})
    return loss, {**statistics, LOG: {"row": row}}, gradients


def _for_one_task(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """What vmap does to a batch of one task, without a batch: that takes a processor a third of the time."""

    def alone(*stacked: PyTree) -> PyTree:
        outcome = function(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], outcome)

    return alone


def _restored(like: nnx.State, values: dict) -> nnx.State:
    restored = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(restored, values)
    return restored


def _no_guide(*_: PyTree) -> None:
    """Hyper-parameters are point estimates: nothing is sampled."""
