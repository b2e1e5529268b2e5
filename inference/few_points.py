"""Exact regression with few points, whose hyper-parameters are averaged over or have the largest evidence.

Few points leave hyper-parameters open: the best ones alone explain the labels too well, and their intervals are too
narrow (docs/regression.md, measured). Labels have mean 0 and variance 1 here. All of it is meant for double precision.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from scipy.optimize import minimize

from fewshot.inference.hyperparameters import Mode, posterior_modes, posterior_points
from fewshot.models.gaussian import DiagonalPosterior, GaussianPrior, LowRankPosterior, Query
from fewshot.models.kernels import Hyper, Kernel
from fewshot.models.process import LatentProcess
from fewshot.models.regression import Prediction, predict, regress

# Priors of the average: of a constant that is added to f, its variance; standard deviations of log s2 about a prior
# variance of 1, of the log length-scale about the typical distance of two points, of any other about its start; and of
# the log of the noise variance in units of s2, its mean and standard deviation.
LEVEL = 9.0
SCALE_SPREAD, SPREAD = 2.0, 1.0
NOISE_RATIO, NOISE_SPREAD = float(np.log(0.1)), 2.0
LEAST_LOG_NOISE = float(np.log(1e-8))  # below it, rows without noise make matrices that double precision cannot solve
KEPT = 256  # points of the posterior that predictions are averaged over
# Modes of the posterior are searched for from so many rows on: fewer tell no mode that is narrow. Searches start from
# little noise, and from so many nats below the prior's length-scale: the labels may vary that much faster.
SEARCHED, LITTLE_NOISE, FASTER = 12, float(np.log(1e-3)), (0.0, 1.4, 2.8, 4.2)
# Of the search for the largest evidence: how far scale and others may go from their start, and the log noise variance.
SCALE_REACH, REACH, NOISES = 6.9, 4.6, (-13.8, 4.6)
NOISE_STARTS = (-2.3, -6.9)
SHORTER = 1.4  # nats by which some searches start from a shorter length-scale
AT_ONCE = 32  # points of hyper-parameters whose matrices are held at once


class Labelled(NamedTuple):
    """Inputs [N, D], labels [N] of mean 0 and variance 1, and which of them are real."""

    x: Float[np.ndarray, "N D"]
    y: Float[np.ndarray, " N"]
    present: Bool[np.ndarray, " N"]

    @property
    def real(self) -> Float[np.ndarray, "R D"]:
        """The inputs that are real."""
        return self.x[self.present]


class Process(NamedTuple):
    """A process whose hyper-parameters are open: M points [M, P] of them, by `names_of` its kernel, weights sum to 1.

    level: the variance of a constant that is added to f. log_evidence: log p(y) of labels of mean 0 and variance 1,
    averaged over the prior or the largest one.
    """

    kernel: Kernel
    points: Float[np.ndarray, "M P"]
    weights: Float[np.ndarray, " M"]
    level: float
    log_evidence: float

    def condition(self, data: Labelled) -> DiagonalPosterior | LowRankPosterior:
        """The posterior of f at each of the points, along a leading axis."""
        return _conditioned(self.kernel, jnp.asarray(self.points), self.level, *map(jnp.asarray, data))

    def predict(
        self, data: Labelled, state: DiagonalPosterior | LowRankPosterior, new: Float[np.ndarray, "Q D"]
    ) -> Prediction:
        """Mean and variance of new labels, noise included, of the mixture over the points."""
        points, weights = jnp.asarray(self.points), jnp.asarray(self.weights)
        return _predicted(self.kernel, points, weights, self.level, state, jnp.asarray(data.x), jnp.asarray(new))

    @property
    def hyper(self) -> dict[str, float]:
        """The mean of the points by name, `log_noise` among them."""
        return dict(zip(names_of(self.kernel), (self.weights @ self.points).tolist(), strict=True))


def names_of(kernel: Kernel) -> tuple[str, ...]:
    """Names of the hyper-parameters: the kernel's own, then `log_noise`, the log of a variance."""
    return (*kernel.initial(), "log_noise")


