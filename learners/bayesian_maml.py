"""Bayesian MAML (Yoon et al. 2018): particles of networks, adapted to a task by Stein variational gradient descent."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.adapted import AdaptedLearner, LinearHead
from fewshot.learners.base import Images, Prediction, categorical
from fewshot.learners.network import LabelledTasks, log_probabilities, real_classes, real_points
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import squared_distances


class Particles(NamedTuple):
    """Adapted parameters, a row for each particle, and which classes are real."""

    rows: Float[Array, "P K"]
    present: Bool[Array, " C"]


class BayesianMAML(AdaptedLearner):
    """theta_p <- theta_p + inner_rate/N Stein direction of sum_n log p(y_n | x_n, theta_p), `inner_steps` times.

    p(k | x) is the mean over the particles, which the outer loop learns. With one particle it is MAML. The prior of the
    weights is flat; only the repulsion of the particles keeps them apart.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        way: int,
        rngs: nnx.Rngs,
        particles: int = 5,
        inner_steps: int = 5,
        inner_rate: float = 0.01,
    ):
        super().__init__(backbone, way, inner_steps, inner_rate)
        if particles < 1:
            raise ValueError(f"expected at least 1 particle, got {particles}")
        others = [drawn_again(backbone, rngs) for _ in range(particles - 1)]
        self.networks = nnx.List([LinearHead(each, way) for each in (backbone, *others)])

    def fit(
        self,
        key: Key[Array, ""],
        support: Images,
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Particles, Int[Array, ""]]:
        """The adapted particles. Raises ValueError for another number of classes than `ways`."""
        del key
        self.check(classes)
        rows = jnp.stack([ravel_pytree(nnx.state(network, nnx.Param))[0] for network in self.networks])
        start = Particles(rows, real_classes(classes, mask))
        found = self.adapted(start, support, y, real_points(y, mask))
        return found, finite_code(found.rows)

    def adapted(self, start: Particles, support: Images, y: Int[Array, " N"], real: Bool[Array, " N"]) -> Particles:
        """Particles after `inner_steps` steps on labelled images."""

        def log_likelihood(row: Array) -> Array:
            found = log_probabilities(self._logits(row, start.present, support), y)
            return jnp.sum(jnp.where(real, found, 0.0))

        rows = start.rows
        for _ in range(self.inner_steps):
            gradients = self.for_networks(jax.grad(log_likelihood))(rows)
            rows = rows + self.inner_rate / jnp.sum(real) * stein_direction(rows, gradients)
        return start._replace(rows=rows)

    def _logits(self, row: Array, present: Array, images: Images) -> Float[Array, "Q C"]:
        graph, parameters, *others = nnx.split(self.networks[0], nnx.Param, ...)
        rest = others[0]
        logits = nnx.merge(graph, ravel_pytree(parameters)[1](row), rest, copy=True)(images)
        return jnp.where(present, logits, -jnp.inf)

    def log_mean(self, state: Particles, images: Images) -> Float[Array, "Q C"]:
        """log of the particles' mean probabilities [Q, C] of images [Q, H, W, Ch]."""
        each = self.for_networks(lambda row: jax.nn.log_softmax(self._logits(row, state.present, images)))(state.rows)
        return jax.nn.logsumexp(each, axis=0) - math.log(len(each))

    def predict(self, key: Key[Array, ""], state: Particles, query: Images) -> Prediction:
        """Probabilities [Q, C] of images [Q, H, W, Ch], whose batch statistics are their own."""
        del key
        return categorical(jnp.exp(self.log_mean(state, query)))

    def objective(self, key: Key[Array, ""], task: LabelledTasks) -> Float[Array, ""]:
        """sum_q log mean_p p(y_q | x_q, theta_p)."""
        state, _ = self.fit(key, task.x_support, task.y_support, self.way)
        return jnp.sum(log_probabilities(self.log_mean(state, task.x_query), task.y_query))


class Chaser(BayesianMAML):
    """Bayesian MAML trained by its chaser loss: adapted particles chase those that see the queries' labels too.

    The leader goes on from the adapted particles by as many steps on labelled images and queries together; the loss is
    sum_p |theta_p - leader_p|^2, the leader held fixed.
    """

    def objective(self, key: Key[Array, ""], task: LabelledTasks) -> Float[Array, ""]:
        """-sum_p |theta_p - leader_p|^2."""
        state, _ = self.fit(key, task.x_support, task.y_support, self.way)
        images = jnp.concatenate([task.x_support, task.x_query])
        labels = jnp.concatenate([task.y_support, task.y_query])
        leader = self.adapted(state, images, labels, jnp.ones(labels.shape, bool))
        return -jnp.sum((state.rows - jax.lax.stop_gradient(leader.rows)) ** 2)


def stein_direction(rows: Float[Array, "P K"], gradients: Float[Array, "P K"]) -> Float[Array, "P K"]:
    """1/P sum_j [k(j, i) gradient_j + d k(j, i) / d row_j] with k(j, i) = exp(-|row_j - row_i|^2 / h).

    sqrt(h log P) is the median distance of all P^2 pairs, those of a particle with itself among them; h is held fixed
    in derivatives, and 1 where the median is 0, as of particles that are alike. Liu & Wang 2016.
    """
    if len(rows) == 1:  # k = 1, and nothing to keep apart
        return gradients
    squares = squared_distances(rows, rows)
    median = jnp.median(jnp.sqrt(jax.lax.stop_gradient(squares)))
    width = jnp.where(median > 0, median**2 / math.log(len(rows)), 1.0)
    alike = jnp.exp(-squares / width)
    weighted = partial(jnp.matmul, alike, precision=jax.lax.Precision.HIGHEST)
    apart = 2 / width * (rows * alike.sum(1, keepdims=True) - weighted(rows))
    return (weighted(gradients) + apart) / len(rows)


def drawn_again(backbone: Backbone, rngs: nnx.Rngs) -> Backbone:
    """A backbone with other first weights: normal numbers of the standard deviation of each array."""
    graph, parameters, *others = nnx.split(backbone, nnx.Param, ...)

    def draw(leaf: Array) -> Array:
        return leaf if leaf.ndim < 2 else jnp.std(leaf) * jax.random.normal(rngs.params(), leaf.shape, leaf.dtype)

    return nnx.merge(graph, jax.tree.map(draw, parameters), others[0], copy=True)
