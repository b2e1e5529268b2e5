"""Train and test every method of a comparison, and print their table.

python runners/reproduce.py NAME [--quick] [--out DIR]      every flag: --help

Methods that are finished in DIR are tested again and not trained again, one that was stopped goes on: run the same
command until it is done.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
from inference.outer.checkpoint import CheckpointError
from runners import compilation_cache, meta_train, run_directory
from runners.configuration import RunConfig
from runners.console import format_percent, format_seconds, format_table, one_line_errors
from runners.flags import OneLineParser
from runners.overrides import ConfigError
from runners.run_directory import RunError
from tasks import DataError

HEADER = ["method", "shot", "accuracy", "NLL", "ECE", "raw NLL", "raw ECE", "failures", "training"]
TRAINED, RAW = "trained", "trained, raw (temperature 1)"


@dataclass(frozen=True)
class Method:
    """One row: its name, which is also its folder's, and what of a run's configuration is special to it."""

    name: str
    likelihood: str
    inference: str
    changes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Methods under equal conditions: data set, ways, shots, training episodes, and those of --quick."""

    dataset: str
    methods: tuple[Method, ...]
    way: int = 5
    shots: tuple[int, ...] = (1,)
    episodes: int = 3000
    quick_episodes: int = 300
    test_episodes: int = 600


COMPARISONS = {
    "omniglot-kernels": Comparison(
        "omniglot",
        tuple(Method(name, "softmax", "cvi", changes={"kernel": name}) for name in models.KERNELS),
    ),
    "omniglot-pairs": Comparison(
        "omniglot",
        (
            Method("softmax-cvi", "softmax", "cvi"),
            Method("softmax-cvi-block", "softmax", "cvi", settings={"inference.covariance": "block"}),
            Method("softmax-laplace", "softmax", "laplace"),
            Method("logistic-softmax-cavi", "logistic-softmax", "cavi"),
            Method("logistic-softmax-cvi", "logistic-softmax", "cvi"),
            Method("logistic-softmax-gibbs", "logistic-softmax", "gibbs", settings={"inference.chains": 4}),
            Method("one-vs-each-cavi", "one-vs-each", "cavi"),
            Method("one-vs-each-cvi", "one-vs-each", "cvi"),
            Method("one-vs-each-laplace", "one-vs-each", "laplace"),
            Method("one-vs-each-gibbs-predictive", "one-vs-each", "gibbs", changes={"objective": "predictive"}),
            Method("one-vs-each-gibbs-evidence", "one-vs-each", "gibbs", changes={"objective": "evidence"}),
            Method("gaussian-exact", "gaussian", "exact"),
        ),
    ),
}


@dataclass(frozen=True)
class ReproductionConfig:
    """The flags of reproduce.py."""

    name: str
    quick: bool = False
    out: str | None = None
    seed: int = 0
    data_root: str | None = None


def main(config: ReproductionConfig) -> list[dict[str, Any]]:
    """The rows of the table, written to results.json and table.md after every method.

    Raises ConfigError, DataError or RunError, each with one line.
    """
    comparison = COMPARISONS[config.name]
    folder = Path(config.out or f"runs/{config.name}{'-quick' if config.quick else ''}")
    rows: list[dict[str, Any]] = []
    for shot in comparison.shots:
        for method in comparison.methods:
            print(f"\n== {method.name}, {comparison.way}-way {shot}-shot", flush=True)
            row = _row(comparison, method, shot, folder / f"{method.name}-{shot}shot", config)
            if row is None:
                return rows
            rows.append(row)
            _write(folder, config, rows)
    print("\n" + table(rows))
    return rows


def _row(
    comparison: Comparison, method: Method, shot: int, path: Path, config: ReproductionConfig
) -> dict[str, Any] | None:
    """Train, or go on with, one method, and test it; None if it was interrupted."""
    settings = {"trainer.test_episodes": comparison.test_episodes, **method.settings}
    run = RunConfig(
        dataset=comparison.dataset,
        likelihood=method.likelihood,
        inference=method.inference,
        way=comparison.way,
        shot=shot,
        episodes=comparison.quick_episodes if config.quick else comparison.episodes,
        settings=settings,
        seed=config.seed,
        run_dir=str(path),
        data_root=config.data_root,
        **method.changes,
    )
    if path.exists():
        run = _resumed(run, path)
    start = time.perf_counter()
    result = meta_train.main(run)
    if "interrupted" in result:
        return None
    metrics, raw = result["test"][TRAINED], result["test"][RAW]
    return {
        "method": method.name,
        "shot": shot,
        **{name: metrics[name] for name in ("accuracy", "accuracy_ci95", "nll", "brier", "ece", "ece_floor")},
        "raw_nll": raw["nll"],
        "raw_ece": raw["ece"],
        "temperature": result["temperature"],
        "failures": sum(result["failures"].values()),
        "training_failures": result["training_failures"],
        "training_seconds": run_directory.load(path).read_metrics()[-1]["seconds"],
        "seconds": time.perf_counter() - start,
        "episodes": run.episodes,
    }


def _resumed(run: RunConfig, path: Path) -> RunConfig:
    """The configuration of a folder that was begun; refused if it is that of another comparison."""
    location = {"run_dir": str(path), "resume": True, "data_root": run.data_root}
    stored = RunConfig.from_json(run_directory.load(path).config, **location)
    for name in ("dataset", "episodes", "seed", "way", "shot"):
        if getattr(stored, name) != getattr(run, name):
            held = getattr(stored, name)
            raise ConfigError(f"{path} was trained with {name} {held}, got {getattr(run, name)}; choose another --out")
    return stored


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accuracy with its interval, NLL and ECE with the run's temperature and without, failures, training time."""
    return format_table(HEADER, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    numbers = [f"{row[name]:.3f}" for name in ("nll", "ece", "raw_nll", "raw_ece")]
    accuracy = format_percent(row["accuracy"], row["accuracy_ci95"])
    failures = f"{row['training_failures']} + {row['failures']}"
    return [row["method"], str(row["shot"]), accuracy, *numbers, failures, format_seconds(row["training_seconds"])]


def _write(folder: Path, config: ReproductionConfig, rows: list[dict[str, Any]]) -> None:
    """results.json and table.md, replaced whole."""
    results = {"config": dataclasses.asdict(config), "rows": rows}
    run_directory.replace_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    lines = [HEADER, ["---"] * len(HEADER), *map(_cells, rows)]
    run_directory.replace_text(folder / "table.md", "".join("| " + " | ".join(line) + " |\n" for line in lines))


def parse(arguments: Sequence[str] | None = None) -> ReproductionConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="reproduce.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("name", metavar="NAME", help=", ".join(COMPARISONS))
    parser.add_argument("--quick", action="store_true", help="few training episodes: minutes instead of hours")
    parser.add_argument("--out", metavar="DIR", help="default runs/NAME, or runs/NAME-quick")
    parser.add_argument("--seed", type=int, default=0, help="of networks, tasks and inference (default 0)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    config = ReproductionConfig(**vars(parser.parse_args(arguments)))
    if config.name not in COMPARISONS:
        raise ConfigError(f"expected a known comparison, got {config.name!r}; known: {', '.join(COMPARISONS)}")
    return config


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    with one_line_errors(ConfigError, DataError, RunError, CheckpointError):
        config = parse(arguments)
        compilation_cache.enable()
        main(config)
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
