"""How an exact process should learn its kernel: on how many rows, for how long. Training rows of fold 0 only.

    taskset -c 0 python benchmarks/regression_choice.py [--data protein elevators energy] [--seeds 0 1] [--out DIR]

A fifth of the training rows, at most 2,000, is held out by chance; of the others at most --rows are conditioned on. A
plan 500:25+1000:10 is 25 iterations of L-BFGS-B on 500 of these rows, then 10 on 1,000, from where the first ended.
`shrunk` adds a prior to learning, N(0, 1) of every log weight. Columns: NLL of held-out rows in standardised units;
log p(y) of all rows that are conditioned on, a row; noise variance; processor seconds of learning, with what was not
compiled before. DIR has results.json and table.md.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from regression import Answer, scores

from fewshot.inference import many_points
from fewshot.inference.many_points import Exact
from fewshot.models.inducing import Parameters
from fewshot.models.kernels import Matern52
from fewshot.runners.cli import processor
from fewshot.tasks import uci

PLANS = ("500:40", "500:40 shrunk", "1000:40", "500:25+1000:15", "500:25+1500:8", "500:25+1000:10+2000:5")
HEADER = ["data", "seed", "plan", "NLL held out", "log p(y) a row", "noise", "learning, s"]
HELD_OUT = 2000


@dataclass(frozen=True)
class Shrunk(Exact):
    """An exact process whose log weights have a standard normal prior while it learns."""

    def bound(self, parameters: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
        """log p(y) + log p(log weights), but for a constant."""
        return super().bound(parameters, x, y) - 0.5 * jnp.sum(parameters.log_weights**2)


def main() -> None:
    """Run all plans on all data, print and keep the table."""
    arguments = parse()
    processor.tune()
    rows: list[dict[str, object]] = []
    for seed in arguments.seeds:
        for data in arguments.data:
            for plan in arguments.plans:
                with jax.enable_x64(True):
                    rows.append(tried(plan, data, seed, arguments.rows))
                print(rows[-1], flush=True)
    rows.sort(key=lambda row: (str(row["data"]), str(row["seed"]), arguments.plans.index(row["plan"])))
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        (out / "table.md").write_text(table(rows) + "\n")
    print(table(rows))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=list(uci.SOURCES), choices=list(uci.SOURCES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--plans", nargs="+", default=list(PLANS))
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def tried(plan: str, data: str, seed: int, most: int) -> dict[str, object]:
    """One plan: what it finds, how that predicts held-out training rows, and what it costs."""
    fold = uci.load_fold(data, 0)
    order = np.random.default_rng(seed).permutation(len(fold.y))
    held, used = np.split(order, [min(HELD_OUT, len(order) // 5)])
    x, y = jnp.asarray(fold.x[used[:most]]), jnp.asarray(fold.y[used[:most]])
    method = Shrunk(Matern52()) if plan.endswith("shrunk") else Exact(Matern52())
    begun = time.process_time()
    found = method.initial(x)
    for stage in plan.split()[0].split("+"):
        rows, steps = map(int, stage.split(":"))
        found, _ = many_points.learn(method, steps, found, x[:rows], y[:rows])
    learned = time.process_time() - begun
    posterior = many_points.condition(method, found, x, y)
    answer = many_points.predict(method, found, posterior.state, jnp.asarray(fold.x[held]))
    return {
        "data": data,
        "seed": seed,
        "plan": plan,
        "nll": scores(Answer(len(y), np.asarray(answer.mean), np.asarray(answer.variance)), fold.y[held])["nll"],
        "evidence": float(posterior.bound) / len(y),
        "noise": float(np.exp(found.log_noise)),
        "seconds": learned,
    }


def table(rows: list[dict[str, object]]) -> str:
    """Markdown of all rows."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("nll", "evidence", "noise")]
        lines.append([str(row["data"]), str(row["seed"]), str(row["plan"]), *numbers, f"{row['seconds']:.1f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
