"""Marginals of the latent logits at every point: independent between the classes, or coupled."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fewshot.models.gaussian.factors import diagonal_blocks, semidefinite_cholesky, standard_deviation


@runtime_checkable
class PointSites(Protocol):
    """Gaussian sites, point by point."""

    @property
    def shift(self) -> Float[Array, "C N"]:
        """h."""
        ...

    def blocks(self) -> Float[Array, "N C C"]:
        """L of every point."""
        ...


class Marginals(NamedTuple):
    """Independent normals of the latent logits: mean and variance, both [C, N]."""

    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]

    def covariance_blocks(self) -> Float[Array, "N C C"]:
        """Covariance of the classes at every point: diagonal."""
        return diagonal_blocks(self.variance)

    def differences(self, classes: Bool[Array, " C"] | None = None) -> "Marginals":
        """Itself: the differences of independent logits are not independent."""
        del classes
        return self

    def without(self, sites: PointSites) -> tuple["Marginals", Float[Array, " N"]]:
        """Cavities: the marginals of q without the site of each point, and log of the integral of both together.

        With those of q and c = 1 - W v: variance v / c, mean (m - v h) / c, and log E[t] as for blocks (K2, K3).
        """
        precision = jnp.diagonal(sites.blocks(), axis1=1, axis2=2).T
        kept = jnp.maximum(1 - precision * self.variance, jnp.finfo(self.variance.dtype).eps)  # > 0 but for rounding
        mean = (self.mean - self.variance * sites.shift) / kept
        left = sites.shift - precision * mean
        terms = jnp.log(kept) + (sites.shift + left) * mean + self.variance * left**2
        return Marginals(mean, self.variance / kept), 0.5 * jnp.sum(terms, axis=0)

    def at(self, nodes: Float[Array, "M C"]) -> Float[Array, "C M N"]:
        """m + v^1/2 z at all standard normal nodes z, points last: one product of matrices."""
        line = jnp.stack([standard_deviation(self.variance), self.mean])
        return jnp.einsum("icn,imc->cmn", line, jnp.stack([nodes, jnp.ones_like(nodes)]))

    def at_node(self) -> Callable[[Float[Array, " C"]], Float[Array, "C N"]]:
        """The same for one node at a time."""
        deviation = standard_deviation(self.variance)
        return lambda node: self.mean + deviation * node[:, None]


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

    def without(self, sites: PointSites) -> tuple["JointMarginals", Float[Array, " N"]]:
        """Cavities: the marginals of q without the site of each point, and log of the integral of both together.

        With those of q and A = I - V L: covariance A^-1 V, mean A^-1 (m - V h) (K2); log of the integral (K3) is
        1/2 log|A| + 1/2 (h + r) . mean + 1/2 r . V r with r = h - L mean.
        """
        blocks, shift = sites.blocks(), sites.shift.T
        kept = jnp.eye(blocks.shape[1], dtype=blocks.dtype) - self.covariance @ blocks
        moved = self.mean.T - jnp.einsum("nij,nj->ni", self.covariance, shift)
        solved = jnp.linalg.solve(kept, jnp.concatenate([self.covariance, moved[:, :, None]], axis=2))
        covariance, mean = solved[:, :, :-1], solved[:, :, -1]
        left = shift - jnp.einsum("nij,nj->ni", blocks, mean)
        explained = jnp.einsum("ni,nij,nj->n", left, self.covariance, left)
        value = jnp.linalg.slogdet(kept)[1] + jnp.sum((shift + left) * mean, axis=1) + explained
        return JointMarginals(mean.T, 0.5 * (covariance + jnp.swapaxes(covariance, 1, 2))), 0.5 * value

    def at(self, nodes: Float[Array, "M C"]) -> Float[Array, "C M N"]:
        """m + U z at all standard normal nodes z, points last, U a root of the covariance."""
        root = jnp.concatenate([semidefinite_cholesky(self.covariance), self.mean.T[:, :, None]], axis=2)
        return jnp.einsum("nci,mi->cmn", root, jnp.concatenate([nodes, jnp.ones_like(nodes[:, :1])], axis=1))

    def at_node(self) -> Callable[[Float[Array, " C"]], Float[Array, "C N"]]:
        """The same for one node at a time; the root is found once."""
        root = semidefinite_cholesky(self.covariance)
        return lambda node: self.mean + jnp.einsum("nci,i->cn", root, node)


class IndependentClasses:
    """What posteriors with mean and variance [C, N] share: their marginals, all of which the sites know."""

    __slots__ = ()
    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]

    @property
    def inverse_factor(self) -> Float[Array, "C K K"]:
        """Of the Cholesky factor of B, or of a matrix with its determinant."""
        raise NotImplementedError(f"{type(self).__name__} has no inverse_factor")

    @property
    def marginals(self) -> Marginals:
        """Marginals of q at the labelled points."""
        return Marginals(self.mean, self.variance)

    @property
    def seen(self) -> Marginals:
        """What the sites know of f: all of it."""
        return self.marginals

    @property
    def log_determinant(self) -> Float[Array, ""]:
        """log|B|, summed over classes."""
        return -2 * jnp.sum(jnp.log(jnp.diagonal(self.inverse_factor, axis1=-2, axis2=-1)))


AnyMarginals = Marginals | JointMarginals
