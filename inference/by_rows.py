"""Exact regression with more rows than one device can factorise: A = K + s2 I shared by rows, conjugate gradients.

    (P15)  every device multiplies its own rows of K by a vector that all hold; the parts are then gathered
    (P16)  P = phi phi^T + s2 I,  P^-1 v = (v - phi B^-1 phi^T v / s2) / s2,  B = I + phi^T phi / s2

P, of the features phi of M inducing points (P3), is near A where the spectrum of K falls off: steps are few then. The
kernel is learned from some rows by their exact evidence, as `on_grid` does. Letters: N rows, M of the preconditioner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from fewshot.inference.many_points import Exact, Posterior, noise_of
from fewshot.inference.structured import Product, log_determinant, random_probes, solve
from fewshot.models.gaussian import highest_precision
from fewshot.models.inducing import InducingProcess, Parameters, weights_of
from fewshot.models.kernels import Kernel, inner_products
from fewshot.models.regression import Prediction

ROWS = "rows"  # the mesh axis
PART, WHOLE = PartitionSpec(ROWS), PartitionSpec()
BLOCK = 512  # rows of K that exist at once where they are not held
HELD = 8e9  # bytes of K that a device holds at most
PROBES, NODES = 8, 30  # random signs of the log determinant, and steps of Lanczos for each
INDUCING_NOISE = 1e-6


class Solved(NamedTuple):
    """The rows, and alpha = A^-1 y."""

    x: Float[Array, "N D"]
    alpha: Float[Array, " N"]


@dataclass(frozen=True)
class ByRows:
    """The process itself; no device forms K.

    preconditioned: M, 0 for plain conjugate gradients. devices: how many share the rows, None for all that JAX sees.
    held: whether each device keeps its rows of K or computes them again for every product; None: where they fit.
    """

    kernel: Kernel
    preconditioned: int = 256
    tolerance: float = 1e-6
    steps: int = 1000
    devices: int | None = None
    held: bool | None = None

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """As for exact regression."""
        return Exact(self.kernel).initial(x)

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """log p(y) of the rows that it learns from, by a factor."""
        return Exact(self.kernel).bound(parameters, x, y)

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """The posterior by one linear system; log p(y) by stochastic Lanczos quadrature (S5, S6)."""
        product = self.noisy(parameters, x)
        alpha = self.solved(parameters, x, product, y[None])[0]
        probes = random_probes(jax.random.key(0), PROBES, len(x), x.dtype)
        determinant = log_determinant(product, probes, NODES, PROBES)
        return Posterior(Solved(x, alpha), -0.5 * (jnp.sum(y * alpha) + determinant + len(y) * jnp.log(2 * jnp.pi)))

    def predict(self, parameters: Parameters, state: Solved, x: Float[Array, "Q D"]) -> Prediction:
        """(G7): the mean k_*.alpha, the variance by one linear system a query, of which all are solved together."""
        weighted = parameters.weighted(x)
        cross = self.kernel.gram(parameters.hyper, weighted, parameters.weighted(state.x))
        solved = self.solved(parameters, state.x, self.noisy(parameters, state.x), cross)
        known = jnp.sum(cross * solved, axis=-1)
        mean = inner_products(cross, state.alpha[None])[:, 0]
        return Prediction(mean, jnp.maximum(self.kernel.diagonal(parameters.hyper, weighted) - known, 0.0))

    def solved(
        self, parameters: Parameters, x: Float[Array, "N D"], product: Product, right: Float[Array, "B N"]
    ) -> Float[Array, "B N"]:
        """A^-1 of every row of `right`."""
        near = self.preconditioner(parameters, x) if self.preconditioned else None
        return solve(product, right, self.tolerance, self.steps, near)

    def noisy(self, parameters: Parameters, x: Float[Array, "N D"]) -> Product:
        """v -> A v, with the rows of K shared (P15). The last device fills its part up with rows that are cut off."""
        mesh = Mesh(np.array(jax.devices()[: self.devices]), (ROWS,))
        block = min(BLOCK, -(-len(x) // mesh.size))
        blocks = -(-len(x) // (block * mesh.size))
        weighted = parameters.weighted(x)
        rows = jnp.pad(weighted, ((0, block * blocks * mesh.size - len(x)), (0, 0)), mode="edge")
        held = block * blocks * len(x) * x.dtype.itemsize <= HELD if self.held is None else self.held
        spread = partial(jax.shard_map, mesh=mesh, check_vma=False)
        smooth = (self._held if held else partial(self._computed, block))(spread, parameters, rows, weighted)
        return lambda vector: smooth(vector) + noise_of(parameters) * vector

    def _held(self, spread: Callable[..., Callable], parameters: Parameters, rows: Array, every: Array) -> Product:
        """Every device has its rows of K."""

        def gram(given: Parameters, mine: Array, every: Array) -> Array:
            return self.kernel.gram(given.hyper, mine, every)

        def product(mine: Array, vector: Array) -> Array:
            return _gathered(inner_products(mine, vector[None])[:, 0], len(vector))

        own = spread(gram, in_specs=(WHOLE, PART, WHOLE), out_specs=PART)(parameters, rows, every)
        return partial(spread(product, in_specs=(PART, WHOLE), out_specs=WHOLE), own)

    def _computed(
        self, block: int, spread: Callable[..., Callable], parameters: Parameters, rows: Array, every: Array
    ) -> Product:
        """Every device computes a block of its rows of K after the other, for every product again."""

        def product(given: Parameters, mine: Array, every: Array, vector: Array) -> Array:
            def some(part: Array) -> Array:
                return inner_products(self.kernel.gram(given.hyper, part, every), vector[None])[:, 0]

            parts = jax.lax.map(some, mine.reshape(-1, block, mine.shape[1]))
            return _gathered(parts.reshape(-1), len(vector))

        shared = spread(product, in_specs=(WHOLE, PART, WHOLE, WHOLE), out_specs=WHOLE)
        return partial(shared, parameters, rows, every)

    @highest_precision
    def preconditioner(self, parameters: Parameters, x: Float[Array, "N D"]) -> Product:
        """v -> P^-1 v (P16), of the first rows, which are in random order."""
        process = InducingProcess(self.kernel, INDUCING_NOISE)
        chosen = parameters._replace(inputs=x[: self.preconditioned])
        features = process.view(chosen, process.whitening(chosen), x).features
        noise = noise_of(parameters)
        inverse = weights_of(jnp.zeros(features.shape[1], x.dtype), features.T @ features / noise).inverse

        @highest_precision
        def near(vector: Array) -> Array:
            told = inverse.T @ (inverse @ (features.T @ vector))
            return (vector - features @ told / noise) / noise

        return near


def _gathered(mine: Array, count: int) -> Array:
    """The parts of all devices, without the rows that fill the last one up."""
    return jax.lax.all_gather(mine, ROWS, tiled=True)[:count]
