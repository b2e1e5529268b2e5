"""Test a trained run on few-shot tasks of classes it never saw.

python runners/evaluate.py RUN_DIR [--calibrate] [--out-of-episode] [--report FILE] [...]      every flag: --help
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runners import episode_lists, evaluation_report, tables
from runners.assessment import (
    ADAPTED,
    CALIBRATED,
    PAPERS,
    RAW,
    TEMPERED,
    Assessment,
    assess,
)
from runners.console import format_seconds
from runners.evaluation_config import EvaluationConfig, check, parse
from runners.launch import launch
from runners.replacing import replace_text
from tasks.corruptions import parse_corruption


def main(config: EvaluationConfig) -> dict[str, Any]:
    """Score the run, print tables, write the files asked for; the metrics by name, "raw" for those at temperature 1.

    Raises ConfigError, DataError or RunError, each with one line.
    """
    check(config)
    found = assess(config)
    _print(found)
    if config.episodes_file:
        episode_lists.save(Path(config.episodes_file), found.splits.test, found.episodes, found.rows[TEMPERED].scores)
    metrics = _metrics(found)
    if config.json:
        replace_text(Path(config.json), json.dumps(metrics, indent=2) + "\n")
    if config.report:
        replace_text(Path(config.report), evaluation_report.page_of(found))
    return metrics


def _print(found: Assessment) -> None:
    raw, shape = found.rows[RAW].scores, found.episodes.shape
    trained_on = found.model.config.dataset
    heading = tables.heading(found.splits.name, trained_on, shape, len(found.episodes.keys), found.test.classes)
    print(heading + (f", images corrupted by {found.config.corruption}" if found.config.corruption else ""))
    print(tables.metrics_table({name: row.summary for name, row in found.rows.items()}))
    print(tables.temperature_note(found.model, shape))
    for name in (ADAPTED, CALIBRATED, PAPERS):
        if name in found.rows:
            print(tables.calibration_note(name, found.rows[name].temperatures, trained_on))
    print(tables.failures_note(raw.failures()), f"Solved in {format_seconds(raw.seconds)}.")
    if found.out_of_episode:
        others = found.out_of_episode.classes
        named = "1 class" if others == 1 else f"{others} classes"
        print(f"\nQueries of {named} outside the episode told from its own {shape.way}: AUROC per episode")
        print(tables.detection_table(found.out_of_episode.detection))
        print(tables.failures_note(found.out_of_episode.failures))


def _metrics(found: Assessment) -> dict[str, Any]:
    """What the JSON file holds."""
    config, raw = found.config, found.rows[RAW]
    metrics = {
        **found.rows[TEMPERED].summary,
        "seconds": raw.scores.seconds,
        "failures": raw.scores.failures(),
        "temperature": found.model.temperature,
        "raw": raw.summary,
    }
    for key, name in (("adapted", ADAPTED), ("calibrated", CALIBRATED), ("papers_calibration", PAPERS)):
        if name in found.rows:
            metrics[key] = {**found.rows[name].summary, **found.rows[name].temperatures}
    if config.corruption:
        metrics["corruption"] = dict(zip(("name", "severity"), parse_corruption(config.corruption), strict=True))
    if found.severities:
        metrics["severities"] = found.severities
    if found.out_of_episode:
        others = found.out_of_episode
        metrics["out_of_episode"] = {**others.plain_areas(), "failures": others.failures}
    evaluation = {**vars(config), **found.episodes.shape._asdict(), "episodes": len(found.episodes.keys)}
    return {**metrics, "config": {**found.model.config.to_json(), "evaluation": evaluation}}


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments)


if __name__ == "__main__":
    sys.exit(command_line())
