"""One task: a learner conditioned on labelled inputs, and what it says of others.

Little is compiled twice: queries go through in chunks of a fixed size, and tasks are padded to one of a few (`bucket`),
masked, so that ways from 2 to 5 with 1 to 5 shots need three programs to fit and three to predict, not twenty of each.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.evaluation.out_of_episode import Labelled, mutual_information, strangeness
from fewshot.evaluation.scoring import embed_images
from fewshot.evaluation.unknown import LeftOut, each_left_out, p_values
from fewshot.groups import number_of, padded, shown, without_each
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import LatentLearner, Learner, Traits, apply
from fewshot.learners.task_temperature import SPREAD, TemperatureMixture, Without, single, task_temperature
from fewshot.models.deep_kernel import check_images, holds_features
from fewshot.models.gaussian import AnyMarginals, JointMarginals, Marginals
from fewshot.threads import one_blas_thread

CHUNK = 64  # images that pass the network, and queries that are predicted, at a time
FEW_CLASSES, FEW_POINTS = 5, 128  # up to which classes are padded to FEW_CLASSES
DRAWS, FEWEST_DRAWS = 1024, 256  # of every expectation
MOST_NUMBERS = 4_000_000  # of the logits of all labelled examples at once, to which large tasks reduce their draws
# Numbers of keys: the fit splits its key in two, which are fold_in(key, 0) and fold_in(key, 1); `suggestion` has 4.
PREDICTION, INFORMATION, UNKNOWN = 2, 3, 5


class InferenceFailedError(RuntimeError):
    """The inference did not end in finite numbers; the message is one line."""


class TemperaturePrior(NamedTuple):
    """What is known of a task's temperature before its labels are seen (T2).

    own: for tasks of its shape. fewer: for those with one example a class fewer; None: own is certain, and nothing is
    learned from the labels. spread: the standard deviation of the task's log temperature.
    """

    own: float
    fewer: float | None = None
    spread: float = SPREAD


class Latents(NamedTuple):
    """Mean [Q, C] and covariance between the classes [Q, C, C] of the latent functions at every query."""

    mean: Float[np.ndarray, "Q C"]
    covariance: Float[np.ndarray, "Q C C"]

    @property
    def variance(self) -> Float[np.ndarray, "Q C"]:
        """Variances alone."""
        return np.diagonal(self.covariance, axis1=1, axis2=2)


class Kept(NamedTuple):
    """What a fitted task is made again from: inputs [N, ...], labels and groups [N], key, temperatures [G]."""

    inputs: Shaped[np.ndarray, "N ..."]
    y: Int[np.ndarray, " N"]
    groups: Int[np.ndarray, " N"]
    key: Shaped[np.ndarray, " K"]
    temperatures: Float[np.ndarray, " G"]
    weights: Float[np.ndarray, " G"]


@dataclass(frozen=True, eq=False)
class FittedTask:
    """A learner that was conditioned on inputs [N, ...] with labels y [N] in 0..classes-1.

    groups: 0..M-1 of the inputs, whose means the learner is shown; each by itself where classes are alike. examples: a
    class has so many for the learner's prior. state is that of the padded task; code is the inference's result code.
    """

    learner: Learner
    key: Key[Array, ""]
    inputs: Shaped[np.ndarray, "N ..."]
    y: Int[np.ndarray, " N"]
    groups: Int[np.ndarray, " N"]
    classes: int
    examples: float
    temperatures: TemperatureMixture
    state: PyTree
    code: Code

    @property
    def kept(self) -> Kept:
        """What `restored` needs beside the learner."""
        key, mixture = np.asarray(jax.random.key_data(self.key)), self.temperatures
        return Kept(
            self.inputs, self.y, self.groups, key, np.asarray(mixture.temperatures), np.asarray(mixture.weights)
        )

    def probabilities(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, "Q C"]:
        """Class probabilities of new inputs, averaged over temperatures (T4).

        No query depends on the others, unless the learner is transductive. Raises InferenceFailedError.
        """
        if not len(new):
            return np.empty((0, self.classes), jnp.result_type(float))
        parts = self._answers(_predicted, (), PREDICTION, new)
        if any(code == Code.NON_FINITE for _, code in parts):
            raise InferenceFailedError("a prediction is not finite; check the examples, or try another inference")
        real = [jnp.asarray(np.asarray(part)[:, : self.classes]) for part, _ in parts]
        return np.concatenate([np.asarray(self.temperatures.temper(part)) for part in real])[: len(new)]

    def latents(self, new: Shaped[np.ndarray, "Q ..."]) -> Latents:
        """Mean and covariance of f at new inputs under q(f), which no temperature touches.

        Of a mixture of Gaussians they are those of the mixture. Raises TypeError for a learner without a posterior.
        """
        self._require_posterior()
        if not len(new):
            empty = np.empty((0, self.classes, self.classes), jnp.result_type(float))
            return Latents(empty[:, 0], empty)
        parts = self._answers(_latents, (self.classes,), INFORMATION, new)
        mean, covariance = (
            np.concatenate([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*parts, strict=True)
        )
        return Latents(mean[: len(new)], covariance[: len(new)])

    def information(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"]:
        """I(label; f) in nats at new inputs: what learning f would tell of the label.

        Raises TypeError for a learner without a posterior.
        """
        self._require_posterior()
        if not len(new):
            return np.empty(0, jnp.result_type(float))
        parts = self._answers(_information, (self.classes,), INFORMATION, new)
        return np.concatenate([np.asarray(part) for part in parts])[: len(new)]

    def unknown(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"]:
        """How little new inputs look like the task's: `strangeness` of `evaluation/out_of_episode.py`.

        Raises InferenceFailedError.
        """
        if not len(new):
            return np.empty(0, jnp.result_type(float))
        own = _padded_task(self.learner, self.inputs, self.y, self.classes)
        labelled = Labelled(jnp.asarray(own.inputs), jnp.asarray(own.y), own.mask.points)
        ways = padding(number_of(self.groups), self.classes, self.learner.traits)[1]
        parts = self._answers(_strange, (ways,), PREDICTION, new, labelled)
        found = np.concatenate([np.asarray(part) for part in parts])[: len(new)]
        if np.isnan(found).any():
            raise InferenceFailedError("a score is not a number; check the examples, or try another inference")
        return found

    def unknown_p_values(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"] | None:
        """(U1) p-values that new inputs show one of the task's classes; None where no class has two labelled inputs."""
        return None if self.left_out is None else p_values(self.unknown(new), self.left_out.scores)

    @cached_property
    def left_out(self) -> LeftOut | None:
        """What is found of the labelled inputs, each without itself; None where no class has two."""
        own = _padded_task(self.learner, self.inputs, self.y, self.classes)
        key, real = jax.random.fold_in(self.key, UNKNOWN), np.asarray(own.mask.points)
        without = _without(self.learner, self.inputs, self.y, self.groups, self.classes)
        with one_blas_thread(len(self.y)):
            return each_left_out(key, self.learner, own.inputs, own.y, real, without)

    def with_labels(
        self,
        inputs: Shaped[np.ndarray, "K ..."],
        y: Int[np.ndarray, " K"],
        groups: Int[np.ndarray, " all"] | None = None,
    ) -> "FittedTask":
        """The same task with K more labelled inputs of its classes, at the prior and the temperatures that it has.

        groups: of all N + K inputs, those that it has first; None: of these as they are, each new one by itself.
        """
        if groups is None:
            groups = np.concatenate([self.groups, number_of(self.groups) + np.arange(len(y))])
        inputs, y = np.concatenate([self.inputs, inputs]), np.concatenate([self.y, y])
        state, code = _conditioned(self.learner, self.key, inputs, y, groups, self.classes, self.examples)
        return replace(self, inputs=inputs, y=y, groups=groups, state=state, code=code)

    def _answers(
        self, question: Callable[..., PyTree], static: tuple, number: int, new: np.ndarray, *more: PyTree
    ) -> list[PyTree]:
        """What a question says of each chunk of new inputs, the last one filled up, and of what is the same for all."""
        key = jax.random.fold_in(self.key, number)
        size = len(new) if self.learner.traits.transductive else CHUNK
        with one_blas_thread(len(self.y)):
            parts = [
                apply(question, self.learner, static, key, self.state, padded(new[start : start + size], size), *more)
                for start in range(0, len(new), size)
            ]
            return jax.block_until_ready(parts)

    def _require_posterior(self) -> None:
        if not isinstance(self.learner, LatentLearner):
            name = type(self.learner).__name__
            raise TypeError(f"expected a learner with a posterior of latent functions, got {name}; try GaussianProcess")


