"""Tell which of several methods is better: their differences on common test tasks, with intervals.

python runners/compare.py RUN RUN [RUN ...] [--json FILE]      every flag: --help

RUN is a run folder that holds predictions.npz, as reproduce.py leaves it, or a file that evaluate.py wrote by
--predictions-file. Run folders whose settings differ in the seed alone are one method. The others are compared with
the first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fewshot.evaluation import prediction_files
from fewshot.evaluation.metrics import EPISODE_SCORES
from fewshot.evaluation.paired import Difference, check_same, paired_differences
from fewshot.evaluation.prediction_files import KeptPredictions, Origin
from fewshot.evaluation.resampling import Interval, plain_interval
from fewshot.evaluation.text import Json, format_table, plain
from fewshot.runners.cli.flags import OneLineParser, check_outputs
from fewshot.runners.cli.launch import launch, leave
from fewshot.tasks.replacing import replace_text
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig
from fewshot.training.overrides import ConfigError

FILE = "predictions.npz"
OF_ONE_RUN = {"seed", "chosen"}  # what runs of one method may differ in
HEADINGS = {"accuracy": "accuracy, %", "nll": "NLL, nats", "brier": "Brier score"}
LEGEND = """\
Differences are to the first row on tasks of the same classes, with 95% intervals. Over tasks: with others of these.
Over classes: with other classes too. Over seeds: with networks of other seeds, where both methods have two runs.
An interval that holds 0 leaves open which is better."""


@dataclass(frozen=True)
class ComparingConfig:
    """The flags of compare.py."""

    runs: tuple[str, ...]
    json: str | None = None


@dataclass(frozen=True)
class Compared:
    """What the runs of one method predict; path: the first of them, by which tables name it.

    settings, seeds: those of its run folders, without what OF_ONE_RUN names; None and 0 of a file.
    """

    path: str
    settings: Mapping[str, Json] | None
    origin: Origin
    runs: list[KeptPredictions]
    seeds: list[int]

    def means(self, score: str) -> list[float]:
        """The score of every run."""
        return [float(EPISODE_SCORES[score](kept.probabilities, kept.labels).mean()) for kept in self.runs]


def main(config: ComparingConfig) -> dict[str, Json]:
    """Print a table for every score, write the file asked for, and return what it holds.

    Raises ConfigError or RunError, each with one line.
    """
    files = {run: _file(run) for run in config.runs}
    check_outputs({"--json": config.json}, map(str, files.values()))
    if len(set(map(Path.resolve, files.values()))) < max(len(config.runs), 2):
        raise ConfigError(f"expected two runs or more, each named once, got {' '.join(map(plain, config.runs))}")
    methods = _methods(files)
    if len(methods) < 2:
        raise ConfigError(f"expected runs of two methods, got {len(files)} whose settings differ in the seed alone")
    first, *others = methods
    try:
        found = [paired_differences(other.runs, first.runs) for other in others]
    except ValueError as error:
        raise ConfigError(f"expected predictions as evaluate.py writes them, got others ({plain(error)})") from error
    print(_title(first.runs[0]))
    for score in HEADINGS:
        print(f"\n{_table(score, methods, found)}")
    print(f"\n{LEGEND}")
    for note in _unlike(methods):
        print(note)
    written = _json(methods, found)
    if config.json:
        replace_text(Path(config.json), json.dumps(written, indent=2) + "\n")
    return written


def _file(run: str) -> Path:
    """The predictions of a run folder, or the file itself. Raises ConfigError where there is none."""
    path = Path(run)
    if not path.is_dir():
        return path
    if not (path / FILE).is_file():
        raise ConfigError(
            f"expected a run folder that holds {FILE}, got {plain(path)}; write it by evaluate.py {plain(path)} "
            f"--predictions-file {plain(path / FILE)}"
        )
    return path / FILE


def _methods(files: Mapping[str, Path]) -> list[Compared]:
    """Runs by method, in the order given. Raises ConfigError where they were not tested on the same tasks."""
    methods: list[Compared] = []
    images: dict[int, str] = {}
    first = None
    for run, file in files.items():
        try:
            kept, origin = prediction_files.read(file), prediction_files.read_origin(file)
            first = first or kept
            check_same(first, kept)
        except ValueError as error:
            raise ConfigError(f"{plain(run)}: {plain(error)}; test all with the same flags") from error
        if origin.images_crc32 is not None:
            images.setdefault(origin.images_crc32, run)
        settings, seed = _settings(Path(run))
        # Runs of one seed and equal settings are two methods: a loop of one's own writes down nothing of itself.
        alike = [one for one in methods if settings is not None and one.settings == settings]
        same = [one for one in alike if seed not in one.seeds and _tested_alike(one.origin, origin)]
        if same:
            same[0].runs.append(kept)
            same[0].seeds.append(seed)
        else:
            methods.append(Compared(run, settings, origin, [kept], [seed]))
    if len(images) > 1:
        one, other, *_ = images.values()
        raise ConfigError(f"expected tests on the same images, got others in {plain(other)} than in {plain(one)}")
    return methods


def _tested_alike(one: Origin, other: Origin) -> bool:
    """As far as both tell."""
    pairs = [(one.shot, other.shot), (one.corruption, other.corruption)]
    return all(None in pair or pair[0] == pair[1] for pair in pairs)


def _unlike(methods: Sequence[Compared]) -> Iterator[str]:
    """What else differs between the methods, a line each."""
    tasks = [f"{method.settings['episodes']:,}" for method in methods if method.settings]
    shots = [str(method.origin.shot) for method in methods if method.origin.shot is not None]
    corruptions = [plain(one.origin.corruption) or "nothing" for one in methods if one.origin.corruption is not None]
    notes = {
        "They were not trained alike: for {} tasks": tasks,
        "They were not tested alike: with {} labelled images of each class": shots,
        "They were not tested alike: on images corrupted by {}": corruptions,
    }
    for note, values in notes.items():
        if len(set(values)) > 1:
            yield f"{note.format(', '.join(values))}, in this order."


def _settings(path: Path) -> tuple[dict[str, Json] | None, int]:
    """What the runs of a method have in common, None of a file, and the seed. Raises ConfigError or RunError."""
    if not path.is_dir():
        return None, 0
    stored = RunConfig.from_json(run_directory.load(path, writes=False).config, str(path))
    return {name: value for name, value in stored.to_json().items() if name not in OF_ONE_RUN}, stored.seed


def _title(kept: KeptPredictions) -> str:
    episodes, queries, way = kept.probabilities.shape
    return f"{episodes:,} test tasks of {way} out of {len(np.unique(kept.classes))} classes, {queries} queries each"


def _table(score: str, methods: Sequence[Compared], found: Sequence[Mapping[str, Difference]]) -> str:
    """A row for every method, the first without differences."""
    factor, digits = (100, 1) if score == "accuracy" else (1, 3)

    def number(value: float, sign: str = "") -> str:
        return f"{factor * value:{sign}.{digits}f}"

    def interval(one: Interval) -> str:
        return f"{number(one.low)} to {number(one.high)}" if np.isfinite(one).all() else ""

    rows = []
    for method, differences in zip(methods, [None, *found], strict=True):
        row = [plain(method.path), str(len(method.runs)), number(float(np.mean(method.means(score))))]
        if differences:
            mean, *intervals = differences[score]
            row += [number(mean, "+"), *map(interval, intervals)]
        rows.append([*row, *[""] * (7 - len(row))])
    header = [HEADINGS[score], "runs", "mean", "less the first", "over tasks", "over classes", "over seeds"]
    return format_table(header, rows)


def _json(methods: Sequence[Compared], found: Sequence[Mapping[str, Difference]]) -> dict[str, Json]:
    """Every number of the tables; null where an interval is not known."""
    rows: list[dict[str, Json]] = []
    for method, differences in zip(methods, [None, *found], strict=True):
        row: dict[str, Json] = {"path": method.path, "runs": {score: method.means(score) for score in HEADINGS}}
        if differences:
            row["differences"] = {score: _plain(differences[score]) for score in HEADINGS}
        rows.append(row)
    return {"first": methods[0].path, "methods": rows}


def _plain(difference: Difference) -> dict[str, Json]:
    mean, *intervals = difference
    names = Difference._fields[1:]
    return {"mean": mean, **{name: plain_interval(one) for name, one in zip(names, intervals, strict=True)}}


def parse(arguments: Sequence[str] | None = None) -> ComparingConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(
        prog="compare.py",
        description="Tell which of several methods is better: differences on common test tasks, with intervals.",
        allow_abbrev=False,
    )
    said = f"a run folder that holds {FILE}, or a file of evaluate.py --predictions-file; the first is compared with"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=said)
    parser.add_argument("--json", metavar="FILE", help="write every number to this file")
    given = vars(parser.parse_args(arguments))
    return ComparingConfig(**{**given, "runs": tuple(given["runs"])})


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments)


if __name__ == "__main__":
    leave(command_line())
