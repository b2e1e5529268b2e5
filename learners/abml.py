"""Amortised Bayesian meta-learning (Ravi & Beatson 2019): a Gaussian over all weights that gradient descent adapts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.adapted import AdaptedLearner, LinearHead
from fewshot.learners.base import Images, Prediction, categorical
from fewshot.learners.network import LabelledTasks, log_probabilities, real_classes, real_points
from fewshot.models.backbones import Backbone


class WeightBelief(NamedTuple):
    """Independent normals over all K parameters of a network: means and logarithms of standard deviations."""

    mean: Float[Array, " K"]
    log_sd: Float[Array, " K"]


class ABML(AdaptedLearner):
    """lambda <- lambda - inner_rate/N grad [-E_q sum_n log p(y_n | x_n, w) + kl_weight KL(q | prior)], q = N(lambda).

    lambda, the means and log standard deviations of the weights of a task, starts at those of the prior, which the
    outer loop learns by the same bound of the queries. E_q is the mean of `draws` draws, fresh in every step;
    predictions are means of `prediction_draws`. kl_weight: 1 for the bound itself; a step overshoots where
    inner_rate kl_weight > 2 N sd^2, so several steps need less, or a larger starting `sd`.
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        way: int,
        rngs: nnx.Rngs | None = None,
        inner_steps: int = 5,
        inner_rate: float = 0.01,
        sd: float = 0.03,
        kl_weight: float = 0.01,
        draws: int = 1,
        prediction_draws: int = 10,
    ):
        del rngs  # draws have the keys of their tasks
        super().__init__(backbone, way, inner_steps, inner_rate)
        if not (sd > 0 and kl_weight >= 0 and draws > 0 and prediction_draws > 0):
            raise ValueError(
                f"expected a positive sd, draws and prediction_draws, and kl_weight >= 0, "
                f"got {sd, draws, prediction_draws, kl_weight}"
            )
        self.network = LinearHead(backbone, way)
        size = ravel_pytree(nnx.state(self.network, nnx.Param))[0].shape
        self.log_sd = nnx.Param(jnp.full(size, math.log(sd), jnp.result_type(float)))
        self.kl_weight, self.draws, self.prediction_draws = kl_weight, draws, prediction_draws

    def prior(self) -> WeightBelief:
        """What is believed of the weights before a task."""
        return WeightBelief(ravel_pytree(nnx.state(self.network, nnx.Param))[0], self.log_sd[...])

    def fit(
        self,
        key: Key[Array, ""],
        support: Images,
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[WeightBelief, Int[Array, ""]]:
        """The adapted belief. Raises ValueError for another number of classes than `ways`."""
        self.check(classes)
        prior, real, present = self.prior(), real_points(y, mask), real_classes(classes, mask)

        def bound(belief: WeightBelief, key: Array) -> Array:
            logits = jnp.where(present, self._drawn_logits(key, belief, support, self.draws), -jnp.inf)
            each = jnp.where(real, log_probabilities(logits, jnp.broadcast_to(y, logits.shape[:2])), 0.0)
            return jnp.mean(jnp.sum(each, axis=1)) - self.kl_weight * divergence(belief, prior)

        belief = prior
        for step_key in jax.random.split(key, self.inner_steps):
            slope = jax.grad(bound)(belief, step_key)
            rate = self.inner_rate / jnp.sum(real)
            belief = WeightBelief(*(value + rate * change for value, change in zip(belief, slope, strict=True)))
        return belief, finite_code(*belief)

    def _drawn_logits(self, key: Array, belief: WeightBelief, images: Images, draws: int) -> Float[Array, "S Q C"]:
        """Logits by networks with drawn weights."""
        graph, parameters, *others = nnx.split(self.network, nnx.Param, ...)
        named = ravel_pytree(parameters)[1]

        def drawn(key: Array) -> Array:
            noise = jax.random.normal(key, belief.mean.shape, belief.mean.dtype)
            weights = named(belief.mean + jnp.exp(belief.log_sd) * noise)
            return nnx.merge(graph, weights, others[0], copy=True)(images)

        return self.for_networks(drawn)(jax.random.split(key, draws))

    def predict(self, key: Key[Array, ""], state: WeightBelief, query: Images) -> Prediction:
        """Mean probabilities [Q, C] of images [Q, H, W, Ch], whose batch statistics are their own."""
        logits = self._drawn_logits(key, state, query, self.prediction_draws)
        return categorical(jnp.mean(jax.nn.softmax(logits), axis=0))

    def objective(self, key: Key[Array, ""], task: LabelledTasks) -> Float[Array, ""]:
        """E_q sum_q log p(y_q | x_q, w) - kl_weight KL(q | prior)."""
        fit_key, draw_key = jax.random.split(key)
        belief, _ = self.fit(fit_key, task.x_support, task.y_support, self.way)
        logits = self._drawn_logits(draw_key, belief, task.x_query, self.draws)
        each = log_probabilities(logits, jnp.broadcast_to(task.y_query, logits.shape[:2]))
        return jnp.mean(jnp.sum(each, axis=1)) - self.kl_weight * divergence(belief, self.prior())


def divergence(belief: WeightBelief, prior: WeightBelief) -> Float[Array, ""]:
    """KL(q | p) = sum_k log(s_p / s_q) + (s_q^2 + (m_q - m_p)^2) / (2 s_p^2) - 1/2."""
    apart = (belief.mean - prior.mean) * jnp.exp(-prior.log_sd)
    wider = belief.log_sd - prior.log_sd
    return 0.5 * jnp.sum(jnp.expm1(2 * wider) - 2 * wider + apart**2)
