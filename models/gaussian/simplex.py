"""Simplex sites: the Fisher information of a categorical in its logits, as Laplace has it, in O(C N^3): (S5)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.gaussian.blocks import BlockAlgebra, ClassReduction, corrected
from fewshot.models.gaussian.factors import class_factors, log_determinant, square_root
from fewshot.models.gaussian.marginals import AnyMarginals
from fewshot.models.gaussian.prior import GaussianPrior


class _SimplexFields(NamedTuple):
    shift: Float[Array, "C N"]
    probability: Float[Array, "C N"]
    slope: Float[Array, "C N"]


class SimplexSites(_SimplexFields, BlockAlgebra):
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

    def distance(self, target: "SimplexSites", marginals: AnyMarginals, slope: Float[Array, "C N"]) -> Float[Array, ""]:
        """Largest |diag(L - L^)| v / max(1, |slope|)."""
        own = (sites.slope**2 * sites.probability * (1 - sites.probability) for sites in (self, target))
        return jnp.max(jnp.abs(next(own) - next(own)) * marginals.variance / jnp.maximum(1.0, jnp.abs(slope)))

    def _reduce(self, prior: GaussianPrior) -> "LowRankReduction":
        """L = D - u u^T with D = p slope^2 and u = p slope; the inner matrix I - u^T E u is sum_c p^1/2 B_c^-1 p^1/2.

        Written so, it is a sum of positive definite matrices and nothing cancels at large output scales.
        """
        root = square_root(self.probability)
        weight, inverse, determinant = class_factors(prior.covariance, self.probability * self.slope**2)
        solved = jnp.swapaxes(inverse, 1, 2) @ (inverse * root[:, None, :])  # B^-1 p^1/2
        carried = weight[:, :, None] * solved
        core = jnp.linalg.cholesky(jnp.einsum("cn,cnm->nm", root, solved))
        spread = cho_solve((core, True), carried.reshape(-1, carried.shape[-1]).T).T.reshape(carried.shape)
        total = determinant + log_determinant(core)
        return LowRankReduction(ClassReduction(weight, inverse), carried, spread, total)


class LowRankReduction(NamedTuple):
    """F = F_D - spread carried^T: F_D of every class alone, carried and spread [C, N, P]; P columns.

    log_determinant is log|I + K L|.
    """

    diagonal: ClassReduction
    carried: Float[Array, "C N P"]
    spread: Float[Array, "C N P"]
    log_determinant: Float[Array, ""]

    def times(self, values: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """F values."""
        coupled = jnp.einsum("cnp,p->cn", self.spread, jnp.einsum("cnp,cn->p", self.carried, values))
        return self.diagonal.times(values) - coupled

    def solved(self, values: Float[Array, "C N"]) -> tuple[Float[Array, "C N"], Float[Array, ""]]:
        """F values and log|I + K L|."""
        return self.times(values), self.log_determinant

    def explained(self, cross: Float[Array, "*C Q N"]) -> Float[Array, "Q C C"]:
        """k_q F k_q^T for every row k_q of the cross-covariance."""
        rows = self.diagonal.rows(cross)
        shared = jnp.einsum("cqp,dqp->qcd", rows @ self.spread, rows @ self.carried)
        return corrected(self.diagonal.whitened(rows), shared)
