"""What to label next: the examples of a pool that a task's answers are least decided about, or that tell it most.

Two utilities of an example, each larger where it is the better one to ask for:

    margin       1 - E (p_1 - p_2), p_1 and p_2 its largest class probabilities (Scheffer, Decomain, Wrobel 2001):
                 1 where two classes are level
    information  E I(y; f), the mutual information of its label and the latent functions, in nats (Houlsby et al. 2011)

Expectations are over the labels that the examples chosen before it may get. These are not seen yet: a *path* is one
outcome of them, with its probability, and a task that was conditioned on it too. All outcomes are kept while there are
at most PATHS, a sample of them after that. Greedy: every next example has the largest utility. So two examples that are
alike are not both chosen: the label of one would decide the other.

The information of k labels is the sum of their terms, by the chain rule,

    I(y_1, ..., y_k; f) = sum_j E_{y_1, ..., y_{j-1}} I(y_j; f | y_1, ..., y_{j-1}).

As labels are independent given f, a term only falls as labels are added, so that what was found earlier bounds it from
above, and only examples with large bounds are looked at again. The utility of a margin can rise: all are looked at, at
once, for the answers of a transductive learner depend on the pool.
Letters: P examples of the pool, C classes, k to be chosen.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from fewshot.conditioning import CHUNK, FittedTask
from fewshot.groups import groups_of, order_of
from fewshot.learners.task_temperature import single

PATHS = 16  # outcomes of the labels chosen so far that are followed
PATH_NUMBER = 4  # of the key that samples outcomes; `conditioning` has those before it

Pool = Shaped[np.ndarray, "P ..."]


class Path(NamedTuple):
    """One outcome of the labels chosen so far: its probability, and the task that was conditioned on it."""

    weight: float
    task: FittedTask


class Utility(NamedTuple):
    """of(task, pool) is [P].

    only_falls: no label raises it, on average over what the label may be. of_model: it is that of the model itself, at
    temperature 1 and with each label shown by itself, not of the answers that the task gives.
    """

    of: Callable[[FittedTask, Pool], Float[np.ndarray, " P"]]
    only_falls: bool
    of_model: bool


def indecision(probabilities: Float[np.ndarray, "P C"]) -> Float[np.ndarray, " P"]:
    """1 - (p_1 - p_2) of the two largest class probabilities."""
    second, first = np.sort(probabilities, axis=1)[:, -2:].T
    return 1.0 - (first - second)


def _indecision(task: FittedTask, pool: Pool) -> Float[np.ndarray, " P"]:
    return indecision(task.probabilities(pool))


MARGIN, INFORMATION = "margin", "information"
UTILITIES: Mapping[str, Utility] = MappingProxyType(
    {
        MARGIN: Utility(_indecision, only_falls=False, of_model=False),
        INFORMATION: Utility(FittedTask.information, only_falls=True, of_model=True),
    }
)


def suggested(
    task: FittedTask, pool: Pool, k: int, by: str = MARGIN, balanced: bool = False
) -> tuple[Int[np.ndarray, " k"], Float[np.ndarray, " k"]]:
    """Positions in the pool [k], and the expected utility of each after the labels of the earlier ones [k].

    Balanced: with each label that may come classes are shown as so many means again, but for a utility of the model.
    Raises ValueError for a k beyond 1..P, and for another name of a utility; TypeError for the information where there
    is no posterior.
    """
    if not isinstance(k, int | np.integer) or not 1 <= k <= len(pool):
        raise ValueError(f"expected k from 1 to the {len(pool)} examples of the pool, got {k}")
    if by not in UTILITIES:
        raise ValueError(f"expected by to be one of {', '.join(UTILITIES)}, got {by!r}")
    utility = UTILITIES[by]
    start = replace(task, temperatures=single(1.0)) if utility.of_model else task
    regroup = balanced and not utility.of_model
    paths, bounds = [Path(1.0, start)], np.full(len(pool), np.inf)
    random = np.random.default_rng(np.asarray(jax.random.key_data(jax.random.fold_in(task.key, PATH_NUMBER))))
    chosen: list[int] = []
    found: list[float] = []
    for step in range(k):
        best = _best(utility, paths, pool, bounds)
        chosen.append(best)
        found.append(float(bounds[best]))
        bounds[best] = -np.inf
        if step + 1 < k:
            paths = extended(paths, pool, best, random, regroup)
    return np.array(chosen), np.array(found)


def _best(utility: Utility, paths: list[Path], pool: Pool, bounds: np.ndarray) -> int:
    """The position of the largest utility; bounds that had to be looked at become the utilities themselves."""
    if not utility.only_falls:
        found = np.sum([path.weight * utility.of(path.task, pool) for path in paths], axis=0)
        bounds[:] = np.where(bounds > -np.inf, found, -np.inf)
        return int(np.argmax(bounds))
    order, best = np.argsort(-bounds, kind="stable"), -np.inf
    for first in range(0, len(order), CHUNK):
        some = order[first : first + CHUNK]
        some = some[bounds[some] > -np.inf]
        if not len(some) or bounds[some[0]] <= best:
            break
        bounds[some] = sum(path.weight * utility.of(path.task, pool[some]) for path in paths)
        best = max(best, bounds[some].max())
    return int(np.argmax(bounds))


def extended(
    paths: list[Path], pool: Pool, position: int, random: np.random.Generator, regroup: bool = False
) -> list[Path]:
    """The outcomes after one more label, of the example at that position: all of them, or PATHS that are drawn.

    They are drawn at even distances of the cumulative probability, so that each is expected as often as it is probable.
    regroup: classes with unlike numbers of examples are made alike again, with the new one among them.
    """
    x = pool[position : position + 1]
    transductive = paths[0].task.learner.traits.transductive
    beside, row = (pool, position) if transductive else (x, 0)
    each = np.array([path.weight * path.task.probabilities(beside)[row].astype(np.float64) for path in paths])
    weights = (each / each.sum()).ravel()
    if len(weights) > PATHS:
        ends = np.cumsum(weights)
        drawn = np.searchsorted(ends / ends[-1], (random.random() + np.arange(PATHS)) / PATHS)
        weights = np.bincount(drawn, minlength=len(weights)) / PATHS
    found = []
    for number in np.flatnonzero(weights):
        task, y = paths[number // each.shape[1]].task, np.array([number % each.shape[1]], np.int32)
        groups = _grouped(np.concatenate([task.inputs, x]), np.append(task.y, y)) if regroup else None
        found.append(Path(weights[number], task.with_labels(x, y, groups)))
    return found


def _grouped(inputs: Shaped[np.ndarray, "N ..."], y: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """The groups that these labelled inputs have once they are fitted."""
    order, groups = order_of(inputs, y), np.empty(len(y), int)
    groups[order] = groups_of(y[order])
    return groups
