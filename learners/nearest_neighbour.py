"""The nearest neighbour: every query gets the label of the labelled input nearest to it, with probability 1."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Images, Learner, Prediction, TrainsOn, Traits, categorical
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import squared_distances


class Neighbours(NamedTuple):
    """Labelled inputs [N, D], their labels as rows of a one-hot matrix [N, C], and which of them are real."""

    x: Float[Array, "N D"]
    labels: Float[Array, "N C"]
    real: Bool[Array, " N"]


class NearestNeighbour(Learner):
    """Euclidean nearest neighbour on the features of a network that is not trained; with `Identity`, on the pixels."""

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.NOTHING)

    def __init__(self, backbone: Backbone, *, rngs: nnx.Rngs | None = None):
        del rngs  # nothing is drawn
        self.backbone = backbone

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.backbone.image_shape

    def embed(self, images: Images) -> Float[Array, "N D"]:
        """Features [N, D] of images [N, H, W, Ch]; bytes are not scaled, which changes no order of distances."""
        return self.backbone(images[None].astype(jnp.result_type(float)), train=False)[0]

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Neighbours, Int[Array, ""]]:
        """The labelled inputs."""
        del key
        real = jnp.ones(y.shape, bool) if mask is None else mask.points
        return Neighbours(support, jax.nn.one_hot(y, classes), real), jnp.asarray(Code.OK)

    def predict(self, key: Key[Array, ""], state: Neighbours, query: Float[Array, "Q D"]) -> Prediction:
        """One-hot rows [Q, C]."""
        del key
        distances = squared_distances(query, state.x)
        return categorical(state.labels[jnp.argmin(jnp.where(state.real, distances, jnp.inf), axis=1)])
