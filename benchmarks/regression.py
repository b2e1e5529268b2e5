"""UCI regression: exact on few rows, sparse on all, least squares as what they must beat.

    python benchmarks/regression.py [--data energy elevators protein] [--folds 0 1 2] [--out DIR]

Standardised RMSE, NLL and seconds of each fold, compilation included. `exact` learns its kernel on --learn rows by the
marginal likelihood and conditions on at most --rows; `sparse` learns from minibatches of all rows, and then takes the
best sites for all of them. Both have a weight for every input. Writes results.json and table.md.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fewshot.inference import sparse
from fewshot.models import regression
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.inducing import InducingProcess, Parameters, chosen_inputs
from fewshot.models.kernels import Kernel, Matern52
from fewshot.models.regression import Prediction
from fewshot.tasks import uci

KERNEL, EXACT_RATE, SPARSE_RATE = Matern52(), 5e-2, 1e-2
HEADER = ["data", "fold", "method", "rows", "RMSE", "NLL", "seconds"]


def main() -> None:
    """Run all, print the table and write both files."""
    arguments = parse()
    folds = [(name, number) for name in arguments.data for number in arguments.folds]
    rows = [row for name, number in folds for row in compare(name, number, uci.load_fold(name, number), arguments)]
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
    parser.add_argument("--folds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=4000, help="of exact regression, at most")
    parser.add_argument("--learn", type=int, default=1000, help="rows on which exact regression learns its kernel")
    parser.add_argument("--exact-steps", type=int, default=100)
    parser.add_argument("--inducing", type=int, default=256)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--sparse-steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def compare(name: str, number: int, fold: uci.Fold, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Three rows for one fold."""
    found = []
    for method in (least_squares, exact, sparse_process):
        begun = time.perf_counter()
        rows, prediction = method(fold, arguments)
        score = scores(prediction, fold.y_test)
        seconds = time.perf_counter() - begun
        label = method.__name__.replace("_", " ")
        found.append({"data": name, "fold": number, "method": label, "rows": rows, **score, "seconds": seconds})
    return found


def scores(prediction: Prediction, y: np.ndarray) -> dict[str, float]:
    """RMSE and mean negative log density of test targets."""
    mean, variance = (np.asarray(part, np.float64) for part in prediction)
    nll = 0.5 * (np.log(2 * np.pi * variance) + (y - mean) ** 2 / variance)
    return {"rmse": float(np.sqrt(np.mean((y - mean) ** 2))), "nll": float(nll.mean())}


def least_squares(fold: uci.Fold, arguments: argparse.Namespace) -> tuple[int, Prediction]:
    """Linear, with the variance of its residuals."""
    del arguments
    x, new = (np.column_stack([part, np.ones(len(part))]) for part in (fold.x, fold.x_test))
    weights = np.linalg.lstsq(x, fold.y, rcond=None)[0]
    variance = np.mean((fold.y - x @ weights) ** 2)
    return len(x), Prediction(jnp.asarray(new @ weights), jnp.full(len(new), variance))


def exact(fold: uci.Fold, arguments: argparse.Namespace) -> tuple[int, Prediction]:
    """Kernel learned on some rows, posterior of more."""
    order = np.random.default_rng(arguments.seed).permutation(len(fold.y))[: arguments.rows]
    x, y, new = (jnp.asarray(part, jnp.float32) for part in (fold.x[order], fold.y[order], fold.x_test))
    few = slice(0, arguments.learn)
    parameters = learn(x[few], y[few], arguments.exact_steps)
    weights = jnp.exp(parameters.log_weights)
    found = jax.jit(regression.regress)(prior_of(parameters, x), y, jnp.exp(parameters.log_noise))
    cross = KERNEL.gram(parameters.hyper, new * weights, x * weights)
    query = Query(jnp.zeros((1, len(new))), cross, KERNEL.diagonal(parameters.hyper, new))
    return len(y), regression.predict(found.posterior, query).noisy(jnp.exp(parameters.log_noise))


def prior_of(parameters: Parameters, x: jax.Array) -> GaussianPrior:
    """N(0, K) of weighted inputs."""
    weighted = x * jnp.exp(parameters.log_weights)
    return GaussianPrior(jnp.zeros((1, len(x)), x.dtype), KERNEL.gram(parameters.hyper, weighted, weighted))


def learn(x: jax.Array, y: jax.Array, steps: int) -> Parameters:
    """Adam on the marginal likelihood (P2)."""
    optimiser = optax.adam(EXACT_RATE)
    start = InducingProcess(KERNEL).initial(x[:1])

    def loss(parameters: Parameters) -> jax.Array:
        return -regression.regress(prior_of(parameters, x), y, jnp.exp(parameters.log_noise)).log_evidence / len(y)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        parameters, memory = carry
        changes, memory = optimiser.update(jax.grad(loss)(parameters), memory)
        return (optax.apply_updates(parameters, changes), memory), None

    return jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps)[0])((start, optimiser.init(start)))[0]


def sparse_process(fold: uci.Fold, arguments: argparse.Namespace) -> tuple[int, Prediction]:
    """Minibatches of all rows, then the best sites for all of them at once."""
    kernel: Kernel = KERNEL
    x, y, new = (jnp.asarray(part, jnp.float32) for part in (fold.x, fold.y, fold.x_test))
    process, optimiser = InducingProcess(kernel, inducing_noise=1e-4), optax.adam(SPARSE_RATE)
    state = sparse.init(optimiser, process.initial(chosen_inputs(x, min(arguments.inducing, len(y)))))
    batch, key = min(arguments.batch, len(y)), jax.random.key(arguments.seed)
    state, _ = sparse.run(key, process, optimiser, state, x, y, batch, arguments.sparse_steps)
    sites, _ = jax.jit(sparse.best_sites, static_argnums=0)(process, state, x, y)
    found = sparse.predict(process, state._replace(sites=sites), new)
    return len(y), found.noisy(jnp.exp(state.parameters.log_noise))


def table(rows: list[dict[str, object]]) -> str:
    """Markdown of all rows."""
    lines = [HEADER, ["---"] * len(HEADER)]
    for row in rows:
        numbers = [f"{row['rmse']:.3f}", f"{row['nll']:.3f}", f"{row['seconds']:.0f}"]
        lines.append([row["data"], str(row["fold"]), row["method"], str(row["rows"]), *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    main()
