"""How scores are printed."""

import math
from collections.abc import Mapping

from fewshot.evaluation.episodes import Shape
from fewshot.evaluation.metrics import Metric, Metrics
from fewshot.evaluation.out_of_episode import Detection
from fewshot.evaluation.scoring import WARNINGS
from fewshot.evaluation.text import format_percent, format_table

LEGEND = (
    "ECE debiased: root mean square of the gaps, without what chance adds. By chance: the mean ECE of a perfectly\n"
    "calibrated model on as many episodes, and its 95% quantile; up to that, chance explains the ECE."
)
BATCH_NORM = {
    "inductive": "the running statistics of training, so no answer depends on the other queries (inductive)",
    "transductive": "the statistics of the images predicted together, so answers depend on the other queries "
    "(transductive)",
    "labelled": "the statistics of the labelled images, so no answer depends on the other queries",
}
NOT_MIXED = "Episodes whose chains had not mixed well (longer ones would be surer)"


def heading(dataset: str, trained_on: str, shape: Shape, episodes: int, classes: int) -> str:
    """What a table is about. Of another data set than the run's it is not known which classes training showed."""
    seen = " never seen in training" if dataset == trained_on else ""
    return (
        f"\nTest on {classes} classes of {dataset}{seen}: {episodes} {shape.way}-way "
        f"{shape.shot}-shot episodes with {shape.query} queries a class"
    )


def metrics_table(results: Mapping[str, Metrics]) -> str:
    """A row per model: accuracy with its 95% interval, NLL, Brier, ECE beside what chance alone gives; and a legend."""
    header = ["", "accuracy", "NLL", "Brier", "ECE", "ECE debiased", "by chance", "95% of chance", "chance explains it"]
    return format_table(header, [[name, *_cells(row)] for name, row in results.items()]) + f"\n{LEGEND}"


def temperature_note(temperature: float, shape: Shape, *, held_out: bool) -> str:
    """Where the temperature comes from; held_out: from training classes that no step was taken on."""
    if temperature == 1:  # as it was before any fit
        return "No temperature: validation found no weights better than those before the first step."
    return (
        f"Temperature {temperature:.3f}, fitted on queries of {shape.way}-way {shape.shot}-shot episodes of "
        f"training classes{' that no step was taken on' if held_out else ', raised for new ones'}; "
        "the rows marked raw do without."
    )


def batch_norm_note(rule: str) -> str:
    """What batch norms use at test, by `Learner.batch_norm`."""
    return f"Batch norms use {BATCH_NORM[rule]}."


def calibration_note(name: str, temperatures: Mapping[str, float], dataset: str) -> str:
    """Where the temperatures of a row come from."""
    if "mean_temperature" in temperatures:
        mean = temperatures["mean_temperature"]
        return f"{name}: temperature {mean:.3f} on average, learned by leaving labelled images out."
    if "temperature" in temperatures:
        return f"{name}: temperature {temperatures['temperature']:.3f}, fitted by NLL on those of {dataset}."
    return (
        f"{name}: {temperatures['latent_temperature']:.3g} inside the likelihood and "
        f"{temperatures['predictive_temperature']:.3g} after it, the least ECE ({temperatures['validation_ece']:.4f}) "
        f"of a grid on validation classes of {dataset}."
    )


def detection_table(found: Mapping[str, Detection]) -> str:
    """A row per out-of-episode score: mean AUROC with its bootstrap interval, largest first."""
    ranked = sorted(found.items(), key=lambda item: -item[1].auroc)
    header = ["score", "AUROC", "95% interval"]
    return format_table(header, [[name.replace("_", " "), *detection_cells(one)] for name, one in ranked])


def detection_cells(one: Detection) -> list[str]:
    """Mean AUROC and its interval, which a single episode has not."""
    known = math.isfinite(one.interval.low + one.interval.high)
    return [f"{one.auroc:.4f}", f"{one.interval.low:.4f} to {one.interval.high:.4f}" if known else "-"]


def failures_note(failures: Mapping[str, int]) -> str:
    """Episodes by result code; chains that have not mixed are a warning, their draws are used."""
    failed = {name: count for name, count in failures.items() if name not in WARNINGS}
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failed.items())
    warned = "".join(f" {NOT_MIXED}: {count}." for name, count in failures.items() if name in WARNINGS)
    return f"Episodes whose inference failed: {counts or 'none'}.{warned}"


def _cells(row: Metrics) -> list[str]:
    names = ("nll", "brier", "ece", "ece_debiased", "ece_floor", "ece_floor_q95")
    within = row.get("ece_within_band")
    inside = "-" if within is None else "yes" if within else "no"
    percent = format_percent(row["accuracy"], row["accuracy_ci95"])
    return [percent, *(number(row.get(name)) for name in names), inside]


def named_accuracy(name: str, row: Metrics) -> str:
    """A name and its accuracy with the interval."""
    return f"{name} {format_percent(row['accuracy'], row['accuracy_ci95'])}"


def number(value: Metric) -> str:
    """Four digits, or a dash where it is undefined."""
    return "-" if value is None else f"{value:.4f}"
