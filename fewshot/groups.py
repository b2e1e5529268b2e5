"""Classes with unlike numbers of examples, made alike: each is shown as so many means as the rarest has examples.

Learners are trained on tasks with equally many examples of every class, and take a class that has more for likelier
everywhere. Means of a few examples say more of their class than single ones, and a task of them is one that the learner
knows, at a temperature that is known too. Each example by itself, and more or fewer means of each class, were worse on
training and validation classes of photographs (docs/results/heads/counts.md).
"""

import numpy as np
from jaxtyping import Array, Int, Shaped

from fewshot.learners.task_temperature import FOLDS, Without, left_out


def order_of(inputs: Shaped[np.ndarray, "N ..."], y: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """An order of labelled inputs that is the same however they were given: by class, then by what they show.

    Which examples are left out together, and which are averaged, goes by it; so no answer depends on the order of rows.
    Within a class it is a fixed shuffle of the order along a fixed direction, so neighbours have nothing in common, and
    rounding of the inputs does not change it.
    """
    flat = np.asarray(inputs, np.float64).reshape(len(inputs), -1)
    along = flat @ np.random.default_rng(0).normal(size=flat.shape[1])
    order = np.lexsort((along, y))
    own = [order[y[order] == k] for k in range(y.max() + 1)]
    return np.concatenate([np.random.default_rng(len(rows)).permutation(rows) for rows in own])


def groups_of(y: Int[np.ndarray, " N"], most: int | None = None) -> Int[np.ndarray, " N"]:
    """The group [N] of each example with labels 0..C-1, from 0: `most` of a class, None for as many as the rarest has.

    Sizes of the groups of a class differ by one at most, in the order given. Where no class has more, each example is a
    group of its own.
    """
    counts = np.bincount(y)
    numbers = np.minimum(counts, counts.min() if most is None else most)
    if np.array_equal(numbers, counts):
        return np.arange(len(y))
    first = np.cumsum(numbers) - numbers
    groups = np.empty(len(y), int)
    for k, (count, number) in enumerate(zip(counts, numbers, strict=True)):
        groups[y == k] = first[k] + np.arange(count) * number // count
    return groups


def number_of(groups: Int[np.ndarray, " N"]) -> int:
    """M, how many groups there are."""
    return int(groups.max()) + 1


def labels_of(y: Int[np.ndarray, " N"], groups: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """The label [M] of each group."""
    return y[np.unique(groups, return_index=True)[1]]


def means_of(inputs: Shaped[np.ndarray, "N ..."], groups: Int[np.ndarray, " N"]) -> Shaped[np.ndarray, "M ..."]:
    """The mean [M, ...] of the inputs of each group."""
    sizes, order = np.bincount(groups), np.argsort(groups, kind="stable")
    sums = np.add.reduceat(inputs[order], np.cumsum(sizes) - sizes, axis=0)
    return (sums / sizes.reshape(-1, *[1] * (inputs.ndim - 1))).astype(inputs.dtype)


def shown(
    inputs: Shaped[np.ndarray, "N ..."], y: Int[np.ndarray, " N"], groups: Int[np.ndarray, " N"]
) -> tuple[Shaped[np.ndarray, "M ..."], Int[np.ndarray, " M"]]:
    """What a learner sees of labelled inputs: a mean of each group, and its label."""
    return means_of(inputs, groups), labels_of(y, groups)


def without_each(inputs: Shaped[np.ndarray, "N ..."], y: Int[np.ndarray, " N"], points: int, rows: int) -> Without:
    """The tasks without each fold of `left_out`, made alike again, padded to so many points; left out are of `rows`."""
    folds = int(min(FOLDS, np.bincount(y).max()))
    held = np.asarray(left_out(y, np.ones(len(y), bool), folds))
    parts = [shown(inputs[~fold], y[~fold], groups_of(y[~fold])) for fold in held]
    return Without(
        np.stack([padded(means, points) for means, _ in parts]),
        np.stack([padded(labels, points) for _, labels in parts]),
        np.stack([np.arange(points) < len(labels) for _, labels in parts]),
        np.pad(held, ((0, 0), (0, rows - len(y)))),
    )


def padded(rows: Shaped[Array | np.ndarray, " N *rest"], count: int) -> Shaped[np.ndarray, " count *rest"]:
    """`count` rows: the last one is repeated. On the host, where another number of rows compiles nothing."""
    return np.asarray(rows)[np.minimum(np.arange(count), len(rows) - 1)]
