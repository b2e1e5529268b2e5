"""Scores of one task's predictions, where its queries are labelled too: how right they are, class by class."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fewshot.evaluation.metrics import NORMAL_95, episode_nll
from fewshot.evaluation.text import format_percent, plain

SHOWN_CLASSES = 10  # in the line of the classes that were answered wrong


class Count(NamedTuple):
    """So many of a number of queries."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number} of {self.of}"


class Scores(NamedTuple):
    """How many answers are right of the queries of the task's classes, of those that are kept, and of each class.

    nll: nats a query of the task's classes, None where there is none. Of queries of other classes: how many answers are
    kept, and how many look strange.
    """

    right: Count
    kept_right: Count
    classes: dict[str, Count]
    nll: float | None
    others_kept: Count
    others_strange: Count


def scores(
    classes: Sequence[str], labels: Sequence[str], probabilities: np.ndarray, kept: np.ndarray, strange: np.ndarray
) -> Scores:
    """Of labels [Q], any words, with probabilities [Q, C] of the classes [C]; kept and strange are [Q]."""
    given = np.asarray(labels)
    among, right = np.isin(given, classes), given == np.asarray(classes)[probabilities.argmax(axis=1)]
    numbers = np.array([classes.index(label) for label in given[among]], int)
    nll = float(episode_nll(probabilities[among][None], numbers[None])[0]) if among.any() else None
    return Scores(
        _count(right, among),
        _count(right, among & kept),
        {name: _count(right, given == name) for name in classes if name in labels},
        nll,
        _count(kept, ~among),
        _count(strange, ~among),
    )


def _count(condition: np.ndarray, among: np.ndarray) -> Count:
    return Count(int((condition & among).sum()), int(among.sum()))


def wilson_interval(count: Count) -> tuple[float, float]:
    """The 95% interval of a share of independent trials (Wilson 1927), which few trials and shares of 0 and 1 can have.

    Those p for which the share seen lies within 1.96 standard deviations (p (1 - p) / n)^1/2. No trials: (0, 1).
    """
    n, share = count.of, count.number / max(count.of, 1)
    z2 = NORMAL_95**2
    centre, width = share * n + z2 / 2, NORMAL_95 * np.sqrt(n * share * (1 - share) + z2 / 4)
    return max(0.0, float((centre - width) / (n + z2))), min(1.0, float((centre + width) / (n + z2)))


def scores_lines(found: Scores) -> list[str]:
    """One to three lines: what is right, classes with mistakes, and queries of no class of the task."""
    lines = []
    if found.right.of:
        low, high = wilson_interval(found.right)
        accuracy = format_percent(found.right.number / found.right.of)
        within = f"between {format_percent(low)} and {format_percent(high)} with 95% confidence for such pictures"
        kept = f"{found.kept_right} kept answers right" if found.kept_right.of else "no answer kept"
        lines.append(f"{found.right} right: {accuracy}, {within}; NLL {found.nll:.3f}; {kept}")
        wrong = {name: count for name, count in found.classes.items() if count.number < count.of}
        worst = sorted(wrong.items(), key=lambda item: item[1].number / item[1].of)
        named = ", ".join(f"{plain(name)} {count}" for name, count in worst[:SHOWN_CLASSES])
        more = f" and {len(worst) - SHOWN_CLASSES} more classes" if len(worst) > SHOWN_CLASSES else ""
        if worst:
            lines.append(f"right of each class with mistakes: {named}{more}")
    if found.others_kept.of:
        look, answered = found.others_strange.number, found.others_kept.number
        lines.append(
            f"{found.others_kept.of} of classes that are not labelled: {look} look strange, {answered} answers kept"
        )
    return lines
