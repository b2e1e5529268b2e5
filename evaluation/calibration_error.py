"""Calibration errors: how far predicted probabilities are from the shares in which they come true.

All of them sort predictions into bins and compare, bin by bin, predicted with observed. `Bins` holds what does not
depend on the labels, so that thousands of redrawn labels (evaluation.resampling) cost little. An error computed from
finitely many labels is above 0 by chance: read it beside its floor (`resampling.floors`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fewshot.evaluation.predictions import Labels, Probabilities, checked, of_labels

BINS = 15


class Bins(NamedTuple):
    """Predictions "the label is c", sorted into B bins; those not judged have the cell B.

    cell [E, Q, C] is the bin of each; counts and predicted [E, B] are the number and the sum of the probabilities of
    what the bins hold of each episode.
    """

    cell: np.ndarray
    counts: np.ndarray
    predicted: np.ndarray

    def gaps(self, labels: np.ndarray) -> np.ndarray:
        """Predictions that come true under labels [E, Q], less the sum of their probabilities: [E, B]."""
        return _by_episode(of_labels(self.cell, labels), self.counts.shape[1]) - self.predicted


class BrierDecomposition(NamedTuple):
    """Brier = reliability - resolution + uncertainty + within_bins.

    reliability: squared distance between predicted and observed shares (0 is perfect). resolution: how much observed
    shares differ between bins (large is good). uncertainty: Brier score of predicting the share of each class.
    within_bins: what predictions that differ inside a bin add, so that the sum is exact.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bins: float


