"""The figures of kept comparisons anew, from what their results.json holds: those that a folder has already.

    python benchmarks/redraw.py FOLDER ...

reliability.png needs the predictions of its runs and stays as it is.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fewshot.evaluation.figures import Figure
from fewshot.runners.studies.comparison_figure import comparison_figure, tradeoff_figure
from fewshot.runners.studies.comparison_table import Row
from fewshot.runners.studies.published import Published
from fewshot.runners.studies.reporting import save
from fewshot.runners.studies.reproduction import COMPARISONS


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what each folder has. Ends the program in one line where one holds no comparison."""
    for folder in map(Path, parse(arguments).folders):
        for name, draw in figures(folder).items():
            if (folder / name).exists():
                save(draw(), folder / name)


def figures(folder: Path) -> dict[str, Callable[[], Figure]]:
    """What can be drawn of a folder, by the names of files."""
    path = folder / "results.json"
    try:
        stored = json.loads(path.read_text())
        rows: list[Row] = stored["rows"]
        setting = COMPARISONS[stored["config"]["name"]].setting
        published = [_published(**one) for one in stored["published"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"redraw.py: expected results.json of reproduce.py in {folder}, got {error!r}")
    return {
        "comparison.png": lambda: comparison_figure(rows, published, setting),
        "tradeoff.png": lambda: tradeoff_figure(rows, setting),
    }


def _published(method: str, accuracy: dict[str, str], source: str, ece: dict[str, str]) -> Published:
    """JSON has texts where the shots were numbers."""
    by_shot = [{int(shot): value for shot, value in metric.items()} for metric in (accuracy, ece)]
    return Published(method, by_shot[0], source, by_shot[1])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="with the results.json of a comparison")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
