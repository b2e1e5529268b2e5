"""Posteriors of one labelled task: fitted, sampled, and under other likelihoods."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from numpyro.infer import MCMC

from fewshot import tasks
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.scoring import embed_images
from fewshot.inference import diagnostics
from fewshot.inference.inner import exact
from fewshot.inference.inner.base import MAX_STEPS, Info, fit
from fewshot.inference.inner.settle import fit_pooled
from fewshot.inference.mcmc import GibbsKernel, nuts
from fewshot.learners import GaussianProcess
from fewshot.models.gaussian import GaussianPrior, Posterior, Query
from fewshot.models.likelihoods.base import AugmentedLikelihood, GaussianLikelihood, Likelihood
from fewshot.tasks import Dataset

CHAINS = 4
Tell = Callable[[str], None]  # takes what begins now, for whoever waits


def silent(_: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class LabelledTask:
    """One test task: prior and labels [N] of the support, query and its labels [Q]."""

    prior: GaussianPrior
    y: Int[Array, " N"]
    query: Query
    y_query: Int[np.ndarray, " Q"]

    def under(self, likelihood: Likelihood) -> "LabelledTask":
        """The same kernel with the prior mean at which this likelihood's starts, where the mean matters to it."""
        if likelihood.prior_mean is None:
            return self
        prior = self.prior._replace(mean=jnp.full_like(self.prior.mean, likelihood.prior_mean))
        query = self.query._replace(mean=jnp.full_like(self.query.mean, likelihood.prior_mean))
        return replace(self, prior=prior, query=query)

    def nll(self, probabilities: Float[np.ndarray, "Q C"]) -> float:
        """Mean negative log probability of the queries' labels."""
        return float(-np.log(probabilities[np.arange(len(self.y_query)), self.y_query]).mean())


class Found(NamedTuple):
    """What one method found: ArviZ data, summary of f, PSIS-LOO, k-hat (None for samplers), p(y_* | data) [Q, C]."""

    data: diagnostics.ArvizData
    summary: diagnostics.Table
    loo: diagnostics.LeaveOneOut
    pareto_k: float | None
    probabilities: np.ndarray

    @property
    def f(self) -> np.ndarray:
        """Draws [chains, draws, C, N]."""
        return np.asarray(self.data["posterior"]["f"])


def labelled_task(learner: GaussianProcess, dataset: Dataset, episodes: Episodes) -> LabelledTask:
    """The first of the episodes, on the features of its images."""
    indices = jax.tree.map(lambda values: values[0], episodes.indices)
    images = tasks.flat_images(dataset)
    support, new = (embed_images(learner, images[positions]) for positions in (indices.x_support, indices.x_query))
    process, way = learner.deep_kernel.process(episodes.shape.shot), episodes.shape.way
    prior, query = process.prior(support, way), process.query(support, new, way)
    return LabelledTask(prior, indices.y_support, query, np.asarray(indices.y_query))


def found(
    key: Key[Array, ""],
    source: Posterior | MCMC,
    likelihood: Likelihood,
    task: LabelledTask,
    draws: int,
    pareto_k: float | None = None,
) -> Found:
    """Draws of a posterior, or those of an MCMC object that has run, and what ArviZ says of them."""
    data = diagnostics.to_arviz(key, source, likelihood, task.prior, task.y, task.query, draws)
    summary, loo = diagnostics.summary_table(data), diagnostics.psis_loo(data)
    return Found(data, summary, loo, pareto_k, diagnostics.probabilities(data))


def own_methods(
    learner: GaussianProcess, task: LabelledTask, own: str, seed: int, draws: int, tell: Tell = silent
) -> tuple[dict[str, Found], Info]:
    """The run's own inference (first, under the name `own`) and samplers; Info of each step of the first."""
    fit_key, own_key, k_key, gibbs_key, nuts_key, data_key = jax.random.split(jax.random.key(seed), 6)
    algorithm, likelihood = learner.inference, learner.likelihood
    fitted = fit_pooled if algorithm.traits.sampled else partial(fit, steps=MAX_STEPS)
    tell(own)
    state, path = jax.jit(lambda key: fitted(key, algorithm, task.prior, task.y))(fit_key)
    k_hat = None
    if not algorithm.traits.sampled:
        k_hat = diagnostics.pareto_k(k_key, algorithm, state, task.prior, likelihood, task.y, draws)
    posterior = algorithm.posterior(state, task.prior)
    methods = {own: found(own_key, posterior, likelihood, task, draws, k_hat)}
    if isinstance(likelihood, AugmentedLikelihood):
        tell("gibbs")
        methods["gibbs"] = found(data_key, run_gibbs(gibbs_key, likelihood, task, draws), likelihood, task, draws)
    tell("nuts")
    methods["nuts"] = found(data_key, run_nuts(nuts_key, likelihood, task, draws), likelihood, task, draws)
    return methods, jax.device_get(path)


def run_gibbs(key: Key[Array, ""], likelihood: AugmentedLikelihood, task: LabelledTask, draws: int) -> MCMC:
    """Gibbs chains that have run; half as many sweeps before."""
    each = draws // CHAINS
    sampler = MCMC(
        GibbsKernel(task.prior, likelihood, task.y),
        num_warmup=each // 2,
        num_samples=each,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(key, extra_fields=("code",))
    return sampler


def run_nuts(key: Key[Array, ""], likelihood: Likelihood, task: LabelledTask, draws: int) -> MCMC:
    """NUTS chains that have run; half as many draws before."""
    each = draws // CHAINS
    sampler = nuts(task.prior, likelihood, task.y, num_warmup=each // 2, num_samples=each, num_chains=CHAINS)
    sampler.run(key, extra_fields=("potential_energy", "num_steps", "accept_prob"))
    return sampler


def under_likelihood(key: Key[Array, ""], likelihood: Likelihood, task: LabelledTask, draws: int) -> tuple[str, Found]:
    """Name and draws of the cheapest exact inference of a likelihood: in closed form, by Gibbs, or by NUTS."""
    run_key, data_key = jax.random.split(key)
    if isinstance(likelihood, GaussianLikelihood):
        kernel = exact(likelihood)
        source: Posterior | MCMC = kernel.posterior(kernel.init(run_key, task.prior, task.y, None), task.prior)
        name = "exact"
    elif isinstance(likelihood, AugmentedLikelihood):
        source, name = run_gibbs(run_key, likelihood, task, draws), "gibbs"
    else:
        source, name = run_nuts(run_key, likelihood, task, draws), "nuts"
    return name, found(data_key, source, likelihood, task, draws)
