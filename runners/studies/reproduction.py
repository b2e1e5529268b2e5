"""A comparison of methods, trained and tested one after the other, and its files; the names of all studies."""

import dataclasses
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fewshot.evaluation.scoring import number_failed
from fewshot.evaluation.text import format_markdown, format_percent, format_seconds, format_table
from fewshot.runners import evaluate, meta_train
from fewshot.runners.cli.evaluation import EvaluationConfig
from fewshot.runners.studies import comparisons, convergence, hyperparameters, iris, likelihoods, outer_loop, robustness
from fewshot.runners.studies.comparison_figure import comparison_figure
from fewshot.runners.studies.comparisons import Comparison, Method
from fewshot.runners.studies.reporting import Row, save
from fewshot.tasks.replacing import replace_text
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig, begun
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import DivergedError

COMPARISONS: dict[str, Comparison] = {**comparisons.COMPARISONS, **hyperparameters.COMPARISONS}
STUDIES = {
    "likelihoods": likelihoods.main,
    "iris": iris.main,
    "convergence": convergence.main,
    "outer-loop": outer_loop.main,
}

TRAINING_TEST_EPISODES = 60  # of the runs' own tables; the comparison has its own test
QUICK_TEST_EPISODES = 600
QUICK_ROBUSTNESS_EPISODES = 200
METRICS = ["accuracy", "accuracy_ci95", "accuracy_std_batches", "nll", "brier", "mce"]
METRICS += ["ece", "ece_debiased", "ece_floor", "ece_floor_q95", "ece_within_band"]
HEADER = ["method", "shot", "training episodes", "accuracy", "sd of batches", "NLL", "Brier", "ECE", "debiased ECE"]
HEADER += ["ECE by chance", "raw NLL", "raw ECE", "adapted ECE", "calibrated ECE", "debiased calibrated", "failures"]
LEGEND = {
    "sd of batches": "what papers print after +-, in %",
    "ECE by chance": "nineteen in twenty perfectly calibrated models of the same confidences have less of it",
    "failures": "episodes of training + test whose inference failed",
}
SAME = ("name", "quick", "episodes", "seed")  # of all commands whose rows stand in one table


