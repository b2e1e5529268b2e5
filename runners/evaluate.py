"""Test a trained run on few-shot tasks of classes it never saw.

python runners/evaluate.py RUN_DIR [--calibrate] [--out-of-episode] [--report FILE] [...]      every flag: --help
"""

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict, cast

import jax

from fewshot.evaluation import episode_lists, html_report, prediction_files, tables
from fewshot.evaluation.html_report import ADAPTED, CALIBRATED, PAPERS, RAW, TEMPERED, Assessment
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.resampling import plain_interval
from fewshot.evaluation.text import Json, format_seconds
from fewshot.runners.cli.evaluation import parse
from fewshot.runners.cli.flags import check_outputs
from fewshot.runners.cli.launch import launch, leave
from fewshot.runners.curve_evaluation import CurveEvaluation, evaluate_curves, is_of_curves
from fewshot.tasks.corruptions import parse_corruption
from fewshot.tasks.replacing import replace_bytes, replace_text
from fewshot.training import run_directory
from fewshot.training.assessment import EvaluationConfig, assess, check
from fewshot.training.run import Run

OUTPUTS = ("json", "report", "episodes_file", "predictions_file")
PACKAGES = ("bayesian-few-shot", "jax", "jaxlib", "numpyro", "flax", "numpy", "scipy")


class Evaluation(TypedDict, total=False):
    """What `main` returns and the JSON file holds: at the run's temperature all of `Summary.to_json`, and these."""

    seconds: float
    failures: dict[str, int]
    temperature: float
    batch_norm: str
    intervals_over_classes: dict[str, list[float] | None]
    same_features: dict[str, Metrics]
    raw: dict[str, Json]
    adapted: dict[str, Json]
    calibrated: dict[str, Json]
    papers_calibration: dict[str, Json]
    corruption: dict[str, Json]
    severities: dict[int, Metrics]
    out_of_episode: dict[str, Json]
    config: dict[str, Json]


def main(config: EvaluationConfig) -> Evaluation:
    """Score the run, print tables, write the files asked for; the metrics by name, "raw" for those at temperature 1.

    Raises ConfigError, DataError or RunError, each with one line.
    """
    check_outputs({f"--{name.replace('_', '-')}": getattr(config, name) for name in OUTPUTS})
    check(config)
    run, found = assess(config)
    _print(found)
    if config.episodes_file:
        episode_lists.save(Path(config.episodes_file), found.splits.test, found.episodes, found.rows[TEMPERED].scores)
    if config.predictions_file:
        scores = found.rows[TEMPERED].scores
        origin = prediction_files.Origin(
            episode_lists.checksum(found.splits.test),
            found.temperature,
            found.episodes.shape.shot,
            found.corruption or "",
        )
        kept = prediction_files.to_bytes(scores.probabilities, scores.labels, found.shown, origin)
        replace_bytes(Path(config.predictions_file), kept)
    metrics = _metrics(config, run, found)
    if config.json:
        replace_text(Path(config.json), json.dumps(metrics, indent=2) + "\n")
    if config.report:
        records = run_directory.load(Path(config.run_dir)).read_metrics()
        replace_text(Path(config.report), html_report.page_of(found, records, _provenance(config, run)))
    return metrics


def _print(found: Assessment) -> None:
    raw, shape = found.rows[RAW].scores, found.episodes.shape
    print(found.heading + (f", images corrupted by {found.corruption}" if found.corruption else ""))
    print(tables.metrics_table({name: row.summary.metrics for name, row in found.rows.items()}))
    print(found.temperature_note)
    if found.classes_note:
        print(found.classes_note)
    if found.features_note:
        print(found.features_note)
    if found.batch_norm:
        print(tables.batch_norm_note(found.batch_norm))
    for name in (ADAPTED, CALIBRATED, PAPERS):
        if name in found.rows:
            print(tables.calibration_note(name, found.rows[name].temperatures, found.trained_on))
    print(tables.failures_note(raw.failures()), f"Solved in {format_seconds(raw.seconds)}.")
    if found.out_of_episode:
        others = found.out_of_episode.classes
        named = "1 class" if others == 1 else f"{others} classes"
        print(f"\nQueries of {named} outside the episode told from its own {shape.way}: AUROC per episode")
        print(tables.detection_table(found.out_of_episode.detection))
        print(tables.failures_note(found.out_of_episode.failures))


def _metrics(config: EvaluationConfig, run: Run, found: Assessment) -> Evaluation:
    """What the JSON file holds."""
    raw = found.rows[RAW]
    own: Evaluation = {
        "seconds": raw.scores.seconds,
        "failures": raw.scores.failures(),
        "temperature": found.temperature,
        "batch_norm": found.batch_norm,
        "intervals_over_classes": {name: plain_interval(one) for name, one in found.over_classes.items()},
        "same_features": {name: dict(row) for name, row in found.same_features.items()},
        "raw": raw.summary.to_json(),
    }
    fitted = {name: {**row.summary.to_json(), **row.temperatures} for name, row in found.rows.items()}
    if ADAPTED in fitted:
        own["adapted"] = fitted[ADAPTED]
    if CALIBRATED in fitted:
        own["calibrated"] = fitted[CALIBRATED]
    if PAPERS in fitted:
        own["papers_calibration"] = fitted[PAPERS]
    if config.corruption:
        own["corruption"] = dict(zip(("name", "severity"), parse_corruption(config.corruption), strict=True))
    if found.severities:
        own["severities"] = found.severities
    if found.out_of_episode:
        others = found.out_of_episode
        own["out_of_episode"] = {**others.plain_areas(), "failures": others.failures}
    evaluation = {**vars(config), **found.episodes.shape._asdict(), "episodes": len(found.episodes.keys)}
    own["config"] = {**run.config.to_json(), "evaluation": evaluation}
    return cast(Evaluation, {**found.rows[TEMPERED].summary.to_json(), **own})


def _provenance(config: EvaluationConfig, run: Run) -> str:
    """Command, versions and configuration, for the end of a report."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    machine = f"Python {platform.python_version()}, {packages}; {jax.default_backend()}, {platform.machine()}"
    return "\n".join([config.command(), "", machine, "", json.dumps(run.config.to_json(), indent=2)])


def evaluate(config: EvaluationConfig) -> Evaluation | CurveEvaluation:
    """`main` of a run on classes, `evaluate_curves` of one on real labels."""
    return evaluate_curves(config) if is_of_curves(config.run_dir) else main(config)


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, evaluate, arguments)


if __name__ == "__main__":
    leave(command_line())
