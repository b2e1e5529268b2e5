"""Gaussian algebra with block sites: factors that couple the classes of one point (G1-G7 with L_n [C, C] for W).

Everything follows from F = L - L V L = (K + L^-1)^-1, which exists for singular K and L:

    (B1) V = K - K F K        (B2) alpha = r - F K r, r = h - L a        (B3) m = a + K alpha
    (B4) query: k_** - k_* F k_*^T                                       (B5) KL as G5, trace term sum_n tr(L_n V_nn)

The three kinds of blocks differ in how F and log|I + K L| are found: `BlockSites` (any L_n) by one dense factorisation
of N C rows, `StarSites` and `SimplexSites` in O(C N^3), as a diagonal of class-wise factors plus a correction of rank
2 N or N (the matrix inversion lemma; OVE appendix B, Rasmussen and Williams 2006 algorithm 3.3).

Every triangular solve here waits for the one before it. On CPU, jaxlib 0.10.2 hangs for good where as many batched
solves run side by side as it has threads: each waits for a thread that the others hold. So the factors of the classes
are inverted once (`class_factors`), and nothing else is solved with them.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, lu_solve, solve_triangular
from jaxtyping import Array, Bool, Float, Int, Key

from models.gaussian import (
    GaussianPrior,
    Marginals,
    Query,
    apply_covariance,
    class_factors,
    highest_precision,
    log_determinant,
    prior_marginals,
    square_root,
)

DENSE_LIMIT = 4_000  # rows of the dense factorisation: 64 MB in float32, some 20 GFLOP


class JointMarginals(NamedTuple):
    """Normals of the logits of each point, coupled between the classes: mean [C, N], covariance [N, C, C]."""

    mean: Float[Array, "C N"]
    covariance: Float[Array, "N C C"]

    @property
    def variance(self) -> Float[Array, "C N"]:
        """Variances alone."""
        return jnp.diagonal(self.covariance, axis1=-2, axis2=-1).T

    def covariance_blocks(self) -> Float[Array, "N C C"]:
        """The covariance."""
        return self.covariance

    def differences(self, classes: Bool[Array, " C"] | None = None) -> "JointMarginals":
        """Marginals of f_c - f_r, r the first class that exists: all that a function of differences knows of f.

        Nodes are then spent on differences alone, and derivatives in the mean and covariance sum to 0 over the classes
        of a point, sampled or not. Exact zeros at r and at classes that do not exist.
        """
        real = jnp.ones(self.mean.shape[0], bool) if classes is None else classes
        first = jnp.argmax(real)
        kept = real & (jnp.arange(self.mean.shape[0]) != first)
        crossed = jnp.take(self.covariance, first, axis=2)
        own = jnp.take(crossed, first, axis=1)[:, None, None]
        spread = self.covariance - crossed[:, :, None] - crossed[:, None, :] + own
        mean = jnp.where(kept[:, None], self.mean - jnp.take(self.mean, first, axis=0), 0.0)
        return JointMarginals(mean, jnp.where(kept[:, None] & kept, spread, 0.0))


@runtime_checkable
class Reduction(Protocol):
    """F = (K + L^-1)^-1 in factored form, and log|I + K L|."""

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """log|I + K L|."""
        ...

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        ...

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        ...


class BlockPosterior(NamedTuple):
    """The prior times block sites: mean and alpha = K^-1 (mean - a) [C, N], covariance of each point [N, C, C]."""

    mean: Float[Array, "C N"]
    covariance: Float[Array, "N C C"]
    alpha: Float[Array, "C N"]
    reduction: Reduction
    kl: Float[Array, ""]

    @property
    def variance(self) -> Float[Array, "C N"]:
        """Marginal variances."""
        return self.marginals.variance

    @property
    def marginals(self) -> JointMarginals:
        """Marginals of q at the labelled points."""
        return JointMarginals(self.mean, self.covariance)

    @highest_precision
    def predict(self, query: Query) -> JointMarginals:
        """Marginals of the latent logits at new inputs (G7, B4)."""
        mean = query.mean + self.alpha @ query.cross.T
        prior = Marginals(mean, jnp.broadcast_to(query.variance, mean.shape)).covariance_blocks()
        return JointMarginals(mean, prior - self.reduction.explained(query.cross))


class _BlockAlgebra:
    """What the three kinds of block sites share: all of it from `_reduce`, `times` and `blocks`."""

    shift: Array

    def shifted(self, by: Array) -> Any:
        """The same with shift h + by."""
        return self._replace(shift=self.shift + by)  # type: ignore[attr-defined]

    def times(self, f: Array) -> Array:
        raise NotImplementedError

    def blocks(self) -> Array:
        raise NotImplementedError

    def _reduce(self, prior: GaussianPrior) -> Reduction:
        raise NotImplementedError

    def condition(self, prior: GaussianPrior) -> BlockPosterior:
        """Exact posterior of N(a, K) times the sites."""
        reduction = self._reduce(prior)
        alpha, deviation = self._alpha(prior, reduction)
        covariance = prior_marginals(prior).covariance_blocks() - reduction.explained(prior.covariance)
        trace = jnp.sum(self.blocks() * covariance)
        kl = 0.5 * (reduction.log_determinant - trace + jnp.sum(deviation * alpha))
        return BlockPosterior(prior.mean + deviation, covariance, alpha, reduction, kl)

    def log_normaliser(self, prior: GaussianPrior) -> Float[Array, ""]:
        """log Z (G6)."""
        reduction = self._reduce(prior)
        _, deviation = self._alpha(prior, reduction)
        weighted = self.times(prior.mean)
        at_mean = jnp.sum(self.shift * prior.mean) - 0.5 * jnp.sum(prior.mean * weighted)
        return at_mean + 0.5 * jnp.sum((self.shift - weighted) * deviation) - 0.5 * reduction.log_determinant

    def deviation(self, prior: GaussianPrior) -> Float[Array, "C N"]:
        """Posterior mean less prior mean."""
        return self._alpha(prior, self._reduce(prior))[1]

    def _alpha(self, prior: GaussianPrior, reduction: Reduction) -> tuple[Array, Array]:
        residual = self.shift - self.times(prior.mean)
        alpha = residual - reduction.times(apply_covariance(prior.covariance, residual))
        return alpha, apply_covariance(prior.covariance, alpha)


class _BlockFields(NamedTuple):
    shift: Float[Array, "C N"]
    precision: Float[Array, "N C C"]


class BlockSites(_BlockFields, _BlockAlgebra):
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


class _StarFields(NamedTuple):
    shift: Float[Array, "C N"]
    rays: Float[Array, "C N"]
    centre: Float[Array, "C N"]


class StarSites(_StarFields, _BlockAlgebra):
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
        core_inverse, core_determinant = _inverse_and_log_determinant(0.5 * (core + core.T))
        total = determinant + core_determinant
        return CentredReduction(
            StarReduction(prior.covariance, weight, inverse, self.centre, self.rays, core_inverse, total)
        )


class _SimplexFields(NamedTuple):
    shift: Float[Array, "C N"]
    probability: Float[Array, "C N"]
    slope: Float[Array, "C N"]


class SimplexSites(_SimplexFields, _BlockAlgebra):
    """L_n = J (diag p - p p^T) J with J = diag(slope): the Fisher information of a categorical in its logits.

    probability p [C, N] sums to 1 at every point; a point or class with slope 0 says nothing.
    """

    __slots__ = ()

    def blocks(self) -> Float[Array, "N C C"]:
        """L."""
        p, slope = self.probability.T, self.slope.T
        scaled = p * slope
        return (scaled * slope)[:, :, None] * jnp.eye(p.shape[1], dtype=p.dtype) - scaled[:, :, None] * scaled[:, None]

    def masked(self, real: Bool[Array, "C N"]) -> "SimplexSites":
        """Only the real entries keep their site."""
        return SimplexSites(jnp.where(real, self.shift, 0.0), self.probability, jnp.where(real, self.slope, 0.0))

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """L_n f_n at every point."""
        scaled = self.slope * f
        centred = scaled - jnp.sum(self.probability * scaled, axis=0)
        return self.slope * self.probability * centred

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, L_n) at every point: J (diag p - p p^T) has the root J (diag sqrt(p) - p sqrt(p)^T)."""
        root = jnp.sqrt(self.probability)
        normal = root * jax.random.normal(key, self.shift.shape, self.shift.dtype)
        return self.slope * (normal - self.probability * jnp.sum(normal, axis=0))

    def _reduce(self, prior: GaussianPrior) -> "LowRankReduction":
        """L = D - u u^T with D = p slope^2 and u = p slope; the inner matrix I - u^T E u is sum_c p^1/2 B_c^-1 p^1/2.

        Written so, it is a sum of positive definite matrices and nothing cancels at large output scales.
        """
        root = jnp.sqrt(self.probability)
        weight, inverse, determinant = class_factors(prior, self.probability * self.slope**2)
        solved = jnp.swapaxes(inverse, 1, 2) @ (inverse * root[:, None, :])  # B^-1 p^1/2
        carried = weight[:, :, None] * solved
        core = jnp.linalg.cholesky(jnp.einsum("cn,cnm->nm", root, solved))
        spread = cho_solve((core, True), carried.reshape(-1, carried.shape[-1]).T).T.reshape(carried.shape)
        return LowRankReduction(weight, inverse, carried, spread, determinant + log_determinant(core))


