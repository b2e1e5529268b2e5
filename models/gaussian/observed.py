"""A process whose values are observed with Gaussian noise: one Cholesky factor of A = K + s2 I, and no inverse of it.

The site algebra serves any noise, zero precision included, and keeps what a fixed point needs (variances and KL at the
rows). Regression needs neither: log N(y | 0, A) with its derivatives, and marginals at new inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Float

from fewshot.models.gaussian.factors import highest_precision, log_determinant


class Observed(NamedTuple):
    """R with A = R R^T, alpha = A^-1 y, and log N(y | 0, A)."""

    cholesky: Float[Array, "N N"]
    alpha: Float[Array, " N"]
    log_density: Float[Array, ""]

    @highest_precision
    def predict(
        self, cross: Float[Array, "Q N"], variance: Float[Array, " Q"]
    ) -> tuple[Float[Array, " Q"], Float[Array, " Q"]]:
        """Mean k_*.alpha and variance k_** - |R^-1 k_*|^2 at new inputs (G7)."""
        seen = solve_triangular(self.cholesky, cross.T, lower=True)
        return cross @ self.alpha, jnp.maximum(variance - jnp.sum(seen**2, axis=0), 0.0)


@highest_precision
def observe(covariance: Float[Array, "N N"], y: Float[Array, " N"]) -> Observed:
    """The posterior of a process given y ~ N(0, A) at its rows; A is positive definite."""
    cholesky = jnp.linalg.cholesky(covariance, symmetrize_input=False)
    alpha = cho_solve((cholesky, True), y)
    square, level = jnp.sum(y * alpha), len(y) * jnp.log(2 * jnp.pi)
    return Observed(cholesky, alpha, -0.5 * (square + log_determinant(cholesky) + level))


@jax.custom_jvp
def normal_log_density(covariance: Float[Array, "N N"], y: Float[Array, " N"]) -> Float[Array, ""]:
    """log N(y | 0, A) whose derivatives are in closed form: 1/2 (alpha.dA alpha - tr A^-1 dA) - alpha.dy (P2)."""
    return observe(covariance, y).log_density


@normal_log_density.defjvp
@highest_precision
def _normal_log_density_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    covariance, y = primals
    found = observe(covariance, y)
    # Two triangular solves are the same number of operations as one and a product, in less time.
    precision = cho_solve((found.cholesky, True), jnp.eye(len(y), dtype=y.dtype))
    outer = jnp.outer(found.alpha, found.alpha)
    slope = 0.5 * jnp.sum((outer - precision) * tangents[0]) - jnp.sum(found.alpha * tangents[1])
    return found.log_density, slope
