"""Optimisers of the sparse variational Student-t process at one time budget: negative bound and test error.

    python benchmarks/student_t.py [--data energy elevators protein] [--seconds 60] [--rates 0.1 0.01] [--out DIR]

Every method trains q(u) by its own optimiser and the model by Adam, from the same start and on the same batches, at
each rate in turn; its row is the rate with the least negative bound on training rows. Compilation and evaluation are
not timed. `--outliers 0.05` moves that share of the training targets by ten deviations. A sparse Gaussian process
(natural gradient, the same points and time) stands beside them. Writes results.json and table.md.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fewshot.inference import sparse, student_t
from fewshot.inference.student_t import SparseStudent
from fewshot.models.inducing import InducingProcess, chosen_inputs
from fewshot.models.kernels import Matern52
from fewshot.tasks import uci

METHODS = ("natural", "sgd", "adam", "amsgrad", "adagrad")
RATES = {
    "natural": (0.1, 0.03),
    "sgd": (1e-4, 1e-5),
    "adam": (3e-2, 1e-2),
    "amsgrad": (3e-2, 1e-2),
    "adagrad": (0.3, 0.1),
}
MODEL_RATE, ROWS, OUTLIER = 1e-2, 2000, 10.0
HEADER = ["data", "method", "rate", "steps", "-bound/N at 1/4", "at 1/2", "at the end", "test MSE", "test NLL"]


class Problem(NamedTuple):
    """Training and test rows on the device, and the rows [R] on which the bound is watched."""

    x: jax.Array
    y: jax.Array
    x_test: jax.Array
    y_test: jax.Array
    watched: jax.Array


class Contestant(NamedTuple):
    """What is timed and what is looked at: advance(key, state) takes a chunk of steps, measure(state) three numbers."""

    start: Any
    advance: Callable[[jax.Array, Any], Any]
    measure: Callable[[Any], dict[str, float]]


def main() -> None:
    """Run all, print the table and write both files."""
    arguments = parse()
    rows = [row for name in arguments.data for row in compare(name, uci.load_fold(name, arguments.fold), arguments)]
    page = table(rows)
    print(page)
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps({"arguments": vars(arguments), "rows": rows}, indent=1) + "\n")
        (out / "table.md").write_text(page + "\n")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(uci.SOURCES), choices=list(uci.SOURCES))
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, help="rates for every method (default: two of its own)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, for each method and rate")
    parser.add_argument("--chunk", type=int, default=50, help="steps between looks at the clock")
    parser.add_argument("--inducing", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--outliers", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def compare(name: str, fold: uci.Fold, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row for each method on one fold, and the Gaussian process."""
    problem = prepare(fold, arguments)
    found = []
    for method in arguments.methods:
        tried = []
        for rate in arguments.rates or RATES[method]:
            contestant = student_contestant(problem, method, rate, arguments)
            tried.append({"data": name, "method": method, "rate": rate, **race(contestant, arguments)})
        found.append(min(tried, key=final_loss))
    gaussian = race(gaussian_contestant(problem, arguments), arguments)
    return [*found, {"data": name, "method": "gaussian process", "rate": 0.1, **gaussian}]


def final_loss(row: dict[str, object]) -> float:
    """What methods and rates are ranked by; a run that diverged comes last."""
    loss = row["curve"][-1]["loss"]
    return loss if math.isfinite(loss) else math.inf


def prepare(fold: uci.Fold, arguments: argparse.Namespace) -> Problem:
    """Float32 arrays, with planted outliers where asked for."""
    rng = np.random.default_rng(arguments.seed)
    y = fold.y + OUTLIER * (rng.random(len(fold.y)) < arguments.outliers) * rng.choice([-1.0, 1.0], len(fold.y))
    watched = rng.permutation(len(y))[:ROWS]
    arrays = (jnp.asarray(part, jnp.float32) for part in (fold.x, y, fold.x_test, fold.y_test))
    return Problem(*arrays, jnp.asarray(watched))


