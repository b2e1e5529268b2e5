"""Diagonal sites, which keep the classes of a point independent: G1 to G7, one factor of size N for every class.

The posterior N(a, K) times all sites is exact GP algebra, written without K^-1, so a singular K (more points than
features, duplicated images) needs no jitter. A prior of fewer features than points is left to `low_rank.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.gaussian.evidence import Evidence, closed_log_normaliser, log_normaliser_of
from fewshot.models.gaussian.factors import (
    apply_covariance,
    cholesky_solve,
    class_cholesky,
    class_factors,
    diagonal_blocks,
    highest_precision,
    square_root,
)
from fewshot.models.gaussian.low_rank import LowRankPosterior, low_rank_posterior, weight_normal
from fewshot.models.gaussian.marginals import AnyMarginals, IndependentClasses, Marginals
from fewshot.models.gaussian.prior import GaussianPrior, Query, with_root


class Sites(NamedTuple):
    """Diagonal Gaussian sites: shift h and precision W, both [C, N]."""

    shift: Float[Array, "C N"]
    precision: Float[Array, "C N"]

    @classmethod
    def zero(cls, prior: GaussianPrior) -> "Sites":
        """Sites that say nothing: with them the posterior is the prior."""
        return cls(jnp.zeros_like(prior.mean), jnp.zeros_like(prior.mean))

    @classmethod
    def with_slope(
        cls, slope: Float[Array, "C N"], precision: Float[Array, "C N"], mean: Float[Array, "C N"]
    ) -> "Sites":
        """Sites of that precision whose log has the slope g at f = m: h = g + W m."""
        return cls(slope + precision * mean, precision)

    @staticmethod
    def curvature(slopes: Marginals) -> Float[Array, "C N"]:
        """-2 g_v: the precision (C1) that the slopes of E_q[log p(y | f)] in the marginals ask for, of any sign."""
        return -2 * slopes.variance

    @staticmethod
    def of_blocks(blocks: Float[Array, "N C C"]) -> Float[Array, "C N"]:
        """The part of a curvature [N, C, C] that such sites can hold."""
        return jnp.diagonal(blocks, axis1=1, axis2=2).T

    @staticmethod
    def nonnegative(curvature: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Int[Array, ""]]:
        """The curvature with negative entries set to 0, and how many there were."""
        return jnp.maximum(curvature, 0.0), jnp.sum(curvature < 0)

    @property
    def longest_step(self) -> float:
        """In units of the way to the target: `moved` keeps W >= 0."""
        return 8.0

    def moved(self, length: Float[Array, ""], direction: "Sites") -> "Sites":
        """The sites after a step; a precision that it would make negative becomes 0."""
        shift, precision = (site + length * part for site, part in zip(self, direction, strict=True))
        return Sites(shift, jnp.maximum(precision, 0.0))

    def inner(self, other: "Sites", marginals: Marginals) -> Float[Array, ""]:
        """Inner product in the Fisher metric of normals about their mean, point by point: v h h' + v^2 W W' / 2."""
        variance = marginals.variance
        return jnp.sum(variance * self.shift * other.shift + 0.5 * variance**2 * self.precision * other.precision)

    def distance(self, target: "Sites", marginals: AnyMarginals, slope: Float[Array, "C N"]) -> Float[Array, ""]:
        """Largest |W - W^| v / max(1, |slope|)."""
        difference = jnp.abs(self.precision - target.precision) * marginals.variance
        return jnp.max(difference / jnp.maximum(1.0, jnp.abs(slope)))

    def masked(self, real: Bool[Array, "C N"]) -> "Sites":
        """Only the real entries keep their site; all others say nothing (h = W = 0)."""
        return Sites(jnp.where(real, self.shift, 0.0), jnp.where(real, self.precision, 0.0))

    def shifted(self, by: Float[Array, "C N"]) -> "Sites":
        """The same with shift h + by."""
        return self._replace(shift=self.shift + by)

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """W f."""
        return self.precision * f

    def blocks(self) -> Float[Array, "N C C"]:
        """W as a diagonal matrix for every point."""
        return diagonal_blocks(self.precision)

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, W); 0 where W = 0."""
        return square_root(self.precision) * jax.random.normal(key, self.shift.shape, self.shift.dtype)

    def prior_marginals(self, prior: GaussianPrior) -> Marginals:
        """Marginals of the prior in the form that a posterior with such sites has."""
        return prior.marginals()

    def condition(self, prior: GaussianPrior) -> "DiagonalPosterior | LowRankPosterior":
        """Exact posterior of N(a, K) times the sites (G1-G5)."""
        if prior.features is not None:
            return low_rank_posterior(prior, prior.features, self.shift, self.precision)
        weight, inverse, determinant = class_factors(prior.covariance, self.precision)
        alpha = self._alpha(prior, weight, partial(_solve_by_inverse, inverse))
        deviation = apply_covariance(prior.covariance, alpha)
        variance = _variances(prior, weight, inverse)
        trace = jnp.sum(1 - jnp.sum(inverse**2, axis=-2))  # sum_n W_n V_nn = tr(I - B^-1)
        kl = 0.5 * (determinant - trace + jnp.sum(deviation * alpha))
        return DiagonalPosterior(prior.mean + deviation, variance, alpha, weight, inverse, kl)

    def log_normaliser(self, prior: GaussianPrior) -> Float[Array, ""]:
        """log Z = log of the integral of N(f | a, K) times the sites (G6); its derivatives are in closed form."""
        if prior.features is None:
            return closed_log_normaliser(prior.covariance, prior.mean, self)
        q = weight_normal(prior, prior.features, self.shift, self.precision)
        return log_normaliser_of(self, prior, q.mean @ prior.features.T, q.determinant)

    def evidence(self, prior: GaussianPrior) -> Evidence:
        """log Z and its derivatives."""
        weight, inverse, determinant = class_factors(prior.covariance, self.precision)
        alpha = self._alpha(prior, weight, partial(_solve_by_inverse, inverse))
        deviation = apply_covariance(prior.covariance, alpha)
        value = log_normaliser_of(self, prior, deviation, determinant)

        def class_blocks() -> Array:
            scaled = inverse * weight[:, None]
            return jnp.swapaxes(scaled, 1, 2) @ scaled

        def slope(change: "Sites") -> Array:
            mean = prior.mean + deviation
            squares = _variances(prior, weight, inverse) + mean**2
            return jnp.sum(change.shift * mean) - 0.5 * jnp.sum(change.precision * squares)

        return Evidence(value, alpha, class_blocks, slope)

    def deviation(self, prior: GaussianPrior) -> Float[Array, "C N"]:
        """Posterior mean less prior mean, V (h - W a), without the variances: one Cholesky factor and its solves."""
        if prior.features is not None:
            return weight_normal(prior, prior.features, self.shift, self.precision).mean @ prior.features.T
        weight, cholesky = class_cholesky(prior.covariance, self.precision)
        return apply_covariance(prior.covariance, self._alpha(prior, weight, partial(cholesky_solve, cholesky)))

    def _alpha(self, prior: GaussianPrior, weight: Array, inverse_times: Callable[[Array], Array]) -> Array:
        """K^-1 (m - a) = (I + W K)^-1 r with r = h - W a, from products with B^-1 (G4a).

        r - W^1/2 B^-1 W^1/2 K r loses its digits where W K >> 1 (as does h - W m), and W^1/2 B^-1 W^-1/2 r where
        W K << 1. Both are linear in r, so each point takes its own.
        """
        residual = self.shift - self.precision * prior.mean
        strong = self.precision * prior.marginals().variance > 1
        weak = jnp.where(strong, 0.0, residual)
        scaled = jnp.where(strong, residual / jnp.where(strong, weight, 1.0), 0.0)
        return weak + weight * inverse_times(scaled - weight * apply_covariance(prior.covariance, weak))


