"""Making a run: its data, its untrained learner, its folder; for `meta_train.py`, and for a training loop of one's own.

run, problem = new_run(dataset="omniglot", learner="prototypical", shot=5)
...  # what gives a trained learner: docs/learners.md has an example
save_run(dataclasses.replace(run, learner=learner), problem, "runs/mine")
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from fewshot.evaluation.text import Json
from fewshot.tasks.curves import has_real_labels
from fewshot.training import run_directory
from fewshot.training.class_problem import load_class_problem
from fewshot.training.configuration import RunConfig, configured, resolve
from fewshot.training.curve_problem import load_curve_problem
from fewshot.training.overrides import ConfigError
from fewshot.training.plugins import load_plugins
from fewshot.training.problem import Problem
from fewshot.training.run import Run, build_run, describe, export, exported, with_weights
from fewshot.training.run_directory import RunError


def new_run(**fields: Any) -> tuple[Run, Problem]:
    """The untrained run of some fields of `RunConfig`, which are the flags of meta_train.py, and its data.

    Raises ConfigError, also for what is no such field, and DataError, each with one line.
    """
    load_plugins()
    if unknown := fields.keys() - {entry.name for entry in dataclasses.fields(RunConfig)}:
        raise ConfigError(f"expected flags of meta_train.py by their names, got {', '.join(sorted(unknown))}")
    for name, value in fields.items():
        kind = type(getattr(RunConfig(), name))
        if kind is not type(None) and type(value) is not kind:
            raise ConfigError(f"expected {kind.__name__} as {name}, got {value!r:.60}")
    config, problem = loaded(resolve(configured(**fields)))
    return untrained(config, problem), problem


def save_run(run: Run, problem: Problem, path: str | Path, *, steps: int = 0) -> Run:
    """Write the run folder that `load_run` and every command read; the run with its temperature.

    steps: how many were taken, at least 0, for the record. The temperature is fitted as after every training, whatever
    the run's own is. Raises RunError for a folder that holds anything, and for a learner that is not the one of the
    configuration, or has numbers that are not finite.
    """
    folder = Path(path)
    run_directory.check_new(folder, by_flags=False)
    if not 0 <= steps <= run_directory.LARGEST_STEP:
        raise RunError(f"expected a whole number from 0 on as steps, got {steps!r:.40}")
    try:
        with_weights(untrained(run.config, problem), exported(run, steps), Path("the learner"))
    except RunError as error:
        raise RunError(f"expected the learner of {describe(run.config).splitlines()[0]}: {error}") from error
    fitted = dataclasses.replace(
        run, temperature=problem.calibration(run.config)(run.learner), own_classes=problem.class_names
    )
    environment = {"jax": jax.__version__, "backend": jax.default_backend()}
    export(run_directory.create(folder, stored(run.config, problem, environment)), fitted, steps)
    return fitted


def loaded(config: RunConfig) -> tuple[RunConfig, Problem]:
    """The configuration with what follows from its data, and the data. Raises ConfigError and DataError."""
    load = load_curve_problem if has_real_labels(config.dataset) else load_class_problem
    return load(config)


def untrained(config: RunConfig, problem: Problem) -> Run:
    """The run before its first step. Raises ConfigError."""
    return build_run(config, problem.image_shape, problem.training_classes(config))


def stored(config: RunConfig, problem: Problem, environment: Mapping[str, Json]) -> dict[str, Json]:
    """What config.json says; environment: what the last digits of the numbers depend on."""
    found = {
        **config.to_json(),
        "image_shape": problem.image_shape,
        "training_classes": problem.training_classes(config),
        "environment": environment,
    }
    return found if problem.class_names is None else {**found, "classes": problem.class_names}
