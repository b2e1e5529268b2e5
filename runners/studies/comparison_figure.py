"""The pictures of a comparison: its table, one line a method beside the published accuracies, and what costs what."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fewshot.evaluation.figures import Axes, Figure
from fewshot.evaluation.plots import draw_reliability
from fewshot.evaluation.resampling import Reliability
from fewshot.runners.studies import naming
from fewshot.runners.studies.comparison_table import Row
from fewshot.runners.studies.published import Published
from fewshot.runners.studies.reporting import new_figure

WIDE, TALL = 4.4, 4.0  # inches: a panel of `tradeoff_figure`
KEYS = 4  # in a line of its legend
PANEL, LINE = 3.6, 0.24  # inches: width of a panel, height of a method
EDGES, UNDER = 0.7, 0.6  # inches: title and legend of a figure, ticks and label under each panel
KEY = 7  # lines: least height of the panel of other published methods, which the legend stands beside
NARROW = 4  # ratio of the ends of an axis up to which it is linear
TICKS = {10: (1, 2, 3, 5, 7), 50: (1, 2, 5), 1000: (1, 3)}  # of a decade, by that ratio: two labels or more, none touch
CLOCK = "minutes by the clock, {shot}-shot: training with\nvalidation, on a machine that others used too"
LEADING = 0.25  # share of the ranges of accuracy and of log NLL that leaders are in
SQUARE = 2.8  # inches: a panel of `reliability_figure`
FILLED, HOLLOW = {"color": "tab:blue"}, {"color": "tab:blue", "markerfacecolor": "white"}


def title(setting: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A data set with its ways, then shots, planned steps and training images as far as the rows say them.

    Rows of earlier versions say episodes in place of steps.
    """
    key, unit = ("budget", "steps") if any("budget" in row for row in rows) else ("episodes", "episodes")
    parts = []
    for shot in _shots(rows):
        numbers = sorted({row.get(key, 0) for row in rows if row["shot"] == shot} - {0})
        after = f" after {' and '.join(f'{one:,}' for one in numbers)} {unit}" if numbers else ""
        parts.append(f"{shot}-shot{after}")
    kinds = {row["augment"] for row in rows if "augment" in row}
    ways = {True: "as they are", False: "changed at random"}
    images = " or ".join(text for same, text in ways.items() if same in {kind == "none" for kind in kinds})
    return f"{setting} {' and '.join(parts)}{', training images ' if images else ''}{images}".strip()


