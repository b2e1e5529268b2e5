"""Coordinate-ascent variational inference for augmented likelihoods (CDKT 4.4a-f; for one-vs-each, its analogue).

q(f) q(aux), by turns:

    q(aux) <- given the marginals of q(f)                 (the likelihood's `aux_posterior`)
    q(f)   <- prior times `expected_sites` of q(aux)      (A1, then G2 and G3)

Every update maximises one bound in one factor, E_q[log p(y, aux | f) - log q(aux)] - KL(q(f) || p(f)), which never
falls (for logistic-softmax q(aux) has two factors, updated in turn). In
the natural parameters of q(f) the second is a full natural-gradient step.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fewshot.inference.inner.base import (
    FixedPoint,
    Inference,
    Info,
    Mask,
    Traits,
    classes_of,
    constructor,
    finite_code,
    mask_sites,
    relative_distance,
    sum_over_points,
)
from fewshot.models.gaussian import (
    AnyMarginals,
    AnySites,
    GaussianPosterior,
    GaussianPrior,
    Posterior,
)
from fewshot.models.likelihoods.base import AugmentedLikelihood, Aux, Labels


class CAVIState(NamedTuple):
    """Factors q(aux) and the marginals of the q(f) that belongs to them; labels and mask, which the sites depend on."""

    aux: Aux
    marginals: AnyMarginals
    y: Labels
    mask: Mask | None


@constructor("cavi", needs=AugmentedLikelihood, called="augmented latents")
def cavi(likelihood: AugmentedLikelihood) -> Inference:
    """CAVI for a tier-2 likelihood. Raises TypeError for a likelihood without augmentation."""

    def sites_of(aux: Aux, y: Array, mask: Mask | None) -> AnySites:
        return mask_sites(likelihood.expected_sites(y, aux, classes_of(mask)), mask)

    def factors(y: Array, marginals: AnyMarginals, aux: Aux, mask: Mask | None) -> Aux:
        return likelihood.aux_posterior(y, marginals, aux, classes_of(mask))

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None = None) -> CAVIState:
        del key
        aux = factors(y, prior.marginals(), None, mask)
        return CAVIState(aux, sites_of(aux, y, mask).prior_marginals(prior), y, mask)

    def step(
        key: Key[Array, ""], state: CAVIState, prior: GaussianPrior, y: Labels, mask: Mask | None = None
    ) -> tuple[CAVIState, Info]:
        del key
        aux = factors(y, state.marginals, state.aux, mask)
        current = sites_of(aux, y, mask)
        q = prior.given(current)
        moved = CAVIState(aux, q.marginals, y, mask)
        bound = elbo(moved, q, y, mask)
        following = sites_of(factors(y, q.marginals, aux, mask), y, mask)
        residual = _residual(current, following, q.marginals)
        return moved, Info(bound, residual, finite_code(bound, residual), jnp.asarray(0))

    def sites(state: CAVIState) -> AnySites:
        return sites_of(state.aux, state.y, state.mask)

    def posterior(state: CAVIState, prior: GaussianPrior) -> GaussianPosterior:
        return prior.given(sites(state))

    def elbo(state: CAVIState, posterior: Posterior, y: Labels, mask: Mask | None = None) -> Float[Array, ""]:
        bound = likelihood.augmented_bound(y, posterior.marginals, state.aux, classes_of(mask))
        return sum_over_points(bound, mask) - posterior.kl

    def log_evidence(state: CAVIState, prior: GaussianPrior) -> Float[Array, ""]:
        return prior.log_normaliser(sites(state))

    def update(state: CAVIState, prior: GaussianPrior, y: Array, mask: Mask | None) -> Aux:
        return factors(y, prior.given(sites_of(state.aux, y, mask)).marginals, state.aux, mask)

    fixed_point = FixedPoint(lambda state: state.aux, lambda state, aux: state._replace(aux=aux), update)
    return Inference(init, step, sites, posterior, elbo, log_evidence, Traits("cavi"), fixed_point)


def _residual(current: AnySites, target: AnySites, marginals: AnyMarginals) -> Array:
    """max(|alpha - g_m|, |W - W^| v), relative to max(1, |g_m|), with g_m = h^ - W^ m."""
    mean = marginals.mean
    alpha, slope = current.shift - current.times(mean), target.shift - target.times(mean)
    return jnp.maximum(relative_distance(alpha, slope, slope), current.distance(target, marginals, slope))
