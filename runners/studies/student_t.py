"""Sparse Student-t processes: the natural gradient of q(u) against four first-order methods, at equal processor time.

python runners/studies/student_t.py [--quick] [--out DIR] [--seed n]

The comparison of SVTP (docs/student_t.md). Every method moves q(u) = ST(nu, m, diag S) by its own rule and all else by
Adam, on the same batches and from the same start. Rates: five a method, the first seed with each; the one with the
least negative bound on training rows after equal steps serves the other seeds. A seed is also a fold of the data.
Beside them stands the sparse Gaussian process, with and without outliers planted in the training targets.

Time is processor time of the steps, summed over all threads of this process: compilation and measurements are not in
it. Other programs slow the steps through the caches, so what counts is steps times the least time of a step that any
method had on the data set: the methods differ by O(M), less than what others cost them. Hold the program on one core
(taskset -c 1): waiting threads would be counted. What is done is kept in DIR/curves, so the same command goes on where
it was stopped.
"""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PyTree

from fewshot.inference import sparse, student_t
from fewshot.inference.student_t import SparseStudent
from fewshot.models.inducing import InducingProcess
from fewshot.models.kernels import Matern52
from fewshot.models.student_t_fisher import DiagonalStudent
from fewshot.runners.studies import student_t_report
from fewshot.runners.studies.reporting import Row, StudyError, folder, run_as_script, save, write
from fewshot.runners.studies.student_t_report import GAUSSIAN, METHODS, NATURAL, Curve, Look, best_rate
from fewshot.tasks import uci
from fewshot.tasks.replacing import replace_text

NAME = "student-t"
# Of the natural gradient times B / N (SVTP's step), of SGD on the bound a row; the others do not see the bound's unit.
RATES = {
    "natural": (10.0, 3.0, 1.0, 0.3, 0.1),
    "sgd": (3.0, 1.0, 0.3, 0.1, 0.03),
    "adam": (1.0, 0.3, 0.1, 0.03, 0.01),
    "amsgrad": (1.0, 0.3, 0.1, 0.03, 0.01),
    "adagrad": (3.0, 1.0, 0.3, 0.1, 0.03),
}
GAUSSIAN_RATE, MODEL_RATE = 0.1, 1e-2
OUTLIER, SHARE = 10.0, 0.05  # deviations that a planted outlier is moved by, and how many are planted
LOOKS = 12  # of a curve, at least


@dataclass(frozen=True)
class Settings:
    """What every run has in common; a curve of other settings is refused."""

    data: tuple[str, ...] = tuple(uci.SOURCES)
    seeds: int = 5
    rates: int = 5
    seconds: float = 3.0
    inducing: int = 64
    batch: int = 256
    chunk: int = 50
    watched: int = 2000
    draws: int = 64


QUICK = Settings(data=("energy",), seeds=2, rates=2, seconds=0.1, inducing=8, batch=32, watched=200, draws=16)


class Plan(NamedTuple):
    """One run."""

    data: str
    method: str
    rate: float
    seed: int
    outliers: bool = False

    @property
    def stem(self) -> str:
        """Of its file."""
        ending = "-outliers" if self.outliers else ""
        return f"{self.data}-{self.method.replace(' ', '-')}-{self.rate:g}-seed{self.seed}{ending}"


class Kept(TypedDict):
    """A file of DIR/curves."""

    settings: dict[str, object]
    curve: Curve


class Rows(NamedTuple):
    """Training and test rows on the device, and the positions [W] of training rows on which the bound is watched."""

    x: Float[Array, "N D"]
    y: Float[Array, " N"]
    x_test: Float[Array, "Q D"]
    y_test: Float[Array, " Q"]
    watched: Array
    inputs: Float[Array, "M D"]


class Contestant(NamedTuple):
    """What is timed and what is looked at: advance(key, state) takes a chunk of steps.

    look(state): the bound estimated from the watched rows, means and log densities of the test rows.
    """

    rows: Rows
    start: PyTree
    advance: Callable[[Key[Array, ""], PyTree], PyTree]
    look: Callable[[PyTree], tuple[Array, Array, Array]]


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """One row for each run; table.md, results.json, student-t.png and outliers.png in the folder.

    Raises StudyError for a folder that holds curves of other settings.
    """
    path, settings = folder(NAME, quick, out), QUICK if quick else Settings()
    (path / "curves").mkdir(exist_ok=True)
    curves = list(race_all(path, settings, seed))
    tables = student_t_report.tables(curves)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    write(path, curves, tables, quick=quick, seed=seed, cores=cores, settings=asdict(settings))
    save(student_t_report.curves_figure(curves), path / "student-t.png")
    save(student_t_report.outliers_figure(curves), path / "outliers.png")
    return curves


