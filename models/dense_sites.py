"""Dense block sites: any positive semi-definite L_n, by one factorisation of N C rows; the reference for the others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.block_gaussian import BlockAlgebra
from fewshot.models.gaussian import GaussianPrior

DENSE_LIMIT = 4_000  # rows of the dense factorisation: 64 MB in float32, some 20 GFLOP


class _BlockFields(NamedTuple):
    shift: Float[Array, "C N"]
    precision: Float[Array, "N C C"]


class BlockSites(_BlockFields, BlockAlgebra):
    """Any blocks: shift h [C, N] and precision L [N, C, C], positive semi-definite; N C is at most DENSE_LIMIT."""

    __slots__ = ()

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
                'use covariance="diagonal", or fewer points'
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


def zero_block_sites(prior: GaussianPrior) -> BlockSites:
    """Block sites that say nothing."""
    classes, points = prior.mean.shape
    return BlockSites(jnp.zeros_like(prior.mean), jnp.zeros((points, classes, classes), prior.mean.dtype))


def semidefinite_cholesky(blocks: Float[Array, "N C C"]) -> Float[Array, "N C C"]:
    """Lower triangular U [N, C, C] with U U^T = blocks, for positive semi-definite blocks of any rank.

    A pivot that is 0 to rounding gives a column of zeros, with derivative 0, where the textbook algorithm divides.
    """
    classes = blocks.shape[-1]
    largest = jnp.max(jnp.diagonal(blocks, axis1=-2, axis2=-1), axis=-1)
    floor = classes * jnp.finfo(blocks.dtype).eps * largest
    columns: list[Array] = []
    for j in range(classes):
        rest = blocks[..., j] - sum(
            (column * column[..., j, None] for column in columns), jnp.zeros_like(floor[..., None])
        )
        present = rest[..., j] > floor
        pivot = jnp.sqrt(jnp.where(present, rest[..., j], 1.0))
        below = jnp.arange(classes) >= j
        columns.append(jnp.where(present[..., None] & below, rest / pivot[..., None], 0.0))
    return jnp.stack(columns, axis=-1)


def positive_part(blocks: Float[Array, "N C C"]) -> tuple[Float[Array, "N C C"], Int[Array, ""]]:
    """Blocks [N, C, C] with negative eigenvalues set to 0, and how many there were; derivatives pass unclipped.

    What is negative by rounding alone is not counted.
    """
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(blocks))
    floor = -10 * blocks.shape[-1] * jnp.finfo(blocks.dtype).eps * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    missing = jnp.where(values < 0, values, 0.0)
    excess = jnp.einsum("nci,ni,ndi->ncd", vectors, missing, vectors)
    return blocks - excess, jnp.sum(values < floor)
