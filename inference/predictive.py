"""Labels at new inputs: one path for every inference kernel (G7, then the likelihood)."""

from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Key, Shaped

from fewshot.models.gaussian import (
    JointMarginals,
    Marginals,
    Posterior,
    Query,
)
from fewshot.models.likelihoods.base import (
    ClassLikelihood,
    CompositeLikelihood,
    GaussianLikelihood,
    Likelihood,
    RealLikelihood,
)

FEWEST_DRAWS = 32


def predictive_distribution(
    key: Key[Array, ""],
    likelihood: Likelihood,
    posterior: Posterior,
    query: Query,
    classes: Bool[Array, " C"] | None = None,
) -> dist.Distribution:
    """p(y_* | data) with batch shape [Q]: probabilities of the classes, or of real labels what the likelihood says."""
    if isinstance(likelihood, RealLikelihood):
        return likelihood.distribution(posterior.predict(query))
    return dist.CategoricalProbs(predict(key, likelihood, posterior, query, classes))


def log_predictive(
    key: Key[Array, ""], likelihood: Likelihood, posterior: Posterior, query: Query, y: Shaped[Array, " Q"]
) -> Float[Array, " Q"]:
    """log p(y_* | data) of every query; a probability that underflows counts as the smallest normal number."""
    return log_predictive_at(key, likelihood, posterior.predict(query), y)


def log_predictive_at(
    key: Key[Array, ""], likelihood: Likelihood, marginals: Marginals | JointMarginals, y: Shaped[Array, " Q"]
) -> Float[Array, " Q"]:
    """The same of marginals of q, by draws: objectives are differentiated, for which sums take more memory."""
    if isinstance(likelihood, RealLikelihood):
        return likelihood.distribution(marginals).log_prob(y)
    return _log_of_own(predict_marginals(key, _drawn(likelihood), marginals), y)


def log_expected_density(
    key: Key[Array, ""], likelihood: Likelihood, marginals: Marginals | JointMarginals, y: Shaped[Array, " N"]
) -> Float[Array, " N"]:
    """log E_q p(y_n | f_n), the density as inference sees it: of one-vs-each it is not normalised over the label."""
    if isinstance(likelihood, GaussianLikelihood):
        return _log_integral(likelihood, marginals, y)
    if isinstance(likelihood, CompositeLikelihood):
        return _log_of_own(likelihood.expected_density(key, marginals), y)
    if getattr(likelihood, "plug_in", False):
        return log_predictive_at(key, replace(cast(Any, likelihood), plug_in=False), marginals, y)
    return log_predictive_at(key, likelihood, marginals, y)


def _log_integral(
    likelihood: GaussianLikelihood, marginals: Marginals | JointMarginals, y: Shaped[Array, " N"]
) -> Float[Array, " N"]:
    """log E_q p(y_n | f_n) of a likelihood that is log p(y_n | 0) + h f - 1/2 W f^2, f of every class on its own."""
    mean, variance = marginals.mean, marginals.variance
    shift, precision = likelihood.gaussian_sites(y, mean.shape[0])
    wider, left = 1 + precision * variance, shift - precision * mean
    terms = (shift + left) * mean + variance / wider * left**2 - jnp.log(wider)
    return likelihood.log_prob(y, jnp.zeros_like(mean)) + 0.5 * jnp.sum(terms, axis=0)


def _log_of_own(values: Float[Array, "Q C"], y: Shaped[Array, " Q"]) -> Float[Array, " Q"]:
    own = jnp.take_along_axis(values, y[:, None], axis=1)[:, 0]
    return jnp.log(jnp.maximum(own, jnp.finfo(own.dtype).tiny))


def predict(
    key: Key[Array, ""],
    likelihood: Likelihood,
    posterior: Posterior,
    query: Query,
    classes: Bool[Array, " C"] | None = None,
) -> Float[Array, "Q C"]:
    """p(y_* = k | data) = E_q p(k | f_*) for every query; the draws are shared, so no query depends on another.

    Raises TypeError for a likelihood of real labels, of which there are no probabilities.
    """
    return predict_marginals(key, likelihood, posterior.predict(query), classes)


def predict_marginals(
    key: Key[Array, ""],
    likelihood: Likelihood,
    marginals: Marginals | JointMarginals,
    classes: Bool[Array, " C"] | None = None,
) -> Float[Array, "Q C"]:
    """E_q p(k | f_*) from the marginals of q; those of a mixture have a leading axis over its components.

    For a mixture it is the mean over the components, which divide the likelihood's draws between them: of their
    densities, normalised at the end, where a likelihood is not normalised over the label (O12).
    """
    if not isinstance(likelihood, ClassLikelihood):
        raise TypeError(f"{type(likelihood).__name__} has real labels, of which there are no class probabilities")
    if marginals.mean.ndim == 2:
        return likelihood.predict(key, marginals, classes)
    keys = jax.random.split(key, marginals.mean.shape[0])
    share = _with_fewer_draws(likelihood, len(keys))
    each = share.expected_density if isinstance(share, CompositeLikelihood) else share.predict
    mean = jnp.mean(jax.vmap(lambda one, component: each(one, component, classes))(keys, marginals), axis=0)
    return mean / jnp.sum(mean, axis=1, keepdims=True)


def _with_fewer_draws(likelihood: Any, components: int) -> Any:
    """The likelihood with its prediction draws divided between the components of a mixture, FEWEST_DRAWS at least."""
    if not hasattr(likelihood, "prediction_draws"):
        return likelihood
    return replace(_drawn(likelihood), prediction_draws=draws_of_each(likelihood.prediction_draws, components))


def _drawn(likelihood: Any) -> Any:
    """The likelihood with predictions by draws."""
    return replace(likelihood, summed=False) if hasattr(likelihood, "summed") else likelihood


def draws_of_each(draws: int, components: int) -> int:
    """An even share of the draws for each component of a mixture, FEWEST_DRAWS at least."""
    share = draws // components
    return max(FEWEST_DRAWS, share + share % 2)


def temper(probabilities: Float[Array, "*rest C"], temperature: float | Float[Array, "..."]) -> Float[Array, "*rest C"]:
    """Probabilities raised to 1 / temperature and normalised: above 1 less confident, below 1 more; ranks stay.

    Several temperatures are an array that broadcasts to the probabilities, 1 wide in C.
    """
    logits = jnp.log(jnp.maximum(probabilities, jnp.finfo(probabilities.dtype).tiny))
    highest = jnp.max(logits, axis=-1, keepdims=True)  # 0 of them, however small the temperature
    return jax.nn.softmax((logits - highest) / temperature, axis=-1)
