"""UCI regression with many rows: this project's methods beside other libraries, least squares as what they must beat.

    taskset -c 0 python benchmarks/regression.py [--data energy elevators protein] [--folds 0 1 2] [--out DIR]

Standardised RMSE and NLL of test rows, and processor seconds of learning and prediction, compilation (and what a
library imports) included; of `exact` also those of a second time, when nothing is compiled. Exact processes condition
on at most --rows. Other libraries' learn on --learn rows; ours, whose iterations cost less, ends on --staged-learn of
them (chosen by training rows: benchmarks/regression_choice.py). Sparse ones see all rows. All have a weight for every
input, a Matern-5/2 kernel and double precision. What learns by batches has the same steps, batch, number of inducing
points and first rate; what learns by L-BFGS-B the same number of iterations (GPyTorch brings Adam). Libraries that are
not installed are named and left out. Rows are written to DIR/results.json as they come, and rows that are there are
kept; table.md is their table.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import regression_peers
from peers import installed

from fewshot import SparseRegressor
from fewshot.runners.cli import processor
from fewshot.tasks import uci

HEADER = ["data", "fold", "method", "rows", "RMSE", "NLL", "seconds", "again"]


class Answer(NamedTuple):
    """How many rows were used, and means [Q] and variances [Q] of test targets."""

    rows: int
    mean: np.ndarray
    variance: np.ndarray


Contestant = Callable[[uci.Fold, argparse.Namespace], Answer]


def main() -> None:
    """Run what is missing, print the table and write both files."""
    arguments = parse()
    processor.tune()
    rows: list[dict[str, object]] = []
    out = Path(arguments.out) if arguments.out else None
    if out and (out / "results.json").exists():
        rows = json.loads((out / "results.json").read_text())["rows"]
    methods = {name: METHODS[name] for name in arguments.methods if name not in PEERS or installed(PEERS[name])}
    for number in arguments.folds:
        for data in arguments.data:
            compare(data, number, methods, rows, arguments, out)
    rows.sort(key=lambda row: (str(row["data"]), str(row["fold"]), list(METHODS).index(str(row["method"]))))
    keep(out, rows, arguments)
    print(table(rows))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(uci.SOURCES), choices=list(uci.SOURCES))
    parser.add_argument("--folds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rows", type=int, default=4000, help="of exact regression, at most")
    parser.add_argument("--learn", type=int, default=500, help="rows on which other exact processes learn their kernel")
    parser.add_argument("--staged-learn", type=int, default=2000, help="rows on which ours ends to learn it")
    parser.add_argument("--steps", type=int, default=40, help="of L-BFGS-B on the bound of all rows it learns from")
    parser.add_argument("--adam-steps", type=int, default=100, help="of GPyTorch's exact process, in their place")
    parser.add_argument("--rate", type=float, default=0.1, help="of these")
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--sparse-learn", type=int, default=2000, help="rows on which titsias learns")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batch-steps", type=int, default=300)
    parser.add_argument("--batch-rate", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def compare(
    data: str,
    number: int,
    methods: dict[str, Contestant],
    rows: list[dict[str, object]],
    arguments: argparse.Namespace,
    out: Path | None,
) -> None:
    """The rows of one fold that are missing, each kept as soon as it is there."""
    there = {row["method"] for row in rows if (row["data"], row["fold"]) == (data, number)}
    fold = uci.load_fold(data, number)
    for name, method in methods.items():
        if name in there:
            continue
        answer, seconds = timed(method, fold, arguments)
        again = timed(method, fold, arguments)[1] if name == "exact" else None
        found = {**scores(answer, fold.y_test), "seconds": seconds, "again": again}
        rows.append({"data": data, "fold": number, "method": name, "rows": answer.rows, **found})
        print(rows[-1], flush=True)
        keep(out, rows, arguments)


def timed(method: Contestant, fold: uci.Fold, arguments: argparse.Namespace) -> tuple[Answer, float]:
    """What a method answers, and the processor seconds that it took."""
    begun = time.process_time()
    answer = method(fold, arguments)
    return answer, time.process_time() - begun


def keep(out: Path | None, rows: list[dict[str, object]], arguments: argparse.Namespace) -> None:
    """Both files, whole or not at all."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "methods")}
    for name, text in (
        ("results.json", json.dumps({"arguments": settings, "rows": rows}, indent=1)),
        ("table.md", table(rows)),
    ):
        part = out / f"{name}.part"
        part.write_text(text + "\n")
        os.replace(part, out / name)


