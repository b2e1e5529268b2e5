"""Intervals of regression with few points: hyper-parameters averaged over, or those of largest evidence.

    taskset -c 0 python benchmarks/few_point_intervals.py [--data gp elevators ...] [--points 2 3 ...] [--out DIR]

A task is so many labelled rows by chance and 50 others: training rows of fold 0 of a UCI table (standardised), or `gp`,
a draw of a process on [-2, 2] with log length-scale N(0, 0.6^2), variance 9, mean 10 and noise of a variance of 0.001,
0.01, 0.1 or 0.5 times that. `average` and `best` are `FewShotRegressor` with average=True and average=False;
`scikit-learn` is `GaussianProcessRegressor` with a scale, an RBF and a noise, two restarts and `normalize_y`.

Columns: share of labels inside the central 95% of the normal prediction, +- 1.96 standard errors over tasks; mean and
median over tasks of its NLL; root mean square error; all in units of the table; median seconds of a fit with its
prediction. DIR has results.json and table.md.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from fewshot import FewShotRegressor
from fewshot.runners.cli import processor
from fewshot.tasks import uci

QUERIES, QUANTILE = 50, 1.959964
HEADER = ["data", "points", "hyper-parameters", "inside 95%", "NLL, mean", "NLL, median", "RMSE", "seconds"]
Rows = tuple[np.ndarray, np.ndarray]


def other() -> GaussianProcessRegressor:
    """scikit-learn's regressor of the same model."""
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * RBF(1.0, (1e-2, 1e2)) + WhiteKernel(0.1, (1e-6, 1e1))
    return GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)


MODELS: dict[str, Callable[[], FewShotRegressor | GaussianProcessRegressor]] = {
    "average": lambda: FewShotRegressor(average=True),
    "best": lambda: FewShotRegressor(average=False),
    "scikit-learn": other,
}


def main() -> None:
    """Run all models on all tasks, print and keep the table."""
    arguments = parse()
    processor.tune()
    warnings.simplefilter("ignore")  # scikit-learn's, of hyper-parameters at their bounds
    rows = []
    for data in arguments.data:
        draw = drawn if data == "gp" else rows_of(data)
        for points in arguments.points:
            tasks = [
                draw(np.random.default_rng([points, number]), points + QUERIES) for number in range(arguments.tasks)
            ]
            for name in arguments.models:
                rows.append({"data": data, "points": points, "model": name} | scored(MODELS[name], tasks, points))
                print(rows[-1], flush=True)
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps({"tasks": arguments.tasks, "rows": rows}, indent=1) + "\n")
        (out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = ["gp", *uci.SOURCES]
    parser.add_argument("--data", nargs="+", default=data, choices=data)
    parser.add_argument("--points", nargs="+", type=int, default=[2, 3, 5, 8, 12, 25, 50])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def drawn(rng: np.random.Generator, count: int) -> Rows:
    """So many points of one draw of a process."""
    x = rng.uniform(-2, 2, size=(count, 1))
    length, noise = np.exp(0.6 * rng.normal()), rng.choice([0.001, 0.01, 0.1, 0.5])
    covariance = np.exp(-0.5 * ((x - x.T) / length) ** 2) + noise * np.eye(count)
    values, vectors = np.linalg.eigh(covariance)
    return x, 10 + 3 * vectors @ (np.sqrt(np.maximum(values, 0)) * rng.normal(size=count))


def rows_of(table_name: str) -> Callable[[np.random.Generator, int], Rows]:
    """So many training rows of fold 0 of a table, by chance."""
    fold = uci.load_fold(table_name, 0)

    def draw(rng: np.random.Generator, count: int) -> Rows:
        chosen = rng.choice(len(fold.y), count, replace=False)
        return np.asarray(fold.x[chosen], np.float64), np.asarray(fold.y[chosen], np.float64)

    return draw


def scored(
    make: Callable[[], FewShotRegressor | GaussianProcessRegressor], tasks: list[Rows], points: int
) -> dict[str, float]:
    """Means over tasks, each with its first points labelled."""
    inside, nll, squares, seconds = [], [], [], []
    for x, y in tasks:
        begun = time.perf_counter()
        mean, deviation = make().fit(x[:points], y[:points]).predict(x[points:], return_std=True)
        seconds.append(time.perf_counter() - begun)
        away = (y[points:] - mean) / deviation
        inside.append(np.mean(np.abs(away) < QUANTILE))
        nll.append(np.mean(0.5 * away**2 + np.log(deviation) + 0.5 * np.log(2 * np.pi)))
        squares.append(np.mean((y[points:] - mean) ** 2))
    return {
        "inside": float(np.mean(inside)),
        "inside_error": float(QUANTILE * np.std(inside, ddof=1) / np.sqrt(len(inside))),
        "nll": float(np.mean(nll)),
        "median_nll": float(np.median(nll)),
        "rmse": float(np.sqrt(np.mean(squares))),
        "seconds": float(np.median(seconds)),
    }


def table(rows: list[dict]) -> str:
    """Markdown of all rows."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        numbers = [f"{row[name]:.{digits}f}" for name, digits in (("nll", 2), ("median_nll", 2), ("rmse", 3))]
        interval = f"{100 * row['inside']:.1f} +- {100 * row['inside_error']:.1f}%"
        cells = [row["data"], str(row["points"]), row["model"], interval, *numbers]
        lines.append([*cells, f"{row['seconds']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
