"""Kernels on regular grids (S1 to S4, docs/sparse.md): products by FFT, Kronecker products, cubic interpolation.

A stationary kernel on a regular grid of G points is a Toeplitz matrix (of Toeplitz blocks, in several dimensions): its
product with a vector is a convolution, O(G log G), and nothing of size G x G is formed. Points off the grid are seen
through the nearest grid points, K ~ W K_grid W^T (SKI, Wilson and Nickisch 2015), W sparse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fewshot.models.gaussian import highest_precision
from fewshot.models.kernels import Hyper, Kernel, Stationary

REACH = 2  # grid points on either side of an input that its value is made of


@partial(jax.tree_util.register_dataclass, data_fields=["start", "step"], meta_fields=["shape"])
@dataclass(frozen=True)
class Grid:
    """The points start + step * (i_1, ..., i_D) with 0 <= i_d < shape_d, the last index fastest; G of them."""

    start: Float[Array, " D"]
    step: Float[Array, " D"]
    shape: tuple[int, ...]

    @classmethod
    def around(cls, x: Float[Array, "N D"], shape: tuple[int, ...]) -> "Grid":
        """A grid with the rows of x inside, and one point more on either side.

        Raises ValueError for fewer than 4 points along an axis, or another number of axes than x has.
        """
        if len(shape) != x.shape[1] or min(shape) < 2 * REACH:
            raise ValueError(f"expected {x.shape[1]} numbers of at least {2 * REACH} grid points, got {shape}")
        low, high = x.min(axis=0), x.max(axis=0)
        cells = jnp.asarray(shape, x.dtype) - 3
        step = jnp.where(high > low, high - low, 1.0) / cells
        return cls(low - step, step, tuple(shape))

    @property
    def points(self) -> Float[Array, "G D"]:
        """All points."""
        axes = [self.start[d] + self.step[d] * jnp.arange(size) for d, size in enumerate(self.shape)]
        return _product_of(axes)


def _product_of(axes: Sequence[Array]) -> Array:
    """All combinations [G, D], the last axis fastest."""
    return jnp.stack([part.ravel() for part in jnp.meshgrid(*axes, indexing="ij")], axis=-1)


def spectrum(kernel: Kernel, hyper: Hyper, grid: Grid, weights: Float[Array, " D"] | float = 1.0) -> Float[Array, "*K"]:
    """Fourier transform of a circulant matrix twice as large along every axis, which has K_grid as a corner (S1).

    weights multiply the inputs before the kernel sees them. Raises ValueError for a kernel of unit vectors.
    """
    if not isinstance(kernel, Stationary) or kernel.unit:
        raise ValueError(f"expected a kernel of differences of inputs, got {kernel!r:.80}")
    lags = [jnp.minimum(jnp.arange(2 * size), 2 * size - jnp.arange(2 * size)) for size in grid.shape]
    differences = _product_of([step * lag for step, lag in zip(grid.step, lags, strict=True)]) * weights
    values = kernel.gram(hyper, differences, jnp.zeros_like(differences[:1]))[:, 0]
    # Real, since the values are even along every axis.
    return jnp.fft.rfftn(values.reshape([2 * size for size in grid.shape])).real


def grid_product(
    transform: Float[Array, "*K"], shape: tuple[int, ...], values: Float[Array, "*B G"]
) -> Float[Array, "*B G"]:
    """K_grid times vectors (S1): pad with zeros, multiply in Fourier space, cut off."""
    axes = tuple(range(-len(shape), 0))
    boxed = values.reshape(*values.shape[:-1], *shape)
    doubled = tuple(2 * size for size in shape)
    found = jnp.fft.irfftn(transform * jnp.fft.rfftn(boxed, doubled, axes), doubled, axes)
    inner = (..., *(slice(size) for size in shape))
    return found[inner].reshape(values.shape)


@highest_precision
def kronecker_product(factors: Sequence[Float[Array, "_ _"]], values: Float[Array, "*B G"]) -> Float[Array, "*B G"]:
    """(A_1 x ... x A_D) times vectors, axis by axis (S2): O(G sum_d G_d), for any factors."""
    shape = tuple(factor.shape[0] for factor in factors)
    boxed = values.reshape(*values.shape[:-1], *shape)

    def along(boxed: Array, numbered: tuple[int, Array]) -> Array:
        axis = numbered[0] - len(shape)
        return jnp.moveaxis(jnp.moveaxis(boxed, axis, -1) @ numbered[1].T, -1, axis)

    return reduce(along, enumerate(factors), boxed).reshape(values.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["indices", "weights"], meta_fields=["size"])
@dataclass(frozen=True)
class Interpolation:
    """W [N, G] with 4^D entries a row: which grid points, and their weights; size is G."""

    indices: Int[Array, "N E"]
    weights: Float[Array, "N E"]
    size: int

    def gather(self, values: Float[Array, "*B G"]) -> Float[Array, "*B N"]:
        """W values."""
        return jnp.sum(self.weights * values[..., self.indices], axis=-1)

    def spread(self, values: Float[Array, "*B N"]) -> Float[Array, "*B G"]:
        """W^T values."""
        zeros = jnp.zeros((*values.shape[:-1], self.size), values.dtype)
        return zeros.at[..., self.indices].add(self.weights * values[..., None])


def interpolation(grid: Grid, x: Float[Array, "N D"]) -> Interpolation:
    """Cubic convolution (S3, Keys 1981): exact at grid points and for quadratics. NaN outside the grid."""
    indices, weights = jnp.zeros((x.shape[0], 1), int), jnp.ones((x.shape[0], 1), x.dtype)
    for axis, size in enumerate(grid.shape):
        near, share = _along_axis((x[:, axis] - grid.start[axis]) / grid.step[axis], size)
        indices = (indices[:, :, None] * size + near[:, None, :]).reshape(x.shape[0], -1)
        weights = (weights[:, :, None] * share[:, None, :]).reshape(x.shape[0], -1)
    return Interpolation(indices, weights, math.prod(grid.shape))


def _along_axis(position: Array, size: int) -> tuple[Array, Array]:
    """Four neighbours [N, 4] of positions in units of the step, and their weights."""
    cell = jnp.clip(jnp.floor(position), 1, size - 3).astype(int)
    near = cell[:, None] + jnp.arange(-1, 3)
    # A row that rounding has put beside the last cell still counts as inside.
    inside = jnp.abs(position - cell - 0.5) <= 0.5 + 64 * size * jnp.finfo(position.dtype).eps
    return near, jnp.where(inside[:, None], cubic(position[:, None] - near), jnp.nan)


def cubic(distance: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """u(s) of (S3): the piecewise cubic of support (-2, 2) whose interpolation has error of order h^3."""
    s = jnp.abs(distance)
    inner = (1.5 * s - 2.5) * s**2 + 1
    outer = ((-0.5 * s + 2.5) * s - 4) * s + 2
    return jnp.where(s <= 1, inner, jnp.where(s < 2, outer, 0.0))
