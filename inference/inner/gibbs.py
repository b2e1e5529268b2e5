"""Gibbs sampling for augmented likelihoods, many chains in one batch (LS4, O1, O2; OVE section 4).

Two blocks, both drawn exactly: aux | f, y (the likelihood's `aux_conditional`) and f | aux, y, which is Gaussian: the
prior times `sites` of aux, drawn by Matheron's rule (`GaussianPrior.draw`). Given the sites of a draw everything
else is Gaussian algebra, so predictions average Gaussians over the chains, not draws of f.

Where the blocks hardly move each other (logistic-softmax at small temperatures) a sweep also takes elliptical slices
under the likelihood without its augmentation, of one class or of what all share (LS8), after f | aux and before
aux | f, y: they leave p(f | y) invariant, and aux is drawn anew given where they end, so that the joint distribution
stays. They need no factorisation.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from fewshot.inference.inner.base import (
    Inference,
    Info,
    Mask,
    Traits,
    classes_of,
    constructor,
    finite_code,
    mask_sites,
    sum_over_points,
)
from fewshot.inference.inner.elliptical import Part, elliptical_slice
from fewshot.models.gaussian import (
    AnyMarginals,
    AnySites,
    GaussianPosterior,
    GaussianPrior,
    Query,
    highest_precision,
    root_of,
)
from fewshot.models.likelihoods.base import AugmentedLikelihood, Aux, Labels, Likelihood, SlicedLikelihood


class GibbsState(NamedTuple):
    """M chains: latents f [M, C, N] and aux, drawn given them; labels and mask, which the sites depend on."""

    f: Float[Array, "M C N"]
    aux: Aux
    y: Labels
    mask: Mask | None


class Mixture(NamedTuple):
    """Equal mixture of M posteriors, stacked along a leading axis of every array; so are its marginals."""

    components: PyTree

    @property
    def kl(self) -> Float[Array, ""]:
        """Mean of KL(component || prior), at least that of the mixture."""
        return jnp.mean(self.components.kl)

    @property
    def marginals(self) -> AnyMarginals:
        """Marginals of every component at the labelled points."""
        return self.components.marginals

    def predict(self, query: Query) -> AnyMarginals:
        """Marginals of every component at new inputs."""
        return jax.vmap(lambda component: component.predict(query))(self.components)

    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "M D C N"]:
        """Joint draws of f at the labelled points: every component is a chain, with at least one draw."""
        components = jax.tree.leaves(self.components)[0].shape[0]
        each = max(1, count // components)
        keys = jax.random.split(key, components)
        return jax.vmap(lambda one, part: part.draws(one, prior, each)[0])(keys, self.components)


@constructor("gibbs", needs=AugmentedLikelihood, called="augmented latents")
def gibbs(likelihood: AugmentedLikelihood, *, chains: int = 20, slices: int | None = None) -> Inference:
    """Gibbs sampler with `chains` independent chains, each started at a draw of the prior.

    slices: elliptical slices a sweep; None for as many as the likelihood's own `slices` says of the labelled points, 0
    where it has none. Raises TypeError for a likelihood without augmentation, ValueError for fewer than one chain and
    for a negative number of slices.
    """
    own = likelihood if slices is None and isinstance(likelihood, SlicedLikelihood) else None
    most = own.most_slices if own is not None else slices or 0
    if chains < 1 or most < 0:
        raise ValueError(f"expected at least 1 chain and at least 0 slices, got {chains} and {most}")

    def sites_of(aux: Aux, y: Array, mask: Mask | None) -> AnySites:
        return mask_sites(likelihood.sites(y, aux, classes_of(mask)), mask)

    @highest_precision
    def init(key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None = None) -> GibbsState:
        root, classes = root_of(prior), prior.mean.shape[0]
        f_key, aux_key = jax.random.split(key)
        f = prior.mean + jax.random.normal(f_key, (chains, classes, root.shape[-1]), root.dtype) @ root.T
        return GibbsState(f, conditional(aux_key, f, y, mask), y, mask)

    def conditional(key: Array, f: Array, y: Array, mask: Mask | None) -> Aux:
        keys = jax.random.split(key, chains)
        return jax.vmap(lambda one, latent: likelihood.aux_conditional(one, y, latent, classes_of(mask)))(keys, f)

    def step(
        key: Key[Array, ""], state: GibbsState, prior: GaussianPrior, y: Labels, mask: Mask | None = None
    ) -> tuple[GibbsState, Info]:
        f_key, aux_key = jax.random.split(key)

        def latents(one: Array, aux: Aux) -> Array:
            return prior.draw(one, sites_of(aux, y, mask))

        f = jax.vmap(latents)(jax.random.split(f_key, chains), state.aux)
        if most:
            taken = None if own is None else own.slices(_number_of_points(y, mask))
            keys = jax.random.split(jax.random.fold_in(f_key, chains), chains)
            number = _Slices(most, taken)
            f = jax.vmap(lambda one, latent: _sliced(one, likelihood, latent, prior, y, mask, number))(keys, f)
        data = jax.vmap(lambda latent: sum_over_points(likelihood.log_prob(y, latent, classes_of(mask)), mask))(f)
        value = jnp.mean(data)
        code = finite_code(value, jnp.sum(f))
        moved = GibbsState(f, conditional(aux_key, f, y, mask), y, mask)
        return moved, Info(value, jnp.zeros_like(value), code, jnp.asarray(0))

    def sites(state: GibbsState) -> AnySites:
        return jax.vmap(lambda aux: sites_of(aux, state.y, state.mask))(state.aux)

    def posterior(state: GibbsState, prior: GaussianPrior) -> Mixture:
        return Mixture(jax.vmap(lambda chain: prior.given(chain))(sites(state)))

    def log_evidence(state: GibbsState, prior: GaussianPrior) -> Float[Array, ""]:
        """Mean over the chains: by Fisher's identity its gradient estimates that of log p(y) (OVE 39)."""
        return jnp.mean(jax.vmap(lambda chain: prior.log_normaliser(chain))(sites(state)))

    traits, elbo, statistics = (
        Traits("gibbs", sampled=True),
        partial(_bound, likelihood),
        partial(_statistics, likelihood),
    )
    return Inference(init, step, sites, posterior, elbo, log_evidence, traits, pool=_pool, statistics=statistics)


