"""The HTML report of one evaluation: what evaluate.py found, as tables and pictures in one file."""

import json
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

import tasks
from evaluation import metrics, plots
from evaluation.calibration_error import ERRORS
from evaluation.predictions import confidence_and_right
from evaluation.report import Section, Table, page
from evaluation.resampling import reliability
from runners import run_directory, tables
from runners.assessment import PAPERS, RAW, TEMPERED, Assessment, plain_interval
from runners.console import format_percent
from tasks import Dataset

SHORT = 4  # letters of a class name that fit above an image
PACKAGES = ("bayesian-few-shot", "jax", "jaxlib", "numpyro", "flax", "numpy", "scipy")
NAMES = {
    "ece": "ECE",
    "mce": "MCE",
    "ece_equal_mass": "ECE, equal-mass bins",
    "ece_class_wise": "ECE, class-wise",
    "ece_debiased": "ECE debiased (root mean square)",
}


def page_of(found: Assessment) -> str:
    """The whole file as a text."""
    shape = found.episodes.shape
    title = f"{found.splits.name}, {shape.way}-way {shape.shot}-shot: {Path(found.config.run_dir).name}"
    return page(title, list(_sections(found)))


def _sections(found: Assessment) -> Iterator[Section]:
    yield _scores(found)
    yield _calibration(found)
    yield _selective(found)
    if found.out_of_episode:
        yield _out_of_episode(found)
    if found.severities:
        yield _robustness(found)
    if found.test.images.dtype == np.uint8:  # features, in their place, are nothing to look at
        yield _episodes(found)
    records = run_directory.load(Path(found.config.run_dir)).read_metrics()
    if records:
        yield Section("Training", figures={"Learning curve, from metrics.jsonl": plots.learning_curve(records)})
    yield _provenance(found)


def _scores(found: Assessment) -> Section:
    shape, raw = found.episodes.shape, found.rows[RAW].scores
    trained_on, count = found.model.config.dataset, len(found.episodes.keys)
    heading = tables.heading(found.splits.name, trained_on, shape, count, found.test.classes).strip()
    corrupted = f", support and query images corrupted by {found.config.corruption}" if found.config.corruption else ""
    notes = [
        f"{heading}{corrupted}. In brackets: 95% intervals over episodes.",
        tables.temperature_note(found.model, shape),
        *(
            tables.calibration_note(name, row.temperatures, trained_on)
            for name, row in found.rows.items()
            if name not in (TEMPERED, RAW)
        ),
        tables.failures_note(raw.failures()),
    ]
    header = ["", "accuracy", "sd of batches", "NLL", "Brier", "ECE", "AURC", "AUROC"]
    rows = [[name, *_score_cells(row.summary)] for name, row in found.rows.items()]
    return Section("Scores", notes, [Table(header, rows)])


def _score_cells(summary: dict[str, Any]) -> list[str]:
    cells = [format_percent(summary["accuracy"], summary["accuracy_ci95"])]
    cells.append(format_percent(summary["accuracy_std_batches"]))
    for name in ("nll", "brier", "ece"):
        bounds = summary["intervals"][name]
        cells.append(tables.number(summary[name]) + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""))
    return cells + [tables.number(summary[name]) for name in ("aurc", "auroc")]


def _calibration(found: Assessment) -> Section:
    """Every calibration error beside its floor, the terms of the Brier score, and reliability diagrams."""
    header = ["error (floor, 95%)", *found.rows]
    rows = [[NAMES[name], *(_error_cell(row.summary, name) for row in found.rows.values())] for name in ERRORS]
    inside = ("yes" if row.summary["ece_within_band"] else "no" for row in found.rows.values())
    terms = ("reliability", "resolution", "uncertainty", "within bins")
    brier = [[name, *(_term(row.summary, term) for term in terms)] for name, row in found.rows.items()]
    figures = {
        name: plots.reliability_diagram(
            reliability(np.random.default_rng(0), row.scores.probabilities, row.scores.labels)
        )
        for name, row in found.rows.items()
        if name != PAPERS
    }
    notes = [
        "Floor: the mean, and the 95% quantile, of the error that a perfectly calibrated model of the same "
        "probabilities shows by chance, its labels redrawn by episode; the ECE is inside the band up to that quantile.",
        "The Brier score is reliability - resolution + uncertainty + within bins.",
    ]
    tabled = [Table(header, [*rows, ["ECE inside the band", *inside]]), Table(["Brier score", *terms], brier)]
    return Section("Calibration", notes, tabled, figures)


def _error_cell(summary: dict[str, Any], name: str) -> str:
    value, floor, quantile = (tables.number(summary[f"{name}{end}"]) for end in ("", "_floor", "_floor_q95"))
    return f"{value} ({floor}, {quantile})"


def _term(summary: dict[str, Any], term: str) -> str:
    return tables.number(summary[f"brier_{term.replace(' ', '_')}"])


