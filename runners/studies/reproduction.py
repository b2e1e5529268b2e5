"""A comparison of methods, trained and tested one after the other, and its files; the names of all studies."""

import dataclasses
import itertools
import json
import platform
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import cast

import numpy as np

from fewshot.evaluation import prediction_files
from fewshot.evaluation.resampling import Reliability, reliability
from fewshot.evaluation.scoring import number_failed
from fewshot.evaluation.text import format_table
from fewshot.learners import TrainsOn
from fewshot.runners import evaluate, meta_train
from fewshot.runners.studies import (
    comparison_table,
    comparisons,
    convergence,
    hyperparameters,
    iris,
    likelihoods,
    outer_loop,
    questions,
    reporting,
    robustness,
    student_t,
)
from fewshot.runners.studies.comparison_figure import comparison_figure, reliability_figure, tradeoff_figure
from fewshot.runners.studies.comparison_table import Diverged, Row
from fewshot.runners.studies.comparisons import INNER_STEPS, Comparison, Method
from fewshot.runners.studies.reporting import save
from fewshot.tasks.replacing import replace_text
from fewshot.training import run_directory
from fewshot.training.assessment import EvaluationConfig
from fewshot.training.configuration import RunConfig, begun, trains_on
from fewshot.training.overrides import ConfigError, Settings
from fewshot.training.run_directory import DivergedError

# A view: what a user's module registers is there too. Iteration begins with the last.
COMPARISONS = ChainMap(questions.COMPARISONS, hyperparameters.COMPARISONS, comparisons.COMPARISONS)
STUDIES = {
    "likelihoods": likelihoods.main,
    "iris": iris.main,
    "convergence": convergence.main,
    "outer-loop": outer_loop.main,
    "student-t": student_t.main,
}

TRAINING_TEST_EPISODES = 60  # of the runs' own tables; the comparison has its own test
QUICK_TEST_EPISODES = 600
QUICK_ROBUSTNESS_EPISODES = 200
MOST_DIAGRAMS = 5  # of reliability, at one number of shots
METRICS = ["accuracy", "accuracy_ci95", "accuracy_std_batches", "nll", "brier", "mce"]
METRICS += ["ece", "ece_debiased", "ece_floor", "ece_floor_q95", "ece_within_band"]
SAME = ("name", "quick")  # of all commands whose rows stand in one table


@dataclass(frozen=True)
class ReproductionConfig:
    """The flags of reproduce.py. methods, shots: those that are run, all if empty; seeds: `seed` alone if empty.

    episodes: optimiser steps, 0 for the comparison's. robustness: then also test every run on corrupted images and on
    queries of other classes.
    """

    name: str
    quick: bool = False
    methods: tuple[str, ...] = ()
    shots: tuple[int, ...] = ()
    episodes: int = 0
    out: str | None = None
    seed: int = 0
    data_root: str | None = None
    robustness: bool = False
    seeds: tuple[int, ...] = ()


def main(config: ReproductionConfig) -> Sequence[Row] | Sequence[reporting.Row]:
    """The rows of the table, written to results.json and table.md after every method; one that diverges has none.

    Rows that earlier commands wrote to the same folder stay.

    Raises ConfigError, DataError, RunError or StudyError, each with one line, and KeyboardInterrupt where a training
    was stopped.
    """
    if config.name in STUDIES:
        return STUDIES[config.name](config.quick, config.out, config.seed)
    comparison = COMPARISONS[config.name]
    folder = reporting.folder(config.name, config.quick, config.out)
    rows, diverged = _finished(comparison, config, folder)
    _write(folder, config, comparison, rows, diverged)
    shown = comparison_table.table(rows, comparison.published, diverged)
    print("\n" + format_table(shown.header, shown.lines) + f"\nwrote {folder / 'table.md'}")
    if rows:
        save(comparison_figure(rows, comparison.published, comparison.setting), folder / "comparison.png")
        save(tradeoff_figure(rows, comparison.setting), folder / "tradeoff.png")
    if curves := _reliability_of_best(rows, folder):
        save(reliability_figure(curves), folder / "reliability.png")
    if rows and config.robustness:
        _write_robustness(folder, [folder / _folder(row["method"], row["shot"], row["seed"]) for row in rows], config)
    return rows


def _finished(comparison: Comparison, config: ReproductionConfig, folder: Path) -> tuple[list[Row], list[Diverged]]:
    """All rows, those of earlier commands among them. Raises KeyboardInterrupt where a training was stopped."""
    rows, diverged = _earlier(folder, config)
    methods, shots = selected(comparison, config)
    for seed, shot, method in itertools.product(config.seeds or [config.seed], shots, methods):
        run = _configuration(comparison, method, shot, seed, folder, config)
        named = f"{method.name}, {comparison.way}-way {shot}-shot, seed {seed}"
        if (method.name, shot, seed, run.episodes) in map(_of, rows):
            print(f"\n== {named} has its row", flush=True)
            continue
        print(f"\n== {named}", flush=True)
        diverged = [one for one in diverged if (one.method, one.shot, one.seed) != (method.name, shot, seed)]
        try:
            row = _row(comparison, method, run, config)
        except DivergedError as error:
            print(f"{method.name} has no row: {error}", flush=True)
            diverged.append(Diverged(method.name, shot, str(error), seed))
        else:
            if row is None:
                raise KeyboardInterrupt
            rows = _in_order([*rows, row], comparison)
        _write(folder, config, comparison, rows, diverged)
    return rows, diverged