def fit_task(
    learner: Learner,
    key: Key[Array, ""],
    inputs: Shaped[np.ndarray, "N ..."],
    y: Int[np.ndarray, " N"],
    classes: int,
    temperature: TemperaturePrior,
    groups: Int[np.ndarray, " N"] | None = None,
) -> FittedTask:
    """Condition a learner on inputs [N, ...] with labels y [N], and learn the task's temperature where that is open.

    groups: 0..M-1 of the inputs, whose means are shown to the learner, as `groups_of` finds them; None: each input by
    itself. Raises ValueError for a number of classes that the learner cannot tell apart; InferenceFailedError.
    """
    if learner.ways not in (None, classes):
        raise ValueError(f"expected {learner.ways} classes, which this learner tells apart, got {classes}")
    groups = np.arange(len(y)) if groups is None else groups
    examples = number_of(groups) / classes
    state, code = _conditioned(learner, key, inputs, y, groups, classes, examples)
    if temperature.fewer is None or np.bincount(y).max() < 2:
        temperatures = single(temperature.own)
    else:
        _, ways, mask = padding(number_of(groups), classes, learner.traits)
        own = _padded_task(learner, inputs, y, classes)
        without, known = _without(learner, inputs, y, groups, classes), tuple(temperature)
        mask = mask._replace(points=own.mask.points)
        with one_blas_thread(len(y)):
            temperatures = apply(_own_temperature, learner, (ways,), key, own.inputs, own.y, mask, without, known)
            jax.block_until_ready(temperatures)
    return FittedTask(learner, key, inputs, y, groups, classes, examples, temperatures, state, code)


