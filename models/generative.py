"""The NumPyro generative models of one task: latent logits from the GP, then labels. For draws, NUTS and densities."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from fewshot.models.gaussian import GaussianPrior, root_of
from fewshot.models.likelihoods.base import AugmentedLikelihood, Labels, Likelihood


def classification_model(prior: GaussianPrior, likelihood: Likelihood, y: Labels | None = None) -> Float[Array, "C N"]:
    """u ~ N(0, I) [C, R], f = a + u S^T (G8), y ~ p(y | f); returns f.

    Sample sites `u` and `y`, deterministic site `f` [C, N]. The whitened u makes a singular K harmless: its density is
    proper whatever the rank of K. With y=None labels (for `gaussian`: coded labels [C, N]) are drawn too; for
    one-vs-each, whose density is not normalised over y, they are drawn from p(y | f) normalised.
    """
    f = _latent_logits(prior)
    observed = None if y is None else likelihood.observed(y, f.shape[0])
    numpyro.sample("y", likelihood.observation(f), obs=observed)
    return f


def augmented_model(prior: GaussianPrior, likelihood: Likelihood, y: Labels) -> Float[Array, "C N"]:
    """u ~ N(0, I) [C, R], f = a + u S^T (G8), aux ~ p(aux), times the tilt p(y, aux | f) / p(aux); returns f.

    Sample sites `u` and the likelihood's augmented latents by their names, factor `tilt`, deterministic site `f`
    [C, N]. Integrated over aux it is `classification_model` given y. Raises TypeError without augmented latents.
    """
    if not isinstance(likelihood, AugmentedLikelihood):
        raise TypeError(f"augmented_model needs augmented latents; {type(likelihood).__name__} offers none")
    f = _latent_logits(prior)
    likelihood.aux_model(y, f)
    return f


def _latent_logits(prior: GaussianPrior) -> Float[Array, "C N"]:
    """Sample site `u` and deterministic site `f`, which is returned; the root is found here if the prior has none."""
    root = root_of(prior)
    classes, rank = prior.mean.shape[0], root.shape[-1]
    u = numpyro.sample("u", dist.Normal(jnp.zeros((classes, rank), root.dtype), 1.0).to_event(2))
    return numpyro.deterministic("f", prior.mean + u @ root.T)
