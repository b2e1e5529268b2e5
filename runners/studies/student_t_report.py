"""Tables and figures of the study of sparse Student-t processes (student_t.py)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypedDict

import numpy as np
from jaxtyping import Float

from fewshot.evaluation.figures import Figure
from fewshot.runners.studies.reporting import new_figure

METHODS = ("natural", "sgd", "adam", "amsgrad", "adagrad")
NATURAL, GAUSSIAN = "natural", "gaussian process"
DIGITS = {"mse": 4, "nll": 3}
SHARES = (0.25, 0.5)  # of the time, at which the table looks before its end
FIRST = 0.1  # of the time is not drawn: all fall from the same start
PANELS: dict[Literal["loss", "mse", "nll"], str] = {"loss": "-bound / N", "mse": "test MSE", "nll": "test NLL"}
HEADER = ["data", "method", "rate", "diverged", "steps"]
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
    """A method at its best rate on one data set: a curve for each seed; the rates that were tried, and that failed."""

    data: str
    method: str
    rate: float
    curves: list[Curve]
    tried: list[float]
    diverged: int

    @property
    def rate_text(self) -> str:
        """With a mark where a better one may lie outside."""
        edge = len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))
        return f"{self.rate:g}{'*' if edge else ''}"


def number(value: float | None) -> float:
    """Infinity where there is none."""
    return math.inf if value is None else value


def final_loss(curve: Curve) -> float:
    """What methods and rates are ranked by; a run that diverged comes last."""
    return number(curve["looks"][-1]["loss"])


def at(curve: Curve, seconds: float) -> Look:
    """The last look within so many seconds."""
    return [look for look in curve["looks"] if look["seconds"] <= seconds][-1]


def between(
    curve: Curve, name: Literal["loss", "mse", "nll"], times: Float[np.ndarray, " T"]
) -> Float[np.ndarray, " T"]:
    """The curve at given times, by straight lines; NaN beside what is not finite."""
    seconds = [look["seconds"] for look in curve["looks"]]
    values = [math.nan if look[name] is None else number(look[name]) for look in curve["looks"]]
    return np.interp(times, seconds, values)


def ended(curve: Curve, name: Literal["loss", "mse", "nll"]) -> float:
    """The last value of a curve."""
    return number(curve["looks"][-1][name])


def best_of(curves: Sequence[Curve]) -> Iterator[Best]:
    """Of every data set and method, without outliers: the rate of the first seed with the least final loss."""
    clean = [curve for curve in curves if not curve["outliers"]]
    for data in dict.fromkeys(curve["data"] for curve in clean):
        for method in (*METHODS, GAUSSIAN):
            mine = [curve for curve in clean if (curve["data"], curve["method"]) == (data, method)]
            if not mine:
                continue
            first = [curve for curve in mine if curve["seed"] == mine[0]["seed"]]
            rate = min(first, key=final_loss)["rate"]
            failed = sum(math.isinf(final_loss(curve)) for curve in first)
            chosen = [curve for curve in mine if curve["rate"] == rate]
            yield Best(data, method, rate, chosen, [curve["rate"] for curve in first], failed)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard error."""
    if not np.isfinite(values).all():
        return f"diverged ({int(np.sum(~np.isfinite(values)))} of {len(values)})"
    error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    mean = f"{np.mean(values):.{digits}f}"
    return mean if math.isnan(error) else f"{mean} +- {error:.{digits}f}"


def tables(curves: Sequence[Curve], seconds: float) -> Mapping[str, list[list[str]]]:
    """The comparison of optimisers, and the planted outliers; each title explains its columns."""
    return {comparison_title(seconds): comparison(curves, seconds), OUTLIERS_TITLE: outliers(curves)}


def comparison_title(seconds: float) -> str:
    """What the columns of `comparison` are."""
    return (
        f"Student-t process, {seconds:g} s of processor time a run. -bound/N: negative ELBO a training row, less is "
        "better, after 1/4, 1/2 and all of the time; less natural: that method's last less the natural gradient's, "
        "seed by seed, above 0 where the natural gradient is ahead. rate: the best of those tried with the first seed, "
        "* where it is the largest or smallest; diverged: how many of them ended in numbers that are not finite. "
        "steps: the mean of a run. Means and standard errors over seeds, each a fold of its own; targets have variance "
        "1. The gaussian process is another model with another bound, not a contestant."
    )


OUTLIERS_TITLE = (
    "Outliers: the same test rows, after training on clean targets and after 5% of them were moved by 10 standard "
    "deviations. student-t: the natural gradient at the rate above; means and standard errors over seeds."
)


def comparison(curves: Sequence[Curve], seconds: float) -> list[list[str]]:
    """A line for each data set and method."""
    lines, found = [HEADER], list(best_of(curves))
    for best in found:
        by_seed = {
            curve["seed"]: ended(curve, "loss")
            for other in found
            if (other.data, other.method) == (best.data, NATURAL)
            for curve in other.curves
        }
        ahead = [ended(curve, "loss") - by_seed[curve["seed"]] for curve in best.curves]
        steps = np.mean([curve["looks"][-1]["steps"] for curve in best.curves])
        losses = [spread([number(at(curve, share * seconds)["loss"]) for curve in best.curves]) for share in SHARES]
        losses.append(spread([ended(curve, "loss") for curve in best.curves]))
        contestant = best.method not in (NATURAL, GAUSSIAN)
        scores = [spread([ended(curve, name) for curve in best.curves], DIGITS[name]) for name in ("mse", "nll")]
        rates = [best.rate_text, f"{best.diverged} of {len(best.tried)}", f"{steps:.0f}"]
        lines.append([best.data, best.method, *rates, *losses, spread(ahead) if contestant else "", *scores])
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
                for score in ("mse", "nll")
                for given in (best.curves, dirty)
            ]
            lines.append([best.data, name, *pairs])
    return lines


def curves_figure(curves: Sequence[Curve], seconds: float) -> Figure:
    """Bound and test errors against processor time: mean over seeds, and their range as a band."""
    found = list(best_of(curves))
    names = list(dict.fromkeys(best.data for best in found))
    figure, axes = new_figure(len(PANELS), len(names), (3.6, 2.6), sharex=True)
    grid = np.linspace(FIRST * seconds, seconds, 60)
    for row, (score, label) in zip(axes, PANELS.items(), strict=True):
        for axis, name in zip(row, names, strict=True):
            for best in found:
                if best.data == name and (score != "loss" or best.method != GAUSSIAN):
                    values = np.array([between(curve, score, grid) for curve in best.curves])
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
    for axis, score in zip(axes[0], ("mse", "nll"), strict=True):
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
