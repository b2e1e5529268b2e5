"""What learners share that adapt a network to a task by a few steps of gradient descent: MAML and its relatives."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree, Shaped

from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.base import Learner, Traits
from fewshot.learners.network import LabelledTasks, scaled
from fewshot.models.backbones import Backbone

# The images of a call, labelled or predicted, are normalised together.
ADAPTED = Traits(transductive=True)


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


class AdaptedLearner(Learner):
    """A learner whose `fit` takes `inner_steps` steps at `inner_rate`, with an `objective` of a task.

    Its heads have `way` outputs. Images are its inputs: every task evaluates the network anew. Raises ValueError for no
    steps, and for a rate that is not positive.
    """

    traits: ClassVar[Traits] = ADAPTED

    def __init__(self, backbone: Backbone, way: int, inner_steps: int, inner_rate: float):
        if inner_steps < 1 or not inner_rate > 0:
            raise ValueError(
                f"expected inner_steps of at least 1 and a positive inner_rate, got {inner_steps} and {inner_rate}"
            )
        self.shape, self.convolutional = backbone.image_shape, backbone.convolutional
        self.way, self.inner_steps, self.inner_rate = way, inner_steps, inner_rate

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.shape

    @property
    def ways(self) -> int:
        """The number of classes of its head."""
        return self.way

    def check(self, classes: int) -> None:
        """Raises ValueError for another number of classes than the head has."""
        if classes != self.way:
            raise ValueError(f"expected tasks of {self.way} classes, got {classes}; train with --way {classes}")

    def objective(self, key: Key[Array, ""], task: LabelledTasks) -> Float[Array, ""]:
        """What the outer loop maximises, of one task."""
        raise NotImplementedError(f"{type(self).__name__} has no objective")

    def for_tasks(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """The function of one task as one of several, each of which has a network of its own."""
        return self.for_networks(function)

    def for_networks(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """The function of one network's parameters as one of several: vmap, but for convolutions on a processor.

        Together, with weights of their own, these are convolutions in groups, which take a processor three to eight
        times as long as one network after the other.
        """
        if self._in_turn():
            return lambda *stacked: jax.lax.map(lambda row: function(*row), stacked)
        return jax.vmap(function)

    def _in_turn(self) -> bool:
        return self.convolutional and jax.default_backend() == "cpu"

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """The objective of every task, the mean over the tasks."""
        if len(keys) == 1 or not self._in_turn():
            mean = jnp.mean(for_each(self.objective)(keys, tasks))
        else:
            graph, parameters, *rest = nnx.split(self, nnx.Param, ...)

            def objective(parameters: PyTree, others: PyTree, key: Array, task: LabelledTasks) -> Array:
                return nnx.merge(graph, parameters, others, copy=True).objective(key, task)

            mean = sum_in_turn(objective, parameters, rest[0], (keys, tasks)) / len(keys)
        return Outcome(mean, tasks.y_query.shape[1], {})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_in_turn(
    function: Callable[..., Array], parameters: PyTree, others: PyTree, rows: tuple[PyTree, ...]
) -> Float[Array, ""]:
    """sum_t function(parameters, others, *rows[t]), with a gradient in the parameters alone, made row by row.

    The usual gradient of a loop keeps what the backward pass of every row needs until the last row is done.
    """
    return jax.lax.map(lambda row: function(parameters, others, *row), rows).sum()


def _summed_with_gradient(
    function: Callable[..., Array], parameters: PyTree, others: PyTree, rows: tuple[PyTree, ...]
) -> tuple[Array, PyTree]:
    def add(total: PyTree, row: PyTree) -> tuple[PyTree, None]:
        found = jax.value_and_grad(function)(parameters, others, *row)
        return jax.tree.map(jnp.add, total, found), None

    nothing = jnp.zeros((), jnp.result_type(float)), jax.tree.map(jnp.zeros_like, parameters)
    return jax.lax.scan(add, nothing, rows)[0]


def _scaled_gradient(function: Callable[..., Array], gradient: PyTree, cotangent: Array) -> tuple[PyTree, None, None]:
    del function
    return jax.tree.map(lambda leaf: cotangent * leaf, gradient), None, None


sum_in_turn.defvjp(_summed_with_gradient, _scaled_gradient)