class _DiagonalFields(NamedTuple):
    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]
    alpha: Float[Array, "C N"]
    weight: Float[Array, "C N"]
    inverse: Float[Array, "C N N"]
    kl: Float[Array, ""]


class DiagonalPosterior(_DiagonalFields, IndependentClasses):
    """The prior times diagonal sites. All fields are [C, N] unless said otherwise.

    alpha is K^-1 (mean - a), weight is W^1/2, inverse [C, N, N] is R^-1 with B = R R^T, kl [] is KL(q || prior).
    """

    __slots__ = ()

    @property
    def inverse_factor(self) -> Float[Array, "C K K"]:
        """R^-1."""
        return self.inverse

    @highest_precision
    def predict(self, query: Query) -> Marginals:
        """Marginals of the latent logits at new inputs (G7)."""
        mean = query.mean + self.alpha @ query.cross.T
        whitened = self.inverse @ (self.weight[:, :, None] * query.cross.T)
        return Marginals(mean, jnp.maximum(query.variance - jnp.sum(whitened**2, axis=1), 0.0))

    @highest_precision
    def covariance(self, prior: GaussianPrior) -> Float[Array, "C N N"]:
        """Full posterior covariance V of every class (G2)."""
        whitened = _whitened(prior, self.weight, self.inverse)
        return prior.covariance - jnp.swapaxes(whitened, -1, -2) @ whitened

    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "1 D C N"]:
        """Joint draws of f at the labelled points, by Matheron's rule (G8)."""
        precision = self.weight**2
        sites, rooted = Sites(self.alpha + precision * self.mean, precision), with_root(prior)  # (G4)
        return jax.vmap(lambda one: rooted.draw(one, sites))(jax.random.split(key, count))[None]


def _whitened(prior: GaussianPrior, weight: Array, inverse: Array) -> Array:
    """R^-1 W^1/2 K [C, N, N]."""
    return inverse @ (weight[:, :, None] * prior.covariance)


def _variances(prior: GaussianPrior, weight: Array, inverse: Array) -> Array:
    """diag V [C, N] (G2)."""
    explained = jnp.sum(_whitened(prior, weight, inverse) ** 2, axis=-2)
    return jnp.maximum(prior.marginals().variance - explained, 0.0)


def _solve_by_inverse(inverse: Array, right: Array) -> Array:
    """B^-1 right [C, N] from R^-1."""
    return jnp.einsum("cij,ci->cj", inverse, jnp.einsum("cij,cj->ci", inverse, right))
