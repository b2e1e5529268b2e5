"""Pictures of predictions: each function takes numbers and returns a matplotlib Figure, which belongs to no window.

matplotlib is imported inside the functions: it costs a second, and training does not need it.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from fewshot.evaluation.figures import Axes, Figure
from fewshot.evaluation.metrics import RiskCoverage
from fewshot.evaluation.resampling import Interval, Reliability

GREY, WRONG = "0.6", "tab:red"
MOST_QUERIES = 8  # of one class in the picture of an episode


class Episode(NamedTuple):
    """One episode to look at; images are [.., H, W, Ch] bytes, rows of support and queries as the labels say."""

    x_support: UInt8[np.ndarray, "N H W Ch"]
    y_support: Int[np.ndarray, " N"]
    x_query: UInt8[np.ndarray, "Q H W Ch"]
    y_query: Int[np.ndarray, " Q"]
    probabilities: Float[np.ndarray, "Q C"]


def reliability_diagram(curve: Reliability) -> Figure:
    """Share right against confidence, the band in which a perfect model stays by chance, and what each bin holds."""
    figure = _figure(3.3, 4.2)  # three side by side in a report
    axis, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    draw_reliability(axis, curve)
    axis.set_ylabel("share right")
    narrow = {"columnspacing": 0.8, "handletextpad": 0.3, "handlelength": 1.2}
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8, **narrow)
    counts.vlines(curve.confidence, 0.5, curve.counts, color="tab:blue", linewidth=6)
    counts.set(yscale="log", ylabel="queries", xlabel="confidence (largest probability)")
    counts.set_ylim(bottom=0.5)
    return figure


def draw_reliability(axis: Axes, curve: Reliability) -> None:
    """Share right against confidence, and the band in which a perfect model stays by chance."""
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    middle = (curve.low + curve.high) / 2
    band = {"fmt": "none", "ecolor": "tab:blue", "elinewidth": 8, "alpha": 0.3}
    axis.errorbar(curve.confidence, middle, (curve.high - curve.low) / 2, **band, label="perfect model, 95%")
    inside = (curve.low <= curve.accuracy) & (curve.accuracy <= curve.high)
    axis.plot(curve.confidence, curve.accuracy, color=GREY, linewidth=1, zorder=1)
    for chosen, color, label in ((inside, "black", "observed"), (~inside, WRONG, "observed, beyond chance")):
        axis.plot(curve.confidence[chosen], curve.accuracy[chosen], "o", color=color, markersize=4, label=label)
    axis.set(xlim=(0, 1), ylim=(-0.03, 1.03))


def confidence_histogram(confidence: Mapping[str, np.ndarray], bins: int = 30) -> Figure:
    """Histograms of the largest probability of all queries, one for each name."""
    figure = _figure(5.4, 3.6)
    axis = figure.subplots()
    edges = np.linspace(0, 1, bins + 1)
    for name, values in confidence.items():
        share = np.histogram(values, edges)[0] / np.size(values)
        axis.stairs(share, edges, label=name, linewidth=1.5)
    axis.set(xlim=(0, 1), xlabel="confidence (largest probability)", ylabel="share of queries")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", frameon=False, fontsize=9)
    return figure


def risk_coverage(curves: Mapping[str, RiskCoverage]) -> Figure:
    """Errors among the most confident queries against how many of them are answered."""
    figure = _figure(5.4, 3.6)
    axis = figure.subplots()
    for name, curve in curves.items():
        shown = _thinned(len(curve.risk))
        axis.plot(curve.coverage[shown], curve.risk[shown], label=name, linewidth=1.5)
    axis.set(xlim=(0, 1), xlabel="coverage: share of queries answered", ylabel="risk: share of errors among them")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left", frameon=False, fontsize=9)
    return figure


def roc(scores: Mapping[str, tuple[np.ndarray, np.ndarray]], areas: Mapping[str, Interval | None]) -> Figure:
    """ROC curves of out-of-episode scores, pooled over episodes: name to (scores, is out of its episode)."""
    figure = _figure(5.0, 4.6)
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for name, (values, positive) in scores.items():
        order = np.argsort(-values.ravel(), kind="stable")
        ranked, chosen = values.ravel()[order], positive.ravel()[order]
        last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)  # equal scores pass together
        true, false = (np.append(0, kind.cumsum()[last] / kind.sum()) for kind in (chosen, ~chosen))
        shown, area = _thinned(len(true)), areas.get(name)
        text = "" if area is None else f": {area.low:.3f} to {area.high:.3f}"
        axis.plot(false[shown], true[shown], label=f"{name}{text}", linewidth=1.5)
    axis.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axis.set(xlabel="share of the episode's own queries flagged", ylabel="share of the others flagged")
    axis.legend(loc="lower right", frameon=False, fontsize=9, title="score: 95% interval of AUROC")
    return figure


def accuracy_by_severity(rows: Mapping[int, tuple[float, float]], name: str, chance: float) -> Figure:
    """Accuracy with the half-width of its interval against the severity of a corruption; severity 0 is clean."""
    figure = _figure(4.6, 3.4)
    axis = figure.subplots()
    severities = sorted(rows)
    values, widths = (np.array([rows[severity][i] for severity in severities]) for i in (0, 1))
    axis.axhline(chance, color=GREY, linewidth=1, linestyle=":", label="chance")
    axis.errorbar(severities, values, widths, marker="o", markersize=4, capsize=3)
    axis.set(xlabel=f"severity of {name} (0: clean)", ylabel="accuracy", ylim=(0, 1), xticks=severities)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    return figure


def learning_curve(records: Sequence[Mapping[str, object]]) -> Figure:
    """Training objective, validation accuracy and NLL, and the output scale against episodes, from metrics.jsonl."""
    panels = {
        "objective": "objective, nats a point",
        "validation_accuracy": "validation accuracy",
        "validation_nll": "validation NLL, temperature 1",
        "scale": "output scale",
    }
    shown = {name: text for name, text in panels.items() if any(name in record for record in records)}
    figure = _figure(6.4, 1.5 * len(shown) + 0.6)
    axes = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, text) in zip(axes, shown.items(), strict=True):
        held = [record for record in records if record.get(name) is not None]
        marker = "o" if name.startswith("validation") else None
        values = [record[name] for record in held]
        axis.plot([record["episodes"] for record in held], values, marker=marker, markersize=3, linewidth=1.2)
        axis.set_ylabel(text.replace(", ", "\n"), fontsize=8)
        axis.tick_params(labelsize=8)
    axes[-1].set_xlabel("training episodes", fontsize=9)
    return figure


def episode_picture(episode: Episode, names: Sequence[str], short: Sequence[str] | None = None) -> Figure:
    """A row per class: its support images, then its queries under predicted class and probability, errors in red.

    `names` of the classes head their rows; `short` ones, by default numbers, stand above the queries.
    """
    classes = episode.probabilities.shape[-1]
    labels = short or [str(label) for label in range(classes)]
    titles = names if short else [f"{label}: {name}" for label, name in zip(labels, names, strict=True)]
    rows = [
        (episode.x_support[episode.y_support == label], np.flatnonzero(episode.y_query == label)[:MOST_QUERIES])
        for label in range(classes)
    ]
    shots, queries = max(len(own) for own, _ in rows), max(len(chosen) for _, chosen in rows)
    widths = [1.4] + [1.0] * shots + [0.25] + [1.0] * queries
    figure = _figure(0.85 * sum(widths), 1.08 * classes)
    axes = figure.subplots(classes, len(widths), squeeze=False, width_ratios=widths)
    for axis in axes.ravel():
        axis.set_axis_off()
    for label, (line, (own, chosen)) in enumerate(zip(axes, rows, strict=True)):
        title = "\n".join(textwrap.wrap(_drawn(titles[label]), 16))
        line[0].text(1, 0.5, title, fontsize=8, ha="right", va="center", parse_math=False)
        for axis, image in zip(line[1:], own, strict=False):
            _show(axis, image)
        for axis, query in zip(line[shots + 2 :], chosen, strict=False):
            _show(axis, episode.x_query[query])
            predicted = int(episode.probabilities[query].argmax())
            text = f"{_drawn(labels[predicted])} {episode.probabilities[query, predicted]:.2f}"
            wrong = predicted != label
            look = {"color": WRONG, "weight": "bold"} if wrong else {"color": "black", "weight": "normal"}
            axis.set_title(text, fontsize=8, parse_math=False, **look)
            if wrong:
                _framed(axis)
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _thinned(count: int, most: int = 2000) -> np.ndarray:
    """Positions of at most `most` points of a curve, its ends among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _show(axis: Axes, image: np.ndarray) -> None:
    grey = {"cmap": "gray", "vmin": 0, "vmax": 255} if image.shape[-1] == 1 else {}
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, **grey)


def _drawn(name: str) -> str:
    """A class name as fonts have it: of a control, or half of a letter, they have nothing to show."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)


def _framed(axis: Axes) -> None:
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set(color=WRONG, linewidth=2)