def restored(learner: Learner, classes: int, kept: Kept) -> FittedTask:
    """The task that was kept, conditioned on again. Raises InferenceFailedError."""
    key = jax.random.wrap_key_data(jnp.asarray(kept.key))
    examples = number_of(kept.groups) / classes
    state, code = _conditioned(learner, key, kept.inputs, kept.y, kept.groups, classes, examples)
    mixture = TemperatureMixture(jnp.asarray(kept.temperatures), jnp.asarray(kept.weights))
    return FittedTask(learner, key, kept.inputs, kept.y, kept.groups, classes, examples, mixture, state, code)


def embed(learner: Learner, images: Shaped[np.ndarray, "*N"]) -> Shaped[np.ndarray, "N ..."]:
    """Inputs [N, ...] of images [N, H, W, Ch], CHUNK images at a time.

    Raises ValueError for images of another shape than the learner's, and for those that `check_images` refuses.
    """
    shape = learner.image_shape
    if holds_features(shape) and images.ndim == 4 and images.shape[1:3] == (1, 1) and images.shape[3] != shape[2]:
        got = f"{images.shape[3]} a row"
        raise ValueError(f"expected features [N, {shape[2]}], got {got}; use the encoder that this was trained on")
    if images.ndim != 4 or images.shape[1:] != shape:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"expected images [N, {wanted}], got shape {images.shape}; resize them, or add the first axis")
    check_images(images, "the images")
    blank = images if len(images) else np.zeros((1, *shape), np.uint8)
    return np.asarray(embed_images(learner, blank, chunk=CHUNK))[: len(images)]


def draws_for(points: int, classes: int) -> int:
    """DRAWS, or half as often as needed for the logits of all labelled examples to fit into MOST_NUMBERS."""
    draws = DRAWS
    while draws > FEWEST_DRAWS and draws * points * classes > MOST_NUMBERS:
        draws //= 2
    return draws


