"""The NumPyro generative model of one task: latent logits from the GP, then labels. For draws, NUTS and densities."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int

from models.gaussian import GaussianPrior, prior_root
from models.likelihoods.base import Likelihood


def classification_model(
    prior: GaussianPrior, likelihood: Likelihood, y: Int[Array, " N"] | None = None
) -> Float[Array, "C N"]:
    """u ~ N(0, I) [C, R], f = a + u S^T (G8), y ~ p(y | f); returns f.

    Sample sites `u` and `y`, deterministic site `f` [C, N]. The whitened u makes a singular K harmless: its density is
    proper whatever the rank of K. With y=None labels (for `gaussian`: coded labels [C, N]) are drawn too.
    """
    root = prior_root(prior).factor
    classes, rank = prior.mean.shape[0], root.shape[-1]
    u = numpyro.sample("u", dist.Normal(jnp.zeros((classes, rank), root.dtype), 1.0).to_event(2))
    f = numpyro.deterministic("f", prior.mean + u @ root.T)
    observed = None if y is None else likelihood.observed(y, classes)
    numpyro.sample("y", likelihood.observation(f), obs=observed)
    return f