class DenseReduction(NamedTuple):
    """F = A^T A: factor A [C N, C, N]; log_determinant is log|I + K L|."""

    factor: Float[Array, "J C N"]
    log_determinant: Float[Array, ""]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        return jnp.einsum("jcn,j->cn", self.factor, jnp.einsum("jcn,cn->j", self.factor, values))

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = jnp.broadcast_to(cross, (self.factor.shape[1], *cross.shape[-2:]))
        seen = jnp.einsum("jcn,cqn->qjc", self.factor, rows)
        return jnp.swapaxes(seen, 1, 2) @ seen


class LowRankReduction(NamedTuple):
    """F = F_D - spread carried^T, F_D = W^1/2 B^-1 W^1/2 for every class; P columns.

    weight W^1/2 [C, N], inverse R^-1 [C, N, N] with B = R R^T, carried and spread [C, N, P]; log_determinant is
    log|I + K L|.
    """

    weight: Float[Array, "C N"]
    inverse: Float[Array, "C N N"]
    carried: Float[Array, "C N P"]
    spread: Float[Array, "C N P"]
    log_determinant: Float[Array, ""]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        inner = jnp.einsum("cij,cj->ci", self.inverse, self.weight * values)
        within = self.weight * jnp.einsum("cij,ci->cj", self.inverse, inner)
        return within - jnp.einsum("cnp,p->cn", self.spread, jnp.einsum("cnp,cn->p", self.carried, values))

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = jnp.broadcast_to(cross, (*self.weight.shape[:1], *cross.shape[-2:]))
        whitened = self.inverse @ jnp.swapaxes(rows * self.weight[:, None], 1, 2)
        own = jnp.sum(whitened**2, axis=1).T  # [Q, C]
        shared = jnp.einsum("cqp,dqp->qcd", rows @ self.spread, rows @ self.carried)
        shared = 0.5 * (shared + jnp.swapaxes(shared, 1, 2))
        return own[:, :, None] * jnp.eye(own.shape[1], dtype=own.dtype) - shared


