"""What one thread of linear algebra is worth to the estimators, in turns with as many as there are cores.

    python benchmarks/blas_threads.py [--beside 1] [--repeats 3] [--cases NAME ...] [--out FILE.md]

Both numbers are set as a user would, so that estimators leave them alone (`fewshot/threads.py`). `exact` learns for
three steps, from at most 2,000 rows, and is conditioned on all.

Classes lie around random centres in 32 dimensions with noise of the same size; labels of regression are a noisy sine of
the first of five inputs. `--beside` so many other processes compute meanwhile. Times are medians of wall time after a
first fit and prediction, which compile; a prediction is of 100 rows.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from fewshot import FewShotClassifier, FewShotRegressor, SparseRegressor
from fewshot.evaluation.text import format_markdown
from fewshot.threads import BLAS_THREADS, blas, cores

QUERIES, WIDTH = 100, 32
SPIN = "while True: pass"
Estimator = FewShotClassifier | FewShotRegressor | SparseRegressor
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y, and rows to predict


def classes(ways: int, shot: int) -> Rows:
    """A task of so many classes with `shot` labelled examples each."""
    random = np.random.default_rng(0)
    centres = random.normal(size=(ways, WIDTH))
    y, asked = np.repeat(np.arange(ways), shot), random.integers(ways, size=QUERIES)
    x, new = (centres[labels] + random.normal(size=(len(labels), WIDTH)) for labels in (y, asked))
    return x.astype(np.float32), y, new.astype(np.float32)


def rows(number: int) -> Rows:
    """So many labelled rows of a curve."""
    random = np.random.default_rng(0)
    x, new = random.normal(size=(number, 5)), random.normal(size=(QUERIES, 5))
    return x, np.sin(x[:, 0]) + 0.1 * random.normal(size=number), new


exact = partial(SparseRegressor, method="exact", steps=3)
CASES: dict[str, tuple[Callable[[], Estimator], Rows]] = {
    "classifier, 5-way 1-shot": (FewShotClassifier, classes(5, 1)),
    "classifier, 5-way 5-shot": (FewShotClassifier, classes(5, 5)),
    "classifier, 20-way 1-shot": (FewShotClassifier, classes(20, 1)),
    "classifier, 20-way 5-shot": (FewShotClassifier, classes(20, 5)),
    "regressor, 30 rows": (FewShotRegressor, rows(30)),
    "regressor, 200 rows": (FewShotRegressor, rows(200)),
    "sparse regressor, 1,000 rows": (SparseRegressor, rows(1_000)),
    "exact, 500 rows": (exact, rows(500)),
    "exact, 1,000 rows": (exact, rows(1_000)),
    "exact, 2,000 rows": (exact, rows(2_000)),
    "exact, 4,000 rows": (exact, rows(4_000)),
}


def main(given: list[str] | None = None) -> None:
    """Time all cases, print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, default=0, help="other processes that compute meanwhile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    with busy(arguments.beside):
        found = [row(name, *CASES[name], arguments.repeats) for name in arguments.cases]
    times = ["one thread, s", "all, s", "all / one"]
    header = ["estimator", *(f"{what}, {time}" for what in ("fit", "prediction") for time in times)]
    table = format_markdown(header, found)
    print(table)
    if arguments.out:
        arguments.out.write_text(table)


def row(name: str, make: Callable[[], Estimator], data: Rows, repeats: int) -> list[str]:
    """Medians of a fit and of a prediction, in turns."""
    estimator = make()
    timed(estimator, data)
    one, every = [], []
    for _ in range(repeats):
        for number, found in ((cores(), every), (1, one)):
            with threads(number):
                found.append(timed(estimator, data))
    cells = [name]
    for few, many in zip(zip(*one, strict=True), zip(*every, strict=True), strict=True):
        quick, slow = statistics.median(few), statistics.median(many)
        cells += [f"{quick:.3f}", f"{slow:.3f}", f"{slow / quick:.1f}"]
    print(" ".join(cells), file=sys.stderr, flush=True)
    return cells


def timed(estimator: Estimator, data: Rows) -> tuple[float, float]:
    """Seconds of a fit and of a prediction."""
    x, y, new = data
    start = time.perf_counter()
    estimator.fit(x, y)
    fitted = time.perf_counter()
    (estimator.predict_proba if isinstance(estimator, FewShotClassifier) else estimator.predict)(new)
    return fitted - start, time.perf_counter() - fitted


@contextmanager
def threads(number: int):
    """As where a user has asked for so many; linear algebra begins with one for each core."""
    os.environ[BLAS_THREADS] = str(number)
    with blas().limit(limits=number):
        yield


@contextmanager
def busy(number: int):
    """So many processes compute meanwhile."""
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN]))
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