@dataclass(frozen=True)
class ReproductionConfig:
    """The flags of reproduce.py. methods, shots: those that are run, all if empty; episodes: 0 for the comparison's.

    robustness: then also test every run on corrupted images and on queries of other classes.
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


class Diverged(NamedTuple):
    """A method whose training came to no end, and how it ended."""

    method: str
    shot: int
    message: str


def main(config: ReproductionConfig) -> Sequence[Row]:
    """The rows of the table, written to results.json and table.md after every method; one that diverges has none.

    Rows that earlier commands wrote to the same folder, of other methods and shots, stay.

    Raises ConfigError, DataError, RunError or StudyError, each with one line, and KeyboardInterrupt where a training
    was stopped.
    """
    if config.name in STUDIES:
        return STUDIES[config.name](config.quick, config.out, config.seed)
    comparison = COMPARISONS[config.name]
    folder = Path(config.out or f"runs/{config.name}{'-quick' if config.quick else ''}")
    methods, shots = selected(comparison, config)
    rows, diverged = _earlier(folder, config, {(method.name, shot) for method in methods for shot in shots})
    for shot in shots:
        for method in methods:
            print(f"\n== {method.name}, {comparison.way}-way {shot}-shot", flush=True)
            try:
                row = _row(comparison, method, shot, folder / f"{method.name}-{shot}shot", config)
            except DivergedError as error:
                print(f"{method.name} has no row: {error}", flush=True)
                diverged.append(Diverged(method.name, shot, str(error)))
            else:
                if row is None:
                    raise KeyboardInterrupt
                rows = _in_order([*rows, row], comparison)
            _write(folder, config, comparison, rows, diverged)
    lines = _lines(rows, comparison, diverged)
    times = [format_seconds(row["training_seconds"]) for row in rows] + [""] * (len(lines) - len(rows))
    timed = [[*line, seconds] for line, seconds in zip(lines, times, strict=True)]
    print("\n" + format_table(*_without_empty_columns([*HEADER, "training time"], timed)))
    print(f"wrote {folder / 'table.md'}")
    if rows:
        save(comparison_figure(rows, comparison.published), folder / "comparison.png")
    if rows and config.robustness:
        _write_robustness(folder, [folder / f"{row['method']}-{row['shot']}shot" for row in rows], config)
    return rows


def selected(comparison: Comparison, config: ReproductionConfig) -> tuple[list[Method], list[int]]:
    """The methods and shots that were asked for. Raises ConfigError for others than the comparison has."""
    names = [method.name for method in comparison.methods]
    for kind, wanted, known in (("method", config.methods, names), ("shot", config.shots, comparison.episodes)):
        for name in wanted:
            if name not in known:
                listed = ", ".join(map(str, known))
                raise ConfigError(f"expected a {kind} of {config.name}, got {name!r}; known: {listed}")
    chosen = config.methods or (comparison.quick_methods if config.quick else ()) or names
    methods = [method for method in comparison.methods if method.name in chosen]
    return methods, [shot for shot in comparison.episodes if shot in (config.shots or comparison.episodes)]


def _earlier(
    folder: Path, config: ReproductionConfig, again: Set[tuple[str, int]]
) -> tuple[list[dict[str, Any]], list[Diverged]]:
    """What earlier commands found of other methods and shots than those that are run again.

    Raises ConfigError where it cannot stand in one table with what this command will find.
    """
    path = folder / "results.json"
    if not path.exists():
        return [], []
    try:
        stored = json.loads(path.read_text())
        rows = [row for row in stored["rows"] if (row["method"], row["shot"]) not in again]
        diverged = [Diverged(**one) for one in stored["diverged"] if (one["method"], one["shot"]) not in again]
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


def _in_order(rows: list[dict[str, Any]], comparison: Comparison) -> list[dict[str, Any]]:
    """By shots, then as the comparison has its methods."""
    names = [method.name for method in comparison.methods]
    return sorted(rows, key=lambda row: (row["shot"], names.index(row["method"])))


def _row(
    comparison: Comparison, method: Method, shot: int, path: Path, config: ReproductionConfig
) -> dict[str, Any] | None:
    """Train, or go on with, one method, and test it; None if it was interrupted."""
    run = _configuration(comparison, method, shot, path, config)
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
            adapt=shot > 1,
            episodes_file=str(path / "episodes.npz"),
            predictions_file=str(path / "predictions.npz"),
            data_root=config.data_root,
        )
    )
    return {
        "method": method.name,
        "shot": shot,
        **{name: value for name, value in tested.items() if name in METRICS},
        "raw": {name: tested["raw"][name] for name in METRICS},
        "calibrated": {name: tested["calibrated"][name] for name in (*METRICS, "temperature")},
        **({"adapted": {name: tested["adapted"][name] for name in METRICS}} if shot > 1 else {}),
        "temperature": tested["temperature"],
        "failures": number_failed(tested["failures"]),
        "training_failures": trained["training_failures"],
        "training_seconds": run_directory.load(path).read_metrics()[-1]["seconds"],
        "test_seconds": time.perf_counter() - start,
        "episodes": run.episodes,
    }


def _test_episodes(comparison: Comparison, config: ReproductionConfig) -> int:
    return min(comparison.test_episodes, QUICK_TEST_EPISODES) if config.quick else comparison.test_episodes


def _configuration(
    comparison: Comparison, method: Method, shot: int, path: Path, config: ReproductionConfig
) -> RunConfig:
    """What meta_train.py is asked for."""
    make: Callable[..., RunConfig] = RunConfig
    return make(
        dataset=comparison.dataset,
        likelihood=method.likelihood,
        inference=method.inference,
        way=comparison.way,
        shot=shot,
        episodes=config.episodes or (comparison.quick_episodes if config.quick else comparison.episodes[shot]),
        settings={"trainer.test_episodes": TRAINING_TEST_EPISODES, **comparison.settings, **method.settings},
        seed=config.seed,
        run_dir=str(path),
        data_root=config.data_root,
        **method.changes,
    )


def table(
    rows: Sequence[dict[str, Any]],
    comparison: Comparison,
    config: ReproductionConfig,
    diverged: Sequence[Diverged] = (),
) -> str:
    """A page of Markdown: the measured rows, then the published ones; nothing in it depends on the clock."""
    episodes = f"{_test_episodes(comparison, config):,} test episodes"
    title = f"`{config.name}`: {comparison.dataset}, {comparison.way}-way, {episodes}, seed {config.seed}."
    if comparison.published:
        title += " Published rows are as printed, with training, calibration and episodes of their own."
    header, lines = _without_empty_columns(HEADER, _lines(rows, comparison, diverged))
    legend = "; ".join(f"*{name}*: {meaning}" for name, meaning in LEGEND.items() if name in header)
    return f"{title}\n\n{format_markdown(header, lines)}\n{legend}.\n"


def _lines(rows: Sequence[dict[str, Any]], comparison: Comparison, diverged: Sequence[Diverged]) -> list[list[str]]:
    """Cells under HEADER: what was measured, what diverged, and what is published for as many shots."""
    lines = [*map(_cells, rows), *map(_diverged_cells, diverged)]
    for published in comparison.published:
        name = f"{published.method} ({published.source})"
        for shot in sorted({row["shot"] for row in rows} & published.accuracy.keys()):
            cells = {"method": name, "shot": str(shot), "accuracy": f"{published.accuracy[shot]}%"}
            lines.append(_under_header({**cells, "ECE": published.ece.get(shot, "")}))
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    texts = {
        "method": row["method"],
        "shot": str(row["shot"]),
        "training episodes": f"{row['episodes']:,}",
        "accuracy": format_percent(row["accuracy"], row["accuracy_ci95"]),
        "sd of batches": f"{100 * row['accuracy_std_batches']:.2f}",
        "failures": f"{row['training_failures']} + {row['failures']}",
    }
    numbers = {
        "NLL": row["nll"],
        "Brier": row["brier"],
        "ECE": row["ece"],
        "debiased ECE": row.get("ece_debiased"),  # rows of earlier versions lack it
        "ECE by chance": row.get("ece_floor_q95"),
        "raw NLL": row["raw"]["nll"],
        "raw ECE": row["raw"]["ece"],
        "adapted ECE": row.get("adapted", {}).get("ece"),
        "calibrated ECE": row["calibrated"]["ece"],
        "debiased calibrated": row["calibrated"].get("ece_debiased"),
    }
    return _under_header(texts | {name: f"{number:.3f}" for name, number in numbers.items() if number is not None})


def _diverged_cells(one: Diverged) -> list[str]:
    return _under_header({"method": one.method, "shot": str(one.shot), "accuracy": "diverged"})


def _under_header(cells: Mapping[str, str]) -> list[str]:
    return [cells.get(name, "") for name in HEADER]


def _without_empty_columns(header: Sequence[str], lines: Sequence[list[str]]) -> tuple[list[str], list[list[str]]]:
    """With one labelled image a class there is nothing to adapt to, for example."""
    kept = [column for column in range(len(header)) if any(line[column] for line in lines)]
    return [header[column] for column in kept], [[line[column] for column in kept] for line in lines]


def _write(
    folder: Path,
    config: ReproductionConfig,
    comparison: Comparison,
    rows: list[dict[str, Any]],
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
