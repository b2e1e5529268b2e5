"""Real labels with Gaussian noise: p(y | f) = N(y; f, s2), which is its own site (P1, docs/sparse.md)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float

from fewshot.models.expectations import Points
from fewshot.models.gaussian import JointMarginals, Marginals
from fewshot.models.likelihoods.base import Labels, check_positive


def noise_prior() -> dist.Distribution:
    """log s2 ~ N(log 0.1, 2^2): of labels of about unit scale, a deviation between 0.04 and 2.3."""
    return dist.Normal(jnp.log(0.1), 2.0)


def equal_mixture(
    mean: Float[Array, "M Q"], variance: Float[Array, "M Q"], log_weights: Float[Array, " K"], added: Float[Array, " K"]
) -> dist.Distribution:
    """sum_mk w_k / M N(mean_m, variance_m + added_k) of every query; one normal where M = K = 1.

    Weights are logarithms, because those of far tails are 0 in single precision. They are normalised here.
    """
    if mean.shape[0] * log_weights.shape[0] == 1:
        return dist.Normal(mean[0], jnp.sqrt(variance[0] + added[0]), validate_args=False)
    each = (*mean.shape, len(log_weights))
    centres = jnp.broadcast_to(mean[..., None], each)
    spreads = jnp.sqrt(variance[..., None] + added)
    shares = jnp.broadcast_to(log_weights, each)
    flat = [jnp.moveaxis(one, 0, 1).reshape(mean.shape[1], -1) for one in (shares, centres, spreads)]
    each_normal = dist.Normal(flat[1], flat[2], validate_args=False)  # a failure is a code, not an exception
    which = dist.CategoricalLogits(flat[0], validate_args=False)
    return dist.MixtureSameFamily(which, each_normal, validate_args=False)


def components(marginals: Marginals | JointMarginals) -> tuple[Float[Array, "M Q"], Float[Array, "M Q"]]:
    """Means and variances of one latent function at Q queries, from [1, Q], or [M, 1, Q] of a mixture."""
    queries = marginals.mean.shape[-1]
    return marginals.mean.reshape(-1, queries), marginals.variance.reshape(-1, queries)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Normal:
    """N(y; f, s2) with noise variance s2.

    learn_noise: whether the outer loop learns it; False holds it where it is. Raises ValueError for noise that is not
    positive.
    """

    noise: float | Float[Array, ""] = 0.1
    learn_noise: bool = field(default=True, metadata={"static": True})

    prior_mean: ClassVar[float | None] = 0.0
    log_concave: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_positive("noise", self.noise)

    def parameters(self) -> dict[str, float | Array]:
        """log s2, where it is learned."""
        return {"log_noise": jnp.log(jnp.asarray(self.noise))} if self.learn_noise else {}

    def priors(self) -> dict[str, dist.Distribution]:
        """`noise_prior`."""
        return {"log_noise": noise_prior()} if self.learn_noise else {}

    def with_parameters(self, values: dict[str, Array]) -> "Normal":
        """The same with s2 = exp(log_noise)."""
        return replace(self, noise=jnp.exp(values["log_noise"])) if values else self

    def log_prob(
        self, y: Labels, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log N(y_n; f_n, s2)."""
        return self.expected_log_prob(y, Marginals(f, jnp.zeros_like(f)), None, classes)

    def expected_log_prob(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """-1/2 [log(2 pi s2) + ((y - m)^2 + v) / s2]; points are not used."""
        del points, classes
        error = (y - marginals.mean[0]) ** 2 + marginals.variance[0]
        return -0.5 * (jnp.log(2 * jnp.pi * self.noise) + error / self.noise)

    def gaussian_sites(self, y: Labels, classes: int) -> tuple[Float[Array, "C N"], Float[Array, "C N"]]:
        """h = y / s2 and W = 1 / s2 (P1)."""
        del classes
        return y[None] / self.noise, jnp.ones_like(y)[None] / self.noise

    def distribution(self, marginals: Marginals | JointMarginals) -> dist.Distribution:
        """N(m_*, v_* + s2)."""
        noise = jnp.reshape(jnp.asarray(self.noise, marginals.mean.dtype), 1)
        return equal_mixture(*components(marginals), jnp.zeros_like(noise), noise)

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """Labels y [N] given f."""
        return dist.Normal(f[0], jnp.sqrt(self.noise)).to_event(1)

    def observed(self, y: Labels, classes: int) -> Labels:
        """The labels."""
        del classes
        return y
