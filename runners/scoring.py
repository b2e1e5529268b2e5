"""Scores on fixed episodes: every image of a split is embedded once, then episodes are solved on its features.

In evaluation mode an image's features do not depend on its episode. Network and episodes are dispatched in chunks of a
fixed size, padded at the end, so that nothing is compiled twice and no result depends on how the work was divided.
"""

import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import tasks
from evaluation import metrics
from evaluation.calibration import fit_temperature
from inference.inner.base import Code, settle
from inference.predictive import predict, temper
from models.deep_kernel import DeepKernel, gaussian_prior, gaussian_query
from runners.build import Model
from runners.data import Episodes
from tasks import Dataset

PIXELS_A_CHUNK = 200_000  # of images embedded at once: some 100 MB inside Conv4
NUMBERS_A_BLOCK = 10_000_000  # of draws of logits at once: 40 MB


class Scores(NamedTuple):
    """Probabilities [E, Q, C], labels [E, Q], result codes [E] of the inference, and the seconds it took."""

    probabilities: np.ndarray
    labels: np.ndarray
    codes: np.ndarray
    seconds: float

    def tempered(self, temperature: float) -> "Scores":
        """The same at a temperature."""
        return self._replace(probabilities=np.asarray(temper(jnp.asarray(self.probabilities), temperature)))

    def failures(self) -> dict[str, int]:
        """Episodes by result code, those that went well left out."""
        counts = {code.name.lower(): int((self.codes == code).sum()) for code in Code if code != Code.OK}
        return {name: count for name, count in counts.items() if count}

    def accuracies(self) -> dict[str, Any]:
        """Accuracy and its interval alone, for predictions without meaningful probabilities."""
        return {
            "accuracy": metrics.accuracy(self.probabilities, self.labels),
            "accuracy_ci95": metrics.accuracy_ci95(self.probabilities, self.labels),
        }

    def summary(self, batches: int = 5) -> dict[str, Any]:
        """All metrics, with a fixed random generator for the floor of the ECE."""
        return metrics.summarise(np.random.default_rng(0), self.probabilities, self.labels, batches=batches)


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


def score(model: Model, features: Float[Array, "I D"], episodes: Episodes, block: int | None = None) -> Scores:
    """Solve the episodes on features of their split and predict, `block` episodes at a time, at temperature 1."""
    start = time.perf_counter()
    indices, (way, shot, query) = episodes.indices, episodes.shape
    del shot
    count = len(episodes.keys)
    size = block or max(1, min(50, count, NUMBERS_A_BLOCK // (512 * way * way * query)))
    hyper = model.deep_kernel.hyperparameters()
    solve = partial(_solve, model.make_inference, model.deep_kernel.kernel, way, hyper, model.likelihood)
    parts = []
    for first in range(0, count, size):
        part, keys = rows((indices, episodes.keys), first, size)
        parts.append(solve(features[part.x_support], part.y_support, features[part.x_query], keys))
    probabilities, codes = (np.concatenate([np.asarray(part[i]) for part in parts])[:count] for i in (0, 1))
    probabilities, codes = _chance_where_failed(probabilities, codes)
    return Scores(probabilities, np.asarray(indices.y_query), codes, time.perf_counter() - start)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _solve(
    make_inference: Any, kernel: Any, way: int, hyper: Any, likelihood: Any, support: Any, y: Any, query: Any, keys: Any
) -> tuple[Array, Array]:
    """Probabilities [B, Q, C] and codes [B] of a block of episodes: inference to a tolerance, then prediction."""
    algorithm = make_inference(likelihood)

    def one(support: Array, y: Array, query: Array, key: Array) -> tuple[Array, Array]:
        fit_key, predict_key = jax.random.split(key)
        prior = gaussian_prior(kernel, hyper, support, way)
        state, code = settle(fit_key, algorithm, prior, y)
        posterior = algorithm.posterior(state, prior)
        new = gaussian_query(kernel, hyper, support, query, way)
        return predict(predict_key, likelihood, posterior, new), code

    return jax.vmap(one)(support, y, query, keys)


def temperature_of(model: Model, dataset: Dataset, episodes: Episodes) -> float:
    """The one temperature of a model: fitted on queries of training-class episodes, in evaluation mode."""
    scores = score(model, embed(model.deep_kernel, dataset), episodes)
    return fit_temperature(scores.probabilities, scores.labels)


def _chance_where_failed(probabilities: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Episodes without finite probabilities count as NON_FINITE, and every class as equally probable there."""
    failed = ~np.isfinite(probabilities).all(axis=(1, 2))
    even = np.full((), 1 / probabilities.shape[-1], probabilities.dtype)
    return np.where(failed[:, None, None], even, probabilities), np.where(failed, Code.NON_FINITE, codes)


def rows(tree: Any, start: int, count: int) -> Any:
    """Rows start..start + count - 1 of every array; beyond the end the last one is repeated."""
    return jax.tree.map(lambda array: array[np.minimum(np.arange(start, start + count), len(array) - 1)], tree)
