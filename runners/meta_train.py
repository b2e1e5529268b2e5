"""Meta-train a deep-kernel Gaussian-process classifier, then test it on classes it never saw.

python runners/meta_train.py [--dataset glyphs] [--shot 1] [...]      every flag: --help
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from models.deep_kernel import holds_features
from runners import baselines, compilation_cache, optimisation, processes, processor, run_directory, scoring, tables
from runners.build import build_model, describe, with_weights
from runners.configuration import RunConfig, resolve
from runners.console import Progress, one_line_errors
from runners.data import (
    EVALUATION_SEED,
    calibration_episodes,
    check_own_classes,
    draw_episodes,
    load_splits,
    own_classes,
    test_shape,
    with_queries,
)
from runners.flags import parse
from runners.launch import EXPECTED, nobody_reads
from runners.run_directory import RunDirectory
from runners.training import Training
from tasks import Splits


def main(config: RunConfig) -> dict[str, Any]:
    """Train to the end of the run and test; the results by name, or {"interrupted": signal}.

    Raises ConfigError, DataError, RunError or CheckpointError, each with one line.
    """
    config = resolve(config)
    path = Path(config.run_dir or "")
    if not config.resume:
        run_directory.check_new(path)
        processes.wait_for_all("the run folder is new")
    splits = load_splits(config.dataset, config.data_root)
    config = with_queries(config, splits)
    directory = _open(config, path, splits)
    print(f"{path}: {describe(config)}", flush=True)
    training = _training(config, splits, directory)
    stopped_by = training.run()
    if stopped_by is not None:
        name = signal.Signals(stopped_by).name
        print(f"stopped by {name} after step {training.step:,}; go on with --resume --run-dir {path}")
        return {"interrupted": stopped_by, "step": training.step, "run_dir": str(path)}
    return {"run_dir": str(path), "training_failures": training.failures, **_test(training, splits)}


def _open(config: RunConfig, path: Path, splits: Splits) -> RunDirectory:
    """The run folder: made after everything has been checked, or opened to resume."""
    build_model(config, splits.image_shape)
    optimisation.mesh(config)
    environment = {"jax": jax.__version__, "backend": jax.default_backend(), "processor": compilation_cache.processor()}
    if not config.resume:
        stored = {**config.to_json(), "image_shape": splits.image_shape, "environment": environment}
        classes = own_classes(splits)
        stored |= {} if classes is None else {"classes": classes}
        if processes.is_first():
            run_directory.create(path, stored)
        processes.wait_for_all("the run folder is there")
    directory = run_directory.load(path, writes=processes.is_first())
    check_own_classes(splits, directory.config.get("classes"))
    if config.resume and directory.config.get("environment") != environment:
        print(f"{path} was begun with another JAX version or processor: numbers may differ in their last digits")
    return directory


def _training(config: RunConfig, splits: Splits, directory: RunDirectory) -> Training:
    model, settings = build_model(config, splits.image_shape), config.trainer
    shape = test_shape(config, splits.validation)
    fixed = draw_episodes(EVALUATION_SEED, "validation", splits.validation, shape, settings.validation_episodes)
    known, calibration = calibration_episodes(config, splits.train, config.way, config.shot)
    return Training(
        model,
        optimisation.build_trainer(model, splits.train),
        directory,
        validate=lambda now: scoring.score(now, scoring.embed(now.deep_kernel, splits.validation), fixed),
        calibrate=lambda now: scoring.temperature_of(now, known, calibration),
        progress=Progress(config.steps * config.tasks_per_step),
    )


def _test(training: Training, splits: Splits) -> dict[str, Any]:
    """The best weights, the untrained network and the nearest neighbour on the test classes, as a table."""
    untrained = training.model
    config, directory = untrained.config, training.directory
    best = with_weights(untrained, directory.load_weights(), directory.weights)
    shape = test_shape(config, splits.test)
    episodes = draw_episodes(EVALUATION_SEED, "test", splits.test, shape, config.trainer.test_episodes)
    raw = scoring.score(best, scoring.embed(best.deep_kernel, splits.test), episodes)
    untrained = baselines.with_statistics(untrained, splits.train)
    start = scoring.score(untrained, scoring.embed(untrained.deep_kernel, splits.test), episodes)
    inputs = "features" if holds_features(splits.image_shape) else "pixels"
    results = {
        "trained": raw.tempered(best.temperature).summary(),
        "trained, raw (temperature 1)": raw.summary(),
        "untrained network": start.summary(),
        f"1-nearest neighbour on {inputs}": baselines.nearest_neighbour(splits.test, episodes).accuracies(),
    }
    print(tables.heading(config.dataset, config.dataset, shape, len(episodes.keys), splits.test.classes))
    print(tables.metrics_table(results))
    print(tables.temperature_note(best, shape))
    print(tables.failures_note(raw.failures()), f"In training: {training.failures or 'none'}.")
    return {"temperature": best.temperature, "failures": raw.failures(), "test": results}


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 after an error in one line, 128 + the signal that stopped the run."""
    try:
        with one_line_errors(*EXPECTED):
            config = parse(arguments)
            processes.connect(config)
            compilation_cache.enable()
            processor.tune()
            try:
                with processes.only_first_prints():
                    result = main(config)
            except BrokenPipeError:
                return nobody_reads()
    except KeyboardInterrupt:  # before or after training, or a second time during it
        print("stopped at once; checkpoints and weights written so far are complete", file=sys.stderr)
        return 128 + signal.SIGINT
    return 128 + result["interrupted"] if "interrupted" in result else 0


if __name__ == "__main__":
    sys.exit(command_line())
