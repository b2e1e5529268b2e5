"""The scikit-learn estimator of numbers with many rows: a Gaussian process, exact, through features or a grid.

regressor = SparseRegressor().fit(X, y)                          Titsias' bound, 256 inducing points
regressor = SparseRegressor(kernel="rbf", method="features", inducing=1000).fit(X, y)
mean, deviation = regressor.predict(more, return_std=True)
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fewshot.conditioning import InferenceFailedError
from fewshot.contract import Scaling, seed_of, unchanged_by_failure
from fewshot.inference import many_points
from fewshot.inference.by_rows import ByRows
from fewshot.inference.many_points import Exact, Features, Inducing, Method
from fewshot.inference.on_grid import MOST, OnGrid
from fewshot.models.inducing import InducingProcess, Parameters
from fewshot.models.kernels import Kernel
from fewshot.models.random_features import SPECTRA, RandomFourier
from fewshot.regressor import plain_kernel
from fewshot.threads import one_blas_thread

__all__ = ["METHODS", "SparseRegressor"]

CHUNK, SOLVED_CHUNK = 1024, 128  # queries that are predicted at once; and where a variance is a linear system
MOST_EXACT = 10_000  # rows of which an exact posterior is formed: four matrices of 0.8 GB
INDUCING_NOISE = 1e-6  # of the variance: no direction of K_zz enters or leaves while Z moves (docs/sparse.md)


class Choice(NamedTuple):
    """A method by its name: (kernel, inducing, seed) to it, its steps, whether it learns from batches, or in stages."""

    make: Callable[[Kernel, int, int], Method]
    steps: int = 40
    batches: bool = False
    staged: bool = False


def _through_points(fitc: bool = False) -> Callable[[Kernel, int, int], Method]:
    return lambda kernel, count, seed: Inducing(InducingProcess(kernel, INDUCING_NOISE), count, fitc)


METHODS: Mapping[str, Choice] = {
    "exact": Choice(lambda kernel, count, seed: Exact(kernel), staged=True),
    "titsias": Choice(_through_points()),
    "fitc": Choice(_through_points(fitc=True)),
    "stochastic": Choice(_through_points(), steps=1000, batches=True),
    "grid": Choice(lambda kernel, count, seed: OnGrid(kernel), staged=True),  # type: ignore[arg-type]
    "iterative": Choice(lambda kernel, count, seed: ByRows(kernel, preconditioned=count), staged=True),
    "features": Choice(lambda kernel, count, seed: Features(RandomFourier(kernel, count, seed))),  # type: ignore[arg-type]
}


class SparseRegressor(RegressorMixin, BaseEstimator):
    """Gaussian-process regression for many rows in scikit-learn's contract; every input has a weight that is learned.

    kernel: a name of `KERNELS` or a `Kernel` without statistics of features. method:
      exact       the process itself, O(N^3), at most 10,000 rows
      iterative   the process itself by conjugate gradients, its matrix shared by all devices
      titsias     inducing points, by a lower bound of the marginal likelihood
      fitc        inducing points, the rest kept as noise of every row
      stochastic  inducing points, natural-gradient steps on batches of all rows
      features    random Fourier features of rbf or matern52
      grid        a regular grid and conjugate gradients, for one or two inputs and rbf or matern52
    inducing: inducing points or features, of `iterative` those of the preconditioner. learning_rows: a random choice of
    at most so many rows, from which the hyper-parameters are learned (None: all); the posterior is of all rows. `exact`
    sees a part of these first where they are more than 1,000 (`many_points.stages`); `stochastic` learns from batches
    of all.
    steps: iterations of L-BFGS-B on the bound; of `stochastic`, of natural gradients and Adam, whose first rate is
    `rate`, on batches of `batch` rows (None: 40, and 1000). random_state: a seed.

    Inputs and targets are standardised inside; predictions are in y's own unit. The arithmetic is in double precision.
    After `fit`: n_features_in_, bound_ (of log p(y) given X, in nats of y's unit; exact: log p(y); fitc: its own
    evidence), lengthscales_ [D] in the unit of X (of stationary kernels), noise_ (a variance in y's unit squared), and
    parameters_.
    """

    def __init__(
        self,
        kernel: str | Kernel = "matern52",
        method: str = "titsias",
        *,
        inducing: int = 256,
        learning_rows: int | None = 2000,
        steps: int | None = None,
        rate: float = 0.03,
        batch: int = 512,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.kernel, self.method, self.inducing, self.learning_rows = kernel, method, inducing, learning_rows
        self.steps, self.rate, self.batch, self.random_state = steps, rate, batch, random_state

    def fit(self, X: object, y: object) -> "SparseRegressor":
        """Learn the hyper-parameters, then condition on all rows; where that fails, everything stays as it was.

        Raises ValueError, in one line, for what is no table of numbers or no targets of it, for numbers that are too
        large, and for parameters that make no sense; InferenceFailedError where the posterior is not finite.
        """
        with unchanged_by_failure(self):
            x, targets = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
            targets = np.asarray(column_or_1d(targets), np.float64)
            seed = seed_of(self.random_state)
            method, steps = self._chosen(len(x), x.shape[1], seed)
            self._inputs, self._target = Scaling.of(x, "X"), Scaling.of(targets, "y")
            scaled = (x - self._inputs.centre) / self._inputs.unit, (targets - self._target.centre) / self._target.unit
            self._largest = len(x) if METHODS[self.method].staged else self.inducing
            with jax.enable_x64(True), one_blas_thread(self._largest):
                self._method, self._fitted, bound = self._learned(method, steps, *scaled, seed)
            if not np.isfinite(bound):
                raise InferenceFailedError("the posterior is not finite; remove extreme values, or lower rate")
            self.bound_ = bound - len(x) * float(np.log(self._target.unit))
            self.noise_ = float(np.exp(self.parameters_.log_noise) * self._target.unit**2)
        return self

    def predict(
        self, X: object, return_std: bool = False
    ) -> Float[np.ndarray, " Q"] | tuple[Float[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
        """Means [Q] of new targets, and with return_std their standard deviations [Q], noise included."""
        check_is_fitted(self)
        x = (validate_data(self, X, reset=False, dtype=np.float64) - self._inputs.centre) / self._inputs.unit
        if isinstance(self._method, OnGrid):
            self._method.check_inside(self._fitted[1], x)
        ask = many_points.predict if return_std else many_points.predict_mean
        with jax.enable_x64(True), one_blas_thread(self._largest):
            size = SOLVED_CHUNK if isinstance(self._method, OnGrid | ByRows) and return_std else CHUNK
            parts = [self._chunk(ask, x, start, size) for start in range(0, len(x), size)]
        found = jax.tree.map(lambda *each: np.concatenate(each)[: len(x)], *parts)
        if not return_std:
            return self._target.centre + self._target.unit * found
        return self._target.centre + self._target.unit * found.mean, self._target.unit * np.sqrt(found.variance)

    @property
    def parameters_(self) -> Parameters:
        """What was learned, of standardised inputs and targets."""
        check_is_fitted(self)
        return self._fitted[0]

    @property
    def lengthscales_(self) -> Float[np.ndarray, " D"]:
        """Length-scale of every input in the unit of X; the kernel sees the distance of x / lengthscales_."""
        hyper = self.parameters_.hyper
        if "log_lengthscale" not in hyper:
            raise AttributeError(f"{self.kernel!r:.40} has no length-scale")
        length = np.sqrt(self.n_features_in_) * np.exp(np.asarray(hyper["log_lengthscale"]))
        return np.asarray(self._inputs.unit * length * np.exp(-np.asarray(self.parameters_.log_weights)))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_method")

    def __getstate__(self) -> dict[str, object]:
        """What a pickle holds: NumPy arrays, since JAX would read its own in single precision."""
        state = dict(super().__getstate__())
        if "_fitted" in state:
            leaves, tree = jax.tree.flatten(state.pop("_fitted"))
            state["_arrays"] = [np.asarray(leaf) for leaf in leaves], tree
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        given = dict(state)
        arrays = given.pop("_arrays", None)
        super().__setstate__(given)
        if isinstance(arrays, tuple):
            with jax.enable_x64(True):
                self._fitted = jax.tree.unflatten(arrays[1], [jnp.asarray(leaf) for leaf in arrays[0]])

    def _chunk(self, ask: Callable[..., PyTree], x: np.ndarray, start: int, size: int) -> PyTree:
        """What is asked of a chunk of a fixed size: nothing is compiled twice, no query knows another."""
        rows = x[np.minimum(np.arange(start, start + size), len(x) - 1)]
        return jax.tree.map(np.asarray, ask(self._method, *self._fitted, jnp.asarray(rows)))

    def _learned(
        self, method: Method, steps: int, x: np.ndarray, y: np.ndarray, seed: int
    ) -> tuple[Method, tuple[Parameters, PyTree], float]:
        """The method as it predicts, parameters with the posterior's state, and the bound of all rows."""
        key = jax.random.key(seed)
        order = np.random.default_rng(seed).permutation(len(x))
        every = jnp.asarray(x[order]), jnp.asarray(y[order])
        if METHODS[self.method].batches:
            assert isinstance(method, Inducing)
            start = method.initial(every[0])
            found, _ = many_points.learn_from_batches(
                key, method.process, steps, float(self.rate), start, *every, self.batch
            )
        else:
            few = tuple(part[: self.learning_rows] for part in every)
            plan = many_points.stages(len(few[0]), steps) if METHODS[self.method].staged else [(len(few[0]), steps)]
            found = method.initial(few[0])
            for rows, iterations in plan:
                found, _ = many_points.learn(method, iterations, found, *(part[:rows] for part in few))
        if isinstance(method, OnGrid):
            method = method.laid(found, every[0])
        posterior = many_points.condition(method, found, *every)
        return method, (found, posterior.state), float(posterior.bound)

    def _chosen(self, rows: int, columns: int, seed: int) -> tuple[Method, int]:
        if self.method not in METHODS:
            raise ValueError(f"expected one of {', '.join(METHODS)} as method, got {self.method!r:.40}")
        for name in ("inducing", "learning_rows", "steps", "batch"):
            _whole(name, getattr(self, name), name in ("learning_rows", "steps"))
        if not 0 < self.rate < np.inf:
            raise ValueError(f"expected a positive number as rate, got {self.rate!r:.40}")
        if self.method == "exact" and rows > MOST_EXACT:
            raise ValueError(f"expected at most {MOST_EXACT:,} rows for exact, got {rows:,}; use method='iterative'")
        kernel, choice = plain_kernel(self.kernel), METHODS[self.method]
        if self.method in ("features", "grid") and type(kernel) not in SPECTRA:
            raise ValueError(f"expected rbf or matern52 for {self.method}, got {self.kernel!r:.80}")
        if self.method == "grid" and columns > max(MOST):
            raise ValueError(f"expected inputs of one or two columns for grid, got {columns}; use method='titsias'")
        if self.method in ("grid", "iterative") and min(rows, self.learning_rows or rows) > MOST_EXACT:
            got = "None" if self.learning_rows is None else f"{self.learning_rows:,}"
            raise ValueError(f"expected at most {MOST_EXACT:,} as learning_rows for {self.method}, got {got}")
        return choice.make(kernel, self.inducing, seed), self.steps or choice.steps


def _whole(name: str, value: object, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        words = "a whole number above 0 or None" if optional else "a whole number above 0"
        raise ValueError(f"expected {words} as {name}, got {value!r:.40}")
