"""What heads.py counts prints: tasks whose classes have unlike numbers of labelled pictures."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from head_comparison import OURS, features_of
from head_setting import Head, Setting, shares
from scipy.special import softmax

from fewshot.conditioning import TemperaturePrior, embed, fit_task
from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature
from fewshot.groups import groups_of, labels_of
from fewshot.heads import PretrainedHead
from fewshot.learners import Learner
from fewshot.models.networks.metric import unit
from fewshot.pretrained import Pretrained
from fewshot.tasks import Dataset

COUNTS = (
    (10, 5),
    (5, 1),
    (10, 8, 8, 7, 6),
    (5, 5, 5, 5, 4),
    (5, 5, 2, 2, 2),
    (3, 2, 2, 2, 1),
    (5, 3, 2, 1, 1),
    (5, 5, 5, 1, 1),
    (10, 1, 1, 1, 1),
)
# Means of a class at most, from the numbers of pictures of the classes.
WAYS = {
    "each picture": max,
    "means, as many as a class has on average": lambda counts: round(float(np.exp(np.mean(np.log(counts))))),
    "means, as many as the rarest has": min,
    "one mean": lambda counts: 1,
}
CHOSEN = "means, as many as the rarest has"
QUERIES, SEED = 10, 2
CHOICE_HEADER = ["head", "pictures", "labelled", *WAYS]
TEST_HEADER = ["pictures", "labelled", "method", "accuracy", "NLL", "ECE"]


class Task(NamedTuple):
    """Labelled features [N, D] and queries [Q, D], with labels in 0..C-1."""

    x: np.ndarray
    y: np.ndarray
    query: np.ndarray
    y_query: np.ndarray


def tasks(dataset: Dataset, counts: Sequence[int], number: int) -> Iterator[Task]:
    """That many tasks of random classes, with QUERIES of each beside its labelled ones."""
    random, ways = np.random.default_rng(SEED), np.arange(len(counts))
    features, index = features_of(dataset), np.asarray(dataset.index)
    for _ in range(number):
        some = random.choice(dataset.classes, len(counts), replace=False)
        rows = [random.permutation(index[one, : dataset.counts[one]]) for one in some]
        support = np.concatenate([row[:count] for row, count in zip(rows, counts, strict=True)])
        query = np.concatenate([row[count : count + QUERIES] for row, count in zip(rows, counts, strict=True)])
        yield Task(features[support], np.repeat(ways, counts), features[query], np.repeat(ways, QUERIES))


def answered(
    learner: Learner, by_counts: Callable[[Sequence[int]], TemperaturePrior], task: Task, way: str
) -> np.ndarray:
    """Probabilities [Q, C] of the queries, by one of WAYS, at the temperature of tasks with what is shown."""
    counts = np.bincount(task.y).tolist()
    groups = groups_of(task.y, WAYS[way](counts))
    prior = by_counts(np.bincount(labels_of(task.y, groups)).tolist())
    x, query = (embed(learner, one[:, None, None]) for one in (task.x, task.query))
    return fit_task(learner, jax.random.key(SEED), x, task.y, len(counts), prior, groups).probabilities(query)


def class_means(task: Task) -> np.ndarray:
    """Cosines [Q, C] of the queries with class means of features of length 1, times 20, as logits."""
    means = np.stack([unit(task.x[task.y == one]).mean(0) for one in range(task.y.max() + 1)])
    return 20 * unit(task.query) @ unit(means).T


def choice_rows(name: str, head: Head, setting: Setting, count: int) -> list[list[str]]:
    """NLL of each of WAYS, on classes that the metric was not made of; temperatures as shipped."""
    rows, by_counts = [], PretrainedHead(name).build(None).temperature
    for counts in COUNTS:
        unseen = setting.unseen(head, len(counts))
        for source in setting.sources:
            parts = [one for one in unseen if one.source is source]
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for part, number in zip(parts, shares(parts, count), strict=True):
                for task in tasks(part.dataset, counts, number):
                    for way, nlls in found.items():
                        p = answered(part.learner, by_counts, task, way)
                        nlls.append(metrics.nll(p[None], task.y_query[None]))
            means = [f"{np.mean(nlls):.4f}" for nlls in found.values()]
            rows.append([name, source.name, ", ".join(map(str, counts)), *means])
            print(rows[-1], flush=True)
    return rows


def test_rows(pretrained: Pretrained, dataset: Dataset, learned: Dataset, name: str, count: int) -> list[list[str]]:
    """The shipped heads and class means on the same tasks of test classes.

    The temperature of class means is that of least NLL on as many tasks of the same counts of classes to learn from.
    """
    rows = []
    for counts in COUNTS:
        some = list(tasks(dataset, counts, count))
        labels = np.stack([task.y_query for task in some])
        known = list(tasks(learned, counts, count))
        cold = softmax(np.stack([class_means(task) for task in known]), axis=-1)
        temperature = fit_temperature(cold, np.stack([task.y_query for task in known]))
        found = {"class means": softmax(np.stack([class_means(task) for task in some]) / temperature, axis=-1)}
        heads = [PretrainedHead(pretrained.for_task(task.x).name).build(None) for task in some]
        for method, way in (("shipped head, shown each picture", "each picture"), (OURS, CHOSEN)):
            each = [answered(one.learner, one.temperature, task, way) for one, task in zip(heads, some, strict=True)]
            found[method] = np.stack(each)
        for method, p in reversed(found.items()):
            accuracy = f"{100 * metrics.accuracy(p, labels):.1f} +- {100 * metrics.accuracy_ci95(p, labels):.1f}"
            errors = f"{metrics.nll(p, labels):.4f}", f"{metrics.calibration_errors(p, labels)['ece']:.4f}"
            rows.append([name, ", ".join(map(str, counts)), method, accuracy, *errors])
            print(rows[-1], flush=True)
    return rows
