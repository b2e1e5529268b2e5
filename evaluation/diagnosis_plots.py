"""Plots of a diagnosis: chains, latents, the bound, predictions. Matplotlib is imported when one is made."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fewshot.evaluation.diagnosis import Found, LabelledTask
from fewshot.evaluation.figures import Axes, Figure, Pyplot
from fewshot.inference.inner.base import Info

MOST_LATENTS, MOST_TRACES, MOST_QUERIES = 30, 4, 12  # shown in one plot


def plot(out: Path, found: dict[str, Found], task: LabelledTask, path: Info) -> None:
    """Write every plot as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    chains = {name: one for name, one in found.items() if name in ("gibbs", "nuts")}
    own = next(iter(found))
    figures = {
        "trace": _trace(plt, chains, task),
        "rank": _rank(plt, chains, task),
        "forest": _forest(plt, found, task),
        "elbo": _path(plt, own, path),
        "predictive": _predictive(plt, found, task),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=110)
        plt.close(figure)


def _shown(task: LabelledTask) -> list[tuple[int, int]]:
    """Latents traced: of the first point of each class, that class."""
    labels = np.asarray(task.y)
    return [(int(label), int(np.flatnonzero(labels == label)[0])) for label in np.unique(labels)[:MOST_TRACES]]


def _grid(plt: Pyplot, chains: dict[str, Found], task: LabelledTask, draw: Callable[..., None], **text: str) -> Figure:
    """A panel for each traced latent (rows) and sampler (columns)."""
    shown = _shown(task)
    figure, axes = plt.subplots(
        len(shown),
        len(chains),
        figsize=(5.5 * len(chains), 1.8 * len(shown) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for row, (label, point) in zip(axes, shown, strict=True):
        for axis, (name, one) in zip(row, chains.items(), strict=True):
            draw(axis, one.f[:, :, label, point])
            axis.set_title(f"{name}: class {label} at point {point}, its own", fontsize=9)
            axis.tick_params(labelsize=8)
    for axis in axes[-1]:
        axis.set_xlabel(text["x"], fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel(text["y"], fontsize=9)
    return figure


def _trace(plt: Pyplot, chains: dict[str, Found], task: LabelledTask) -> Figure:
    """Latents along the chains."""

    def draw(axis: Axes, values: np.ndarray) -> None:
        axis.plot(values.T, linewidth=0.5, alpha=0.7)
        axis.margins(x=0)

    return _grid(plt, chains, task, draw, x="draw (one colour a chain)", y="f")


def _rank(plt: Pyplot, chains: dict[str, Found], task: LabelledTask) -> Figure:
    """Histograms of each chain's ranks among the draws of all chains: flat where the chains agree."""

    def draw(axis: Axes, values: np.ndarray) -> None:
        ranks = values.ravel().argsort().argsort().reshape(values.shape)
        edges = np.linspace(0, values.size, 21)
        for chain in ranks:
            axis.stairs(np.histogram(chain, edges)[0], edges, baseline=None, linewidth=1.2)
        axis.axhline(values.shape[1] / 20, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(bottom=0)
        axis.margins(x=0)

    return _grid(plt, chains, task, draw, x="rank among all draws (one colour a chain)", y="draws")


def _forest(plt: Pyplot, found: dict[str, Found], task: LabelledTask) -> Figure:
    """Mean and 94% interval of every latent by every method, points by their class."""
    classes, points = task.prior.mean.shape
    pairs = [(label, point) for point in range(points) for label in range(classes)]
    shown = pairs[:MOST_LATENTS]
    figure, axis = plt.subplots(figsize=(8, 0.32 * len(shown) + 1.6), layout="constrained")
    base = np.arange(len(shown))[::-1]
    for number, (name, one) in enumerate(found.items()):
        draws = np.stack([one.f[:, :, label, point].ravel() for label, point in shown])
        low, high = np.quantile(draws, [0.03, 0.97], axis=1)
        height = base + 0.22 * (len(found) - 1 - 2 * number) / 2
        axis.hlines(height, low, high, color=f"C{number}", linewidth=1.5)
        axis.plot(draws.mean(1), height, "o", color=f"C{number}", markersize=4, label=name)
    labels = np.asarray(task.y)
    names = [f"point {point}, class {label}{' *' if labels[point] == label else ''}" for label, point in shown]
    axis.set_yticks(base, names, fontsize=8)
    axis.set_ylim(-0.7, len(shown) - 0.3)
    for edge in range(classes, len(shown), classes):
        axis.axhline(len(shown) - edge - 0.5, color="0.85", linewidth=0.8, zorder=0)
    some = f", {len(shown)} of {len(pairs)}" if len(shown) < len(pairs) else ""
    axis.set_xlabel(f"f: mean and 94% interval (* the point's own class{some})", fontsize=9)
    figure.legend(loc="outside upper center", ncols=len(found), fontsize=9, frameon=False)
    return figure


def _path(plt: Pyplot, own: str, path: Info) -> Figure:
    """The bound after every step; a sampler's log likelihood."""
    sampled = own.startswith("gibbs")
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    steps = np.arange(1, len(path.elbo) + 1)
    axis.plot(steps, path.elbo, marker=".", markersize=4, linewidth=1)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("mean log p(y | f) of the chains" if sampled else "ELBO (nats)", fontsize=9)
    axis.set_title(f"{own}: {float(path.elbo[-1]):.3f} after {len(steps)} steps", fontsize=10)
    axis.ticklabel_format(useOffset=False)
    if not sampled and len(steps) > 1:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    return figure


def _predictive(plt: Pyplot, found: dict[str, Found], task: LabelledTask) -> Figure:
    """Probabilities of some queries by every method, side by side; the frame marks the true class."""
    classes = task.prior.mean.shape[0]
    order = np.argsort(task.y_query, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(MOST_QUERIES, len(order))).astype(int)]
    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=((0.55 * classes + 1.2) * len(found) + 1, 0.36 * len(chosen) + 1.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, one) in zip(axes[0], found.items(), strict=True):
        values = one.probabilities[chosen]
        axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for row, column in np.ndindex(values.shape):
            colour = "white" if values[row, column] > 0.6 else "black"
            axis.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=7, color=colour)
        for row, label in enumerate(task.y_query[chosen]):
            axis.add_patch(plt.Rectangle((label - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="C1", linewidth=1.8))
        axis.set_xticks(range(classes))
        axis.set_yticks(range(len(chosen)), [f"query {index}" for index in chosen], fontsize=8)
        axis.set_title(name.replace(" (", "\n("), fontsize=9)
        axis.set_xlabel("class", fontsize=9)
    figure.suptitle("p(class | data); the true class is framed", fontsize=10)
    return figure
