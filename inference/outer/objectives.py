"""What the outer loop maximises for one task: E1 (elbo), E2 (evidence), E3 (predictive), in nats.

Each objective takes the features of one task and returns an Outcome; N is the number of labelled points it counts.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from inference.inner.base import InferenceKernel, Info
from inference.outer.hypergradients import Fitted, HyperGradient, sites, unroll
from models.gaussian import GaussianPrior, Query, Sites, log_normaliser
from models.likelihoods.base import Likelihood


class EmbeddedTask(NamedTuple):
    """Features and labels of one task: support [N, D], query [Q, D]."""

    support: Float[Array, "N D"]
    y_support: Int[Array, " N"]
    query: Float[Array, "Q D"]
    y_query: Int[Array, " Q"]


class Process(NamedTuple):
    """The latent GP on features: prior(features) -> GaussianPrior, query(support, query) -> Query."""

    prior: Callable[[Float[Array, "N D"]], GaussianPrior]
    query: Callable[[Float[Array, "N D"], Float[Array, "Q D"]], Query]


class Inner(NamedTuple):
    """The inner loop of one objective: algorithm, number of steps, and how the gradient crosses it."""

    kernel: InferenceKernel
    steps: int
    hypergradient: HyperGradient


class Outcome(NamedTuple):
    """Objective in nats, the number of labelled points it counts, and the inner loop's last Info."""

    value: Float[Array, ""]
    points: int
    info: Info


Objective = Callable[[Key[Array, ""], Inner, Likelihood, Process, EmbeddedTask], Outcome]


def elbo(key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: Process, task: EmbeddedTask) -> Outcome:
    """(E1) lower bound of the merged task: support and query are one labelled set of N + Q points."""
    del likelihood
    prior, y = _merged(process, task)
    fitted = inner.hypergradient(key, inner.kernel, prior, y, None, inner.steps)
    return Outcome(inner.kernel.elbo(fitted.state, fitted.posterior, y, None), len(y), fitted.info)


def evidence(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: Process, task: EmbeddedTask
) -> Outcome:
    """(E2) log normaliser of the merged task's sites, as a gradient; its value is that of (E1).

    log Z + sum_n (E_q log p(y_n | f_n) - E_q log t_n(f_n)) is (E1); the second part is stopped unless the sites are
    differentiable (`exact`, for which it is the likelihood's constant).
    """
    del likelihood
    prior, y = _merged(process, task)
    fitted = inner.hypergradient(key, inner.kernel, prior, y, None, inner.steps)
    bound = inner.kernel.elbo(fitted.state, fitted.posterior, y, None)
    correction = bound + fitted.posterior.kl - _expected_log_sites(fitted.state.sites, fitted)
    if not inner.kernel.traits.differentiable_sites:
        correction = jax.lax.stop_gradient(correction)
    return Outcome(log_normaliser(prior, fitted.state.sites) + correction, len(y), fitted.info)


def predictive(
    key: Key[Array, ""], inner: Inner, likelihood: Likelihood, process: Process, task: EmbeddedTask
) -> Outcome:
    """(E3) sum over queries of log E_q[p(y_* | f_*)], q given the support only."""
    fit_key, predict_key = jax.random.split(key)
    prior = process.prior(task.support)
    fitted = inner.hypergradient(fit_key, inner.kernel, prior, task.y_support, None, inner.steps)
    marginals = fitted.posterior.predict(process.query(task.support, task.query))
    probabilities = likelihood.predict(predict_key, marginals)
    own = jnp.take_along_axis(probabilities, task.y_query[:, None], axis=1)
    return Outcome(jnp.sum(jnp.log(jnp.maximum(own, jnp.finfo(own.dtype).tiny))), len(task.y_query), fitted.info)


def check_combination(kernel: InferenceKernel, objective: Objective, hypergradient: HyperGradient) -> None:
    """Raises ValueError, with the reason, for a product of arguments that makes no sense (METHODS 4)."""
    name = kernel.traits.name
    if not kernel.traits.sites and (hypergradient is not unroll or objective is evidence):
        raise ValueError(
            f"inference {name} has no sites, so it supports the objectives elbo and predictive with the hyper-gradient "
            f"unroll only, got {objective.__name__} with {hypergradient.__name__}"
        )
    if objective is evidence and hypergradient is not sites and not kernel.traits.differentiable_sites:
        raise ValueError(
            f"objective evidence with hyper-gradient {hypergradient.__name__} is refused for {name}: log Z gives a "
            "gradient at fixed sites, its own total derivative is not that of any bound; use hyper-gradient sites"
        )


def _merged(process: Process, task: EmbeddedTask) -> tuple[GaussianPrior, Array]:
    features = jnp.concatenate([task.support, task.query])
    return process.prior(features), jnp.concatenate([task.y_support, task.y_query])


def _expected_log_sites(factors: Sites, fitted: Fitted) -> Array:
    mean, variance = fitted.posterior.mean, fitted.posterior.variance
    return jnp.sum(factors.shift * mean - 0.5 * factors.precision * (mean**2 + variance))
