"""Gaussian algebra with sites: equations G1-G8. Only this file and those of block sites factorise a matrix.

A *site* is an unnormalised Gaussian factor t(f) = exp(h.f - 1/2 f.W.f) attached to one labelled point; h is its
*shift*, W >= 0 its *precision*. The posterior N(a, K) times all sites is exact GP algebra, written without K^-1, so a
singular K (more points than features, duplicated images) needs no jitter. Shapes: C classes, N points, Q queries,
R columns of the root.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Bool, Float, Key

# GP algebra runs at full precision on every device: accelerators round float32 products by default.
highest_precision = jax.default_matmul_precision("highest")


class Marginals(NamedTuple):
    """Independent normals of the latent logits: mean and variance, both [C, N]."""

    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]

    def covariance_blocks(self) -> Float[Array, "N C C"]:
        """Covariance of the classes at every point: diagonal."""
        return _diagonal_blocks(self.variance)


class Sites(NamedTuple):
    """Diagonal Gaussian sites: shift h and precision W, both [C, N]."""

    shift: Float[Array, "C N"]
    precision: Float[Array, "C N"]

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
        return _diagonal_blocks(self.precision)

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, W); 0 where W = 0."""
        return square_root(self.precision) * jax.random.normal(key, self.shift.shape, self.shift.dtype)

    def condition(self, prior: "GaussianPrior") -> "GaussianPosterior":
        """Exact posterior of N(a, K) times the sites (G1-G5)."""
        weight, inverse, determinant = class_factors(prior, self.precision)
        alpha = self._alpha(prior, weight, partial(_solve_by_inverse, inverse))
        deviation = apply_covariance(prior.covariance, alpha)
        variance = _variances(prior, weight, inverse)
        trace = jnp.sum(1 - jnp.sum(inverse**2, axis=-2))  # sum_n W_n V_nn = tr(I - B^-1)
        kl = 0.5 * (determinant - trace + jnp.sum(deviation * alpha))
        return GaussianPosterior(prior.mean + deviation, variance, alpha, weight, inverse, kl)

    def log_normaliser(self, prior: "GaussianPrior") -> Float[Array, ""]:
        """log Z = log of the integral of N(f | a, K) times the sites (G6); its derivatives are in closed form."""
        return closed_log_normaliser(prior.covariance, prior.mean, self)

    def evidence(self, prior: "GaussianPrior") -> "Evidence":
        """log Z and its derivatives."""
        weight, inverse, determinant = class_factors(prior, self.precision)
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

    def deviation(self, prior: "GaussianPrior") -> Float[Array, "C N"]:
        """Posterior mean less prior mean, V (h - W a), without the variances: one Cholesky factor and its solves."""
        weight, cholesky = class_cholesky(prior, self.precision)
        return apply_covariance(prior.covariance, self._alpha(prior, weight, partial(cholesky_solve, cholesky)))

    def _alpha(self, prior: "GaussianPrior", weight: Array, inverse_times: Callable[[Array], Array]) -> Array:
        """K^-1 (m - a) = (I + W K)^-1 r with r = h - W a, from products with B^-1 (G4a).

        r - W^1/2 B^-1 W^1/2 K r loses its digits where W K >> 1 (as does h - W m), and W^1/2 B^-1 W^-1/2 r where
        W K << 1. Both are linear in r, so each point takes its own.
        """
        residual = self.shift - self.precision * prior.mean
        strong = self.precision * prior_marginals(prior).variance > 1
        weak = jnp.where(strong, 0.0, residual)
        scaled = jnp.where(strong, residual / jnp.where(strong, weight, 1.0), 0.0)
        return weak + weight * inverse_times(scaled - weight * apply_covariance(prior.covariance, weak))


