"""What was found of one run, and the HTML report of it: tables and pictures in one file."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from fewshot import tasks
from fewshot.evaluation import metrics, plots, tables
from fewshot.evaluation.calibration_error import ERRORS
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.figures import Figure
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.out_of_episode import OutOfEpisode
from fewshot.evaluation.predictions import confidence_and_right
from fewshot.evaluation.report import Section, Table, page
from fewshot.evaluation.resampling import Interval, plain_interval, reliability
from fewshot.evaluation.scoring import Scores, Summary
from fewshot.evaluation.text import format_percent
from fewshot.tasks import Dataset, Splits

SHORT = 4  # letters of a class name that fit above an image
NAMES = {
    "ece": "ECE",
    "mce": "MCE",
    "ece_equal_mass": "ECE, equal-mass bins",
    "ece_class_wise": "ECE, class-wise",
    "ece_debiased": "ECE debiased (root mean square)",
}


TEMPERED, RAW = "at its temperature", "raw (temperature 1)"
ADAPTED = "adapted to each task"
CALIBRATED, PAPERS = "calibrated on validation classes", "papers' two temperatures (comparison only)"


class Row(NamedTuple):
    """One way to turn latents into probabilities: the predictions, all metrics with intervals, its temperatures."""

    scores: Scores
    summary: Summary
    temperatures: dict[str, float]


class Assessment(NamedTuple):
    """What was found of one run, and of what: `test` as scored (corrupted if asked), `severities` to accuracies.

    shown: which class of the test split each label of an episode is [E, C]; over_classes: 95% intervals of accuracy,
    NLL and Brier score for other test classes like these. trained_on: the data set of the run; held_out: its
    temperature is of classes that no step was taken on. same_features: accuracies of rules that learn nothing, by name,
    on the features of the run; empty where it has none.
    """

    run: str
    trained_on: str
    temperature: float
    held_out: bool
    corruption: str | None
    splits: Splits
    test: Dataset
    episodes: Episodes
    rows: dict[str, Row]
    shown: np.ndarray
    over_classes: dict[str, Interval]
    severities: dict[int, Metrics]
    out_of_episode: OutOfEpisode | None
    same_features: Mapping[str, Metrics] = MappingProxyType({})
    batch_norm: str = ""

    @property
    def heading(self) -> str:
        """What the tables are of."""
        shape, count = self.episodes.shape, len(self.episodes.keys)
        return tables.heading(self.splits.name, self.trained_on, shape, count, self.test.classes)

    @property
    def classes_note(self) -> str:
        """What another sample of test classes would have given; empty where the episodes do not tell."""
        bounds = plain_interval(self.over_classes["accuracy"])
        if bounds is None:
            return ""
        return (
            f"For other classes like these {self.test.classes}: accuracy {format_percent(bounds[0])} to "
            f"{format_percent(bounds[1])} (95% over classes and episodes; +- above is over episodes alone)."
        )

    @property
    def features_note(self) -> str:
        """What rules that learn nothing reach on the features of the run; empty where it has none."""
        if not self.same_features:
            return ""
        each = [tables.named_accuracy(name, row) for name, row in self.same_features.items()]
        return (
            f"On the same features of the same episodes, without the run's own classifier: {', '.join(each)}. What "
            "exceeds them is due to the classifier, the rest to the features."
        )

    @property
    def temperature_note(self) -> str:
        """Where the temperature of the run comes from."""
        return tables.temperature_note(self.temperature, self.episodes.shape, held_out=self.held_out)


def page_of(found: Assessment, records: Sequence[Mapping[str, object]], provenance: str) -> str:
    """The whole file as a text; records are the rows of the run's metrics.jsonl, provenance its last section."""
    shape = found.episodes.shape
    title = f"{found.splits.name}, {shape.way}-way {shape.shot}-shot: {found.run}"
    return page(title, list(_sections(found, records, provenance)))


