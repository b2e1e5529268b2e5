"""One temperature for all predictions, fitted by maximum likelihood; and, to compare with, what the papers do."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy  # not its parts, which are loaded at their first use: programs start sooner
from jaxtyping import Float

from fewshot.evaluation.calibration_error import ece
from fewshot.evaluation.predictions import Labels, Probabilities
from fewshot.inference.predictive import temper

BOUNDS = (0.05, 20.0)
# New classes are harder for a network than those that it was trained on: by how much the log temperature of least NLL
# is higher for them, on average over validation classes of four data sets (docs/results/temperatures.md).
NEW_CLASSES = 0.2
# The published grid is 0.2, 0.21, ..., 0.59 for both, for a latent temperature that replaces the likelihood's own. Here
# it divides the latents of any likelihood, whose best values differ more: coarser steps of a wider range.
LATENT_GRID = tuple(float(t) for t in np.geomspace(0.2, 2.0, 9))
PREDICTIVE_GRID = tuple(float(t) for t in np.geomspace(0.1, 2.0, 41))


class PapersTemperatures(NamedTuple):
    """Temperatures of the latents and of the averaged probabilities, and the ECE that they were chosen for."""

    latent: float
    predictive: float
    ece: float


def fit_temperature(probabilities: Probabilities, labels: Labels, bounds: tuple[float, float] = BOUNDS) -> float:
    """The T that minimises the NLL of p^(1/T) / sum_c p_c^(1/T): probabilities [E, Q, C], labels [E, Q].

    The NLL is convex in 1/T, so the search over log T finds the one minimum. T is kept within the bounds, which are
    reached where every prediction is right (the best T is then 0) or they are no better than chance.
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

    low, high = map(math.log, bounds)
    found = scipy.optimize.minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-5})
    return math.exp(found.x)


def for_new_classes(temperature: float) -> float:
    """The temperature for classes that a network never saw, from that of its training classes."""
    return temperature * math.exp(NEW_CLASSES)


def papers_temperatures(
    probabilities: Mapping[float, Probabilities],
    labels: Labels,
    grid: Float[np.ndarray, " n"] | tuple[float, ...] = PREDICTIVE_GRID,
) -> PapersTemperatures:
    """The published procedure, for comparison only: the two temperatures of least ECE on a grid.

    `probabilities` holds predictions [E, Q, C] at each latent temperature t, E_q p(y | f / t); the predictive one
    tempers that mean, p^(1/T). The released code of CDKT (the paper's 5.2: "we first tune the temperature parameter on
    the validation set") does so on 600 validation episodes, once for ECE and once more for MCE; this is the one for
    ECE. It minimises what is then reported and is no estimate: a second temperature gains what chance offers.
    """
    found = [
        PapersTemperatures(latent, float(t), ece(np.asarray(temper(jnp.asarray(p), float(t))), labels))
        for latent, p in probabilities.items()
        for t in grid
    ]
    return min(found, key=lambda one: one.ece)
