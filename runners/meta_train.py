"""Meta-train a few-shot learner, a deep-kernel Gaussian process by default, then test it on tasks it never saw.

python runners/meta_train.py [--dataset glyphs] [--shot 1] [...]      every flag: --help
"""

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Required

import jax

from fewshot.evaluation import tables
from fewshot.learners import TrainsOn
from fewshot.runners.cli import compilation_cache, processor
from fewshot.runners.cli.console import one_line_errors, silent_where_asked
from fewshot.runners.cli.flags import parse
from fewshot.runners.cli.launch import EXPECTED, leave, nobody_reads, stopped_by
from fewshot.training import optimisation, processes, run_directory
from fewshot.training.configuration import RunConfig, data_of, resolve
from fewshot.training.events import EventFile, Rows, event_modules, no_events
from fewshot.training.interruption import stoppable
from fewshot.training.loop import Training
from fewshot.training.making import loaded, stored, untrained
from fewshot.training.plugins import load_plugins
from fewshot.training.problem import Problem, Tested
from fewshot.training.progress import Progress
from fewshot.training.run import Run, describe, export, with_weights
from fewshot.training.run_directory import RunDirectory


class Trained(Tested, total=False):
    """What `main` returns: a signal and the step that it came at, or failed tasks, the temperature and the tables."""

    run_dir: Required[str]
    interrupted: int
    step: int
    training_failures: int


def main(config: RunConfig) -> Trained:
    """Train to the end of the run and test; the results by name, or {"interrupted": signal}.

    Raises ConfigError, DataError, RunError or CheckpointError, each with one line.
    """
    config = resolve(config)
    if config.tensorboard:
        event_modules()  # an extra that is missing is said before anything is made
    path = Path(config.run_dir or "")
    if not config.resume:
        run_directory.check_new(path)
        processes.wait_for_all("the run folder is new")
    config, problem = loaded(config)
    directory = _open(config, path, problem)
    with run_directory.lock(path) if processes.is_first() else contextlib.nullcontext():
        return _train(config, problem, directory)


def _train(config: RunConfig, problem: Problem, directory: RunDirectory) -> Trained:
    """Train and test in a run folder that no other process trains in."""
    path = directory.path
    print(f"{path}: {describe(config)}", flush=True)
    run = untrained(config, problem)
    if run.learner.batch_norm:
        print(tables.batch_norm_note(run.learner.batch_norm), flush=True)
    failures = 0
    if run.learner.traits.trains_on is TrainsOn.NOTHING:
        print(f"{config.learner} learns nothing, so no step is taken: its network stays as it is made", flush=True)
        _export_untrained(run, problem, directory)
    else:
        watched = config.tensorboard and directory.writes
        with EventFile(path, config.resume) if watched else contextlib.nullcontext(no_events) as events:
            training = _training(run, problem, directory, events)
            stopped_by = training.run()
        if stopped_by is not None:
            name = signal.Signals(stopped_by).name
            print(f"stopped by {name} after step {training.step:,}; go on with --resume --run-dir {path}")
            return {"interrupted": stopped_by, "step": training.step, "run_dir": str(path)}
        failures = training.failures
    best = with_weights(run, directory.load_weights(), directory.weights)
    return {"run_dir": str(path), "training_failures": failures, **problem.test(run, best, failures)}


def _open(config: RunConfig, path: Path, problem: Problem) -> RunDirectory:
    """The run folder: made after everything has been checked, or opened to resume."""
    untrained(config, problem)
    optimisation.mesh(config)
    environment = {"jax": jax.__version__, "backend": jax.default_backend(), "processor": compilation_cache.processor()}
    if not config.resume:
        if processes.is_first():
            run_directory.create(path, stored(config, problem, environment))
        processes.wait_for_all("the run folder is there")
    directory = run_directory.load(path, writes=processes.is_first())
    problem.check_classes(data_of(directory.config).classes)
    if config.resume and directory.config.get("environment") != environment:
        print(f"{path} was begun with another JAX version or processor: numbers may differ in their last digits")
    return directory


def _training(run: Run, problem: Problem, directory: RunDirectory, events: Rows = no_events) -> Training:
    config = run.config
    return Training(
        run,
        problem.trainer(run),
        directory,
        validate=problem.validation(config),
        calibrate=problem.calibration(config),
        progress=Progress(config.steps * config.tasks_per_step),
        selection=problem.selection,
        events=events,
    )


def _export_untrained(run: Run, problem: Problem, directory: RunDirectory) -> None:
    """The weights of a learner that learns from nothing: batch statistics, and its temperature."""
    learner = problem.untrained(run)
    export(directory, Run(run.config, learner, problem.calibration(run.config)(learner)), 0)


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 after an error in one line, 128 + the signal that stopped the run."""
    try:
        with one_line_errors(*EXPECTED):
            load_plugins()
            config = parse(arguments)
            processes.connect(config)
            compilation_cache.keep_programs()
            processor.tune()
            # Of several processes none may leave the others alone.
            alone = jax.process_count() == 1
            try:
                ended = stoppable() if alone else contextlib.nullcontext()
                with ended, processes.only_first_prints(), silent_where_asked(arguments):
                    result = main(config)
            except BrokenPipeError:
                return nobody_reads()
    except KeyboardInterrupt as stopped:  # before or after training, or a second time during it
        return stopped_by(stopped)
    return 128 + result["interrupted"] if "interrupted" in result else 0


if __name__ == "__main__":
    leave(command_line())