@runtime_checkable
class AnySites(Protocol):
    """What the algebra needs of Gaussian sites; block_gaussian.py says which couple the classes of a point."""

    @property
    def shift(self) -> Float[Array, "C N"]:
        """h."""
        ...

    def masked(self, real: Bool[Array, "C N"]) -> "AnySites":
        """Only the real entries keep their site."""
        ...

    def shifted(self, by: Float[Array, "C N"]) -> "AnySites":
        """The same with shift h + by."""
        ...

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """The precision times f."""
        ...

    def blocks(self) -> Float[Array, "N C C"]:
        """The precision of every point."""
        ...

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, precision)."""
        ...

    def condition(self, prior: "GaussianPrior") -> Any:
        """Exact posterior of N(a, K) times the sites."""
        ...

    def log_normaliser(self, prior: "GaussianPrior") -> Float[Array, ""]:
        """log Z (G6)."""
        ...

    def deviation(self, prior: "GaussianPrior") -> Float[Array, "C N"]:
        """Posterior mean less prior mean."""
        ...


class GaussianPrior(NamedTuple):
    """N(a, K) for every class: mean a [C, N], covariance K [N, N] (shared) or [C, N, N].

    root is S [N, R] with K = S S^T where the kernel has finitely many features, else None (see `prior_root`).
    """

    mean: Float[Array, "C N"]
    covariance: Float[Array, "*C N N"]
    root: Float[Array, "N R"] | None = None


class Query(NamedTuple):
    """What G7 needs of Q new inputs: prior mean a_* [C, Q], cross-covariance k_* [Q, N], prior variance k_** [Q]."""

    mean: Float[Array, "C Q"]
    cross: Float[Array, "Q N"]
    variance: Float[Array, " Q"]


class Root(NamedTuple):
    """K = S S^T (G8) and P = S (S^T S)^+, with which E[u | f] = P^T (f - a); `indefinite` flags a failed K."""

    factor: Float[Array, "N R"]
    pseudo_inverse: Float[Array, "N R"]
    indefinite: Bool[Array, ""]


class GaussianPosterior(NamedTuple):
    """The prior times its sites. Build it with `condition`; all fields are [C, N] unless said otherwise.

    alpha is K^-1 (mean - a), weight is W^1/2, inverse [C, N, N] is R^-1 with B = R R^T, kl [] is KL(q || prior).
    """

    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]
    alpha: Float[Array, "C N"]
    weight: Float[Array, "C N"]
    inverse: Float[Array, "C N N"]
    kl: Float[Array, ""]

    @property
    def marginals(self) -> Marginals:
        """Marginals of q at the labelled points."""
        return Marginals(self.mean, self.variance)

    @highest_precision
    def predict(self, query: Query) -> Marginals:
        """Marginals of the latent logits at new inputs (G7)."""
        mean = query.mean + self.alpha @ query.cross.T
        whitened = self.inverse @ (self.weight[:, :, None] * query.cross.T)
        return Marginals(mean, jnp.maximum(query.variance - jnp.sum(whitened**2, axis=1), 0.0))


def zero_sites(prior: GaussianPrior) -> Sites:
    """Sites that say nothing: with them the posterior is the prior."""
    return Sites(jnp.zeros_like(prior.mean), jnp.zeros_like(prior.mean))


def prior_marginals(prior: GaussianPrior) -> Marginals:
    """Marginals of the prior at the labelled points."""
    diagonal = jnp.diagonal(prior.covariance, axis1=-2, axis2=-1)
    return Marginals(prior.mean, jnp.broadcast_to(diagonal, prior.mean.shape))


@highest_precision
def condition(prior: GaussianPrior, sites: AnySites) -> Any:
    """Exact posterior of N(a, K) times the sites (G1-G5): a GaussianPosterior, or a BlockPosterior for block sites."""
    return sites.condition(prior)


@highest_precision
def log_normaliser(prior: GaussianPrior, sites: AnySites) -> Float[Array, ""]:
    """log Z = log of the integral of N(f | a, K) times the sites (G6), summed over classes."""
    return sites.log_normaliser(prior)


@highest_precision
def draw(key: Key[Array, ""], prior: GaussianPrior, sites: AnySites, root: Float[Array, "N R"]) -> Float[Array, "C N"]:
    """A draw of f from N(a, K) times the sites, with K = root root^T (G8), for any W >= 0, zeros included.

    Matheron's rule: f0 from the prior, e ~ N(0, W), f = f0 + V (h + e - W f0). Its mean is (G3); its covariance is
    V K^-1 V + V W V = V.
    """
    prior_key, noise_key = jax.random.split(key)
    classes, rank = prior.mean.shape[0], root.shape[-1]
    start = prior.mean + jax.random.normal(prior_key, (classes, rank), root.dtype) @ root.T
    return start + sites.shifted(sites.noise(noise_key)).deviation(prior._replace(mean=start))


@highest_precision
def covariance(prior: GaussianPrior, sites: Sites) -> Float[Array, "C N N"]:
    """Full posterior covariance V of every class (G2)."""
    weight, inverse, _ = class_factors(prior, sites.precision)
    whitened = _whitened(prior, weight, inverse)
    return prior.covariance - jnp.swapaxes(whitened, -1, -2) @ whitened


@highest_precision
def prior_root(prior: GaussianPrior) -> Root:
    """Root of a shared K (G8): the kernel's features where it has them, else an eigen-decomposition of K.

    Directions below N eps lambda_max count as absent; an eigenvalue below minus that sets `indefinite`.
    No gradient passes through the decomposition: with P fixed, d(S S^T) = dK and d(K^+ S) follow from K itself, to
    first order and for a K of constant rank.
    """
    if prior.covariance.ndim != 2:
        raise ValueError("prior_root needs one K [N, N] shared by the classes; call it class by class")
    fixed = jax.lax.stop_gradient(prior.covariance)
    values, vectors = jnp.linalg.eigh(fixed)
    floor = values.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
    present = values > floor
    safe = jnp.where(present, values, 1.0)
    basis = jnp.where(present, vectors, 0.0)
    inverse = basis / jnp.sqrt(safe)
    change = prior.covariance - fixed
    if prior.root is None:
        moved = change @ inverse
        factor = basis * jnp.sqrt(safe) + moved - 0.5 * basis @ (basis.T @ moved)
        pseudo_inverse = inverse - 0.5 * inverse @ (inverse.T @ change @ inverse)
    else:
        factor = prior.root
        explained = inverse.T @ factor
        pseudo_inverse = inverse @ (explained - inverse.T @ change @ inverse @ explained)
    return Root(factor, pseudo_inverse, values[0] < -floor)


def root_of(prior: GaussianPrior) -> Float[Array, "N R"]:
    """S with K = S S^T (G8): the one that the prior holds, else one found here."""
    return prior_root(prior).factor if prior.root is None else prior.root


def with_root(prior: GaussianPrior) -> GaussianPrior:
    """The prior with its root, so that it is decomposed once however often it is drawn from."""
    return prior._replace(root=root_of(prior))


def _whitened(prior: GaussianPrior, weight: Array, inverse: Array) -> Array:
    """R^-1 W^1/2 K [C, N, N]."""
    return inverse @ (weight[:, :, None] * prior.covariance)


def _variances(prior: GaussianPrior, weight: Array, inverse: Array) -> Array:
    """diag V [C, N] (G2)."""
    explained = jnp.sum(_whitened(prior, weight, inverse) ** 2, axis=-2)
    return jnp.maximum(prior_marginals(prior).variance - explained, 0.0)


def _solve_by_inverse(inverse: Array, right: Array) -> Array:
    """B^-1 right [C, N] from R^-1."""
    return jnp.einsum("cij,ci->cj", inverse, jnp.einsum("cij,cj->ci", inverse, right))


class Evidence(NamedTuple):
    """log Z (G6), alpha [C, N], and on request what its other derivatives take (O13).

    class_blocks() is the block [C, N, N] of each class of F = (K + L^-1)^-1; slope(change) is the derivative of log Z
    along a change of the sites.
    """

    value: Float[Array, ""]
    alpha: Float[Array, "C N"]
    class_blocks: Callable[[], Array]
    slope: Callable[[Any], Array]


def log_normaliser_of(sites: AnySites, prior: GaussianPrior, deviation: Array, determinant: Array) -> Array:
    """log Z (G6) from V r [C, N] and log|B|."""
    residual = sites.shift - sites.times(prior.mean)
    return 0.5 * jnp.sum((sites.shift + residual) * prior.mean + residual * deviation) - 0.5 * determinant


@jax.custom_jvp
def closed_log_normaliser(covariance: Array, mean: Array, sites: Any) -> Array:
    """log Z (G6) of sites that have an `evidence`."""
    return sites.evidence(GaussianPrior(mean, covariance)).value


@partial(closed_log_normaliser.defjvp, symbolic_zeros=True)
@highest_precision
def _closed_log_normaliser_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """(O13): only what has a tangent is differentiated, so that fixed sites cost nothing."""
    (covariance, mean, sites), (covariance_change, mean_change, change) = primals, tangents
    found = sites.evidence(GaussianPrior(mean, covariance))
    slope = jnp.zeros_like(found.value)
    if not _is_zero(covariance_change):
        outer = found.alpha[:, :, None] * found.alpha[:, None] - found.class_blocks()
        slope += 0.5 * jnp.sum(outer * covariance_change)
    if not _is_zero(mean_change):
        slope += jnp.sum(found.alpha * mean_change)
    if not all(_is_zero(leaf) for leaf in change):
        slope += found.slope(type(sites)(*(jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x for x in change)))
    return found.value, slope


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)


def class_factors(prior: GaussianPrior, precision: Array) -> tuple[Array, Array, Array]:
    """W^1/2 [C, N], the inverse of R = chol(B) [C, N, N] and log|B|, summed over classes (G1)."""
    weight, matrices = _scaled(prior, precision)
    return weight, *cholesky_inverse(matrices)


@jax.custom_jvp
def cholesky_inverse(matrices: Array) -> tuple[Array, Array]:
    """R^-1 [C, N, N] and sum_c log|B| of B = R R^T [C, N, N], positive definite.

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