def selected(comparison: Comparison, config: ReproductionConfig) -> tuple[list[Method], list[int]]:
    """The methods and shots that were asked for. Raises ConfigError for others than the comparison has."""
    names = [method.name for method in comparison.methods]
    for kind, wanted, known in (("method", config.methods, names), ("shot", config.shots, comparison.episodes)):
        for name in wanted:
            if name not in known:
                listed = ", ".join(map(str, known))
                raise ConfigError(f"expected a {kind} of {config.name}, got {name!r}; known: {listed}")
    chosen = config.methods or (comparison.quick_methods if config.quick else ()) or names
    known_methods = {method.name: method for method in comparison.methods}
    methods = [known_methods[name] for name in chosen]
    return methods, [shot for shot in comparison.episodes if shot in (config.shots or comparison.episodes)]


def _earlier(folder: Path, config: ReproductionConfig) -> tuple[list[Row], list[Diverged]]:
    """What earlier commands found.

    Raises ConfigError where it cannot stand in one table with what this command will find.
    """
    path = folder / "results.json"
    if not path.exists():
        return [], []
    try:
        stored = json.loads(path.read_text())
        rows = [cast(Row, {"seed": stored["config"]["seed"], **row}) for row in stored["rows"]]
        _ = [_of(row) for row in rows]  # each says what it is of
        diverged = [Diverged(**one) for one in stored["diverged"]]
        conditions = {name: stored["config"][name] for name in SAME} | stored["versions"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"expected results of reproduce.py in {path}, got others ({error}); choose another --out"
        ) from error
    now = {name: getattr(config, name) for name in SAME} | _versions()
    wrong = [f"{name} {held}, now {now.get(name)}" for name, held in conditions.items() if held != now.get(name)]
    if wrong and (rows or diverged):
        raise ConfigError(f"{path} has rows of other conditions ({'; '.join(wrong)}); choose another --out")
    return rows, diverged


def _of(row: Row) -> tuple[str, int, int, int]:
    """What a row is of."""
    return row["method"], row["shot"], row["seed"], row["episodes"]


def _in_order(rows: list[Row], comparison: Comparison) -> list[Row]:
    """By shots, then as the comparison has its methods, then by seeds."""
    names = [method.name for method in comparison.methods]
    return sorted(rows, key=lambda row: (row["shot"], names.index(row["method"]), row["seed"]))


def _row(comparison: Comparison, method: Method, run: RunConfig, config: ReproductionConfig) -> Row | None:
    """Train, or go on with, one method, and test it; None if it was interrupted."""
    path = Path(run.run_dir or "")
    if path.exists():
        run = begun(run, path)
    trained = meta_train.main(run)
    if "interrupted" in trained:
        return None
    start = time.perf_counter()
    tested = evaluate.main(
        EvaluationConfig(
            str(path),
            episodes=_test_episodes(comparison, config),
            batches=comparison.batches,
            calibrate=True,
            adapt=run.shot > 1,
            episodes_file=str(path / "episodes.npz"),
            predictions_file=str(path / "predictions.npz"),
            data_root=config.data_root,
        )
    )
    row = {
        "method": method.name,
        "shot": run.shot,
        "seed": run.seed,
        "episodes": run.episodes,
        "budget": run.steps,
        **_training_of(path),
        **{name: value for name, value in tested.items() if name in METRICS},
        "over_classes": tested["intervals_over_classes"]["accuracy"],
        "same_features": tested["same_features"],
        "raw": {name: tested["raw"][name] for name in METRICS},
        "calibrated": {name: tested["calibrated"][name] for name in (*METRICS, "temperature")},
        **({"adapted": {name: tested["adapted"][name] for name in METRICS}} if run.shot > 1 else {}),
        "temperature": tested["temperature"],
        "failures": number_failed(tested["failures"]),
        "training_failures": trained["training_failures"],
        "batch_norm": tested["batch_norm"],
        "test_seconds": time.perf_counter() - start,
    }
    return cast(Row, row)


