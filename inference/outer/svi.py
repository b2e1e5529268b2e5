"""The outer loop: `numpyro.infer.SVI` with an optax optimiser learns the deep kernel over batches of tasks.

The NumPyro model registers the network and the priors of its hyper-parameters; the loss runs the inner loop:

    loss = -[(1/T) sum_t L_t + log p(phi)] / N        (N labelled points, phi the hyper-parameters)

The network is evaluated once a step, on all images of all tasks. Everything random is a function of (seed, step, task),
so neither the number of devices that share the tasks nor of steps that are dispatched together changes it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.infer.svi import SVIState
from numpyro.primitives import mutable

from inference.inner.base import Code, InferenceKernel
from inference.outer.devices import TASKS, after, averaging, over_tasks, own, replicate
from inference.outer.hypergradients import HyperGradient
from inference.outer.objectives import EmbeddedTask, Inner, Objective, Outcome, Process, check_combination
from models.deep_kernel import DeepKernel, gaussian_prior, gaussian_query
from models.kernels import Hyper
from models.likelihoods.base import Likelihood

NETWORK, LIKELIHOOD, LOG = "network", "likelihood", "log"


@runtime_checkable
class LabelledTasks(Protocol):
    """What the outer loop needs of sampled tasks: images [T, N, H, W, Ch] and labels [T, N], support and query."""

    x_support: Array
    y_support: Array
    x_query: Array
    y_query: Array


class Recipe(NamedTuple):
    """How one training step is made: every choice is an object, none is a name."""

    likelihood: Likelihood
    inference: Callable[[Likelihood], InferenceKernel]
    objective: Objective
    hypergradient: HyperGradient
    inner_steps: int


class StepLog(NamedTuple):
    """Diagnostics of one training step. objective and log_prior are the two parts of the loss, per point.

    residual is the largest over the tasks of a step, failures the number of tasks whose code is not OK, clipped the
    number of site precisions set to 0 in the last inner step.
    """

    loss: Float[Array, ""]
    objective: Float[Array, ""]
    log_prior: Float[Array, ""]
    residual: Float[Array, ""]
    failures: Int[Array, ""]
    clipped: Int[Array, ""]


class Trainer(NamedTuple):
    """Pure functions of the outer loop, built by `make_trainer`.

    init() -> state; step(state, index) -> (state, StepLog), one optimiser step, `state` is donated;
    module(state) -> (deep kernel, likelihood) with the learned values.

    `step` can also take many optimiser steps in one dispatch, see `Step`.
    """

    init: Callable[[], SVIState]
    step: "Step"
    module: Callable[[SVIState], tuple[DeepKernel, Likelihood]]


def make_trainer(
    key: Key[Array, ""],
    deep_kernel: DeepKernel,
    recipe: Recipe,
    sampler: Callable[[Key[Array, ""]], LabelledTasks],
    optimiser: optax.GradientTransformation,
    *,
    classes: int,
    tasks_per_step: int = 1,
    mesh: Mesh | None = None,
) -> Trainer:
    """Outer loop over the tasks that `sampler` draws, one from each key, shared between the devices of a `task_mesh`.

    The task of (step, index) is a function of `key` and nothing else. A sampler that holds images should be a
    `jax.tree_util.Partial` of them: its arrays are arguments of the compiled step, those of a closure constants in it.
    Raises ValueError for combinations that make no sense (`check_combination`).
    """
    check_combination(recipe.inference(recipe.likelihood), recipe.objective, recipe.hypergradient)
    init_key, data_key, loop_key = jax.random.split(key, 3)
    graph, params, *others = nnx.split(_Embedding(deep_kernel), nnx.Param, ...)
    rest = others[0]
    loss = _OuterLoss(recipe, deep_kernel, classes, one_task=tasks_per_step == 1)

    def model(*tasks_and_keys: Any) -> _Embedded:
        # Merged anew each time: NumPyro's registration writes traced values into the module that it is given.
        return _outer_model(nnx.merge(graph, params, rest, copy=True), recipe.likelihood, *tasks_and_keys)

    svi = SVI(model, _no_guide, averaging(mesh, optimiser), loss)

    sampler = sampler if isinstance(sampler, jax.tree_util.Partial) else jax.tree_util.Partial(sampler)

    def keys(base: Array, index: Array) -> Array:
        return jax.random.split(jax.random.fold_in(base, index), tasks_per_step)

    def init(sampler: Callable) -> SVIState:
        first = jnp.asarray(0)
        state = svi.init(init_key, jax.vmap(sampler)(keys(data_key, first)), keys(loop_key, first))
        # One batch has been recorded in the running statistics by then: training starts from the module's own.
        initial = {**state.mutable_state, f"{NETWORK}$state": {"state": nnx.to_pure_dict(rest)}}
        return state._replace(
            mutable_state=jax.tree.map(jnp.asarray, initial) if nnx.to_pure_dict(rest) else state.mutable_state
        )

    def update(state: SVIState, data_keys: Array, loop_keys: Array, sampler: Callable) -> SVIState:
        following, _ = svi.update(state, jax.vmap(sampler)(data_keys), loop_keys)
        # SVI's own key plays no part: held fixed, a state is a function of parameters and step alone.
        following = following._replace(rng_key=state.rng_key)
        if mesh is None:
            return following
        learned = jax.tree.leaves(svi.optim.get_params(following.optim_state))[0].ravel()[0]
        return following._replace(mutable_state=_combined(after(learned, following.mutable_state)))

    def one(state: SVIState, index: Int[Array, ""], sampler: Callable) -> tuple[SVIState, StepLog]:
        following = over_tasks(mesh, update)(state, keys(data_key, index), keys(loop_key, index), sampler)
        return following, following.mutable_state[LOG]["row"]

    @partial(jax.jit, donate_argnums=0, static_argnums=3)
    def step(
        state: SVIState, index: Int[Array, ""], sampler: Callable, count: int | None = None
    ) -> tuple[SVIState, StepLog]:
        if count is None:
            return one(state, index, sampler)
        return jax.lax.scan(lambda now, i: one(now, i, sampler), state, index + jnp.arange(count))

    def module(state: SVIState) -> tuple[DeepKernel, Likelihood]:
        # A copy: the next step is given the state's own arrays, and they are gone with it.
        optim_state, mutable_state = jax.tree.map(lambda leaf: jnp.copy(own(leaf)), state[:2])
        values = svi.optim.get_params(optim_state)
        learned = nnx.merge(graph, params, rest, copy=True)
        nnx.update(learned, _restored(params, values[f"{NETWORK}$params"]))
        if f"{NETWORK}$state" in mutable_state:
            nnx.update(learned, _restored(rest, mutable_state[f"{NETWORK}$state"]["state"]))
        return learned.deep_kernel, recipe.likelihood.with_parameters(values.get(LIKELIHOOD, {}))

    jax.eval_shape(init, sampler)  # SVI learns the constraints of its parameters when it is initialised
    started = jax.jit(init)
    return Trainer(lambda: replicate(mesh, started(sampler)), Step(step, replicate(mesh, sampler)), module)


class Step(NamedTuple):
    """Optimiser steps: step(state, index) -> (state, StepLog), the state donated.

    With a count, steps index..index + count - 1 run as one program, and the log's fields are [count]. Python then waits
    between dispatches only, which a GPU needs; on CPU, XLA runs a convolution inside a loop many times slower.
    """

    jitted: Any
    sampler: Callable

    def __call__(
        self, state: SVIState, index: Int[Array, ""] | int, count: int | None = None
    ) -> tuple[SVIState, StepLog]:
        return self.jitted(state, index, self.sampler, count)

    def lower(self, state: SVIState, index: Int[Array, ""] | int, count: int | None = None) -> Any:
        """`jax.jit`'s `lower`; what it compiles to takes (state, index, sampler)."""
        return self.jitted.lower(state, index, self.sampler, count)


