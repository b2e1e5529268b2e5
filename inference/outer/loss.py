"""The loss of one training step, as a NumPyro model and an `ELBO` that `numpyro.infer.SVI` drives.

The NumPyro model registers the network and the priors of its hyper-parameters; the loss runs the inner loop:

    loss = -[(1/T) sum_t L_t + log p(phi)] / N        (N labelled points, phi the hyper-parameters)

The network is evaluated once a step, on all images of all tasks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro
from flax import nnx
from jaxtyping import Array, Float, Int
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.infer.elbo import ELBO
from numpyro.primitives import mutable

from inference.inner.base import Code, InferenceKernel
from inference.outer.hypergradients import HyperGradient
from inference.outer.objectives import EmbeddedTask, Inner, Objective, Outcome
from models.deep_kernel import DeepKernel
from models.kernels import Hyper, Kernel
from models.likelihoods.base import Likelihood
from models.process import LatentProcess

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


class Embedding(nnx.Module):
    """The deep kernel as NumPyro registers it: features and hyper-parameters from one call."""

    def __init__(self, deep_kernel: DeepKernel):
        self.deep_kernel = deep_kernel

    def __call__(self, x: Array) -> tuple[Array, Hyper]:
        return self.deep_kernel(x, train=True), self.deep_kernel.hyperparameters()


class Embedded(NamedTuple):
    """What the model returns: features of all images, hyper-parameters, and the likelihood at its own."""

    features: Float[Array, "T N D"]
    hyper: Hyper
    likelihood: Likelihood


def outer_model(embedding: Embedding, likelihood: Likelihood, tasks: LabelledTasks, keys: Array) -> Embedded:
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
    return Embedded(features, hyper, likelihood.with_parameters(learned))


class OuterLoss(ELBO):
    """The loss of the outer loop; a subclass of NumPyro's ELBO so that SVI drives it.

    kernel and classes: those of the latent process; for_each: makes a function of one task one of a batch of tasks.
    """

    def __init__(self, recipe: Recipe, kernel: Kernel, classes: int, for_each: Callable[[Callable], Callable]):
        super().__init__(num_particles=1)
        self.recipe, self.kernel, self.classes, self.for_each = recipe, kernel, classes, for_each

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

    def _task(self, embedded: Embedded, key: Array, features: Array, task: LabelledTasks) -> Outcome:
        shots = task.y_support.shape[0]
        labelled = EmbeddedTask(features[:shots], task.y_support, features[shots:], task.y_query)
        recipe, process = self.recipe, LatentProcess(self.kernel, embedded.hyper)
        inner = Inner(recipe.inference(embedded.likelihood), recipe.inner_steps, recipe.hypergradient, self.classes)
        return recipe.objective(key, inner, embedded.likelihood, process, labelled)


def _empty_log() -> StepLog:
    zero, none = jnp.zeros(()), jnp.zeros((), int)
    return StepLog(zero, zero, zero, zero, none, none)
