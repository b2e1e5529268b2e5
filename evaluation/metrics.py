"""Accuracy, proper scores and ranking of predicted class probabilities, and everything at once: `summarise`.

Predictions are probabilities [E, Q, C] and labels [E, Q], as evaluation.predictions says.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import scipy  # not its parts, which are loaded at their first use: programs start sooner
from jax import Array
from jaxtyping import Bool, Float

from fewshot.evaluation.calibration_error import BINS, ERRORS, brier_decomposition
from fewshot.evaluation.calibration_error import ece as ece
from fewshot.evaluation.calibration_error import mce as mce
from fewshot.evaluation.calibration_interval import calibration_interval
from fewshot.evaluation.predictions import Labels, Probabilities, checked, confidence_and_right, of_labels
from fewshot.evaluation.resampling import UNKNOWN, Interval, bootstrap, floors

NORMAL_95 = 1.959963984540054
Metric: TypeAlias = float | int | bool | None  # None: undefined, as the interval of one episode
Metrics: TypeAlias = dict[str, Metric]  # by the names of the evaluation's JSON file


class RiskCoverage(NamedTuple):
    """For the k most confident of n queries: their share k/n, and the share of errors among them; both [n]."""

    coverage: np.ndarray
    risk: np.ndarray


def accuracy(probabilities: Probabilities, labels: Labels) -> float:
    """Share of queries whose most probable class is their label. Raises: ValueError on malformed predictions."""
    return float(episode_accuracy(probabilities, labels).mean())


def accuracy_ci95(probabilities: Probabilities, labels: Labels) -> float:
    """Half-width of the 95% interval of the accuracy: 1.96 sd / sqrt(E) over the accuracies of the E episodes.

    One episode has no spread: the result is nan.
    """
    episodes = episode_accuracy(probabilities, labels)
    if len(episodes) < 2:
        return float("nan")
    return float(NORMAL_95 * episodes.std(ddof=1) / np.sqrt(len(episodes)))


def accuracy_std_batches(probabilities: Probabilities, labels: Labels, batches: int) -> float:
    """The papers' "+-": standard deviation (divisor: their number) of the mean accuracies of consecutive batches.

    Episodes are divided as evenly as they can be. Raises: ValueError unless 1 <= batches <= E.
    """
    episodes = episode_accuracy(probabilities, labels)
    if not 1 <= batches <= len(episodes):
        raise ValueError(f"batches must lie between 1 and the {len(episodes)} episodes, got {batches}; lower batches")
    return float(np.std([batch.mean() for batch in np.array_split(episodes, batches)]))


def nll(probabilities: Probabilities, labels: Labels) -> float:
    """Mean of -log p(label) in nats.

    A probability that has underflowed to 0 counts as the smallest normal number of its dtype, which bounds its term
    from below (87.3 nats in float32).
    """
    return float(episode_nll(probabilities, labels).mean())


def brier(probabilities: Probabilities, labels: Labels) -> float:
    """Mean over queries of sum_c (p_c - Y_c)^2, Y one-hot: between 0 and 2."""
    return float(episode_brier(probabilities, labels).mean())


def episode_accuracy(probabilities: Probabilities, labels: Labels) -> np.ndarray:
    """Accuracy of each episode [E]."""
    return np.asarray(confidence_and_right(probabilities, labels)[1].mean(-1))


def episode_nll(probabilities: Probabilities, labels: Labels) -> np.ndarray:
    """NLL of each episode [E]."""
    tiny = np.finfo(np.asarray(probabilities).dtype).tiny
    return np.asarray(-np.log(np.maximum(of_labels(*checked(probabilities, labels)), tiny)).mean(-1))


def episode_brier(probabilities: Probabilities, labels: Labels) -> np.ndarray:
    """Brier score of each episode [E]."""
    p, y = checked(probabilities, labels)
    return np.asarray((np.square(p).sum(-1) - 2 * of_labels(p, y) + 1).mean(-1))


# Scores that are means over episodes, by their names in the JSON file, and the most that each can be.
EPISODE_SCORES = {"accuracy": episode_accuracy, "nll": episode_nll, "brier": episode_brier}
MOST = {"accuracy": 1.0, "nll": np.inf, "brier": 2.0}


def auroc(
    scores: Float[np.ndarray | Array, "*E N"], positive: Bool[np.ndarray | Array, "*E N"]
) -> Float[np.ndarray, "*E"]:
    """Area under the ROC curve: P(score of a positive > score of a negative), ties counted half.

    The Mann-Whitney statistic: the sum of the ranks of the positives, less its least value, over their pairs. Along
    the last axis; nan where one of the two kinds is missing.
    """
    rank = scipy.stats.rankdata(np.asarray(scores), axis=-1)
    chosen = np.asarray(positive)
    count = chosen.sum(-1)
    pairs = count * (chosen.shape[-1] - count)
    above = (rank * chosen).sum(-1) - count * (count + 1) / 2
    return np.asarray(np.where(pairs > 0, above, np.nan) / np.maximum(pairs, 1))


def risk_coverage(probabilities: Probabilities, labels: Labels) -> RiskCoverage:
    """Errors among the most confident queries, for every number of them.

    Equally confident queries come in no order: each counts as the share of errors among them.
    """
    confidence, right = confidence_and_right(probabilities, labels)
    _, level, count = np.unique(-confidence.ravel(), return_inverse=True, return_counts=True)
    share = np.bincount(level.ravel(), ~right.ravel()) / count
    kept = np.arange(1, right.size + 1)
    return RiskCoverage(kept / right.size, np.repeat(share, count).cumsum() / kept)


def aurc(probabilities: Probabilities, labels: Labels) -> float:
    """Area under the risk-coverage curve: the mean risk over the n coverages (Geifman, Uziel and El-Yaniv 2019)."""
    return float(risk_coverage(probabilities, labels).risk.mean())


def summarise(rng: np.random.Generator, probabilities: Probabilities, labels: Labels, *, batches: int = 5) -> Metrics:
    """All metrics under the names of the evaluation's JSON file; one that is undefined (nan) is None.

    For each calibration error x, `x_floor` is the mean of its floor and `x_floor_q95` its 95% quantile;
    `ece_within_band` says whether ECE lies below that, as that of 19 in 20 perfectly calibrated models does. `auroc`
    is how well confidence tells right from wrong; of fewer episodes than batches each is a batch. Raises: ValueError
    as the metrics do.
    """
    found = floors(rng, probabilities, labels)
    confidence, right = confidence_and_right(probabilities, labels)
    values = {
        "accuracy": accuracy(probabilities, labels),
        "accuracy_ci95": accuracy_ci95(probabilities, labels),
        "accuracy_std_batches": accuracy_std_batches(probabilities, labels, min(batches, len(labels))),
        "nll": nll(probabilities, labels),
        "brier": brier(probabilities, labels),
        **{f"brier_{name}": value for name, value in brier_decomposition(probabilities, labels)._asdict().items()},
        **calibration_errors(probabilities, labels),
        **{f"{name}_floor": floor.mean for name, floor in found.items()},
        **{f"{name}_floor_q95": floor.quantile95 for name, floor in found.items()},
        "aurc": aurc(probabilities, labels),
        "auroc": float(auroc(confidence.ravel(), right.ravel())),
    }
    plain = {name: value if np.isfinite(value) else None for name, value in values.items()}
    return plain | {"ece_within_band": values["ece"] <= values["ece_floor_q95"], "episodes": len(labels)}


def calibration_errors(probabilities: Probabilities, labels: Labels, bins: int = BINS) -> dict[str, float]:
    """Every calibration error by its name in ERRORS."""
    p, y = checked(probabilities, labels)
    held = {binned: binned(p, bins) for binned, _ in ERRORS.values()}
    return {name: error(held[binned].gaps(y), held[binned].counts) for name, (binned, error) in ERRORS.items()}


def intervals(rng: np.random.Generator, probabilities: Probabilities, labels: Labels) -> dict[str, Interval]:
    """95% intervals over episodes: accuracy, NLL and Brier score by the bootstrap, `ece_debiased` as its file says.

    The one of `ece_debiased` is of the root mean squared error, which is not negative. ECE has none: (nan, nan). A
    bootstrap of it holds a true value of 0 in half of all experiments (docs/evaluation.md).
    """
    found = {
        name: bootstrap(rng, np.mean, of(probabilities, labels), least=0.0, most=MOST[name])
        for name, of in EPISODE_SCORES.items()
    }
    return {**found, "ece": UNKNOWN, "ece_debiased": calibration_interval(rng, probabilities, labels)}
