"""Regression with many rows of one or two inputs through a grid (S1 to S6, docs/sparse.md), as a method of many points.

The kernel is learned from some rows by their exact evidence; then the grid is laid so that a length-scale has STEPS of
its steps, and all rows are conditioned on by conjugate gradients. Slopes of the estimated evidence would be noise that
a line search cannot use, and some thousand rows tell a few hyper-parameters.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fewshot.inference import structured
from fewshot.inference.many_points import Exact, Posterior
from fewshot.inference.structured import GridProcess
from fewshot.models.grids import Grid
from fewshot.models.inducing import Parameters
from fewshot.models.kernels import Stationary
from fewshot.models.regression import Prediction

STEPS = 4  # of the grid in a length-scale; interpolation has an error of order step^3 (S3)
FEWEST, MOST = 16, {1: 2048, 2: 128}  # points along an axis, by the number of axes
MARGIN = 0.1  # of the range of the rows, by which the grid is larger on either side
PROBES = 8  # random signs of the log determinant
TOGETHER = 16  # queries whose linear systems are solved at once: vectors of as many numbers as there are rows


class GridRows(NamedTuple):
    """The grid (its first point and its step), the rows, and what conjugate gradients found."""

    start: Float[Array, " D"]
    step: Float[Array, " D"]
    x: Float[Array, "N D"]
    solved: structured.State


@dataclass(frozen=True)
class OnGrid:
    """Through a grid of so many points along every axis; `laid` says how many, once the kernel is known."""

    kernel: Stationary
    shape: tuple[int, ...] = ()

    @property
    def process(self) -> GridProcess:
        """The process behind the grid."""
        return GridProcess(self.kernel, tolerance=1e-5)

    def initial(self, x: Float[Array, "N D"]) -> Parameters:
        """As for exact regression."""
        return Exact(self.kernel).initial(x)

    def bound(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Float[Array, ""]:
        """log p(y) of the rows that it learns from, without a grid."""
        return Exact(self.kernel).bound(parameters, x, y)

    def laid(self, parameters: Parameters, x: Float[Array, "N D"]) -> "OnGrid":
        """The method with a grid for these length-scales and rows."""
        width = x.shape[1]
        length = np.sqrt(width) * np.exp(np.asarray(parameters.hyper["log_lengthscale"] - parameters.log_weights))
        cells = STEPS * (1 + 2 * MARGIN) * np.ptp(np.asarray(x), axis=0) / length
        return replace(self, shape=tuple(int(n) for n in np.clip(np.ceil(cells) + 3, FEWEST, MOST[width])))

    def condition(self, parameters: Parameters, x: Float[Array, "N D"], y: Float[Array, " N"]) -> Posterior:
        """The posterior by one linear system; log p(y) by stochastic Lanczos quadrature."""
        low, high = x.min(axis=0), x.max(axis=0)
        reach = MARGIN * (high - low)
        grid = Grid.around(jnp.stack([low - reach, high + reach]), self.shape)
        probes = structured.random_probes(jax.random.key(0), PROBES, len(x), x.dtype)
        value = self.process.log_evidence(parameters, grid, x, y, probes)
        return Posterior(GridRows(grid.start, grid.step, x, self.process.condition(parameters, grid, x, y)), value)

    def predict(self, parameters: Parameters, state: GridRows, x: Float[Array, "Q D"]) -> Prediction:
        """Mean by interpolation, variance by one linear system a query; NaN beyond the grid."""
        grid = Grid(state.start, state.step, self.shape)

        def one(new: Array) -> Array:
            found = self.process.predict(parameters, grid, state.solved, state.x, new[None])
            return found.variance[0]

        return Prediction(self.process.mean(grid, state.solved, x), jax.lax.map(one, x, batch_size=TOGETHER))

    def check_inside(self, state: GridRows, x: Float[np.ndarray, "Q D"]) -> None:
        """Raises ValueError for inputs beyond the grid."""
        low = np.asarray(state.start + state.step)
        high = low + np.asarray(state.step) * (np.array(self.shape) - 3)
        outside = (x < low) | (x > high)
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"expected inputs within {MARGIN:.0%} of the range of those fitted, got row {row}, column {column} "
                "beyond; use method='titsias'"
            )
