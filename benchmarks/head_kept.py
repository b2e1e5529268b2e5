"""Which answers are kept at KEEP by each method, and how many of these are right.

A task whose answers are all sure keeps all of them, and exceeds KEEP by as much as it is easy: no choice of answers can
change that. So tasks that keep all are told apart from those that leave some out, of whose kept answers KEEP should be
right. A threshold for all tasks lets easy ones make up for hard ones.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fewshot.evaluation import metrics
from fewshot.evaluation.resampling import bootstrap
from fewshot.evaluation.scoring import Scores
from fewshot.evaluation.selection import kept_at

KEEP = 0.95
KEPT_HEADER = [
    "data set",
    "task",
    "method (episodes)",
    "% kept",
    "% right of all kept",
    "tasks that keep all, %",
    "% right there",
    "% kept of the others",
    "% right there",
    "AURC",
]
THRESHOLD_HEADER = ["data set", "task", "threshold", "% kept", "% right"]


class Kept(NamedTuple):
    """Which answers [E, Q] are kept, which are right, and the probability of each."""

    kept: np.ndarray
    right: np.ndarray
    probability: np.ndarray

    def among(self, tasks: np.ndarray) -> "Kept":
        return Kept(*(values[tasks] for values in self))

    def accuracy(self) -> str:
        """The share that is right of what is kept [95% interval over tasks, if several], and what was expected."""
        tasks = self.kept.any(1)
        if not tasks.any():
            return "-"
        right, kept = (self.right & self.kept).sum(1)[tasks], self.kept.sum(1)[tasks]
        share, expected = f"{100 * _ratio(right, kept):.1f}", f"({100 * self.probability[self.kept].mean():.1f})"
        if len(kept) < 2:
            return f"{share} {expected}"
        bounds = bootstrap(np.random.default_rng(0), _ratio, right, kept, least=0.0, most=1.0)
        return f"{share} [{100 * bounds.low:.1f}, {100 * bounds.high:.1f}] {expected}"


def _ratio(right: np.ndarray, kept: np.ndarray) -> float:
    return float(right.sum() / kept.sum())


def kept_rows(where: list[str], found: Mapping[str, Scores]) -> list[list[str]]:
    """Of every method, `where` it was asked: what is kept, and how right that is; tasks that keep all apart."""
    rows = []
    for name, one in found.items():
        kept = np.stack([kept_at(p, KEEP) for p in one.probabilities])
        every = Kept(kept, one.probabilities.argmax(-1) == one.labels, one.probabilities.max(-1))
        whole = kept.all(1)
        some = every.among(~whole)
        rows.append(
            [
                *where,
                f"{name} ({len(kept)})",
                f"{100 * kept.mean():.1f}",
                every.accuracy(),
                f"{100 * whole.mean():.0f}",
                every.among(whole).accuracy(),
                f"{100 * some.kept.mean():.1f}" if len(some.kept) else "-",
                some.accuracy(),
                f"{metrics.aurc(one.probabilities, one.labels):.4f}",
            ]
        )
    return rows


def threshold_row(where: list[str], ours: Scores, unseen: Scores) -> list[str]:
    """The threshold of KEEP on classes that the metric was not made of, and what it keeps elsewhere."""
    threshold = threshold_at(unseen, KEEP)
    probability, right = ours.probabilities.max(-1), ours.probabilities.argmax(-1) == ours.labels
    kept = Kept(probability >= threshold, right, probability)
    return [*where, f"{threshold:.3f}", f"{100 * kept.kept.mean():.1f}", kept.accuracy()]


def threshold_at(scores: Scores, accuracy: float) -> float:
    """The least probability above which so many of all answers of all tasks are right; infinity where none is."""
    probability = scores.probabilities.max(-1).ravel()
    order = np.argsort(-probability, kind="stable")
    right = (scores.probabilities.argmax(-1) == scores.labels).ravel()[order]
    enough = np.flatnonzero(np.cumsum(right) >= accuracy * np.arange(1, len(right) + 1))
    return float(probability[order[enough[-1]]]) if len(enough) else float("inf")
