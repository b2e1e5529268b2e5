"""Samplers of one task for `numpyro.infer.MCMC`: Gibbs, elliptical slice sampling and NUTS.

    mcmc = MCMC(GibbsKernel(prior, likelihood, y), num_warmup=200, num_samples=1000, num_chains=4,
                chain_method="vectorized", progress_bar=False)
    mcmc.run(key, extra_fields=("log_likelihood",))

Gibbs samples the augmented model; NUTS and elliptical slice sampling, which know nothing of any augmentation, sample
`classification_model` in its whitened basis and judge the others.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree
from numpyro.infer import MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from fewshot.inference.inner.base import Code, Mask, classes_of, finite_code, sum_over_points
from fewshot.inference.inner.elliptical import elliptical_slice
from fewshot.inference.inner.gibbs import GibbsState, gibbs
from fewshot.models.gaussian import GaussianPrior, root_of, with_root
from fewshot.models.generative import classification_model
from fewshot.models.likelihoods.base import AugmentedLikelihood, Labels, Likelihood

__all__ = ["EllipticalSliceKernel", "GibbsKernel", "elliptical_slice", "nuts", "nuts_of"]


class GibbsChain(NamedTuple):
    """One chain: f [C, N] and aux drawn given it; log p(y | f); the result code of the last sweep."""

    f: Float[Array, "C N"]
    aux: PyTree
    log_likelihood: Float[Array, ""]
    code: Int[Array, ""]
    rng_key: Key[Array, ""]

    @property
    def z(self) -> dict[str, Array]:
        """What is collected: f and the augmented latents by name."""
        return {"f": self.f, **self.aux._asdict()}


class SliceChain(NamedTuple):
    """One chain: whitened u [C, R], f = a + u S^T; log p(y | f); points tried in the last step; its result code."""

    u: Float[Array, "C R"]
    f: Float[Array, "C N"]
    log_likelihood: Float[Array, ""]
    tries: Int[Array, ""]
    code: Int[Array, ""]
    rng_key: Key[Array, ""]

    @property
    def z(self) -> dict[str, Array]:
        """What is collected: u and f."""
        return {"u": self.u, "f": self.f}


class TaskKernel(MCMCKernel):
    """A NumPyro kernel bound to one task: subclasses offer `start` and `advance` of a single chain.

    `MCMC.run` takes no model arguments; its `init_params`, if given, is where f starts [C, N] (a leading axis with
    several chains), else every chain starts at a draw of the prior.
    """

    sample_field = "z"

    def __init__(self, prior: GaussianPrior, likelihood: Likelihood, y: Labels, mask: Mask | None = None) -> None:
        self.prior, self.likelihood, self.y, self.mask = with_root(prior), likelihood, y, mask

    def start(self, key: Key[Array, ""], f: Float[Array, "C N"] | None) -> PyTree:
        """A chain at f, or at a draw of the prior."""
        raise NotImplementedError

    def advance(self, state: PyTree) -> PyTree:
        """The chain after one transition."""
        raise NotImplementedError

    def init(
        self, rng_key: Array, num_warmup: int, init_params: PyTree, model_args: tuple[PyTree, ...], model_kwargs: PyTree
    ) -> PyTree:
        """States of one chain, or of as many as there are keys. Raises ValueError for model arguments."""
        del num_warmup  # nothing adapts
        if model_args or model_kwargs:
            raise ValueError(f"{type(self).__name__} holds its task: call MCMC.run with a key, without model arguments")
        if is_prng_key(rng_key):
            return self.start(_typed(rng_key), init_params)
        if init_params is None:
            return jax.vmap(partial(self.start, f=None))(_typed(rng_key))
        return jax.vmap(self.start)(_typed(rng_key), init_params)

    def sample(self, state: PyTree, model_args: tuple[PyTree, ...], model_kwargs: PyTree) -> PyTree:
        """One transition of every chain."""
        del model_args, model_kwargs
        return jax.vmap(self.advance)(state) if jnp.ndim(state.rng_key) else self.advance(state)

    def log_prob(self, f: Float[Array, "C N"]) -> Float[Array, ""]:
        """log p(y | f), summed over the points."""
        return sum_over_points(self.likelihood.log_prob(self.y, f, classes_of(self.mask)), self.mask)

    def prior_draw(self, key: Key[Array, ""]) -> Float[Array, "C R"]:
        """Whitened u ~ N(0, I)."""
        root = root_of(self.prior)
        return jax.random.normal(key, (self.prior.mean.shape[0], root.shape[-1]), root.dtype)

    def latents(self, u: Float[Array, "C R"]) -> Float[Array, "C N"]:
        """f = a + u S^T (G8)."""
        return self.prior.mean + u @ root_of(self.prior).T


class GibbsKernel(TaskKernel):
    """`inference.inner.gibbs` as a NumPyro kernel: one sweep f | aux, then aux | f.

    Samples hold f [C, N] and the augmented latents by name; `extra_fields` may be log_likelihood and code. Raises
    TypeError for a likelihood without augmentation.
    """

    def __init__(
        self, prior: GaussianPrior, likelihood: AugmentedLikelihood, y: Labels, mask: Mask | None = None
    ) -> None:
        self.kernel = gibbs(likelihood, chains=1, slices=0)
        super().__init__(prior, likelihood, y, mask)
        self.augmented = likelihood

    def start(self, key: Key[Array, ""], f: Float[Array, "C N"] | None) -> GibbsChain:
        """aux drawn given the first f."""
        f_key, aux_key, chain_key = jax.random.split(key, 3)
        f = self.latents(self.prior_draw(f_key)) if f is None else f
        aux = self.augmented.aux_conditional(aux_key, self.y, f, classes_of(self.mask))
        return GibbsChain(f, aux, self.log_prob(f), jnp.asarray(Code.OK), chain_key)

    def advance(self, state: GibbsChain) -> GibbsChain:
        """One sweep."""
        chain_key, sweep_key = jax.random.split(state.rng_key)
        one = GibbsState(state.f[None], jax.tree.map(lambda value: value[None], state.aux), self.y, self.mask)
        moved, info = self.kernel.step(sweep_key, one, self.prior, self.y, self.mask)
        aux = jax.tree.map(lambda value: value[0], moved.aux)
        return GibbsChain(moved.f[0], aux, info.elbo, info.code, chain_key)


class EllipticalSliceKernel(TaskKernel):
    """Elliptical slice sampling of `classification_model`, for any likelihood: see `elliptical_slice`.

    Samples hold u [C, R] and f [C, N]; `extra_fields` may be log_likelihood, tries and code.
    """

    def start(self, key: Key[Array, ""], f: Float[Array, "C N"] | None) -> SliceChain:
        """u drawn from the prior. Raises ValueError for a first f: it may lie outside the range of S."""
        if f is not None:
            raise ValueError("EllipticalSliceKernel starts at a draw of the prior; leave init_params out")
        u_key, chain_key = jax.random.split(key)
        u = self.prior_draw(u_key)
        f = self.latents(u)
        return SliceChain(u, f, self.log_prob(f), jnp.asarray(0), jnp.asarray(Code.OK), chain_key)

    def advance(self, state: SliceChain) -> SliceChain:
        """One slice."""
        chain_key, key = jax.random.split(state.rng_key)
        u, value, tries = elliptical_slice(
            key, state.u, state.log_likelihood, lambda point: self.log_prob(self.latents(point))
        )
        return SliceChain(u, self.latents(u), value, tries, finite_code(value, u), chain_key)


def nuts(
    prior: GaussianPrior,
    likelihood: Likelihood,
    y: Labels,
    *,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 4,
    chain_method: str = "vectorized",
    target_accept: float = 0.8,
) -> MCMC:
    """NUTS on `classification_model`, un-augmented and in the whitened basis; call `run(key)` on what is returned."""
    model = partial(classification_model, with_root(prior), likelihood, y)
    return nuts_of(model, num_warmup, num_samples, num_chains, chain_method, target_accept)


def nuts_of(
    model: Callable[[], object],
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 4,
    chain_method: str = "vectorized",
    target_accept: float = 0.8,
) -> MCMC:
    """NUTS on a NumPyro model that has its data, as `partial(evidence_model, kernel, likelihood, x, y)`."""
    return MCMC(
        NUTS(model, target_accept_prob=target_accept),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
    )


def _typed(key: Array) -> Array:
    """Keys as `jax.random.key` makes them, from raw ones too."""
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
