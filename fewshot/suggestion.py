"""What to label next: the examples of a pool whose labels are expected to tell most of the latent functions.

The information of k labels is a sum by the chain rule,

    I(y_1, ..., y_k; f) = sum_j E_{y_1, ..., y_{j-1}} I(y_j; f | y_1, ..., y_{j-1}),

every term of which is the mutual information of one label after the earlier ones were seen. They are not seen yet: a
*path* is one outcome of them, with its probability, and a task that was conditioned on it too. All outcomes are kept
while there are at most PATHS, a sample of them after that. Greedy: every x_j maximises its own term. As labels are
independent given f, a term only falls as labels are added, so that what was found earlier bounds it from above, and
only examples with large bounds are looked at again.
Letters: P examples of the pool, C classes, k to be chosen.
"""

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from fewshot.conditioning import CHUNK, FittedTask
from fewshot.learners.task_temperature import single

PATHS = 16  # outcomes of the labels chosen so far that are followed
PATH_NUMBER = 4  # of the key that samples outcomes; `conditioning` has those before it


class Path(NamedTuple):
    """One outcome of the labels chosen so far: its probability, and the task that was conditioned on it."""

    weight: float
    task: FittedTask


def suggested(
    task: FittedTask, pool: Shaped[np.ndarray, "P ..."], k: int
) -> tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Positions in the pool [k], and the expected information of each label after the earlier ones, in nats [k].

    The model's own probabilities are meant, at temperature 1. Raises ValueError for a k beyond 1..P.
    """
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(pool):
        raise ValueError(f"expected k from 1 to the {len(pool)} examples of the pool, got {k}")
    start = replace(task, temperatures=single(1.0))
    paths, bounds = [Path(1.0, start)], np.full(len(pool), np.inf)
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.fold_in(task.key, PATH_NUMBER))))
    chosen: list[int] = []
    found: list[float] = []
    for step in range(k):
        best = _most_informative(paths, pool, bounds)
        chosen.append(best)
        found.append(float(bounds[best]))
        bounds[best] = -np.inf
        if step + 1 < k:
            paths = extended(paths, pool[best : best + 1], random)
    return np.array(chosen), np.array(found)


def _most_informative(paths: list[Path], pool: np.ndarray, bounds: np.ndarray) -> int:
    """The position of the largest term; bounds that had to be looked at become the terms themselves."""
    order, best = np.argsort(-bounds, kind="stable"), -np.inf
    for first in range(0, len(order), CHUNK):
        some = order[first : first + CHUNK]
        some = some[bounds[some] > -np.inf]
        if not len(some) or bounds[some[0]] <= best:
            break
        bounds[some] = sum(path.weight * path.task.information(pool[some]) for path in paths)
        best = max(best, bounds[some].max())
    return int(np.argmax(bounds))


def extended(paths: list[Path], x: Shaped[np.ndarray, "1 ..."], random: np.random.Generator) -> list[Path]:
    """The outcomes after one more label, of the example x [1, ...]: all of them, or PATHS that are drawn.

    They are drawn at even distances of the cumulative probability, so that each is expected as often as it is probable.
    """
    each = np.array([path.weight * path.task.probabilities(x)[0].astype(np.float64) for path in paths])
    weights = (each / each.sum()).ravel()
    if len(weights) > PATHS:
        ends = np.cumsum(weights)
        drawn = np.searchsorted(ends / ends[-1], (random.random() + np.arange(PATHS)) / PATHS)
        weights = np.bincount(drawn, minlength=len(weights)) / PATHS
    return [
        Path(weights[number], paths[number // each.shape[1]].task.with_labels(x, label))
        for number in np.flatnonzero(weights)
        for label in (np.array([number % each.shape[1]], np.int32),)
    ]
