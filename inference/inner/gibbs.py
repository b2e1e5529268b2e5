"""Gibbs sampling for augmented likelihoods, many chains in one batch (LS4, O1, O2; OVE section 4).

Two blocks, both drawn exactly: aux | f, y (the likelihood's `aux_conditional`) and f | aux, y, which is Gaussian: the
prior times `sites` of aux, drawn by Matheron's rule (`models.gaussian.draw`). Given the sites of a draw everything
else is Gaussian algebra, so predictions average Gaussians over the chains, not draws of f.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import (
    InferenceKernel,
    Info,
    Mask,
    Posterior,
    Traits,
    classes_of,
    finite_code,
    mask_sites,
    require,
    sum_over_points,
)
from fewshot.models.block_gaussian import BlockPosterior, JointMarginals
from fewshot.models.gaussian import (
    AnySites,
    GaussianPrior,
    Marginals,
    Query,
    condition,
    draw,
    highest_precision,
    log_normaliser,
    root_of,
)
from fewshot.models.likelihoods.base import AugmentedLikelihood


class GibbsState(NamedTuple):
    """M chains: latents f [M, C, N] and aux, drawn given them; labels and mask, which the sites depend on."""

    f: Float[Array, "M C N"]
    aux: Any
    y: Int[Array, " N"]
    mask: Mask | None


class Mixture(NamedTuple):
    """Equal mixture of M posteriors, stacked along a leading axis of every array; so are its marginals."""

    components: Any

    @property
    def kl(self) -> Float[Array, ""]:
        """Mean of KL(component || prior), at least that of the mixture."""
        return jnp.mean(self.components.kl)

    @property
    def marginals(self) -> Marginals | JointMarginals:
        """Marginals of every component at the labelled points."""
        return self.components.marginals

    def predict(self, query: Query) -> Marginals | JointMarginals:
        """Marginals of every component at new inputs."""
        return jax.vmap(lambda component: component.predict(query))(self.components)


def gibbs(likelihood: AugmentedLikelihood, *, chains: int = 20) -> InferenceKernel:
    """Gibbs sampler with `chains` independent chains, each started at a draw of the prior.

    Raises TypeError for a likelihood without augmentation, ValueError for fewer than one chain.
    """
    require(isinstance(likelihood, AugmentedLikelihood), "gibbs", likelihood, "augmented latents")
    if chains < 1:
        raise ValueError(f"chains must be at least 1, got {chains}")

    def sites_of(aux: Any, y: Array, mask: Mask | None) -> AnySites:
        return mask_sites(likelihood.sites(y, aux, classes_of(mask)), mask)

    @highest_precision
    def init(key: Key[Array, ""], prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None) -> GibbsState:
        root, classes = root_of(prior), prior.mean.shape[0]
        f_key, aux_key = jax.random.split(key)
        f = prior.mean + jax.random.normal(f_key, (chains, classes, root.shape[-1]), root.dtype) @ root.T
        return GibbsState(f, conditional(aux_key, f, y, mask), y, mask)

    def conditional(key: Array, f: Array, y: Array, mask: Mask | None) -> Any:
        keys = jax.random.split(key, chains)
        return jax.vmap(lambda one, latent: likelihood.aux_conditional(one, y, latent, classes_of(mask)))(keys, f)

    def step(
        key: Key[Array, ""], state: GibbsState, prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None
    ) -> tuple[GibbsState, Info]:
        f_key, aux_key = jax.random.split(key)
        root = root_of(prior)

        def latents(one: Array, aux: Any) -> Array:
            return draw(one, prior, sites_of(aux, y, mask), root)

        f = jax.vmap(latents)(jax.random.split(f_key, chains), state.aux)
        data = jax.vmap(lambda latent: sum_over_points(likelihood.log_prob(y, latent, classes_of(mask)), mask))(f)
        value = jnp.mean(data)
        code = finite_code(value, jnp.sum(f))
        moved = GibbsState(f, conditional(aux_key, f, y, mask), y, mask)
        return moved, Info(value, jnp.zeros_like(value), code, jnp.asarray(0))

    def sites(state: GibbsState) -> Any:
        return jax.vmap(lambda aux: sites_of(aux, state.y, state.mask))(state.aux)

    def posterior(state: GibbsState, prior: GaussianPrior) -> Mixture:
        return Mixture(jax.vmap(lambda chain: condition(prior, chain))(sites(state)))

    def pool(states: GibbsState) -> GibbsState:
        f, aux = jax.tree.map(lambda draws: draws.reshape(-1, *draws.shape[2:]), (states.f, states.aux))
        y, mask = jax.tree.map(lambda same: same[0], (states.y, states.mask))
        return GibbsState(f, aux, y, mask)

    def elbo(state: GibbsState, posterior: Mixture, y: Int[Array, " N"], mask: Mask | None = None) -> Float[Array, ""]:
        """Mean over the chains of the augmented bound of N(f | sites): a lower bound, if not one that is maximised."""
        del state

        def bound(component: Posterior) -> Array:
            known = _known(component)
            aux = likelihood.aux_posterior(y, known, None, classes_of(mask))
            data = likelihood.augmented_bound(y, known, aux, classes_of(mask))
            return sum_over_points(data, mask) - component.kl

        return jnp.mean(jax.vmap(bound)(posterior.components))

    def log_evidence(state: GibbsState, prior: GaussianPrior) -> Float[Array, ""]:
        """Mean over the chains: by Fisher's identity its gradient estimates that of log p(y) (OVE 39)."""
        return jnp.mean(jax.vmap(lambda chain: log_normaliser(prior, chain))(sites(state)))

    traits = Traits("gibbs", sampled=True)
    return InferenceKernel(init, step, sites, posterior, elbo, log_evidence, traits, pool=pool)


def _known(posterior: Any) -> Marginals | JointMarginals:
    """What the likelihood knows of q: f less that of the own class where the sites are stars: these cost less."""
    if isinstance(posterior, BlockPosterior) and posterior.differences is not None:
        return posterior.differences
    return posterior.marginals
