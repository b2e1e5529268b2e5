"""What a trained network must beat: itself untrained, and the nearest neighbour on pixels or given features."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

import tasks
from runners.build import Model
from runners.data import Episodes
from runners.scoring import NUMBERS_A_BLOCK, Scores, rows
from tasks import Dataset, TaskIndices

STATISTICS_TASKS = 50


def with_statistics(model: Model, train: Dataset) -> Model:
    """The model with the batch statistics of training tasks, and nothing learned.

    The initial ones (mean 0, variance 1) would make an untrained network look far worse than it is.
    """
    graph, *states = nnx.split(model.deep_kernel, nnx.Param, ...)
    parameters, statistics = states
    config = model.config
    if not jax.tree.leaves(statistics):
        return model
    for key in jax.random.split(jax.random.key(config.seed), STATISTICS_TASKS):
        statistics = _record(graph, (config.way, config.shot, config.query), parameters, statistics, key, train)
    return replace(model, deep_kernel=nnx.merge(graph, parameters, statistics))


@partial(jax.jit, static_argnums=(0, 1))
def _record(
    graph: Any, sizes: tuple[int, ...], parameters: Any, statistics: Any, key: Key[Array, ""], train: Any
) -> Any:
    task = tasks.sample_task(key, train, *sizes)
    module = nnx.merge(graph, parameters, statistics)
    module(jnp.concatenate([task.x_support, task.x_query])[None], train=True)
    return nnx.state(module, nnx.Not(nnx.Param))


def nearest_neighbour(dataset: Dataset, episodes: Episodes) -> Scores:
    """Every query gets the label of the support image nearest in pixels (Euclidean), with probability 1."""
    start = time.perf_counter()
    images = tasks.flat_images(dataset)
    pixels = images.reshape(len(images), -1).astype(jnp.float32)
    count, (way, _, query) = len(episodes.keys), episodes.shape
    size = max(1, min(50, NUMBERS_A_BLOCK // (way * query * pixels.shape[1])))
    blocks = [rows(episodes.indices, first, size) for first in range(0, count, size)]
    answers = np.concatenate([np.asarray(_nearest(way, pixels, block)) for block in blocks])[:count]
    return Scores(answers, np.asarray(episodes.indices.y_query), np.zeros(count, int), time.perf_counter() - start)


@partial(jax.jit, static_argnums=0)
def _nearest(way: int, pixels: Array, block: TaskIndices) -> Array:
    def one(indices: TaskIndices) -> Array:
        support, query = pixels[indices.x_support], pixels[indices.x_query]
        cross = jnp.matmul(query, support.T, precision=jax.lax.Precision.HIGHEST)
        nearest = jnp.argmin((support**2).sum(-1) - 2 * cross, axis=1)
        return jax.nn.one_hot(indices.y_support[nearest], way)

    return jax.vmap(one)(block)
