"""Compare a run's own inference with long MCMC on one test task: ArviZ data files, a table and plots.

python runners/diagnose.py RUN_DIR [--out DIR] [--way C] [--shot S] [--compare NAMES]      every flag: --help
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fewshot import models
from fewshot.evaluation.diagnosis import CHAINS, Found, LabelledTask, Tell, labelled_task, own_methods
from fewshot.evaluation.diagnosis_plots import plot
from fewshot.evaluation.diagnosis_tables import (
    LikelihoodRow,
    MethodRow,
    likelihood_rows,
    likelihoods_table,
    method_row,
    methods_table,
    notes,
)
from fewshot.evaluation.episodes import EVALUATION_SEED, Shape, draw_episodes, queries
from fewshot.inference import diagnostics
from fewshot.inference.inner.base import Code, Info
from fewshot.learners import GaussianProcess
from fewshot.runners.cli.flags import OneLineParser, count_or_auto, whole_number
from fewshot.runners.cli.launch import launch, leave
from fewshot.training.overrides import ConfigError
from fewshot.training.run import Run, load_run
from fewshot.training.run_directory import RunError

OTHERS = "all"


@dataclass(frozen=True)
class DiagnoseConfig:
    """The flags of diagnose.py; None and 0 stand for the run's own value, an `out` of None for RUN_DIR/diagnostics."""

    run_dir: str
    out: str | None = None
    way: int = 0
    shot: int = 0
    query: int = 0
    seed: int = EVALUATION_SEED
    draws: int = 4000
    compare: str = OTHERS
    data_root: str | None = None

    def others(self, own: str) -> list[str]:
        """Names of the likelihoods to compare with. Raises ConfigError."""
        names = list(models.LIKELIHOODS) if self.compare == OTHERS else self.compare.split(",")
        unknown = [name for name in names if name not in models.LIKELIHOODS and name != "none"]
        if unknown:
            known = ", ".join(models.LIKELIHOODS)
            raise ConfigError(f"--compare: expected all, none, or some of {known}, got {unknown[0]!r}")
        return [name for name in names if name not in (own, "none")]


class Diagnosis(NamedTuple):
    """Numbers of every method and likelihood, the folder with the files, and the result code of the run's inference."""

    out: Path
    code: Code
    methods: dict[str, MethodRow]
    likelihoods: dict[str, LikelihoodRow]


def main(config: DiagnoseConfig) -> Diagnosis:
    """Diagnose, print the table, write files. Raises ConfigError, DataError or RunError."""
    if config.draws < 100 * CHAINS:
        raise ConfigError(f"--draws must be at least {100 * CHAINS}, a hundred for each of {CHAINS} chains")
    run = load_run(config.run_dir)
    learner, names = run.learner, run.config
    if not isinstance(learner, GaussianProcess):
        raise ConfigError(f"diagnose.py looks at posteriors of Gaussian processes, {names.learner} has none")
    others, out = config.others(names.likelihood), _output_folder(config)
    task, shape = first_test_task(run, learner, config)
    print(f"{config.draws:,} draws of the latents by each method: a minute or two", flush=True)
    own, tell = f"{names.inference} (the run's own)", _stopwatch()
    methods, path = own_methods(learner, task, own, config.seed, config.draws, tell)
    rows = {name: method_row(one, methods["nuts"], task) for name, one in methods.items()}
    first = names.likelihood, learner.likelihood, methods["nuts"]
    compared = {name: models.LIKELIHOODS[name]() for name in others}
    scores = likelihood_rows(first, compared, task, config.seed, config.draws, tell)
    print(
        f"\nOne {shape.way}-way {shape.shot}-shot task of {names.dataset} (seed {config.seed}), likelihood "
        f"{names.likelihood}: latents of the {len(task.y)} labelled points, each method against NUTS"
    )
    print(methods_table(rows))
    print(notes(learner, names.likelihood, names.inference, run.temperature, path))
    print(likelihoods_table(scores))
    _write(out, own, methods, task, path)
    return Diagnosis(out, Code(int(np.max(path.code))), rows, scores)


def _stopwatch() -> Tell:
    """Says on the error stream what begins, and after how many seconds."""
    start = time.monotonic()
    return lambda what: print(f"{time.monotonic() - start:4.0f} s  {what} ...", file=sys.stderr, flush=True)


def first_test_task(run: Run, learner: GaussianProcess, config: DiagnoseConfig) -> tuple[LabelledTask, Shape]:
    """The first test episode of a seed, as evaluate.py draws it; 0 stands for the run's own value."""
    way, shot = config.way or run.config.way, config.shot or run.config.shot
    dataset = run.splits(config.data_root).test
    shape = Shape(way, shot, config.query or queries(dataset, shot))
    return labelled_task(learner, dataset, draw_episodes(config.seed, "test", dataset, shape, 1)), shape


def _write(out: Path, own: str, methods: dict[str, Found], task: LabelledTask, path: Info) -> None:
    """Data and summary of every method, and the plots."""
    out.mkdir(parents=True, exist_ok=True)
    for name, one in methods.items():
        stem = "own" if name == own else name
        diagnostics.save(one.data, out / f"{stem}.nc")
        one.summary.to_csv(out / f"{stem}.csv")
    plot(out, methods, task, path)
    print(f"Data (netCDF), tables (CSV) and plots are in {out}.")


def _output_folder(config: DiagnoseConfig) -> Path:
    out = Path(config.out) if config.out else Path(config.run_dir) / "diagnostics"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"expected --out to be a new or empty folder, got {out}; choose another or remove it")
    return out


def parse(arguments: Sequence[str] | None = None) -> DiagnoseConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="diagnose.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--out", metavar="DIR", help="new folder for what is written (default RUN_DIR/diagnostics)")
    parser.add_argument("--way", type=count_or_auto, default=0, metavar="C", help="classes (default: as trained)")
    parser.add_argument("--shot", type=count_or_auto, default=0, metavar="S", help="labelled images a class")
    parser.add_argument("--query", type=count_or_auto, default=0, metavar="Q", help="queries a class (default 15)")
    parser.add_argument(
        "--seed", type=whole_number, default=EVALUATION_SEED, help="of the task and all draws (default 0)"
    )
    parser.add_argument("--draws", type=int, default=4000, metavar="N", help="of every method (default 4000)")
    parser.add_argument(
        "--compare",
        default=OTHERS,
        metavar="NAMES",
        help="other likelihoods: all (default), none, or names with commas",
    )
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    return DiagnoseConfig(**vars(parser.parse_args(arguments)))


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments)


if __name__ == "__main__":
    leave(command_line())
