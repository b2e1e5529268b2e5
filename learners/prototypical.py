"""Prototypical networks (Snell et al. 2017): the class of a query is that of the nearest mean of labelled features."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.network import EpisodicLearner, class_means, real_classes
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import squared_distances


class Prototypes(NamedTuple):
    """Means [C, D] of the labelled features of every class, and which classes are real."""

    means: Float[Array, "C D"]
    present: Bool[Array, " C"]


class Prototypical(EpisodicLearner):
    """p(k | x) proportional to exp(-|x - mu_k|^2), mu_k the mean of the labelled features of class k.

    The same as a linear classifier with weights 2 mu_k and bias -|mu_k|^2. way: classes of a training task.
    """

    def __init__(self, backbone: Backbone, *, way: int, rngs: nnx.Rngs | None = None):
        del rngs  # nothing is drawn
        super().__init__(backbone, way)

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Prototypes, Int[Array, ""]]:
        """The means of the classes."""
        del key
        means = class_means(support, y, classes, mask)
        return Prototypes(means, real_classes(classes, mask)), finite_code(means)

    def logits(self, state: Prototypes, query: Float[Array, "Q D"]) -> Float[Array, "Q C"]:
        """-|x - mu_k|^2."""
        return jnp.where(state.present, -squared_distances(query, state.means), -jnp.inf)
