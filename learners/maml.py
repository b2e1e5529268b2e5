"""MAML (Finn et al. 2017): a network and a linear head whose start a few steps of gradient descent adapt to a task."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.base import Images, Learner, Prediction, Traits, categorical
from fewshot.learners.network import LabelledTasks, log_probabilities, real_classes, real_points, scaled
from fewshot.models.backbones import Backbone

# Of every learner that adapts its network: the images of a call, labelled or predicted, are normalised together.
ADAPTED = Traits(transductive=True, batch_statistics="those of the images predicted together (transductive)")


class LinearHead(nnx.Module):
    """A backbone and a linear layer to C logits, which starts at zero."""

    def __init__(self, backbone: Backbone, way: int):
        self.backbone = backbone
        self.weights = nnx.Param(jnp.zeros((backbone.features, way)))
        self.bias = nnx.Param(jnp.zeros(way))

    def __call__(self, images: Shaped[Array, "N H W Ch"]) -> Float[Array, "N C"]:
        """Logits [N, C]; batch norms use the statistics of these N images."""
        features = self.backbone(scaled(images)[None], train=True)[0]
        return jnp.matmul(features, self.weights[...], precision=jax.lax.Precision.HIGHEST) + self.bias[...]


class MAML(Learner):
    """theta_task = theta - inner_rate grad of the mean cross-entropy of the labelled images, `inner_steps` times.

    The outer loop learns theta, head included, so that theta_task predicts the queries; its gradient goes through the
    steps. It tells `way` classes apart. Images are its inputs: every task evaluates the network anew.
    """

    traits: ClassVar[Traits] = ADAPTED
    first_order: ClassVar[bool] = False

    def __init__(
        self,
        backbone: Backbone,
        *,
        way: int,
        rngs: nnx.Rngs | None = None,
        inner_steps: int = 5,
        inner_rate: float = 0.01,
    ):
        del rngs  # nothing is drawn
        check_inner(inner_steps, inner_rate)
        self.network = LinearHead(backbone, way)
        self.way, self.inner_steps, self.inner_rate = way, inner_steps, inner_rate

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.network.backbone.image_shape

    @property
    def ways(self) -> int:
        """The number of classes of its head."""
        return self.way

    def fit(
        self,
        key: Key[Array, ""],
        support: Images,
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """The adapted parameters. Raises ValueError for another number of classes than `ways`."""
        del key
        check_ways(self, classes)
        graph, parameters, *others = nnx.split(self.network, nnx.Param, ...)
        rest = others[0]
        weights = real_points(y, mask) / jnp.sum(real_points(y, mask))

        def loss(parameters: PyTree) -> Array:
            logits = nnx.merge(graph, parameters, rest, copy=True)(support)
            logits = jnp.where(real_classes(classes, mask), logits, -jnp.inf)
            return -jnp.sum(weights * log_probabilities(logits, y))

        for _ in range(self.inner_steps):
            parameters = self._descended(parameters, jax.grad(loss)(parameters))
        return parameters, finite_code(*jax.tree.leaves(parameters))

    def _descended(self, parameters: PyTree, gradient: PyTree) -> PyTree:
        if self.first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return jax.tree.map(lambda value, slope: value - self.inner_rate * slope, parameters, gradient)

    def logits(self, parameters: PyTree, images: Images) -> Float[Array, "Q C"]:
        """Logits [Q, C] of images [Q, H, W, Ch] by adapted parameters."""
        graph, _, *others = nnx.split(self.network, nnx.Param, ...)
        rest = others[0]
        return nnx.merge(graph, parameters, rest, copy=True)(images)

    def predict(self, key: Key[Array, ""], state: PyTree, query: Images) -> Prediction:
        """Probabilities [Q, C] of images [Q, H, W, Ch], whose batch statistics are their own."""
        del key
        return categorical(jax.nn.softmax(self.logits(state, query)))

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """sum_q log p(y_q | x_q, theta_task), the mean over the tasks."""
        return Outcome(jnp.mean(for_each(self._log_probability)(keys, tasks)), tasks.y_query.shape[1], {})

    def _log_probability(self, key: Array, task: LabelledTasks) -> Array:
        adapted, _ = self.fit(key, task.x_support, task.y_support, self.way)
        return jnp.sum(log_probabilities(self.logits(adapted, task.x_query), task.y_query))


class FirstOrderMAML(MAML):
    """MAML whose outer gradient takes those of the inner steps for constants: d theta_task / d theta = 1."""

    first_order: ClassVar[bool] = True


def check_inner(steps: int, rate: float) -> None:
    """Raises ValueError for an inner loop without steps, or with a rate that is not positive."""
    if steps < 1 or not rate > 0:
        raise ValueError(f"expected inner_steps of at least 1 and a positive inner_rate, got {steps} and {rate}")


def check_ways(learner: Learner, classes: int) -> None:
    """Raises ValueError for another number of classes than the head of a learner has."""
    if classes != learner.ways:
        raise ValueError(f"expected tasks of {learner.ways} classes, got {classes}; train with --way {classes}")
