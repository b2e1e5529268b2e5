"""What learners on the features of a network share: images in [0, 1], statistics of each task, log p of its queries."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fewshot.inference.inner.base import Mask
from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.base import Images, Inputs, Learner, Prediction, Queries, categorical
from fewshot.models.backbones import Backbone


@runtime_checkable
class LabelledTasks(Protocol):
    """What is needed of sampled tasks: images [T, N, H, W, Ch] and labels [T, N], support and query."""

    x_support: Array
    y_support: Array
    x_query: Array
    y_query: Array


class NetworkLearner(Learner):
    """A learner on the features of a backbone; the batch statistics of training are those of one task."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.backbone.image_shape

    def features(self, images: Shaped[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N *rest"]:
        """Features of images [T, N, H, W, Ch], bytes (scaled by 1/255) or numbers in [0, 1]."""
        return self.backbone(scaled(images), train)

    def embed(self, images: Images) -> Float[Array, " N *rest"]:
        """Features of images [N, H, W, Ch] in evaluation mode."""
        return self.features(images[None], train=False)[0]

    def observe(self, tasks: LabelledTasks) -> None:
        """One pass of the network in training mode."""
        self.features(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)


class EpisodicLearner(NetworkLearner):
    """A learner with logits of the classes, trained on tasks of `way` classes to predict their queries.

    loss: -1/Q sum_q log p(y_q | x_q, support), with `fit` and `logits` of features in training mode.
    """

    def __init__(self, backbone: Backbone, way: int):
        super().__init__(backbone)
        self.way = way

    def logits(self, state: PyTree, query: Queries) -> Float[Array, "Q C"]:
        """log p(class | query) up to a constant of the query, -inf for classes that are not there."""
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    def predict(self, key: Key[Array, ""], state: PyTree, query: Queries) -> Prediction:
        """Probabilities [Q, C]: the softmax of the logits."""
        del key
        return categorical(jax.nn.softmax(self.logits(state, query)))

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """sum_q log p(y_q | x_q, support), the mean over the tasks, which share one pass of the network."""
        features = self.features(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)
        found = for_each(self._log_probability)(keys, features, tasks)
        return Outcome(jnp.mean(found), tasks.y_query.shape[1], {})

    def _log_probability(self, key: Array, features: Array, task: LabelledTasks) -> Array:
        shots = task.y_support.shape[0]
        state, _ = self.fit(key, features[:shots], task.y_support, self.way)
        return jnp.sum(log_probabilities(self.logits(state, features[shots:]), task.y_query))


def scaled(images: Shaped[Array, "*T H W Ch"]) -> Float[Array, "*T H W Ch"]:
    """Images as numbers in [0, 1]; numbers stay as they are."""
    return images.astype(jnp.result_type(float)) / (255.0 if images.dtype == jnp.uint8 else 1.0)


def log_probabilities(logits: Float[Array, "*N C"], y: Int[Array, "*N"]) -> Float[Array, "*N"]:
    """log softmax(logits)[y]."""
    return -optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)


def real_points(y: Shaped[Array, " N"], mask: Mask | None) -> Bool[Array, " N"]:
    """Which points are real."""
    return jnp.ones(y.shape, bool) if mask is None else mask.points


def real_classes(classes: int, mask: Mask | None) -> Bool[Array, " C"]:
    """Which classes are real."""
    return jnp.ones(classes, bool) if mask is None else mask.classes


def class_means(x: Inputs, y: Int[Array, " N"], classes: int, mask: Mask | None = None) -> Float[Array, " C *rest"]:
    """Means [C, ...] of the real inputs [N, ...] of every class; 0 for a class without any."""
    members = jnp.where(real_points(y, mask)[:, None], jax.nn.one_hot(y, classes, dtype=x.dtype), 0.0)
    shares = members / jnp.maximum(members.sum(0), 1.0)
    return jnp.tensordot(shares, x, axes=(0, 0), precision=jax.lax.Precision.HIGHEST)
