"""The NumPyro generative models of one task: latent logits from the GP, then labels. For draws, NUTS and densities.

`classification_model` and `augmented_model` take a prior. The others have the kernel's hyper-parameters as sample sites
too, under `Kernel.priors`, and those of the likelihood, under its own: fully Bayesian kernels, by NUTS
(`inference.mcmc.nuts_of`). A kernel's prior of its scale has its median at `prior_scale`; that of a classifier's
logits is 30, so real labels of variance 1 want `RBF(prior_scale=1.0)`.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float

from fewshot.models.gaussian import GaussianPrior, root_of, triangular_root
from fewshot.models.kernels import Kernel
from fewshot.models.likelihoods import Normal
from fewshot.models.likelihoods.base import AugmentedLikelihood, Labels, Likelihood
from fewshot.models.process import LatentProcess
from fewshot.models.regression import regress
from fewshot.models.student_t import student_regress

TYPICAL_EXCESS = 3.0  # nu - 2, the median of its prior


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


def kernel_model(
    kernel: Kernel, likelihood: Likelihood, x: Float[Array, "N D"], classes: int, y: Labels | None = None
) -> Float[Array, "C N"]:
    """hyper ~ priors, u ~ N(0, I), f = a + u L^T with K(hyper) = L L^T, y ~ p(y | f); returns f.

    Of any likelihood (classes = 1 for real labels). Sample sites: the names in `kernel.priors()`, those in
    `likelihood.priors()`, `u` and `y`; deterministic site `f` [C, N]. The mean a is where the likelihood's starts. L is
    triangular: a root from eigenvectors jumps as the hyper-parameters move, and NUTS needs a smooth density.
    """
    process = _sampled_process(kernel, likelihood)
    prior = process.prior(x, classes)
    if prior.root is None:
        prior = prior._replace(root=triangular_root(prior.covariance))
    return classification_model(prior, likelihood.with_parameters(_sampled(likelihood.priors())), y)


def evidence_model(kernel: Kernel, likelihood: Normal, x: Float[Array, "N D"], y: Float[Array, " N"]) -> None:
    """`kernel_model` of normal noise with f integrated out: hyper ~ priors, times N(y | a, K + s2 I) (P2).

    Sample sites: those of the kernel and of the noise; factor `evidence`.
    """
    process = _sampled_process(kernel, likelihood)
    noise = likelihood.with_parameters(_sampled(likelihood.priors())).noise
    numpyro.factor("evidence", regress(process.prior(x, 1), y, noise).log_evidence)


def student_t_process_model(kernel: Kernel, likelihood: Normal, x: Float[Array, "N D"], y: Float[Array, " N"]) -> None:
    """The Student-t process with f and noise of one scale: hyper ~ priors, times ST(y | a, K + s2 I, nu) (T3).

    Sample sites: those of the kernel and of the noise, and log(nu - 2) ~ N(log 3, 1) as `log_excess`; factor
    `evidence`.
    """
    process = _sampled_process(kernel, likelihood)
    noise = likelihood.with_parameters(_sampled(likelihood.priors())).noise
    log_excess = numpyro.sample("log_excess", dist.Normal(jnp.log(TYPICAL_EXCESS), 1.0))
    numpyro.factor("evidence", student_regress(process.prior(x, 1), y, noise, 2 + jnp.exp(log_excess)).log_evidence)


def _sampled_process(kernel: Kernel, likelihood: Likelihood) -> LatentProcess:
    """The process with a sample site for each hyper-parameter."""
    return LatentProcess(kernel, {**_sampled(kernel.priors()), "mean": likelihood.prior_mean or 0.0})


def _sampled(priors: Mapping[str, dist.Distribution]) -> dict[str, Array]:
    """A sample site for each."""
    return {name: jnp.asarray(numpyro.sample(name, prior)) for name, prior in priors.items()}
