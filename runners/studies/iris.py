"""Likelihoods on two features of Iris: accuracy, Brier, ECE, and the ELBO against the softmax posterior (OVE F.3).

python runners/studies/iris.py [--quick] [--out DIR] [--seed n]      needs scikit-learn, for the data

First two features, three classes, k = exp(-|x - z|^2 / 2), 1 to 30 examples a class, 200 random splits, the other
points are the test set. Predictions integrate over the posterior. The ELBO treats every likelihood's posterior as an
approximation of the softmax posterior: E_q[log softmax] - KL(q || p), larger is nearer.

Maps of the largest probability over the two features (OVE figure 7): the first split with 30 examples a class, the
likelihood at the mean of q, as the paper predicts, and integrated over q.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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
from fewshot.inference.predictive import predict_marginals
from fewshot.learners import GaussianProcess
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.expectations import MonteCarlo
from fewshot.models.gaussian import BlockSites, Marginals
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
# Of the maps: the likelihoods; how the label is predicted; examples a class; around the data, and away from all of it.
MAPPED = ("label regression", "logistic-softmax, cvi", "one-vs-each, cvi", "softmax, cvi")
PREDICTIONS = ("at the mean", "integrated")
MAP_SHOT, MARGIN, AWAY, SURE = 30, 1.5, 20.0, 0.8
POINTS = ("white", "tab:red", "black")  # colours of the classes
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


class MapRow(TypedDict):
    """A map in numbers: the largest probability within the range of the data, around it and far away, on average."""

    method: str
    prediction: str
    in_range: float
    above: float  # share of the range where it is more than SURE
    around: float
    far: float
    unlike_softmax: float  # share of the range where another class than softmax's has it


class Map(NamedTuple):
    """Probabilities of a likelihood on a grid and far away from it, at the mean of q and integrated over q."""

    grid: Float[np.ndarray, "2 G G C"]
    far: Float[np.ndarray, "2 C"]


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """Rows by method and number of examples, then of maps; table.md, results.json, iris.png, maps.png in the folder."""
    path = folder(NAME, quick, out)
    x, y = load_iris()
    shots, splits = ((1, 5, 30), 10) if quick else (SHOTS, SPLITS)
    rows: list[IrisRow] = [
        {"method": name, "shot": shot, "splits": splits, **scores(name, x, y, split(seed, y, shot, splits), seed)}
        for shot in shots
        for name in METHODS
    ]
    first = split(seed, y, MAP_SHOT, splits)
    axes = map_axes(x, 31 if quick else 121)
    maps = {name: map_of(name, x, y, first, axes, seed) for name in MAPPED}
    map_rows = summaries(x, axes, maps)
    tables = {
        f"Iris, {splits} splits": _table(rows),
        f"Largest probability over the two features, one split with {MAP_SHOT} examples a class": _map_table(map_rows),
    }
    write(path, [*rows, *map_rows], tables, quick=quick, seed=seed)
    _plot(rows, path / "iris.png")
    _plot_maps(x, y, first.train[0], axes, maps, path / "maps.png")
    return [*rows, *map_rows]


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


def map_axes(x: Float[np.ndarray, "I 2"], side: int) -> Float[np.ndarray, "2 G"]:
    """Values of both features: the range of the data and MARGIN on either side."""
    return np.linspace(x.min(0) - MARGIN, x.max(0) + MARGIN, side, axis=1).astype(x.dtype)


def map_of(
    name: str,
    x: Float[np.ndarray, "I 2"],
    y: Int[np.ndarray, " I"],
    drawn: Split,
    axes: Float[np.ndarray, "2 G"],
    seed: int,
) -> Map:
    """The map of a method, given the training points of the first split. Raises StudyError where inference failed."""
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    query = np.concatenate([grid.reshape(-1, 2), x.max(0)[None] + AWAY])
    chosen = drawn.train[0]
    found, code = predict_both_ways(name, jax.random.key(seed), x[chosen], y[chosen], drawn.real, query)
    if code != Code.OK:
        raise StudyError(f"expected a map of {name}, but its inference ended with {Code(int(code)).name}")
    found = np.asarray(found)
    return Map(found[:, :-1].reshape(len(PREDICTIONS), *grid.shape[:2], CLASSES), found[:, -1])


@partial(jax.jit, static_argnums=0)
def predict_both_ways(
    name: str,
    key: Key[Array, ""],
    x: Float[Array, "N 2"],
    y: Int[Array, " N"],
    real: Bool[Array, " N"],
    query: Float[Array, "Q 2"],
) -> tuple[Float[Array, "2 Q C"], Int[Array, ""]]:
    """Probabilities by PREDICTIONS, the likelihood at the mean of q and its expectation under q; the fit's code."""
    learner = learner_of(name)
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, x, y, CLASSES, Mask(real, jnp.ones(CLASSES, bool)))
    marginals = state.posterior.predict(learner.latent_query(state, query))
    at_mean = Marginals(marginals.mean, jnp.zeros_like(marginals.mean))
    both = [predict_marginals(predict_key, METHODS[name][0], each) for each in (at_mean, marginals)]
    return jnp.stack(both), code


