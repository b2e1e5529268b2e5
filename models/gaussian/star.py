"""Star sites: class differences around one class of every point, as one-vs-each has them, in O(C N^3): (O5)-(O8)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.gaussian.blocks import BlockAlgebra, BlockPosterior, ClassReduction
from fewshot.models.gaussian.evidence import Evidence, closed_log_normaliser, log_normaliser_of
from fewshot.models.gaussian.factors import class_factors, square_root
from fewshot.models.gaussian.marginals import AnyMarginals, Marginals
from fewshot.models.gaussian.prior import GaussianPrior
from fewshot.models.gaussian.star_reduction import CentredReduction, StarReduction, couple


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

    def distance(self, target: "StarSites", marginals: AnyMarginals, slope: Float[Array, "C N"]) -> Float[Array, ""]:
        """Largest |w - w^| v / max(1, |slope|) of the rays."""
        difference = jnp.abs(self.rays - target.rays) * marginals.variance
        return jnp.max(difference / jnp.maximum(1.0, jnp.abs(slope)))

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
        return closed_log_normaliser(prior.covariance, prior.mean, self)

    def evidence(self, prior: GaussianPrior) -> Evidence:
        """log Z and its derivatives."""
        reduction = self._reduce(prior)
        alpha, deviation = self._alpha(prior, reduction)
        value = log_normaliser_of(self, prior, deviation, reduction.log_determinant)

        def slope(change: StarSites) -> Array:
            """E_q of the change of sum_n log t_n: m . dh - 1/2 sum_n tr(dL_n (V_nn + m_n m_n^T))."""
            blocks = jax.jvp(lambda moved: moved.blocks(), (self,), (change,))[1]
            m = prior.mean + deviation
            squares = _covariance_blocks(prior, reduction) + m.T[:, :, None] * m.T[:, None]
            return jnp.sum(change.shift * m) - 0.5 * jnp.sum(blocks * squares)

        return Evidence(value, alpha, reduction.class_blocks, slope)

    def _reduce(self, prior: GaussianPrior) -> CentredReduction:
        """L = D + U_- U_-^T - U_+ U_+^T with D diagonal and U_+, U_- diagonal in every class (O5)."""
        degree = self.rays + self.centre * jnp.sum(self.rays, axis=0)
        weight, inverse, determinant = class_factors(prior.covariance, degree)
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
    return prior.marginals().covariance_blocks() - reduction.explained_here()
