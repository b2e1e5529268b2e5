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
from fewshot.models.networks.context import FullContext

SHARPNESS = 100.0  # of Chen et al. 2019


class Memory(NamedTuple):
    """Features [N, D] of the labelled images, and which of them are members of each class [N, C]."""

    x: Float[Array, "N D"]
    members: Bool[Array, "N C"]


class Matching(EpisodicLearner):
    """p(k | x) = sum_n a_n [y_n = k] with attention a = softmax_n(100 max(0, cos(f(x), g(x_n)))).

    context: f and g are full context embeddings (`models.networks.context`), else the features of one image each. No
    query depends on another, and the order of the labelled images does not matter. way: classes of a training task.
    """

    sharpness: ClassVar[float] = SHARPNESS

    def __init__(self, backbone: Backbone, *, way: int, context: bool = True, rngs: nnx.Rngs):
        super().__init__(backbone, way)
        self.context = FullContext(backbone.features, rngs=rngs) if context else None

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Memory, Int[Array, ""]]:
        """g of the labelled features."""
        del key
        real = real_points(y, mask)
        x = support if self.context is None else self.context.labelled(support, real)
        return Memory(x, (y[:, None] == jnp.arange(classes)) & real[:, None]), finite_code(x)

    def logits(self, state: Memory, query: Float[Array, "Q D"]) -> Float[Array, "Q C"]:
        """log sum_n [y_n = k] exp(100 max(0, cos(f(x), g(x_n)))), -inf for a class without labelled images."""
        if self.context is not None:
            query = self.context.query(query, state.x, state.members.any(1))
        scores = self.sharpness * jax.nn.relu(inner_products(unit_norm(query), unit_norm(state.x)))
        return jax.nn.logsumexp(jnp.where(state.members, scores[:, :, None], -jnp.inf), axis=1)
