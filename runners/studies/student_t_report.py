"""Tables and figures of the study of sparse Student-t processes (student_t.py)."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
from jaxtyping import Float

from fewshot.evaluation.figures import Figure
from fewshot.runners.studies.reporting import new_figure

METHODS = ("natural", "sgd", "adam", "amsgrad", "adagrad")
NATURAL, GAUSSIAN = "natural", "gaussian process"
Score: TypeAlias = Literal["loss", "mse", "nll"]
ERRORS: tuple[Score, Score] = ("mse", "nll")
DIGITS: dict[Score, int] = {"mse": 4, "nll": 3}
SHARES = (0.25, 0.5)  # of the time, at which the table looks before its end
FIRST = 0.1  # of the time is not drawn: all fall from the same start
PANELS: dict[Score, str] = {"loss": "-bound / N", "mse": "test MSE", "nll": "test NLL"}
HEADER = ["data", "method", "rate", "diverged", "ms a step", "seconds"]
HEADER += ["-bound/N at 1/4", "at 1/2", "at the end", "less natural", "test MSE", "test NLL"]


class Look(TypedDict):
    """One point of a curve: the three numbers are None where one of them was not finite."""

    seconds: float
    steps: int
    loss: float | None
    mse: float | None
    nll: float | None


class Curve(TypedDict):
    """One run."""

    data: str
    method: str
    rate: float
    seed: int
    outliers: bool
    looks: list[Look]


class Best(NamedTuple):
    """A method at its best rate on one data set: a curve for each seed.

    Also the rates that were tried, how many of them diverged, and the least processor time of a step: `own` in this
    method's runs, `cost` in those of all contestants on the data set.
    """

    data: str
    method: str
    rate: float
    curves: list[Curve]
    tried: list[float]
    diverged: int
    own: float
    cost: float

    def after(self, score: Score, seconds: float) -> list[float]:
        """A score of every seed after so much processor time."""
        return [float(between(curve, score, seconds / self.cost)) for curve in self.curves]

    @property
    def rate_text(self) -> str:
        """With a mark where a better one may lie outside."""
        edge = len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))
        return f"{self.rate:g}{'*' if edge else ''}"


def number(value: float | None) -> float:
    """Infinity where there is none."""
    return math.inf if value is None else value


def between(curve: Curve, name: Score, steps: Float[np.ndarray, "*T"] | float) -> Float[np.ndarray, "*T"] | np.float64:
    """The curve after so many steps, by straight lines; infinity beside what is not finite."""
    looks = curve["looks"]
    return np.interp(steps, [look["steps"] for look in looks], [number(look[name]) for look in looks])


def best_rate(tried: Sequence[Curve]) -> float:
    """The rate with the least loss after as many steps as all took that did not diverge; they cost the same."""
    steps = min((one["looks"][-1]["steps"] for one in tried if not diverged(one)), default=0)
    return min(tried, key=lambda one: math.inf if diverged(one) else float(between(one, "loss", steps)))["rate"]


def ended(curve: Curve, name: Score) -> float:
    """The last value of a curve."""
    return number(curve["looks"][-1][name])


def diverged(curve: Curve) -> bool:
    """Whether it ended in what is not finite."""
    return curve["looks"][-1]["loss"] is None


def cost_of_step(curves: Sequence[Curve]) -> float:
    """The least processor time of a step between two looks of any of these runs: what others do can only add to it."""
    return min(
        (two["seconds"] - one["seconds"]) / (two["steps"] - one["steps"])
        for curve in curves
        for one, two in itertools.pairwise(curve["looks"])
    )


def best_of(curves: Sequence[Curve]) -> Iterator[Best]:
    """Of every data set and method, without outliers: the rate of the first seed with the least final loss."""
    clean = [curve for curve in curves if not curve["outliers"]]
    for data in dict.fromkeys(curve["data"] for curve in clean):
        for method in (*METHODS, GAUSSIAN):
            mine = [curve for curve in clean if (curve["data"], curve["method"]) == (data, method)]
            if not mine:
                continue
            first = [curve for curve in mine if curve["seed"] == mine[0]["seed"]]
            rate, failed = best_rate(first), sum(map(diverged, first))
            chosen = [curve for curve in mine if curve["rate"] == rate]
            rivals = [
                one for one in clean if one["data"] == data and (one["method"] == GAUSSIAN) == (method == GAUSSIAN)
            ]
            tried = [curve["rate"] for curve in first]
            yield Best(data, method, rate, chosen, tried, failed, cost_of_step(mine), cost_of_step(rivals))


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard error."""
    if not np.isfinite(values).all():
        return f"diverged ({int(np.sum(~np.isfinite(values)))} of {len(values)})"
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    mean = f"{np.mean(values):.{digits}f}"
    return mean if math.isnan(error) else f"{mean} +- {error:.{digits}f}"


def horizon(found: Sequence[Best], data: str) -> float:
    """The processor time that every run of the contestants had on a data set."""
    mine = [best for best in found if best.data == data and best.method != GAUSSIAN]
    return min(best.cost * curve["looks"][-1]["steps"] for best in mine for curve in best.curves)


def tables(curves: Sequence[Curve]) -> Mapping[str, list[list[str]]]:
    """The comparison of optimisers, and the planted outliers; each title explains its columns."""
    return {COMPARISON_TITLE: comparison(curves), OUTLIERS_TITLE: outliers(curves)}


