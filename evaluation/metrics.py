"""Accuracy and calibration of predicted class probabilities, with what chance alone would show.

Predictions arrive as probabilities [E, Q, C] and labels [E, Q]: E episodes of Q queries each. An episode is the unit of
independence: the queries of one episode share a support set, so they are right or wrong together.
All sums run in float64, on the host.
"""

from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int
from scipy.special import ndtri

Probabilities = Float[np.ndarray | Array, "E Q C"]
Labels = Int[np.ndarray | Array, "E Q"]

BINS = 15
NORMAL_95 = 1.959963984540054


class Floor(NamedTuple):
    """The ECE that a perfectly calibrated model of the same confidences shows by chance."""

    mean: float
    quantile95: float


class _Bins(NamedTuple):
    """Top-label predictions sorted into equal-width bins of confidence; every field is [E, Q]."""

    confidence: np.ndarray
    correct: np.ndarray
    number: np.ndarray


def accuracy(probabilities: Probabilities, labels: Labels) -> float:
    """Share of queries whose most probable class is their label. Raises: ValueError on malformed predictions."""
    return float(_episode_accuracy(probabilities, labels).mean())


def accuracy_ci95(probabilities: Probabilities, labels: Labels) -> float:
    """Half-width of the 95% interval of the accuracy: 1.96 sd / sqrt(E) over the accuracies of the E episodes.

    One episode has no spread: the result is nan.
    """
    episodes = _episode_accuracy(probabilities, labels)
    if len(episodes) < 2:
        return float("nan")
    return float(NORMAL_95 * episodes.std(ddof=1) / np.sqrt(len(episodes)))


def accuracy_std_batches(probabilities: Probabilities, labels: Labels, batches: int) -> float:
    """The papers' "+-": standard deviation (divisor: their number) of the mean accuracies of consecutive batches.

    Episodes are divided as evenly as they can be. Raises: ValueError unless 1 <= batches <= E.
    """
    episodes = _episode_accuracy(probabilities, labels)
    if not 1 <= batches <= len(episodes):
        raise ValueError(f"batches must lie between 1 and the {len(episodes)} episodes, got {batches}; lower batches")
    return float(np.std([batch.mean() for batch in np.array_split(episodes, batches)]))


def nll(probabilities: Probabilities, labels: Labels) -> float:
    """Mean of -log p(label) in nats.

    A probability that has underflowed to 0 counts as the smallest normal number of its dtype, which bounds its term
    from below (87.3 nats in float32).
    """
    tiny = np.finfo(np.asarray(probabilities).dtype).tiny
    p, y = _checked(probabilities, labels)
    return float(-np.log(np.maximum(np.take_along_axis(p, y[..., None], axis=-1), tiny)).mean())


def brier(probabilities: Probabilities, labels: Labels) -> float:
    """Mean over queries of sum_c (p_c - Y_c)^2, Y one-hot: between 0 and 2."""
    p, y = _checked(probabilities, labels)
    own = np.take_along_axis(p, y[..., None], axis=-1)[..., 0]
    return float((np.square(p).sum(-1) - 2 * own + 1).mean())


