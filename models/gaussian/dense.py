"""Dense block sites: any positive semi-definite L_n, by one factorisation of N C rows; the reference for the others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.gaussian.blocks import BlockAlgebra
from fewshot.models.gaussian.factors import semidefinite_cholesky
from fewshot.models.gaussian.marginals import AnyMarginals, JointMarginals
from fewshot.models.gaussian.prior import GaussianPrior

DENSE_LIMIT = 4_000  # rows of the dense factorisation: 64 MB in float32, some 20 GFLOP


class _BlockFields(NamedTuple):
    shift: Float[Array, "C N"]
    precision: Float[Array, "N C C"]


class BlockSites(_BlockFields, BlockAlgebra):
    """Any blocks: shift h [C, N] and precision L [N, C, C], positive semi-definite; N C is at most DENSE_LIMIT."""

    __slots__ = ()

    @classmethod
    def zero(cls, prior: GaussianPrior) -> "BlockSites":
        """Sites that say nothing."""
        classes, points = prior.mean.shape
        return cls(jnp.zeros_like(prior.mean), jnp.zeros((points, classes, classes), prior.mean.dtype))

    @classmethod
    def with_slope(
        cls, slope: Float[Array, "C N"], precision: Float[Array, "N C C"], mean: Float[Array, "C N"]
    ) -> "BlockSites":
        """Sites of that precision whose log has the slope g at f = m: h = g + L m."""
        flat = cls(slope, precision)
        return flat.shifted(flat.times(mean))

    @staticmethod
    def curvature(slopes: JointMarginals) -> Float[Array, "N C C"]:
        """-2 g_V, symmetric: the precision (C1) that the slopes of E_q[log p(y | f)] ask for, of any sign."""
        return -(slopes.covariance + jnp.swapaxes(slopes.covariance, 1, 2))

    @staticmethod
    def of_blocks(blocks: Float[Array, "N C C"]) -> Float[Array, "N C C"]:
        """The part of a curvature [N, C, C] that such sites can hold: all of it."""
        return blocks

    @staticmethod
    def nonnegative(curvature: Float[Array, "N C C"]) -> tuple[Float[Array, "N C C"], Int[Array, ""]]:
        """The curvature with negative eigenvalues set to 0, and how many there were."""
        return positive_part(curvature)

    @property
    def longest_step(self) -> float:
        """In units of the way to the target: beyond it the precision could have negative eigenvalues."""
        return 1.0

    def moved(self, length: Float[Array, ""], direction: "BlockSites") -> "BlockSites":
        """The sites after a step of at most the whole way."""
        return BlockSites(*(site + length * part for site, part in zip(self, direction, strict=True)))

    def inner(self, other: "BlockSites", marginals: JointMarginals) -> Float[Array, ""]:
        """Inner product in the Fisher metric of normals about their mean, point by point: h V h + tr(V L V L) / 2."""
        spread = marginals.covariance
        shifts = jnp.einsum("cn,ncd,dn->", self.shift, spread, other.shift)
        return shifts + 0.5 * jnp.einsum("nab,nbc,ncd,nda->", spread, self.precision, spread, other.precision)

    def distance(self, target: "BlockSites", marginals: AnyMarginals, slope: Float[Array, "C N"]) -> Float[Array, ""]:
        """Largest difference of precisions in units of the deviations, relative to max(1, |slope|)."""
        deviation = jnp.sqrt(jnp.maximum(marginals.variance, 0.0)).T
        difference = (self.precision - target.precision) * deviation[:, :, None] * deviation[:, None, :]
        return jnp.max(jnp.abs(difference) / jnp.maximum(1.0, jnp.abs(slope.T[:, :, None])))

    def blocks(self) -> Float[Array, "N C C"]:
        """L."""
        return self.precision

    def masked(self, real: Bool[Array, "C N"]) -> "BlockSites":
        """Only the real entries keep their site."""
        both = real.T[:, :, None] & real.T[:, None, :]
        return BlockSites(jnp.where(real, self.shift, 0.0), jnp.where(both, self.precision, 0.0))

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """L_n f_n at every point."""
        return jnp.einsum("ncd,dn->cn", self.precision, f)

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, L_n) at every point."""
        normal = jax.random.normal(key, self.shift.shape, self.shift.dtype)
        return jnp.einsum("nci,in->cn", semidefinite_cholesky(self.precision), normal)

    def _reduce(self, prior: GaussianPrior) -> "DenseReduction":
        """F = A^T A with A = R^-1 U^T, L_n = U_n U_n^T and R = chol(I + U^T K U)."""
        classes, points = self.shift.shape
        size = classes * points
        if size > DENSE_LIMIT:
            raise ValueError(
                f"dense block sites are limited to N C = {DENSE_LIMIT:,}, got {points} points and {classes} classes; "
                "use diagonal Sites, or fewer points"
            )
        root = semidefinite_cholesky(self.precision)  # [N, C, I]
        covariance = jnp.broadcast_to(prior.covariance, (classes, points, points))
        inner = jnp.einsum("nci,cnm,mcj->nimj", root, covariance, root).reshape(size, size)
        cholesky = jnp.linalg.cholesky(jnp.eye(size, dtype=inner.dtype) + inner, symmetrize_input=False)
        spread = jnp.einsum("nci,nm->nicm", root, jnp.eye(points, dtype=root.dtype)).reshape(size, size)
        factor = solve_triangular(cholesky, spread, lower=True).reshape(size, classes, points)
        return DenseReduction(factor, 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky))))


class DenseReduction(NamedTuple):
    """F = A^T A: factor A [C N, C, N]; log_determinant is log|I + K L|."""

    factor: Float[Array, "J C N"]
    log_determinant: Float[Array, ""]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        return jnp.einsum("jcn,j->cn", self.factor, jnp.einsum("jcn,cn->j", self.factor, values))

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|."""
        return self.times(values), self.log_determinant

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = jnp.broadcast_to(cross, (self.factor.shape[1], *cross.shape[-2:]))
        seen = jnp.einsum("jcn,cqn->qjc", self.factor, rows)
        return jnp.swapaxes(seen, 1, 2) @ seen


def positive_part(blocks: Float[Array, "N C C"]) -> tuple[Float[Array, "N C C"], Int[Array, ""]]:
    """Blocks [N, C, C] with negative eigenvalues set to 0, and how many there were; derivatives pass unclipped.

    What is negative by rounding alone is not counted.
    """
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(blocks))
    floor = -10 * blocks.shape[-1] * jnp.finfo(blocks.dtype).eps * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    missing = jnp.where(values < 0, values, 0.0)
    excess = jnp.einsum("nci,ni,ndi->ncd", vectors, missing, vectors)
    return blocks - excess, jnp.sum(values < floor)
