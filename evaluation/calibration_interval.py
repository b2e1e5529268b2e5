"""A 95% interval of the root mean squared calibration error, which holds at 0 too (docs/evaluation.md, M3 to M6).

The debiased square (M1) is, in 15 bins, the squared length of a vector of gaps that is seen with noise, less the noise.
At 0 it has no derivative that says anything, and a bootstrap that resamples about the gaps *seen* is wrong there: here
noise is drawn about every length that the true gaps may have, and those that make the one seen an extreme are left out.

Letters: E episodes, B bins, M draws.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy  # not its parts, which are loaded at their first use: programs start sooner
from jaxtyping import Float

from fewshot.evaluation.calibration_error import BINS, equal_mass
from fewshot.evaluation.predictions import Labels, Probabilities, checked
from fewshot.evaluation.resampling import UNKNOWN, Interval

TAIL = 0.025
DRAWS = 1000


class Seen(NamedTuple):
    """Gaps sqrt(w_b) g_b [B] as seen, what each episode adds to their noise [E, B], and the debiased square (M1)."""

    gaps: Float[np.ndarray, " B"]
    noise: Float[np.ndarray, "E B"]
    square: float


def calibration_interval(
    rng: np.random.Generator, probabilities: Probabilities, labels: Labels, *, draws: int = DRAWS, bins: int = BINS
) -> Interval:
    """95% interval of (sum_b n_b/n gap_b^2)^(1/2) in bins of equal mass, for which `ece_debiased` is the estimate.

    Its low end is 0 where chance explains what is seen. nan where no bin holds queries of two episodes. Raises:
    ValueError on malformed predictions.
    """
    p, y = checked(probabilities, labels)
    held = equal_mass(p, bins)
    return gap_interval(rng, held.gaps(y), held.counts, draws)


def gap_interval(
    rng: np.random.Generator, gaps: Float[np.ndarray, "E B"], count: Float[np.ndarray, "E B"], draws: int = DRAWS
) -> Interval:
    """The same from the gaps and counts of `calibration_error.Bins`."""
    seen = _seen(gaps, count)
    if seen is None:
        return UNKNOWN
    signs = 2.0 * rng.integers(0, 2, size=(draws, len(seen.noise))) - 1
    low, high = _limits(seen, signs @ seen.noise)
    return Interval(*np.clip([low, high], 0.0, 1.0).tolist())


def _seen(gaps: np.ndarray, count: np.ndarray) -> Seen | None:
    """(M3): sums of episodes, scaled so that (M1) is the squared length of their sum, less their squared lengths."""
    total = count.sum(0)
    pairs = np.square(total) - np.square(count).sum(0)
    known = pairs > 0
    if not known.any():
        return None
    gaps, count, total, pairs = gaps[:, known], count[:, known], total[known], pairs[known]
    episodes, root = len(gaps), np.sqrt(total / total.sum() / pairs)
    scaled = root * gaps
    noise = root * (gaps - count * (gaps.sum(0) / total)) * np.sqrt(episodes / (episodes - 1))
    whole = scaled.sum(0)
    return Seen(whole, noise, float(np.square(whole).sum() - np.square(scaled).sum()))


def _limits(seen: Seen, noise: Float[np.ndarray, "M B"]) -> tuple[float, float]:
    """Lengths of the true gaps at which a square as large, or as small, as the one seen has probability TAIL (M5).

    The low one is 0 where so large a square is no extreme at 0; the high one is of 0 where the square is below. What
    longer gaps have and those seen have not is taken to lie where noise is largest (M6): it is what all bins share that
    is missed most easily, and varies most.
    """
    spread, square = np.square(seen.noise).sum(), max(seen.square, 0.0)
    chance = np.square(noise).sum(-1) - spread
    if spread == 0:
        return float(np.sqrt(square)), float(np.sqrt(square))
    seen_way, noisiest = _unit(seen.gaps), np.linalg.eigh(seen.noise.T @ seen.noise)[1][:, -1]
    noisiest = noisiest if noisiest @ seen_way >= 0 else -noisiest

    def above(length: float) -> float:
        """By how much the largest squares (M4) of gaps of that length exceed the one seen."""
        return float(np.quantile(length**2 + 2 * length * (noise @ seen_way) + chance, 1 - TAIL) - seen.square)

    def below(length: float) -> float:
        """By how much the smallest ones do."""
        share = min(np.sqrt(square) / length, 1.0)
        way = _unit(share * seen_way + np.sqrt(1 - share**2) * noisiest)
        return float(np.quantile(length**2 + 2 * length * (noise @ way) + chance, TAIL) - square)

    farthest = np.sqrt(np.square(noise).sum(-1).max())
    most = farthest + np.sqrt(farthest**2 + square + spread)  # there every draw is above
    return _crossing(above, 0.0, most), _crossing(below, np.sqrt(square) + 1e-9, most)


def _crossing(function: Callable[[float], float], least: float, most: float) -> float:
    """Where it turns positive; `least` if it is so there."""
    return float(least if function(least) >= 0 else scipy.optimize.brentq(function, least, most, xtol=1e-7))


def _unit(vector: np.ndarray) -> np.ndarray:
    """Of length 1, or 0 where it has none."""
    length = np.sqrt(np.square(vector).sum())
    return vector / length if length > 0 else vector
