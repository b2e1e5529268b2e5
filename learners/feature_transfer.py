"""Feature transfer (the Baseline of Chen et al. 2019): classify all training classes, then fit a new head to each task.

The network is trained on batches of images with the labels of all training classes. At test it is held fixed, and
stochastic gradient descent fits a head to the labelled images of a task.
"""

from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.inference.outer.loss import ForEach, Outcome
from fewshot.learners.base import Prediction, TrainsOn, Traits, categorical
from fewshot.learners.network import NetworkLearner, log_probabilities, real_classes, real_points
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import inner_products

MOMENTUM = 0.9  # and as much dampening: the step is along an average of the gradients

Head = dict[str, Array]


@runtime_checkable
class LabelledBatches(Protocol):
    """What is needed of sampled batches: images [T, B, H, W, Ch] and labels [T, B] of all training classes."""

    x: Array
    y: Array


class FittedHead(NamedTuple):
    """The head of a task, and which classes are real."""

    head: Head
    present: Bool[Array, " C"]


class FeatureTransfer(NetworkLearner):
    """softmax(weights x + bias), over all training classes in training, fitted anew to each task at test.

    classes: of training. rate, decay, batch, passes: of the descent at test (`descend`). A new head starts at zero.
    """

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.BATCHES)

    def __init__(
        self,
        backbone: Backbone,
        *,
        classes: int,
        rngs: nnx.Rngs,
        rate: float = 0.01,
        decay: float = 1e-3,
        batch: int = 4,
        passes: int = 100,
    ):
        if classes < 2:
            raise ValueError(f"expected the number of training classes, at least 2, got {classes}")
        if not (rate > 0 and decay >= 0 and batch > 0 and passes > 0):
            raise ValueError(
                f"expected a positive rate, batch and passes, and decay >= 0, got {rate, batch, passes, decay}"
            )
        super().__init__(backbone)
        self.rate, self.decay, self.batch, self.passes = rate, decay, batch, passes
        start = self.start(rngs.params(), classes)
        self.head = nnx.Dict({name: nnx.Param(value) for name, value in start.items()})

    def start(self, key: Key[Array, ""], classes: int) -> Head:
        """Where the fit of a head begins."""
        del key
        return {"weights": jnp.zeros((classes, self.backbone.features)), "bias": jnp.zeros(classes)}

    def logits(self, head: Head, x: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """Logits of features."""
        return inner_products(x, head["weights"]) + head["bias"]

    def loss(self, keys: Key[Array, " T"], tasks: LabelledBatches, for_each: ForEach) -> Outcome:
        """sum_n log p(y_n | x_n) over the training classes, the mean over the batches."""
        del keys, for_each
        features = self.features(tasks.x, train=True)
        head = {name: value[...] for name, value in self.head.items()}
        logits = self.logits(head, features.reshape(-1, features.shape[-1]))
        found = log_probabilities(logits, tasks.y.reshape(-1)).reshape(tasks.y.shape)
        return Outcome(jnp.mean(jnp.sum(found, axis=1)), tasks.y.shape[1], {})

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[FittedHead, Int[Array, ""]]:
        """A new head, by `descend` on the mean of -log p(y_n | x_n) over a batch."""
        start_key, order_key = jax.random.split(key)
        present = real_classes(classes, mask)

        def loss(head: Head, rows: Array, real: Array) -> Array:
            logits = jnp.where(present, self.logits(head, support[rows]), -jnp.inf)
            found = jnp.where(real, log_probabilities(logits, y[rows]), 0.0)
            return -jnp.sum(found) / jnp.maximum(jnp.sum(real), 1)

        batches = shuffled(order_key, real_points(y, mask), self.batch, self.passes)
        head = descend(jax.grad(loss), self.start(start_key, classes), batches, self.rate, self.decay)
        return FittedHead(head, present), finite_code(*head.values())

    def predict(self, key: Key[Array, ""], state: FittedHead, query: Float[Array, "Q D"]) -> Prediction:
        """Probabilities [Q, C]."""
        del key
        return categorical(jax.nn.softmax(jnp.where(state.present, self.logits(state.head, query), -jnp.inf)))


def shuffled(
    key: Key[Array, ""], real: Bool[Array, " N"], batch: int, passes: int
) -> tuple[Int[Array, "S B"], Bool[Array, "S B"]]:
    """Batches of positions, and which of these are real: in every pass each real point once, in a random order.

    The order of the real points does not depend on how many others there are; batches without a real point come last.
    """
    size = -(-len(real) // batch) * batch

    def one_pass(key: Array) -> tuple[Array, Array]:
        numbers = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(len(real)))
        order = jnp.argsort(jnp.where(real, numbers, jnp.inf))
        beyond = size - len(real)
        return jnp.pad(order, (0, beyond)), jnp.pad(real[order], (0, beyond))

    rows, exists = jax.vmap(one_pass)(jax.random.split(key, passes))
    return rows.reshape(-1, batch), exists.reshape(-1, batch)


def descend(
    gradient: PyTree, head: Head, batches: tuple[Int[Array, "S B"], Bool[Array, "S B"]], rate: float, decay: float
) -> Head:
    """head - rate v after every batch, v <- .9 v + .1 (gradient + decay head), begun at the first gradient.

    gradient(head, rows, real); a batch without a real point changes nothing.
    """
    average = optax.ema(MOMENTUM, debias=False)

    def slope(head: Head, rows: Array, real: Array) -> Head:
        return jax.tree.map(lambda g, value: g + decay * value, gradient(head, rows, real), head)

    def step(carry: tuple[Head, PyTree], batch: tuple[Array, Array]) -> tuple[tuple[Head, PyTree], None]:
        velocity, state = average.update(slope(carry[0], *batch), carry[1])
        moved = optax.apply_updates(carry[0], jax.tree.map(lambda v: -rate * v, velocity)), state
        return jax.tree.map(lambda new, old: jnp.where(batch[1].any(), new, old), moved, carry), None

    first = slope(head, *(part[0] for part in batches))
    return jax.lax.scan(step, (head, average.init(head)._replace(ema=first)), batches)[0][0]
