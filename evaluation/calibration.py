"""One temperature for all predictions, fitted by maximum likelihood."""

import math

import numpy as np
from scipy.optimize import minimize_scalar

from evaluation.metrics import Labels, Probabilities

BOUNDS = (0.05, 20.0)


def fit_temperature(probabilities: Probabilities, labels: Labels) -> float:
    """The T that minimises the NLL of p^(1/T) / sum_c p_c^(1/T): probabilities [E, Q, C], labels [E, Q].

    The NLL is convex in 1/T, so the search over log T finds the one minimum. T is kept within BOUNDS, which are reached
    where every prediction is right (the best T is then 0) or they are no better than chance.
    """
    p = np.asarray(probabilities)
    logits = np.log(np.maximum(p, np.finfo(p.dtype).tiny)).astype(np.float64)
    own = np.take_along_axis(logits, np.asarray(labels)[..., None], axis=-1)[..., 0]
    # Relative to the largest, so that the sum of exponentials neither overflows nor vanishes.
    top = logits.max(axis=-1, keepdims=True)
    logits, own = logits - top, own - top[..., 0]

    def nll(log_temperature: float) -> float:
        inverse = math.exp(-log_temperature)
        return float((np.log(np.exp(inverse * logits).sum(axis=-1)) - inverse * own).mean())

    low, high = map(math.log, BOUNDS)
    found = minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-5})
    return math.exp(found.x)
