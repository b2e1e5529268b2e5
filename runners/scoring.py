"""Scores on fixed episodes: every image of a split is embedded once, then episodes are solved on its features.

In evaluation mode an image's features do not depend on its episode. Network and episodes are dispatched in chunks of a
fixed size, padded at the end, so that nothing is compiled twice and no result depends on how the work was divided.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import tasks
from evaluation import metrics
from evaluation.calibration import fit_temperature, for_new_classes
from evaluation.out_of_episode import DetectionScores, solve_open
from inference.inner.base import Code, settle
from inference.predictive import predict
from inference.task_temperature import FOLDS, SPREAD, TemperatureMixture, single, task_temperature
from models.deep_kernel import DeepKernel
from models.gaussian import Query
from models.process import LatentProcess
from runners.build import Model
from runners.configuration import HELD_OUT
from runners.data import Episodes
from tasks import Dataset, TaskIndices

PIXELS_A_CHUNK = 200_000  # of images embedded at once: some 100 MB inside Conv4
NUMBERS_A_BLOCK = 10_000_000  # of draws of logits at once: 40 MB


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

    def accuracies(self) -> dict[str, Any]:
        """Accuracy and its interval alone (None of one episode), for predictions without meaningful probabilities."""
        half_width = metrics.accuracy_ci95(self.probabilities, self.labels)
        return {
            "accuracy": metrics.accuracy(self.probabilities, self.labels),
            "accuracy_ci95": half_width if np.isfinite(half_width) else None,
        }

    def summary(self, batches: int = 5) -> dict[str, Any]:
        """All metrics, with a fixed random generator for the floor of the ECE."""
        return metrics.summarise(np.random.default_rng(0), self.probabilities, self.labels, batches=batches)


def failures(codes: np.ndarray) -> dict[str, int]:
    """Episodes by result code [E], those that went well left out."""
    counts = {code.name.lower(): int((codes == code).sum()) for code in Code if code != Code.OK}
    return {name: count for name, count in counts.items() if count}


def embed(deep_kernel: DeepKernel, dataset: Dataset) -> Float[Array, "RI D"]:
    """Features of `flat_images(dataset)` in evaluation mode."""
    return embed_images(deep_kernel, tasks.flat_images(dataset))


def embed_images(deep_kernel: DeepKernel, images: Array, chunk: int | None = None) -> Float[Array, "I D"]:
    """Features [I, D] of images [I, H, W, Ch] in evaluation mode, `chunk` images at a time."""
    graph, state = nnx.split(deep_kernel)
    height, width = images.shape[1:3]
    size = chunk or max(8, PIXELS_A_CHUNK // (height * width))
    parts = [_embed(graph, state, rows(images, start, size)) for start in range(0, len(images), size)]
    return jnp.concatenate(parts)[: len(images)]


@partial(jax.jit, static_argnums=0)
def _embed(graph: Any, state: Any, images: Array) -> Array:
    return nnx.merge(graph, state).features(images)


def score(
    model: Model,
    features: Float[Array | np.ndarray, "I D"],
    episodes: Episodes,
    block: int | None = None,
    latent_temperature: float = 1.0,
) -> Scores:
    """Solve the episodes on features of their split and predict, `block` episodes at a time, at temperature 1.

    A latent temperature t other than 1 predicts from f / t; the inference does not know of it.
    """
    start = time.perf_counter()
    solve = partial(_solve, *_fixed(model, episodes), latent_temperature)
    features = np.asarray(features)

    def answer(part: TaskIndices, keys: Array) -> tuple[Array, Array]:
        return solve(features[part.x_support], part.y_support, features[part.x_query], keys)

    probabilities, codes = _chance_where_failed(*_in_blocks(answer, episodes, block))
    return Scores(probabilities, np.asarray(episodes.indices.y_query), codes, time.perf_counter() - start)


def score_open(
    model: Model, features: Float[Array | np.ndarray, "I D"], episodes: Episodes, block: int | None = None
) -> tuple[DetectionScores, DetectionScores, np.ndarray]:
    """Out-of-episode scores of own queries [E, Q] and of those of other classes [E, O], and result codes [E]."""
    solve = partial(solve_open, *_fixed(model, episodes))
    features = np.asarray(features)

    def answer(part: TaskIndices, keys: Array) -> Any:
        return solve(features[part.x_support], part.y_support, features[part.x_query], features[part.x_other], keys)

    return _in_blocks(answer, episodes, block)


def _fixed(model: Model, episodes: Episodes) -> tuple[Any, ...]:
    """What the programs that solve a block take first: all that is common to the episodes."""
    kernel, hyper = model.deep_kernel.kernel, model.deep_kernel.hyperparameters()
    return model.make_inference, kernel, episodes.shape.way, hyper, model.likelihood


def _in_blocks(answer: Callable[[TaskIndices, Array], Any], episodes: Episodes, block: int | None) -> Any:
    """Leaves [E, ...] of answer(indices, keys) over all episodes, `block` of them at a time, on the host."""
    count, (way, _, query) = len(episodes.keys), episodes.shape
    queries = way * query + episodes.indices.x_other.shape[1]
    size = block or max(1, min(50, count, NUMBERS_A_BLOCK // (512 * way * queries)))
    positions = jax.device_get(episodes.indices)  # on the host, where taking a block compiles nothing
    parts = [answer(*rows((positions, episodes.keys), first, size)) for first in range(0, count, size)]
    return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves])[:count], *parts)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _solve(
    make_inference: Any,
    kernel: Any,
    way: int,
    hyper: Any,
    likelihood: Any,
    latent_temperature: Any,
    support: Any,
    y: Any,
    query: Any,
    keys: Any,
) -> tuple[Array, Array]:
    """Probabilities [B, Q, C] and codes [B] of a block of episodes: inference to a tolerance, then prediction."""
    algorithm = make_inference(likelihood)

    def one(support: Array, y: Array, query: Array, key: Array) -> tuple[Array, Array]:
        fit_key, predict_key = jax.random.split(key)
        prior = LatentProcess(kernel, hyper).prior(support, way)
        state, code = settle(fit_key, algorithm, prior, y)
        posterior = algorithm.posterior(state, prior)
        new = _divided(LatentProcess(kernel, hyper).query(support, query, way), latent_temperature)
        return predict(predict_key, likelihood, posterior, new), code

    return jax.vmap(one)(support, y, query, keys)


def _divided(query: Query, by: Array) -> Query:
    """The query of f / by: (G7) is linear in the mean and the cross-covariance."""
    return Query(query.mean / by, query.cross / by, query.variance / by**2)


def task_temperatures(
    model: Model,
    features: Float[Array | np.ndarray, "I D"],
    episodes: Episodes,
    temperature_of_fewer: float,
    block: int | None = None,
    spread: float = SPREAD,
) -> TemperatureMixture:
    """Temperatures and their weights [E, G] of the episodes, each learned from its own labelled images.

    `temperature_of_fewer` is the model's temperature for tasks with one image a class fewer.
    """
    both = model.temperature, temperature_of_fewer
    solve = partial(_solve_temperature, *_fixed(model, episodes), min(FOLDS, episodes.shape.shot), spread, both)
    features = np.asarray(features)

    def answer(part: TaskIndices, keys: Array) -> TemperatureMixture:
        return solve(features[part.x_support], part.y_support, keys)

    return _in_blocks(answer, episodes, block)


@partial(jax.jit, static_argnums=(0, 1, 2, 5))
def _solve_temperature(
    make_inference: Any,
    kernel: Any,
    way: int,
    hyper: Any,
    likelihood: Any,
    folds: int,
    spread: Any,
    temperatures: tuple[Any, Any],
    support: Any,
    y: Any,
    keys: Any,
) -> TemperatureMixture:
    algorithm = make_inference(likelihood)

    def one(support: Array, y: Array, key: Array) -> TemperatureMixture:
        prior = LatentProcess(kernel, hyper).prior(support, way)
        return task_temperature(key, algorithm, likelihood, prior, y, *temperatures, folds=folds, spread=spread)

    return jax.vmap(one)(support, y, keys)


def temperature_of(model: Model, dataset: Dataset, episodes: Episodes) -> float:
    """The one temperature of a model, for classes that it never saw, from `runners.data.calibration_episodes`."""
    scores = score(model, embed(model.deep_kernel, dataset), episodes)
    fitted = fit_temperature(scores.probabilities, scores.labels)
    return fitted if model.config.trainer.temperature_from == HELD_OUT else for_new_classes(fitted)


def _chance_where_failed(probabilities: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Episodes without finite probabilities count as NON_FINITE, and every class as equally probable there."""
    failed = ~np.isfinite(probabilities).all(axis=(1, 2))
    even = np.full((), 1 / probabilities.shape[-1], probabilities.dtype)
    return np.where(failed[:, None, None], even, probabilities), np.where(failed, Code.NON_FINITE, codes)


def rows(tree: Any, start: int, count: int) -> Any:
    """Rows start..start + count - 1 of every array; beyond the end the last one is repeated."""
    return jax.tree.map(lambda array: array[np.minimum(np.arange(start, start + count), len(array) - 1)], tree)
