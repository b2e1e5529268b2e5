"""A task's own temperature, learned from its labelled images: (T2) to (T4) of docs/evaluation.md.

A temperature that was fitted on other classes is too low for harder ones and too high for easier ones. Labelled images
tell: leave one of every class out, predict it from the others, and see at which temperature that would have been right.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fewshot.inference.inner.base import Code, Mask
from fewshot.inference.predictive import temper
from fewshot.learners.base import Inputs, Learner

FOLDS = 5  # images of a class that are left out, one at a time, at most
# Standard deviation of the log temperature of a task about the run's: of 0.1, 0.2, 0.3, 0.5 and 0.8 the one of least
# NLL on validation classes of four data sets (docs/results/temperatures.md).
SPREAD = 0.2
NODES, REACH = 41, 5.0  # of the rule over log temperatures, and how many standard deviations it covers on either side


class Without(NamedTuple):
    """Tasks without each of F folds, where these are more than parts of the whole.

    Inputs [F, M, ...], labels [F, M], which are real [F, M], and which inputs of the whole are left out [F, N].
    """

    inputs: Shaped[Array | np.ndarray, "..."]
    y: Int[Array | np.ndarray, "*F M"]
    real: Bool[Array | np.ndarray, "*F M"]
    held: Bool[Array | np.ndarray, "*F N"]


class TemperatureMixture(NamedTuple):
    """Temperatures of a task and the probability of each; several tasks are a leading axis."""

    temperatures: Float[Array, "*tasks G"]
    weights: Float[Array, "*tasks G"]

    @property
    def mean(self) -> Float[Array, "*tasks"]:
        """The geometric mean of the temperatures."""
        return jnp.exp(jnp.sum(self.weights * jnp.log(self.temperatures), axis=-1))

    def temper(self, probabilities: Float[Array, "*tasks Q C"]) -> Float[Array, "*tasks Q C"]:
        """Probabilities averaged over the temperatures (T4)."""
        return _tempered(self, probabilities)


# This and `posterior_of` are compiled on their own: a loop that runs outside compiled code is compiled by every call.
@jax.jit
def _tempered(mixture: TemperatureMixture, probabilities: Array) -> Array:
    def add(total: Array, node: TemperatureMixture) -> tuple[Array, None]:
        one = TemperatureMixture(*(values[..., None, None] for values in node))
        return total + one.weights * temper(probabilities, one.temperatures), None

    nodes = TemperatureMixture(*(jnp.moveaxis(values, -1, 0) for values in mixture))
    return jax.lax.scan(add, jnp.zeros_like(probabilities), nodes)[0]


def single(temperature: float | Float[Array, ""]) -> TemperatureMixture:
    """One temperature, for certain."""
    return TemperatureMixture(jnp.full(1, temperature), jnp.ones(1))


def task_temperature(
    key: Key[Array, ""],
    learner: Learner,
    support: Inputs,
    y: Int[Array, " N"],
    classes: int,
    temperature: float | Float[Array, ""],
    temperature_of_fewer: float | Float[Array, ""],
    mask: Mask | None = None,
    folds: int = FOLDS,
    spread: float | Float[Array, ""] = SPREAD,
    without: Without | None = None,
) -> TemperatureMixture:
    """The posterior of a task's temperature (T3), from its labelled inputs [N, ...].

    `temperature` is the run's for tasks of this shape, `temperature_of_fewer` its one for those with one image a class
    fewer, as tasks have from which an image of every class was left out. `without`: the tasks that are left, None for
    the others of the task's own inputs. Where no class has two images, and for folds whose inference fails, nothing is
    learned.
    """
    if mask is None:
        mask = Mask(jnp.ones(y.shape, bool), jnp.ones(classes, bool))
    held = left_out(y, mask.points, folds) if without is None else without.held
    fit_key, predict_key = jax.random.split(key)

    def predicted_without(fold: Array | Without) -> tuple[Array, Array]:
        inputs, labels, real = rest_of(support, y, mask.points, fold)
        state, code = learner.fit(fit_key, inputs, labels, classes, mask._replace(points=real))
        return learner.predict(predict_key, state, support).probabilities, code

    probabilities, codes = for_each_fold(learner, predicted_without, held if without is None else without)
    seen = held & (codes != Code.NON_FINITE)[:, None]
    return posterior_of(probabilities, y, seen, temperature, temperature_of_fewer, spread)


def left_out(
    y: Int[Array | np.ndarray, " N"], real: Bool[Array | np.ndarray, " N"], folds: int
) -> Bool[Array | np.ndarray, "F N"]:
    """Fold k leaves out the k-th image of every class that has as many, and at least two.

    Of NumPy's arrays on the host, where another number of images compiles nothing.
    """
    array = np if isinstance(y, np.ndarray) else jnp
    same = (y[:, None] == y) & real[:, None] & real
    number, count = array.sum(array.tril(same, -1), axis=1), array.sum(same, axis=1)
    return (number == array.arange(folds)[:, None]) & (count > 1)


def rest_of(
    support: Inputs, y: Array, real: Array, fold: Array | Without
) -> tuple[Shaped[Array, "M ..."], Array, Array]:
    """Inputs and labels of a task without a fold, and which of them are real."""
    if isinstance(fold, Without):
        return jnp.asarray(fold.inputs), jnp.asarray(fold.y), jnp.asarray(fold.real)
    return support, y, real & ~fold


def for_each_fold(learner: Learner, function: Callable[..., PyTree], folds: PyTree) -> PyTree:
    """What a function that fits the learner finds of every fold, along a leading axis.

    One after the other: each holds as many draws as the inference of the task itself.
    """
    if learner.traits.traceable:
        return jax.lax.map(function, folds)
    each = [jax.tree.map(lambda leaf, k=k: leaf[k], folds) for k in range(len(jax.tree.leaves(folds)[0]))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(function, each))


@jax.jit
def posterior_of(
    probabilities: Float[Array, "F N C"],
    y: Int[Array, " N"],
    held: Bool[Array, "F N"],
    temperature: float | Float[Array, ""],
    temperature_of_fewer: float | Float[Array, ""],
    spread: float | Float[Array, ""] = SPREAD,
) -> TemperatureMixture:
    """(T3) from the probabilities of left-out images; certain of `temperature` where none was left out."""
    departures = spread * jnp.linspace(-REACH, REACH, NODES, dtype=probabilities.dtype)

    def evidence(departure: Array) -> Array:
        tempered = temper(probabilities, temperature_of_fewer * jnp.exp(departure))
        right = jnp.take_along_axis(tempered, y[None, :, None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(held, jnp.log(jnp.maximum(right, jnp.finfo(right.dtype).tiny)), 0.0))

    logs = jax.lax.map(evidence, departures) - 0.5 * (departures / spread) ** 2
    certain = jnp.arange(NODES) == NODES // 2
    weights = jnp.where(jnp.any(held), jax.nn.softmax(logs), certain)
    return TemperatureMixture(temperature * jnp.exp(departures), weights)