def bucket(points: int, classes: int) -> tuple[int, int]:
    """Points and classes to pad a task to: 8, 16 or a multiple of 32 points, and where those are few 5 classes."""
    size = next((size for size in (8, 16) if points <= size), -(-points // 32) * 32)
    return size, max(classes, FEW_CLASSES) if points <= FEW_POINTS else classes


def padding(points: int, classes: int, traits: Traits) -> tuple[int, int, Mask]:
    """The bucket of a task, and what is real in it; all of it where a learner's traits forbid padding."""
    whole = traits.transductive or not traits.padded
    most_points, most_classes = (points, classes) if whole else bucket(points, classes)
    real = np.arange(most_points) < points, np.arange(most_classes) < classes
    return most_points, most_classes, Mask(*map(jnp.asarray, real))


class PaddedTask(NamedTuple):
    """The number of classes of a padded task; its inputs, its labels, and what is real in it."""

    ways: int
    inputs: Shaped[np.ndarray, "P ..."]
    y: Int[np.ndarray, " P"]
    mask: Mask


def _padded_task(learner: Learner, inputs: np.ndarray, y: np.ndarray, classes: int) -> PaddedTask:
    points, ways, present = padding(len(inputs), classes, learner.traits)
    return PaddedTask(ways, padded(inputs, points), padded(y.astype(np.int32), points), present)


def _shown(learner: Learner, inputs: np.ndarray, y: np.ndarray, groups: np.ndarray, classes: int) -> PaddedTask:
    """What the learner sees of a task."""
    return _padded_task(learner, *shown(inputs, y, groups), classes)


def _without(learner: Learner, inputs: np.ndarray, y: np.ndarray, groups: np.ndarray, classes: int) -> Without | None:
    """The tasks without each fold, None where each input is shown by itself: then these are parts of the whole."""
    number = number_of(groups)
    if number == len(y):
        return None
    points, rows = (padding(count, classes, learner.traits)[0] for count in (number, len(y)))
    return without_each(inputs, y, points, rows)


def _conditioned(
    learner: Learner,
    key: Key[Array, ""],
    inputs: np.ndarray,
    y: np.ndarray,
    groups: np.ndarray,
    classes: int,
    examples: float,
) -> tuple[PyTree, Code]:
    ways, means, labels, mask = _shown(learner, inputs, y, groups, classes)
    with one_blas_thread(len(y)):
        state, code = apply(_fitted, learner, (ways,), key, means, labels, mask._replace(examples=examples))
        jax.block_until_ready(state)
    if code == Code.NON_FINITE:
        raise InferenceFailedError("the posterior is not finite; check the examples, or try another inference")
    return state, Code(int(code))


def _fitted(learner: Learner, classes: int, key: Array, inputs: Array, y: Array, mask: Mask) -> PyTree:
    return learner.fit(key, inputs, y, classes, mask)


def _own_temperature(
    learner: Learner,
    classes: int,
    key: Array,
    inputs: Array,
    y: Array,
    mask: Mask,
    without: Without | None,
    known: tuple[Array, Array, Array],
) -> TemperatureMixture:
    own, fewer, spread = known
    return task_temperature(key, learner, inputs, y, classes, own, fewer, mask, spread=spread, without=without)


def _predicted(learner: Learner, key: Array, state: PyTree, query: Array) -> tuple[Array, Array]:
    found = learner.predict(key, state, query)
    return found.probabilities, found.code


def _strange(
    learner: Learner, classes: int, key: Array, state: PyTree, query: Array, labelled: Labelled
) -> Float[Array, " Q"]:
    return strangeness(key, learner, state, labelled, classes, query)


def _real_marginals(learner: LatentLearner, classes: int, state: PyTree, query: Array) -> AnyMarginals:
    """Marginals of f of the real classes, which come first, with an axis over the components of a mixture."""
    marginals = state.posterior.predict(learner.latent_query(state, query))
    if marginals.mean.ndim == 2:
        marginals = jax.tree.map(lambda leaf: leaf[None], marginals)
    mean, spread = marginals  # variances [M, C, Q], or covariances [M, Q, C, C]
    if spread.ndim == 3:
        return Marginals(mean[:, :classes], spread[:, :classes])
    return JointMarginals(mean[:, :classes], spread[:, :, :classes, :classes])


def _latents(learner: LatentLearner, classes: int, key: Array, state: PyTree, query: Array) -> tuple[Array, Array]:
    """Mean [Q, C] and covariance [Q, C, C]: E V + Cov E over the components of a mixture."""
    del key
    marginals = _real_marginals(learner, classes, state, query)
    means = jnp.swapaxes(marginals.mean, 1, 2)
    mean = means.mean(axis=0)
    inside = jax.vmap(lambda one: one.covariance_blocks())(marginals).mean(axis=0)
    between = jnp.einsum("mqc,mqd->qcd", means - mean, means - mean, precision="highest") / len(means)
    return mean, inside + between


def _information(learner: LatentLearner, classes: int, key: Array, state: PyTree, query: Array) -> Array:
    return mutual_information(key, learner.likelihood, _real_marginals(learner, classes, state, query))
