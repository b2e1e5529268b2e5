"""Factors of B = I + W^1/2 K W^1/2 (G1) and of blocks, with derivatives that are products of matrices.

Only this package factorises a matrix of Gaussian-process algebra, and it never adds to a diagonal what is not there.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

# GP algebra runs at full precision on every device: accelerators round float32 products by default.
highest_precision = jax.default_matmul_precision("highest")

WRITTEN_OUT = 8  # most columns of a semi-definite block that are not a loop


def class_factors(covariance: Float[Array, "*C N N"], precision: Float[Array, "C N"]) -> tuple[Array, Array, Array]:
    """W^1/2 [C, N], the inverse of R = chol(B) [C, N, N] and log|B|, summed over classes (G1)."""
    weight, matrices = _scaled(covariance, precision)
    return weight, *cholesky_inverse(matrices)


def class_cholesky(covariance: Float[Array, "*C N N"], precision: Float[Array, "C N"]) -> tuple[Array, Array]:
    """W^1/2 [C, N] and R = chol(B) [C, N, N] (G1)."""
    weight, matrices = _scaled(covariance, precision)
    return weight, jnp.linalg.cholesky(matrices, symmetrize_input=False)


def _scaled(covariance: Array, precision: Array) -> tuple[Array, Array]:
    """W^1/2 [C, N] and B = I + W^1/2 K W^1/2 [C, N, N]."""
    weight = square_root(precision)
    scaled = weight[:, :, None] * covariance * weight[:, None, :]
    return weight, jnp.eye(weight.shape[-1], dtype=weight.dtype) + scaled


@jax.custom_jvp
def cholesky_inverse(matrices: Float[Array, "*C N N"]) -> tuple[Float[Array, "*C N N"], Float[Array, ""]]:
    """R^-1 [*C, N, N] and sum_c log|B| of B = R R^T [*C, N, N], positive definite.

    The derivative d(R^-1) = -Phi(R^-1 dB R^-T) R^-1, Phi the lower triangle with half of the diagonal, is products of
    matrices: several times faster than the triangular solves that the derivative of a Cholesky factor takes, two of
    which could run side by side. On CPU jaxlib 0.10.2 hangs for good where as many large batches of solves do that as
    it has threads: each waits for a thread that the others hold.
    """
    cholesky = jnp.linalg.cholesky(matrices, symmetrize_input=False)
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    return solve_triangular(cholesky, identity, lower=True), log_determinant(cholesky)


@cholesky_inverse.defjvp
@highest_precision
def _cholesky_inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    inverse, determinant = cholesky_inverse(*primals)
    inner = inverse @ tangents[0] @ jnp.swapaxes(inverse, -1, -2)
    diagonal = jnp.diagonal(inner, axis1=-2, axis2=-1)
    lower = jnp.tril(inner) - 0.5 * diagonal[..., None] * jnp.eye(inner.shape[-1], dtype=inner.dtype)
    return (inverse, determinant), (-lower @ inverse, jnp.sum(diagonal))


def cholesky_solve(cholesky: Array, right: Array) -> Array:
    """B^-1 right [C, N] from R = chol(B)."""
    forward = solve_triangular(cholesky, right[..., None], lower=True)
    return solve_triangular(cholesky, forward, lower=True, trans=1)[..., 0]


def log_determinant(cholesky: Array) -> Array:
    """log|B|, summed over classes."""
    return 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky, axis1=-2, axis2=-1)))


def first_of_logarithm(diagonal: Float[Array, " S"], beside: Float[Array, " S-1"]) -> Float[Array, ""]:
    """The first entry of log T for a positive definite tridiagonal T: sum_i V_1i^2 log lambda_i."""
    values, vectors = jnp.linalg.eigh(jnp.diag(diagonal) + jnp.diag(beside, 1) + jnp.diag(beside, -1))
    return jnp.sum(vectors[0] ** 2 * jnp.log(values))


def semidefinite_cholesky(blocks: Float[Array, "N C C"]) -> Float[Array, "N C C"]:
    """Lower triangular U [N, C, C] with U U^T = blocks, for positive semi-definite blocks of any rank.

    A pivot that is 0 to rounding gives a column of zeros, with derivative 0, where the textbook algorithm divides. Few
    columns are written out, which runs fastest, but compiles in a time that grows with their square.
    """
    classes = blocks.shape[-1]
    if classes > WRITTEN_OUT:
        return jax.vmap(triangular_root)(blocks)
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


@highest_precision
def triangular_root(covariance: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """Lower triangular L with L L^T = K, for one positive semi-definite K of any rank.

    `semidefinite_cholesky` of one matrix by a loop, so that it may be large. A smooth function of K, unlike roots from
    eigenvectors: for densities of hyper-parameters and whitened latents together.
    """
    count = covariance.shape[0]
    floor = count * jnp.finfo(covariance.dtype).eps * jnp.max(jnp.diagonal(covariance))

    def column(rest: Array, j: Array) -> tuple[Array, Array]:
        present = rest[j, j] > floor
        pivot = jnp.sqrt(jnp.where(present, rest[j, j], 1.0))
        found = jnp.where(present & (jnp.arange(count) >= j), rest[:, j] / pivot, 0.0)
        return rest - jnp.outer(found, found), found

    return jax.lax.scan(column, covariance, jnp.arange(count))[1].T


def square_root(precision: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """W^1/2 whose derivative at W = 0 is 0, not infinite: a masked or saturated point carries no gradient."""
    positive = precision > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, precision, 1.0)), 0.0)


def standard_deviation(variance: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """sqrt(v), with v held above eps^2 so that its derivative stays finite at v = 0."""
    return jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).eps ** 2))


def diagonal_blocks(values: Float[Array, "C N"]) -> Float[Array, "N C C"]:
    """A diagonal matrix [C, C] for every point of values [C, N]."""
    return values.T[:, :, None] * jnp.eye(values.shape[0], dtype=values.dtype)


def apply_covariance(covariance: Float[Array, "*C N N"], values: Float[Array, "C N"]) -> Float[Array, "C N"]:
    """K values [C, N] for every class; K is [N, N] or [C, N, N]."""
    return jnp.squeeze(covariance @ values[..., None], -1)