def averaged(kernel: Kernel, data: Labelled, noise: float | None, seed: int) -> Process:
    """The process averaged over the posterior of its hyper-parameters; noise: a variance that is known, or None.

    Raises FloatingPointError where no point has a finite evidence.
    """
    start = _start(kernel, data)
    spread = {name: SCALE_SPREAD if name == "log_scale" else SPREAD for name in start}
    if noise is None:
        start, spread = start | {"log_ratio": NOISE_RATIO}, spread | {"log_ratio": NOISE_SPREAD}
    scale = list(start).index("log_scale")
    diagonal = -start["log_scale"]  # the log of the kernel's mean at a scale of 1

    def whole(points: np.ndarray) -> np.ndarray:
        if noise is not None:
            return np.column_stack([points, np.full(len(points), np.log(noise))])
        drawn = diagonal + points[:, scale] + points[:, -1]
        return np.column_stack([points[:, :-1], np.maximum(drawn, LEAST_LOG_NOISE)])

    def evidence(points: np.ndarray) -> np.ndarray:
        return np.asarray(_evidences(kernel, jnp.asarray(whole(points)), LEVEL, *map(jnp.asarray, data)))

    def evidence_and_slope(point: np.ndarray) -> tuple[float, np.ndarray]:
        (at,) = whole(point[None])
        value, slopes = _evidence_and_slope(kernel, jnp.asarray(at), LEVEL, *map(jnp.asarray, data))
        slope = np.array(slopes)
        if noise is not None:
            return float(value), slope[:-1]
        slope[-1] *= at[-1] > LEAST_LOG_NOISE
        slope[scale] += slope[-1]
        return float(value), slope

    centre, around = np.array([*start.values()]), np.array([*spread.values()])
    modes: list[Mode] = []
    if len(data.real) >= SEARCHED:
        modes = posterior_modes(evidence_and_slope, centre, around, _starts(start))
    found = posterior_points(evidence, centre, around, seed, modes)
    kept = found.thinned(KEPT)
    return Process(kernel, whole(kept.points), kept.weights, LEVEL, found.log_evidence)


def maximised(kernel: Kernel, data: Labelled, noise: float | None) -> Process:
    """The process at the hyper-parameters of largest evidence, by L-BFGS-B from several starts.

    Raises FloatingPointError where no search ends in a finite evidence.
    """
    start = _start(kernel, data)
    reach = np.array([SCALE_REACH if name == "log_scale" else REACH for name in start])
    first = np.array([*start.values()])
    given = tuple(map(jnp.asarray, data))

    def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _evidence_and_slope(kernel, jnp.asarray(point), 0.0, *given)
        return -float(value), -np.asarray(slope)

    def lowest(point: np.ndarray, noises: tuple[float, float]) -> tuple[float, np.ndarray]:
        bounds = np.column_stack([np.append(first - reach, noises[0]), np.append(first + reach, noises[1])])
        inside = np.clip(point, bounds[:, 0], bounds[:, 1])
        found = minimize(loss, inside, jac=True, method="L-BFGS-B", bounds=bounds)
        return float(found.fun), found.x

    shorter = first - SHORTER * (np.array([*start]) == "log_lengthscale")
    noises, starts = (NOISES, NOISE_STARTS) if noise is None else ((np.log(noise),) * 2, (np.log(noise),))
    ends = [lowest(np.append(begun, log_noise), noises) for begun in (first, shorter) for log_noise in starts]
    ends = [end for end in ends if np.isfinite(end[0])]
    if not ends:
        raise FloatingPointError("no search ended in a finite evidence")
    value, point = min(ends, key=lambda end: end[0])
    return Process(kernel, point[None], np.ones(1), 0.0, -value)


