"""The latent Gaussian process: a base kernel and its hyper-parameters. Inputs in, Gaussian prior out."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.kernels import Hyper, Kernel, inner_products, squared_distances


@partial(jax.tree_util.register_dataclass, data_fields=["hyper"], meta_fields=["kernel"])
@dataclass(frozen=True)
class LatentProcess:
    """f_c ~ GP(a, K), independent for every class, with one kernel and one constant mean for all of them.

    A pytree: the kernel is static, the hyper-parameters (unconstrained scalars) are its leaves. hyper["mean"] is the
    constant a, 0 where there is none.
    """

    kernel: Kernel
    hyper: Hyper

    def prior(self, x: Float[Array, "N D"], classes: int) -> GaussianPrior:
        """Prior N(a, K) of `classes` latents at inputs x [N, D]; K [N, N] is shared by the classes."""
        mean = jnp.full((classes, x.shape[0]), self.hyper.get("mean", 0.0), x.dtype)
        return GaussianPrior(mean, self.kernel.gram(self.hyper, x, x), self.kernel.root(self.hyper, x))

    def query(self, x: Float[Array, "N D"], new: Float[Array, "Q D"], classes: int) -> Query:
        """What (G7) needs at new inputs [Q, D]: mean a_* [C, Q], k_* [Q, N] to the labelled ones x [N, D], k_** [Q]."""
        mean = jnp.full((classes, new.shape[0]), self.hyper.get("mean", 0.0), new.dtype)
        root = self.kernel.root(self.hyper, new)
        return Query(mean, self.kernel.gram(self.hyper, new, x), self.kernel.diagonal(self.hyper, new), root)

    def squared_distances(
        self, x: Float[Array, "N D"], weights: Float[Array, "N C"], new: Float[Array, "Q D"]
    ) -> Float[Array, "Q C"]:
        """|phi(x_q) - sum_n w_nc phi(x_n)|^2 in the feature space of the kernel, k(x, z) = phi(x).phi(z), from 0 on.

        Columns of the weights sum to 1 or to 0.
        """
        features = self.kernel.root(self.hyper, x)
        if features is not None:
            found = self.kernel.root(self.hyper, new)
            assert found is not None
            return squared_distances(found, inner_products(weights.T, features.T))
        own = jnp.sum(weights * inner_products(self.kernel.gram(self.hyper, x, x), weights.T), axis=0)
        cross = inner_products(self.kernel.gram(self.hyper, new, x), weights.T)
        return jnp.maximum(self.kernel.diagonal(self.hyper, new)[:, None] - 2 * cross + own, 0.0)
