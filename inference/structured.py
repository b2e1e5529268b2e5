"""Regression through a grid (S4 to S6, docs/sparse.md): A = W K_grid W^T + s2 I is only ever multiplied by vectors.

Linear systems are solved by conjugate gradients (of JAX), log|A| comes from stochastic Lanczos quadrature (Ubaru, Chen
and Saad 2017), its gradient from Hutchinson's estimate of the trace. With the N probes sqrt(N) e_n both are exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian import first_of_logarithm
from fewshot.models.grids import Grid, Interpolation, grid_product, interpolation, spectrum
from fewshot.models.inducing import Parameters
from fewshot.models.kernels import Stationary
from fewshot.models.regression import Prediction

Product = Callable[[Array], Array]


def solve(
    product: Product,
    right: Float[Array, "B N"],
    tolerance: float,
    steps: int,
    preconditioner: Product | None = None,
) -> Float[Array, "B N"]:
    """A^-1 of every row by conjugate gradients, to |residual| <= tolerance |right| or at most so many steps.

    preconditioner: near A^-1, symmetric and positive definite; the nearer, the fewer steps.
    """
    return jax.vmap(lambda one: cg(product, one, tol=tolerance, maxiter=steps, M=preconditioner)[0])(right)


def random_probes(key: Key[Array, ""], count: int, points: int, dtype: jnp.dtype) -> Float[Array, "P N"]:
    """Random signs: E z z^T = I, with the least variance among independent entries."""
    return jax.random.rademacher(key, (count, points), dtype)


def lanczos(product: Product, start: Float[Array, " N"], steps: int) -> tuple[Float[Array, " S"], Float[Array, " S-1"]]:
    """Diagonal and off-diagonal of T = Q^T A Q, Q an orthonormal basis of the Krylov space of `start`.

    New vectors are made orthogonal to all before, twice. Where the space is exhausted T goes on as the identity.
    """
    points = start.shape[0]
    floor = points * jnp.finfo(start.dtype).eps

    def one(carry: tuple[Array, Array], index: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        basis, vector = carry
        basis = basis.at[index].set(vector)
        moved = product(vector)
        diagonal = jnp.sum(vector * moved)
        length = jnp.sqrt(jnp.sum(moved**2))
        for _ in range(2):
            moved = moved - basis.T @ (basis @ moved)
        beside = jnp.sqrt(jnp.sum(moved**2))
        alive = beside > floor * length
        following = jnp.where(alive, moved / jnp.where(alive, beside, 1.0), 0.0)
        diagonal = jnp.where(jnp.any(vector != 0), diagonal, 1.0)
        return (basis, following), (diagonal, jnp.where(alive, beside, 0.0))

    first = start / jnp.sqrt(jnp.sum(start**2))
    empty = jnp.zeros((steps, points), start.dtype)
    _, (diagonal, beside) = jax.lax.scan(one, (empty, first), jnp.arange(steps))
    return diagonal, beside[:-1]


def log_determinant(
    product: Product, probes: Float[Array, "P N"], steps: int, together: int | None = None
) -> Float[Array, ""]:
    """log|A| = E z.(log A) z, each by Gauss quadrature of `steps` nodes: |z|^2 (log T)_11 (S6).

    together: probes that are multiplied at once, one by one by default.
    """
    each = lambda z: jnp.sum(z**2) * first_of_logarithm(*lanczos(product, z, steps))  # noqa: E731
    return jnp.mean(jax.lax.map(each, probes, batch_size=together))


class State(NamedTuple):
    """alpha = A^-1 y [N], and K_grid W^T alpha [G], of which the mean at new inputs is interpolated."""

    alpha: Float[Array, " N"]
    values: Float[Array, " G"]


@dataclass(frozen=True)
class GridProcess:
    """A process of mean zero through a grid; what learns and predicts with it must lie inside the grid.

    tolerance and solve_steps end conjugate gradients; lanczos_steps is the number of nodes of the log determinant.
    """

    kernel: Stationary
    tolerance: float = 1e-6
    solve_steps: int = 1000
    lanczos_steps: int = 50

    def product(
        self, parameters: Parameters, grid: Grid, rows: Interpolation, columns: Interpolation | None = None
    ) -> Product:
        """K [N, M] ~ W_rows K_grid W_columns^T as a function of vectors [*B, M]; columns are the rows by default."""
        transform = spectrum(self.kernel, parameters.hyper, grid, jnp.exp(parameters.log_weights))
        right = rows if columns is None else columns
        return lambda vector: rows.gather(grid_product(transform, grid.shape, right.spread(vector)))

    def noisy(self, parameters: Parameters, grid: Grid, rows: Interpolation) -> Product:
        """A = K + s2 I."""
        smooth = self.product(parameters, grid, rows)
        return lambda vector: smooth(vector) + jnp.exp(parameters.log_noise) * vector

    def log_evidence(
        self,
        parameters: Parameters,
        grid: Grid,
        x: Float[Array, "N D"],
        y: Float[Array, " N"],
        probes: Float[Array, "P N"],
    ) -> Float[Array, ""]:
        """log N(y | 0, A) (S5): the value by quadrature, the gradient by Hutchinson's trace on the same probes.

        With alpha = A^-1 y and s = A^-1 z held, 1/2 alpha.A alpha - 1/2 mean s.A z has the gradient (S6).
        """
        rows = interpolation(grid, x)
        fixed = self.noisy(jax.lax.stop_gradient(parameters), grid, rows)
        solved = solve(fixed, jnp.concatenate([y[None], probes]), self.tolerance, self.solve_steps)
        alpha, rest = solved[0], solved[1:]
        determinant = log_determinant(fixed, probes, self.lanczos_steps)
        value = -0.5 * (jnp.sum(y * alpha) + determinant + len(y) * jnp.log(2 * jnp.pi))
        moving = self.noisy(parameters, grid, rows)
        slope = 0.5 * jnp.sum(alpha * moving(alpha)) - 0.5 * jnp.mean(jnp.sum(rest * moving(probes), axis=-1))
        return jax.lax.stop_gradient(value) + slope - jax.lax.stop_gradient(slope)

    def condition(self, parameters: Parameters, grid: Grid, x: Float[Array, "N D"], y: Float[Array, " N"]) -> State:
        """alpha, by one linear system."""
        rows = interpolation(grid, x)
        alpha = solve(self.noisy(parameters, grid, rows), y[None], self.tolerance, self.solve_steps)[0]
        transform = spectrum(self.kernel, parameters.hyper, grid, jnp.exp(parameters.log_weights))
        return State(alpha, grid_product(transform, grid.shape, rows.spread(alpha)))

    def mean(self, grid: Grid, state: State, new: Float[Array, "Q D"]) -> Float[Array, " Q"]:
        """W_* K_grid W^T alpha: 4^D numbers a query."""
        return interpolation(grid, new).gather(state.values)

    def predict(
        self, parameters: Parameters, grid: Grid, state: State, x: Float[Array, "N D"], new: Float[Array, "Q D"]
    ) -> Prediction:
        """Mean by interpolation of `state.values`; variance k_** - k_*.A^-1 k_*, one linear system a query."""
        rows, queries = interpolation(grid, x), interpolation(grid, new)
        columns = interpolation_rows(queries)
        transform = spectrum(self.kernel, parameters.hyper, grid, jnp.exp(parameters.log_weights))
        smooth = grid_product(transform, grid.shape, columns)
        cross = rows.gather(smooth)
        solved = solve(self.noisy(parameters, grid, rows), cross, self.tolerance, self.solve_steps)
        before = jnp.sum(columns * smooth, axis=-1)
        variance = jnp.maximum(before - jnp.sum(cross * solved, axis=-1), 0.0)
        return Prediction(self.mean(grid, state, new), variance)


def interpolation_rows(queries: Interpolation) -> Float[Array, "Q G"]:
    """The rows of W, dense."""
    return jax.vmap(lambda near, share: jnp.zeros(queries.size, share.dtype).at[near].add(share))(
        queries.indices, queries.weights
    )
