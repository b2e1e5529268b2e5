"""Star sites: class differences around one class of every point, as one-vs-each has them, in O(C N^3): (O5)-(O8)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Key

from models.block_gaussian import BlockAlgebra, BlockPosterior, ClassReduction
from models.gaussian import (
    GaussianPrior,
    Marginals,
    class_factors,
    highest_precision,
    prior_marginals,
    square_root,
)
from models.star_reduction import CentredReduction, StarReduction, couple


class _StarFields(NamedTuple):
    shift: Float[Array, "C N"]
    rays: Float[Array, "C N"]
    centre: Float[Array, "C N"]


class StarSites(_StarFields, BlockAlgebra):
    """L_n = sum_c w_c (e_y - e_c)(e_y - e_c)^T: a star of class differences around one class of every point.

    rays w >= 0 [C, N], 0 at the point's own class; centre [C, N] is 1 there and 0 elsewhere. A point without rays says
    nothing.
    """

    __slots__ = ()

    def blocks(self) -> Float[Array, "N C C"]:
        """L."""
        rays, centre = self.rays.T, self.centre.T
        diagonal = rays + centre * jnp.sum(rays, axis=1, keepdims=True)
        crossed = centre[:, :, None] * rays[:, None, :]
        return diagonal[:, :, None] * jnp.eye(rays.shape[1], dtype=rays.dtype) - crossed - jnp.swapaxes(crossed, 1, 2)

    def masked(self, real: Bool[Array, "C N"]) -> "StarSites":
        """Only rays between two real entries remain."""
        own = jnp.sum(self.centre * real, axis=0) > 0
        rays = jnp.where(real & own, self.rays, 0.0)
        return StarSites(jnp.where(real, self.shift, 0.0), rays, self.centre)

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """L_n f_n at every point."""
        own = jnp.sum(self.centre * f, axis=0)
        pulled = self.rays * (own - f)
        return self.centre * jnp.sum(pulled, axis=0) - pulled

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, L_n) at every point: one normal a ray."""
        along = square_root(self.rays) * jax.random.normal(key, self.rays.shape, self.rays.dtype)
        return self.centre * jnp.sum(along, axis=0) - along

    def condition(self, prior: GaussianPrior) -> BlockPosterior:
        """Exact posterior of N(a, K) times the sites, with the marginals of the differences that the sites know."""
        reduction = self._reduce(prior)
        alpha, deviation = self._alpha(prior, reduction)
        mean, variance = prior.mean + deviation, reduction.difference_variances(self.centre)
        trace = jnp.sum(self.rays * variance)
        kl = 0.5 * (reduction.log_determinant - trace + jnp.sum(deviation * alpha))
        differences = Marginals(mean - jnp.sum(self.centre * mean, axis=0), variance)
        return BlockPosterior(mean, _covariance_blocks(prior, reduction), alpha, reduction, kl, differences)

    def log_normaliser(self, prior: GaussianPrior) -> Float[Array, ""]:
        """log Z (G6); its derivatives are in closed form (O13), products of matrices without one more solve."""
        return _log_normaliser(prior.covariance, prior.mean, self)

    def _reduce(self, prior: GaussianPrior) -> CentredReduction:
        """L = D + U_- U_-^T - U_+ U_+^T with D diagonal and U_+, U_- diagonal in every class (O5)."""
        degree = self.rays + self.centre * jnp.sum(self.rays, axis=0)
        weight, inverse, determinant = class_factors(prior, degree)
        whitened = inverse @ (weight[:, :, None] * prior.covariance)
        kept = prior.covariance - jnp.swapaxes(whitened, 1, 2) @ whitened  # E [C, N, N]
        plus, minus = self._spokes()
        core, diagonal = couple(plus, minus, kept), ClassReduction(weight, inverse)
        return CentredReduction(
            StarReduction(prior.covariance, diagonal, whitened, kept, plus, minus, core, determinant)
        )

    def _spokes(self) -> tuple[Array, Array]:
        """U_+ and U_- [C, N], (g e_y + w/g) / 2^1/2 and (g e_y - w/g) / 2^1/2; 0 at points without rays.

        Any g > 0 serves, so none of its derivative is missed; with g^2 = sum_c w_c no eigenvalue of U_-^T E U_- or
        U_+^T E U_+ exceeds 1.
        """
        scale = square_root(jax.lax.stop_gradient(jnp.sum(self.rays, axis=0)))
        hub, rim = self.centre * scale, self.rays / jnp.where(scale > 0, scale, 1.0)
        return (hub + rim) * 0.5**0.5, (hub - rim) * 0.5**0.5


def _covariance_blocks(prior: GaussianPrior, reduction: CentredReduction) -> Array:
    """V_nn = K_nn - k_n F k_n^T [N, C, C] (B1)."""
    return prior_marginals(prior).covariance_blocks() - reduction.explained_here()


@jax.custom_jvp
def _log_normaliser(covariance: Array, mean: Array, sites: StarSites) -> Array:
    """log Z (G6)."""
    return BlockAlgebra.log_normaliser(sites, GaussianPrior(mean, covariance))


@functools.partial(_log_normaliser.defjvp, symbolic_zeros=True)
@highest_precision
def _log_normaliser_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """(O13): only what has a tangent is differentiated, so that fixed sites cost nothing."""
    (covariance, mean, sites), (covariance_change, mean_change, change) = primals, tangents
    prior = GaussianPrior(mean, covariance)
    reduction = sites._reduce(prior)
    alpha, deviation = sites._alpha(prior, reduction)
    residual = sites.shift - sites.times(mean)
    value = 0.5 * jnp.sum((sites.shift + residual) * mean + residual * deviation) - 0.5 * reduction.log_determinant
    slope = jnp.zeros_like(value)
    if not _is_zero(covariance_change):
        outer = alpha[:, :, None] * alpha[:, None] - reduction.class_blocks()
        slope += 0.5 * jnp.sum(outer * covariance_change)
    if not _is_zero(mean_change):
        slope += jnp.sum(alpha * mean_change)
    if not all(_is_zero(leaf) for leaf in change):
        slope += _site_slope(prior, sites, reduction, mean + deviation, change)
    return value, slope


def _site_slope(prior: GaussianPrior, sites: StarSites, reduction: CentredReduction, m: Array, change: tuple) -> Array:
    """E_q of the change of sum_n log t_n: m . dh - 1/2 sum_n tr(dL_n (V_nn + m_n m_n^T))."""
    change = StarSites(*(jnp.zeros(leaf.shape, leaf.dtype) if _is_zero(leaf) else leaf for leaf in change))
    blocks = jax.jvp(lambda moved: moved.blocks(), (sites,), (change,))[1]
    squares = _covariance_blocks(prior, reduction) + m.T[:, :, None] * m.T[:, None]
    return jnp.sum(change.shift * m) - 0.5 * jnp.sum(blocks * squares)


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)