def _training_of(path: Path) -> Mapping[str, object]:
    """How a run was trained: steps, the step of its best validation, seconds; zeros where it learned nothing."""
    directory = run_directory.load(path)
    records = directory.read_metrics()
    validated = {one["step"]: one["validation_accuracy"] for one in records if "validation_accuracy" in one}
    settings = cast(Settings, directory.config["settings"])
    return {
        "augment": settings["trainer.augment"],
        "steps": records[-1]["step"] if records else 0,
        "best_step": max(validated, key=lambda step: validated[step], default=0),
        "training_seconds": records[-1]["seconds"] if records else 0.0,
    }


def _test_episodes(comparison: Comparison, config: ReproductionConfig) -> int:
    return min(comparison.test_episodes, QUICK_TEST_EPISODES) if config.quick else comparison.test_episodes


def _reliability_of_best(rows: Sequence[Row], folder: Path) -> dict[int, dict[str, Reliability]]:
    """By shots, of the MOST_DIAGRAMS most accurate methods whose runs are here, each of its first seed, the best first.

    Raises ConfigError for a file of predictions that is damaged.
    """
    first: dict[tuple[int, str], tuple[Row, Path]] = {}
    for row in rows:
        path = folder / _folder(row["method"], row["shot"], row["seed"]) / "predictions.npz"
        if path.exists():
            first.setdefault((row["shot"], row["method"]), (row, path))
    found: dict[int, dict[str, Reliability]] = {}
    for row, path in sorted(first.values(), key=lambda one: (one[0]["shot"], -one[0]["accuracy"])):
        shown = found.setdefault(row["shot"], {})
        if len(shown) < MOST_DIAGRAMS:
            shown[row["method"]] = _reliability(path)
    return found


def _reliability(path: Path) -> Reliability:
    try:
        kept = prediction_files.read(path)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return reliability(np.random.default_rng(0), kept.probabilities, kept.labels)


def _folder(method: str, shot: int, seed: int) -> str:
    """The name of a run's folder."""
    return f"{method}-{shot}shot{f'-seed{seed}' if seed else ''}"


def _configuration(
    comparison: Comparison, method: Method, shot: int, seed: int, folder: Path, config: ReproductionConfig
) -> RunConfig:
    """What meta_train.py is asked for; of learners that learn from nothing no step."""
    steps = config.episodes or (comparison.quick_episodes if config.quick else comparison.episodes[shot])
    inner_steps = {"inner_steps": INNER_STEPS} if method.inference == "cvi" else {}
    make: Callable[..., RunConfig] = RunConfig
    run = make(
        dataset=comparison.dataset,
        likelihood=method.likelihood,
        inference=method.inference,
        way=comparison.way,
        shot=shot,
        settings={"trainer.test_episodes": TRAINING_TEST_EPISODES, **comparison.settings, **method.settings},
        seed=seed,
        run_dir=str(folder / _folder(method.name, shot, seed)),
        data_root=config.data_root,
        **{**inner_steps, **method.changes},
    )
    learns = trains_on(run) is not TrainsOn.NOTHING
    return dataclasses.replace(run, episodes=steps * run.tasks_per_step if learns else 0)


def table(
    rows: Sequence[Row], comparison: Comparison, config: ReproductionConfig, diverged: Sequence[Diverged] = ()
) -> str:
    """A page of Markdown: the measured rows, then the published ones."""
    episodes = f"{_test_episodes(comparison, config):,} test episodes"
    seeds = sorted({row.get("seed", config.seed) for row in rows} or {config.seed})
    named = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    title = f"`{config.name}`: {comparison.dataset}, {comparison.way}-way, {episodes}, {named}."
    if comparison.published:
        title += " Published rows are as printed, with training, calibration and episodes of their own."
    return f"{title}\n\n{comparison_table.table(rows, comparison.published, diverged).markdown()}"


def _write(
    folder: Path,
    config: ReproductionConfig,
    comparison: Comparison,
    rows: list[Row],
    diverged: Sequence[Diverged],
) -> None:
    """results.json and table.md, replaced whole."""
    results = {
        "config": dataclasses.asdict(config),
        "versions": _versions(),
        "rows": rows,
        "diverged": [one._asdict() for one in diverged],
        "published": [dataclasses.asdict(row) for row in comparison.published],
    }
    replace_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
    replace_text(folder / "table.md", table(rows, comparison, config, diverged))


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpyro", "flax", "optax", "numpy")}
    return {"python": platform.python_version(), **packages}


def _write_robustness(folder: Path, runs: Sequence[Path], config: ReproductionConfig) -> None:
    """robustness.json and robustness.md of the finished runs."""
    print("\n== corrupted images, and queries of other classes", flush=True)
    episodes = QUICK_ROBUSTNESS_EPISODES if config.quick else robustness.EPISODES
    unfinished = folder / "robustness-unfinished.json"
    rows = robustness.measure(runs, config.data_root, episodes=episodes, unfinished=unfinished)
    replace_text(folder / "robustness.json", json.dumps(rows, indent=2) + "\n")
    replace_text(folder / "robustness.md", robustness.tables(rows))
    print("\n" + robustness.tables(rows))
