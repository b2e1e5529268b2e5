"""Scores on fixed episodes: every image of a split is embedded once, then episodes are solved on its features.

In evaluation mode an image's features do not depend on its episode. Network and episodes are dispatched in chunks of a
fixed size, padded at the end, so that nothing is compiled twice and no result depends on how the work was divided.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, PyTree, Shaped

from fewshot import tasks
from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature, for_new_classes
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.resampling import plain_interval
from fewshot.evaluation.text import Json
from fewshot.inference.inner.base import Code
from fewshot.inference.predictive import predict
from fewshot.learners.base import LatentLearner, Learner, apply, solve
from fewshot.learners.task_temperature import FOLDS, SPREAD, TemperatureMixture, single, task_temperature
from fewshot.tasks import Dataset, TaskIndices

PIXELS_A_CHUNK = 200_000  # of images embedded at once: some 100 MB inside Conv4
IMAGES_A_CHUNK = 2048  # of features, which have one pixel
NUMBERS_A_BLOCK = 10_000_000  # of draws of logits at once: 40 MB
WARNINGS = (Code.NOT_MIXED.name.lower(),)  # codes of episodes whose predictions are used all the same
BATCHES = 5  # of episodes, for the standard deviation that papers print


class Scores(NamedTuple):
    """Probabilities [E, Q, C], labels [E, Q], result codes [E] of the inference, and the seconds it took."""

    probabilities: np.ndarray
    labels: np.ndarray
    codes: np.ndarray
    seconds: float

    def tempered(self, temperature: float | TemperatureMixture) -> "Scores":
        """The same at a temperature, or averaged over those of each episode [E, G]."""
        each = temperature if isinstance(temperature, TemperatureMixture) else single(temperature)
        return self._replace(probabilities=np.asarray(each.temper(jnp.asarray(self.probabilities))))

    def failures(self) -> dict[str, int]:
        """Episodes by result code, those that went well left out."""
        return failures(self.codes)

    def accuracies(self) -> Metrics:
        """Accuracy and its interval alone (None of one episode), for predictions without meaningful probabilities."""
        half_width = metrics.accuracy_ci95(self.probabilities, self.labels)
        return {
            "accuracy": metrics.accuracy(self.probabilities, self.labels),
            "accuracy_ci95": half_width if np.isfinite(half_width) else None,
        }

    def validation(self) -> dict[str, float]:
        """What a row of the training log says."""
        return {
            "validation_accuracy": metrics.accuracy(self.probabilities, self.labels),
            "validation_nll": metrics.nll(self.probabilities, self.labels),
        }

    def summary(self, batches: int = BATCHES) -> Metrics:
        """All metrics, with a fixed random generator for the floor of the ECE."""
        return metrics.summarise(np.random.default_rng(0), self.probabilities, self.labels, batches=batches)


class Summary(NamedTuple):
    """All metrics by name, and the 95% intervals of those that have one; None of one episode."""

    metrics: Metrics
    intervals: dict[str, list[float] | None]

    def to_json(self) -> dict[str, Json]:
        """What a JSON file holds: the metrics, and the intervals beside them."""
        return {**self.metrics, "intervals": self.intervals}


def summary_with_intervals(scores: Scores, batches: int) -> Summary:
    """All metrics with their intervals; 0 batches stand for BATCHES, or as many as there are episodes."""
    found = metrics.intervals(np.random.default_rng(0), scores.probabilities, scores.labels)
    plain = {name: plain_interval(interval) for name, interval in found.items()}
    return Summary(scores.summary(batches or min(BATCHES, len(scores.labels))), plain)


class EmbeddedEpisode(NamedTuple):
    """One episode on the inputs of a learner: support [N, ...], its labels [N], queries, those of other classes."""

    support: Array
    y: Array
    query: Array
    other: Array


# What is asked of one episode: (learner, classes, key, episode, ...) -> arrays.
Question = Callable[..., PyTree]


def failures(codes: Int[np.ndarray, " E"]) -> dict[str, int]:
    """Episodes by result code [E], those that went well left out."""
    counts = {code.name.lower(): int((codes == code).sum()) for code in Code if code != Code.OK}
    return {name: count for name, count in counts.items() if count}


def number_failed(counts: Mapping[str, int]) -> int:
    """Of `failures`, those whose predictions are not to be used: not those with a mere warning."""
    return sum(count for name, count in counts.items() if name not in WARNINGS)


def embed(learner: Learner, dataset: Dataset) -> Shaped[Array, "RI ..."]:
    """Inputs of `flat_images(dataset)`."""
    return embed_images(learner, tasks.flat_images(dataset))


def embed_images(
    learner: Learner, images: Shaped[Array | np.ndarray, "I H W Ch"], chunk: int | None = None
) -> Shaped[Array, "I ..."]:
    """Inputs [I, ...] of images [I, H, W, Ch], `chunk` images at a time."""
    height, width = images.shape[1:3]
    size = chunk or max(8, min(IMAGES_A_CHUNK, PIXELS_A_CHUNK // (height * width)))
    parts = [apply(_embed, learner, (), rows(images, start, size)) for start in range(0, len(images), size)]
    return jnp.concatenate(parts)[: len(images)]


def _embed(learner: Learner, images: Array) -> Array:
    return learner.embed(images)


def score(
    learner: Learner,
    features: Shaped[Array | np.ndarray, "I ..."],
    episodes: Episodes,
    block: int | None = None,
    latent_temperature: float | None = None,
) -> Scores:
    """Solve the episodes on inputs of their split and predict, `block` episodes at a time, at temperature 1.

    A latent temperature t predicts from f / t; the inference does not know of it, and the learner must be a
    LatentLearner.
    """
    start = time.perf_counter()
    if latent_temperature is None:
        answers = in_blocks(_solved, learner, features, episodes, block)
    else:
        answers = in_blocks(_solved_at, learner, features, episodes, block, latent_temperature)
    probabilities, codes = _chance_where_failed(*answers)
    return Scores(probabilities, np.asarray(episodes.indices.y_query), codes, time.perf_counter() - start)


def _solved(learner: Learner, classes: int, key: Key[Array, ""], episode: EmbeddedEpisode) -> tuple[Array, Array]:
    """Class probabilities [Q, C] and code: inference to a tolerance, then prediction."""
    found = solve(learner, key, episode.support, episode.y, episode.query, classes)
    return found.probabilities, found.code


def _solved_at(
    learner: LatentLearner, classes: int, key: Key[Array, ""], episode: EmbeddedEpisode, temperature: Array
) -> tuple[Array, Array]:
    """The same from f / temperature."""
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, episode.support, episode.y, classes)
    new = learner.latent_query(state, episode.query).divided(temperature)
    return predict(predict_key, learner.likelihood, state.posterior, new), code


def in_blocks(
    question: Question,
    learner: Learner,
    features: Shaped[Array | np.ndarray, "I ..."],
    episodes: Episodes,
    block: int | None,
    *given: PyTree,
) -> PyTree:
    """Leaves [E, ...] of question(learner, classes, key, episode, *given) over all episodes, on the host.

    `block` episodes at a time, compiled once; a learner that JAX cannot trace answers them one by one.
    """
    count, (way, _, query) = len(episodes.keys), episodes.shape
    queries = way * query + episodes.indices.x_other.shape[1]
    positions = jax.device_get(episodes.indices)  # on the host, where taking a block compiles nothing
    inputs = np.asarray(features)
    # Numbers of draws, and pixels where the inputs are images, which pass a network that adapts to its episode.
    pixels = (positions.x_support.shape[1] + queries) * math.prod(inputs.shape[1:-1])
    size = block or max(1, min(50, count, NUMBERS_A_BLOCK // (512 * way * queries), PIXELS_A_CHUNK // pixels))
    if not learner.traits.traceable:
        size = 1

    def answer(first: int) -> PyTree:
        part, keys = rows((positions, episodes.keys), first, size)
        return apply(_block, learner, (question, way), keys, _embedded(inputs, part), given)

    parts = [answer(first) for first in range(0, count, size)]
    return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves])[:count], *parts)


def _embedded(inputs: np.ndarray, part: TaskIndices) -> EmbeddedEpisode:
    return EmbeddedEpisode(inputs[part.x_support], part.y_support, inputs[part.x_query], inputs[part.x_other])


def _block(
    learner: Learner, question: Question, classes: int, keys: Array, episodes: EmbeddedEpisode, given: tuple
) -> PyTree:
    """The answers [B, ...] of a block of episodes."""
    if learner.traits.traceable:
        return learner.for_tasks(lambda key, episode: question(learner, classes, key, episode, *given))(keys, episodes)
    alone = question(learner, classes, keys[0], jax.tree.map(lambda leaf: leaf[0], episodes), *given)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], alone)


def task_temperatures(
    learner: Learner,
    features: Shaped[Array | np.ndarray, "I ..."],
    episodes: Episodes,
    temperature: float,
    temperature_of_fewer: float,
    block: int | None = None,
    spread: float = SPREAD,
) -> TemperatureMixture:
    """Temperatures and their weights [E, G] of the episodes, each learned from its own labelled images.

    `temperature` is that for tasks of their shape, `temperature_of_fewer` for those with one image a class fewer.
    """
    question = _TaskTemperature(min(FOLDS, episodes.shape.shot))
    return in_blocks(question, learner, features, episodes, block, spread, temperature, temperature_of_fewer)


@dataclass(frozen=True)
class _TaskTemperature:
    """The question of `task_temperatures`; equal ones are compiled once."""

    folds: int

    def __call__(
        self,
        learner: Learner,
        classes: int,
        key: Key[Array, ""],
        episode: EmbeddedEpisode,
        spread: Array,
        temperature: Array,
        temperature_of_fewer: Array,
    ) -> TemperatureMixture:
        both = temperature, temperature_of_fewer
        return task_temperature(
            key, learner, episode.support, episode.y, classes, *both, folds=self.folds, spread=spread
        )


def temperature_of(learner: Learner, dataset: Dataset, episodes: Episodes, *, raised: bool) -> float:
    """The one temperature of a learner, fitted on such episodes.

    raised: for classes that it never saw, from those that it was trained on.
    """
    scores = score(learner, embed(learner, dataset), episodes)
    fitted = fit_temperature(scores.probabilities, scores.labels)
    return for_new_classes(fitted) if raised else fitted


def _chance_where_failed(probabilities: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Episodes without finite probabilities count as NON_FINITE, and every class as equally probable there."""
    failed = ~np.isfinite(probabilities).all(axis=(1, 2))
    even = np.full((), 1 / probabilities.shape[-1], probabilities.dtype)
    return np.where(failed[:, None, None], even, probabilities), np.where(failed, Code.NON_FINITE, codes)


def rows(tree: PyTree, start: int, count: int) -> PyTree:
    """Rows start..start + count - 1 of every array; beyond the end the last one is repeated."""
    return jax.tree.map(lambda array: array[np.minimum(np.arange(start, start + count), len(array) - 1)], tree)
