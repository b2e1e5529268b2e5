"""Every method of a data set at a glance: accuracy and NLL by steps and training images, from kept comparisons.

    python benchmarks/overview.py FOLDER ... [--out docs/results/omniglot-emnist]

A folder holds the results.json of `reproduce.py`. Rows of one method under one condition are averaged over their seeds.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fewshot.evaluation.figures import Axes, Figure
from fewshot.evaluation.text import format_markdown
from fewshot.runners.studies import comparison_table, naming, published
from fewshot.runners.studies.published import Published
from fewshot.runners.studies.reporting import new_figure, save

LEGEND = """Accuracy in %, then the NLL in nats a query at the run's own temperature; in brackets over how many seeds
both are means. *Changed*: training images changed at random. *Published*: accuracy after 60,000 episodes at 1-shot
and 40,000 at 5-shot, images as they are. Steps are those planned; a run ends sooner where validation has not improved
for a third of them. Those of the MAMLs, the chaser, ABML and what says so are of four tasks, those of feature
transfer and baseline++ of a batch; what is untrained sees pixels. Rows have 600 or 3,000 test episodes, as the tables
that they come from say. The order: most steps first, then accuracy, with images as they are.
"""
PANEL, LINE = 5.2, 0.3  # inches: width of a panel, height of a method
SIGNS = ("o", "D", "s", "^")  # for the numbers of steps


class Condition(NamedTuple):
    """Whether training images are changed, and the planned steps; in the order of the columns."""

    changed: bool
    steps: int

    def __str__(self) -> str:
        return f"{f'{self.steps:,} steps' if self.steps else 'untrained'}{', changed' if self.changed else ''}"


class Cell(NamedTuple):
    """Means over seeds: accuracy in %, NLL, and how many there are."""

    accuracy: float
    nll: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.accuracy:.1f}, {self.nll:.3f}{f' ({self.seeds})' if self.seeds > 1 else ''}"


Overview = Mapping[str, Mapping[Condition, Cell]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the page, and write it with its figure into a folder."""
    given = parse(arguments)
    rows = [row for path in given.folders for row in kept(path)]
    asked = f"`python benchmarks/overview.py {' '.join(given.folders)}`"
    page = f"# Every method of {given.dataset}\n\n{asked}\n\n"
    printed = published.of(given.dataset)
    found = {shot: overview(rows, shot) for shot in sorted({row["shot"] for row in rows})}
    page += "\n".join(f"**{shot}-shot**\n\n{table(methods, shot, printed)}" for shot, methods in found.items())
    page += f"\n{LEGEND}"
    print(page)
    if given.out:
        Path(given.out).mkdir(parents=True, exist_ok=True)
        (Path(given.out) / "overview.md").write_text(page)
        save(figure(found, printed), Path(given.out) / "overview.png")


def kept(folder: str) -> list[comparison_table.Row]:
    """The rows of a folder. Ends the program in one line where it holds no comparison."""
    path = Path(folder) / "results.json"
    try:
        rows = json.loads(path.read_text())["rows"]
        missing = {name for name in ("method", "shot", "budget", "augment") for row in rows if name not in row}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"overview.py: expected results.json of reproduce.py in {folder}, got {error!r}")
    if missing:
        sys.exit(f"overview.py: expected rows with {', '.join(sorted(missing))} in {path}; make them anew")
    return rows


def overview(rows: Sequence[comparison_table.Row], shot: int) -> Overview:
    """Method -> condition -> means over seeds; the longest trained on images as they are first, then by accuracy."""
    groups: dict[str, dict[Condition, list[comparison_table.Row]]] = {}
    for row in rows:
        if row["shot"] == shot:
            condition = Condition(row["augment"] != "none", row["budget"])
            groups.setdefault(naming.plain(row["method"]), {}).setdefault(condition, []).append(row)
    found = {name: {at: _mean(group) for at, group in conditions.items()} for name, conditions in groups.items()}
    return dict(sorted(found.items(), key=lambda item: _longest_as_they_are(item[1]), reverse=True))


def _mean(rows: Sequence[comparison_table.Row]) -> Cell:
    accuracy = statistics.mean(100 * row["accuracy"] for row in rows)  # rounded as comparison_table rounds it
    nll = statistics.mean(row["nll"] for row in rows)
    return Cell(accuracy, nll, len(rows))


def _longest_as_they_are(cells: Mapping[Condition, Cell]) -> tuple[int, float]:
    """Of what is trained with changed images alone a value between the trained and the untrained."""
    return max(((at.steps, cell.accuracy) for at, cell in cells.items() if not at.changed), default=(0, 100.0))


def _conditions(methods: Overview) -> list[Condition]:
    return sorted({condition for cells in methods.values() for condition in cells})


def table(methods: Overview, shot: int, printed: Sequence[Published]) -> str:
    """A line a method, a column a condition, then what was published."""
    columns, papers = _conditions(methods), _published(shot, printed)
    lines = [
        [name, *(str(cells.get(column, "")) for column in columns), papers.get(name, "")]
        for name, cells in methods.items()
    ]
    return format_markdown([f"{shot}-shot", *map(str, columns), "published"], lines)


def _published(shot: int, printed: Sequence[Published]) -> dict[str, str]:
    by_name = {one.method: one.accuracy.get(shot, "") for one in printed}
    return {ours: by_name[theirs] for ours, theirs in naming.PRINTED.items() if theirs in by_name}


def figure(found: Mapping[int, Overview], printed: Sequence[Published]) -> Figure:
    """Accuracy of every method, a panel for each number of shots."""
    height = LINE * max(map(len, found.values())) + 1.2
    drawn, axes = new_figure(1, len(found), (PANEL, height))
    steps = sorted({at.steps for methods in found.values() for at in _conditions(methods)})
    for axis, (shot, methods) in zip(axes[0], found.items(), strict=True):
        _panel(axis, methods, steps, _published(shot, printed))
        axis.set_xlabel(f"accuracy, %, {shot}-shot")
    return drawn


def _panel(axis: Axes, methods: Overview, steps: Sequence[int], papers: Mapping[str, str]) -> None:
    """All steps of both panels have a sign each, the fewest on images as they are are hollow."""
    for condition in _conditions(methods):
        heights = [height for height, cells in enumerate(methods.values()) if condition in cells]
        values = [cells[condition].accuracy for cells in methods.values() if condition in cells]
        sign, colour = SIGNS[steps.index(condition.steps)], "tab:orange" if condition.changed else "tab:blue"
        face = {"markerfacecolor": "white"} if condition == (False, steps[0]) else {}
        axis.plot(values, heights, sign, color=colour, markersize=5, label=str(condition), **face)
    heights = [height for height, name in enumerate(methods) if papers.get(name)]
    axis.plot([float(papers[name]) for name in methods if papers.get(name)], heights, "kx", label="published")
    axis.set_yticks(range(len(methods)), naming.names(methods).values(), fontsize=8)
    axis.set_ylim(len(methods) - 0.5, -0.5)
    axis.grid(color="0.92")
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=7, borderaxespad=0)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="with the results.json of a comparison")
    parser.add_argument("--dataset", default="omniglot-emnist", choices=published.DATASETS, help="whose published rows")
    parser.add_argument("--out", metavar="DIR", help="also write overview.md and overview.png there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