def _pool(states: GibbsState) -> GibbsState:
    """One state of all chains of all sweeps, from states with a leading axis over the sweeps."""
    f, aux = jax.tree.map(lambda draws: draws.reshape(-1, *draws.shape[2:]), (states.f, states.aux))
    y, mask = jax.tree.map(lambda same: same[0], (states.y, states.mask))
    return GibbsState(f, aux, y, mask)


def _statistics(
    likelihood: AugmentedLikelihood, state: GibbsState, y: Labels, mask: Mask | None = None
) -> Float[Array, "M 3"]:
    """log p(y | f), the latent of the first point's own class, and |f|^2 of the real points of every chain."""
    own = y[0] if jnp.issubdtype(y.dtype, jnp.integer) else 0  # real labels have one latent function
    real = jnp.ones(state.f.shape[1:], bool) if mask is None else mask.classes[:, None] & mask.points
    data = jax.vmap(lambda f: sum_over_points(likelihood.log_prob(y, f, classes_of(mask)), mask))(state.f)
    squares = jnp.sum(jnp.where(real, state.f**2, 0.0), axis=(1, 2))
    return jnp.stack([data, state.f[:, own, 0], squares], axis=1)


def _bound(
    likelihood: AugmentedLikelihood,
    state: GibbsState,
    posterior: Mixture,
    y: Labels,
    mask: Mask | None = None,
) -> Float[Array, ""]:
    """Mean over the chains of the augmented bound of N(f | sites): a lower bound, if not one that is maximised."""
    del state

    def of_chain(component: GaussianPosterior) -> Array:
        known = component.seen
        aux = likelihood.aux_posterior(y, known, None, classes_of(mask))
        data = likelihood.augmented_bound(y, known, aux, classes_of(mask))
        return sum_over_points(data, mask) - component.kl

    return jnp.mean(jax.vmap(of_chain)(posterior.components))


class _Slices(NamedTuple):
    """The most elliptical slices that a sweep can take, and how many it does; None for all of them."""

    most: int
    taken: Array | None


def _number_of_points(y: Array, mask: Mask | None) -> int | Array:
    return len(y) if mask is None else jnp.sum(mask.points)


def _sliced(
    key: Array, likelihood: Likelihood, f: Array, prior: GaussianPrior, y: Array, mask: Mask | None, number: _Slices
) -> Array:
    """f after elliptical slices under p(y | f), of its parts in turn; no gradient passes through them."""
    fixed, prior = jax.tree.map(_stopped, (likelihood, prior))
    root, mean = root_of(prior), prior.mean

    def data(deviation: Array) -> Array:
        return sum_over_points(fixed.log_prob(y, mean + deviation, classes_of(mask)), mask)

    def drawn(one: Array) -> Array:
        return root @ jax.random.normal(one, root.shape[-1:], root.dtype)

    part_key, slice_key = jax.random.split(key)
    first, start = jax.random.randint(part_key, (), 0, len(mean) + 1), jax.lax.stop_gradient(f) - mean
    part = Part(
        of=lambda slice_, u: _part(first + slice_, u),
        fresh=lambda slice_, one: _fresh(first + slice_, one, len(mean)),
    )
    deviation, _, _ = elliptical_slice(slice_key, start, data(start), data, drawn, number.most, number.taken, part)
    return mean + deviation


def _part(number: Array, deviation: Array) -> Array:
    """What a slice moves (LS8): what all classes share or, in turn, one class, of latents less their prior mean."""
    classes = len(deviation)
    chosen = number % (classes + 1)
    shared = jnp.broadcast_to(jnp.mean(deviation, axis=0), deviation.shape)
    return jnp.where(chosen == classes, shared, jnp.where(jnp.arange(classes)[:, None] == chosen, deviation, 0.0))


def _fresh(number: Array, drawn: Array, classes: int) -> Array:
    """That part of a draw of the prior, from a draw [N] of one class; the mean of C such draws is as one / sqrt(C)."""
    chosen = number % (classes + 1)
    one = jnp.where(jnp.arange(classes) == chosen, 1.0, 0.0)
    return jnp.where(chosen == classes, classes**-0.5, one)[:, None] * drawn


def _stopped(leaf: PyTree) -> PyTree:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf
