"""F = (K + L^-1)^-1 of star sites in factored form: classes one by one, and a core of N rows that couples them (O6)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import lu_solve
from jaxtyping import Array, Float

from fewshot.models.gaussian.blocks import ClassReduction, corrected
from fewshot.models.gaussian.factors import apply_covariance, cholesky_inverse, highest_precision


class Core(NamedTuple):
    """What couples the classes: Z = I + U_-^T E U_- = R R^T and its Schur complement H = I - U_+^T E_1 U_+.

    E_1 = E - E U_- Z^-1 U_-^T E. root is R^-1, slope R^-1 U_-^T E U_+; log_determinant is log|Z| + log|det H|.
    """

    root: Float[Array, "N N"]
    slope: Float[Array, "N N"]
    schur: Float[Array, "N N"]
    inverse: Float[Array, "N N"]
    root_determinant: Float[Array, ""]
    log_determinant: Float[Array, ""]


class StarReduction(NamedTuple):
    """F = F_D + T U_- Z^-1 U_-^T T^T - T P H^-1 P^T T^T with F_D of every class alone, T = I - F_D K.

    P = U_+ - U_- Z^-1 U_-^T E U_+. covariance K; kept E = K T; class_determinant is the diagonal sites' part of
    log|I + K L|.
    """

    covariance: Float[Array, "*C N N"]
    diagonal: ClassReduction
    whitened: Float[Array, "C N N"]
    kept: Float[Array, "C N N"]
    plus: Float[Array, "C N"]
    minus: Float[Array, "C N"]
    core: Core
    class_determinant: Float[Array, ""]

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """log|I + K L|."""
        return self.class_determinant + self.core.log_determinant

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        within, low, right = self._gathered(values)
        return self._spread(within, low, self.core.inverse @ right)

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|: one right side of the core, whose inverse is wanted for derivatives only."""
        within, low, right = self._gathered(values)
        inner, determinant = _solve_and_log_determinant(self.core.schur, right)
        return self._spread(within, low, inner), self.class_determinant + self.core.root_determinant + determinant

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = self.diagonal.rows(cross)
        whitened = self.diagonal.whitened(rows)
        seen = jnp.swapaxes(whitened, 1, 2) @ self.diagonal.inverse * self.diagonal.weight[:, None]  # k F_D
        carried = rows - seen @ self.covariance  # k T
        return self._explained(whitened, carried)

    def explained_here(self) -> Float[Array, "N C C"]:
        """k_n F k_n^T for every row of K."""
        return self._explained(self.whitened, self.kept)

    def _explained(self, whitened: Array, carried: Array) -> Array:
        """From R^-1 W^1/2 k^T and k T."""
        low = (carried * self.minus[:, None]) @ self.core.root.T
        high = carried * self.plus[:, None] - low @ self.core.slope
        left, right = jnp.concatenate([high @ self.core.inverse, -low], -1), jnp.concatenate([high, low], -1)
        return corrected(whitened, jnp.einsum("cqp,dqp->qcd", left, right))

    def class_blocks(self) -> Float[Array, "C N N"]:
        """F_cc, by products of matrices alone."""
        factor = self.diagonal.inverse * self.diagonal.weight[:, None]  # F_D = factor^T factor
        transfer = jnp.eye(factor.shape[-1], dtype=factor.dtype) - jnp.swapaxes(factor, 1, 2) @ self.whitened
        spread = (transfer @ self._between_classes()) @ jnp.swapaxes(transfer, 1, 2)
        return jnp.swapaxes(factor, 1, 2) @ factor - spread

    def difference_variances(self, centre: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """Var(f_y - f_c) under q, 0 at c = y."""
        own = jnp.diagonal(self.kept, axis1=1, axis2=2) + jnp.sum(self.kept * (self._between_classes() @ self.kept), 1)
        plus, minus = (_between(u, self.kept, centre) for u in (self.plus, self.minus))
        (first, second), (_, third) = self._core_inverse()
        left, right = first @ plus + second @ minus, second.T @ plus + third @ minus
        carried = self.plus[:, :, None] * left + self.minus[:, :, None] * right
        crossed = jnp.sum(self.kept * carried, 1)
        variance = jnp.sum(centre * own, axis=0) + own - 2 * crossed
        return jnp.where(centre > 0, 0.0, jnp.maximum(variance, 0.0))

    def _between_classes(self) -> Float[Array, "C N N"]:
        """X_c with V_cc = E_c + E_c X_c E_c."""
        (first, second), (_, third) = self._core_inverse()
        plus, minus = self.plus[:, :, None], self.minus[:, :, None]
        across, over = jnp.swapaxes(plus, 1, 2), jnp.swapaxes(minus, 1, 2)
        return plus * (first * across + second * over) + minus * (second.T * across + third * over)

    def _core_inverse(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """The blocks X with V = E + E U X U^T E, U = (U_+, U_-)."""
        low = self.core.root.T @ self.core.slope  # Z^-1 U_-^T E U_+
        crossed = -self.core.inverse @ low.T
        return (self.core.inverse, crossed), (crossed.T, -low @ crossed - self.core.root.T @ self.core.root)

    def _gathered(self, values: Array) -> tuple[Array, Array, Array]:
        """F_D values, R^-1 U_-^T T^T values, and P^T T^T values."""
        within = self.diagonal.times(values)
        left = values - apply_covariance(self.covariance, within)
        low = self.core.root @ jnp.sum(self.minus * left, axis=0)
        return within, low, jnp.sum(self.plus * left, axis=0) - self.core.slope.T @ low

    def _spread(self, within: Array, low: Array, inner: Array) -> Array:
        """F_D values + T U_- R^-T low - T P inner."""
        carried = self.plus * inner - self.minus * (self.core.root.T @ (self.core.slope @ inner + low))
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

    def class_blocks(self) -> Float[Array, "C N N"]:
        """F_cc."""
        return self.inner.class_blocks()

    def difference_variances(self, centre: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """Var(f_y - f_c) under q, 0 at c = y."""
        return self.inner.difference_variances(centre)

    def explained_here(self) -> Float[Array, "N C C"]:
        """k_n F k_n^T for every row of K."""
        return self._centred(self.inner.explained_here(), self.inner.covariance)

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        return self._centred(self.inner.explained(cross), cross)

    def _centred(self, values: Array, cross: Array) -> Array:
        if cross.ndim > 2:  # a covariance for every class: K F K has no such sum
            return values
        rows = values - jnp.mean(values, axis=1, keepdims=True)
        return rows - jnp.mean(rows, axis=2, keepdims=True)


def couple(plus: Float[Array, "C N"], minus: Float[Array, "C N"], kept: Float[Array, "C N N"]) -> Core:
    """The core of U_+, U_- and E: one Cholesky factor, then one LU factor that waits for it."""
    own, crossed, other = (_between(u, kept, v) for u, v in ((plus, plus), (plus, minus), (minus, minus)))
    eye = jnp.eye(own.shape[-1], dtype=own.dtype)
    root, root_determinant = cholesky_inverse(eye + other)
    slope = root @ crossed.T
    schur = eye - own + slope.T @ slope
    schur = 0.5 * (schur + schur.T)
    inverse, determinant = _inverse_and_log_determinant(schur)
    return Core(root, slope, schur, inverse, root_determinant, root_determinant + determinant)


def _between(u: Array, kept: Array, v: Array) -> Array:
    """U^T E V, summed over the classes. As a product: a reduced array of all classes takes fifteen times as long."""
    return jnp.einsum("ci,cij,cj->ij", u, kept, v)


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
