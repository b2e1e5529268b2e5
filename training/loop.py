"""The training loop: steps, log rows, validation, the best weights, checkpoints, and a clean end when interrupted.

Everything it computes is a function of the configuration. A checkpoint holds the state and the log of the steps since
the last row, so a resumed run writes the same numbers as one that was never stopped; "best" is read off the rows.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree

from fewshot.evaluation.scoring import number_failed
from fewshot.evaluation.text import format_bytes, format_seconds
from fewshot.inference.outer.loss import StepLog
from fewshot.inference.outer.svi import Trainer
from fewshot.learners import GaussianProcess, Learner
from fewshot.learners.adapted import AdaptedLearner
from fewshot.training import checkpoint, processes
from fewshot.training.configuration import RunConfig
from fewshot.training.events import Rows, no_events
from fewshot.training.interruption import Interrupted, Stopped, noticed
from fewshot.training.log import columns, steps_of, summary, table
from fewshot.training.problem import Scored, Selection
from fewshot.training.progress import Progress
from fewshot.training.run import Run, export
from fewshot.training.run_directory import DivergedError, RunDirectory, RunError

WALL_CLOCK = ("seconds", "episodes_per_second")
_TIMED_DISPATCHES = 2
_AHEAD = 4  # steps that wait in the queue: enough to keep the device busy, few enough to stop at once
_TOGETHER = 50  # steps of one dispatch where Python would be in the way
_AGREE_EVERY = 10  # dispatches, where several processes must hear of a signal to one of them


@dataclass
class Training:
    """The loop of a run. `validate` scores a learner on fixed validation episodes, `calibrate` fits its temperature.

    selection: by which of those scores the best weights are chosen. events: takes every row of metrics, too.
    """

    start: Run
    trainer: Trainer
    directory: RunDirectory
    validate: Callable[[Learner], Scored]
    calibrate: Callable[[Learner], float]
    progress: Progress
    selection: Selection
    events: Rows = no_events
    state: PyTree = None
    step: int = 0
    best: tuple[float, float] = (-math.inf, -math.inf)
    best_step: int = 0
    failures: int = 0
    seconds: float = 0.0
    clock: float = 0.0
    window: list[StepLog] = field(default_factory=list)
    programs: dict[int, jax.stages.Compiled] = field(default_factory=dict)
    asked: int = 0
    shown: dict[str, str] = field(default_factory=dict)
    written: int = -1  # the step of the last row
    interrupted: Interrupted = field(default_factory=Interrupted)

    def run(self) -> int | None:
        """Train to the end; the number of the signal if one came before. Raises RunError on a loss not finite."""
        self.clock = time.perf_counter()
        self._restore()
        if not self._ended:
            self._estimate()
        stopped_by = 0
        with Interrupted() as self.interrupted:
            try:
                self._record()
                while not self._ended and not (stopped_by := self._agreed(self.interrupted.signal)):
                    self._advance(self._next_count())
                    self._record()
                if stopped_by:
                    noticed()
                    self._check_finite()
                    self._save()
            except Stopped as stopped:  # in a validation: the checkpoint before it is there
                noticed()
                stopped_by = stopped.number
        if self._ended and self.step < self.config.steps:
            self.progress.message(f"ended at step {self.step:,}: validation was best at step {self.best_step:,}")
        self.progress.close()
        return stopped_by or None

    @property
    def _ended(self) -> bool:
        """All steps are taken, or validation has not improved for the share of them that `patience` allows."""
        allowed = self.config.trainer.patience * self.config.steps
        impatient = 0 < allowed <= self.step - self.best_step and self.step % self._interval == 0
        return impatient or self.step >= self.config.steps

    def _record(self) -> None:
        """The row of this step, where there is one to write; before a validation, which may be interrupted, a save.

        A run that goes on from such a checkpoint writes the row first: it is the one that its metrics do not have.
        """
        validates = self.step % self._interval == 0 or self.step == self.config.steps
        if self.step == self.written or not (validates or self.step % self.config.trainer.log_every == 0):
            return
        self._check_finite()
        if validates:
            self._save()
        self._row(validates)
        self.written = self.step

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.start.config

    def current(self) -> Run:
        """The run with the current parameters."""
        return replace(self.start, learner=self.trainer.module(self.state))

    def _restore(self) -> None:
        """State of the newest checkpoint, if there is one, with the metrics cut back to its step."""
        self.state = self.trainer.init()
        restored = self.directory.restore_checkpoint(self._checkpoint(), any_number=("window",))  # of diagnostics
        if restored is None and any(record["step"] > 0 for record in self.directory.read_metrics()):
            raise RunError(
                f"{self.directory.path} was trained and has no checkpoints to go on from; test it with evaluate.py, "
                "or choose another folder to train anew"
            )
        self.directory.cut_metrics(-1 if restored is None else restored[0])
        processes.wait_for_all("all have read the newest checkpoint")  # before the first writes the next
        if restored is None:
            return
        self.step, held = restored
        self.state = held["state"]
        records = [record for record in self.directory.read_metrics() if record["step"] <= self.step]
        if self.step == 0 and not records:  # stopped in its first validation
            return
        last = records[-1] if records else {"step": -1}
        if not 0 <= self.step - last["step"] <= len(held["window"]):
            raise RunError(
                f"{self.directory.metrics} ends at step {last['step']}, the newest checkpoint is of step {self.step}; "
                f"remove {self.directory.path} to start over"
            )
        self.window = steps_of(held["window"][: self.step - last["step"]], self.start.learner.diagnostics)
        validated = {
            one["step"]: self.selection.value(one) for one in records if one.get(self.selection.name) is not None
        }
        if not validated or "seconds" not in last:
            raise RunError(
                f"expected seconds and a {self.selection.name} in {self.directory.metrics} up to step {self.step}, got "
                f"rows without; remove {self.directory.path} to start over"
            )
        self.directory.load_weights()  # if those of the best validation so far are lost, this says so before all steps
        self.seconds, self.written = last["seconds"], last["step"]
        self.failures = sum(record.get("failures", 0) for record in records)
        self.best_step, self.best = max(validated.items(), key=lambda one: one[1])  # the first of equal ones
        self.progress.first = self.step * self.config.tasks_per_step
        self.progress.message(f"resumed after step {self.step:,} of {self.config.steps:,}")

    def _checkpoint(self) -> dict[str, PyTree]:
        names = columns(self.start.learner.diagnostics)
        rows = np.zeros((self.config.trainer.log_every, len(names)))
        if self.window:
            logged = table(self.window, self.start.learner.diagnostics)
            rows[: len(logged)] = logged
        return {"state": self.state, "window": rows}

    def _save(self) -> None:
        self.directory.save_checkpoint(self.step, self._checkpoint())

    @property
    def _interval(self) -> int:
        """Steps from one validation to the next."""
        return self.config.trainer.validate_every or max(self.config.steps // 20, 250)

    @property
    def _together(self) -> int:
        """Steps of one dispatch where no row comes in between: XLA runs convolutions in loops slowly on CPU alone."""
        settings = self.config.trainer
        usual = 1 if jax.default_backend() == "cpu" else min(_TOGETHER, settings.log_every)
        return settings.steps_per_dispatch or usual

    def _next_count(self) -> int:
        """Steps of the next dispatch."""
        periods = (self.config.trainer.log_every, self._interval)
        return dispatch_size(self.step, self._together, periods, self.config.steps)

    def _program(self, count: int) -> jax.stages.Compiled:
        """The compiled program of that many steps."""
        if count not in self.programs:
            step = self.trainer.step
            compiled = step.lower(self.state, 0, None if count == 1 else count).compile()
            self.programs[count] = compiled
        return self.programs[count]

    def _estimate(self) -> None:
        """Compile, and time the compiled program on a copy of the state, so that the estimate comes before the run."""
        count, start = self._next_count(), time.perf_counter()
        compiled, sampler = self._program(count), self.trainer.step.sampler
        compilation = time.perf_counter() - start
        copy, _ = jax.block_until_ready(compiled(jax.tree.map(jnp.copy, self.state), 0, sampler))
        start = time.perf_counter()
        for _ in range(_TIMED_DISPATCHES):
            copy, _ = compiled(copy, 0, sampler)
        jax.block_until_ready(copy)
        seconds = (time.perf_counter() - start) / _TIMED_DISPATCHES / count
        left = (self.config.steps - self.step) * seconds
        self.progress.message(
            f"a step takes {1e3 * seconds:.3g} ms and {format_bytes(_bytes(compiled))} of memory: "
            f"about {format_seconds(left)} of training, validation not counted; "
            f"compiled in {format_seconds(compilation)}"
        )

    def _advance(self, count: int) -> None:
        """One dispatch of `count` steps, without waiting for it; few enough are under way that it can stop soon."""
        self.state, log = self._program(count)(self.state, self.step, self.trainer.step.sampler)
        self.step += count
        self.window.append(log)
        ahead = max(1, _AHEAD // count)
        if len(self.window) > ahead:
            jax.block_until_ready(self.window[-1 - ahead].loss)
            done = self.step - ahead * count
            self.progress.update(done * self.config.tasks_per_step, self.shown)

    def _agreed(self, received: int | None) -> int:
        """The signal to stop at now, 0 for none. Several processes ask each other, at the same steps."""
        if jax.process_count() == 1:
            return received or 0
        self.asked += 1
        return processes.largest(received or 0) if self.asked % _AGREE_EVERY == 0 else 0

    def _check_finite(self) -> None:
        """Raises DivergedError on a loss that is not finite."""
        rows = steps_of(table(self.window, self.start.learner.diagnostics), self.start.learner.diagnostics)
        for number, row in enumerate(rows, self.step - len(rows) + 1):
            if not np.isfinite(row.loss):
                failed = int(row.diagnostics.get("failures", 0))
                kept = checkpoint.steps(self.directory.checkpoints)
                last = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint yet"
                raise DivergedError(
                    f"the loss of step {number} is {row.loss} ({failed} tasks failed in it); {last}; "
                    f"{advice(number, self.start.learner)}"
                )

    def _row(self, validated: bool) -> None:
        """Write one row of metrics: the steps since the last row, and, where `validated`, the model's scores."""
        run, how = self.current(), self.start.learner.diagnostics
        episodes = len(table(self.window, how)) * run.config.tasks_per_step
        values: dict[str, float | int] = {"episodes": self.step * run.config.tasks_per_step}
        values |= summary(self.window, how) | run.learner.report()
        trained = time.perf_counter() - self.clock
        if validated:
            # Of several processes none may leave the others alone.
            alone = jax.process_count() == 1
            with self.interrupted.at_once() if alone else contextlib.nullcontext():
                values |= self._validate(run)
        now = time.perf_counter()
        self.seconds, self.clock = self.seconds + now - self.clock, now
        values |= {"episodes_per_second": episodes / trained, "seconds": self.seconds}
        self.failures += int(values.get("failures", 0))
        self.window = []
        self.directory.append_metrics(self.step, values)
        self.events(self.step, values)
        self._show(values)

    def _validate(self, run: Run) -> dict[str, float | int]:
        """Scores on the validation episodes; the best weights so far are exported with their temperature.

        It stays 1 for a network that no step was taken on, unless there is nothing to learn.
        """
        scores = self.validate(run.learner)
        values: dict[str, float | int] = {
            **scores.validation(),
            "validation_failures": number_failed(scores.failures()),
        }
        value = self.selection.value(values)
        if value > self.best:
            self.best, self.best_step = value, self.step
            if self.step > 0 or not jax.tree.leaves(nnx.state(run.learner, nnx.Param)):
                run = replace(run, temperature=self.calibrate(run.learner))
            export(self.directory, run, self.step)
            values["temperature"] = run.temperature
        return values

    def _show(self, values: Mapping[str, float | int]) -> None:
        texts = {"loss": "{:.3f}", "scale": "{:.3g}", "prior_pull": "{:+.2g}", "failures": "{}"}
        words = {"scale": "output scale", "prior_pull": "pull of its prior"}
        shown = {words.get(name, name): text.format(values[name]) for name, text in texts.items() if values.get(name)}
        if self.selection.name in values:
            shown["validation"] = self.selection.shown(values[self.selection.name])
        self.shown |= shown
        self.progress.update(int(values["episodes"]), self.shown)


def advice(step: int, learner: Learner) -> str:
    """What may keep the loss of a step finite. That of the first one is the initial network's: no rate changes it."""
    if step == 1:
        said = (
            "no step was taken yet, so look at what --set and a module of your own give the likelihood and the kernel"
        )
    else:
        said = "try a smaller trainer.learning_rate"
    if isinstance(learner, GaussianProcess):
        return f"{said}, or try more --inner-steps"
    return f"{said}, or try a smaller learner.inner_rate" if isinstance(learner, AdaptedLearner) else said


def dispatch_size(step: int, together: int, periods: tuple[int, ...], last: int) -> int:
    """`together` steps, or one where a row (at the multiples of each period) or the end comes before.

    A function of the step and the settings alone: a resumed run repeats the programs of one that was never stopped.
    """
    row = min((step // period + 1) * period for period in periods)
    return together if step + together <= min(row, last) else 1


def _bytes(compiled: jax.stages.Compiled) -> int:
    analysis = compiled.memory_analysis()
    sizes = ("temp_size_in_bytes", "argument_size_in_bytes", "output_size_in_bytes")
    return sum(getattr(analysis, size, 0) for size in sizes)
