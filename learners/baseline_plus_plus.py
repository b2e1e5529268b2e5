"""Baseline++ (Chen et al. 2019): feature transfer whose heads, in training and at test, see cosines alone."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from fewshot.learners.feature_transfer import FeatureTransfer, Head
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import inner_products, unit_norm

MANY_CLASSES, OF_MANY, OF_FEW = 200, 10.0, 2.0  # training classes, and the scales of the cosines


class BaselinePlusPlus(FeatureTransfer):
    """softmax(scale norm_k cos(x, w_k)) with a learned norm for each class; a new head starts at random directions.

    scale: of the cosines, 0 for 10 above 200 training classes and 2 otherwise. Others as in `FeatureTransfer`.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        rngs: nnx.Rngs,
        scale: float = 0.0,
        rate: float = 0.01,
        decay: float = 1e-3,
        batch: int = 4,
        passes: int = 100,
    ):
        if not scale >= 0:
            raise ValueError(f"expected a positive scale of the cosines, or 0 for the usual one, got {scale}")
        super().__init__(backbone, classes=classes, rngs=rngs, rate=rate, decay=decay, batch=batch, passes=passes)
        self.scale = scale or (OF_MANY if classes > MANY_CLASSES else OF_FEW)

    def start(self, key: Key[Array, ""], classes: int) -> Head:
        """Normal directions, a function of key and class alone, and norms of 1."""
        size = self.backbone.features
        directions = jax.vmap(lambda k: jax.random.normal(jax.random.fold_in(key, k), (size,)))(jnp.arange(classes))
        return {"directions": directions / jnp.sqrt(size), "norms": jnp.ones(classes)}

    def logits(self, head: Head, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """scale norm_k cos(x, w_k)."""
        return self.scale * head["norms"] * inner_products(unit_norm(x), unit_norm(head["directions"]))
