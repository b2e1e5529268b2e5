"""What the outer loop maximises for one task, in nats: E1 (elbo), E2 (evidence), E3 (predictive), E4, E5 (cavities).

Each objective takes the features of one task and returns a TaskOutcome; N is the number of labelled points it counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, Shaped

from fewshot.inference.inner.base import Inference, Info
from fewshot.inference.outer.hypergradients import Fitted, HyperGradient, implicit, sites, unroll
from fewshot.inference.predictive import log_expected_density, log_predictive, log_predictive_at
from fewshot.models.gaussian import AnySites, GaussianPrior
from fewshot.models.likelihoods.base import Labels, Likelihood
from fewshot.models.process import LatentProcess


class EmbeddedTask(NamedTuple):
    """Features and labels of one task: support [N, D], query [Q, D]."""

    support: Float[Array, "N D"]
    y_support: Labels
    query: Float[Array, "Q D"]
    y_query: Shaped[Array, " Q"]


class Inner(NamedTuple):
    """The inner loop of one objective: algorithm, number of steps, how the gradient crosses it, classes of a task."""

    inference: Inference
    steps: int
    hypergradient: HyperGradient
    classes: int


class TaskOutcome(NamedTuple):
    """Objective of one task in nats, the number of labelled points it counts, and the inner loop's last Info."""

    value: Float[Array, ""]
    points: int
    info: Info


Objective = Callable[[Key[Array, ""], Inner, Likelihood, LatentProcess, EmbeddedTask], TaskOutcome]


def elbo(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: LatentProcess, task: EmbeddedTask
) -> TaskOutcome:
    """(E1) lower bound of the merged task: support and query are one labelled set of N + Q points."""
    del likelihood
    prior, y = _merged(process, task, inner.classes)
    fitted = inner.hypergradient(key, inner.inference, prior, y, None, inner.steps)
    return TaskOutcome(inner.inference.elbo(fitted.state, fitted.posterior, y, None), len(y), fitted.info)


def evidence(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: LatentProcess, task: EmbeddedTask
) -> TaskOutcome:
    """(E2) log evidence of the merged task's sites; where that is a gradient only, its value is that of (E1).

    Sites in which the likelihood's parameters do not appear (`cvi`) leave log Z without a gradient in them: those are
    learned by (E1) at fixed q.
    """
    del likelihood
    prior, y = _merged(process, task, inner.classes)
    fitted = inner.hypergradient(key, inner.inference, prior, y, None, inner.steps)
    if inner.inference.log_evidence is None:
        raise ValueError(f"inference {inner.inference.traits.name} has no sites, so it has no evidence")
    value = inner.inference.log_evidence(fitted.state, prior)
    if not inner.inference.traits.evidence_value:
        held = jax.lax.stop_gradient(fitted.posterior)  # so that the bound is a function of those parameters alone
        bound = inner.inference.elbo(fitted.state, held, y, None)
        if not inner.inference.traits.free_sites:
            bound = jax.lax.stop_gradient(bound)
        value = value - jax.lax.stop_gradient(value) + bound
    return TaskOutcome(value, len(y), fitted.info)


def predictive(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: LatentProcess, task: EmbeddedTask
) -> TaskOutcome:
    """(E3) sum over queries of log E_q[p(y_* | f_*)], q given the support only."""
    fit_key, predict_key = jax.random.split(key)
    prior = process.prior(task.support, inner.classes)
    fitted = inner.hypergradient(fit_key, inner.inference, prior, task.y_support, None, inner.steps)
    query = process.query(task.support, task.query, inner.classes)
    found = log_predictive(predict_key, likelihood, fitted.posterior, query, task.y_query)
    return TaskOutcome(jnp.sum(found), len(task.y_query), fitted.info)


def cavity_evidence(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: LatentProcess, task: EmbeddedTask
) -> TaskOutcome:
    """(E4) log Z of the merged task's sites, each exchanged for the likelihood in its cavity, as EP has it.

    Where sites are the likelihood but for a constant it is log p(y).
    """
    fitted, held, y, new_key = _in_cavities(key, inner, process, task)
    total = _merged(process, task, inner.classes)[0].log_normaliser(held)
    cavities, log_sites = fitted.posterior.marginals.without(held)
    exchanged = log_expected_density(new_key, likelihood, cavities, y) - log_sites
    return TaskOutcome(total + jnp.sum(exchanged), len(y), fitted.info)


def leave_one_out(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: LatentProcess, task: EmbeddedTask
) -> TaskOutcome:
    """(E5) sum over the merged task of log p(y_n | the others), each predicted from q without its own site."""
    fitted, held, y, new_key = _in_cavities(key, inner, process, task)
    cavities, _ = fitted.posterior.marginals.without(held)
    return TaskOutcome(jnp.sum(log_predictive_at(new_key, likelihood, cavities, y)), len(y), fitted.info)


OF_CAVITIES = (cavity_evidence, leave_one_out)


def check_combination(inference: Inference, objective: Objective, hypergradient: HyperGradient) -> None:
    """Raises ValueError, with the reason, for a product of arguments that makes no sense (docs/hypergradients.md)."""
    reason = refusal(inference, objective, hypergradient)
    if reason:
        name = objective.__name__.replace("_", "-")
        raise ValueError(
            f"inference {inference.traits.name} with objective {name} and hyper-gradient "
            f"{hypergradient.__name__} is refused: {reason}"
        )


def refusal(inference: Inference, objective: Objective, hypergradient: HyperGradient) -> str:
    """Why a combination makes no sense; empty where it does."""
    traits = inference.traits
    if inference.sites is None and (hypergradient is not unroll or objective in (evidence, *OF_CAVITIES)):
        return "it has no sites, so it supports the objectives elbo and predictive with the hyper-gradient unroll only"
    if traits.sampled and hypergradient is not sites:
        return "its states are random draws, through which no gradient passes; use hyper-gradient sites"
    if traits.sampled and objective is elbo:
        return "draws maximise no bound; use evidence (Fisher's identity) or predictive"
    if traits.sampled and objective in OF_CAVITIES:
        return "a draw without one of its sites is no draw of what the other labels say; use evidence or predictive"
    if hypergradient is implicit and inference.fixed_point is None:
        return "it names no fixed point (Inference.fixed_point) to differentiate; use hyper-gradient sites"
    if objective is evidence and hypergradient is sites and traits.evidence_value and not traits.differentiable_sites:
        return "its evidence follows its mode, which fixed sites do not; use hyper-gradient implicit or unroll"
    if objective is evidence and hypergradient is not sites and not traits.evidence_value:
        return (
            "log Z gives a gradient at fixed sites, its own total derivative is not that of any bound; use "
            "hyper-gradient sites"
        )
    return ""


def _in_cavities(
    key: Key[Array, ""], inner: Inner, process: LatentProcess, task: EmbeddedTask
) -> tuple[Fitted, AnySites, Array, Array]:
    """The fit of the merged task, its sites and labels, and a key for expectations in the cavities."""
    fit_key, new_key = jax.random.split(key)
    prior, y = _merged(process, task, inner.classes)
    fitted = inner.hypergradient(fit_key, inner.inference, prior, y, None, inner.steps)
    if inner.inference.sites is None:
        raise ValueError(f"inference {inner.inference.traits.name} has no sites, so it has no cavities")
    return fitted, inner.inference.sites(fitted.state), y, new_key


def _merged(process: LatentProcess, task: EmbeddedTask, classes: int) -> tuple[GaussianPrior, Array]:
    features = jnp.concatenate([task.support, task.query])
    return process.prior(features, classes), jnp.concatenate([task.y_support, task.y_query])
