"""Star sites: class differences around one class of every point, as one-vs-each has them, in O(C N^3): (O5)-(O8)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import lu_solve
from jaxtyping import Array, Bool, Float, Key

from models.block_gaussian import BlockAlgebra, ClassReduction, corrected
from models.gaussian import GaussianPrior, apply_covariance, class_factors, highest_precision, square_root


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

    def _reduce(self, prior: GaussianPrior) -> "CentredReduction":
        """L = D - U G U^T with D diagonal, U = (centre, rays) and G = [[0, 1], [1, 0]]: the inner matrix

        G - U^T E U, E = (K^-1 + D)^-1, has 2 N rows and is indefinite; |G| = 1 up to sign. U is diagonal in every
        class, so U^T E U is a sum over the classes of E, weighted by rows and columns.
        """
        degree = self.rays + self.centre * jnp.sum(self.rays, axis=0)
        weight, inverse, determinant = class_factors(prior, degree)
        whitened = inverse @ (weight[:, :, None] * prior.covariance)
        kept = prior.covariance - jnp.swapaxes(whitened, 1, 2) @ whitened  # E [C, N, N]
        spokes = (self.centre, self.rays)
        links = [[jnp.sum(u[:, :, None] * kept * v[:, None, :], axis=0) for v in spokes] for u in spokes]
        eye = jnp.eye(self.shift.shape[1], dtype=weight.dtype)
        core = jnp.block([[-links[0][0], eye - links[0][1]], [eye - links[1][0], -links[1][1]]])
        diagonal = ClassReduction(weight, inverse)
        star = StarReduction(
            prior.covariance, diagonal, self.centre, self.rays, _invert(0.5 * (core + core.T)), determinant
        )
        return CentredReduction(star)


class Core(NamedTuple):
    """The matrix that couples the classes, its inverse [J, J] and log|det|."""

    matrix: Float[Array, "J J"]
    inverse: Float[Array, "J J"]
    log_determinant: Float[Array, ""]


class StarReduction(NamedTuple):
    """F = F_D - T U core^-1 U^T T^T with F_D of every class alone, T = I - F_D K and U = (centre, rays).

    covariance K; core [2 N, 2 N]; class_determinant is the diagonal sites' part of log|I + K L|.
    """

    covariance: Float[Array, "*C N N"]
    diagonal: ClassReduction
    centre: Float[Array, "C N"]
    rays: Float[Array, "C N"]
    core: Core
    class_determinant: Float[Array, ""]

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """log|I + K L|."""
        return self.class_determinant + self.core.log_determinant

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        within, right = self._gathered(values)
        return self._spread(within, self.core.inverse @ right)

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|: one right side of the core, whose inverse is wanted for derivatives only."""
        within, right = self._gathered(values)
        inner, determinant = _solve_and_log_determinant(self.core.matrix, right)
        return self._spread(within, inner), self.class_determinant + determinant

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = self.diagonal.rows(cross)
        whitened = self.diagonal.whitened(rows)
        seen = jnp.swapaxes(whitened, 1, 2) @ self.diagonal.inverse * self.diagonal.weight[:, None]  # k F_D
        carried = rows - seen @ self.covariance  # k T
        spokes = jnp.concatenate([carried * self.centre[:, None], carried * self.rays[:, None]], axis=-1)
        shared = jnp.einsum("cqp,dqp->qcd", spokes @ self.core.inverse, spokes)
        return corrected(whitened, shared)

    def _gathered(self, values: Array) -> tuple[Array, Array]:
        """F_D values, and U^T T^T values [2 N]."""
        within = self.diagonal.times(values)
        left = values - apply_covariance(self.covariance, within)
        return within, jnp.concatenate([jnp.sum(u * left, axis=0) for u in (self.centre, self.rays)])

    def _spread(self, within: Array, inner: Array) -> Array:
        """F_D values - T U inner."""
        hub, rim = jnp.split(inner, 2)
        carried = self.centre * hub + self.rays * rim
        return within - carried + self.diagonal.times(apply_covariance(self.covariance, carried))


class CentredReduction(NamedTuple):
    """A reduction whose L knows differences of classes only: F sums to 0 over the classes of every point.

    Enforced, because K amplifies the rounding of that sum at large output scales.
    """

    inner: StarReduction

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """log|I + K L|."""
        return self.inner.log_determinant

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        product = self.inner.times(values - jnp.mean(values, axis=0))
        return product - jnp.mean(product, axis=0)

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|."""
        product, determinant = self.inner.solved(values - jnp.mean(values, axis=0))
        return product - jnp.mean(product, axis=0), determinant

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        values = self.inner.explained(cross)
        if cross.ndim > 2:  # a covariance for every class: K F K has no such sum
            return values
        rows = values - jnp.mean(values, axis=1, keepdims=True)
        return rows - jnp.mean(rows, axis=2, keepdims=True)


def _invert(matrix: Array) -> Core:
    return Core(matrix, *_inverse_and_log_determinant(matrix))


@jax.custom_jvp
def _inverse_and_log_determinant(matrix: Array) -> tuple[Array, Array]:
    """M^-1 and log|det M| from one factorisation."""
    return _solve_by_lu(matrix, jnp.eye(matrix.shape[-1], dtype=matrix.dtype))


@_inverse_and_log_determinant.defjvp
@highest_precision
def _inverse_and_log_determinant_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    """d(M^-1) = -M^-1 dM M^-1 and d log|det M| = tr(M^-1 dM)."""
    inverse, determinant = _inverse_and_log_determinant(*primals)
    change = inverse @ tangents[0]
    return (inverse, determinant), (-change @ inverse, jnp.trace(change))


@jax.custom_jvp
def _solve_and_log_determinant(matrix: Array, right: Array) -> tuple[Array, Array]:
    """M^-1 right [J] and log|det M| from one factorisation, for a symmetric M."""
    return _solve_by_lu(matrix, right)


@_solve_and_log_determinant.defjvp
@highest_precision
def _solve_and_log_determinant_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[tuple, tuple]:
    """Derivatives of the above, without a product of matrices: an inverse, and products with vectors.

    The solution comes from the inverse here too: no second solve, which could run beside that of the inverse.
    """
    (matrix, right), (matrix_change, right_change) = primals, tangents
    inverse, determinant = _inverse_and_log_determinant(matrix)
    solution = inverse @ right
    change = inverse @ (right_change - matrix_change @ solution)
    return (solution, determinant), (change, jnp.sum(inverse * matrix_change))


def _solve_by_lu(matrix: Array, right: Array) -> tuple[Array, Array]:
    factors, pivots, _ = jax.lax.linalg.lu(matrix)
    return lu_solve((factors, pivots), right), jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factors))))
