"""The scikit-learn estimator of numbers: a few labelled points in, normal predictions out.

regressor = FewShotRegressor().fit(X, y)                   a Gaussian process, its hyper-parameters by evidence
regressor = FewShotRegressor.from_run("runs/sinusoids").fit(X, y)
mean, deviation = regressor.predict(more, return_std=True)
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree
from scipy.optimize import minimize
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fewshot import models
from fewshot.conditioning import CHUNK, InferenceFailedError
from fewshot.inference import INFERENCE
from fewshot.inference.inner.base import Code
from fewshot.learners import GaussianProcess, Learner
from fewshot.learners.base import apply
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import Kernel
from fewshot.models.likelihoods import Normal
from fewshot.models.process import LatentProcess
from fewshot.models.regression import regress
from fewshot.tasks.curves import has_real_labels
from fewshot.training.run import load_run

__all__ = ["FewShotRegressor"]

# Of labels with mean 0 and variance 1: where the search for the hyper-parameters begins, and how far each may go from
# there, in nats. The least noise variance, exp(-9.2) = 1e-4, keeps single precision sound.
START, REACH = {"log_scale": 0.0, "log_noise": -2.3}, {"log_scale": 6.9, "log_noise": 6.9}
LENGTHSCALE_REACH = 4.6
NOISES = (-2.3, -6.9)  # starts of log_noise, of which the better end is kept


class Found(NamedTuple):
    """Hyper-parameters of largest evidence, log s2 of the noise, and the log evidence."""

    hyper: dict[str, float]
    log_noise: float
    log_evidence: float


class FewShotRegressor(RegressorMixin, BaseEstimator):
    """Few-shot regression in scikit-learn's contract: exact Gaussian-process regression, or a trained learner.

    learner: a `Learner` with real labels, which sees X and y as they are; None for a Gaussian process whose scale,
    length-scale and noise have the largest marginal likelihood of the labelled points. That one sees y centred and
    divided by its standard deviation; predictions are in y's own unit. kernel: a name of `KERNELS` or a `Kernel`, which
    needs no statistics of features. noise: a variance in y's unit squared that is taken as it is; None to find it, at
    least 1e-4 of the variance of y. kernel and noise belong to learner=None. random_state: the seed of learners that
    draw.

    X is a table [N, D], y numbers [N]. After `fit`: n_features_in_, log_marginal_likelihood_ (of y, learner=None), and
    code_, the inference's result code.
    """

    def __init__(
        self,
        learner: Learner | None = None,
        *,
        kernel: str | Kernel = "rbf",
        noise: float | None = None,
        random_state: int = 0,
    ):
        self.learner, self.kernel, self.noise, self.random_state = learner, kernel, noise, random_state

    @classmethod
    def from_run(cls, run_dir: str | Path, **parameters: Any) -> "FewShotRegressor":
        """An estimator on the learner of a run folder. Raises RunError, and ValueError for a run on classes."""
        run = load_run(run_dir)
        if not has_real_labels(run.config.dataset):
            raise ValueError(f"expected a run on real labels, got one on {run.config.dataset}; use FewShotClassifier")
        return cls(run.learner, **parameters)

    def fit(self, X: object, y: object) -> "FewShotRegressor":
        """Condition on labelled points.

        Raises ValueError, in one line, for what is no table of numbers or no labels of it, and for a kernel or noise
        that makes no sense; InferenceFailedError where the posterior is not finite.
        """
        x, labels = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        labels = np.asarray(column_or_1d(labels), np.float64)
        self._x, self._y, self._found = x, labels, None
        self._centre, self._unit = 0.0, 1.0
        if self.learner is None:
            self._centre, self._unit = float(labels.mean()), float(labels.std()) or 1.0
            self._found = self._search()
            self.log_marginal_likelihood_ = self._found.log_evidence - len(labels) * np.log(self._unit)
        self._condition()
        return self

    def predict(
        self, X: object, return_std: bool = False
    ) -> Float[np.ndarray, " Q"] | tuple[Float[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
        """Means [Q] of new labels, and with return_std their standard deviations [Q], noise included."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64)
        learner, state, key = self._conditioned()
        size = len(x) if learner.traits.transductive else CHUNK
        parts = [self._chunk(learner, state, key, x, start, size) for start in range(0, len(x), size)]
        mean, deviation = (np.concatenate(each)[: len(x)].astype(np.float64) for each in zip(*parts, strict=True))
        mean, deviation = self._centre + self._unit * mean, self._unit * deviation
        return (mean, deviation) if return_std else mean

    @property
    def learner_(self) -> Learner:
        """The learner, at the hyper-parameters that were found."""
        check_is_fitted(self)
        return self._conditioned()[0]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_x")

    def __getstate__(self) -> dict[str, object]:
        """What a pickle holds: no posterior, which is found again."""
        return {name: value for name, value in super().__getstate__().items() if name != "_task"}

    def _conditioned(self) -> tuple[Learner, PyTree, Key[Array, ""]]:
        if not hasattr(self, "_task"):
            self._condition()
        return self._task

    def _condition(self) -> None:
        learner = self._built(self._x.shape[1])
        fit_key, predict_key = jax.random.split(jax.random.key(self.random_state))
        y = _numbers((self._y - self._centre) / self._unit)
        state, code = apply(_fitted, learner, (), fit_key, _numbers(self._x), y)
        if code == Code.NON_FINITE:
            raise InferenceFailedError("the posterior is not finite; remove extreme values, or raise noise")
        self._task, self.code_ = (learner, state, predict_key), Code(int(code))

    def _chunk(
        self, learner: Learner, state: PyTree, key: Array, x: np.ndarray, start: int, size: int
    ) -> tuple[Array, Array]:
        """Means and deviations of a chunk of a fixed size: nothing is compiled twice, no query knows another."""
        rows = np.minimum(np.arange(start, start + size), len(x) - 1)
        return apply(_predicted, learner, (), key, state, _numbers(x[rows]))

    def _built(self, width: int) -> Learner:
        if self.learner is not None:
            if not isinstance(self.learner, Learner) or not self.learner.traits.real_labels:
                raise ValueError(f"expected a Learner with real labels as learner, got {self.learner!r:.80}")
            if self.learner.image_shape != (1, 1, width):
                raise ValueError(f"expected {self.learner.image_shape[-1]} features, as the learner has, got {width}")
            return self.learner
        assert self._found is not None
        network = DeepKernel(Identity((1, 1, width)), plain_kernel(self.kernel), rngs=nnx.Rngs(0), classes=1)
        for name, value in self._found.hyper.items():
            network.hyper[name][...] = jnp.asarray(value, jnp.result_type(float))
        learner = GaussianProcess(network, Normal(1.0), INFERENCE["exact"])
        # Not the start of the likelihood, which is static: another one would compile everything anew.
        learner.likelihood_parameters["log_noise"][...] = jnp.asarray(self._found.log_noise, jnp.result_type(float))
        return learner

    def _search(self) -> Found:
        """The hyper-parameters by L-BFGS-B from each of NOISES, or at the noise that was given."""
        kernel, x = plain_kernel(self.kernel), _numbers(self._x)
        y = _numbers((self._y - self._centre) / self._unit)
        start = {**{name: 0.0 for name in kernel.initial()}, **START}
        if "log_lengthscale" in start:
            start["log_lengthscale"] = _typical_distance(self._x)
        reach = {name: REACH.get(name, LENGTHSCALE_REACH) for name in start}
        bounds = {name: (value - reach[name], value + reach[name]) for name, value in start.items()}
        noises = list(NOISES)
        if self.noise is not None:
            noises = [float(np.log(_positive(self.noise)) - 2 * np.log(self._unit))]
            bounds["log_noise"] = (noises[0], noises[0])
        names = tuple(start)

        def loss(point: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = _evidence_and_slope(kernel, names, jnp.asarray(point, x.dtype), x, y)
            return -float(value), -np.asarray(slope, np.float64)

        ends = []
        for noise in noises:
            first = np.array([*({**start, "log_noise": noise}).values()])
            ends.append(minimize(loss, first, jac=True, method="L-BFGS-B", bounds=list(bounds.values())))
        best = min(ends, key=lambda end: float(end.fun))
        found = dict(zip(names, best.x.tolist(), strict=True))
        return Found({name: found[name] for name in kernel.initial()}, found["log_noise"], -float(best.fun))


def plain_kernel(chosen: str | Kernel) -> Kernel:
    """A kernel by its name or as it is. Raises ValueError for one that needs statistics of features."""
    if isinstance(chosen, str) and chosen in models.KERNELS:
        chosen = models.KERNELS[chosen]()
    if not isinstance(chosen, Kernel) or chosen.normalise_features:
        known = ", ".join(name for name, make in models.KERNELS.items() if not make().normalise_features)
        raise ValueError(f"expected a kernel without statistics of features, one of {known}; got {chosen!r:.80}")
    return chosen


def _evidence(kernel: Kernel, names: tuple[str, ...], point: Array, x: Array, y: Array) -> Array:
    """log N(y; 0, K + s2 I) at hyper-parameters by their names (P2)."""
    values = dict(zip(names, point, strict=True))
    noise = jnp.exp(values.pop("log_noise"))
    return regress(LatentProcess(kernel, values).prior(x, 1), y, noise).log_evidence


_evidence_and_slope = jax.jit(jax.value_and_grad(_evidence, argnums=2), static_argnums=(0, 1))


def _typical_distance(x: np.ndarray) -> float:
    """Log of the root mean square distance of two points, of inputs divided by the root of their number."""
    square = 2 * float(np.mean(x.var(axis=0)))
    return 0.5 * float(np.log(square)) if square > 0 else 0.0


def _positive(noise: object) -> float:
    if isinstance(noise, bool) or not isinstance(noise, int | float | np.number) or not 0 < noise < np.inf:
        raise ValueError(f"expected a positive number or None as noise, got {noise!r:.40}")
    return float(noise)


def _numbers(values: np.ndarray) -> Array:
    return jnp.asarray(values, jnp.result_type(float))


def _fitted(learner: Learner, key: Array, x: Array, y: Array) -> tuple[PyTree, Array]:
    return learner.fit(key, learner.embed(x[:, None, None]), y, 1)


def _predicted(learner: Learner, key: Array, state: PyTree, x: Array) -> tuple[Array, Array]:
    found = learner.predict(key, state, learner.embed(x[:, None, None])).distribution
    return found.mean, jnp.sqrt(found.variance)
