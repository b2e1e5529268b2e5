"""Meta-train a few-shot learner, a deep-kernel Gaussian process by default, then test it on classes it never saw.

python runners/meta_train.py [--dataset glyphs] [--shot 1] [...]      every flag: --help
"""

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Required, TypedDict

import jax

from fewshot.evaluation import tables
from fewshot.evaluation.episodes import EVALUATION_SEED, draw_episodes
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.scoring import embed, score
from fewshot.learners import NearestNeighbour, TrainsOn
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import holds_features
from fewshot.runners.cli import compilation_cache, processor
from fewshot.runners.cli.console import one_line_errors
from fewshot.runners.cli.flags import parse
from fewshot.runners.cli.launch import EXPECTED, nobody_reads, stopped_by
from fewshot.tasks import Splits
from fewshot.training import optimisation, processes, run_directory
from fewshot.training.configuration import HELD_OUT, RunConfig, data_of, resolve
from fewshot.training.data import (
    calibration_episodes,
    check_own_classes,
    load_splits,
    own_classes,
    test_shape,
    training_classes,
    with_queries,
)
from fewshot.training.interruption import stoppable
from fewshot.training.loop import Training
from fewshot.training.progress import Progress
from fewshot.training.run import Run, build_run, describe, export, with_weights
from fewshot.training.run_directory import RunDirectory
from fewshot.training.shape_temperature import fitted_temperature
from fewshot.training.untrained import with_statistics


class Trained(TypedDict, total=False):
    """What `main` returns: a signal and the step that it came at, or failed tasks, the temperature and the tables."""

    run_dir: Required[str]
    interrupted: int
    step: int
    training_failures: int
    temperature: float
    failures: dict[str, int]
    test: dict[str, Metrics]


def main(config: RunConfig) -> Trained:
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
    with run_directory.lock(path) if processes.is_first() else contextlib.nullcontext():
        return _train(config, splits, directory)


def _train(config: RunConfig, splits: Splits, directory: RunDirectory) -> Trained:
    """Train and test in a run folder that no other process trains in."""
    path = directory.path
    print(f"{path}: {describe(config)}", flush=True)
    run = build_run(config, splits.image_shape, training_classes(config, splits.train).classes)
    if run.learner.traits.trains_on is TrainsOn.NOTHING:
        _export_untrained(run, splits, directory)
        return _test(run, 0, splits, directory)
    training = _training(run, splits, directory)
    stopped_by = training.run()
    if stopped_by is not None:
        name = signal.Signals(stopped_by).name
        print(f"stopped by {name} after step {training.step:,}; go on with --resume --run-dir {path}")
        return {"interrupted": stopped_by, "step": training.step, "run_dir": str(path)}
    return _test(run, training.failures, splits, directory)


def _open(config: RunConfig, path: Path, splits: Splits) -> RunDirectory:
    """The run folder: made after everything has been checked, or opened to resume."""
    classes = training_classes(config, splits.train).classes
    build_run(config, splits.image_shape, classes)
    optimisation.mesh(config)
    environment = {"jax": jax.__version__, "backend": jax.default_backend(), "processor": compilation_cache.processor()}
    if not config.resume:
        stored = {**config.to_json(), "image_shape": splits.image_shape, "training_classes": classes}
        named = own_classes(splits)
        stored |= {"environment": environment} | ({} if named is None else {"classes": named})
        if processes.is_first():
            run_directory.create(path, stored)
        processes.wait_for_all("the run folder is there")
    directory = run_directory.load(path, writes=processes.is_first())
    check_own_classes(splits, data_of(directory.config).classes)
    if config.resume and directory.config.get("environment") != environment:
        print(f"{path} was begun with another JAX version or processor: numbers may differ in their last digits")
    return directory


def _training(run: Run, splits: Splits, directory: RunDirectory) -> Training:
    config = run.config
    shape = test_shape(config, splits.validation)
    count = config.trainer.validation_episodes
    fixed = draw_episodes(EVALUATION_SEED, "validation", splits.validation, shape, count)
    calibration = calibration_episodes(config, splits.train, config.way, config.shot)
    return Training(
        run,
        optimisation.build_trainer(run, splits.train),
        directory,
        validate=lambda learner: score(learner, embed(learner, splits.validation), fixed),
        calibrate=lambda learner: fitted_temperature(learner, config, *calibration),
        progress=Progress(config.steps * config.tasks_per_step),
    )


def _export_untrained(run: Run, splits: Splits, directory: RunDirectory) -> None:
    """The weights of a learner that learns from nothing: batch statistics, and its temperature."""
    config = run.config
    learner = with_statistics(run, splits.train)
    calibration = calibration_episodes(config, splits.train, config.way, config.shot)
    export(directory, Run(config, learner, fitted_temperature(learner, config, *calibration)), 0)


def _test(run: Run, failures: int, splits: Splits, directory: RunDirectory) -> Trained:
    """The best weights, the untrained network and the nearest neighbour on the test classes, as a table."""
    config, test = run.config, splits.test
    best = with_weights(run, directory.load_weights(), directory.weights)
    shape = test_shape(config, test)
    episodes = draw_episodes(EVALUATION_SEED, "test", test, shape, config.trainer.test_episodes)
    raw = score(best.learner, embed(best.learner, test), episodes)
    results = {
        "trained": raw.tempered(best.temperature).summary(),
        "trained, raw (temperature 1)": raw.summary(),
    }
    if run.learner.traits.trains_on is not TrainsOn.NOTHING:
        untrained = with_statistics(run, splits.train)
        results["untrained network"] = score(untrained, embed(untrained, test), episodes).summary()
    inputs = "features" if holds_features(splits.image_shape) else "pixels"
    nearest = NearestNeighbour(Identity(splits.image_shape))
    pixels = score(nearest, embed(nearest, test), episodes)
    results[f"1-nearest neighbour on {inputs}"] = pixels.accuracies()
    print(tables.heading(config.dataset, config.dataset, shape, len(episodes.keys), test.classes))
    print(tables.metrics_table(results))
    print(tables.temperature_note(best.temperature, shape, held_out=config.trainer.temperature_from == HELD_OUT))
    print(tables.failures_note(raw.failures()), f"In training: {failures or 'none'}.")
    return {
        "run_dir": str(directory.path),
        "training_failures": failures,
        "temperature": best.temperature,
        "failures": raw.failures(),
        "test": results,
    }


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 after an error in one line, 128 + the signal that stopped the run."""
    try:
        with one_line_errors(*EXPECTED):
            config = parse(arguments)
            processes.connect(config)
            compilation_cache.enable()
            processor.tune()
            # Of several processes none may leave the others alone.
            alone = jax.process_count() == 1
            try:
                with stoppable() if alone else contextlib.nullcontext(), processes.only_first_prints():
                    result = main(config)
            except BrokenPipeError:
                return nobody_reads()
    except KeyboardInterrupt as stopped:  # before or after training, or a second time during it
        return stopped_by(stopped)
    return 128 + result["interrupted"] if "interrupted" in result else 0


if __name__ == "__main__":
    sys.exit(command_line())
