"""Random Fourier features (P9, docs/sparse.md): a stationary kernel as random cosines, with a root (G8).

By Bochner's theorem k(x - z) = E cos(w.(x - z)) over the kernel's spectral density, which is a distribution where
k(0) = 1. With M draws w and phases b ~ U(0, 2 pi)

    phi(x) = (2 / M)^1/2 cos(w.x + b),    E phi(x).phi(z) = k(x - z),    error of order M^-1/2.

Regression with them is linear in M weights: O(N M^2) by models/inducing.py, with nothing left over.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key

from fewshot.models.inducing import View
from fewshot.models.kernels import RBF, Hyper, Matern52, Stationary, inner_products, per_dimension, unit_norm


def _normal(key: Key[Array, ""], shape: tuple[int, int], dtype: jnp.dtype) -> Array:
    """exp(-r^2 / 2) is the characteristic function of N(0, I)."""
    return jax.random.normal(key, shape, dtype)


def _student(key: Key[Array, ""], shape: tuple[int, int], dtype: jnp.dtype) -> Array:
    """Matern-5/2 has the density (5 + |w|^2)^-(5 + D)/2 up to a constant: multivariate t, 5 degrees of freedom."""
    normal_key, gamma_key = jax.random.split(key)
    squares = jax.random.gamma(gamma_key, 2.5, shape[1:], dtype) / 2.5
    return jax.random.normal(normal_key, shape, dtype) / jnp.sqrt(squares)


SPECTRA: Mapping[type[Stationary], Callable[..., Array]] = {RBF: _normal, Matern52: _student}


@dataclass(frozen=True)
class RandomFourier:
    """`features` random cosines of a stationary base kernel; the same seed gives the same features everywhere.

    It has a base kernel's methods and numbers. Raises ValueError for a base without a known spectral density.
    """

    base: Stationary
    features: int
    seed: int

    def __post_init__(self) -> None:
        if type(self.base) not in SPECTRA or self.features < 1:
            known = ", ".join(kind.__name__ for kind in SPECTRA)
            raise ValueError(
                f"expected one of {known} and at least one feature, got {type(self.base).__name__} and {self.features}"
            )

    def initial(self) -> dict[str, float]:
        """Where learning starts: as the base kernel."""
        return self.base.initial()

    def priors(self) -> dict[str, dist.Distribution]:
        """The base kernel's priors."""
        return self.base.priors()

    def feature_map(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N M"]:
        """s phi(x / l) [N, M], with x divided by the root of D or by its norm as in the base kernel."""
        prepared = (unit_norm if self.base.unit else per_dimension)(x) * jnp.exp(-hyper["log_lengthscale"])
        frequency_key, phase_key = jax.random.split(jax.random.key(self.seed))
        frequencies = SPECTRA[type(self.base)](frequency_key, (x.shape[1], self.features), x.dtype)
        phases = jax.random.uniform(phase_key, (self.features,), x.dtype, maxval=2 * math.pi)
        scale = jnp.exp(0.5 * hyper["log_scale"]) * math.sqrt(2 / self.features)
        return scale * jnp.cos(inner_products(prepared, frequencies.T) + phases)

    def root(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N M"]:
        """S with K = S S^T (G8): the features."""
        return self.feature_map(hyper, x)

    def gram(self, hyper: Hyper, x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
        """K [N, M] of the features."""
        return inner_products(self.feature_map(hyper, x), self.feature_map(hyper, z))

    def diagonal(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """|phi|^2 [N], which is s2 on average only."""
        return (self.feature_map(hyper, x) ** 2).sum(axis=-1)

    def view(self, hyper: Hyper, x: Float[Array, "N D"], mean: Float[Array, ""] | float = 0.0) -> View:
        """For `inducing.posterior` and `inducing.titsias_bound`, which are exact here: no variance is left over."""
        features = self.feature_map(hyper, x)
        level = jnp.full(x.shape[0], mean, features.dtype)
        return View(level, features, features, jnp.zeros_like(level))
