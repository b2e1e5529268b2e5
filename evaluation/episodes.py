"""Fixed episodes of a split, drawn by a function of (seed, split)."""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from fewshot import tasks
from fewshot.tasks import Dataset, TaskIndices

SPLITS = ("train", "validation", "test")
EVALUATION_SEED = 0  # validation and test episodes are the same for every run
TEST_QUERIES = 15  # a class: this many, or what the smallest class has left


class Shape(NamedTuple):
    """Size of a task: classes, labelled images a class, queries a class."""

    way: int
    shot: int
    query: int


class Episodes(NamedTuple):
    """Fixed episodes of one split: positions [E, ...] into `flat_images`, and a key [E] each for the inference."""

    shape: Shape
    indices: TaskIndices
    keys: Key[Array, " E"]


def queries(dataset: Dataset, shot: int, wanted: int = TEST_QUERIES) -> int:
    """As many queries a class as wanted, or as its smallest class has left (at least 1, which may not fit)."""
    return max(1, min(wanted, dataset.smallest - shot))


def draw_episodes(
    seed: int, split: str, dataset: Dataset, shape: Shape, count: int, other_classes: int = 0
) -> Episodes:
    """`count` episodes, with as many queries of each of `other_classes`; the first n are the same for every count.

    Raises DataError.
    """
    tasks.check_task_size(dataset, *shape, other_classes)
    base = jax.random.fold_in(jax.random.key(seed), SPLITS.index(split))
    task_key, inference_key = jax.random.split(base)

    # It runs once: compiling it well would take longer than running it does.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def draw(numbers: Array) -> tuple[TaskIndices, Array]:
        def one(number: Array) -> tuple[TaskIndices, Array]:
            indices = tasks.sample_indices(jax.random.fold_in(task_key, number), dataset, *shape, other_classes)
            return indices, jax.random.fold_in(inference_key, number)

        return jax.vmap(one)(numbers)

    return Episodes(shape, *draw(np.arange(count)))
