"""Kinds of pictures: what a head that was made of one kind is worth for another, and how well kinds are told apart."""

from collections.abc import Mapping, Sequence

import numpy as np
from head_setting import SEED, Head, Setting, Source, answers, learner_of, pooled, shares

from fewshot.evaluation import metrics
from fewshot.models.networks.metric import unit
from fewshot.pretrained import Kind

ACROSS_HEADER = ["pictures", "task", "head", "accuracy in %", "NLL", "ECE"]
LIKENESS_HEADER = ["kind", "tasks of", "likeness: 1% of tasks below", "median", "1% above", "% of the kind"]
WAY, TASKS = 5, 2000  # of likenesses


def kind_of(source: Source, classes: np.ndarray, least: float) -> Kind:
    """What pictures of those classes look like."""
    z = unit(source.features)
    return Kind(unit(np.stack([z[source.labels == one].mean(axis=0) for one in classes])), least)


def across_kinds(
    sources: Sequence[Source],
    special: Mapping[str, Head],
    general: Head,
    shapes: Sequence[tuple[int, int]],
    episodes: int,
) -> list[list[str]]:
    """Rows of two data sets: each by its own head, the general one and that of the other, on the same tasks."""
    rows, count = [], episodes // len(sources)
    for way, shot in shapes:
        for source in sources:
            (other,) = (one for one in sources if one is not source)
            own, foreign = Setting([source]), Setting([other])
            unseen = own.unseen(special[source.name], way)
            everywhere = {
                "without a metric": (own.metric(general), general),
                "of the other": (foreign.metric(special[other.name]), special[other.name]),
            }
            heads = {
                "its own": ([one.learner for one in unseen], own.temperature(special[source.name], way, shot, count))
            }
            for name, (metric, head) in everywhere.items():
                temperature = foreign.temperature(head, way, shot, count)
                heads[name] = [learner_of(head, metric)] * len(unseen), temperature
            for name, (learners, temperature) in heads.items():
                found = [
                    answers(learner, one.dataset, way, shot, part).tempered(temperature)
                    for learner, one, part in zip(learners, unseen, shares(unseen, count), strict=True)
                ]
                p, y = pooled(found)
                values = f"{100 * metrics.accuracy(p, y):.1f}", f"{metrics.nll(p, y):.4f}"
                error = f"{metrics.calibration_errors(p, y)['ece']:.3f}"
                rows.append([source.name, f"{way}-way {shot}-shot", name, *values, error])
                print(rows[-1], flush=True)
    return rows


def likenesses(sources: Sequence[Source], others: Sequence[Source], least: float) -> list[list[str]]:
    """Rows of each kind: quantiles of the likeness of tasks of its own data set, and of the others."""
    rng, rows = np.random.default_rng(SEED), []
    for source in sources:
        setting = Setting([source])
        whole = kind_of(source, setting.learned[source.name], least)
        folds = [
            (kind_of(source, one.made_of[source.name], least), one.classes) for one in setting.unseen(Head(rank=0), WAY)
        ]
        parts = {source.name: folds}
        parts |= {one.name: [(whole, np.unique(one.labels))] for one in others}
        for other in sources:
            if other is not source:
                parts[other.name] = [(whole, Setting([other]).learned[other.name])]
        for one in (*sources, *others):
            found = np.array(
                [
                    kind.likeness(pictures_of(one, rng.choice(classes, WAY, replace=False), rng))
                    for kind, classes in parts[one.name]
                    for _ in range(TASKS // len(parts[one.name]))
                ]
            )
            quantiles = [f"{value:.3f}" for value in np.quantile(found, (0.01, 0.5, 0.99))]
            rows.append([source.name, one.name, *quantiles, f"{100 * (found >= least).mean():.1f}"])
    return rows


def pictures_of(source: Source, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Features of a picture of each class."""
    return source.features[[rng.choice(np.flatnonzero(source.labels == one)) for one in classes]]
