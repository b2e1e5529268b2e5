"""Gaussian algebra with block sites: factors that couple the classes of one point (G1-G7 with L_n [C, C] for W).

Everything follows from F = L - L V L = (K + L^-1)^-1, which exists for singular K and L:

    (B1) V = K - K F K        (B2) alpha = r - F K r, r = h - L a        (B3) m = a + K alpha
    (B4) query: k_** - k_* F k_*^T                                       (B5) KL as G5, trace term sum_n tr(L_n V_nn)

This file holds what all kinds of blocks share. They differ in how F and log|I + K L| are found: any L_n by one dense
factorisation of N C rows (dense.py), stars and simplices in O(C N^3), as a diagonal of class-wise factors plus a
correction of rank 2 N or N (star_reduction.py, simplex.py; the matrix inversion lemma; OVE appendix B, Rasmussen
and Williams 2006 algorithm 3.3).

Every triangular solve of these files waits for the one before it. On CPU, jaxlib 0.10.2 hangs for good where as many
batched solves run side by side as it has threads: each waits for a thread that the others hold. So the factors of the
classes are inverted once (`class_factors`), and nothing else is solved with them.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian.evidence import log_normaliser_of
from fewshot.models.gaussian.factors import apply_covariance, highest_precision
from fewshot.models.gaussian.marginals import JointMarginals, Marginals
from fewshot.models.gaussian.prior import GaussianPrior, Query


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

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|, the cheapest way where no more is wanted."""
        ...

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        ...


class BlockPosterior(NamedTuple):
    """The prior times block sites: mean and alpha = K^-1 (mean - a) [C, N], covariance of each point [N, C, C].

    differences are the marginals of f - f_y, y the centre of each point's star, where the sites are stars: they take
    less than half the work of the covariance, which a compiler leaves out where nobody asks for it.
    """

    mean: Float[Array, "C N"]
    covariance: Float[Array, "N C C"]
    alpha: Float[Array, "C N"]
    reduction: Reduction
    kl: Float[Array, ""]
    differences: Marginals | None = None

    @property
    def variance(self) -> Float[Array, "C N"]:
        """Marginal variances."""
        return self.marginals.variance

    @property
    def marginals(self) -> JointMarginals:
        """Marginals of q at the labelled points."""
        return JointMarginals(self.mean, self.covariance)

    @property
    def seen(self) -> Marginals | JointMarginals:
        """What the sites know of f: of stars the differences, which cost less."""
        return self.marginals if self.differences is None else self.differences

    @highest_precision
    def predict(self, query: Query) -> JointMarginals:
        """Marginals of the latent logits at new inputs (G7, B4)."""
        mean = query.mean + self.alpha @ query.cross.T
        prior = Marginals(mean, jnp.broadcast_to(query.variance, mean.shape)).covariance_blocks()
        return JointMarginals(mean, prior - self.reduction.explained(query.cross))

    @highest_precision
    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "1 D C N"]:
        """Joint draws of f at the labelled points, by a root of V."""
        spread = covariance_root(self, prior)
        normal = jax.random.normal(key, (count, spread.shape[0]), spread.dtype)
        return (self.mean + (normal @ spread.T).reshape(count, *self.mean.shape))[None]


class BlockAlgebra:
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

    def prior_marginals(self, prior: GaussianPrior) -> JointMarginals:
        """Marginals of the prior in the form that a posterior with such sites has."""
        return JointMarginals(prior.mean, prior.marginals().covariance_blocks())

    def condition(self, prior: GaussianPrior) -> BlockPosterior:
        """Exact posterior of N(a, K) times the sites."""
        reduction = self._reduce(prior)
        alpha, deviation = self._alpha(prior, reduction)
        covariance = prior.marginals().covariance_blocks() - reduction.explained(prior.covariance)
        trace = jnp.sum(self.blocks() * covariance)
        kl = 0.5 * (reduction.log_determinant - trace + jnp.sum(deviation * alpha))
        return BlockPosterior(prior.mean + deviation, covariance, alpha, reduction, kl)

    def log_normaliser(self, prior: GaussianPrior) -> Float[Array, ""]:
        """log Z (G6)."""
        deviation, determinant = self._solved(prior)
        return log_normaliser_of(self, prior, deviation, determinant)  # type: ignore[arg-type]

    def deviation(self, prior: GaussianPrior) -> Float[Array, "C N"]:
        """Posterior mean less prior mean."""
        return self._solved(prior)[0]

    def _solved(self, prior: GaussianPrior) -> tuple[Array, Array]:
        """Posterior mean less prior mean, and log|I + K L|, where no more products with F are wanted."""
        residual = self.shift - self.times(prior.mean)
        product, determinant = self._reduce(prior).solved(apply_covariance(prior.covariance, residual))
        return apply_covariance(prior.covariance, residual - product), determinant

    def _alpha(self, prior: GaussianPrior, reduction: Reduction) -> tuple[Array, Array]:
        residual = self.shift - self.times(prior.mean)
        alpha = residual - reduction.times(apply_covariance(prior.covariance, residual))
        return alpha, apply_covariance(prior.covariance, alpha)


class ClassReduction(NamedTuple):
    """F of diagonal sites, W^1/2 B^-1 W^1/2 for every class: weight W^1/2 [C, N], inverse R^-1 [C, N, N], B = R R^T."""

    weight: Float[Array, "C N"]
    inverse: Float[Array, "C N N"]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        inner = jnp.einsum("cij,cj->ci", self.inverse, self.weight * values)
        return self.weight * jnp.einsum("cij,ci->cj", self.inverse, inner)

    def rows(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "C Q N"]:
        """The cross-covariance of every class."""
        return jnp.broadcast_to(cross, (*self.weight.shape[:1], *cross.shape[-2:]))

    def whitened(self, rows: Float[Array, "C Q N"]) -> Float[Array, "C N Q"]:
        """R^-1 W^1/2 k_q^T: k_q F k_q^T is the sum of its squares."""
        return self.inverse @ jnp.swapaxes(rows * self.weight[:, None], 1, 2)


def corrected(whitened: Float[Array, "C N Q"], shared: Float[Array, "Q C C"]) -> Float[Array, "Q C C"]:
    """What class-wise factors explain at every query, less a correction that couples the classes, made symmetric."""
    own = jnp.sum(whitened**2, axis=1).T  # [Q, C]
    shared = 0.5 * (shared + jnp.swapaxes(shared, 1, 2))
    return own[:, :, None] * jnp.eye(own.shape[1], dtype=own.dtype) - shared


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
