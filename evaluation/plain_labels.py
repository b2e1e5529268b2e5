"""Predictions of numbers that know nothing but the labelled points of the task: what every learner should beat.

Their variance is the mean squared error on the labelled points, each left out, with one more error of VAGUE: a single
point tells no error. Letters: N labelled points, Q queries, D numbers of an input.
"""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Images, Learner, Prediction, TrainsOn, Traits, predicted

VAGUE = 0.25  # the largest variance of numbers in [0, 1]


class Points(NamedTuple):
    """The labelled points of a task."""

    x: Float[Array, "N D"]
    y: Float[Array, " N"]


class PlainLabels(Learner):
    """A normal about `guess`; labels are numbers in [0, 1], noise aside."""

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.NOTHING, real_labels=True)

    def __init__(self, inputs: int):
        self.inputs = inputs

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 1, 1, self.inputs

    def embed(self, images: Images) -> Float[Array, "N D"]:
        """The numbers themselves."""
        return images.reshape(len(images), -1)

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Float[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Points, Int[Array, ""]]:
        """The labelled points. Raises NotImplementedError for padded tasks."""
        del key, classes
        if mask is not None:
            raise NotImplementedError(f"{type(self).__name__} takes whole tasks")
        return Points(support, y), jnp.asarray(Code.OK)

    def predict(self, key: Key[Array, ""], state: Points, query: Float[Array, "Q D"]) -> Prediction:
        """Normals of one variance."""
        del key
        count = len(state.y)
        left_out = self.guess(state, state.x, jnp.eye(count, dtype=bool))
        error = jnp.where(count > 1, jnp.sum((state.y - left_out) ** 2), 0.0)
        mean = self.guess(state, query, jnp.zeros((len(query), count), bool))
        return predicted(dist.Normal(mean, jnp.sqrt((error + VAGUE) / (count + 1))))

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """The mean at every query, which may not see the points [Q, N] that are hidden from it."""
        raise NotImplementedError(f"{type(self).__name__} has no guess")


class MeanLabel(PlainLabels):
    """The mean of the labels that are seen."""

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """One number."""
        return jnp.where(hidden, 0.0, state.y).sum(1) / jnp.maximum((~hidden).sum(1), 1)


class NearestLabel(PlainLabels):
    """The label of the nearest point that is seen."""

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """Its label."""
        distance = jnp.sum((query[:, None] - state.x) ** 2, axis=-1)
        return state.y[jnp.argmin(jnp.where(hidden, jnp.inf, distance), axis=1)]
