"""What a row of metrics.jsonl says of the steps since the last one, and of the model."""

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from inference.outer.loss import StepLog
from models.kernels import Kernel
from runners.build import Model


def table(window: list[StepLog]) -> Float[np.ndarray, "steps fields"]:
    """Rows [steps, fields] of the logs of dispatches of one step, or of many."""
    logs = [np.stack(np.broadcast_arrays(*log), -1, dtype=float) for log in jax.device_get(window)]
    return np.concatenate([np.atleast_2d(log) for log in logs]) if logs else np.zeros((0, len(StepLog._fields)))


def summary(window: list[StepLog]) -> dict[str, Any]:
    """Means of the loss and its parts, the largest residual, and counts, over the steps of a window."""
    if not window:
        return {}
    columns = StepLog(*table(window).T)
    means = {name: float(getattr(columns, name).mean()) for name in ("loss", "objective", "log_prior")}
    counts = {name: int(getattr(columns, name).sum()) for name in ("failures", "clipped")}
    return means | {"residual": float(columns.residual.max())} | counts


def hyperparameters(model: Model) -> dict[str, float]:
    """Hyper-parameters of kernel and likelihood, the output scale, and the prior's pull on it (d log p / d log s2)."""
    values = {**model.deep_kernel.hyperparameters(), **model.likelihood.parameters()}
    plain = {name: float(value) for name, value in values.items()}
    pull = _prior_pull(model.deep_kernel.kernel, values["log_scale"])
    return plain | {"scale": math.exp(plain["log_scale"]), "prior_pull": float(pull)}


@partial(jax.jit, static_argnums=0)
def _prior_pull(kernel: Kernel, log_scale: Array) -> Array:
    return jax.grad(kernel.priors()["log_scale"].log_prob)(log_scale)