COMPARISON_TITLE = (
    "Student-t process: negative ELBO a training row (less is better) after 1/4, 1/2 and all of a processor time (the "
    "column seconds). A step of q(u) is O(M) in all five methods beside the gradient that they share, so time is steps "
    "times the least processor time of a step on that data set, whichever method's; ms a step is the least of the "
    "method's own runs, which also shows how busy the machine was meanwhile. less natural: the loss at the end less "
    "that of the natural gradient, seed by seed; above 0 the natural gradient is ahead. rate: the best of those tried "
    "with the first seed, * where it is the largest or smallest; diverged: how many of them ended in numbers that are "
    "not finite. Test scores are those at the end. Means and standard errors over seeds, each with a fold of its own; "
    "targets have variance 1. The gaussian process is another model with another bound and cost, no contestant."
)
OUTLIERS_TITLE = (
    "Outliers: the same test rows, after training on clean targets and after 5% of them were moved by 10 standard "
    "deviations. student-t: the natural gradient at the rate above; means and standard errors over seeds."
)


def comparison(curves: Sequence[Curve]) -> list[list[str]]:
    """A line for each data set and method."""
    lines, found = [HEADER], list(best_of(curves))
    for best in found:
        seconds = horizon(found, best.data)
        natural = {
            curve["seed"]: loss
            for other in found
            if (other.data, other.method) == (best.data, NATURAL)
            for curve, loss in zip(other.curves, other.after("loss", seconds), strict=True)
        }
        ends = best.after("loss", seconds)
        ahead = [loss - natural[curve["seed"]] for curve, loss in zip(best.curves, ends, strict=True)]
        losses = [spread(best.after("loss", share * seconds)) for share in SHARES]
        scores = [spread(best.after(name, seconds), DIGITS[name]) for name in ERRORS]
        times = [f"{1e3 * best.own:.2f}", f"{seconds:.2f}"]
        rates = [best.rate_text, f"{best.diverged} of {len(best.tried)}"]
        paired = "" if best.method in (NATURAL, GAUSSIAN) else spread(ahead)
        lines.append([best.data, best.method, *rates, *times, *losses, spread(ends), paired, *scores])
    return lines


def outliers(curves: Sequence[Curve]) -> list[list[str]]:
    """A line for each data set and model, with and without outliers."""
    lines = [["data", "model", "MSE, clean", "MSE, outliers", "NLL, clean", "NLL, outliers"]]
    for best in best_of(curves):
        key = (best.data, best.method, best.rate)
        dirty = [one for one in curves if one["outliers"] and (one["data"], one["method"], one["rate"]) == key]
        if dirty:
            name = "student-t" if best.method == NATURAL else best.method
            pairs = [
                spread([ended(one, score) for one in given], DIGITS[score])
                for score in ERRORS
                for given in (best.curves, dirty)
            ]
            lines.append([best.data, name, *pairs])
    return lines


def curves_figure(curves: Sequence[Curve]) -> Figure:
    """Bound and test errors against processor time: mean over seeds, and their range as a band."""
    found = list(best_of(curves))
    names = list(dict.fromkeys(best.data for best in found))
    figure, axes = new_figure(len(PANELS), len(names), (3.6, 2.6), sharex=True)
    for row, (score, label) in zip(axes, PANELS.items(), strict=True):
        for axis, name in zip(row, names, strict=True):
            seconds = horizon(found, name)
            grid = np.linspace(FIRST * seconds, seconds, 60)
            for best in found:
                if best.data == name and (score != "loss" or best.method != GAUSSIAN):
                    values = np.array([between(curve, score, grid / best.cost) for curve in best.curves])
                    values[np.isinf(values)] = np.nan
                    style = {"color": "black", "linestyle": ":"} if best.method == GAUSSIAN else {}
                    (line,) = axis.plot(grid, values.mean(0), label=best.method, **style)
                    axis.fill_between(grid, values.min(0), values.max(0), color=line.get_color(), alpha=0.15)
            axis.set(title=name if score == "loss" else "", yscale="log" if score == "mse" else "linear")
        row[0].set_ylabel(label)
    for axis in axes[-1]:
        axis.set_xlabel("processor time of the steps, s")
    figure.legend(*axes[-1, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8)
    return figure


def outliers_figure(curves: Sequence[Curve]) -> Figure:
    """Test MSE and NLL at the end with clean (o) and with dirty targets (x), a point for each seed."""
    found = [best for best in best_of(curves) if best.method in (NATURAL, GAUSSIAN)]
    names = list(dict.fromkeys(best.data for best in found))
    figure, axes = new_figure(1, 2, (4.2, 2.8))
    for axis, score in zip(axes[0], ERRORS, strict=True):
        for best in found:
            shift = -0.12 if best.method == NATURAL else 0.12
            key = (best.data, best.method, best.rate)
            dirty = [one for one in curves if one["outliers"] and (one["data"], one["method"], one["rate"]) == key]
            color = "C0" if best.method == NATURAL else "black"
            for given, marker in ((best.curves, "o"), (dirty, "x")):
                place = [names.index(best.data) + shift] * len(given)
                axis.plot(place, [ended(one, score) for one in given], marker, color=color, markersize=4)
        axis.set_xticks(range(len(names)), names)
        axis.set(title=PANELS[score], xlim=(-0.5, len(names) - 0.5), yscale="log" if score == "mse" else "linear")
    handles = [
        axes[0, 0].plot([], [], marker, color="gray", label=name)[0]
        for marker, name in (("o", "clean"), ("x", "outliers"))
    ]
    handles += [
        axes[0, 0].plot([], [], color=c, label=name)[0] for c, name in (("C0", "student-t"), ("black", GAUSSIAN))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure
