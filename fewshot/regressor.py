"""The scikit-learn estimator of numbers: a few labelled points in, normal predictions out.

regressor = FewShotRegressor().fit(X, y)                   a Gaussian process, averaged over its hyper-parameters
regressor = FewShotRegressor.from_run("runs/sinusoids").fit(X, y)
mean, deviation = regressor.predict(more, return_std=True)
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, PyTree
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fewshot import models
from fewshot.conditioning import CHUNK, InferenceFailedError, bucket, padding
from fewshot.contract import Scaling, in_precision, key_of, seed_of, unchanged_by_failure, warn_of_lost_digits
from fewshot.groups import padded
from fewshot.inference import INFERENCE, few_points
from fewshot.inference.few_points import Labelled, Process
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import GaussianProcess, Learner
from fewshot.learners.base import apply
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import Kernel
from fewshot.models.likelihoods import Normal
from fewshot.tasks.curves import has_real_labels
from fewshot.threads import one_blas_thread
from fewshot.training.run import load_run

__all__ = ["FewShotRegressor"]

LEAST_NOISE = 1e-10  # of the variance of y, which double precision holds beside it
MOST_AVERAGED = 200  # rows up to which hyper-parameters are averaged over, unless told otherwise


class Fitted(NamedTuple):
    """What `fit` keeps: rows with scaled labels, the learner that was given or the process that was found, a seed."""

    labelled: Labelled
    scaling: Scaling
    chosen: Learner | Process
    seed: int

    @property
    def precision(self) -> AbstractContextManager:
        """Double for a process, that of the learner."""
        return jax.enable_x64(True) if isinstance(self.chosen, Process) else nullcontext()


class FewShotRegressor(RegressorMixin, BaseEstimator):
    """Few-shot regression in scikit-learn's contract: exact Gaussian-process regression, or a trained learner.

    learner: a `Learner` with real labels, which sees X and y as they are; None for a Gaussian process. That one sees y
    centred and divided by its standard deviation, in double precision; predictions are in y's own unit. kernel: a name
    of `KERNELS` or a `Kernel`, which needs no statistics of features. noise: a variance in y's unit squared that is
    known, at least 1e-10 of that of y; None to learn it. average: True predicts with the mean over the posterior of
    scale, length-scale and noise, under weak priors (docs/regression.md); False with those of largest marginal
    likelihood, as scikit-learn's `GaussianProcessRegressor` does, whose intervals are too narrow where points are few;
    None averages up to 200 rows. kernel, noise and average belong to learner=None. random_state: the seed of learners
    that draw, and of the average.

    X is a table [N, D], y numbers [N]. After `fit`: n_features_in_, log_marginal_likelihood_ (of y, learner=None; where
    it averages, of the priors too), hyperparameters_ (of labels with mean 0 and variance 1, learner=None; the mean of
    their logs), and code_, the inference's result code.
    """

    def __init__(
        self,
        learner: Learner | None = None,
        *,
        kernel: str | Kernel = "rbf",
        noise: float | None = None,
        average: bool | None = None,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.learner, self.kernel, self.noise = learner, kernel, noise
        self.average, self.random_state = average, random_state

    @classmethod
    def from_run(cls, run_dir: str | Path, **parameters: Any) -> "FewShotRegressor":
        """An estimator on the learner of a run folder. Raises RunError, and ValueError for a run on classes."""
        run = load_run(run_dir)
        if not has_real_labels(run.config.dataset):
            raise ValueError(f"expected a run on real labels, got one on {run.config.dataset}; use FewShotClassifier")
        return cls(run.learner, **parameters)

    def fit(self, X: object, y: object) -> "FewShotRegressor":
        """Condition on labelled points; where that fails, everything stays as it was.

        Raises ValueError, in one line, for what is no table of numbers or no labels of it, for numbers that are too
        large, and for a parameter that makes no sense; InferenceFailedError where the posterior is not finite.
        """
        with unchanged_by_failure(self):
            x, labels = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
            labels = np.asarray(column_or_1d(labels), np.float64)
            seed = seed_of(self.random_state)
            if self.learner is None:
                self._fitted = self._found(x, labels, seed)
            else:
                warn_of_lost_digits(x, stacklevel=3)
                learner, scaling = self._given(x.shape[1]), Scaling(np.zeros(()), np.ones(()))
                size, *_ = padding(len(labels), 1, learner.traits)
                self._fitted = Fitted(_labelled(x, labels, size), scaling, learner, seed)
            self._task, self.code_ = _conditioned(self._fitted)
        return self

    def predict(
        self, X: object, return_std: bool = False
    ) -> Float[np.ndarray, " Q"] | tuple[Float[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
        """Means [Q] of new labels, and with return_std their standard deviations [Q], noise included."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64)
        if not hasattr(self, "_task"):  # it was in a pickle
            self._task, _ = _conditioned(self._fitted)
        fitted = self._fitted
        whole = isinstance(fitted.chosen, Learner) and fitted.chosen.traits.transductive
        size = len(x) if whole else CHUNK
        with fitted.precision, one_blas_thread(len(fitted.labelled.y)):
            parts = [self._chunk(x[start : start + size], size) for start in range(0, len(x), size)]
            mean, deviation = (np.concatenate(each)[: len(x)].astype(np.float64) for each in zip(*parts, strict=True))
        mean, deviation = fitted.scaling.centre + fitted.scaling.unit * mean, fitted.scaling.unit * deviation
        return (mean, deviation) if return_std else mean

    @property
    def learner_(self) -> Learner:
        """The learner; of a process, a Gaussian process at `hyperparameters_`."""
        check_is_fitted(self)
        chosen = self._fitted.chosen
        return chosen if isinstance(chosen, Learner) else _learner_at(chosen, self.n_features_in_)

    @property
    def hyperparameters_(self) -> dict[str, float]:
        """Scale, length-scale and noise of a process by name, in logs."""
        check_is_fitted(self)
        if isinstance(self._fitted.chosen, Learner):
            raise AttributeError("expected learner=None for hyperparameters_; a learner has its own")
        return self._fitted.chosen.hyper

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_fitted")

    def __getstate__(self) -> dict[str, object]:
        """What a pickle holds: no posterior, which is found again."""
        return {name: value for name, value in super().__getstate__().items() if name != "_task"}

    def _chunk(self, x: np.ndarray, size: int) -> tuple[Array, Array]:
        """Means and deviations of rows filled up to a size: nothing is compiled twice, no query knows another."""
        fitted, new = self._fitted, padded(x, size)
        if isinstance(fitted.chosen, Process):
            found = fitted.chosen.predict(fitted.labelled, self._task, new)
            return found.mean, jnp.sqrt(found.variance)
        _, key = jax.random.split(key_of(fitted.seed))
        return apply(_predicted, fitted.chosen, (), key, self._task, in_precision(new, "X"))

    def _given(self, width: int) -> Learner:
        if not isinstance(self.learner, Learner) or not self.learner.traits.real_labels:
            raise ValueError(f"expected a Learner with real labels as learner, got {self.learner!r:.80}")
        if self.learner.image_shape != (1, 1, width):
            raise ValueError(f"expected {self.learner.image_shape[-1]} features, as the learner has, got {width}")
        return self.learner

    def _found(self, x: np.ndarray, labels: np.ndarray, seed: int) -> Fitted:
        """The process of labels, by the average or the search."""
        kernel, average = plain_kernel(self.kernel), self.average
        if average is not None and not isinstance(average, bool | np.bool_):
            raise ValueError(f"expected True, False or None as average, got {average!r:.40}")
        Scaling.of(x, "X")  # for what it refuses
        scaling = Scaling.of(labels, "y", fewer=1)
        if not np.ptp(labels) > 0:
            warnings.warn(
                f"expected labels that differ, got {len(labels)} of {labels[0]:.6g}: nothing tells how far others may "
                "lie, so deviations are a guess; give more labels",
                stacklevel=3,
            )
        noise = None if self.noise is None else _positive(self.noise) / float(scaling.unit) ** 2
        if noise is not None and noise < LEAST_NOISE:
            raise ValueError(f"expected at least {LEAST_NOISE:g} of the variance of y as noise, got {noise:.1e} of it")
        data = _labelled(x, (labels - scaling.centre) / scaling.unit, bucket(len(labels), 1)[0])
        with jax.enable_x64(True), one_blas_thread(len(labels)):
            try:
                if len(labels) <= MOST_AVERAGED if average is None else average:
                    found = few_points.averaged(kernel, data, noise, seed)
                else:
                    found = few_points.maximised(kernel, data, noise)
            except FloatingPointError as error:
                raise InferenceFailedError(
                    "no hyper-parameters have a finite evidence; remove extreme values, or raise noise"
                ) from error
        self.log_marginal_likelihood_ = found.log_evidence - len(labels) * float(np.log(scaling.unit))
        return Fitted(data, scaling, found, seed)


def plain_kernel(chosen: str | Kernel) -> Kernel:
    """A kernel by its name or as it is. Raises ValueError for one that needs statistics of features."""
    if isinstance(chosen, str) and chosen in models.KERNELS:
        chosen = models.KERNELS[chosen]()
    if not isinstance(chosen, Kernel) or chosen.normalise_features:
        known = ", ".join(name for name, make in models.KERNELS.items() if not make().normalise_features)
        raise ValueError(f"expected a kernel without statistics of features, one of {known}; got {chosen!r:.80}")
    return chosen


def _labelled(x: Float[np.ndarray, "N D"], y: Float[np.ndarray, " N"], size: int) -> Labelled:
    """So many rows: few numbers of rows compile anything."""
    return Labelled(padded(x, size), padded(y, size), np.arange(size) < len(y))


def _conditioned(fitted: Fitted) -> tuple[PyTree, Code]:
    """The posterior. Raises InferenceFailedError where it is not finite."""
    data = fitted.labelled
    with fitted.precision, one_blas_thread(len(data.y)):
        if isinstance(fitted.chosen, Process):
            state = fitted.chosen.condition(data)
            finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
            code = Code.OK if finite else Code.NON_FINITE
        else:
            key, _ = jax.random.split(key_of(fitted.seed))
            x, y = in_precision(data.x, "X"), in_precision(data.y, "y")
            state, code = apply(_conditioned_on, fitted.chosen, (), key, x, y, data.present)
            jax.block_until_ready(state)
    if code == Code.NON_FINITE:
        raise InferenceFailedError("the posterior is not finite; remove extreme values, or raise noise")
    return state, Code(int(code))


def _learner_at(process: Process, width: int) -> Learner:
    network = DeepKernel(Identity((1, 1, width)), process.kernel, rngs=nnx.Rngs(0), classes=1)
    values = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in process.hyper.items()}
    learner = GaussianProcess(network, Normal(1.0), INFERENCE["exact"])
    learner.likelihood_parameters["log_noise"][...] = values.pop("log_noise")
    for name, value in values.items():
        network.hyper[name][...] = value
    return learner


def _positive(noise: object) -> float:
    if isinstance(noise, bool) or not isinstance(noise, int | float | np.number) or not 0 < noise < np.inf:
        raise ValueError(f"expected a positive number or None as noise, got {noise!r:.40}")
    return float(noise)


def _conditioned_on(learner: Learner, key: Key[Array, ""], x: Array, y: Array, present: Bool[Array, " N"]) -> PyTree:
    return learner.fit(key, learner.embed(x[:, None, None]), y, 1, Mask(present, jnp.ones(1, bool)))


def _predicted(learner: Learner, key: Key[Array, ""], state: PyTree, x: Array) -> tuple[Array, Array]:
    found = learner.predict(key, state, learner.embed(x[:, None, None])).distribution
    return found.mean, jnp.sqrt(found.variance)
