"""Tables of `heads.py`: the shipped head beside other methods on the same test episodes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from bayesian_qda import ClassPrior, bayesian_qda
from head_baselines import BASELINES, Baseline, Chosen, choose, first, logistic_regression, solve

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.out_of_episode import score_open
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


def unknown_rows(pretrained: Pretrained, others: Others, case: Case, count: int) -> list[list[str]]:
    """AUROC of unknown classes by every score, then what is kept at KEEP and the area under risk and coverage."""
    way, shot, _ = case.shape
    episodes = drawn(case, count, other_classes=way)
    heads, which = answering(pretrained, case, episodes)
    scored = [score_open(head.learner, embed(head.learner, case.dataset), episodes) for head in heads]
    inside, outside = (
        type(scored[0][0])(*(np.stack(leaves)[which, np.arange(count)] for leaves in zip(*parts, strict=True)))
        for parts in list(zip(*scored, strict=True))[:2]
    )
    features = unit(features_of(case.dataset))
    regression = others.plain["logistic regression"]
    both = solve(regression.answer, regression.setting, features, joined(episodes))
    confidence = both.tempered(regression.temperature).probabilities.max(-1)
    own = episodes.indices.y_query.shape[1]
    scores = {
        "entropy, ours": (np.asarray(inside.entropy), np.asarray(outside.entropy)),
        "mutual information, ours": (np.asarray(inside.mutual_information), np.asarray(outside.mutual_information)),
        "largest probability, ours": (np.asarray(inside.probability), np.asarray(outside.probability)),
        "largest probability, logistic regression": (-confidence[:, :own], -confidence[:, own:]),
    }
    areas = {name: area(*pair) for name, pair in scores.items()}
    baseline = areas["largest probability, logistic regression"]
    rows = []
    for name, found in areas.items():
        more = found - baseline
        bounds = bootstrap(np.random.default_rng(0), np.mean, more, least=-1.0, most=1.0)
        shape = f"{way}-way {shot}-shot"
        rows.append(
            [
                case.name,
                shape,
                name,
                f"{found.mean():.4f}",
                f"{more.mean():+.4f} [{bounds.low:+.4f}, {bounds.high:+.4f}]",
            ]
        )
    return rows


def area(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """AUROC of each episode [E]."""
    scores = np.concatenate([inside, outside], axis=1)
    return metrics.auroc(scores, np.broadcast_to(np.arange(scores.shape[1]) >= inside.shape[1], scores.shape))


def joined(episodes: Episodes) -> Episodes:
    """Queries of other classes behind an episode's own, labelled 0: only their probabilities are looked at."""
    at = episodes.indices
    query = jnp.concatenate([at.x_query, at.x_other], axis=1)
    y = jnp.concatenate([at.y_query, jnp.zeros_like(at.x_other)], axis=1)
    return episodes._replace(indices=at._replace(x_query=query, y_query=y))


UNKNOWN_HEADER = ["data set", "task", "score", "AUROC", "more than logistic regression"]
