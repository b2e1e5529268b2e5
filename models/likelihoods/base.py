"""What a likelihood must offer. Tier 1 is enough for cvi, laplace and NUTS; tier 2 (augmented latents) comes later.

Letters: C classes, N points, Q queries, M nodes. y [N] int holds labels 0..C-1, f [C, N] the latent logits.
`classes` [C] marks the classes that exist; a masked class enters no normaliser and is predicted with probability 0.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from models.expectations import Points
from models.gaussian import Marginals


@runtime_checkable
class Likelihood(Protocol):
    """Tier 1: p(y | f) for independent labelled points. Implementations are frozen dataclasses and pytrees."""

    def parameters(self) -> dict[str, float | Array]:
        """Unconstrained scalars that the outer loop learns, by name; empty where there are none."""
        ...

    def priors(self) -> dict[str, dist.Distribution]:
        """One weakly informative prior for each of `parameters`."""
        ...

    def with_parameters(self, values: dict[str, Array]) -> "Likelihood":
        """The same likelihood at other values of `parameters`."""
        ...

    def log_prob(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log p(y_n | f_n)."""
        ...

    def expected_log_prob(
        self,
        y: Int[Array, " N"],
        marginals: Marginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log p(y_n | f_n): over the given nodes, or deterministic where points is None."""
        ...

    def predict(
        self, key: Key[Array, ""], marginals: Marginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """Class probabilities E_q p(y = k | f) of every query; rows sum to 1."""
        ...

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """p(observed | f) as a NumPyro distribution whose event is one task's observations."""
        ...

    def observed(self, y: Int[Array, " N"], classes: int) -> Array:
        """The labels in the form that `observation` is a distribution of."""
        ...


@runtime_checkable
class GaussianLikelihood(Likelihood, Protocol):
    """A likelihood that is itself Gaussian in f: it offers its sites in closed form, which is what `exact` needs."""

    def gaussian_sites(self, y: Int[Array, " N"], classes: int) -> tuple[Array, Array]:
        """Shift and precision [C, N] with p(y_n | f_n) proportional to the product of the sites of point n."""
        ...


def one_hot(y: Int[Array, " N"], classes: int, dtype: jnp.dtype = jnp.float32) -> Float[Array, "C N"]:
    """Y with Y[c, n] = 1 where y_n = c."""
    return jax.nn.one_hot(y, classes, axis=0, dtype=dtype)
