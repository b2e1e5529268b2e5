"""Which of two methods is better: differences on the same episodes (docs/evaluation.md, M10 and M11).

An episode that is hard for one method is hard for the other: on common episodes a difference is known far better than
either score. Letters: E episodes of C classes, S runs of a method, which differ in their seeds alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int
from scipy.special import stdtrit

from fewshot.evaluation import metrics
from fewshot.evaluation.class_interval import TAIL, interval_over_classes
from fewshot.evaluation.prediction_files import KeptPredictions
from fewshot.evaluation.resampling import UNKNOWN, Interval


class Difference(NamedTuple):
    """A score of one method less that of another, with 95% intervals; nan where there is too little to tell.

    over_episodes: for these classes and these networks. over_classes: for other classes too. over_seeds: for these
    classes and networks of other seeds.
    """

    mean: float
    over_episodes: Interval
    over_classes: Interval
    over_seeds: Interval


def paired_difference(
    scores: Float[np.ndarray | Array, "S E"],
    others: Float[np.ndarray | Array, "R E"],
    classes: Int[np.ndarray | Array, "E C"],
) -> Difference:
    """The mean of `scores` less that of `others`, each of the runs of one method on the same episodes.

    classes: which classes of the test split each episode shows. Raises: ValueError on shapes that do not fit.
    """
    one, other = np.asarray(scores, np.float64), np.asarray(others, np.float64)
    if one.ndim != 2 or other.ndim != 2 or one.shape[1] != other.shape[1] or not one.size or not other.size:
        raise ValueError(f"expected scores [S, E] and others [R, E], got {one.shape} and {other.shape}")
    by_episode = one.mean(0) - other.mean(0)
    mean, episodes = float(by_episode.mean()), len(by_episode)
    half = metrics.NORMAL_95 * by_episode.std(ddof=1) / np.sqrt(episodes) if episodes > 1 else np.nan
    return Difference(
        mean,
        Interval(float(mean - half), float(mean + half)),
        interval_over_classes(by_episode, classes),
        _over_seeds(one.mean(1), other.mean(1)),
    )


def paired_differences(
    predictions: Sequence[KeptPredictions], others: Sequence[KeptPredictions]
) -> dict[str, Difference]:
    """Those of accuracy, NLL and Brier score, of the runs of one method and of another.

    Raises: ValueError unless all predict the same episodes.
    """
    first = predictions[0]
    for kept in (*predictions, *others):
        check_same(first, kept)
    found = {}
    for name, of in metrics.EPISODE_SCORES.items():
        one, other = (
            np.stack([of(kept.probabilities, kept.labels) for kept in runs]) for runs in (predictions, others)
        )
        found[name] = paired_difference(one, other, first.classes)
    return found


def check_same(first: KeptPredictions, other: KeptPredictions) -> None:
    """Raises ValueError unless both predict the same episodes, as far as labels and classes tell."""
    for name in ("labels", "classes"):
        one, two = getattr(first, name), getattr(other, name)
        if one.shape != two.shape:
            raise ValueError(f"expected predictions of the same episodes, got {name} {two.shape} beside {one.shape}")
        if (one != two).any():
            number = int((one != two).any(axis=1).argmax())
            raise ValueError(f"expected predictions of the same episodes, got other {name} in episode {number}")


def _over_seeds(one: Float[np.ndarray, " S"], other: Float[np.ndarray, " R"]) -> Interval:
    """(M11): the interval of Welch, whose degrees of freedom are Satterthwaite's; nan unless both have two runs."""
    if min(len(one), len(other)) < 2:
        return UNKNOWN
    parts = np.array([runs.var(ddof=1) / len(runs) for runs in (one, other)])
    mean, variance = float(one.mean() - other.mean()), float(parts.sum())
    of_squares = float((parts**2 / [len(one) - 1, len(other) - 1]).sum())
    freedom = variance**2 / of_squares if of_squares > 0 else np.inf
    half = float(stdtrit(freedom, 1 - TAIL)) * np.sqrt(variance)
    return Interval(mean - half, mean + half)
