"""Diagonal sites under a kernel of fewer features than points: factors of size R in place of N.

With K = S S^T, S [N, R], f = a + S u and u ~ N(0, I) the posterior of u is normal (the weight-space view, Rasmussen and
Williams 2006, section 2.1.2):

    (G10)  M = I + S^T W S = T^-1 T^-T,  u | y ~ N(w, M^-1),  w = M^-1 S^T (h - W a)
          m = a + S w,  V = S M^-1 S^T,  |B| = |M|,  sum_n W_n V_nn = tr(I - M^-1),  (m - a)^T K^-1 (m - a) = w.w

and at new inputs with k_* = S_* S^T the mean is a_* + S_* w and the variance k_** - s_* s_*^T + s_* M^-1 s_*^T; what is
left of k_** beyond the features is 0 for a kernel that has no others.
alpha = h - W m is that solution of K alpha = m - a which the algorithms compare with slopes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian.factors import cholesky_inverse, highest_precision
from fewshot.models.gaussian.marginals import IndependentClasses, Marginals
from fewshot.models.gaussian.prior import GaussianPrior, Query


class WeightNormal(NamedTuple):
    """The posterior N(w, T^T T) of the weights u: w [C, R], T [C, R, R] lower triangular; log|M| over the classes."""

    mean: Float[Array, "C R"]
    inverse: Float[Array, "C R R"]
    determinant: Float[Array, ""]

    def spread(self, features: Float[Array, "Q R"]) -> Float[Array, "C R Q"]:
        """T s^T of every row s: s M^-1 s^T is the sum of its squares."""
        return self.inverse @ features.T


def weight_normal(
    prior: GaussianPrior, features: Float[Array, "N R"], shift: Float[Array, "C N"], precision: Float[Array, "C N"]
) -> WeightNormal:
    """The posterior of the weights given sites (G10)."""
    gram = jnp.einsum("nr,cn,ns->crs", features, precision, features)
    inverse, determinant = cholesky_inverse(jnp.eye(features.shape[1], dtype=gram.dtype) + gram)
    right = (shift - precision * prior.mean) @ features
    mean = jnp.einsum("csr,cs->cr", inverse, jnp.einsum("crs,cs->cr", inverse, right))
    return WeightNormal(mean, inverse, determinant)


class _LowRankFields(NamedTuple):
    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]
    alpha: Float[Array, "C N"]
    weights: WeightNormal
    kl: Float[Array, ""]


class LowRankPosterior(_LowRankFields, IndependentClasses):
    """The prior times diagonal sites, by the normal of its weights; mean, variance and alpha are [C, N], kl []."""

    __slots__ = ()

    @property
    def inverse_factor(self) -> Float[Array, "C K K"]:
        """T."""
        return self.weights.inverse

    @highest_precision
    def predict(self, query: Query) -> Marginals:
        """Marginals of the latent logits at new inputs (G7, G10). Raises ValueError for a query without its root."""
        if query.root is None:
            raise ValueError("expected a query with its root, as the prior has one; make both with one LatentProcess")
        beyond = jnp.maximum(query.variance - jnp.sum(query.root**2, axis=1), 0.0)
        variance = beyond + jnp.sum(self.weights.spread(query.root) ** 2, axis=1)
        return Marginals(query.mean + self.weights.mean @ query.root.T, variance)

    @highest_precision
    def covariance(self, prior: GaussianPrior) -> Float[Array, "C N N"]:
        """Full posterior covariance V of every class."""
        spread = self.weights.spread(_features(prior))
        return jnp.swapaxes(spread, -1, -2) @ spread

    @highest_precision
    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "1 D C N"]:
        """Joint draws of f at the labelled points: f = m + S T^T z."""
        normal = jax.random.normal(key, (count, *self.weights.mean.shape), self.mean.dtype)
        return (self.mean + jnp.einsum("crn,dcr->dcn", self.weights.spread(_features(prior)), normal))[None]


def low_rank_posterior(
    prior: GaussianPrior, features: Float[Array, "N R"], shift: Float[Array, "C N"], precision: Float[Array, "C N"]
) -> LowRankPosterior:
    """Exact posterior of N(a, S S^T) times diagonal sites (G10)."""
    u = weight_normal(prior, features, shift, precision)
    deviation = u.mean @ features.T
    variance = jnp.sum(u.spread(features) ** 2, axis=1)
    mean = prior.mean + deviation
    trace = jnp.sum(1 - jnp.sum(u.inverse**2, axis=-2))
    kl = 0.5 * (u.determinant - trace + jnp.sum(u.mean**2))
    return LowRankPosterior(mean, variance, shift - precision * mean, u, kl)


def _features(prior: GaussianPrior) -> Array:
    if prior.features is None:
        raise ValueError("expected the prior that the posterior was made from, got one without a short root")
    return prior.features