def race_all(path: Path, settings: Settings, seed: int) -> Iterator[Curve]:
    """Every run: all rates with the first seed, then the best with the others, then those beside the comparison."""
    for name in settings.data:
        best = {}
        for method in METHODS:
            spread = np.linspace(0, len(RATES[method]) - 1, settings.rates).round().astype(int)
            tried = [kept_or_run(path, settings, Plan(name, method, RATES[method][i], seed)) for i in spread]
            yield from tried
            best[method] = best_rate(tried)
        for later in range(seed + 1, seed + settings.seeds):
            for method in METHODS:
                yield kept_or_run(path, settings, Plan(name, method, best[method], later))
        for each in range(seed, seed + settings.seeds):
            yield kept_or_run(path, settings, Plan(name, GAUSSIAN, GAUSSIAN_RATE, each))
            yield kept_or_run(path, settings, Plan(name, GAUSSIAN, GAUSSIAN_RATE, each, outliers=True))
            yield kept_or_run(path, settings, Plan(name, NATURAL, best[NATURAL], each, outliers=True))


def kept_or_run(path: Path, settings: Settings, plan: Plan) -> Curve:
    """A run's curve, from its file if there is one, which is written as soon as it is known. Raises StudyError."""
    file = path / "curves" / f"{plan.stem}.json"
    same = {**asdict(settings), "data": plan.data, "seeds": 0, "rates": 0}  # how many others there are is no matter
    if file.exists():
        try:
            kept = cast(Kept, json.loads(file.read_text()))
            agrees, curve = kept["settings"] == same, kept["curve"]
        except (ValueError, KeyError, TypeError):
            raise StudyError(f"expected a curve of this study in {file}, got something else; remove it") from None
        if not agrees:
            raise StudyError(f"{file} is of other settings; choose another --out, or remove its curves")
        return curve
    with jax.enable_x64(plan.method == GAUSSIAN):  # its sites lose their definiteness in single precision
        looks = race(contestant(plan, settings), settings, plan)
    curve = Curve(
        data=plan.data, method=plan.method, rate=plan.rate, seed=plan.seed, outliers=plan.outliers, looks=looks
    )
    replace_text(file, json.dumps({"settings": same, "curve": curve}) + "\n")
    print(f"{plan.stem}: {looks[-1]['steps']} steps, -bound/N {looks[-1]['loss']}", flush=True)
    return curve


def contestant(plan: Plan, settings: Settings) -> Contestant:
    """The method on the fold of its seed."""
    fold = uci.load_fold(plan.data, plan.seed % uci.FOLDS)
    rows = prepare(fold, settings, plan.seed, SHARE if plan.outliers else 0.0)
    if plan.method == GAUSSIAN:
        return gaussian_contestant(rows, plan, settings)
    return student_contestant(rows, plan, settings)


def prepare(fold: uci.Fold, settings: Settings, seed: int, share: float) -> Rows:
    """A share of the training targets moved by OUTLIER deviations, up or down.

    Some folds have a row more than others, which is left out: nothing is compiled again.
    """
    rng = np.random.default_rng(seed)
    every = len(fold.y) + len(fold.y_test)
    test, train = every // uci.FOLDS, every - math.ceil(every / uci.FOLDS)
    y = fold.y[:train] + OUTLIER * (rng.random(train) < share) * rng.choice([-1.0, 1.0], train)
    order = rng.permutation(train)
    parts = (fold.x[:train], y, fold.x_test[:test], fold.y_test[:test])
    x, labels, x_test, y_test = (jnp.asarray(part, jnp.result_type(float)) for part in parts)
    inputs = x[rng.choice(train, settings.inducing, replace=False)]
    return Rows(x, labels, x_test, y_test, jnp.asarray(order[: settings.watched]), inputs)


@functools.cache
def method_of(name: str) -> student_t.Method:
    """A method whose rate is in its memory, so that all rates share one compiled step."""

    def of_rate(rate: float | Float[Array, ""]) -> optax.GradientTransformation:
        return student_t.methods(rate, MODEL_RATE)[name].q

    return student_t.Method(optax.inject_hyperparams(of_rate)(rate=1.0), optax.adam(MODEL_RATE))


