"""Few-shot regression: every task is a function of its own, seen at a few inputs with real labels.

A task is a pure function of a random key. Inputs are vectors [N, D], held as images of one pixel [N, 1, 1, D], which is
how learners read the features of others. Letters: S labelled points (shot), Q queries, D numbers of an input.
"""

import enum
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from fewshot.tasks import glyphs, omniglot, uci
from fewshot.tasks.episodes import Splits
from fewshot.tasks.files import DataError


class RealTask(NamedTuple):
    """One task with real labels; a batch of tasks is the same tree with a leading axis."""

    x_support: Float[Array, "*T S 1 1 D"]
    y_support: Float[Array, "*T S"]
    x_query: Float[Array, "*T Q 1 1 D"]
    y_query: Float[Array, "*T Q"]


@runtime_checkable
class Curves(Protocol):
    """Where the tasks of one split come from: a pytree."""

    @property
    def inputs(self) -> int:
        """D."""
        ...

    @property
    def largest(self) -> int | None:
        """The largest S + Q of a task, None where there is none."""
        ...

    def sample(self, key: PRNGKeyArray, shot: int, query: int) -> RealTask:
        """A task with `shot` labelled points and `query` queries."""
        ...


class CurveSplits(NamedTuple):
    """A data set of tasks with real labels. Splits differ in their keys, or in their rows."""

    name: str
    train: Curves
    validation: Curves
    test: Curves

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(1, 1, D): inputs as images of one pixel."""
        return 1, 1, self.train.inputs


@jax.tree_util.register_static
@dataclass(frozen=True)
class Sinusoids:
    """y = a sin(x - p) + noise: a in [0.1, 5], p in [0, pi], x in [-5, 5], all uniform (Finn et al. 2017).

    noise: its standard deviation. Finn et al. have none; a density of the labels needs some.
    """

    noise: float = 0.1

    inputs: ClassVar[int] = 1
    largest: ClassVar[int | None] = None

    def sample(self, key: PRNGKeyArray, shot: int, query: int) -> RealTask:
        """A task; inputs of labelled points and queries are drawn alike."""
        curve_key, x_key, noise_key = jax.random.split(key, 3)
        amplitude, phase = jax.random.uniform(
            curve_key, (2,), minval=jnp.array([0.1, 0.0]), maxval=jnp.array([5.0, jnp.pi])
        )
        x = jax.random.uniform(x_key, (shot + query,), minval=-5.0, maxval=5.0)
        y = amplitude * jnp.sin(x - phase) + self.noise * jax.random.normal(noise_key, x.shape)
        return _task(x[:, None], y, shot)


class Covariance(enum.Enum):
    """Covariance functions of variance 1 of a number x, as functions of the distance."""

    RBF = "rbf"  # exp(-d^2 / 2 l^2)
    MATERN52 = "matern52"  # (1 + a + a^2 / 3) exp(-a), a = 5^1/2 d / l
    PERIODIC = "periodic"  # exp(-2 sin(pi d)^2), period 1

    def matrix(self, x: Float[Array, " N"], z: Float[Array, " M"]) -> Float[Array, "N M"]:
        """K [N, M]."""
        distance = jnp.abs(x[:, None] - z)
        if self is Covariance.RBF:
            return jnp.exp(-0.5 * (distance / LENGTHSCALE) ** 2)
        if self is Covariance.MATERN52:
            a = jnp.sqrt(5.0) * distance / LENGTHSCALE
            return (1 + a + a * a / 3) * jnp.exp(-a)
        return jnp.exp(-2 * jnp.sin(jnp.pi * distance) ** 2)


LENGTHSCALE = 0.5


@jax.tree_util.register_static
@dataclass(frozen=True)
class ProcessCurves:
    """Draws of Gaussian processes of mean 0 and variance 1, with noise: x uniform in [-2, 2].

    kinds: the covariance functions, of which every task has one, all equally probable. noise: a standard deviation.
    """

    kinds: tuple[Covariance, ...] = tuple(Covariance)
    noise: float = 0.1

    inputs: ClassVar[int] = 1
    largest: ClassVar[int | None] = None

    def sample(self, key: PRNGKeyArray, shot: int, query: int) -> RealTask:
        """A task: y ~ N(0, K + noise^2 I) at inputs of labelled points and queries together."""
        kind_key, x_key, y_key = jax.random.split(key, 3)
        kind = jax.random.randint(kind_key, (), 0, len(self.kinds))
        x = jax.random.uniform(x_key, (shot + query,), minval=-2.0, maxval=2.0)
        covariance = jax.lax.switch(kind, [partial(self.covariance, one) for one in self.kinds], x)
        with jax.default_matmul_precision("highest"):
            y = jnp.linalg.cholesky(covariance) @ jax.random.normal(y_key, x.shape)
        return _task(x[:, None], y, shot)

    def covariance(self, kind: Covariance, x: Float[Array, " N"]) -> Float[Array, "N N"]:
        """Of the labels at inputs x."""
        return kind.matrix(x, x) + self.noise**2 * jnp.eye(len(x))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Tasks from rows of one table: labelled points and queries drawn at random, without replacement.

    x, y: rows of the labelled points; x_query, y_query: rows of the queries, None for the same ones.
    """

    x: Float[Array, "N D"]
    y: Float[Array, " N"]
    x_query: Float[Array, "M D"] | None = None
    y_query: Float[Array, " M"] | None = None

    @property
    def inputs(self) -> int:
        """D."""
        return self.x.shape[1]

    @property
    def largest(self) -> int | None:
        """All rows; where queries have rows of their own, the smaller number of both."""
        return len(self.x) if self.x_query is None else min(len(self.x), len(self.x_query))

    def sample(self, key: PRNGKeyArray, shot: int, query: int) -> RealTask:
        """A task."""
        support_key, query_key = jax.random.split(key)
        if self.x_query is None or self.y_query is None:
            chosen = jax.random.permutation(support_key, len(self.x))[: shot + query]
            return _task(self.x[chosen], self.y[chosen], shot)
        labelled = jax.random.permutation(support_key, len(self.x))[:shot]
        asked = jax.random.permutation(query_key, len(self.x_query))[:query]
        x = jnp.concatenate([self.x[labelled], self.x_query[asked]])
        return _task(x, jnp.concatenate([self.y[labelled], self.y_query[asked]]), shot)


