"""The training loop: steps, log rows, validation, the best weights, checkpoints, and a clean end when interrupted.

Everything it computes is a function of the configuration. A checkpoint holds the state and the log of the steps since
the last row, so a resumed run writes the same numbers as one that was never stopped; "best" is read off the rows.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from evaluation import metrics
from inference.outer import checkpoint
from inference.outer.svi import StepLog, Trainer
from models.kernels import Kernel
from runners.build import Model, export
from runners.console import Progress, format_bytes, format_percent, format_seconds
from runners.run_directory import RunDirectory, RunError
from runners.scoring import Scores

WALL_CLOCK = ("seconds", "episodes_per_second")
_TIMED_STEPS = 2
_AHEAD = 4  # steps that wait in the queue: enough to keep the device busy, few enough to stop at once


class Interrupted:
    """Context in which Ctrl-C and SIGTERM are noted in `signal` instead of stopping the program; twice stops it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupted":
        if threading.current_thread() is threading.main_thread():  # others cannot receive signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = number
        for known, handler in self._previous.items():
            signal.signal(known, handler)


@dataclass
class Training:
    """One run's loop. `validate` scores a model on the fixed validation episodes, `calibrate` fits its temperature."""

    model: Model
    trainer: Trainer
    directory: RunDirectory
    validate: Callable[[Model], Scores]
    calibrate: Callable[[Model], float]
    progress: Progress
    state: Any = None
    step: int = 0
    best: float = -math.inf
    failures: int = 0
    seconds: float = 0.0
    clock: float = 0.0
    window: list[StepLog] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)

    def run(self) -> int | None:
        """Train to the end; the number of the signal if one came before. Raises RunError on a loss not finite."""
        self.clock = time.perf_counter()
        started_anew = self._restore()
        steps, settings = self.model.config.steps, self.model.config.trainer
        interval = settings.validate_every or max(steps // 20, 250)
        advance = self._compile()
        with Interrupted() as interrupted:
            if started_anew:
                self._row(validated=True)
                self._save()
            while self.step < steps and interrupted.signal is None:
                self._advance(advance)
                validated = self.step % interval == 0 or self.step == steps
                if validated or self.step % settings.log_every == 0:
                    self._row(validated)
                if validated:
                    self._save()
            if interrupted.signal is not None:
                self._check_finite()
                self._save()
        self.progress.close()
        return interrupted.signal if self.step < steps else None

    def current(self) -> Model:
        """The model at the parameters of now."""
        deep_kernel, likelihood = self.trainer.module(self.state)
        return replace(self.model, deep_kernel=deep_kernel, likelihood=likelihood)

    def _restore(self) -> bool:
        """State of the newest checkpoint, with the metrics cut back to its step; True if there is none."""
        self.state = self.trainer.init()
        restored = self.directory.restore_checkpoint(self._checkpoint())
        self.directory.cut_metrics(-1 if restored is None else restored[0])
        if restored is None:
            return True
        self.step, held = restored
        self.state = held["state"]
        records = self.directory.read_metrics()
        last = records[-1] if records else {"step": -1}
        if not 0 <= self.step - last["step"] < len(held["window"]):
            raise RunError(
                f"{self.directory.metrics} ends at step {last['step']}, the newest checkpoint is of step {self.step}; "
                f"remove {self.directory.path} to start over"
            )
        self.window = [StepLog(*row) for row in held["window"][: self.step - last["step"]]]
        self.seconds = last["seconds"]
        self.failures = sum(record.get("failures", 0) for record in records)
        validated = [record["validation_accuracy"] for record in records if "validation_accuracy" in record]
        self.best = max(validated)
        self.progress.first = self.step * self.model.config.tasks_per_step
        self.progress.message(f"resumed after step {self.step:,} of {self.model.config.steps:,}")
        return False

    def _checkpoint(self) -> dict[str, Any]:
        rows = np.zeros((self.model.config.trainer.log_every, len(StepLog._fields)))
        if self.window:
            rows[: len(self.window)] = np.array(jax.device_get(self.window), float)
        return {"state": self.state, "window": rows}

    def _save(self) -> None:
        self.directory.save_checkpoint(self.step, self._checkpoint())

    def _compile(self) -> Callable:
        """The compiled step, timed on a copy of the state so that the estimate comes before the run."""
        step = self.trainer.step
        compiled = step.lower(self.state, 0).compile()
        copy, _ = compiled(jax.tree.map(jnp.copy, self.state), 0, step.sampler)
        start = time.perf_counter()
        for _ in range(_TIMED_STEPS):
            copy, _ = compiled(copy, 0, step.sampler)
        jax.block_until_ready(copy)
        seconds = (time.perf_counter() - start) / _TIMED_STEPS
        left = (self.model.config.steps - self.step) * seconds
        self.progress.message(
            f"a step takes {1e3 * seconds:.3g} ms and {format_bytes(_bytes(compiled))} of memory: "
            f"about {format_seconds(left)} of training, validation not counted"
        )
        return lambda state, index: compiled(state, index, step.sampler)

    def _advance(self, advance: Callable) -> None:
        """One step, dispatched without waiting for it; at most _AHEAD are under way."""
        self.state, log = advance(self.state, self.step)
        self.step += 1
        self.window.append(log)
        if len(self.window) > _AHEAD:
            jax.block_until_ready(self.window[-1 - _AHEAD].loss)
            done = self.step - _AHEAD
            self.progress.update(done * self.model.config.tasks_per_step, self.shown)

    def _check_finite(self) -> None:
        """Raises RunError on a loss that is not finite."""
        for number, row in enumerate(jax.device_get(self.window), self.step - len(self.window) + 1):
            if not np.isfinite(row.loss):
                kept = checkpoint.steps(self.directory.checkpoints)
                last = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint yet"
                raise RunError(
                    f"the loss of step {number} is {row.loss} ({int(row.failures)} tasks failed in it); {last}; "
                    "try a smaller trainer.learning_rate or more --inner-steps"
                )

    def _row(self, validated: bool) -> None:
        """Write one row of metrics: the steps since the last row, and, where `validated`, the model's scores."""
        self._check_finite()
        model = self.current()
        episodes = len(self.window) * model.config.tasks_per_step
        values: dict[str, Any] = {"episodes": self.step * model.config.tasks_per_step}
        values |= _summary(self.window) | _hyperparameters(model)
        trained = time.perf_counter() - self.clock
        if validated:
            values |= self._validate(model)
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        values |= {"episodes_per_second": episodes / trained, "seconds": self.seconds}
        self.failures += values.get("failures", 0)
        self.window = []
        self.directory.append_metrics(self.step, values)
        self._show(values)

    def _validate(self, model: Model) -> dict[str, float]:
        """Scores on the validation episodes; the best model so far is exported with its temperature."""
        scores = self.validate(model)
        accuracy = metrics.accuracy(scores.probabilities, scores.labels)
        values = {
            "validation_accuracy": accuracy,
            "validation_nll": metrics.nll(scores.probabilities, scores.labels),
            "validation_failures": sum(scores.failures().values()),
        }
        if accuracy > self.best:
            self.best = accuracy
            model = replace(model, temperature=self.calibrate(model))
            export(self.directory, model, self.step)
            values["temperature"] = model.temperature
        return values

    def _show(self, values: Mapping[str, Any]) -> None:
        texts = {"loss": "{:.3f}", "scale": "{:.3g}", "prior_pull": "{:+.2g}", "failures": "{}"}
        shown = {name: text.format(values[name]) for name, text in texts.items() if values.get(name)}
        if "validation_accuracy" in values:
            shown["validation"] = format_percent(values["validation_accuracy"])
        self.shown |= shown
        self.progress.update(values["episodes"], self.shown)


def _bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    sizes = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    return sum(getattr(analysis, size, 0) for size in sizes)


def _summary(window: list[StepLog]) -> dict[str, Any]:
    """Means of the loss and its parts, the largest residual, and counts, over the steps of a window."""
    if not window:
        return {}
    columns = StepLog(*np.array(jax.device_get(window), float).T)
    means = {name: float(getattr(columns, name).mean()) for name in ("loss", "objective", "log_prior")}
    counts = {name: int(getattr(columns, name).sum()) for name in ("failures", "clipped")}
    return means | {"residual": float(columns.residual.max())} | counts


def _hyperparameters(model: Model) -> dict[str, float]:
    """Hyper-parameters of kernel and likelihood, the output scale, and the prior's pull on it (d log p / d log s2)."""
    values = {**model.deep_kernel.hyperparameters(), **model.likelihood.parameters()}
    plain = {name: float(value) for name, value in values.items()}
    pull = _prior_pull(model.deep_kernel.kernel, values["log_scale"])
    return plain | {"scale": math.exp(plain["log_scale"]), "prior_pull": float(pull)}


@partial(jax.jit, static_argnums=0)
def _prior_pull(kernel: Kernel, log_scale: Array) -> Array:
    return jax.grad(kernel.priors()["log_scale"].log_prob)(log_scale)