def student_contestant(rows: Rows, plan: Plan, settings: Settings) -> Contestant:
    """The Student-t process, q(u) by the named method."""
    student, points, method = SparseStudent(Matern52()), len(rows.y), method_of(plan.method)
    batch = min(settings.batch, points)
    rate = plan.rate * {"natural": batch / points, "sgd": 1 / points}.get(plan.method, 1.0)
    start = student_t.init(method, *student.initial(rows.inputs))
    start = start._replace(q_memory=start.q_memory._replace(hyperparams={"rate": jnp.float32(rate)}))

    def advance(key: Key[Array, ""], state: student_t.State) -> student_t.State:
        return student_t.run(key, student, method, state, rows.x, rows.y, batch, settings.chunk)[0]

    def look(state: student_t.State) -> tuple[Array, Array, Array]:
        return _look_at_student(jax.random.key(plan.seed), student, state.q, state.model, rows, settings.draws)

    return Contestant(rows, start, advance, look)


@partial(jax.jit, static_argnames=("student", "draws"))
def _look_at_student(
    key: Array,
    student: SparseStudent,
    q: DiagonalStudent,
    model: student_t.Model,
    rows: Rows,
    draws: int,
) -> tuple[Array, Array, Array]:
    keys = jax.random.split(key)
    x, y = rows.x[rows.watched], rows.y[rows.watched]
    careful = SparseStudent(student.kernel, student.whitened, student.inducing_noise, draws)
    bound = student_t.elbo(keys[0], careful, q, model, x, y, len(rows.y) / len(rows.watched))
    mixture = student_t.predictive_mixture(keys[1], student, q, model, rows.x_test, draws)
    return bound, student_t.predict(student, q, model, rows.x_test).mean, mixture.log_density(rows.y_test)


def gaussian_contestant(rows: Rows, plan: Plan, settings: Settings) -> Contestant:
    """The stochastic variational Gaussian process with the same inducing inputs."""
    process, optimiser = InducingProcess(Matern52(), inducing_noise=1e-4), optax.adam(MODEL_RATE)
    start = sparse.init(optimiser, process.initial(rows.inputs))
    batch = min(settings.batch, len(rows.y))

    def advance(key: Key[Array, ""], state: sparse.State) -> sparse.State:
        return sparse.run(key, process, optimiser, state, rows.x, rows.y, batch, settings.chunk, plan.rate)[0]

    return Contestant(rows, start, advance, partial(_look_at_gaussian, process, rows))


@partial(jax.jit, static_argnames=("process",))
def _look_at_gaussian(process: InducingProcess, rows: Rows, state: sparse.State) -> tuple[Array, Array, Array]:
    x, y = rows.x[rows.watched], rows.y[rows.watched]
    bound = sparse.bound(process, state.parameters, state.sites, x, y, len(rows.y) / len(rows.watched))
    found = sparse.predict(process, state, rows.x_test).noisy(jnp.exp(state.parameters.log_noise))
    return bound, found.mean, found.log_density(rows.y_test)


def race(runner: Contestant, settings: Settings, plan: Plan) -> list[Look]:
    """The curve until the time is spent, or until a number is not finite; compiled first."""
    key, state = jax.random.key(plan.seed), runner.start
    jax.block_until_ready(runner.advance(key, state))
    looks = [_measured(runner, state, 0.0, 0)]
    spent, steps, due = 0.0, 0, 0.0
    while spent < settings.seconds and looks[-1]["loss"] is not None:
        begun = time.process_time()
        state = jax.block_until_ready(runner.advance(jax.random.fold_in(key, steps), state))
        spent, steps = spent + time.process_time() - begun, steps + settings.chunk
        if spent >= min(due, settings.seconds):
            looks.append(_measured(runner, state, spent, steps))
            due = spent + settings.seconds / LOOKS
    return looks


def _measured(runner: Contestant, state: PyTree, seconds: float, steps: int) -> Look:
    """Negative bound a training row, test MSE and NLL; none of them where one is not finite."""
    rows, (bound, mean, log_density) = runner.rows, runner.look(state)
    mse = jnp.mean((mean - rows.y_test) ** 2)
    numbers = [float(value) for value in (-bound / len(rows.y), mse, -jnp.mean(log_density))]
    loss, error, nll = numbers if all(map(math.isfinite, numbers)) else (None, None, None)
    return Look(seconds=seconds, steps=steps, loss=loss, mse=error, nll=nll)


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
