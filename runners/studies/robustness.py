"""How the runs of a comparison bear corrupted images, and how well they know queries of classes not shown to them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import numpy as np

from fewshot.evaluation import calibration_error, metrics
from fewshot.evaluation.episodes import EVALUATION_SEED, draw_episodes
from fewshot.evaluation.out_of_episode import detect_others
from fewshot.evaluation.robustness import corruption_key
from fewshot.evaluation.scoring import embed, number_failed, score
from fewshot.evaluation.text import format_markdown
from fewshot.tasks import Dataset
from fewshot.tasks.corruptions import CORRUPTIONS, corrupt_dataset
from fewshot.tasks.replacing import replace_text
from fewshot.training.data import test_shape
from fewshot.training.run import Run, load_run

SEVERITY = 5  # of 1 to 5
CLEAN = "clean"
EPISODES = 1000
SCORES = {
    "accuracy": metrics.accuracy,
    "accuracy_ci95": metrics.accuracy_ci95,
    "brier": metrics.brier,
    "ece": calibration_error.ece,
}


class Area(TypedDict):
    """An AUROC and its 95% interval."""

    auroc: float
    auroc_interval: list[float]


class Tested(TypedDict):
    """What one run reaches on one kind of images: SCORES, failures, and of clean ones the AUROC of other classes."""

    scores: dict[str, float]
    failures: int
    out_of_episode: NotRequired[dict[str, Area]]


class RobustnessRow(TypedDict):
    """SCORES of a run clean and at every corruption, failures of all, and AUROC by score."""

    method: str
    clean: dict[str, float]
    corrupted: dict[str, dict[str, float]]
    failures: int
    out_of_episode: dict[str, Area]


def measure(
    runs: Sequence[Path],
    data_root: str | None,
    *,
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    episodes: int = EPISODES,
    unfinished: Path | None = None,
) -> list[RobustnessRow]:
    """A row for each run folder, all of one data set: SCORES clean and at every corruption, AUROC, failures.

    Support and query images are corrupted alike; probabilities are at the run's own temperature, which was fitted on
    clean images. What is found goes into the file `unfinished` at once: after a stop, the same call goes on from there,
    and the last removes it. Raises RunError or DataError.
    """
    loaded = [load_run(run) for run in runs]
    test = loaded[0].splits(data_root).test
    keys = [f"{run.name} {_digest(run)} {episodes}" for run in runs]
    found: dict[str, dict[str, Tested]] = (
        json.loads(unfinished.read_text()) if unfinished and unfinished.exists() else {}
    )
    for name in (None, *corruptions):
        tested = [(name or CLEAN) in found.setdefault(key, {}) for key in keys]
        missing = {key: run for key, run, done in zip(keys, loaded, tested, strict=True) if not done}
        if not missing:
            continue
        images = corrupt_dataset(corruption_key(EVALUATION_SEED), test, name, SEVERITY) if name else test
        for key, run in missing.items():
            found[key][name or CLEAN] = _scored(run, images, test, episodes, others=name is None)
            if unfinished:
                replace_text(unfinished, json.dumps(found) + "\n")
        print(f"tested on {f'images with {name} of severity {SEVERITY}' if name else 'clean images'}", flush=True)
    if unfinished:
        unfinished.unlink(missing_ok=True)
    return [_row(run.name, found[key], corruptions) for run, key in zip(runs, keys, strict=True)]


def _scored(run: Run, images: Dataset, test: Dataset, episodes: int, others: bool) -> Tested:
    """SCORES and failures on test episodes with those images; with the AUROC of other classes if asked for.

    These are as many as a task has classes, or as a small test split has left.
    """
    shape = test_shape(run.config, test)
    features = embed(run.learner, images)
    drawn = draw_episodes(EVALUATION_SEED, "test", test, shape, episodes)
    scores = score(run.learner, features, drawn).tempered(run.temperature)
    one: Tested = {
        "scores": {key: score(scores.probabilities, scores.labels) for key, score in SCORES.items()},
        "failures": number_failed(scores.failures()),
    }
    if others:
        outside = detect_others(run.learner, features, test, shape, episodes, EVALUATION_SEED)
        one["out_of_episode"] = cast(dict[str, Area], outside.plain_areas())
        one["failures"] += number_failed(outside.failures)
    return one


def _row(name: str, found: Mapping[str, Tested], corruptions: Sequence[str]) -> RobustnessRow:
    tested = [found[CLEAN], *(found[corruption] for corruption in corruptions)]
    return {
        "method": name,
        "clean": found[CLEAN]["scores"],
        "corrupted": {corruption: found[corruption]["scores"] for corruption in corruptions},
        "failures": sum(one["failures"] for one in tested),
        "out_of_episode": found[CLEAN]["out_of_episode"],
    }


def _digest(run: Path) -> str:
    return hashlib.sha256((run / "weights.safetensors").read_bytes()).hexdigest()[:16]


def tables(rows: Sequence[RobustnessRow]) -> str:
    """Markdown: accuracy, Brier score and ECE clean and at every corruption with their mean, then AUROC by score."""
    corruptions = list(rows[0]["corrupted"])
    header = ["method", "clean", *(name.replace("-", " ") for name in corruptions), "mean corrupted"]
    parts = []
    for key, title, cell in (
        ("accuracy", "Accuracy, %", lambda value: f"{100 * value:.1f}"),
        ("brier", "Brier score", lambda value: f"{value:.3f}"),
        ("ece", "ECE", lambda value: f"{value:.3f}"),
    ):
        body = [[row["method"], *map(cell, _along(row, key))] for row in rows]
        parts.append(
            f"{title} at the run's temperature, images corrupted with severity {SEVERITY}:\n\n"
            f"{format_markdown(header, body)}"
        )
    margins = [100 * one["accuracy_ci95"] for row in rows for one in (row["clean"], *row["corrupted"].values())]
    parts[0] += f"\n95% intervals of single accuracies: +- {min(margins):.1f} to {max(margins):.1f}.\n"
    scores = list(dict.fromkeys(name for row in rows for name in row["out_of_episode"]))
    body = [[row["method"], *(_area(row["out_of_episode"].get(name)) for name in scores)] for row in rows]
    header = ["method", *(name.replace("_", " ") for name in scores)]
    missing = any(len(row["out_of_episode"]) < len(scores) for row in rows)
    parts.append(
        "AUROC of queries of other classes against an episode's own, by score, with 95% interval"
        f"{'; - where a learner does not have that score' * missing}:\n\n{format_markdown(header, body)}"
    )
    failed = sum(row["failures"] for row in rows)
    return "\n".join(parts) + f"\nEpisodes whose inference failed: {failed or 'none'}.\n"


def _area(found: Area | None) -> str:
    if found is None:
        return "-"
    low, high = found["auroc_interval"]
    return f"{found['auroc']:.3f} ({low:.3f} to {high:.3f})"


def _along(row: RobustnessRow, key: str) -> list[float]:
    """One metric clean, at every corruption, and its mean over these."""
    corrupted = [found[key] for found in row["corrupted"].values()]
    return [row["clean"][key], *corrupted, float(np.mean(corrupted))]
