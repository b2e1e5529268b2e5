"""Which predictions to keep: as many as reach a wanted accuracy, by probabilities that are calibrated."""

import numpy as np
from jaxtyping import Bool, Float


def kept_at(probabilities: Float[np.ndarray, "Q C"], accuracy: float) -> Bool[np.ndarray, " Q"]:
    """The largest set S of predictions with (1 / |S|) sum_{q in S} max_k p_k(q) >= accuracy.

    Where probabilities are calibrated, an answer is right with probability max_k p_k, so that the left side is the
    expected accuracy of S. Of all sets of a size the surest answers have the largest; the mean over the n surest falls
    with n, so the last n at which it suffices gives the largest set. Where the mean of all is larger, all are kept and
    more are right than was asked for: of many tasks these exceed the accuracy, the others reach it.

    Raises ValueError for an accuracy beyond (0, 1].
    """
    if not 0 < accuracy <= 1:  # written so that nan is refused
        raise ValueError(f"expected an accuracy above 0 and at most 1, got {accuracy}")
    confidence = np.max(probabilities, axis=1, initial=0.0).astype(np.float64)
    order = np.argsort(-confidence, kind="stable")
    means = np.cumsum(confidence[order]) / np.arange(1, len(order) + 1)
    kept = np.zeros(len(order), bool)
    kept[order[: np.searchsorted(-means, -accuracy, side="right")]] = True
    return kept