class StarReduction(NamedTuple):
    """F = F_D - T U core^-1 U^T T^T with F_D = W^1/2 B^-1 W^1/2, T = I - F_D K for every class and U = (centre, rays).

    covariance K, weight W^1/2 [C, N], inverse R^-1 [C, N, N] with B = R R^T; core_inverse [2 N, 2 N] couples the
    classes; log_determinant is log|I + K L|.
    """

    covariance: Float[Array, "*C N N"]
    weight: Float[Array, "C N"]
    inverse: Float[Array, "C N N"]
    centre: Float[Array, "C N"]
    rays: Float[Array, "C N"]
    core_inverse: Float[Array, "J J"]
    log_determinant: Float[Array, ""]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        within = self._within(values)
        left = values - apply_covariance(self.covariance, within)  # T^T values
        inner = self.core_inverse @ jnp.concatenate([jnp.sum(u * left, axis=0) for u in (self.centre, self.rays)])
        hub, rim = jnp.split(inner, 2)
        carried = self.centre * hub + self.rays * rim
        return within - carried + self._within(apply_covariance(self.covariance, carried))

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = jnp.broadcast_to(cross, (*self.weight.shape[:1], *cross.shape[-2:]))
        whitened = self.inverse @ jnp.swapaxes(rows * self.weight[:, None], 1, 2)
        own = jnp.sum(whitened**2, axis=1).T  # [Q, C]
        seen = jnp.swapaxes(whitened, 1, 2) @ self.inverse * self.weight[:, None]  # k F_D
        carried = rows - seen @ self.covariance  # k T
        spokes = jnp.concatenate([carried * self.centre[:, None], carried * self.rays[:, None]], axis=-1)
        shared = jnp.einsum("cqp,dqp->qcd", spokes @ self.core_inverse, spokes)
        shared = 0.5 * (shared + jnp.swapaxes(shared, 1, 2))
        return own[:, :, None] * jnp.eye(own.shape[1], dtype=own.dtype) - shared

    def _within(self, values: Array) -> Array:
        inner = jnp.einsum("cij,cj->ci", self.inverse, self.weight * values)
        return self.weight * jnp.einsum("cij,ci->cj", self.inverse, inner)


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

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        values = self.inner.explained(cross)
        if cross.ndim > 2:  # a covariance for every class: K F K has no such sum
            return values
        rows = values - jnp.mean(values, axis=1, keepdims=True)
        return rows - jnp.mean(rows, axis=2, keepdims=True)