def _shots(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({row["shot"] for row in rows})


def comparison_figure(rows: Sequence[Mapping[str, Any]], published: Sequence[Published], setting: str = "") -> Figure:
    """Accuracy with its 95% interval, NLL and ECE of every row, and as diamonds what was published of the same methods.

    A line of panels for each number of shots; below its accuracy stands that of other published methods.
    """
    groups = [_Group([row for row in rows if row["shot"] == shot], published, shot) for shot in _shots(rows)]
    heights = [height for group in groups for height in group.heights]
    size = (PANEL, (LINE * sum(heights) + EDGES) / len(heights) + UNDER)
    figure, axes = new_figure(len(heights), 3, size, height_ratios=heights)
    figure.suptitle(title(setting, rows))
    lines = iter(axes)
    free = [axis for group in groups for axis in group.draw(lines)]
    named = _legend(figure.axes)
    if free:
        key = free[0].legend(named.values(), named, loc="upper left", frameon=False)
        key.set_in_layout(False)  # two places are free for it
    else:
        figure.legend(named.values(), named, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _legend(axes: Sequence[Axes]) -> dict[str, Any]:
    """What several panels show, by label, what was measured first."""
    found = {label: one for axis in axes for one, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("published")))


class _Group:
    """The panels of one number of shots. Methods go down the page, measured ones first."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], published: Sequence[Published], shot: int) -> None:
        self.rows, self.shot = rows, shot
        self.methods = list(dict.fromkeys(row["method"] for row in rows))
        self.lines = [self.methods.index(row["method"]) for row in rows]
        self.published = [printed for printed in published if shot in printed.accuracy]
        self.same: list[tuple[int, Published]] = []
        self.others: list[tuple[int, Published]] = []
        for printed in self.published:
            ours = naming.measured_as(printed.method, self.methods)
            if ours is None:
                self.others.append((len(self.others), printed))
            else:
                self.same.append((self.methods.index(ours), printed))
        self.heights = [len(self.methods), *([max(KEY, len(self.others))] if self.others else [])]

    def draw(self, lines: Iterator[Sequence[Axes]]) -> list[Axes]:
        """Panels of what was measured, of what else was published, and the place beside that, which stays empty."""
        accuracy, nll, ece = next(lines)
        self._accuracy(accuracy)
        self._before_and_after(nll, "nll", "NLL, nats a query")
        self._before_and_after(ece, "ece", "ECE")
        for axis in (nll, ece):
            _line_up(axis, [""] * len(self.methods))
        if not self.others:
            return []
        below, *free = next(lines)
        below.sharex(accuracy)
        self._printed(below, "accuracy", self.others)
        _line_up(below, [printed.method for _, printed in self.others])
        below.set_xlabel(f"published accuracy, %, {self.shot}-shot")
        for axis in free:
            axis.axis("off")
        return free

    def _accuracy(self, axis: Axes) -> None:
        """Measured accuracy with its interval, and that of the same methods as published."""
        values = [100 * row["accuracy"] for row in self.rows]
        margins = [100 * (row["accuracy_ci95"] or 0) for row in self.rows]
        axis.errorbar(values, self.lines, xerr=margins, fmt="o", markersize=4, label="accuracy, 95% interval", **FILLED)
        self._printed(axis, "accuracy", self.same)
        names = naming.names(self.methods)
        _line_up(axis, [names[method] for method in self.methods])
        axis.set_xlabel(f"accuracy, %, {self.shot}-shot")

    def _printed(self, axis: Axes, metric: str, shown: Sequence[tuple[int, Published]]) -> None:
        """A published metric as diamonds, a colour for each source."""
        sources = list(dict.fromkeys(printed.source for printed in self.published))
        for number, source in enumerate(sources):
            of_source = [(line, getattr(one, metric)) for line, one in shown if one.source == source]
            points = [(float(by_shot[self.shot]), line) for line, by_shot in of_source if self.shot in by_shot]
            style = {"markersize": 5, "markerfacecolor": "white", "color": f"C{number + 1}"}
            if points:
                axis.plot(*zip(*points, strict=True), "D", label=f"published, {source}", **style)

    def _before_and_after(self, axis: Axes, metric: str, label: str) -> None:
        """A metric at the run's temperature, and raw; published ECEs as diamonds."""
        raw = [row["raw"][metric] for row in self.rows]
        axis.plot(raw, self.lines, "o", markersize=4, label="NLL and ECE, raw", **HOLLOW)
        values = [row[metric] for row in self.rows]
        axis.plot(values, self.lines, "o", markersize=4, label="NLL and ECE at the run's temperature", **FILLED)
        if metric == "ece":
            self._printed(axis, metric, self.same)
        _spread_out(axis)
        axis.set_xlabel(f"{label}, {self.shot}-shot")


def _line_up(axis: Axes, names: Sequence[str]) -> None:
    """A line for each name down the page."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(axis="y", color="0.9")


def _spread_out(axis: Axes) -> None:
    """A logarithmic axis with two labels or more where its ends are far apart, as raw values can be from others."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_xlim()
    if high > NARROW * low:
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        subs = next((subs for ratio, subs in TICKS.items() if high < ratio * low), (1,))
        axis.xaxis.set_major_locator(LogLocator(subs=subs))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")


class _Point(NamedTuple):
    """A method after one number of steps: each number is its mean, lowest and highest over seeds."""

    method: str
    shot: int
    budget: int
    changed: bool
    accuracy: tuple[float, float, float]
    nll: tuple[float, float, float]
    minutes: tuple[float, float, float]


def tradeoff_figure(rows: Sequence[Row], setting: str = "") -> Figure:
    """Mean accuracy over seeds against NLL, of the leaders once more, and against training time.

    A method has its own colour and marker, hollow where its training images were changed. Bars go from the lowest to
    the highest seed; where every method has one seed, they are 95% intervals of the accuracy.
    """
    points = _points(rows)
    shots = _shots(rows)
    leaders = {shot: _leaders([point for point in points if point.shot == shot]) for shot in shots}
    columns = 3 if any(leaders.values()) else 2
    keys = math.ceil(len(points) / KEYS)
    figure, axes = new_figure(len(shots), columns, (WIDE, TALL + (keys + 3) * LINE / len(shots)))
    figure.suptitle(title(setting, rows), fontsize=14)
    labels = _labels(points)
    for line, shot in zip(axes, shots, strict=True):
        shown = {point: label for point, label in labels.items() if point.shot == shot}
        nll, time = line[0], line[-1]
        _scatter(nll, shown, "nll")
        _scatter(time, shown, "minutes")
        nll.set_xlabel(f"NLL, nats a query, {shot}-shot", fontsize=11)
        time.set_xlabel(CLOCK.format(shot=shot))
        if leaders[shot]:
            _scatter(line[1], {point: shown[point] for point in leaders[shot]}, "nll")
            line[1].margins(0.1)
            line[1].locator_params(axis="x", nbins=6)  # numbers of three digits need room
            _fix_limits(line[1])
            _scatter(line[1], {point: shown[point] for point in shown if point not in leaders[shot]}, "nll")
            line[1].set_xlabel(f"the same, inside the dashed box, {shot}-shot", fontsize=11)
            _box(nll, line[1])
        elif columns > 2:
            line[1].axis("off")
        _spread_out(nll)
    named = _legend(figure.axes)
    ordered = list(dict.fromkeys(labels[point] for point in sorted(points, key=lambda one: -one.accuracy[0])))
    handles = [named[label] for label in ordered]
    key = figure.legend(handles, ordered, loc="outside lower center", ncols=KEYS, frameon=False, fontsize=11)
    key.set_title(_bars(rows), prop={"size": 11})
    return figure


def _points(rows: Sequence[Row]) -> list[_Point]:
    """Rows of equal methods, shots and planned steps are seeds of one point."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["shot"], row.get("budget", 0)), []).append(row)
    points = []
    for (method, shot, budget), seeds in groups.items():
        values = [100 * row["accuracy"] for row in seeds]
        accuracy = _range(values)
        if not _several(rows):
            margin = 100 * (seeds[0]["accuracy_ci95"] or 0)
            accuracy = values[0], values[0] - margin, values[0] + margin
        nll, minutes = [row["nll"] for row in seeds], [row["training_seconds"] / 60 for row in seeds]
        changed = seeds[0].get("augment", "none") != "none"
        points.append(_Point(method, shot, budget, changed, accuracy, _range(nll), _range(minutes)))
    return points


def _labels(points: Sequence[_Point]) -> dict[_Point, str]:
    """Readable names; with the steps where those of one number of shots differ, but for what learns from nothing."""
    names = naming.names(point.method for point in points)
    budgets = {(point.shot, point.budget) for point in points if point.budget}
    several = len(budgets) > len({shot for shot, _ in budgets})
    return {one: names[one.method] + (f", {one.budget:,} steps" if several and one.budget else "") for one in points}


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.mean(values), min(values), max(values)


def _several(rows: Sequence[Row]) -> bool:
    """Whether there is more than one seed."""
    return len({row.get("seed", 0) for row in rows}) > 1


def _bars(rows: Sequence[Row]) -> str:
    """What the bars and hollow markers are."""
    text = "one seed; bars: 95% interval over test episodes"
    if _several(rows):
        text = "mean over seeds; bars: lowest to highest seed (no bar: one seed)"
    changed = any(row.get("augment", "none") != "none" for row in rows)
    return text + ("; hollow: training images changed at random" if changed else "")


def _leaders(points: Sequence[_Point]) -> list[_Point]:
    """Those in the corner of high accuracy and low NLL; none if that would show all of them again, or one."""
    top, bottom = max(one.accuracy[0] for one in points), min(one.accuracy[0] for one in points)
    best, worst = min(one.nll[0] for one in points), max(one.nll[0] for one in points)
    least, most = top - LEADING * (top - bottom), best * (worst / best) ** LEADING if best > 0 else best
    found = [one for one in points if one.accuracy[0] >= least and one.nll[0] <= most]
    return found if 1 < len(found) < len(points) else []


def _scatter(axis: Axes, shown: Mapping[_Point, str], metric: str) -> None:
    """Accuracy of labelled points against another number of theirs."""
    for point, label in shown.items():
        style = naming.style(point.method)
        (x, *across), (y, *along) = getattr(point, metric), point.accuracy
        axis.errorbar(
            x,
            y,
            xerr=[[x - across[0]], [across[1] - x]],
            yerr=[[y - along[0]], [along[1] - y]],
            fmt=style.marker,
            color=style.colour,
            markersize=11 if style.marker == "*" else 8,
            markeredgewidth=1.5 if point.changed else 0.5,
            elinewidth=1.2,
            label=label,
            **({"markerfacecolor": "white"} if point.changed else {}),
        )
    axis.set_ylabel("accuracy, %", fontsize=11)
    axis.grid(color="0.92")


def _fix_limits(axis: Axes) -> None:
    """Keep the limits, whatever else is drawn: of that only what reaches inside is seen."""
    axis.set_xlim(axis.get_xlim())
    axis.set_ylim(axis.get_ylim())


def _box(axis: Axes, inside: Axes) -> None:
    """The limits of one panel as a dashed box in another."""
    (left, right), (low, high) = inside.get_xlim(), inside.get_ylim()
    axis.plot([left, right, right, left, left], [low, low, high, high, low], "--", color="0.4", linewidth=1)


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