class _Embedding(nnx.Module):
    """The deep kernel as NumPyro registers it: features and hyper-parameters from one call."""

    def __init__(self, deep_kernel: DeepKernel):
        self.deep_kernel = deep_kernel

    def __call__(self, x: Array) -> tuple[Array, Hyper]:
        return self.deep_kernel(x, train=True), self.deep_kernel.hyperparameters()


class _Embedded(NamedTuple):
    features: Array  # [T, N + Q, D]
    hyper: Hyper
    likelihood: Likelihood


def _outer_model(embedding: _Embedding, likelihood: Likelihood, tasks: LabelledTasks, keys: Array) -> _Embedded:
    """Network and hyper-parameters with their priors, as NumPyro sites; `keys` belong to the loss."""
    del keys
    network = nnx_module(NETWORK, embedding)
    features, hyper = network(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1))
    start = {name: jnp.asarray(value) for name, value in likelihood.parameters().items()}
    learned = numpyro.param(LIKELIHOOD, start) if start else {}
    priors = {**embedding.deep_kernel.priors(), **likelihood.priors()}
    for name, value in {**hyper, **learned}.items():
        numpyro.sample(f"{name}_prior", priors[name], obs=value)
    mutable(LOG, {"row": _empty_log()})
    return _Embedded(features, hyper, likelihood.with_parameters(learned))