def summaries(x: Float[np.ndarray, "I 2"], axes: Float[np.ndarray, "2 G"], maps: Mapping[str, Map]) -> list[MapRow]:
    """One row for each likelihood and prediction."""
    inside = np.logical_and.outer(*((x.min(0)[i] <= axes[i]) & (axes[i] <= x.max(0)[i]) for i in (0, 1)))
    rows: list[MapRow] = []
    for i, prediction in enumerate(PREDICTIONS):
        classes = {name: found.grid[i].argmax(-1) for name, found in maps.items()}
        for name, found in maps.items():
            largest = found.grid[i].max(-1)
            rows.append(
                {
                    "method": name,
                    "prediction": prediction,
                    "in_range": float(largest[inside].mean()),
                    "above": float((largest[inside] > SURE).mean()),
                    "around": float(largest[~inside].mean()),
                    "far": float(found.far[i].max()),
                    "unlike_softmax": float((classes[name] != classes["softmax, cvi"])[inside].mean()),
                }
            )
    return rows


def _map_table(rows: list[MapRow]) -> list[list[str]]:
    header = ["method", "prediction", "in the data's range", f"share above {SURE:g}", "around it", "far away"]
    lines = []
    for row in rows:
        values = (row["in_range"], row["above"], row["around"], row["far"], row["unlike_softmax"])
        lines.append([row["method"], row["prediction"], *(f"{value:.3f}" for value in values)])
    return [[*header, "other class than softmax"], *lines]


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


def _plot_maps(
    x: Float[np.ndarray, "I 2"],
    y: Int[np.ndarray, " I"],
    train: Int[np.ndarray, " N"],
    axes: Float[np.ndarray, "2 G"],
    maps: Mapping[str, Map],
    path: Path,
) -> None:
    """A row for each prediction, a column for each likelihood; training points, and lines where the class changes."""
    figure, panels = new_figure(len(PREDICTIONS), len(maps), (3.0, 2.5), sharex=True, sharey=True)
    levels = np.linspace(0.3, 1, 15)
    for i, row in enumerate(panels):
        row[0].set_ylabel(f"{PREDICTIONS[i]}\nsepal width")
        for panel, (name, found) in zip(row, maps.items(), strict=True):
            drawn = panel.contourf(*axes, found.grid[i].max(-1).T, levels=levels, cmap="viridis")
            for c in range(CLASSES):
                margin = found.grid[i, :, :, c] - np.delete(found.grid[i], c, axis=-1).max(-1)
                panel.contour(*axes, margin.T, levels=[0.0], colors="white", linewidths=0.8)
                of_class = train[y[train] == c]
                panel.scatter(*x[of_class].T, s=8, color=POINTS[c], edgecolors="black", linewidths=0.4)
            panel.set_title(name.split(",")[0] if i == 0 else "")
    for panel in panels[-1]:
        panel.set_xlabel("sepal length")
    figure.colorbar(drawn, ax=panels, shrink=0.7, label="largest probability")
    save(figure, path)


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
