"""Predictions of numbers that know nothing but the labelled points of the task: what every learner should beat.

Their variance is the mean squared error on the labelled points, each left out, with one more error of VAGUE: a single
point tells no error. Letters: N labelled points, Q queries, D numbers of an input.
"""

import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key

from fewshot.evaluation.from_points import FromPoints, Points
from fewshot.learners.base import Prediction, predicted

VAGUE = 0.25  # the largest variance of numbers in [0, 1]


class PlainLabels(FromPoints):
    """A normal about `guess`; labels are numbers in [0, 1], noise aside."""

    def predict(self, key: Key[Array, ""], state: Points, query: Float[Array, "Q D"]) -> Prediction:
        """Normals of one variance."""
        del key
        count = len(state.y)
        left_out = self.guess(state, state.x, jnp.eye(count, dtype=bool))
        error = jnp.where(count > 1, jnp.sum((state.y - left_out) ** 2), 0.0)
        mean = self.guess(state, query, jnp.zeros((len(query), count), bool))
        return predicted(dist.Normal(mean, jnp.sqrt((error + VAGUE) / (count + 1))))

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """The mean at every query, which may not see the points [Q, N] that are hidden from it."""
        raise NotImplementedError(f"{type(self).__name__} has no guess")


class MeanLabel(PlainLabels):
    """The mean of the labels that are seen."""

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """One number."""
        return jnp.where(hidden, 0.0, state.y).sum(1) / jnp.maximum((~hidden).sum(1), 1)


class NearestLabel(PlainLabels):
    """The label of the nearest point that is seen."""

    def guess(self, state: Points, query: Float[Array, "Q D"], hidden: Array) -> Float[Array, " Q"]:
        """Its label."""
        distance = jnp.sum((query[:, None] - state.x) ** 2, axis=-1)
        return state.y[jnp.argmin(jnp.where(hidden, jnp.inf, distance), axis=1)]
