"""Tables of `heads.py`: the shipped head beside other methods on the same test episodes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from head_baselines import BASELINES, Baseline, Chosen, choose, first, logistic_regression, solve

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.out_of_episode import score_open
from fewshot.evaluation.resampling import bootstrap
from fewshot.evaluation.scoring import Scores, embed, score, task_temperatures
from fewshot.evaluation.selection import kept_at
from fewshot.evaluation.text import format_markdown
from fewshot.models.networks.metric import unit
from fewshot.pretrained import Pretrained
from fewshot.tasks import Dataset

OURS, ADAPTED, IN_METRIC = "shipped head", "shipped head, task's own temperature", "logistic regression in its metric"
QUERIES, SEED, KEEP = 10, 1, 0.95
MOST_ADAPTED = 100  # labelled pictures of a task up to which it learns its own temperature


class Case(NamedTuple):
    """Test classes of a data set, and the shape of its tasks."""

    name: str
    dataset: Dataset
    shape: Shape


class Chosens(NamedTuple):
    """Every other method at the setting of a shape; that in the metric apart, as it reads other features."""

    plain: Mapping[str, Chosen]
    in_metric: Chosen


def training_parts(
    features: Sequence[tuple[np.ndarray, Dataset]], way: int, shot: int, count: int
) -> list[tuple[np.ndarray, Episodes]]:
    """Episodes of training classes on given features [I, D] of their data sets."""
    shape = Shape(way, shot, QUERIES)
    return [(x, draw_episodes(SEED, "train", dataset, shape, count)) for x, dataset in features]


def chosen(plain: list[tuple[np.ndarray, Episodes]], in_metric: list[tuple[np.ndarray, Episodes]], way: int) -> Chosens:
    """The setting and temperature of every method that takes so many classes."""
    found = {name: choose(one, plain) for name, one in BASELINES.items() if way <= one.most_classes}
    return Chosens(found, choose(Baseline(logistic_regression, (0.1, 1.0, 10.0)), in_metric))


def solved(pretrained: Pretrained, others: Chosens, case: Case, count: int) -> dict[str, Scores]:
    """Predictions of every method on the same episodes; a slow one has the first of them alone."""
    way, shot, _ = case.shape
    episodes = draw_episodes(SEED, "test", case.dataset, case.shape, count)
    learner = pretrained.learner
    inputs = embed(learner, case.dataset)
    raw = score(learner, inputs, episodes)
    temperature = pretrained.temperature([shot] * way)
    found = {OURS: raw.tempered(temperature)}
    if shot > 1 and way * shot < MOST_ADAPTED:
        fewer = pretrained.temperature([shot - 1] * way)
        found[ADAPTED] = raw.tempered(task_temperatures(learner, inputs, episodes, temperature, fewer))
    features = unit(features_of(case.dataset))
    for name, method in others.plain.items():
        found[name] = method.scores(features, first(episodes, BASELINES[name].most_episodes))
    found[IN_METRIC] = others.in_metric.scores(unit(np.asarray(inputs)), episodes)
    return found


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


def comparison(rows: list[list[str]]) -> str:
    return format_markdown(HEADER, rows)


def unknown_rows(pretrained: Pretrained, others: Chosens, case: Case, count: int) -> list[list[str]]:
    """AUROC of unknown classes by every score, then what is kept at KEEP and the area under risk and coverage."""
    way, shot, _ = case.shape
    episodes = draw_episodes(SEED, "test", case.dataset, case.shape, count, other_classes=way)
    learner = pretrained.learner
    inputs = embed(learner, case.dataset)
    inside, outside, _ = score_open(learner, inputs, episodes)
    features = unit(features_of(case.dataset))
    regression = others.plain["logistic regression"]
    both = solve(regression.answer, regression.setting, features, joined(episodes))
    confidence = both.tempered(regression.temperature).probabilities.max(-1)
    own = episodes.indices.y_query.shape[1]
    scores = {
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


def kept_rows(case: Case, found: Mapping[str, Scores]) -> list[list[str]]:
    """Of every method: the share of answers kept at KEEP, their accuracy, and the area under risk and coverage."""
    rows = []
    for name, one in found.items():
        kept = np.stack([kept_at(p, KEEP) for p in one.probabilities])
        right = one.probabilities.argmax(-1) == one.labels
        each = [own[chosen].mean() for own, chosen in zip(right, kept, strict=True) if chosen.any()]
        rows.append(
            [
                case.name,
                f"{case.shape.way}-way {case.shape.shot}-shot",
                f"{name} ({len(kept)})",
                f"{100 * kept.mean():.1f}",
                f"{100 * right[kept].mean():.2f}" if each else "-",
                f"{100 * np.mean(each):.2f}" if each else "-",
                f"{metrics.aurc(one.probabilities, one.labels):.4f}",
            ]
        )
    return rows


UNKNOWN_HEADER = ["data set", "task", "score", "AUROC", "more than logistic regression"]
KEPT_HEADER = [
    "data set",
    "task",
    "method (episodes)",
    "% kept",
    "% right of all kept",
    "% right, mean of tasks",
    "AURC",
]