def _sections(found: Assessment, records: Sequence[Mapping[str, object]], provenance: str) -> Iterator[Section]:
    yield _scores(found)
    yield _calibration(found)
    yield _selective(found)
    if found.out_of_episode:
        yield _out_of_episode(found)
    if found.severities:
        yield _robustness(found)
    if found.test.images.dtype == np.uint8:  # features, in their place, are nothing to look at
        yield _episodes(found)
    if records:
        yield Section("Training", figures={"Learning curve, from metrics.jsonl": plots.learning_curve(records)})
    yield Section("Command, versions and configuration of the run", verbatim=provenance)


def _scores(found: Assessment) -> Section:
    raw = found.rows[RAW].scores
    corrupted = f", support and query images corrupted by {found.corruption}" if found.corruption else ""
    notes = [
        f"{found.heading.strip()}{corrupted}. In brackets: 95% intervals over episodes.",
        found.temperature_note,
        *([found.classes_note] if found.classes_note else []),
        *([found.features_note] if found.features_note else []),
        *([tables.batch_norm_note(found.batch_norm)] if found.batch_norm else []),
        *(
            tables.calibration_note(name, row.temperatures, found.trained_on)
            for name, row in found.rows.items()
            if name not in (TEMPERED, RAW)
        ),
        tables.failures_note(raw.failures()),
    ]
    header = ["", "accuracy", "sd of batches", "NLL", "Brier", "ECE", "ECE debiased", "AURC", "AUROC"]
    rows = [[name, *_score_cells(row.summary)] for name, row in found.rows.items()]
    return Section("Scores", notes, [Table(header, rows)])


def _score_cells(summary: Summary) -> list[str]:
    values = summary.metrics
    cells = [format_percent(values["accuracy"], values["accuracy_ci95"])]
    cells.append(format_percent(values["accuracy_std_batches"]))
    for name in ("nll", "brier", "ece", "ece_debiased"):
        bounds = summary.intervals[name]
        cells.append(tables.number(values[name]) + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else ""))
    return cells + [tables.number(values[name]) for name in ("aurc", "auroc")]


def _calibration(found: Assessment) -> Section:
    """Every calibration error beside what chance gives, the terms of the Brier score, and reliability diagrams."""
    header = ["error (by chance: mean, 95%)", *found.rows]
    rows = [[NAMES[name], *(_error_cell(row.summary.metrics, name) for row in found.rows.values())] for name in ERRORS]
    inside = ("yes" if row.summary.metrics["ece_within_band"] else "no" for row in found.rows.values())
    terms = ("reliability", "resolution", "uncertainty", "within bins")
    brier = [[name, *(_term(row.summary.metrics, term) for term in terms)] for name, row in found.rows.items()]
    figures = {
        name: plots.reliability_diagram(
            reliability(np.random.default_rng(0), row.scores.probabilities, row.scores.labels)
        )
        for name, row in found.rows.items()
        if name != PAPERS
    }
    notes = [
        "By chance: the mean, and the 95% quantile, of the error that a perfectly calibrated model of the same "
        "probabilities shows, its labels redrawn by episode; an ECE up to that quantile is explained by chance.",
        "The Brier score is reliability - resolution + uncertainty + within bins.",
    ]
    tabled = [Table(header, [*rows, ["chance explains the ECE", *inside]]), Table(["Brier score", *terms], brier)]
    return Section("Calibration", notes, tabled, figures)


def _error_cell(found: Metrics, name: str) -> str:
    value, floor, quantile = (tables.number(found[f"{name}{end}"]) for end in ("", "_floor", "_floor_q95"))
    return f"{value} ({floor}, {quantile})"


def _term(found: Metrics, term: str) -> str:
    return tables.number(found[f"brier_{term.replace(' ', '_')}"])


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
        if own is None or other is None:
            continue
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
    name = str(found.corruption).split(":")[0]
    rows = [
        [str(severity), format_percent(row["accuracy"], row["accuracy_ci95"]), tables.number(row["brier"])]
        for severity, row in found.severities.items()
    ]
    points = {
        severity: (row["accuracy"] or 0.0, row["accuracy_ci95"] or 0.0) for severity, row in found.severities.items()
    }
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


def _picture(found: Assessment, number: int) -> Figure:
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
