"""What chance alone would show: labels redrawn from a model's own probabilities, and episodes resampled.

The queries of one episode share a support set, so both treat the episode, not the query, as the unit.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from fewshot.evaluation.calibration_error import BINS, ERRORS, bin_of, equal_width
from fewshot.evaluation.predictions import Labels, Probabilities, checked, confidence_and_right, of_labels

DRAWS = 400


class Floor(NamedTuple):
    """The error that a perfectly calibrated model of the same probabilities shows by chance."""

    mean: float
    quantile95: float


class Reliability(NamedTuple):
    """Per bin: mean confidence, share right, number of predictions, and the band that chance allows; each [B]."""

    confidence: np.ndarray
    accuracy: np.ndarray
    counts: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Interval(NamedTuple):
    """Bounds of a 95% interval."""

    low: float
    high: float


UNKNOWN = Interval(float("nan"), float("nan"))


def redraw(
    rng: np.random.Generator, probabilities: Probabilities, correlation: float, draws: int = DRAWS
) -> Iterator[np.ndarray]:
    """Labels [E, Q] drawn from the probabilities, `draws` times: those of a perfectly calibrated model.

    u = Phi(sqrt(r) z_e + sqrt(1 - r) z_eq) with standard normal z is uniform whatever the correlation r is, and the
    label is the class where the cumulative probability, most probable class first, passes u: a draw from p exactly.
    Queries of one episode succeed together, as those do that share a support set; z_e is how lucky that set was.
    """
    p = np.asarray(probabilities, np.float64)
    order = np.argsort(-p, axis=-1, kind="stable")
    threshold = np.take_along_axis(p, order, axis=-1).cumsum(-1)[..., :-1]
    # Classes first: the loop below compares whole arrays, once for each class but the last.
    threshold = np.moveaxis(ndtri(np.minimum(threshold, 1.0)).astype(np.float32), -1, 0).copy()
    shape = p.shape[:2]
    for _ in range(draws):
        shared = np.sqrt(correlation) * rng.standard_normal((shape[0], 1), dtype=np.float32)
        own = np.sqrt(1 - correlation) * rng.standard_normal(shape, dtype=np.float32)
        drawn, place = shared + own, np.zeros(shape, np.intp)
        for passed in threshold:
            place += drawn >= passed
        yield of_labels(order, place)


def floors(
    rng: np.random.Generator,
    probabilities: Probabilities,
    labels: Labels,
    *,
    draws: int = DRAWS,
    bins: int = BINS,
    correlation: float | None = None,
) -> dict[str, Floor]:
    """The floor of every calibration error in ERRORS, from the same redrawn labels (`redraw`).

    With r = 0 (queries independent) they would come out too low, and a model would look worse than chance for a reason
    that is none of its own. r is the observed `within_episode_correlation` unless given.
    """
    p, _ = checked(probabilities, labels)
    r = within_episode_correlation(probabilities, labels, bins) if correlation is None else correlation
    held = {binned: binned(p, bins) for binned, _ in ERRORS.values()}
    sample = []
    for drawn in redraw(rng, p, r, draws):
        gaps = {binned: one.gaps(drawn) for binned, one in held.items()}
        sample.append([error(gaps[binned], held[binned].counts) for binned, error in ERRORS.values()])
    columns = np.array(sample).T
    return {
        name: Floor(float(column.mean()), float(np.quantile(column, 0.95)))
        for name, column in zip(ERRORS, columns, strict=True)
    }


def reliability(
    rng: np.random.Generator,
    probabilities: Probabilities,
    labels: Labels,
    *,
    draws: int = DRAWS,
    bins: int = BINS,
) -> Reliability:
    """The reliability diagram of the largest probability in bins of equal width; bins that hold nothing are left out.

    The band holds the share right of a perfectly calibrated model in 95% of redrawn labels, bin by bin.
    """
    p, y = checked(probabilities, labels)
    held = equal_width(p, bins)
    count, predicted = held.counts.sum(0), held.predicted.sum(0)
    used = count > 0
    r = within_episode_correlation(probabilities, labels, bins)
    gaps = np.array([held.gaps(drawn).sum(0) for drawn in (y, *redraw(rng, p, r, draws))])
    share = (predicted + gaps)[:, used] / count[used]
    low, high = np.quantile(share[1:], [0.025, 0.975], axis=0)
    return Reliability(predicted[used] / count[used], share[0], count[used].astype(int), low, high)


def within_episode_correlation(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """The r of `redraw` that gives pairs of queries of one episode and bin the covariance they were seen to have.

    Residuals are taken from the bin's own accuracy a, so that a calibration error common to all episodes is not
    mistaken for dependence. To first order in r a pair has covariance r phi(Phi^-1(a))^2 and
    r = sum_pairs residual residual' / sum_pairs phi^2, kept within [0, 1].
    """
    confidence, right = confidence_and_right(probabilities, labels)
    number = bin_of(confidence, bins)
    count, hits = (np.bincount(number.ravel(), w, minlength=bins) for w in (None, right.ravel()))
    accuracies = hits / np.maximum(count, 1)
    density = np.exp(-0.5 * np.square(ndtri(accuracies))) / np.sqrt(2 * np.pi)
    # One cell per episode and bin: the sum over ordered pairs is (sum)^2 - sum of squares.
    cell = np.arange(len(number))[:, None] * bins + number
    covariance = _pair_sum(right - accuracies[number], cell)
    scale = _pair_sum(density[number], cell)
    return float(np.clip(covariance / scale, 0.0, 1.0)) if scale > 0 else 0.0


def bootstrap(
    rng: np.random.Generator,
    statistic: Callable[..., float],
    *by_episode: np.ndarray,
    draws: int = 1000,
    least: float = -np.inf,
    most: float = np.inf,
) -> Interval:
    """95% interval of statistic(*by_episode) over E episodes drawn with replacement; every array is [E, ...].

    The basic interval 2 t - quantiles, t the statistic itself: where chance raises a statistic (as it does ECE) the
    resamples raise it once more, and mirroring takes that off. It is cut off at the least and the most that the
    statistic can be. One episode has no spread: the interval is nan.
    """
    episodes, value = len(by_episode[0]), statistic(*by_episode)
    if episodes < 2:
        return UNKNOWN
    chosen = (rng.integers(0, episodes, size=episodes) for _ in range(draws))
    sample = [statistic(*(array[rows] for array in by_episode)) for rows in chosen]
    low, high = np.quantile(sample, [0.025, 0.975])
    return Interval(*np.clip([2 * value - high, 2 * value - low], least, most).tolist())


def _pair_sum(values: np.ndarray, cell: np.ndarray) -> float:
    return float(np.square(np.bincount(cell.ravel(), values.ravel())).sum() - np.square(values).sum())


def plain_interval(interval: Interval) -> list[float] | None:
    """Bounds for a JSON file, which has no nan: None where there is but one episode."""
    return list(interval) if np.isfinite(interval).all() else None
