"""Likelihood study: confidence before any data, and the surfaces of likelihood and posterior (OVE F, CDKT figure 1).

python runners/studies/likelihoods.py [--quick] [--out DIR] [--seed n]

1. Logits f_c ~ N(mean, 1) of C = 5 classes, means 0 and -5: histogram of the largest probability.
2. C = 3, one example of the first class, f_1 and f_2 ~ N(0, 1), f_3 = 0: p(y = 1 | f), and p(f | y = 1) on a grid.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import Likelihood
from fewshot.runners.studies.reporting import Row, folder, new_figure, run_as_script, save, write

NAME = "likelihoods"
# At a point mass two draws say as much as many. The papers give label regression the noise 1.
LIKELIHOODS: dict[str, Likelihood] = {
    "softmax": Softmax(prediction_draws=2),
    "label regression": LabelRegression(noise=1.0),
    "logistic-softmax": LogisticSoftmax(prediction_draws=2),
    "logistic-softmax, temperature 0.2": LogisticSoftmax(temperature=0.2, prediction_draws=2),
    "one-vs-each": OneVsEach(prediction_draws=2),
}
CLASSES, MEANS, REACH = 5, (0.0, -5.0), 3.0


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """Rows of both parts, with table.md, results.json, confidence.png and surfaces.png in the folder."""
    path = folder(NAME, quick, out)
    draws, side = (2_000, 41) if quick else (50_000, 161)
    confidences = {mean: confidence(jax.random.key(seed), mean, draws) for mean in MEANS}
    surfaces = {name: surface(likelihood, side) for name, likelihood in LIKELIHOODS.items()}
    prior_rows: list[dict[str, str | float]] = [
        {"part": "confidence", "likelihood": name, "prior_mean": mean, **spread(values)}
        for mean, each in confidences.items()
        for name, values in each.items()
    ]
    surface_rows: list[dict[str, str | float]] = [
        {"part": "posterior", "likelihood": name, **moments(axis, posterior)}
        for name, (axis, _, posterior) in surfaces.items()
    ]
    tables = {
        f"Largest probability of {CLASSES} classes with logits f ~ N(mean, 1)": _table(
            prior_rows, ["likelihood", "prior_mean", "mean", "median", "above_0.9"]
        ),
        "Posterior of (f_1, f_2) given one example of class 1, f_3 = 0": _table(
            surface_rows, ["likelihood", "mode_1", "mode_2", "mean_1", "mean_2", "sd_1", "sd_2", "correlation"]
        ),
    }
    rows = prior_rows + surface_rows
    write(path, rows, tables, quick=quick, seed=seed, draws=draws)
    _plot_confidence(confidences, path)
    _plot_surfaces(surfaces, path)
    return rows


def confidence(key: Array, mean: float, draws: int) -> dict[str, np.ndarray]:
    """Largest class probability of every likelihood at the same logits f ~ N(mean, 1) [C, draws]."""
    f_key, predict_key = jax.random.split(key)
    f = mean + jax.random.normal(f_key, (CLASSES, draws))
    point = Marginals(f, jnp.zeros_like(f))
    return {
        name: np.asarray(likelihood.predict(predict_key, point).max(axis=1)) for name, likelihood in LIKELIHOODS.items()
    }


def spread(confidences: np.ndarray) -> dict[str, float]:
    """Mean, median, and the share above 0.9."""
    return {
        "mean": float(confidences.mean()),
        "median": float(np.median(confidences)),
        "above_0.9": float((confidences > 0.9).mean()),
    }


def surface(likelihood: Likelihood, side: int) -> tuple[np.ndarray, Float[np.ndarray, "G G"], Float[np.ndarray, "G G"]]:
    """Axis [G], p(y = 1 | f) and the density p(f | y = 1) at (f_1, f_2) [G, G], f_3 = 0."""
    axis = np.linspace(-REACH, REACH, side)
    first, second = np.meshgrid(axis, axis, indexing="ij")
    f = jnp.asarray(np.stack([first, second, np.zeros_like(first)]).reshape(3, -1), jnp.float32)
    value = np.exp(np.asarray(likelihood.log_prob(jnp.zeros(side**2, jnp.int32), f), float)).reshape(side, side)
    weight = value * np.exp(-0.5 * (first**2 + second**2))
    return axis, value, weight / (weight.sum() * (axis[1] - axis[0]) ** 2)


def moments(axis: np.ndarray, density: np.ndarray) -> dict[str, float]:
    """Mode, means, deviations and correlation of a density on the grid."""
    share = density / density.sum()
    first, second = share.sum(1), share.sum(0)
    mean = np.array([first @ axis, second @ axis])
    deviation = np.sqrt([first @ axis**2 - mean[0] ** 2, second @ axis**2 - mean[1] ** 2])
    correlation = (axis @ share @ axis - mean[0] * mean[1]) / deviation.prod()
    mode = axis[list(np.unravel_index(density.argmax(), density.shape))]
    named = {f"{name}_{i + 1}": float(pair[i]) for name, pair in (("mode", mode), ("mean", mean)) for i in (0, 1)}
    return named | {"sd_1": float(deviation[0]), "sd_2": float(deviation[1]), "correlation": float(correlation)}


def _table(rows: Sequence[Mapping[str, str | float]], columns: list[str]) -> list[list[str]]:
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    return [[column.replace("_", " ") for column in columns], *cells]


def _cell(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def _plot_confidence(confidences: dict[float, dict[str, np.ndarray]], path: Path) -> None:
    figure, axes = new_figure(len(MEANS), len(LIKELIHOODS), (2.6, 2.2), sharex=True, sharey=True)
    bins = np.linspace(1 / CLASSES, 1, 33)
    for row, (mean, each) in zip(axes, confidences.items(), strict=True):
        for axis, (name, values) in zip(row, each.items(), strict=True):
            axis.hist(values, bins, density=True, color="tab:blue")
            axis.axvline(values.mean(), color="black", linewidth=1)
            axis.set_title(name.replace(", ", "\n") if mean == MEANS[0] else "", fontsize=9)
        row[0].set_ylabel(f"density, f ~ N({mean:g}, 1)")
    figure.supxlabel(f"largest probability of {CLASSES} classes (line: mean)")
    save(figure, path / "confidence.png")


def _plot_surfaces(surfaces: dict, path: Path) -> None:
    figure, axes = new_figure(2, len(LIKELIHOODS), (2.6, 2.5), sharex=True, sharey=True)
    for column, (name, (axis, value, posterior)) in zip(axes.T, surfaces.items(), strict=True):
        for panel, field in zip(column, (value, posterior), strict=True):
            panel.contourf(axis, axis, field.T, levels=12, cmap="viridis")
            panel.plot(0, 0, "w+", markersize=6)
            panel.set_aspect("equal")
        column[0].set_title(name.replace(", ", "\n"), fontsize=9)
    axes[0, 0].set_ylabel("p(y = 1 | f)\n$f_2$")
    axes[1, 0].set_ylabel("p(f | y = 1)\n$f_2$")
    figure.supxlabel("$f_1$, with $f_3 = 0$")
    save(figure, path / "surfaces.png")


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