def zero_block_sites(prior: GaussianPrior) -> BlockSites:
    """Block sites that say nothing."""
    classes, points = prior.mean.shape
    return BlockSites(jnp.zeros_like(prior.mean), jnp.zeros((points, classes, classes), prior.mean.dtype))


@jax.custom_jvp
def _inverse_and_log_determinant(matrix: Array) -> tuple[Array, Array]:
    """M^-1 and log|det M| from one factorisation."""
    factors, pivots, _ = jax.lax.linalg.lu(matrix)
    inverse = lu_solve((factors, pivots), jnp.eye(matrix.shape[-1], dtype=matrix.dtype))
    return inverse, jnp.sum(jnp.log(jnp.abs(jnp.diagonal(factors))))


@_inverse_and_log_determinant.defjvp
@highest_precision
def _inverse_and_log_determinant_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[tuple, tuple]:
    """d(M^-1) = -M^-1 dM M^-1 and d log|det M| = tr(M^-1 dM)."""
    inverse, determinant = _inverse_and_log_determinant(*primals)
    change = inverse @ tangents[0]
    return (inverse, determinant), (-change @ inverse, jnp.trace(change))


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


def covariance_root(posterior: BlockPosterior, prior: GaussianPrior) -> Float[Array, "J J"]:
    """A root of V = K - K F K (B1), J = C N rows."""
    shape = posterior.mean.shape
    basis = jnp.eye(posterior.mean.size, dtype=posterior.mean.dtype).reshape(-1, *shape)

    def column(one: Array) -> Array:
        forward = apply_covariance(prior.covariance, one)
        return forward - apply_covariance(prior.covariance, posterior.reduction.times(forward))

    full = jax.vmap(column)(basis).reshape(posterior.mean.size, -1)
    values, vectors = jnp.linalg.eigh(0.5 * (full + full.T))
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))
