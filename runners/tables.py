"""How scores are printed."""

from collections.abc import Mapping
from typing import Any

from runners.console import format_percent, format_table
from runners.data import Shape


def heading(dataset: str, shape: Shape, episodes: int, classes: int) -> str:
    """What a table is about."""
    return (
        f"\nTest on {classes} classes of {dataset} never seen in training: {episodes} {shape.way}-way "
        f"{shape.shot}-shot episodes with {shape.query} queries a class"
    )


def metrics_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A row per model: accuracy with its 95% interval, NLL, Brier, ECE, and the floor of the ECE."""
    return format_table(
        ["", "accuracy", "NLL", "Brier", "ECE", "ECE floor"], [[name, *_cells(row)] for name, row in results.items()]
    )


def temperature_note(temperature: float, shape: Shape) -> str:
    """Where the temperature comes from."""
    return (
        f"Temperature {temperature:.3f}, fitted on queries of {shape.way}-way {shape.shot}-shot episodes of training "
        "classes; the rows marked raw do without."
    )


def failures_note(failures: Mapping[str, int]) -> str:
    """Episodes by result code."""
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failures.items())
    return f"Episodes whose inference failed: {counts or 'none'}."


def _cells(row: Mapping[str, Any]) -> list[str]:
    numbers = [row.get(name) for name in ("nll", "brier", "ece", "ece_floor")]
    return [format_percent(row["accuracy"], row["accuracy_ci95"])] + [_number(value) for value in numbers]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
