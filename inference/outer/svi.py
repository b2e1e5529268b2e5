"""The outer loop: `numpyro.infer.SVI` with an optax optimiser learns the deep kernel over batches of tasks.

The NumPyro model registers the network and the priors of its hyper-parameters; the loss runs the inner loop:

    loss = -[(1/T) sum_t L_t + log p(phi)] / N        (N labelled points, phi the hyper-parameters)

The network is evaluated once a step, on all images of all tasks. Everything random is a function of (seed, step).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI
from numpyro.infer.elbo import ELBO
from numpyro.infer.svi import SVIState
from numpyro.primitives import mutable

from inference.inner.base import Code, InferenceKernel
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

    Steps are dispatched one by one: on CPU, XLA runs a convolution inside a loop hundreds of times slower.
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
) -> Trainer:
    """Outer loop over the tasks that `sampler` draws, one from each key.

    The task of (step, index) is a function of `key` and nothing else. A sampler that holds images should be a
    `jax.tree_util.Partial` of them: its arrays are arguments of the compiled step, those of a closure constants in it.
    Raises ValueError for combinations that make no sense (`check_combination`).
    """
    check_combination(recipe.inference(recipe.likelihood), recipe.objective, recipe.hypergradient)
    init_key, data_key, loop_key = jax.random.split(key, 3)
    graph, params, *others = nnx.split(_Embedding(deep_kernel), nnx.Param, ...)
    rest = others[0]
    loss = _OuterLoss(recipe, deep_kernel, classes)

    def model(*tasks_and_keys: Any) -> _Embedded:
        # Merged anew each time: NumPyro's registration writes traced values into the module that it is given.
        return _outer_model(nnx.merge(graph, params, rest, copy=True), recipe.likelihood, *tasks_and_keys)

    svi = SVI(model, _no_guide, optimiser, loss)

    held = sampler if isinstance(sampler, jax.tree_util.Partial) else jax.tree_util.Partial(sampler)

    def batch(index: Array, sampler: Callable) -> tuple[LabelledTasks, Array]:
        def keys(base: Array) -> Array:
            return jax.random.split(jax.random.fold_in(base, index), tasks_per_step)

        return jax.vmap(sampler)(keys(data_key)), keys(loop_key)

    def init(sampler: Callable) -> SVIState:
        state = svi.init(init_key, *batch(jnp.asarray(0), sampler))
        # One batch has been recorded in the running statistics by then: training starts from the module's own.
        initial = {**state.mutable_state, f"{NETWORK}$state": {"state": nnx.to_pure_dict(rest)}}
        return state._replace(
            mutable_state=jax.tree.map(jnp.asarray, initial) if nnx.to_pure_dict(rest) else state.mutable_state
        )

    @partial(jax.jit, donate_argnums=0)
    def step(state: SVIState, index: Int[Array, ""], sampler: Callable) -> tuple[SVIState, StepLog]:
        following, _ = svi.update(state, *batch(index, sampler))
        # SVI's own key plays no part: held fixed, a state is a function of parameters and step alone.
        return following._replace(rng_key=state.rng_key), following.mutable_state[LOG]["row"]

    def module(state: SVIState) -> tuple[DeepKernel, Likelihood]:
        # A copy: the next step is given the state's own arrays, and they are gone with it.
        state = jax.tree.map(jnp.copy, state)
        values = svi.optim.get_params(state.optim_state)
        learned = nnx.merge(graph, params, rest, copy=True)
        nnx.update(learned, _restored(params, values[f"{NETWORK}$params"]))
        if f"{NETWORK}$state" in state.mutable_state:
            nnx.update(learned, _restored(rest, state.mutable_state[f"{NETWORK}$state"]["state"]))
        return learned.deep_kernel, recipe.likelihood.with_parameters(values.get(LIKELIHOOD, {}))

    jax.eval_shape(init, held)  # SVI learns the constraints of its parameters when it is initialised
    return Trainer(partial(jax.jit(init), held), Step(step, held), module)


class Step(NamedTuple):
    """One optimiser step: step(state, index) -> (state, StepLog). The jitted function takes the sampler last."""

    jitted: Any
    sampler: Callable

    def __call__(self, state: SVIState, index: Int[Array, ""] | int) -> tuple[SVIState, StepLog]:
        return self.jitted(state, index, self.sampler)

    def lower(self, state: SVIState, index: Int[Array, ""] | int) -> Any:
        """`jax.jit`'s `lower`; what it compiles to takes (state, index, sampler)."""
        return self.jitted.lower(state, index, self.sampler)


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

    def __init__(self, recipe: Recipe, deep_kernel: DeepKernel, classes: int):
        super().__init__(num_particles=1)
        self.recipe, self.kernel, self.classes = recipe, deep_kernel.kernel, classes

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, tasks: LabelledTasks, keys: Array
    ) -> dict[str, Any]:
        """Loss, and the mutable state with the running statistics and the log of this step."""
        del guide
        with handlers.trace() as sites, handlers.seed(rng_seed=rng_key), handlers.substitute(data=param_map):
            embedded = model(tasks, keys)
        outcome = jax.vmap(lambda *task: self._task(embedded, *task))(keys, embedded.features, tasks)
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
