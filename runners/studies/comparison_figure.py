"""The picture of a comparison: what its table says, one line a method, with the published accuracies beside."""

from collections.abc import Mapping, Sequence
from typing import Any

from fewshot.evaluation.figures import Axes, Figure
from fewshot.evaluation.plots import draw_reliability
from fewshot.evaluation.resampling import Reliability
from fewshot.runners.studies.comparison_table import Row
from fewshot.runners.studies.published import Published
from fewshot.runners.studies.reporting import new_figure

WIDE, TALL = 5.0, 4.2  # inches: a panel of `tradeoff_figure`
PANEL, LINE = 3.6, 0.24  # inches: width of a panel, height of a method
NARROW = 4  # ratio of the ends of an axis up to which it is linear: a logarithmic one may then have a single label
SQUARE = 2.8  # inches: a panel of `reliability_figure`
SIGNS = "osD^vP*"  # seven of them and ten colours are different for 70 methods
FILLED, HOLLOW = {"color": "tab:blue"}, {"color": "tab:blue", "markerfacecolor": "white"}


def comparison_figure(rows: Sequence[Mapping[str, Any]], published: Sequence[Published]) -> Figure:
    """Accuracy with its 95% interval, NLL and ECE of every row; a line of panels for each number of shots."""
    shots = sorted({row["shot"] for row in rows})
    lines = [_Line([row for row in rows if row["shot"] == shot], published, shot) for shot in shots]
    height = max(LINE * len(line.names) for line in lines) + 1
    figure, axes = new_figure(len(shots), 3, (PANEL, height), sharey="row")
    for line, (accuracy, nll, ece) in zip(lines, axes, strict=True):
        line.accuracy(accuracy)
        line.before_and_after(nll, "nll", "NLL, nats a query")
        line.before_and_after(ece, "ece", "ECE")
    for axis in axes[0, :2]:  # above the panels, where no point can lie
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=7, borderaxespad=0)
    return figure


class _Line:
    """The panels of one number of shots. Methods go down the page, measured ones first."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], published: Sequence[Published], shot: int) -> None:
        self.rows, self.shot = rows, shot
        self.published = [printed for printed in published if shot in printed.accuracy]
        measured = [row["method"] for row in rows]
        self.names = list(dict.fromkeys([*measured, *(printed.method for printed in self.published)]))
        self.heights = [self.names.index(name) for name in measured]

    def accuracy(self, axis: Axes) -> None:
        """Measured accuracy with its interval, and published ones."""
        values = [100 * row["accuracy"] for row in self.rows]
        margins = [100 * row["accuracy_ci95"] for row in self.rows]
        axis.errorbar(values, self.heights, xerr=margins, fmt="o", markersize=4, label="measured", **FILLED)
        self._as_printed(axis, "accuracy")
        axis.set_yticks(range(len(self.names)), self.names, fontsize=8)
        axis.set_ylim(len(self.names) - 0.5, -0.5)
        axis.grid(axis="y", color="0.9")
        axis.set_xlabel(f"accuracy, %, {self.shot}-shot")

    def _as_printed(self, axis: Axes, metric: str) -> None:
        """A published metric as diamonds, a colour for each source."""
        for number, source in enumerate(dict.fromkeys(printed.source for printed in self.published)):
            cells = {one.method: getattr(one, metric) for one in self.published if one.source == source}
            shown = {
                self.names.index(name): float(by_shot[self.shot])
                for name, by_shot in cells.items()
                if self.shot in by_shot
            }
            style = {"markersize": 4, "markerfacecolor": "white", "color": f"C{number + 1}"}
            axis.plot(list(shown.values()), list(shown), "D", label=source, **style)

    def before_and_after(self, axis: Axes, metric: str, label: str) -> None:
        """A metric at the run's temperature, and raw; published ECEs as diamonds."""
        from matplotlib.ticker import LogLocator

        axis.plot([row["raw"][metric] for row in self.rows], self.heights, "o", markersize=4, label="raw", **HOLLOW)
        values = [row[metric] for row in self.rows]
        axis.plot(values, self.heights, "o", markersize=4, label="at the run's temperature", **FILLED)
        if metric == "ece":
            self._as_printed(axis, metric)
        axis.grid(axis="y", color="0.9")
        low, high = axis.get_xlim()
        if high > NARROW * low:  # raw values can be tens of times the others
            axis.set_xscale("log")
            low, high = axis.get_xlim()
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))  # no labels touch
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        axis.set_xlabel(f"{label}, {self.shot}-shot")


def tradeoff_figure(rows: Sequence[Row]) -> Figure:
    """Accuracy against NLL and against training time, a point a row; hollow where training images were changed."""
    shots = sorted({row["shot"] for row in rows})
    figure, axes = new_figure(len(shots), 2, (WIDE, TALL), sharey="row")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for line, shot in zip(axes, shots, strict=True):
        shown = [row for row in rows if row["shot"] == shot]
        minutes = [row["training_seconds"] / 60 for row in shown]
        _scatter(line[0], shown, [row["nll"] for row in shown], methods)
        line[0].set_xlabel(f"NLL, nats a query, {shot}-shot")
        _scatter(line[1], shown, minutes, methods)
        line[1].set_xlabel(f"training time with validation, minutes, {shot}-shot")
        line[0].set_ylabel("accuracy, %")
    named = dict(item for line in axes for item in zip(*line[0].get_legend_handles_labels()[::-1], strict=True))
    axes[0, 1].legend(
        named.values(), named, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8, borderaxespad=0
    )
    return figure


def _scatter(axis: Axes, rows: Sequence[Row], x: Sequence[float], methods: Sequence[str]) -> None:
    """Points with the 95% interval of their accuracy; a method has a colour and a sign, its seeds are alike."""
    for row, place in zip(rows, x, strict=True):
        number = methods.index(row["method"])
        face = {} if row.get("augment", "none") == "none" else {"markerfacecolor": "white"}
        axis.errorbar(
            place,
            100 * row["accuracy"],
            yerr=100 * (row["accuracy_ci95"] or 0),
            fmt=SIGNS[number % len(SIGNS)],
            color=f"C{number}",
            markersize=5,
            elinewidth=0.8,
            label=row["method"],
            **face,
        )
    axis.grid(color="0.92")


def reliability_figure(curves: Mapping[int, Mapping[str, Reliability]]) -> Figure:
    """Reliability of some methods, by shots and names: a line of panels for each number of shots."""
    columns = max(map(len, curves.values()))
    figure, axes = new_figure(len(curves), columns, (SQUARE, SQUARE), sharex=True, sharey=True)
    for line, (shot, methods) in zip(axes, curves.items(), strict=True):
        for axis, (name, curve) in zip(line, methods.items(), strict=False):
            draw_reliability(axis, curve)
            axis.set_title(f"{name}, {shot}-shot", fontsize=9)
            axis.set_xticks([0.25, 0.5, 0.75])  # labels at the ends would touch those of the next panel
        for axis in line[len(methods) :]:
            axis.axis("off")
        line[0].set_ylabel("share right")
    for axis in axes[-1]:
        axis.set_xlabel("confidence (largest probability)", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return figure
