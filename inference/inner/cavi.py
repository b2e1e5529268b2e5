"""Coordinate-ascent variational inference for augmented likelihoods (CDKT 4.4a-f; for one-vs-each, its analogue).

q(f) q(aux), by turns:

    q(aux) <- given the marginals of q(f)                 (the likelihood's `aux_posterior`)
    q(f)   <- prior times `expected_sites` of q(aux)      (A1, then G2 and G3)

Every update maximises one bound in one factor, E_q[log p(y, aux | f) - log q(aux)] - KL(q(f) || p(f)), which never
falls (for logistic-softmax q(aux) has two factors, updated in turn). In
the natural parameters of q(f) the second is a full natural-gradient step.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import (
    FixedPoint,
    InferenceKernel,
    Info,
    Mask,
    Traits,
    classes_of,
    finite_code,
    mask_sites,
    prior_marginals_like,
    relative_distance,
    require,
    sum_over_points,
)
from fewshot.models.block_gaussian import JointMarginals
from fewshot.models.gaussian import (
    AnySites,
    GaussianPrior,
    Marginals,
    Sites,
    condition,
    log_normaliser,
    prior_marginals,
)
from fewshot.models.likelihoods.base import AugmentedLikelihood


class CAVIState(NamedTuple):
    """Factors q(aux) and the marginals of the q(f) that belongs to them; labels and mask, which the sites depend on."""

    aux: Any
    marginals: Marginals | JointMarginals
    y: Int[Array, " N"]
    mask: Mask | None


def cavi(likelihood: AugmentedLikelihood) -> InferenceKernel:
    """CAVI for a tier-2 likelihood. Raises TypeError for a likelihood without augmentation."""
    require(isinstance(likelihood, AugmentedLikelihood), "cavi", likelihood, "augmented latents")

    def sites_of(aux: Any, y: Array, mask: Mask | None) -> AnySites:
        return mask_sites(likelihood.expected_sites(y, aux, classes_of(mask)), mask)

    def factors(y: Array, marginals: Marginals | JointMarginals, aux: Any, mask: Mask | None) -> Any:
        return likelihood.aux_posterior(y, marginals, aux, classes_of(mask))

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None) -> CAVIState:
        del key
        aux = factors(y, prior_marginals(prior), None, mask)
        return CAVIState(aux, prior_marginals_like(sites_of(aux, y, mask), prior), y, mask)

    def step(
        key: Key[Array, ""], state: CAVIState, prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None
    ) -> tuple[CAVIState, Info]:
        del key
        aux = factors(y, state.marginals, state.aux, mask)
        current = sites_of(aux, y, mask)
        q = condition(prior, current)
        moved = CAVIState(aux, q.marginals, y, mask)
        bound = elbo(moved, q, y, mask)
        following = sites_of(factors(y, q.marginals, aux, mask), y, mask)
        residual = _residual(current, following, q.marginals)
        return moved, Info(bound, residual, finite_code(bound, residual), jnp.asarray(0))

    def sites(state: CAVIState) -> AnySites:
        return sites_of(state.aux, state.y, state.mask)

    def posterior(state: CAVIState, prior: GaussianPrior) -> Any:
        return condition(prior, sites(state))

    def elbo(state: CAVIState, posterior: Any, y: Int[Array, " N"], mask: Mask | None = None) -> Float[Array, ""]:
        bound = likelihood.augmented_bound(y, posterior.marginals, state.aux, classes_of(mask))
        return sum_over_points(bound, mask) - posterior.kl

    def log_evidence(state: CAVIState, prior: GaussianPrior) -> Float[Array, ""]:
        return log_normaliser(prior, sites(state))

    def update(state: CAVIState, prior: GaussianPrior, y: Array, mask: Mask | None) -> Any:
        return factors(y, condition(prior, sites_of(state.aux, y, mask)).marginals, state.aux, mask)

    fixed_point = FixedPoint(lambda state: state.aux, lambda state, aux: state._replace(aux=aux), update)
    return InferenceKernel(init, step, sites, posterior, elbo, log_evidence, Traits("cavi"), fixed_point)


def _residual(current: AnySites, target: AnySites, marginals: Marginals | JointMarginals) -> Array:
    """max(|alpha - g_m|, |W - W^| v), relative to max(1, |g_m|), with g_m = h^ - W^ m."""
    mean = marginals.mean
    alpha, slope = current.shift - current.times(mean), target.shift - target.times(mean)
    weights, target_weights = _weights(current) * marginals.variance, _weights(target) * marginals.variance
    return jnp.maximum(relative_distance(alpha, slope, slope), relative_distance(weights, target_weights, slope))


def _weights(sites: Any) -> Array:
    return sites.precision if isinstance(sites, Sites) else sites.rays