def class_cholesky(prior: GaussianPrior, precision: Array) -> tuple[Array, Array]:
    """W^1/2 [C, N] and R = chol(B) [C, N, N] (G1)."""
    weight, matrices = _scaled(prior, precision)
    return weight, jnp.linalg.cholesky(matrices, symmetrize_input=False)


def _scaled(prior: GaussianPrior, precision: Array) -> tuple[Array, Array]:
    """W^1/2 [C, N] and B = I + W^1/2 K W^1/2 [C, N, N]."""
    weight = square_root(precision)
    scaled = weight[:, :, None] * prior.covariance * weight[:, None, :]
    return weight, jnp.eye(weight.shape[-1], dtype=weight.dtype) + scaled


def cholesky_solve(cholesky: Array, right: Array) -> Array:
    """B^-1 right [C, N] from R = chol(B)."""
    forward = solve_triangular(cholesky, right[..., None], lower=True)
    return solve_triangular(cholesky, forward, lower=True, trans=1)[..., 0]


def log_determinant(cholesky: Array) -> Array:
    """log|B|, summed over classes."""
    return 2 * jnp.sum(jnp.log(jnp.diagonal(cholesky, axis1=-2, axis2=-1)))


def apply_covariance(covariance: Array, values: Array) -> Array:
    """K values [C, N] for every class; K is [N, N] or [C, N, N]."""
    return jnp.squeeze(covariance @ values[..., None], -1)


def _diagonal_blocks(values: Array) -> Array:
    """A diagonal matrix [C, C] for every point of values [C, N]."""
    return values.T[:, :, None] * jnp.eye(values.shape[0], dtype=values.dtype)


def square_root(precision: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """W^1/2 whose derivative at W = 0 is 0, not infinite: a masked or saturated point carries no gradient."""
    positive = precision > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, precision, 1.0)), 0.0)