class _OuterLoss(ELBO):
    """The loss of the outer loop; a subclass of NumPyro's ELBO so that SVI drives it."""

    def __init__(self, recipe: Recipe, deep_kernel: DeepKernel, classes: int, one_task: bool):
        super().__init__(num_particles=1)
        self.recipe, self.kernel, self.classes = recipe, deep_kernel.kernel, classes
        # Decided by the tasks of a step, not of a device: any number of devices then gives the same rounding.
        self.for_each = _for_one_task if one_task else jax.vmap

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, tasks: LabelledTasks, keys: Array
    ) -> dict[str, Any]:
        """Loss, and the mutable state with the running statistics and the log of this step."""
        del guide
        with handlers.trace() as sites, handlers.seed(rng_seed=rng_key), handlers.substitute(data=param_map):
            embedded = model(tasks, keys)
        outcome = self.for_each(lambda *task: self._task(embedded, *task))(keys, embedded.features, tasks)
        log_prior = sum(
            jnp.sum(site["fn"].log_prob(site["value"])) for site in sites.values() if site["type"] == "sample"
        )
        objective, points = jnp.mean(outcome.value), jnp.asarray(outcome.points)[0]
        loss = -(objective + log_prior) / points
        row = StepLog(
            loss,
            objective / points,
            jnp.asarray(log_prior / points, loss.dtype),
            jnp.max(outcome.info.residual),
            jnp.sum(outcome.info.code != Code.OK),
            jnp.sum(outcome.info.clipped),
        )
        state = {name: site["value"] for name, site in sites.items() if site["type"] == "mutable"}
        return {"loss": loss, "mutable_state": jax.lax.stop_gradient({**state, LOG: {"row": row}})}

    def _task(self, embedded: _Embedded, key: Array, features: Array, task: LabelledTasks) -> Outcome:
        shots = task.y_support.shape[0]
        labelled = EmbeddedTask(features[:shots], task.y_support, features[shots:], task.y_query)
        process = latent_process(self.kernel, embedded.hyper, self.classes)
        recipe = self.recipe
        inner = Inner(recipe.inference(embedded.likelihood), recipe.inner_steps, recipe.hypergradient)
        return recipe.objective(key, inner, embedded.likelihood, process, labelled)


def _combined(state: dict[str, Any]) -> dict[str, Any]:
    """Mutable state with the statistics and the log of all tasks, from those of each device's own.

    Running statistics move by a mean over tasks, so the mean over devices of equal shares is what one device records.
    """
    mean, total = partial(jax.lax.pmean, axis_name=TASKS), partial(jax.lax.psum, axis_name=TASKS)
    statistics = {name: value for name, value in state.items() if name != LOG}
    row = state[LOG]["row"]
    loss, objective, log_prior = mean((row.loss, row.objective, row.log_prior))
    residual = jax.lax.pmax(row.residual, TASKS)
    row = StepLog(loss, objective, log_prior, residual, total(row.failures), total(row.clipped))
    return {**mean(statistics), LOG: {"row": row}}


def _for_one_task(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """What vmap does to a batch of one task, without a batch: that takes a processor a third of the time."""

    def alone(*stacked: Any) -> Outcome:
        outcome = function(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], outcome)

    return alone


def latent_process(kernel: Any, hyper: Hyper, classes: int) -> Process:
    """The latent GP of a base kernel on features, for one number of classes."""
    return Process(
        lambda features: gaussian_prior(kernel, hyper, features, classes),
        lambda support, query: gaussian_query(kernel, hyper, support, query, classes),
    )


def _restored(like: nnx.State, values: dict) -> nnx.State:
    restored = jax.tree.map(lambda leaf: leaf, like)
    nnx.replace_by_pure_dict(restored, values)
    return restored


def _no_guide(*_: Any) -> None:
    """Hyper-parameters are point estimates: nothing is sampled."""


def _empty_log() -> StepLog:
    zero, none = jnp.zeros(()), jnp.zeros((), int)
    return StepLog(zero, zero, zero, zero, none, none)
