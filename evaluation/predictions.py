"""What every metric takes: probabilities [E, Q, C] and labels [E, Q] of E episodes with Q queries each.

An episode is the unit of independence: the queries of one episode share a support set, so they are right or wrong
together. All sums run in float64, on the host.
"""

import numpy as np
from jax import Array
from jaxtyping import Float, Int

Probabilities = Float[np.ndarray | Array, "E Q C"]
Labels = Int[np.ndarray | Array, "E Q"]


def checked(probabilities: np.ndarray | Array, labels: np.ndarray | Array) -> tuple[np.ndarray, np.ndarray]:
    """Both on the host, the probabilities in float64.

    Raises: ValueError on shapes that do not fit, labels beyond C, and probabilities that are negative, nan or do not
    sum to 1.
    """
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


def of_labels(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """values[e, q, labels[e, q]] for values [E, Q, C]: [E, Q]."""
    rows = np.arange(labels.size) * values.shape[-1]  # ten times as fast as take_along_axis
    return np.asarray(values.ravel()[rows + labels.ravel()].reshape(labels.shape))


def confidence_and_right(probabilities: Probabilities, labels: Labels) -> tuple[np.ndarray, np.ndarray]:
    """The largest probability of every query, and whether its class is the label: both [E, Q]."""
    p, y = checked(probabilities, labels)
    return np.minimum(p.max(-1), 1.0), p.argmax(-1) == y
