"""The nearest class mean by cosine, on features that are not trained: the simplest head of a frozen encoder."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.base import Prediction, TrainsOn, Traits, categorical
from fewshot.learners.network import NetworkLearner, class_means, real_classes
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import inner_products, unit_norm


class Directions(NamedTuple):
    """Unit vectors [C, D] towards the mean of every class, and which classes are real."""

    means: Float[Array, "C D"]
    present: Bool[Array, " C"]


class NearestMean(NetworkLearner):
    """p(k | x) proportional to exp(scale cos(x, mu_k)), mu_k the mean of the labelled unit features of class k."""

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.NOTHING)

    def __init__(self, backbone: Backbone, *, rngs: nnx.Rngs | None = None, scale: float = 20.0):
        del rngs  # nothing is drawn
        if not scale > 0:
            raise ValueError(f"expected a positive scale of the cosines, got {scale}")
        super().__init__(backbone)
        self.scale = scale

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Directions, Int[Array, ""]]:
        """The directions of the classes."""
        del key
        means = unit_norm(class_means(unit_norm(support), y, classes, mask))
        return Directions(means, real_classes(classes, mask)), finite_code(means)

    def predict(self, key: Key[Array, ""], state: Directions, query: Float[Array, "Q D"]) -> Prediction:
        """Probabilities [Q, C]."""
        del key
        logits = self.scale * inner_products(unit_norm(query), state.means)
        return categorical(jax.nn.softmax(jnp.where(state.present, logits, -jnp.inf)))
