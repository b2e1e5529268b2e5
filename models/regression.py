"""Exact Gaussian-process regression: the site algebra of gaussian.py with Gaussian noise (P1, docs/sparse.md)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fewshot.models.gaussian import (
    DiagonalPosterior,
    GaussianPrior,
    LowRankPosterior,
    Query,
    Sites,
    highest_precision,
)

Noise = Float[Array, "*N"] | float  # a variance for all points, or one for each


class Regression(NamedTuple):
    """What exact regression found: the posterior of f, and log N(y | a, K + s2 I)."""

    posterior: DiagonalPosterior | LowRankPosterior
    log_evidence: Float[Array, ""]


class Prediction(NamedTuple):
    """Mean and variance of f at Q inputs, with an axis of classes where f has several functions."""

    mean: Float[Array, "*C Q"]
    variance: Float[Array, "*C Q"]

    def noisy(self, noise: Noise) -> "Prediction":
        """The same for y = f + e, e ~ N(0, s2)."""
        return self._replace(variance=self.variance + noise)

    def log_density(self, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
        """log N(y | mean, variance)."""
        return -0.5 * (jnp.log(2 * jnp.pi * self.variance) + (y - self.mean) ** 2 / self.variance)


def noise_sites(y: Float[Array, " N"], noise: Noise) -> Sites:
    """h = y / s2 and W = 1 / s2, both [1, N] (P1)."""
    precision = 1 / jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)
    return Sites((y * precision)[None], precision[None])


def noise_scale(y: Float[Array, " N"], noise: Noise) -> Float[Array, ""]:
    """sum_n log N(y_n | 0, s2_n), by which the likelihood exceeds its sites: log p(y) = log Z (G6) + this."""
    return jnp.sum(Prediction(jnp.zeros_like(y), jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)).log_density(y))


@highest_precision
def regress(
    prior: GaussianPrior, y: Float[Array, " N"], noise: Noise, present: Bool[Array, " N"] | None = None
) -> Regression:
    """Exact posterior of f and log p(y) = -1/2 [(y - a).alpha + log|B| + sum_n log(2 pi s2_n)] (P2).

    present: the labels that are real, None for all; the others say nothing. alpha is (K + s2 I)^-1 (y - a) by (G4), and
    |K + s2 I| = |B| prod_n s2_n by (G1): the same number as (G6) plus `noise_scale`, without the cancellation of their
    terms y^2 / s2.
    """
    real = jnp.ones(y.shape, bool) if present is None else present
    posterior = noise_sites(y, noise).masked(real[None]).condition(prior)
    residual = y - prior.mean[0]
    logs = jnp.log(2 * jnp.pi * jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape))
    value = jnp.sum(residual * posterior.alpha[0]) + posterior.log_determinant + jnp.sum(jnp.where(real, logs, 0.0))
    return Regression(posterior, -0.5 * value)


def predict(posterior: DiagonalPosterior | LowRankPosterior, query: Query) -> Prediction:
    """Marginals of f at new inputs (G7)."""
    marginals = posterior.predict(query)
    return Prediction(marginals.mean[0], marginals.variance[0])
