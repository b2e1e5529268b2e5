"""Test a trained run on few-shot tasks of classes it never saw.

python runners/evaluate.py RUN_DIR [--dataset NAME] [--episodes 600] [--json FILE] [...]      every flag: --help
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.outer.checkpoint import CheckpointError
from runners import automatic, compilation_cache, scoring, tables
from runners.build import Model, load_run
from runners.console import format_seconds, one_line_errors
from runners.data import EVALUATION_SEED, Shape, calibration_episodes, draw_episodes, load_splits, queries
from runners.flags import OneLineParser, count_or_auto
from runners.overrides import ConfigError
from runners.run_directory import RunError
from tasks import DataError, Dataset

NOT_BUILT_YET = ("--calibrate", "--corruption", "--out-of-episode", "--report")


@dataclass(frozen=True)
class EvaluationConfig:
    """The flags of evaluate.py; None and 0 stand for the run's own value, query 0 for 15 or what the data allow."""

    run_dir: str
    dataset: str | None = None
    episodes: int = 600
    batches: int = 5
    way: int = 0
    shot: int = 0
    query: int = 0
    seed: int = EVALUATION_SEED
    json: str | None = None
    data_root: str | None = None


def main(config: EvaluationConfig) -> dict[str, Any]:
    """Score the run and print a table; the metrics by name, "raw" for those at temperature 1.

    Raises ConfigError, DataError or RunError, each with one line.
    """
    _check(config)
    model = load_run(config.run_dir)
    way, shot = config.way or model.config.way, config.shot or model.config.shot
    dataset = load_splits(config.dataset or model.config.dataset, config.data_root).test
    _check_image_shape(model, config, dataset)
    shape = Shape(way, shot, config.query or queries(dataset, shot, automatic.TEST_QUERIES))
    episodes = draw_episodes(config.seed, "test", dataset, shape, config.episodes)
    model = _with_temperature(model, shape, config.data_root)
    raw = scoring.score(model, scoring.embed(model.deep_kernel, dataset), episodes)
    named = {"at its temperature": raw.tempered(model.temperature), "raw (temperature 1)": raw}
    results = {name: scores.summary(config.batches) for name, scores in named.items()}
    print(tables.heading(config.dataset or model.config.dataset, shape, config.episodes, dataset.classes))
    print(tables.metrics_table(results))
    print(tables.temperature_note(model.temperature, shape))
    print(tables.failures_note(raw.failures()), f"Solved in {format_seconds(raw.seconds)}.")
    tempered, untempered = results.values()
    return {
        **tempered,
        "seconds": raw.seconds,
        "failures": raw.failures(),
        "temperature": model.temperature,
        "raw": untempered,
        "config": {**model.config.to_json(), "evaluation": {**vars(config), **shape._asdict()}},
    }


def _with_temperature(model: Model, shape: Shape, data_root: str | None) -> Model:
    """The temperature belongs to one way and shot: for others it is fitted again, on training classes of the run."""
    if (shape.way, shape.shot) == (model.config.way, model.config.shot):
        return model
    print(f"fitting the temperature for {shape.way}-way {shape.shot}-shot on training classes of the run")
    train = load_splits(model.config.dataset, data_root).train
    return replace(
        model, temperature=scoring.temperature_of(model, *calibration_episodes(model.config, train, *shape[:2]))
    )


def _check(config: EvaluationConfig) -> None:
    if config.json and not Path(config.json).absolute().parent.is_dir():
        raise ConfigError(f"expected --json in a folder that exists, got {config.json}; make the folder first")
    if not 1 <= config.batches <= config.episodes:
        raise ConfigError(f"--batches must lie between 1 and --episodes {config.episodes}, got {config.batches}")


def _check_image_shape(model: Model, config: EvaluationConfig, dataset: Dataset) -> None:
    expected = model.deep_kernel.backbone.image_shape
    if dataset.image_shape != expected:
        raise DataError(
            f"expected images of shape {expected}, as {config.run_dir} was trained on, got {dataset.image_shape} "
            f"from {config.dataset}; choose a data set of that shape or train a run on this one"
        )


class _NotBuilt(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, flag: str | None = None) -> None:
        raise ConfigError(f"{flag} is not built yet; leave it out")


def parse(arguments: Sequence[str] | None = None) -> EvaluationConfig:
    """The command line. Raises ConfigError, also for flags that are not built yet."""
    parser = OneLineParser(prog="evaluate.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--dataset", metavar="NAME", help="another data set with images of the same shape")
    parser.add_argument("--episodes", type=count_or_auto, default=600, metavar="N")
    parser.add_argument("--batches", type=int, default=5, metavar="N", help="batches for the standard deviation")
    parser.add_argument(
        "--way", type=count_or_auto, default=0, metavar="C", help="classes of a task (default: as trained)"
    )
    parser.add_argument(
        "--shot", type=count_or_auto, default=0, metavar="S", help="labelled images a class (default: as trained)"
    )
    parser.add_argument("--query", type=count_or_auto, default=0, metavar="Q", help="queries a class (default 15)")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="of the episodes (default 0)")
    parser.add_argument("--json", metavar="FILE", help="also write the metrics to this file")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    for flag in NOT_BUILT_YET:
        parser.add_argument(flag, nargs="?", const=True, dest="not_built", action=_NotBuilt, help="not built yet")
    given = vars(parser.parse_args(arguments))
    del given["not_built"]
    return EvaluationConfig(**given)


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    with one_line_errors(ConfigError, DataError, RunError, CheckpointError):
        config = parse(arguments)
        compilation_cache.enable()
        metrics = main(config)
        if config.json:
            Path(config.json).write_text(json.dumps(metrics, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
