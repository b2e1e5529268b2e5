"""Likelihood study: confidence before any data, surfaces of likelihood and posterior (OVE F, CDKT figures 1 and 2).

python runners/studies/likelihoods.py [--quick] [--out DIR] [--seed n]

1. Logits f_c ~ N(mean, 1) of C = 5 classes, means 0 and -5: histogram of the largest probability.
2. C = 3, one example of the first class, f_1 and f_2 ~ N(0, 1), f_3 = 0: p(y = 1 | f), and p(f | y = 1) on a grid.
3. f_3 = -100, so that two classes are left: p(y = 1 | f) of softmax and logistic-softmax at CDKT's temperatures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import ClassLikelihood
from fewshot.runners.studies.hyperparameters import TEMPERATURES
from fewshot.runners.studies.reporting import Row, folder, new_figure, run_as_script, save, write

NAME = "likelihoods"
# At a point mass two draws say as much as many. The papers give label regression the noise 1.
LIKELIHOODS: dict[str, ClassLikelihood] = {
    "softmax": Softmax(prediction_draws=2),
    "label regression": LabelRegression(noise=1.0),
    "logistic-softmax": LogisticSoftmax(prediction_draws=2),
    "logistic-softmax, temperature 0.2": LogisticSoftmax(temperature=0.2, prediction_draws=2),
    "one-vs-each": OneVsEach(prediction_draws=2),
}
CLASSES, MEANS, REACH = 5, (0.0, -5.0), 3.0
LOW, ZOOM = -100.0, 1.0  # f_3 of part 3, and the reach of its enlarged panels


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """Rows of the parts, with table.md, results.json and confidence, surfaces and temperatures.png in the folder."""
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
    axis = np.linspace(-REACH, REACH, side)
    temperature_rows: list[dict[str, str | float]] = [
        {"part": "temperature", "temperature": tau, **beside_softmax(axis, *two_classes(axis, tau).values())}
        for tau in TEMPERATURES
    ]
    tables = {
        f"Largest probability of {CLASSES} classes with logits f ~ N(mean, 1)": _table(
            prior_rows, ["likelihood", "prior_mean", "mean", "median", "above_0.9"]
        ),
        "Posterior of (f_1, f_2) given one example of class 1, f_3 = 0": _table(
            surface_rows, ["likelihood", "mode_1", "mode_2", "mean_1", "mean_2", "sd_1", "sd_2", "correlation"]
        ),
        f"Logistic-softmax (ls) beside softmax with f_3 = {LOW:g}, where f_1 and f_2 are both below or both above 0": (
            _table(temperature_rows, list(temperature_rows[0])[1:])
        ),
    }
    rows = prior_rows + surface_rows + temperature_rows
    write(path, rows, tables, quick=quick, seed=seed, draws=draws)
    _plot_confidence(confidences, path)
    _plot_surfaces(surfaces, path)
    _plot_temperatures(side, path)
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


def surface(
    likelihood: ClassLikelihood, side: int
) -> tuple[np.ndarray, Float[np.ndarray, "G G"], Float[np.ndarray, "G G"]]:
    """Axis [G], p(y = 1 | f) and the density p(f | y = 1) at (f_1, f_2) [G, G], f_3 = 0."""
    axis = np.linspace(-REACH, REACH, side)
    value = of_first_class(likelihood, axis, 0.0)
    weight = value * np.exp(-0.5 * (axis[:, None] ** 2 + axis**2))
    return axis, value, weight / (weight.sum() * (axis[1] - axis[0]) ** 2)


def of_first_class(likelihood: ClassLikelihood, axis: np.ndarray, third: float) -> Float[np.ndarray, "G G"]:
    """p(y = 1 | f) at (f_1, f_2) of the axis [G] squared, with f_3 = third."""
    first, second = np.meshgrid(axis, axis, indexing="ij")
    f = jnp.asarray(np.stack([first, second, np.full_like(first, third)]).reshape(3, -1), jnp.float32)
    return np.exp(np.asarray(likelihood.log_prob(jnp.zeros(first.size, jnp.int32), f), float)).reshape(first.shape)


def two_classes(axis: np.ndarray, temperature: float) -> dict[str, Float[np.ndarray, "G G"]]:
    """p(y = 1 | f) of softmax and of logistic-softmax at a temperature, f_3 so low that its class is out (CDKT 3.2)."""
    return {
        "softmax": of_first_class(Softmax(), axis / temperature, LOW / temperature),
        "logistic-softmax": of_first_class(LogisticSoftmax(temperature=temperature), axis, LOW),
    }


def beside_softmax(
    axis: np.ndarray, softmax: Float[np.ndarray, "G G"], logistic_softmax: Float[np.ndarray, "G G"]
) -> dict[str, float]:
    """Distance of the probabilities, and confidence, where both logits are below 0, and where both are above."""
    quadrants = {"below": np.ix_(axis < 0, axis < 0), "above": np.ix_(axis > 0, axis > 0)}
    found = {"softmax_confidence": float(np.mean([_larger(softmax[quadrant]) for quadrant in quadrants.values()]))}
    for place, quadrant in quadrants.items():
        one, other = softmax[quadrant], logistic_softmax[quadrant]
        found[f"mean_distance_{place}"] = float(np.abs(one - other).mean())
        found[f"largest_distance_{place}"] = float(np.abs(one - other).max())
        found[f"ls_confidence_{place}"] = _larger(other)
    return found


def _larger(value: np.ndarray) -> float:
    """Mean of the larger of two probabilities, of which this is the first."""
    return float(np.maximum(value, 1 - value).mean())


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


def _plot_temperatures(side: int, path: Path) -> None:
    """A column for each temperature, CDKT's figure 2: both likelihoods, then both enlarged about the origin."""
    reaches = (REACH, ZOOM)
    figure, axes = new_figure(2 * len(reaches), len(TEMPERATURES), (2.3, 2.2))
    levels = np.linspace(0, 1, 11)
    for column, tau in zip(axes.T, TEMPERATURES, strict=True):
        column[0].set_title(f"temperature {tau:g}", fontsize=9)
        panels = iter(column)
        for reach in reaches:
            axis = np.linspace(-reach, reach, side)
            for name, value in two_classes(axis, tau).items():
                panel = next(panels)
                drawn = panel.contourf(axis, axis, value.T, levels=levels, cmap="viridis")
                panel.axhline(0, color="white", linewidth=0.6)
                panel.axvline(0, color="white", linewidth=0.6)
                panel.set_aspect("equal")
                if tau == min(TEMPERATURES):
                    panel.set_ylabel(f"{name}\n$f_2$", fontsize=9)
    figure.colorbar(drawn, ax=axes, shrink=0.5, label="p(y = 1 | f)")
    figure.supxlabel(f"$f_1$, with $f_3 = {LOW:g}$")
    save(figure, path / "temperatures.png")


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
