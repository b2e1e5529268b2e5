"""Hyper-parameters integrated out: weighted points of their posterior, by adaptive importance sampling.

The first points are those of the prior, and of Student-t distributions about modes where these are given. Each later
round draws from one with the mean and covariance of all points so far, weighted under a power of the likelihood at
which enough of them count. A point counts against the mixture of all proposals (multiple importance sampling with the
balance heuristic, Veach & Guibas 1995; adaptive, Cornuet et al. 2012). It takes no gradient; `posterior_modes` does. A
mode that is not given, and that no point of the first rounds comes near, is not found, however high it is.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import qmc

from fewshot.models.gaussian import cholesky_inverse, triangular_root
from fewshot.models.gaussian.dense import positive_part

BLOCK, ROUNDS = 256, 12  # points that are drawn at once, of the prior twice; and the most rounds after these
ENOUGH = 200.0  # effective number of points, at which no round follows
FEWEST = 20.0  # effective number of points that a proposal is made from, by a power of the likelihood
FLAT = 1e-4  # of a coordinate's deviation that no other explains, below which points lie in fewer dimensions
FREEDOM, WIDER = 5, 1.5  # degrees of freedom of a proposal, and its covariance in units of the points'
# Of modes, in units of the prior: the slope at which a search ends, half the distance of two slopes whose difference is
# a curvature, the least curvature, the distance below which two modes are one; and nats below the highest to keep one.
FLAT_SLOPE, HALF, LEAST_CURVATURE, SAME, LOWER = 1e-2, 1e-4, 0.2, 0.05, 10.0

_root = jax.jit(triangular_root)


class PosteriorPoints(NamedTuple):
    """Points [M, P] of a posterior with weights [M] that sum to 1, and the log of the prior's mean likelihood."""

    points: Float[np.ndarray, "M P"]
    weights: Float[np.ndarray, " M"]
    log_evidence: float

    def thinned(self, number: int) -> "PosteriorPoints":
        """So many points that stand for all, with weights again; some can come twice.

        Systematic resampling along the first number by roots of the weights, so that means of what grows with it, as
        variances do with a scale, keep points of small weight.
        """
        order = np.argsort(self.points[:, 0])
        shares = np.sqrt(self.weights[order])
        shares /= shares.sum()
        chosen = np.searchsorted(np.cumsum(shares), (np.arange(number) + 0.5) / number)
        chosen = np.minimum(chosen, len(shares) - 1)
        weights = self.weights[order][chosen] / shares[chosen]
        return self._replace(points=self.points[order][chosen], weights=weights / weights.sum())


class Mode(NamedTuple):
    """A local maximum [P] of a posterior's density, and the covariance [P, P] by its curvature there."""

    point: Float[np.ndarray, " P"]
    covariance: Float[np.ndarray, "P P"]


class _Proposal(NamedTuple):
    """A normal or, with `freedom`, a Student-t distribution: centre [P], and a root [P, P] of its scale matrix."""

    centre: Float[np.ndarray, " P"]
    root: Float[np.ndarray, "P P"]
    freedom: float = np.inf

    def points(self, number: int, seed: int) -> Float[np.ndarray, "M P"]:
        """Low-discrepancy points [M, P]: of scrambled Sobol, a last dimension for the common divisor."""
        uniform = qmc.Sobol(len(self.centre) + 1, seed=seed).random(number).clip(1e-12, 1 - 1e-12)
        normal = stats.norm.ppf(uniform[:, :-1])
        if np.isfinite(self.freedom):
            normal /= np.sqrt(stats.chi2.ppf(uniform[:, -1:], self.freedom) / self.freedom)
        return self.centre + normal @ self.root.T

    def log_density(self, points: Float[np.ndarray, "M P"]) -> Float[np.ndarray, " M"]:
        """Of coordinates in units of their own deviations: some may be known far better than others."""
        shape = self.root @ self.root.T
        unit = np.sqrt(np.diag(shape))
        at, alike = (points - self.centre) / unit, shape / np.outer(unit, unit)
        zero = np.zeros(len(unit))
        one = stats.multivariate_normal(zero, alike)
        if np.isfinite(self.freedom):
            one = stats.multivariate_t(zero, alike, self.freedom)
        return one.logpdf(at).reshape(-1) - np.sum(np.log(unit))