def ece(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Expected calibration error: sum_b n_b/n |accuracy_b - confidence_b|, pooled over all queries of all episodes.

    Bins are of equal width in the largest probability and closed on the right.
    """
    binned = _binned(probabilities, labels, bins)
    return float(_ece(binned.correct, binned, bins))


def mce(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """Maximum calibration error: the largest |accuracy_b - confidence_b| of the bins that hold a prediction."""
    binned = _binned(probabilities, labels, bins)
    counts = np.bincount(binned.number.ravel(), minlength=bins)
    gaps = np.abs(_bin_sums(binned.correct - binned.confidence, binned.number, bins))
    return float((gaps[counts > 0] / counts[counts > 0]).max())


def ece_floor(
    rng: np.random.Generator,
    probabilities: Probabilities,
    labels: Labels,
    *,
    draws: int = 400,
    bins: int = BINS,
    correlation: float | None = None,
) -> Floor:
    """ECE of a perfectly calibrated model with the same confidences: its mean and 95% quantile over redrawn labels.

    "The prediction of query q in episode e is right" is redrawn as sqrt(r) z_e + sqrt(1 - r) z_eq < Phi^-1(confidence)
    with standard normal z. Each query is then right with exactly its confidence, whatever r is (the model is
    calibrated), and the queries of one episode succeed together, as those do that share a support set: z_e is how
    lucky that set was. With r = 0 (queries independent) the floor comes out too low, so a model would look worse than
    chance for a reason that is none of its own. r is the observed `within_episode_correlation` unless given.
    """
    binned = _binned(probabilities, labels, bins)
    r = _correlation(binned, bins) if correlation is None else correlation
    threshold = ndtri(binned.confidence).astype(np.float32)
    shape = threshold.shape
    sample = np.empty(draws)
    for draw in range(draws):
        shared = np.sqrt(r) * rng.standard_normal((shape[0], 1), dtype=np.float32)
        own = np.sqrt(1 - r) * rng.standard_normal(shape, dtype=np.float32)
        sample[draw] = _ece((shared + own) < threshold, binned, bins)
    return Floor(float(sample.mean()), float(np.quantile(sample, 0.95)))


def within_episode_correlation(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> float:
    """The r of `ece_floor` that gives pairs of queries of one episode and bin the covariance they were seen to have.

    Residuals are taken from the bin's own accuracy a, so that a calibration error common to all episodes is not
    mistaken for dependence. To first order in r a pair has covariance r phi(Phi^-1(a))^2 and
    r = sum_pairs residual residual' / sum_pairs phi^2, kept within [0, 1].
    """
    return _correlation(_binned(probabilities, labels, bins), bins)


def summarise(
    rng: np.random.Generator, probabilities: Probabilities, labels: Labels, *, batches: int = 5
) -> dict[str, float | int | None]:
    """All metrics under the names of the evaluation's JSON file; one that is undefined (nan) is None.

    `ece_floor` is the mean of the floor and `ece_floor_q95` its 95% quantile. Raises: ValueError as the metrics do.
    """
    floor = ece_floor(rng, probabilities, labels)
    values = {
        "accuracy": accuracy(probabilities, labels),
        "accuracy_ci95": accuracy_ci95(probabilities, labels),
        "accuracy_std_batches": accuracy_std_batches(probabilities, labels, batches),
        "nll": nll(probabilities, labels),
        "brier": brier(probabilities, labels),
        "ece": ece(probabilities, labels),
        "mce": mce(probabilities, labels),
        "ece_floor": floor.mean,
        "ece_floor_q95": floor.quantile95,
    }
    return {name: value if np.isfinite(value) else None for name, value in values.items()} | {"episodes": len(labels)}


def _checked(probabilities: np.ndarray | Array, labels: np.ndarray | Array) -> tuple[np.ndarray, np.ndarray]:
    p, y = np.asarray(probabilities), np.asarray(labels)
    if p.ndim != 3 or p.shape[:2] != y.shape or p.size == 0:
        raise ValueError(f"expected probabilities [E, Q, C] and labels [E, Q], got {p.shape} and {y.shape}")
    if y.min() < 0 or y.max() >= p.shape[-1]:
        raise ValueError(f"labels must lie in 0..{p.shape[-1] - 1}, got {y.min()}..{y.max()}; renumber the classes")
    tolerance = float(np.sqrt(np.finfo(p.dtype).eps))
    p = p.astype(np.float64)
    bad = ~((p >= 0).all(-1) & (np.abs(p.sum(-1) - 1) <= tolerance))  # written so that nan is bad
    if bad.any():
        episode, query = np.argwhere(bad)[0]
        raise ValueError(
            f"each query's probabilities must be >= 0 and sum to 1, got {p[episode, query]} in episode {episode}, "
            f"query {query} ({bad.sum()} such queries); look at that task's inference result code"
        )
    return p, y


def _episode_accuracy(probabilities: np.ndarray | Array, labels: np.ndarray | Array) -> np.ndarray:
    p, y = _checked(probabilities, labels)
    return np.asarray((p.argmax(-1) == y).mean(-1))


def _binned(probabilities: np.ndarray | Array, labels: np.ndarray | Array, bins: int) -> _Bins:
    p, y = _checked(probabilities, labels)
    confidence = np.minimum(p.max(-1), 1.0)
    index = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    return _Bins(confidence, p.argmax(-1) == y, index)


def _bin_sums(values: np.ndarray, index: np.ndarray, bins: int) -> np.ndarray:
    return np.bincount(index.ravel(), weights=values.ravel(), minlength=bins)


def _ece(correct: np.ndarray, binned: _Bins, bins: int) -> float:
    gaps = _bin_sums(correct - binned.confidence, binned.number, bins)
    return float(np.abs(gaps).sum() / correct.size)


def _correlation(binned: _Bins, bins: int) -> float:
    counts = np.maximum(np.bincount(binned.number.ravel(), minlength=bins), 1)
    accuracies = _bin_sums(binned.correct, binned.number, bins) / counts
    density = np.exp(-0.5 * np.square(ndtri(accuracies))) / np.sqrt(2 * np.pi)
    # One cell per episode and bin: the sum over ordered pairs is (sum)^2 - sum of squares.
    episodes = np.arange(len(binned.number))[:, None]
    cells = len(binned.number) * bins
    covariance = _pair_sum(binned.correct - accuracies[binned.number], episodes * bins + binned.number, cells)
    scale = _pair_sum(density[binned.number], episodes * bins + binned.number, cells)
    return float(np.clip(covariance / scale, 0.0, 1.0)) if scale > 0 else 0.0


def _pair_sum(values: np.ndarray, cell: np.ndarray, cells: int) -> float:
    return float(np.square(_bin_sums(values, cell, cells)).sum() - np.square(values).sum())
