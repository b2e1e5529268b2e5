"""Predictions of numbers made at query time from the labelled points alone: nothing is embedded or learned."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Images, Learner, TrainsOn, Traits


class Points(NamedTuple):
    """The labelled points of a task."""

    x: Float[Array, "N D"]
    y: Float[Array, " N"]


class FromPoints(Learner):
    """A learner of real labels whose state is the labelled points. inputs: numbers of an input."""

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.NOTHING, real_labels=True)

    def __init__(self, inputs: int):
        self.inputs = inputs

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """One row of numbers."""
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