def posterior_points(
    log_likelihood: Callable[[Float[np.ndarray, "M P"]], Float[np.ndarray, " M"]],
    centre: Float[np.ndarray, " P"],
    spread: Float[np.ndarray, " P"],
    seed: int = 0,
    modes: Sequence[Mode] = (),
) -> PosteriorPoints:
    """The posterior of P numbers with independent normal priors N(centre, spread^2).

    log_likelihood is asked of BLOCK points at a time; one where it is not finite has no weight. modes: BLOCK of the
    first points are drawn about each. Raises FloatingPointError where no point has any weight, or too few to learn
    from.
    """
    prior = _Proposal(np.asarray(centre, np.float64), np.diag(np.asarray(spread, np.float64)))
    proposals = [prior, *(_Proposal(one.point, _wider_root(one.covariance), FREEDOM) for one in modes)]
    about_modes = [one.points(BLOCK, seed + ROUNDS + number) for number, one in enumerate(proposals[1:], 1)]
    points = np.concatenate([prior.points(2 * BLOCK, seed), *about_modes])
    values = np.concatenate([log_likelihood(block) for block in np.split(points, len(points) // BLOCK)])
    for number in range(1, ROUNDS + 1):
        ratios = _ratios(points, proposals)
        power, weights = _tempered(values, ratios)
        if power == 1 and _effective(weights) >= ENOUGH:
            break
        proposals.append(_about(points, weights))
        more = proposals[-1].points(BLOCK, seed + number)
        points, values = np.concatenate([points, more]), np.concatenate([values, log_likelihood(more)])
    logs = _finite(values) + _ratios(points, proposals)
    evidence = float(logsumexp(logs))
    return PosteriorPoints(points, np.exp(logs - evidence), evidence)


def posterior_modes(
    log_likelihood: Callable[[Float[np.ndarray, " P"]], tuple[float, Float[np.ndarray, " P"]]],
    centre: Float[np.ndarray, " P"],
    spread: Float[np.ndarray, " P"],
    starts: Float[np.ndarray, "S P"],
) -> list[Mode]:
    """Modes of the posterior of P numbers with priors N(centre, spread^2) that BFGS finds from starts, highest first.

    log_likelihood: its value and gradient. Modes LOWER nats below the highest are left out; none where no search ends
    in finite numbers.
    """

    def loss(unit: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = log_likelihood(centre + spread * unit)
        if not (np.isfinite(value) and np.isfinite(slope).all()):
            return np.inf, np.zeros_like(unit)
        return 0.5 * float(unit @ unit) - value, unit - spread * slope

    found: list[tuple[float, np.ndarray]] = []
    for start in starts:
        end = minimize(loss, (start - centre) / spread, jac=True, method="BFGS", options={"gtol": FLAT_SLOPE})
        if np.isfinite(end.fun) and all(np.abs(end.x - other).max() > SAME for _, other in found):
            found.append((float(end.fun), end.x))
    found.sort(key=lambda one: one[0])
    kept = [unit for value, unit in found if value < found[0][0] + LOWER]
    return [Mode(centre + spread * unit, np.outer(spread, spread) * _covariance(loss, unit)) for unit in kept]


def _covariance(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]], unit: Float[np.ndarray, " P"]
) -> Float[np.ndarray, "P P"]:
    """The inverse of the second derivatives."""
    steps = HALF * np.eye(len(unit))
    curvature = np.stack([loss(unit + step)[1] - loss(unit - step)[1] for step in steps]) / (2 * HALF)
    return np.asarray(_inverse(jnp.asarray((curvature + curvature.T) / 2)))


@jax.jit
def _inverse(curvature: Float[Array, "P P"]) -> Float[Array, "P P"]:
    """Of a matrix whose eigenvalues below LEAST_CURVATURE are set to it."""
    least = LEAST_CURVATURE * jnp.eye(len(curvature))
    above, _ = positive_part((curvature - least)[None])
    root, _ = cholesky_inverse(above[0] + least)
    return root.T @ root


def _ratios(points: np.ndarray, proposals: list[_Proposal]) -> Float[np.ndarray, " M"]:
    """log p(point) / sum_k n_k q_k(point): times the likelihoods these sum to the evidence. The prior comes first."""
    densities = [proposal.log_density(points) for proposal in proposals]
    counts = BLOCK * np.array([2, *[1] * (len(proposals) - 1)])
    return densities[0] - logsumexp(densities, axis=0, b=counts[:, None])


def _finite(values: Float[np.ndarray, " M"]) -> Float[np.ndarray, " M"]:
    values = np.where(np.isfinite(values), values, -np.inf)
    if not np.isfinite(values).any():
        raise FloatingPointError("no point of the prior has a finite likelihood")
    return values


def _tempered(values: np.ndarray, ratios: np.ndarray) -> tuple[float, Float[np.ndarray, " M"]]:
    """The largest power up to 1 of the likelihood at which FEWEST points count, and the weights there."""
    values = _finite(values)

    def weights(power: float) -> np.ndarray:
        logs = power * values + ratios
        return np.exp(logs - logsumexp(logs))

    if _effective(weights(1.0)) >= FEWEST:
        return 1.0, weights(1.0)
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _effective(weights(middle)) >= FEWEST else (low, middle)
    return high, weights(high)


def _effective(weights: Float[np.ndarray, " M"]) -> float:
    """The effective number of points."""
    return float(1 / np.sum(weights**2))


def _about(points: Float[np.ndarray, "M P"], weights: Float[np.ndarray, " M"]) -> _Proposal:
    """A Student-t distribution with the mean of weighted points, a little wider than they are."""
    centre = weights @ points
    away = points - centre
    covariance = (weights * away.T) @ away
    root = _wider_root(covariance)
    if not (np.diag(root) > FLAT * np.sqrt(np.diag(covariance))).all():
        raise FloatingPointError("too few points have a finite likelihood")
    return _Proposal(centre, root, FREEDOM)


def _wider_root(covariance: Float[np.ndarray, "P P"]) -> Float[np.ndarray, "P P"]:
    return np.asarray(_root(jnp.asarray(WIDER * covariance)))