def _selective(found: Assessment) -> Section:
    shown = {name: row.scores for name, row in found.rows.items() if name != PAPERS}
    curves = {name: metrics.risk_coverage(one.probabilities, one.labels) for name, one in shown.items()}
    confidence = {name: confidence_and_right(one.probabilities, one.labels)[0] for name, one in shown.items()}
    figures = {
        "Errors among the most confident queries": plots.risk_coverage(curves),
        "How confident the predictions are": plots.confidence_histogram(confidence),
    }
    return Section("Confidence", figures=figures)


def _out_of_episode(found: Assessment) -> Section:
    assert found.out_of_episode is not None
    opened, way = found.out_of_episode, found.episodes.shape.way
    ranked = sorted(opened.detection.items(), key=lambda item: -item[1].auroc)
    rows = [[name.replace("_", " "), *tables.detection_cells(one)] for name, one in ranked]
    pairs = {}
    for name, own, other in zip(opened.inside._fields, opened.inside, opened.outside, strict=True):
        values = np.concatenate([own, other], axis=1)
        is_other = np.broadcast_to(np.arange(values.shape[1]) >= own.shape[1], values.shape)
        finite = np.isfinite(values)
        pairs[name.replace("_", " ")] = values[finite], is_other[finite]
    areas = {
        name.replace("_", " "): one.interval if plain_interval(one.interval) else None
        for name, one in opened.detection.items()
    }
    return Section(
        "Out-of-episode detection",
        [
            f"Queries of {opened.classes} classes that the support set does not show, told from those of the {way} "
            "that it does. AUROC: mean over episodes with its bootstrap interval; the curves pool the queries of all "
            "episodes.",
            tables.failures_note(opened.failures),
        ],
        [Table(["score", "AUROC", "95% interval"], rows)],
        {"ROC, pooled over episodes": plots.roc(pairs, areas)},
    )


def _robustness(found: Assessment) -> Section:
    name = str(found.config.corruption).split(":")[0]
    rows = [
        [str(severity), format_percent(row["accuracy"], row["accuracy_ci95"]), tables.number(row["brier"])]
        for severity, row in found.severities.items()
    ]
    points = {severity: (row["accuracy"], row["accuracy_ci95"] or 0.0) for severity, row in found.severities.items()}
    figure = plots.accuracy_by_severity(points, name, 1 / found.episodes.shape.way)
    return Section(
        "Robustness",
        [
            f"The same episodes with support and query images corrupted by {name}, each image once, at every severity "
            "(0: clean), at the run's temperature."
        ],
        [Table(["severity", "accuracy", "Brier"], rows)],
        {"Accuracy against severity": figure},
    )


def _episodes(found: Assessment) -> Section:
    """The first episode and the one with most errors."""
    scores = found.rows[TEMPERED].scores
    worst = int(metrics.episode_accuracy(scores.probabilities, scores.labels).argmin())
    numbers = {"The first episode": 0, f"The episode with most errors (number {worst})": worst}
    figures = {text: _picture(found, number) for text, number in numbers.items()}
    note = "A row per class: its support images, then its queries under the class predicted and its probability."
    return Section("Episodes", [note], figures=figures)


def _picture(found: Assessment, number: int) -> Any:
    indices = jax.tree.map(lambda leaf: np.asarray(leaf[number]), found.episodes.indices)
    positions = np.concatenate([indices.x_support, indices.x_query])
    images = np.asarray(tasks.take_images(found.test, jax.numpy.asarray(positions)))
    support = len(indices.x_support)
    first = [int(np.flatnonzero(indices.y_support == label)[0]) for label in range(found.episodes.shape.way)]
    classes = class_of(found.test)[indices.x_support[first]]
    names = [found.splits.class_names["test"][k] for k in classes]
    return plots.episode_picture(
        plots.Episode(
            images[:support],
            indices.y_support,
            images[support:],
            indices.y_query,
            found.rows[TEMPERED].scores.probabilities[number],
        ),
        names,
        names if max(map(len, names)) <= SHORT else None,
    )


def class_of(dataset: Dataset) -> np.ndarray:
    """The class of every position in `flat_images` [R I]; -1 for images of no class."""
    found = np.full(len(dataset.images) * dataset.rotations, -1)
    index, counts = np.asarray(dataset.index), np.asarray(dataset.counts)
    for number, (positions, count) in enumerate(zip(index, counts, strict=True)):
        found[positions[:count]] = number
    return found


def _provenance(found: Assessment) -> Section:
    versions = {name: version(name) for name in PACKAGES}
    packages = ", ".join(f"{name} {text}" for name, text in versions.items())
    lines = [
        found.config.command(),
        "",
        f"Python {platform.python_version()}, {packages}; {jax.default_backend()}, {platform.machine()}",
        "",
        json.dumps(found.model.config.to_json(), indent=2),
    ]
    return Section("Command, versions and configuration of the run", verbatim="\n".join(lines))
