"""Tables of `heads.py`: the shipped head beside other methods on the same test episodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from bayesian_qda import ClassPrior, bayesian_qda
from head_baselines import BASELINES, Baseline, Chosen, choose, first, logistic_regression

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.resampling import bootstrap
from fewshot.evaluation.scoring import Scores, embed, score, task_temperatures
from fewshot.learners import Learner
from fewshot.models.networks.metric import unit
from fewshot.pretrained import Pretrained
from fewshot.tasks import Dataset

OURS, ADAPTED, IN_METRIC = "shipped head", "shipped head, task's own temperature", "logistic regression in its metric"
QDA = "Bayesian discriminants in its metric"
STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # C of logistic regression in the metric
DEGREES = (3.0, 30.0, 300.0, 3000.0)  # nu - D - 1 of Bayesian discriminants
QUERIES, SEED = 10, 1
MOST_ADAPTED = 100  # labelled pictures of a task up to which it learns its own temperature


class Case(NamedTuple):
    """Test classes of a data set, and the shape of its tasks."""

    name: str
    dataset: Dataset
    shape: Shape


class Part(NamedTuple):
    """Episodes of classes to choose other methods by, and features [I, D] of their pictures for each kind of method.

    plain: of length 1; in_metric: of length 1 in a metric that other classes made; standard: these, standardised.
    """

    plain: np.ndarray
    in_metric: np.ndarray
    standard: np.ndarray
    episodes: Episodes


class Others(NamedTuple):
    """Every other method at the setting of a shape, those that read other features apart; the prior of features."""

    plain: Mapping[str, Chosen]
    regression: Chosen
    qda: Chosen
    prior: ClassPrior


def chosen(parts: Sequence[Part], prior: ClassPrior, way: int) -> Others:
    """The setting and temperature of every method that takes so many classes."""
    plain = [(part.plain, part.episodes) for part in parts]
    found = {name: choose(one, plain) for name, one in BASELINES.items() if way <= one.most_classes}
    regression = choose(Baseline(logistic_regression, STRENGTHS), [(part.in_metric, part.episodes) for part in parts])
    answer = partial(bayesian_qda, ClassPrior(np.zeros(len(prior.mean)), 1.0, prior.between / prior.within))
    qda = choose(Baseline(answer, DEGREES), [(part.standard, part.episodes) for part in parts])
    return Others(found, regression, qda, prior)


def drawn(case: Case, count: int, other_classes: int = 0) -> Episodes:
    """The test episodes of a case."""
    return draw_episodes(SEED, "test", case.dataset, case.shape, count, other_classes=other_classes)


def answering(pretrained: Pretrained, case: Case, episodes: Episodes) -> tuple[list[Pretrained], np.ndarray]:
    """Which of the shipped heads answer, the most frequent first, and the position of the one of each episode [E]."""
    features = features_of(case.dataset)
    found = [pretrained.for_task(features[support]) for support in np.asarray(episodes.indices.x_support)]
    heads = {one.name: one for one in found}
    names = [name for name, _ in Counter(one.name for one in found).most_common()]
    return [heads[name] for name in names], np.array([names.index(one.name) for one in found])


def picked(which: np.ndarray, of_each: Sequence[Scores]) -> Scores:
    """The scores of every episode by the head that answers it."""
    probabilities = np.stack([one.probabilities for one in of_each])[which, np.arange(len(which))]
    return of_each[0]._replace(probabilities=probabilities)


def solved(pretrained: Pretrained, others: Others, case: Case, count: int) -> dict[str, Scores]:
    """Predictions of every method on the same episodes; a slow one has the first of them alone."""
    way, shot, _ = case.shape
    episodes = drawn(case, count)
    heads, which = answering(pretrained, case, episodes)
    ours, adapted = [], []
    for head in heads:
        inputs = embed(head.learner, case.dataset)
        raw, (own, fewer) = score(head.learner, inputs, episodes), head.temperatures([shot] * way)
        ours.append(raw.tempered(own))
        if fewer is not None and way * shot <= MOST_ADAPTED:
            adapted.append(raw.tempered(task_temperatures(head.learner, inputs, episodes, own, fewer)))
    found = {OURS: picked(which, ours)}
    if adapted:
        found[ADAPTED] = picked(which, adapted)
    features, seen = unit(features_of(case.dataset)), in_metric(heads[0].learner, case.dataset)
    for name, method in others.plain.items():
        found[name] = method.scores(features, first(episodes, BASELINES[name].most_episodes))
    found[IN_METRIC] = others.regression.scores(seen, episodes)
    found[QDA] = others.qda.scores(others.prior.standard(seen), episodes)
    return found


def in_metric(learner: Learner, dataset: Dataset) -> np.ndarray:
    """Features [I, D] of length 1 in a learner's metric."""
    return unit(np.asarray(embed(learner, dataset)))


def features_of(dataset: Dataset) -> np.ndarray:
    """[I, D]."""
    return np.asarray(dataset.images).reshape(len(dataset.images), -1)


def rows_of(case: Case, found: Mapping[str, Scores]) -> list[list[str]]:
    """A row for each method: metrics, and how much more NLL it has than ours on the same episodes."""
    ours = found[OURS]
    rows = []
    for name, one in found.items():
        p, y = one.probabilities, one.labels
        own = metrics.episode_nll(ours.probabilities[: len(y)], ours.labels[: len(y)])
        more = metrics.episode_nll(p, y) - own
        bounds = bootstrap(np.random.default_rng(0), np.mean, more, least=-np.inf, most=np.inf)
        rows.append(
            [
                case.name,
                f"{case.shape.way}-way {case.shape.shot}-shot",
                f"{name} ({len(y)})",
                f"{100 * metrics.accuracy(p, y):.1f} +- {100 * metrics.accuracy_ci95(p, y):.1f}",
                f"{metrics.nll(p, y):.4f}",
                f"{metrics.calibration_errors(p, y)['ece']:.4f}",
                f"{more.mean():+.4f} [{bounds.low:+.4f}, {bounds.high:+.4f}] ({100 * more.mean() / own.mean():+.1f}%)",
            ]
        )
    return rows


HEADER = ["data set", "task", "method (episodes)", "accuracy", "NLL", "ECE", "NLL more than ours"]
