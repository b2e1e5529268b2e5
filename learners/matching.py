"""Matching networks (Vinyals et al. 2016): a query takes the labels of the images that it attends to."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.network import EpisodicLearner, real_points
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import inner_products, unit_norm

SHARPNESS = 100.0  # of Chen et al. 2019


class Memory(NamedTuple):
    """Unit features [N, D] of the labelled images, and which of them are members of each class [N, C]."""

    x: Float[Array, "N D"]
    members: Bool[Array, "N C"]


class Matching(EpisodicLearner):
    """p(k | x) = sum_n a_n [y_n = k] with attention a = softmax_n(100 max(0, cos(x, x_n))).

    Without full context embeddings: the LSTMs that look at a labelled image, or at a query, beside all labelled images
    are left out, so that features stay functions of one image. way: classes of a training task.
    """

    sharpness: ClassVar[float] = SHARPNESS

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
    ) -> tuple[Memory, Int[Array, ""]]:
        """The labelled features."""
        del key
        members = (y[:, None] == jnp.arange(classes)) & real_points(y, mask)[:, None]
        return Memory(unit_norm(support), members), finite_code(support)

    def logits(self, state: Memory, query: Float[Array, "Q D"]) -> Float[Array, "Q C"]:
        """log sum_n [y_n = k] exp(100 max(0, cos(x, x_n))), -inf for a class without labelled images."""
        scores = self.sharpness * jax.nn.relu(inner_products(unit_norm(query), state.x))
        return jax.nn.logsumexp(jnp.where(state.members, scores[:, :, None], -jnp.inf), axis=1)
