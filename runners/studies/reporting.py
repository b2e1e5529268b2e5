"""What every study does with its rows: command line, results.json, table.md, and figures."""

import argparse
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

from fewshot.evaluation.figures import Axes, Figure
from fewshot.evaluation.text import format_markdown, format_table, plain
from fewshot.runners.cli.flags import OneLineParser, whole_number
from fewshot.runners.cli.launch import launch
from fewshot.tasks.replacing import replace_text
from fewshot.training import run_directory
from fewshot.training.overrides import ConfigError

Row: TypeAlias = Mapping[str, object]  # as a JSON file holds it


@runtime_checkable
class Study(Protocol):
    """A study's main: writes its table and figures into `out` and returns the rows."""

    def __call__(self, quick: bool, out: str | None, seed: int) -> Sequence[Row]: ...


def folder(name: str, quick: bool, out: str | None) -> Path:
    """Where a study writes: `out`, or runs/NAME, with -quick after it for a quick one.

    Raises ConfigError for the folder of a training, whose files it would mix with its own.
    """
    path = Path(out or f"runs/{name}{'-quick' if quick else ''}")
    if (path / run_directory.CONFIG).exists():
        raise ConfigError(f"expected --out to be another folder than that of a run, got {plain(path)}; name another")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(path: Path, rows: Sequence[Row], tables: Mapping[str, Sequence[Sequence[str]]], **config: object) -> None:
    """results.json (config and rows) and table.md, and the tables on the console; each table starts with its header."""
    replace_text(path / "results.json", json.dumps({"config": config, "rows": rows}, indent=2) + "\n")
    parts = []
    for title, (header, *lines) in tables.items():
        print(f"\n{title}\n\n{format_table(header, lines)}")
        parts.append(f"{title}\n\n{format_markdown(header, lines)}")
    replace_text(path / "table.md", "\n".join(parts))


def save(figure: Figure, path: Path) -> None:
    """A matplotlib figure as PNG of 256 colours: a third of the size, and no eye sees it."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, bbox_inches="tight", facecolor="white")
    colours = Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    colours.save(path, optimize=True)
    print(f"wrote {path}")


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Axes]:
    """A figure that needs no display, and its axes [rows, columns]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def command_line(name: str, study: Study, description: str, arguments: Sequence[str] | None = None) -> int:
    """`python runners/studies/NAME.py [--quick] [--out DIR] [--seed n]`: exit code 0, or 2 after a one-line error."""
    parser = OneLineParser(prog=f"{name}.py", description=description, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a small version: seconds to minutes")
    parser.add_argument("--out", metavar="DIR", help=f"default runs/{name}, or runs/{name}-quick")
    parser.add_argument("--seed", type=whole_number, default=0, help="of everything random (default 0)")

    def main(given: argparse.Namespace) -> None:
        study(given.quick, given.out, given.seed)

    return launch(parser.parse_args, main, arguments, StudyError)


class StudyError(RuntimeError):
    """A study that cannot run here; the message says what is missing, in one line."""


def run_as_script(name: str, study: Study, description: str | None) -> NoReturn:
    """Ends the program with the exit code of `command_line`."""
    sys.exit(command_line(name, study, (description or name).splitlines()[0]))