def _start(kernel: Kernel, data: Labelled) -> Hyper:
    """Logs of a scale with a prior variance of 1 on average, and of the typical distance of two points."""
    found: Hyper = dict.fromkeys(kernel.initial(), 0.0)
    if "log_lengthscale" in found:
        found["log_lengthscale"] = _typical_distance(data.real)
    diagonal = float(np.mean(np.asarray(kernel.diagonal(found, jnp.asarray(data.x)))[data.present]))
    return found | {"log_scale": -float(np.log(diagonal)) if diagonal > 0 else 0.0}


def _starts(centre: Hyper) -> Float[np.ndarray, "S P"]:
    """Of searches: the prior's centre, and points of little noise with ever shorter length-scales."""
    rows = [centre]
    for nats in FASTER:
        nearer = {"log_lengthscale": centre.get("log_lengthscale", 0.0) - nats, "log_ratio": LITTLE_NOISE}
        rows.append({name: nearer.get(name, value) for name, value in centre.items()})
    return np.unique([[*row.values()] for row in rows], axis=0)


def _typical_distance(x: Float[np.ndarray, "N D"]) -> float:
    """Log of the root mean square distance of two points, of inputs divided by the root of their number."""
    square = 2 * float(np.mean(x.var(axis=0)))
    return 0.5 * float(np.log(square)) if square > 0 else 0.0


def _prior(kernel: Kernel, hyper: Hyper, level: Array, x: Array) -> GaussianPrior:
    prior = LatentProcess(kernel, hyper).prior(x, 1)
    return prior._replace(covariance=prior.covariance + level, root=_levelled(prior.root, level))


def _query(kernel: Kernel, hyper: Hyper, level: Array, x: Array, new: Array) -> Query:
    query = LatentProcess(kernel, hyper).query(x, new, 1)
    return query._replace(cross=query.cross + level, variance=query.variance + level, root=_levelled(query.root, level))


def _levelled(root: Array | None, level: Array) -> Array | None:
    return None if root is None else jnp.pad(root, ((0, 0), (0, 1)), constant_values=jnp.sqrt(level))


def _values(kernel: Kernel, point: Array) -> tuple[Hyper, Array]:
    """The kernel's hyper-parameters and the noise variance."""
    hyper = dict(zip(names_of(kernel), point, strict=True))
    return hyper, jnp.exp(hyper.pop("log_noise"))


def _evidence(kernel: Kernel, point: Array, level: Array, x: Array, y: Array, present: Array) -> Array:
    hyper, noise = _values(kernel, point)
    return regress(_prior(kernel, hyper, level, x), y, noise, present).log_evidence


_evidence_and_slope = jax.jit(jax.value_and_grad(_evidence, argnums=1), static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _evidences(kernel: Kernel, points: Array, level: Array, x: Array, y: Array, present: Array) -> Array:
    return jax.lax.map(lambda point: _evidence(kernel, point, level, x, y, present), points, batch_size=AT_ONCE)


@partial(jax.jit, static_argnums=0)
def _conditioned(
    kernel: Kernel, points: Array, level: Array, x: Array, y: Array, present: Array
) -> DiagonalPosterior | LowRankPosterior:
    def at(point: Array) -> DiagonalPosterior | LowRankPosterior:
        hyper, noise = _values(kernel, point)
        return regress(_prior(kernel, hyper, level, x), y, noise, present).posterior

    return jax.lax.map(at, points, batch_size=AT_ONCE)


@partial(jax.jit, static_argnums=0)
def _predicted(
    kernel: Kernel,
    points: Array,
    weights: Array,
    level: Array,
    state: DiagonalPosterior | LowRankPosterior,
    x: Array,
    new: Array,
) -> Prediction:
    def at(one: tuple[Array, DiagonalPosterior | LowRankPosterior]) -> Prediction:
        point, posterior = one
        hyper, noise = _values(kernel, point)
        return predict(posterior, _query(kernel, hyper, level, x, new)).noisy(noise)

    each = jax.lax.map(at, (points, state), batch_size=AT_ONCE)
    mean = weights @ each.mean
    return Prediction(mean, weights @ (each.variance + (each.mean - mean) ** 2))
