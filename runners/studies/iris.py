"""Likelihoods on two features of Iris: accuracy, Brier, ECE, and the ELBO against the softmax posterior (OVE F.3).

python runners/studies/iris.py [--quick] [--out DIR] [--seed n]      needs scikit-learn, for the data

First two features, three classes, k = exp(-|x - z|^2 / 2), 1 to 30 examples a class, 200 random splits, the other
points are the test set. Predictions integrate over the posterior. The ELBO treats every likelihood's posterior as an
approximation of the softmax posterior: E_q[log softmax] - KL(q || p), larger is nearer.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.evaluation import metrics
from fewshot.inference.inner import Code, Inference, Mask, cvi, exact, laplace
from fewshot.learners import GaussianProcess
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.expectations import MonteCarlo
from fewshot.models.gaussian import BlockSites
from fewshot.models.kernels import RBF
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import Likelihood
from fewshot.runners.studies.reporting import Row, StudyError, folder, new_figure, run_as_script, save, write

NAME, CLASSES, BINS, SPLITS = "iris", 3, 10, 200
BOUND_DRAWS, BLOCK = 1024, 10  # of the ELBO against softmax; splits that are solved together
SHOTS = (1, 2, 3, 4, 5, 10, 15, 20, 25, 30)
METHODS: dict[str, tuple[Likelihood, Callable[..., Inference]]] = {
    "softmax, cvi": (Softmax(), cvi),
    "softmax, cvi with block sites": (Softmax(), partial(cvi, sites=BlockSites)),
    "softmax, laplace": (Softmax(), laplace),
    "logistic-softmax, cvi": (LogisticSoftmax(), cvi),
    "one-vs-each, cvi": (OneVsEach(), cvi),
    "label regression": (LabelRegression(noise=1.0), exact),
}
# RBF takes features / sqrt(D): with l^2 = 1 / D the exponent is the papers' -|x - z|^2 / 2.
HYPER = {"log_scale": 0.0, "log_lengthscale": -0.5 * math.log(2)}


class Averages(TypedDict):
    """Means over the splits with their intervals, ECE pooled and by split, and the number of failures."""

    accuracy: float
    accuracy_ci95: float
    brier: float
    ece: float
    ece_mean_of_splits: float
    elbo: float
    elbo_ci95: float
    failures: int


class IrisRow(Averages):
    """A method at a number of examples a class, over so many splits."""

    method: str
    shot: int
    splits: int


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """One row for each method and number of examples; table.md, results.json and iris.png in the folder."""
    path = folder(NAME, quick, out)
    x, y = load_iris()
    shots, splits = ((1, 5, 30), 10) if quick else (SHOTS, SPLITS)
    rows: list[IrisRow] = [
        {"method": name, "shot": shot, "splits": splits, **scores(name, x, y, split(seed, y, shot, splits), seed)}
        for shot in shots
        for name in METHODS
    ]
    write(path, rows, {f"Iris, {splits} splits": _table(rows)}, quick=quick, seed=seed)
    _plot(rows, path / "iris.png")
    return rows


def load_iris() -> tuple[Float[np.ndarray, "I 2"], Int[np.ndarray, " I"]]:
    """Sepal length and width, and the class. Raises StudyError without scikit-learn."""
    try:
        from sklearn import datasets
    except ImportError:
        raise StudyError(
            "expected scikit-learn, which holds the Iris data, got none; pip install scikit-learn"
        ) from None
    x, y = datasets.load_iris(return_X_y=True)
    return x[:, :2].astype(np.float32), y.astype(np.int32)


class Split(NamedTuple):
    """Positions of training and test points; the former are padded with repeats, `real` says which are none."""

    train: Int[np.ndarray, "E N"]
    real: Bool[np.ndarray, " N"]
    test: Int[np.ndarray, "E Q"]


def split(seed: int, y: Int[np.ndarray, " I"], shot: int, splits: int) -> Split:
    """`shot` examples of every class to train on, drawn at random, all others to test.

    The training sets of all shots are padded to one size, so that nothing is compiled twice.
    """
    rng = np.random.default_rng([seed, shot])
    members = np.stack([np.flatnonzero(y == c) for c in range(CLASSES)])
    drawn = np.stack([rng.permuted(members, axis=1) for _ in range(splits)])
    train, test = (part.reshape(splits, -1) for part in (drawn[:, :, :shot], drawn[:, :, shot:]))
    size = CLASSES * max(SHOTS)
    return Split(np.resize(train.T, (size, splits)).T, np.arange(size) < CLASSES * shot, test)


def scores(name: str, x: Float[np.ndarray, "I 2"], y: Int[np.ndarray, " I"], drawn: Split, seed: int) -> Averages:
    """Metrics over the splits; the intervals are 95%, over splits."""
    keys = jax.random.split(jax.random.key(seed), len(drawn.train))
    everywhere, bounds, codes = solve(name, keys, x, y, drawn.train, drawn.real)
    probabilities = np.take_along_axis(np.asarray(everywhere), drawn.test[:, :, None], axis=1)
    labels, bounds = y[drawn.test], np.asarray(bounds)
    each = [metrics.ece(p[None], label[None], BINS) for p, label in zip(probabilities, labels, strict=True)]
    return {
        "accuracy": metrics.accuracy(probabilities, labels),
        "accuracy_ci95": metrics.accuracy_ci95(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.ece(probabilities, labels, BINS),
        "ece_mean_of_splits": float(np.mean(each)),
        "elbo": float(bounds.mean()),
        "elbo_ci95": float(1.96 * bounds.std(ddof=1) / math.sqrt(len(bounds))),
        "failures": int((np.asarray(codes) != Code.OK).sum()),
    }


def learner_of(name: str) -> GaussianProcess:
    """A Gaussian process on the two features themselves."""
    deep_kernel = DeepKernel(Identity((1, 1, 2)), RBF(), rngs=nnx.Rngs(0), classes=CLASSES)
    for hyper, value in HYPER.items():
        deep_kernel.hyper[hyper][...] = jnp.asarray(value, jnp.result_type(float))
    return GaussianProcess(deep_kernel, *METHODS[name])


@partial(jax.jit, static_argnums=0)
def solve(
    name: str,
    keys: Key[Array, " E"],
    x: Float[Array, "I 2"],
    y: Int[Array, " I"],
    train: Int[Array, "E N"],
    real: Bool[Array, " N"],
) -> tuple[Float[Array, "E I C"], Float[Array, " E"], Int[Array, " E"]]:
    """Probabilities of all points, ELBO against the softmax posterior, and result codes."""
    learner = learner_of(name)
    mask = Mask(real, jnp.ones(CLASSES, bool))

    def one(key: Array, chosen: Array) -> tuple[Array, Array, Array]:
        fit_key, predict_key, bound_key = jax.random.split(key, 3)
        state, code = learner.fit(fit_key, x[chosen], y[chosen], CLASSES, mask)
        q = state.posterior
        points = MonteCarlo(BOUND_DRAWS).points(bound_key, CLASSES, x.dtype)
        data = jnp.where(real, Softmax().expected_log_prob(y[chosen], q.marginals, points), 0.0)
        return learner.predict(predict_key, state, x).probabilities, jnp.sum(data) - q.kl, code

    return jax.lax.map(lambda pair: one(*pair), (keys, train), batch_size=min(len(keys), BLOCK))


def _table(rows: list[IrisRow]) -> list[list[str]]:
    header = ["method", "examples a class", "accuracy", "Brier", "ECE", "ECE, mean of splits", "ELBO", "failures"]
    return [
        header,
        *(
            [
                row["method"],
                str(row["shot"]),
                f"{100 * row['accuracy']:.1f} +- {100 * row['accuracy_ci95']:.1f}%",
                *(f"{value:.3f}" for value in (row["brier"], row["ece"], row["ece_mean_of_splits"])),
                f"{row['elbo']:.2f} +- {row['elbo_ci95']:.2f}",
                str(row["failures"]),
            ]
            for row in rows
        ),
    ]


def _plot(rows: list[IrisRow], path: Path) -> None:
    """Four panels against the number of examples; the ELBO as its difference from that of softmax with cvi."""
    figure, axes = new_figure(1, 4, (3.4, 3.0))
    best = {row["shot"]: row["elbo"] for row in rows if row["method"] == "softmax, cvi"}
    panels: dict[str, Callable[[IrisRow], float]] = {
        "accuracy": lambda row: row["accuracy"],
        "Brier score": lambda row: row["brier"],
        "ECE (10 bins, pooled)": lambda row: row["ece"],
        "ELBO less softmax, cvi": lambda row: row["elbo"] - best[row["shot"]],
    }
    for axis, (label, value) in zip(axes[0], panels.items(), strict=True):
        for method in METHODS:
            mine = [row for row in rows if row["method"] == method]
            axis.plot(
                [row["shot"] for row in mine], [value(row) for row in mine], marker="o", markersize=3, label=method
            )
        axis.set(xlabel="examples a class", title=label)
    axes[0, 0].legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
