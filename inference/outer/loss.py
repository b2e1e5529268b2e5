"""The loss of one training step, as a NumPyro model and an `ELBO` that `numpyro.infer.SVI` drives.

What is learned is an NNX module whose call answers a batch of tasks with an `Outcome`. The NumPyro model registers it,
and the priors of its hyper-parameters:

    loss = -[objective + log p(phi)] / N        (N labelled points of a task, phi the hyper-parameters)
"""

import enum
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int, PyTree
from numpyro import handlers
from numpyro.contrib.module import nnx_module
from numpyro.infer.elbo import ELBO
from numpyro.primitives import mutable

from fewshot.models.kernels import Hyper

NETWORK, LOG = "network", "log"

ForEach = Callable[[Callable[..., PyTree]], Callable[..., PyTree]]


class Reduction(enum.Enum):
    """How a diagnostic of several tasks, devices or steps becomes one number. Sums are whole numbers."""

    MEAN = "mean"
    MAX = "max"
    SUM = "sum"


class Outcome(NamedTuple):
    """What a learnable module says of the tasks of a step.

    objective: what is maximised, in nats, the mean over the tasks; points: the labelled points of a task that it
    counts; diagnostics: by the names of `Learnable.diagnostics`, over all tasks of the call.
    """

    objective: Float[Array, ""]
    points: Int[Array, ""] | int
    diagnostics: dict[str, Array]


@runtime_checkable
class Learnable(Protocol):
    """What the outer loop learns: an NNX module.

    diagnostics: its fields of `Outcome.diagnostics`, and how those of several devices are combined.
    """

    diagnostics: ClassVar[Mapping[str, Reduction]]

    def __call__(self, keys: Array, tasks: PyTree, for_each: ForEach) -> tuple[Outcome, Hyper]:
        """The outcome of tasks [T], one key [T] each, and the hyper-parameters; `for_each` maps over the tasks."""
        ...

    def priors(self) -> dict[str, dist.Distribution]:
        """The prior of each hyper-parameter."""
        ...


class StepLog(NamedTuple):
    """Diagnostics of one training step. objective and log_prior are the two parts of the loss, per point."""

    loss: Float[Array, ""]
    objective: Float[Array, ""]
    log_prior: Float[Array, ""]
    diagnostics: dict[str, Array]


def outer_model(module: Learnable, for_each: ForEach, tasks: PyTree, keys: Array) -> Outcome:
    """The module and the priors of its hyper-parameters, as NumPyro sites."""
    outcome, hyper = nnx_module(NETWORK, module)(keys, tasks, for_each)
    priors = module.priors()
    for name, value in hyper.items():
        numpyro.sample(f"{name}_prior", priors[name], obs=value)
    mutable(LOG, {"row": _empty_log(module.diagnostics)})
    return outcome


class OuterLoss(ELBO):
    """The loss of the outer loop; a subclass of NumPyro's ELBO so that SVI drives it."""

    def __init__(self) -> None:
        super().__init__(num_particles=1)

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict, model: Callable, guide: Callable, tasks: PyTree, keys: Array
    ) -> dict[str, PyTree]:
        """Loss, and the mutable state with the running statistics and the log of this step."""
        del guide
        with handlers.trace() as sites, handlers.seed(rng_seed=rng_key), handlers.substitute(data=param_map):
            outcome = model(tasks, keys)
        log_prior = sum(
            jnp.sum(site["fn"].log_prob(site["value"])) for site in sites.values() if site["type"] == "sample"
        )
        loss = -(outcome.objective + log_prior) / outcome.points
        row = StepLog(
            loss,
            outcome.objective / outcome.points,
            jnp.asarray(log_prior / outcome.points, loss.dtype),
            outcome.diagnostics,
        )
        state = {name: site["value"] for name, site in sites.items() if site["type"] == "mutable"}
        return {"loss": loss, "mutable_state": jax.lax.stop_gradient({**state, LOG: {"row": row}})}


def _empty_log(diagnostics: Mapping[str, Reduction]) -> StepLog:
    zero, none = jnp.zeros(()), jnp.zeros((), int)
    empty = {name: none if how is Reduction.SUM else zero for name, how in diagnostics.items()}
    return StepLog(zero, zero, zero, empty)