def scores(answer: Answer, y: np.ndarray) -> dict[str, float]:
    """RMSE and mean negative log density of test targets."""
    mean, variance = (np.asarray(part, np.float64) for part in answer[1:])
    nll = 0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)
    return {"rmse": float(np.sqrt(np.mean((y - mean) ** 2))), "nll": float(nll.mean())}


def some_rows(fold: uci.Fold, arguments: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """A random choice of at most --rows training rows, in random order: the same for every exact process."""
    order = np.random.default_rng(arguments.seed).permutation(len(fold.y))[: arguments.rows]
    return fold.x[order], fold.y[order]


def least_squares(fold: uci.Fold, arguments: argparse.Namespace) -> Answer:
    """Linear, with the variance of its residuals."""
    del arguments
    x, new = (np.column_stack([part, np.ones(len(part))]) for part in (fold.x, fold.x_test))
    weights = np.linalg.lstsq(x, fold.y, rcond=None)[0]
    variance = np.mean((fold.y - x @ weights) ** 2)
    return Answer(len(x), new @ weights, np.full(len(new), variance))


def ours(method: str, fold: uci.Fold, arguments: argparse.Namespace) -> Answer:
    """The estimator of this project."""
    batches, exact = method == "stochastic", method == "exact"
    regressor = SparseRegressor(
        method=method,
        inducing=arguments.inducing,
        learning_rows=arguments.staged_learn if exact else arguments.sparse_learn,
        steps=arguments.batch_steps if batches else arguments.steps,
        rate=arguments.batch_rate,
        batch=arguments.batch,
        random_state=arguments.seed,
    )
    x, y = some_rows(fold, arguments) if exact else (fold.x, fold.y)
    mean, deviation = regressor.fit(x, y).predict(fold.x_test, return_std=True)
    return Answer(len(y), mean, deviation**2)


def peer(name: str, fold: uci.Fold, arguments: argparse.Namespace) -> Answer:
    """Another library."""
    exact = name != "GPyTorch, SVGP"
    x, y = some_rows(fold, arguments) if exact else (fold.x, fold.y)
    return Answer(len(y), *regression_peers.METHODS[name](x, y, fold.x_test, arguments))


PEERS = {"scikit-learn, exact": "scikit-learn", "GPyTorch, exact": "gpytorch", "GPyTorch, SVGP": "gpytorch"}
METHODS: dict[str, Contestant] = {
    "least squares": least_squares,
    "exact": lambda fold, arguments: ours("exact", fold, arguments),
    "titsias": lambda fold, arguments: ours("titsias", fold, arguments),
    "stochastic": lambda fold, arguments: ours("stochastic", fold, arguments),
    "scikit-learn, exact": lambda fold, arguments: peer("scikit-learn, exact", fold, arguments),
    "GPyTorch, exact": lambda fold, arguments: peer("GPyTorch, exact", fold, arguments),
    "GPyTorch, SVGP": lambda fold, arguments: peer("GPyTorch, SVGP", fold, arguments),
}


def table(rows: list[dict[str, object]]) -> str:
    """Markdown of all rows."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        again = row.get("again")
        seconds = [f"{row['seconds']:.1f}", "" if again is None else f"{again:.1f}"]
        numbers = [f"{row['rmse']:.3f}", f"{row['nll']:.3f}", *seconds]
        lines.append([str(row["data"]), str(row["fold"]), str(row["method"]), str(row["rows"]), *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
