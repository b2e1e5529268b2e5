"""Relation networks (Sung et al. 2018): a learned network says how alike a query and the mean of a class are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.network import EpisodicLearner, LabelledTasks, class_means, real_classes, scaled
from fewshot.models.backbones import Backbone, TaskBatchNorm
from fewshot.models.convolution import conv3x3, pool_first

HIDDEN = 8  # units of the first dense layer


class MeanMaps(NamedTuple):
    """Mean feature maps [C, h, w, D] of every class, and which classes are real."""

    means: Float[Array, "C h w D"]
    present: Bool[Array, " C"]


class RelationBlock(nnx.Module):
    """3x3 convolution, batch norm, ReLU, 2x2 max-pool where both sides have two pixels."""

    def __init__(self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs):
        draw = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.kernel = nnx.Param(draw(rngs.params(), (3, 3, channels_in, channels_out)))
        self.norm = TaskBatchNorm(channels_out)

    def __call__(self, x: Float[Array, "T P h w Ch"], train: bool) -> Float[Array, "T P hh ww D"]:
        """Maps of T tasks' pairs, smaller."""
        z = conv3x3(x.reshape(-1, *x.shape[2:]), self.kernel[...])
        z = jax.nn.relu(self.norm(z.reshape(*x.shape[:2], *z.shape[1:]), train))
        return pool_first(z) if min(z.shape[2:4]) > 1 else z


class Comparison(nnx.Module):
    """Two convolution blocks and two dense layers, from a pair of maps [h, w, 2 D] to the logit of being alike."""

    def __init__(self, map_shape: tuple[int, int, int], *, rngs: nnx.Rngs):
        height, width, channels = map_shape
        self.first = RelationBlock(2 * channels, channels, rngs=rngs)
        self.second = RelationBlock(channels, channels, rngs=rngs)
        for _ in range(2):
            height, width = (height // 2, width // 2) if min(height, width) > 1 else (height, width)
        dtype = jnp.result_type(float)
        self.hidden = nnx.Linear(height * width * channels, HIDDEN, param_dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(HIDDEN, 1, param_dtype=dtype, rngs=rngs)

    def __call__(
        self, means: Float[Array, "T C h w D"], query: Float[Array, "T Q h w D"], train: bool
    ) -> Float[Array, "T Q C"]:
        """Logits of every pair of a query and a class of the same task."""
        shape = (*query.shape[:2], *means.shape[1:])  # [T, Q, C, h, w, D]
        pairs = jnp.concatenate(
            [jnp.broadcast_to(means[:, None], shape), jnp.broadcast_to(query[:, :, None], shape)], axis=-1
        )
        maps = self.second(self.first(pairs.reshape(shape[0], -1, *pairs.shape[3:]), train), train)
        hidden = jax.nn.relu(self.hidden(maps.reshape(*maps.shape[:2], -1)))
        return self.output(hidden).reshape(shape[:3])


class Relation(EpisodicLearner):
    """r_k(x) = sigmoid(comparison of the maps of x with the mean maps of class k); p(k | x) = r_k / sum_j r_j.

    It learns by the squared error of r against one-hot labels. Features without maps are maps of one pixel. way:
    classes of a training task.
    """

    def __init__(self, backbone: Backbone, *, way: int, rngs: nnx.Rngs):
        super().__init__(backbone, way)
        blank = jnp.zeros((1, 1, *backbone.image_shape))
        self.comparison = Comparison(jax.eval_shape(lambda x: self.features(x, False), blank).shape[2:], rngs=rngs)

    def features(self, images: Shaped[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N h w D"]:
        """The backbone's last maps [T, N, h, w, D], or its features as maps of one pixel."""
        maps = getattr(self.backbone, "maps", None)
        if maps is not None:
            return maps(scaled(images), train)
        return self.backbone(scaled(images), train)[:, :, None, None]

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N h w D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[MeanMaps, Int[Array, ""]]:
        """The mean maps of the classes."""
        del key
        means = class_means(support, y, classes, mask)
        return MeanMaps(means, real_classes(classes, mask)), finite_code(means)

    def logits(self, state: MeanMaps, query: Float[Array, "Q h w D"]) -> Float[Array, "Q C"]:
        """log r_k(x), in evaluation mode."""
        found = self.comparison(state.means[None], query[None], train=False)[0]
        return jnp.where(state.present, jax.nn.log_sigmoid(found), -jnp.inf)

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """-sum_qk (r_k(x_q) - [y_q = k])^2, the mean over the tasks; batch statistics are those of a task."""
        del keys, for_each  # batch norms of the comparison take all tasks at once
        errors = (jax.nn.sigmoid(self._compared(tasks)) - jax.nn.one_hot(tasks.y_query, self.way)) ** 2
        return Outcome(-jnp.mean(jnp.sum(errors, axis=(1, 2))), tasks.y_query.shape[1], {})

    def observe(self, tasks: LabelledTasks) -> None:
        """One pass of both networks in training mode."""
        self._compared(tasks)

    def _compared(self, tasks: LabelledTasks) -> Float[Array, "T Q C"]:
        """Logits of all pairs, in training mode."""
        features = self.features(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)
        shots = tasks.y_support.shape[1]
        means = jax.vmap(lambda x, y: class_means(x, y, self.way))(features[:, :shots], tasks.y_support)
        return self.comparison(means, features[:, shots:], train=True)