def student_contestant(problem: Problem, name: str, rate: float, arguments: argparse.Namespace) -> Contestant:
    """The Student-t process, q(u) by the named optimiser."""
    student = SparseStudent(Matern52())
    method = student_t.methods(rate, MODEL_RATE)[name]
    start = student_t.init(method, *student.initial(chosen_inputs(problem.x, arguments.inducing)))
    batch, points = min(arguments.batch, len(problem.y)), len(problem.y)

    def advance(key: jax.Array, state: student_t.State) -> student_t.State:
        return student_t.run(key, student, method, state, problem.x, problem.y, batch, arguments.chunk)[0]

    @jax.jit
    def look(state: student_t.State) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(arguments.seed))
        x, y = problem.x[problem.watched], problem.y[problem.watched]
        bound = student_t.elbo(keys[0], student, state.q, state.model, x, y, points / len(problem.watched))
        mean = student_t.predict(student, state.q, state.model, problem.x_test).mean
        mixture = student_t.predictive_mixture(keys[1], student, state.q, state.model, problem.x_test)
        return bound, mean, mixture.log_density(problem.y_test)

    return Contestant(start, advance, partial(measured, look, problem))


def gaussian_contestant(problem: Problem, arguments: argparse.Namespace) -> Contestant:
    """The stochastic variational Gaussian process with as many inducing points."""
    process, optimiser = InducingProcess(Matern52(), inducing_noise=1e-4), optax.adam(MODEL_RATE)
    start = sparse.init(optimiser, process.initial(chosen_inputs(problem.x, arguments.inducing)))
    batch, points = min(arguments.batch, len(problem.y)), len(problem.y)

    def advance(key: jax.Array, state: sparse.State) -> sparse.State:
        return sparse.run(key, process, optimiser, state, problem.x, problem.y, batch, arguments.chunk)[0]

    @jax.jit
    def look(state: sparse.State) -> tuple[jax.Array, ...]:
        x, y = problem.x[problem.watched], problem.y[problem.watched]
        bound = sparse.bound(process, state.parameters, state.sites, x, y, points / len(problem.watched))
        found = sparse.predict(process, state, problem.x_test).noisy(jnp.exp(state.parameters.log_noise))
        return bound, found.mean, found.log_density(problem.y_test)

    return Contestant(start, advance, partial(measured, look, problem))


def measured(look: Callable[[Any], tuple[jax.Array, ...]], problem: Problem, state: Any) -> dict[str, float]:
    """Negative bound a training row, test MSE and NLL."""
    bound, mean, log_density = look(state)
    mse = jnp.mean((mean - problem.y_test) ** 2)
    return {"loss": float(-bound / len(problem.y)), "mse": float(mse), "nll": float(-jnp.mean(log_density))}


def race(contestant: Contestant, arguments: argparse.Namespace) -> dict[str, object]:
    """The curve over training seconds, measured at least twenty times; compiled first."""
    state = contestant.start
    jax.block_until_ready(contestant.advance(jax.random.key(arguments.seed), state))
    curve = [{"seconds": 0.0, "steps": 0, **contestant.measure(state)}]
    spent, steps, due = 0.0, 0, 0.0
    while not steps or spent < arguments.seconds:
        begun = time.perf_counter()
        state = jax.block_until_ready(
            contestant.advance(jax.random.fold_in(jax.random.key(arguments.seed), steps), state)
        )
        spent, steps = spent + time.perf_counter() - begun, steps + arguments.chunk
        if spent >= due:
            curve.append({"seconds": spent, "steps": steps, **contestant.measure(state)})
            due = spent + arguments.seconds / 20
    if curve[-1]["steps"] < steps:
        curve.append({"seconds": spent, "steps": steps, **contestant.measure(state)})
    return {"curve": curve}


def at(curve: list[dict[str, float]], share: float) -> dict[str, float]:
    """The last look within a share of the time."""
    limit = share * curve[-1]["seconds"]
    return [point for point in curve if point["seconds"] <= limit][-1]


def table(rows: list[dict[str, object]]) -> str:
    """Markdown of all rows."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        curve, end = row["curve"], row["curve"][-1]
        losses = [f"{at(curve, share)['loss']:.3f}" for share in (0.25, 0.5, 1.0)]
        numbers = [f"{row['rate']:g}", str(end["steps"]), *losses, f"{end['mse']:.4f}", f"{end['nll']:.3f}"]
        lines.append([row["data"], row["method"], *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