class Pixels(NamedTuple):
    """Image completion: x is where a pixel is, y how bright. A task is some pixels of a random image.

    Rows from top to bottom and columns from left to right are -1 to 1. noise: the standard deviation of what is added
    to brightness in [0, 1], most of which is exactly 0: without noise the density of such labels has no bound.
    """

    images: UInt8[Array, "I H W"]
    noise: float = 0.1

    @property
    def inputs(self) -> int:
        """Row and column."""
        return 2

    @property
    def largest(self) -> int | None:
        """All pixels."""
        return self.images.shape[1] * self.images.shape[2]

    @property
    def places(self) -> Float[Array, "P 2"]:
        """(row, column) of every pixel, row by row."""
        rows, columns = (jnp.linspace(-1.0, 1.0, size) for size in self.images.shape[1:])
        return jnp.stack(jnp.meshgrid(rows, columns, indexing="ij"), axis=-1).reshape(-1, 2)

    def sample(self, key: PRNGKeyArray, shot: int, query: int) -> RealTask:
        """A task; no pixel is both labelled and asked for."""
        image_key, noise_key, pixel_key = jax.random.split(key, 3)
        image = self.images[jax.random.randint(image_key, (), 0, len(self.images))].ravel() / 255
        y = image + self.noise * jax.random.normal(noise_key, image.shape)
        return Rows(self.places, y).sample(pixel_key, shot, query)


def _task(x: Float[Array, "N D"], y: Float[Array, " N"], shot: int) -> RealTask:
    x = x[:, None, None]
    return RealTask(x[:shot], y[:shot], x[shot:], y[shot:])


def check_curves(curves: Curves, shot: int, query: int) -> None:
    """Raises DataError for tasks of no points, or of more points than there are."""
    if shot < 1 or query < 1:
        raise DataError(f"expected shot >= 1 and query >= 1, got {shot} and {query}; try --shot 5")
    if curves.largest is not None and shot + query > curves.largest:
        raise DataError(
            f"expected at most {curves.largest} points in a task, got shot {shot} + query {query}; try fewer"
        )


def _uci(name: str, data_root: str | os.PathLike | None) -> CurveSplits:
    """Fold 0 of a table, standardised: its test rows, and of the others a tenth for validation."""
    fold = uci.load_fold(name, 0, data_root)
    x, y = jnp.asarray(fold.x), jnp.asarray(fold.y)
    order = jax.random.permutation(jax.random.key(0), len(x))
    held, rest = order[: len(x) // 10], order[len(x) // 10 :]
    train = Rows(x[rest], y[rest])
    validation = Rows(x[rest], y[rest], x[held], y[held])
    test = Rows(x, y, jnp.asarray(fold.x_test), jnp.asarray(fold.y_test))
    return CurveSplits(f"uci:{name}", train, validation, test)


def _generated(name: str, curves: Curves) -> CurveSplits:
    return CurveSplits(name, curves, curves, curves)


def _completion(name: str, classes: Splits) -> CurveSplits:
    """The images of the three splits, which have no class in common. Turned images are left out."""
    parts = (Pixels(part.images[..., 0]) for part in (classes.train, classes.validation, classes.test))
    return CurveSplits(name, *parts)


GENERATED: dict[str, Callable[[], Curves]] = {
    "sinusoids": Sinusoids,
    "gp-curves": ProcessCurves,
    **{f"gp-curves:{kind.value}": partial(ProcessCurves, (kind,)) for kind in Covariance},
}
COMPLETIONS: dict[str, Callable[[str | os.PathLike | None], Splits]] = {
    "glyph-completion": glyphs.load,
    "omniglot-completion": omniglot.load,
}
CURVES = (*GENERATED, *COMPLETIONS, *(f"uci:{name}" for name in uci.SOURCES))


def has_real_labels(name: str) -> bool:
    """Whether a name is that of a data set of curves, known or not."""
    return name in GENERATED or name in COMPLETIONS or name.partition(":")[0] in ("uci", "gp-curves")


def load_curves(name: str, data_root: str | os.PathLike | None = None) -> CurveSplits:
    """The data set of a name in CURVES. Raises DataError."""
    if name in GENERATED:
        return _generated(name, GENERATED[name]())
    if name in COMPLETIONS:
        return _completion(name, COMPLETIONS[name](data_root))
    kind, _, table = name.partition(":")
    if kind == "uci" and table in uci.SOURCES:
        return _uci(table, data_root)
    raise DataError(f"expected a data set with real labels, got {name!r}; try one of {', '.join(CURVES)}")
