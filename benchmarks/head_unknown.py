"""Classes that a task does not show: which score tells them, and the shipped head's beside logistic regression's."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from head_baselines import solve
from head_comparison import Case, Others, answering, drawn, features_of
from head_setting import BLOCK, QUERIES, SEED, Head, Setting, Source, learner_of, shares

from fewshot.conditioning import TemperaturePrior, fit_task
from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.out_of_episode import DetectionScores, score_open
from fewshot.evaluation.resampling import bootstrap
from fewshot.evaluation.scoring import embed
from fewshot.learners import Learner
from fewshot.models.networks.metric import unit
from fewshot.pretrained import Pretrained
from fewshot.tasks import Dataset

WEIGHTS = (0.3, 0.6, 1.0, 1.5, 2.0)  # of the entropy
LEVELS = (0.9, 0.8)  # of `unknown`
ROUNDING = 1e-9
FLAGGED_HEADER = ["data set", "task (episodes)"]
FLAGGED_HEADER += [f"{whose}, unknown >= {level}" for level in LEVELS for whose in ("own", "others")]
Score = Callable[[DetectionScores], np.ndarray]
SCORES: dict[str, Score] = {
    "largest probability": lambda found: np.asarray(found.probability),
    "largest latent mean": lambda found: np.asarray(found.latent_mean),
    "entropy": lambda found: np.asarray(found.entropy),
    "mutual information": lambda found: np.asarray(found.mutual_information),
    "distance": lambda found: np.asarray(found.distance),
}
U2 = "`unknown`"
BASELINE = "largest probability, logistic regression"
UNKNOWN_HEADER = ["data set", "task", "score", "AUROC", "more than logistic regression"]


def weighted(weight: float) -> Score:
    """The distance and so much of the entropy; (U2) has 1."""
    return lambda found: np.asarray(found.distance) + weight * np.asarray(found.entropy)


CANDIDATES = SCORES | {f"distance + {weight:g} entropy": weighted(weight) for weight in WEIGHTS}
SCORES_HEADER = ["pictures", "head", "task", *CANDIDATES]


def score_rows(
    name: str, head: Head, setting: Setting, others: Sequence[Source], shape: tuple[int, int], count: int
) -> list[list[str]]:
    """AUROC of every score on what is unseen of a setting, and on all classes of other sources, a row for each source.

    Parts that have no `way` classes beside those of a task are left out.
    """
    way, shot = shape
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    unseen = setting.unseen(head, way)
    parts = [
        (one.source.name, one.learner, one.dataset, part)
        for one, part in zip(unseen, shares(unseen, count), strict=True)
    ]
    parts += [
        (one.name, learner_of(head, setting.metric(head)), one.dataset(np.unique(one.labels)), count) for one in others
    ]
    for source, learner, dataset, part in parts:
        if dataset.classes >= 2 * way:
            found.setdefault(source, []).append(areas(learner, dataset, way, shot, part))
    return [
        [source, name, f"{way}-way {shot}-shot"]
        + [f"{np.concatenate([one[score] for one in each]).mean():.4f}" for score in CANDIDATES]
        for source, each in found.items()
    ]


def areas(learner: Learner, dataset: Dataset, way: int, shot: int, count: int) -> dict[str, np.ndarray]:
    """AUROC of each episode [E] by every score."""
    episodes = draw_episodes(SEED, "test", dataset, Shape(way, shot, QUERIES), count, other_classes=way)
    inside, outside, _ = score_open(learner, embed(learner, dataset), episodes, BLOCK)
    return {name: area(score(inside), score(outside)) for name, score in CANDIDATES.items()}


def unknown_rows(pretrained: Pretrained, others: Others, case: Case, count: int) -> list[list[str]]:
    """AUROC of unknown classes by every score of the shipped head, and by logistic regression."""
    way, shot, _ = case.shape
    episodes = drawn(case, count, other_classes=way)
    heads, which = answering(pretrained, case, episodes)
    scored = [score_open(head.learner, embed(head.learner, case.dataset), episodes) for head in heads]
    inside, outside = (of_answering(which, parts) for parts in list(zip(*scored, strict=True))[:2])
    features = unit(features_of(case.dataset))
    regression = others.plain["logistic regression"]
    both = solve(regression.answer, regression.setting, features, joined(episodes))
    confidence = both.tempered(regression.temperature).probabilities.max(-1)
    own = episodes.indices.y_query.shape[1]
    scores = {f"{name}, ours": (one(inside), one(outside)) for name, one in (SCORES | {U2: weighted(1.0)}).items()}
    scores[BASELINE] = -confidence[:, :own], -confidence[:, own:]
    found = {name: area(*map(np.asarray, pair)) for name, pair in scores.items()}
    baseline = found[BASELINE]
    rows = []
    for name, one in found.items():
        more = one - baseline
        bounds = bootstrap(np.random.default_rng(0), np.mean, more, least=-1.0, most=1.0)
        shape = f"{way}-way {shot}-shot"
        rows.append(
            [
                case.name,
                shape,
                name,
                f"{one.mean():.4f}",
                f"{more.mean():+.4f} [{bounds.low:+.4f}, {bounds.high:+.4f}]",
            ]
        )
    return rows


def flagged_row(pretrained: Pretrained, case: Case, count: int) -> list[str]:
    """In how many of 100 queries of a task's own classes and of others `unknown` is at least each of LEVELS."""
    way, shot, _ = case.shape
    episodes = drawn(case, count, other_classes=way)
    heads, which = answering(pretrained, case, episodes)
    inputs = [np.asarray(embed(head.learner, case.dataset)) for head in heads]
    at = jax.tree.map(np.asarray, episodes.indices)
    shares = []
    for episode, position in enumerate(which):
        head, features = heads[position], inputs[position]
        support, y = features[at.x_support[episode]], at.y_support[episode]
        known = TemperaturePrior(head.temperature([shot] * way))
        task = fit_task(head.learner, episodes.keys[episode], support, y, way, known)
        queries = np.concatenate([at.x_query[episode], at.x_other[episode]])
        p_values = task.unknown_p_values(features[queries])
        assert p_values is not None
        own, other = np.split(1 - p_values, [at.x_query.shape[1]])
        shares.append([[(part >= level - ROUNDING).mean() for part in (own, other)] for level in LEVELS])
    cells = [f"{100 * one:.1f}" for one in np.mean(shares, axis=0).ravel()]
    return [case.name, f"{way}-way {shot}-shot ({count})", *cells]


def of_answering(which: np.ndarray, each: Sequence[DetectionScores]) -> DetectionScores:
    """The scores of every episode by the head that answers it, whose position is in `which` [E]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves)[which, np.arange(len(which))], *each)


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
