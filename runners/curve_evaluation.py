"""What evaluate.py does with a run on a data set with real labels."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TypedDict

from fewshot.evaluation import tables
from fewshot.evaluation.real_scores import RealSummary, draw_real_episodes, real_table, score_reals
from fewshot.evaluation.text import Json, format_seconds
from fewshot.runners.cli.flags import check_outputs
from fewshot.tasks import DataError
from fewshot.tasks.curves import has_real_labels, load_curves
from fewshot.tasks.replacing import replace_text
from fewshot.training import run_directory
from fewshot.training.assessment import TEST_EPISODES, EvaluationConfig, check
from fewshot.training.curve_problem import compared, curve_heading, test_queries
from fewshot.training.overrides import ConfigError
from fewshot.training.run import load_run

TRAINED = "trained"
USED = {
    "run_dir",
    "dataset",
    "episodes",
    "shot",
    "query",
    "seed",
    "json",
    "data_root",
}  # flags; the others need classes


class CurveEvaluation(TypedDict):
    """What the JSON file holds: the metrics of the run, and of what is printed beside it; see `RealSummary`."""

    metrics: RealSummary
    others: dict[str, RealSummary]
    seconds: float
    failures: dict[str, int]
    config: dict[str, Json]


def is_of_curves(run_dir: str) -> bool:
    """Whether a run folder is that of a run on real labels. Raises RunError."""
    return has_real_labels(str(run_directory.load(Path(run_dir)).config.get("dataset")))


def evaluate_curves(config: EvaluationConfig) -> CurveEvaluation:
    """Score the run on test tasks, print a table, write the JSON file.

    Raises ConfigError, DataError or RunError, each with one line.
    """
    for entry in fields(config):
        if entry.name not in USED and getattr(config, entry.name) != entry.default:
            raise ConfigError(f"--{entry.name.replace('_', '-')} needs classes, got a run on real labels; leave it out")
    check_outputs({"--json": config.json})
    check(config)
    run = load_run(config.run_dir)
    name = config.dataset or run.config.dataset
    splits = load_curves(name, config.data_root)
    if splits.image_shape != run.learner.image_shape:
        raise DataError(
            f"expected inputs of {run.learner.image_shape[-1]} numbers, as {config.run_dir} was trained on, got "
            f"{splits.test.inputs} from {name}; choose another data set or train a run on this one"
        )
    shot, query = config.shot or run.config.shot, config.query or test_queries(splits.test)
    episodes = draw_real_episodes(config.seed, "test", splits.test, shot, query, config.episodes or TEST_EPISODES)
    scores = score_reals(run.learner, episodes)
    rows: dict[str, RealSummary] = {TRAINED: scores.summary(), **compared(splits.test, episodes)}
    print(curve_heading(name, shot, episodes))
    print(real_table(rows))
    print(tables.failures_note(scores.failures()), f"Solved in {format_seconds(scores.seconds)}.")
    evaluation = {**vars(config), "dataset": name, "shot": shot, "query": query, "episodes": len(episodes.keys)}
    found = CurveEvaluation(
        metrics=rows[TRAINED],
        others={other: row for other, row in rows.items() if other != TRAINED},
        seconds=scores.seconds,
        failures=scores.failures(),
        config={**run.config.to_json(), "evaluation": evaluation},
    )
    if config.json:
        replace_text(Path(config.json), json.dumps(found, indent=2) + "\n")
    return found
