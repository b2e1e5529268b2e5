"""Exact inference for a likelihood that is Gaussian in f: its sites are known, one step is all there is.

The sites are a function of the likelihood's noise and nothing is stopped at them, so the outer loop learns the noise.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fewshot.inference.inner.base import (
    Code,
    Inference,
    Info,
    Mask,
    Traits,
    classes_of,
    constructor,
    expected_data,
    finite_code,
    gaussian_posterior,
    mask_sites,
    sites_held,
    sum_over_points,
)
from fewshot.models.gaussian import GaussianPosterior, GaussianPrior, Sites
from fewshot.models.likelihoods.base import GaussianLikelihood, Labels


class ExactState(NamedTuple):
    """The likelihood's own sites, and log p(y | f = 0), by which the likelihood exceeds them."""

    sites: Sites
    log_scale: Float[Array, ""]


@constructor("exact", needs=GaussianLikelihood, called="gaussian_sites")
def exact(likelihood: GaussianLikelihood) -> Inference:
    """Exact GP regression on coded labels. Raises TypeError for a likelihood without `gaussian_sites`."""

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None = None) -> ExactState:
        del key
        shift, precision = likelihood.gaussian_sites(y, prior.mean.shape[0])
        sites = Sites(shift.astype(prior.mean.dtype), precision.astype(prior.mean.dtype))
        at_zero = likelihood.log_prob(y, jnp.zeros_like(prior.mean), classes_of(mask))
        return ExactState(mask_sites(sites, mask), sum_over_points(at_zero, mask))

    def step(
        key: Key[Array, ""], state: ExactState, prior: GaussianPrior, y: Labels, mask: Mask | None = None
    ) -> tuple[ExactState, Info]:
        del key
        bound = elbo(state, prior.given(state.sites), y, mask)
        code = finite_code(bound)
        # Nothing is to be had from sites whose bound is not finite. And what is computed from the state then waits for
        # the bound: factorisations of large batches that run side by side can hang (models/gaussian/diagonal.py).
        state = state._replace(sites=jax.tree.map(lambda leaf: jnp.where(code == Code.OK, leaf, jnp.nan), state.sites))
        return state, Info(bound, jnp.zeros_like(bound), code, jnp.asarray(0))

    def elbo(state: ExactState, posterior: GaussianPosterior, y: Labels, mask: Mask | None = None) -> Array:
        del state
        return expected_data(likelihood, y, posterior.marginals, None, mask) - posterior.kl

    def log_evidence(state: ExactState, prior: GaussianPrior) -> Float[Array, ""]:
        return prior.log_normaliser(state.sites) + state.log_scale

    traits = Traits("exact", differentiable_sites=True, evidence_value=True)
    return Inference(init, step, sites_held, gaussian_posterior, elbo, log_evidence, traits)
