"""Cost of inference as a task grows: labelled points N, classes C, tasks T, chains; and large tasks.

    taskset -c 0 python benchmarks/scaling.py [--only TITLE] [--quick | --limit n] [--repeats 3] [--json FILE]

Objective and gradient of merged tasks (float32, RBF kernel), as in inference_cost.py: milliseconds, megabytes of XLA's
temporaries, and the exponent with which the time grows from the row above (3 for N^3, 1 for linear).
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from inference_cost import Method, episode, gradient_of, hyperparameters
from timing import by_turns, markdown

from fewshot.inference.inner import cavi, cvi, exact, gibbs
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax


class Case(NamedTuple):
    """One size: ways, labelled images a class (all in the support), tasks in a batch, chains of Gibbs."""

    way: int
    shot: int
    tasks: int = 1
    chains: int = 4

    @property
    def points(self) -> int:
        return self.way * self.shot


CVI, EXACT, CAVI, GIBBS = "cvi, 3 steps", "exact", "logistic-softmax cavi, 2 steps", "one-vs-each Gibbs"
METHODS = (CVI, EXACT, CAVI, GIBBS)
# What varies, the cases, and the methods that they are run with.
TABLES: dict[str, tuple[str, Sequence[Case], Sequence[str]]] = {
    "N (C = 5)": ("points", [Case(5, shot) for shot in (5, 17, 50, 100, 200, 400)], METHODS[:3]),
    "N (C = 5), 4 chains": ("points", [Case(5, shot) for shot in (5, 17, 50, 100)], [GIBBS]),
    "C (N = 200)": ("way", [Case(way, 200 // way) for way in (2, 5, 20, 50)], METHODS),
    "T (C = 5, N = 85)": ("tasks", [Case(5, 17, tasks) for tasks in (1, 4, 16)], METHODS),
    "chains (C = 5, N = 85)": ("chains", [Case(5, 17, 1, chains) for chains in (1, 4, 20, 50)], [GIBBS]),
    "20-way 5-shot, merged with 16 queries a class": ("points", [Case(20, 21)], METHODS[:3]),
    "50-way 1-shot, merged with 16 queries a class": ("points", [Case(50, 17)], METHODS[:3]),
}


def main() -> None:
    arguments = parse()
    results: list[dict[str, object]] = []
    for title in [title for title in TABLES if title.startswith(arguments.only)]:
        varied, cases, methods = TABLES[title]
        kept = [case for case in cases if case.points * case.tasks * case.way <= arguments.limit]
        print(f"\n{title}\n")
        rows = [{"table": title, **row} for name in methods for row in measured(name, varied, kept, arguments.repeats)]
        results += rows
        print(report(varied, rows), flush=True)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


def measured(name: str, varied: str, cases: Sequence[Case], repeats: int) -> list[dict[str, object]]:
    """One row a case: time, memory, and the exponent of the growth since the case before."""
    rows: list[dict[str, object]] = []
    for case in cases:
        compiled, inputs = program(name, case)
        milliseconds = by_turns({"run": partial(compiled, *inputs)}, repeats)["run"].minimum
        size = getattr(case, varied)
        row = {
            "method": name,
            varied: size,
            "ms": milliseconds,
            "MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
        }
        if rows:  # growth since the case before
            row["exponent"] = math.log(milliseconds / rows[-1]["ms"]) / math.log(size / rows[-1][varied])
        rows.append(row)
        print(f"{name}, {case}: {milliseconds:.1f} ms", file=sys.stderr, flush=True)
    return rows


def program(name: str, case: Case) -> tuple[Any, tuple]:
    """The compiled gradient over a batch of tasks, and its arguments."""
    gradient = gradient_of(method(name, case.chains), case.way, case.shot, 0)
    x = episode(case.way, case.shot, 0)[0]
    values = (hyperparameters(), jnp.broadcast_to(x, (case.tasks, *x.shape)))
    inputs: tuple = (values, jax.random.split(jax.random.key(0), case.tasks))
    if case.tasks == 1:  # not batched, as in a training step: a batch of one costs up to three times as much
        inputs = (values[0], x), inputs[1][0]
    else:
        gradient = jax.vmap(gradient, ((None, 0), 0))
    return jax.jit(gradient).lower(*inputs).compile(), inputs


def method(name: str, chains: int) -> Method:
    """What the tables' names mean; Gibbs is trained by its evidence, one step from the prior."""
    return {
        CVI: Method(Softmax(), cvi, "elbo", 3, 6.0),
        EXACT: Method(LabelRegression(), exact, "elbo", 1, 4.0),
        CAVI: Method(LogisticSoftmax(), cavi, "elbo", 2, 6.0),
        GIBBS: Method(OneVsEach(), partial(gibbs, chains=chains), "evidence", 1, 30.0),
    }[name]


def report(varied: str, rows: Sequence[dict[str, object]]) -> str:
    lines = []
    for row in rows:
        exponent = f"{row['exponent']:.1f}" if "exponent" in row else "-"
        lines.append([row["method"], str(row[varied]), f"{row['ms']:.1f}", f"{row['MB']:.1f}", exponent])
    return markdown(["method", varied, "ms (minimum)", "temporaries, MB", "exponent"], lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=1_000_000, help="largest C N T that is run")
    parser.add_argument("--quick", action="store_const", const=1_000, dest="limit")
    parser.add_argument("--only", metavar="TITLE", default="", help="tables whose titles begin so, such as T or 50-way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
