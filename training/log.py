"""What a row of metrics.jsonl says of the optimiser steps since the last one."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float

from fewshot.inference.outer.loss import Reduction, StepLog

PARTS = ("loss", "objective", "log_prior")  # of every learner; then come its own diagnostics
Diagnostics = Mapping[str, Reduction]


def columns(diagnostics: Diagnostics) -> tuple[str, ...]:
    """Names of what is logged of a step."""
    return (*PARTS, *diagnostics)


def table(window: Sequence[StepLog], diagnostics: Diagnostics) -> Float[np.ndarray, "steps columns"]:
    """Rows [steps, columns] of the logs of dispatches of one step, or of many."""
    fields = [[*log[:3], *(log.diagnostics[name] for name in diagnostics)] for log in jax.device_get(list(window))]
    logs = [np.stack(np.broadcast_arrays(*values), -1, dtype=float) for values in fields]
    return np.concatenate([np.atleast_2d(log) for log in logs]) if logs else np.zeros((0, len(columns(diagnostics))))


def steps_of(rows: Float[np.ndarray, "steps columns"], diagnostics: Diagnostics) -> list[StepLog]:
    """The logs of single steps, from rows of `table`."""
    return [StepLog(row[0], row[1], row[2], dict(zip(diagnostics, row[3:], strict=True))) for row in rows]


def summary(window: Sequence[StepLog], diagnostics: Diagnostics) -> dict[str, float | int]:
    """Means of the loss and its parts over the steps of a window; the diagnostics as they are to be reduced."""
    if not window:
        return {}
    found = dict(zip(columns(diagnostics), table(window, diagnostics).T, strict=True))
    values: dict[str, float | int] = {name: float(found[name].mean()) for name in PARTS}
    for name, how in diagnostics.items():
        if how is Reduction.SUM:
            values[name] = int(found[name].sum())
        else:
            values[name] = float(found[name].max() if how is Reduction.MAX else found[name].mean())
    return values