def ece(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Expected calibration error: sum_b n_b/n |accuracy_b - confidence_b|, pooled over all queries of all episodes.

    Bins are of equal width in the largest probability and closed on the right (Guo et al. 2017).
    """
    return _error(equal_width, mean_gap, probabilities, labels, bins)


def mce(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Maximum calibration error: the largest |accuracy_b - confidence_b| of the bins that hold a prediction."""
    return _error(equal_width, largest_gap, probabilities, labels, bins)


def ece_equal_mass(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """ECE in bins that hold equally many queries; queries of one confidence share a bin, whatever their number."""
    return _error(equal_mass, mean_gap, probabilities, labels, bins)


def ece_class_wise(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Class-wise ECE: the mean over classes c of the ECE of p_c against "the label is c" (Kull et al. 2019).

    The classes of few-shot episodes are numbered at random, so their errors differ only by chance; it judges all C
    probabilities of a query, where ECE judges the largest.
    """
    return _error(class_wise, mean_gap, probabilities, labels, bins)


def ece_debiased(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Root mean squared calibration error in bins of equal mass, debiased: the root of `squared_error_debiased`.

    The root of the magnitude, with the sign of the square: negative values are how an estimate of 0 scatters. For the
    true errors of one set of bins, ECE <= root mean square (Jensen), so a small value also bounds ECE.
    """
    return _error(equal_mass, root_gap_debiased, probabilities, labels, bins)


def squared_error_debiased(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Unbiased estimate of sum_b n_b/n gap_b^2, in bins of equal mass, whatever the dependence inside an episode.

    In each bin the mean of residual * residual' over all pairs of queries of *different* episodes, residual = right -
    confidence: with independent episodes its mean is gap_b^2. With one query an episode and equal confidences in a bin
    this is the estimator of Kumar, Liang and Ma (2019), (accuracy - confidence)^2 - accuracy (1 - accuracy)/(n_b - 1),
    which queries that share a support set would bias. nan where no bin holds queries of two episodes.
    """
    return _error(equal_mass, squared_gap_debiased, probabilities, labels, bins)


def brier_decomposition(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> BrierDecomposition:
    """The terms of the Brier score summed over classes, in class-wise bins of equal width.

    Murphy (1973), with the within-bin variance and covariance of Stephenson, Coelho and Jolliffe (2008) as one term.
    """
    p, y = checked(probabilities, labels)
    held = class_wise(p, bins)
    count, queries = held.counts.sum(0), y.size
    predicted = held.predicted.sum(0) / np.maximum(count, 1)
    observed = predicted + held.gaps(y).sum(0) / np.maximum(count, 1)
    base = np.bincount(y.ravel(), minlength=p.shape[-1]) / queries
    true = np.arange(p.shape[-1]) == y[..., None]
    offset = p - predicted[held.cell]
    within = np.square(offset) - 2 * offset * (true - observed[held.cell])
    return BrierDecomposition(
        reliability=float(count @ np.square(observed - predicted) / queries),
        resolution=float(count @ np.square(observed - np.repeat(base, bins)) / queries),
        uncertainty=float((base * (1 - base)).sum()),
        within_bins=float(within.sum() / queries),
    )


def equal_width(p: np.ndarray, bins: int) -> Bins:
    """Bins of the largest probability, of equal width and closed on the right."""
    confidence = np.minimum(p.max(-1), 1.0)
    return _of_largest(p, confidence, bin_of(confidence, bins), bins)


def equal_mass(p: np.ndarray, bins: int) -> Bins:
    """Bins of the largest probability that hold equally many queries, up to ties."""
    confidence = np.minimum(p.max(-1), 1.0)
    ranked = np.sort(confidence, axis=None)
    upper = ranked[-(-np.arange(1, bins + 1) * ranked.size // bins) - 1]  # ceil(b n / bins), without rounding
    return _of_largest(p, confidence, np.searchsorted(upper, confidence), bins)


def class_wise(p: np.ndarray, bins: int) -> Bins:
    """`bins` bins of equal width for each class: bin b of class c is c bins + b."""
    cells = bins * p.shape[-1]
    cell = bin_of(p, bins) + bins * np.arange(p.shape[-1])
    return Bins(cell, _by_episode(cell, cells), _by_episode(cell, cells, p))


def mean_gap(gaps: np.ndarray, count: np.ndarray) -> float:
    """sum_b n_b/n |observed_b - predicted_b| of gaps and counts [E, B]."""
    return float(np.abs(gaps.sum(0)).sum() / count.sum())


def largest_gap(gaps: np.ndarray, count: np.ndarray) -> float:
    """Largest |observed_b - predicted_b| of the bins that hold a prediction."""
    held = count.sum(0)
    return float((np.abs(gaps.sum(0))[held > 0] / held[held > 0]).max())


def squared_gap_debiased(gaps: np.ndarray, count: np.ndarray) -> float:
    """Mean product of the residuals of two queries of one bin and different episodes, bins weighted by their size.

    Sums over pairs of different episodes are (sum over all)^2 - sum over episodes of (their sum)^2.
    """
    pairs = np.square(count.sum(0)) - np.square(count).sum(0)
    products = np.square(gaps.sum(0)) - np.square(gaps).sum(0)
    known = pairs > 0
    if not known.any():
        return float("nan")
    return float(np.average(products[known] / pairs[known], weights=count.sum(0)[known]))


def root_gap_debiased(gaps: np.ndarray, count: np.ndarray) -> float:
    """sign(s) sqrt|s| of the debiased square s."""
    squared = squared_gap_debiased(gaps, count)
    return float(np.sign(squared) * np.sqrt(np.abs(squared)))


# The errors that have a floor, by their names in the evaluation's JSON file: how to bin, and what to compute.
ERRORS: Mapping[str, tuple[Callable[[np.ndarray, int], Bins], Callable[[np.ndarray, np.ndarray], float]]] = {
    "ece": (equal_width, mean_gap),
    "mce": (equal_width, largest_gap),
    "ece_equal_mass": (equal_mass, mean_gap),
    "ece_class_wise": (class_wise, mean_gap),
    "ece_debiased": (equal_mass, root_gap_debiased),
}


def _error(binned: Callable, error: Callable, probabilities: Probabilities, labels: Labels, bins: int) -> float:
    p, y = checked(probabilities, labels)
    held = binned(p, bins)
    return float(error(held.gaps(y), held.counts))


def bin_of(p: np.ndarray, bins: int) -> np.ndarray:
    """The bin of equal width, closed on the right, of every probability."""
    return np.clip(np.ceil(p * bins).astype(int) - 1, 0, bins - 1)


def _of_largest(p: np.ndarray, confidence: np.ndarray, number: np.ndarray, bins: int) -> Bins:
    """Only "the label is the most probable class" is judged."""
    cell = np.full(p.shape, bins)
    np.put_along_axis(cell, p.argmax(-1)[..., None], number[..., None], axis=-1)
    return Bins(cell, _by_episode(number, bins), _by_episode(number, bins, confidence))


def _by_episode(cell: np.ndarray, cells: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Sums of weights (ones by default) in each cell of each episode: [E, cells]; the cell `cells` is left out."""
    episodes = len(cell)
    flat = cell.reshape(episodes, -1) + (cells + 1) * np.arange(episodes)[:, None]
    sums = np.bincount(flat.ravel(), None if weights is None else weights.ravel(), minlength=episodes * (cells + 1))
    return sums.reshape(episodes, cells + 1)[:, :-1].astype(float)
