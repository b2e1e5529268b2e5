"""Joint draws of f from fitted posteriors, and what they say of labels and queries: the numbers of diagnostics.py."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, Shaped

from fewshot.inference.inner.base import Inference, State
from fewshot.models.gaussian import (
    GaussianPrior,
    Query,
    highest_precision,
    prior_root,
    root_of,
    with_root,
)
from fewshot.models.likelihoods.base import Likelihood, log_densities


def log_ratios(
    key: Key[Array, ""],
    inference: Inference,
    state: State,
    prior: GaussianPrior,
    likelihood: Likelihood,
    y: Int[Array, " N"],
    draws: int,
) -> Float[Array, " D"]:
    """log p(y, f) - log q(f) at draws of q, up to a constant. Raises TypeError for a sampler, which has no q."""
    if inference.traits.sampled:
        raise TypeError(f"{inference.traits.name} samples: it has no variational posterior whose k-hat could be found")
    keys = jax.random.split(key, draws)
    prior = with_root(prior)
    root = root_of(prior)

    def data(f: Array) -> Array:
        return jnp.sum(likelihood.log_prob(y, f))

    if inference.sites is None:

        def whitened_ratio(one: Array) -> Array:
            """In the whitened basis: log N(u; 0, I) - log N(u; mu, L L^T) = (e.e - u.u) / 2, u = mu + L e."""
            e = jax.random.normal(one, state.mean.shape, state.mean.dtype)
            u = state.mean + jnp.einsum("crs,cs->cr", state.factor, e)
            return data(prior.mean + u @ root.T) + 0.5 * jnp.sum(e**2 - u**2)

        return jax.lax.map(whitened_ratio, keys, batch_size=256)
    sites = inference.sites(state)

    def ratio(one: Array) -> Array:
        f = prior.draw(one, sites)
        return data(f) - jnp.sum(sites.shift * f) + 0.5 * jnp.sum(f * sites.times(f))

    return jax.lax.map(ratio, keys, batch_size=256)


def about_labels(
    key: Key[Array, ""], likelihood: Likelihood, y: Int[Array, " N"], f: Float[Array, "M D C N"]
) -> dict[str, dict[str, Shaped[Array, "..."]]]:
    """Replicated labels, log likelihoods [M, D, N] and the labels observed."""

    def replicate(one: Array, latent: Array) -> Array:
        return likelihood.observation(latent).sample(one).T

    keys = jax.random.split(key, f.shape[:2])
    return {
        "posterior_predictive": {"y": jax.vmap(jax.vmap(replicate))(keys, f)},
        "log_likelihood": {"y": jax.vmap(jax.vmap(lambda latent: likelihood.log_prob(y, latent)))(f)},
        "observed_data": {"y": likelihood.observed(y, f.shape[2]).T},
    }


@highest_precision
def about_queries(
    key: Key[Array, ""], likelihood: Likelihood, prior: GaussianPrior, query: Query, f: Float[Array, "M D C N"]
) -> dict[str, Float[Array, "..."]]:
    """f_* [M, D, C, Q] given f, by E[u | f] = P^T (f - a) (G8), and the density [M, D, Q, C] of every label at it."""
    pseudo_inverse = prior_root(prior).pseudo_inverse
    basis = query.cross @ pseudo_inverse
    deviation = jnp.sqrt(jnp.maximum(query.variance - jnp.sum(basis**2, axis=-1), 0.0))
    whitened = (f - prior.mean) @ pseudo_inverse
    mean = query.mean + whitened @ basis.T
    f_query = mean + deviation * jax.random.normal(key, mean.shape, mean.dtype)
    density = jax.vmap(jax.vmap(lambda latent: jnp.exp(log_densities(likelihood, latent)).T))(f_query)
    return {"f_query": f_query, "density": density}
