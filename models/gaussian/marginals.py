"""Marginals of the latent logits at every point: independent between the classes, or coupled."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fewshot.models.gaussian.factors import diagonal_blocks, semidefinite_cholesky, standard_deviation


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
