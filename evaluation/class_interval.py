"""A 95% interval over classes: what another sample of test classes would have given (docs/evaluation.md, M7 to M9).

Intervals over episodes tell how well an accuracy is known for the classes at hand. Episodes share classes, so a claim
about classes like them is less certain than that, the fewer there are the more.

Letters: E episodes of C classes each, K classes in all.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int
from scipy.special import stdtrit

from fewshot.evaluation import metrics
from fewshot.evaluation.predictions import Labels, Probabilities
from fewshot.evaluation.resampling import UNKNOWN, Interval

TAIL = 0.025
ANY = (-np.inf, np.inf)


class Components(NamedTuple):
    """Of the mean over episodes: its value, its variance by classes and by episodes, and the number of classes."""

    mean: float
    by_classes: float
    by_episodes: float
    classes: int


def interval_over_classes(
    values: Float[np.ndarray | Array, " E"],
    classes: Int[np.ndarray | Array, "E C"],
    within: tuple[float, float] = ANY,
) -> Interval:
    """95% interval of the mean of `values` over a population of classes, of which those of the episodes are a sample.

    values: one number an episode, such as its accuracy; classes: which classes of the test split it shows. Both kinds
    of chance count, which classes the split has and which episodes were drawn: mean +- t sd, with as many degrees of
    freedom as both together are worth (Satterthwaite). within: numbers between which the mean must lie; near one of
    them a mean is skewed and the more certain the nearer it is, so the interval is made of its log odds between both,
    or of its logarithm above the lower one. Wider than the one over episodes unless classes do not differ. nan where
    all episodes show the same classes, or there are fewer than three.

    Raises: ValueError on shapes that do not fit, and where an episode shows a class twice.
    """
    found = components(values, classes)
    variance = found.by_classes + found.by_episodes
    if found.classes < 2 or not np.isfinite(variance):
        return UNKNOWN
    episodes = len(np.asarray(values))
    of_squares = found.by_classes**2 / (found.classes - 1) + found.by_episodes**2 / (episodes - 1)
    freedom = variance**2 / of_squares if of_squares > 0 else np.inf
    return _around(found.mean, float(stdtrit(freedom, 1 - TAIL) * np.sqrt(variance)), within)


def _around(mean: float, half: float, within: tuple[float, float]) -> Interval:
    """mean +- half; on the scale of log odds where it must lie within two numbers, of logarithms where above one."""
    low, high = within
    if not low < mean < high or np.isinf(low):
        return Interval(max(mean - half, low), min(mean + half, high))
    if np.isinf(high):
        factor = np.exp(half / (mean - low))
        return Interval(float(low + (mean - low) / factor), float(low + (mean - low) * factor))
    odds = (mean - low) / (high - mean)
    factor = np.exp(half * (high - low) / ((mean - low) * (high - mean)))
    ends = [low + (high - low) * one / (1 + one) for one in (odds / factor, odds * factor)]
    return Interval(float(ends[0]), float(ends[1]) if np.isfinite(ends[1]) else high)


def components(values: Float[np.ndarray | Array, " E"], classes: Int[np.ndarray | Array, "E C"]) -> Components:
    """(M8) and (M9). The variances are nan where episodes do not tell classes apart."""
    y, chosen = np.asarray(values, np.float64), _checked(values, classes)
    names, position = np.unique(chosen, return_inverse=True)
    shows = np.zeros((len(y), len(names)))
    np.put_along_axis(shows, position.reshape(chosen.shape), 1.0, axis=1)
    share, residual = shows.mean(0), y - y.mean()
    centred = shows - share
    own = np.square(centred).sum(-1)  # every sum over pairs of episodes is the one over all, less the pairs (e, e)
    products = np.square(centred.T @ residual).sum() - np.square(residual) @ own
    weights = np.square(centred.T @ centred).sum() - np.square(own).sum()
    if len(y) < 3 or weights <= 1e-9 * np.square(own).sum():
        return Components(float(y.mean()), float("nan"), float("nan"), len(names))
    spread = max(float(products / weights), 0.0)
    rest = max(float(np.square(residual).sum() / (len(y) - 1) - spread * own.mean()), 0.0)
    return Components(float(y.mean()), spread * float(np.square(share).sum()), rest / len(y), len(names))


def intervals_over_classes(
    probabilities: Probabilities, labels: Labels, classes: Int[np.ndarray | Array, "E C"]
) -> Mapping[str, Interval]:
    """Those of accuracy, NLL and Brier score; classes [E, C]: which class of the split each label of an episode is."""
    return {
        name: interval_over_classes(of(probabilities, labels), classes, (0.0, metrics.MOST[name]))
        for name, of in metrics.EPISODE_SCORES.items()
    }


def classes_of_episodes(
    index: Int[np.ndarray | Array, "K M"],
    counts: Int[np.ndarray | Array, " K"],
    x_support: Int[np.ndarray | Array, "E S"],
    y_support: Int[np.ndarray | Array, "E S"],
) -> Int[np.ndarray, "E C"]:
    """Which class of a split each label of an episode is: from the split's `index` and `counts`, and its positions."""
    rows, of_class, labels = np.asarray(index), np.asarray(counts), np.asarray(y_support)
    held = np.arange(rows.shape[1]) < of_class[:, None]  # the rest of a row is padding
    class_of = np.full(rows.max() + 1, -1)
    class_of[rows[held]] = np.nonzero(held)[0]
    first = np.stack([(labels == label).argmax(1) for label in range(labels.max() + 1)], axis=1)
    return np.asarray(class_of[np.take_along_axis(np.asarray(x_support), first, axis=1)])


def _checked(values: np.ndarray | Array, classes: np.ndarray | Array) -> np.ndarray:
    chosen = np.asarray(classes)
    if chosen.ndim != 2 or np.shape(values) != chosen.shape[:1] or chosen.size == 0:
        raise ValueError(f"expected values [E] and classes [E, C], got {np.shape(values)} and {chosen.shape}")
    ranked = np.sort(chosen, axis=1)
    if (ranked[:, 1:] == ranked[:, :-1]).any():
        raise ValueError("expected every episode to show a class once, got one twice; pass classes [E, C] of the split")
    return chosen
