"""Cost of regression against the number of rows: one bound with its gradient, and what the posterior mean misses.

    taskset -c 0 python benchmarks/regression_cost.py [--rows 100 1000 3000 10000 100000] [--out DIR]

Two inputs, a function drawn from an RBF kernel by its spectrum, noise variance 0.05; all methods at the true
hyper-parameters and in double precision. Processor seconds of one call after compilation, of the posterior with 500
means, and the root mean square of posterior mean less truth. Writes results.json, table.md and cost.png.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import markdown

from fewshot.inference.many_points import Exact, Features, Inducing, Method
from fewshot.inference.structured import GridProcess, random_probes
from fewshot.models.grids import Grid
from fewshot.models.inducing import InducingProcess, Parameters
from fewshot.models.kernels import RBF
from fewshot.models.random_features import RandomFourier
from fewshot.runners.cli import processor

HEADER = ["method", "rows", "seconds of a gradient", "seconds of the posterior and 500 means", "error of the mean"]
LENGTH, NOISE, WAVES, NEW = 0.25, 0.05, 2000, 500


class Data(NamedTuple):
    """Rows and targets, new inputs and the true function there."""

    x: jax.Array
    y: jax.Array
    new: jax.Array
    truth: np.ndarray


class Contestant(NamedTuple):
    """gradient(parameters, x, y) and means(parameters, x, y, new), both compiled; the most rows it is given."""

    gradient: Callable[..., Parameters]
    means: Callable[..., jax.Array]
    most: int
    start: Callable[[jax.Array], Parameters]


def main() -> None:
    """Run all, print the table and write the files."""
    arguments = parse()
    processor.tune()
    with jax.enable_x64(True):
        rows = [row for count in arguments.rows for row in measure(count, arguments)]
    rows.sort(key=lambda row: (str(row["method"]), row["rows"]))
    numbers = [[f"{row['gradient']:.3g}", f"{row['posterior']:.3g}", f"{row['error']:.4f}"] for row in rows]
    page = markdown(
        HEADER, [[row["method"], f"{row['rows']:,}", *part] for row, part in zip(rows, numbers, strict=True)]
    )
    print(page)
    if arguments.out:
        out = Path(arguments.out)
        out.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(arguments).items() if name != "out"}
        (out / "results.json").write_text(json.dumps({"arguments": settings, "rows": rows}, indent=1) + "\n")
        (out / "table.md").write_text(page + "\n")
        draw(rows, out / "cost.png")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100, 1000, 3000, 10_000, 100_000])
    parser.add_argument("--most-exact", type=int, default=4000, help="rows of exact regression")
    parser.add_argument("--inducing", type=int, default=128, help="inducing points, and features")
    parser.add_argument("--grid", type=int, default=32, help="grid points along each of the two axes")
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--lanczos", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=1e-2, help="of conjugate gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def generate(count: int, seed: int) -> Data:
    """A draw from an RBF process of length LENGTH, by its spectrum of many waves; inputs uniform on a square."""
    rng = np.random.default_rng(seed)
    frequencies, phases = rng.normal(size=(2, WAVES)) / LENGTH, rng.uniform(0, 2 * math.pi, WAVES)
    x = rng.uniform(-1, 1, size=(NEW + count, 2))
    parts = np.array_split(x, 1 + count // 5000)
    f = np.concatenate([np.cos(part @ frequencies + phases).sum(axis=1) for part in parts])
    f *= math.sqrt(2 / WAVES)
    y = f[NEW:] + math.sqrt(NOISE) * rng.normal(size=count)
    return Data(jnp.asarray(x[NEW:]), jnp.asarray(y), jnp.asarray(x[:NEW]), f[:NEW])


def measure(count: int, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """One row for every method that takes so many."""
    data = generate(count, arguments.seed)
    found: list[dict[str, object]] = []
    for name, contestant in contestants(arguments).items():
        if count > contestant.most:
            continue
        parameters = contestant.start(data.x)
        gradient, _ = timed(contestant.gradient, parameters, data.x, data.y)
        posterior, mean = timed(contestant.means, parameters, data.x, data.y, data.new)
        error = float(np.sqrt(np.mean((np.asarray(mean) - data.truth) ** 2)))
        found.append({"method": name, "rows": count, "gradient": gradient, "posterior": posterior, "error": error})
        print(found[-1], flush=True)
    return found


def timed(run: Callable[..., object], *given: object) -> tuple[float, object]:
    """Processor seconds of one call, compiled before, and what it returns."""
    jax.block_until_ready(run(*given))
    begun = time.process_time()
    found = jax.block_until_ready(run(*given))
    return time.process_time() - begun, found


def contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    """The four ways."""
    kernel, count = RBF(), arguments.inducing
    everything = max(arguments.rows)
    methods: dict[str, tuple[Method, int]] = {
        "exact": (Exact(kernel), arguments.most_exact),
        "titsias": (Inducing(InducingProcess(kernel, 1e-6), count), everything),
        "features": (Features(RandomFourier(kernel, count, 0)), everything),
    }
    found = {name: of_method(method, most) for name, (method, most) in methods.items()}
    return {**found, "grid": of_grid(kernel, arguments, everything)}


def true_parameters(method: Method, x: jax.Array) -> Parameters:
    """Where inputs enter as x / sqrt(2)."""
    hyper = {"log_scale": jnp.zeros(()), "log_lengthscale": jnp.log(LENGTH / math.sqrt(2))}
    return method.initial(x)._replace(hyper=hyper, log_noise=jnp.log(NOISE))


def of_method(method: Method, most: int) -> Contestant:
    """Of a method with a bound."""

    def means(parameters: Parameters, x: jax.Array, y: jax.Array, new: jax.Array) -> jax.Array:
        return method.predict(parameters, method.condition(parameters, x, y).state, new).mean

    return Contestant(jax.jit(jax.grad(method.bound)), jax.jit(means), most, lambda x: true_parameters(method, x))


def of_grid(kernel: RBF, arguments: argparse.Namespace, most: int) -> Contestant:
    """Through a grid."""
    process = GridProcess(kernel, arguments.tolerance, lanczos_steps=arguments.lanczos)
    corners = jnp.array([[-1.0, -1.0], [1.0, 1.0]])
    grid = Grid.around(corners, (arguments.grid, arguments.grid))

    def bound(parameters: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
        probes = random_probes(jax.random.key(arguments.seed), arguments.probes, len(x), x.dtype)
        return process.log_evidence(parameters, grid, x, y, probes)

    def means(parameters: Parameters, x: jax.Array, y: jax.Array, new: jax.Array) -> jax.Array:
        return process.mean(grid, process.condition(parameters, grid, x, y), new)

    start = lambda x: true_parameters(Exact(kernel), x)  # noqa: E731
    return Contestant(jax.jit(jax.grad(bound)), jax.jit(means), most, start)


def draw(rows: list[dict[str, object]], path: Path) -> None:
    """Seconds of a gradient and error of the mean against rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    labels = {"gradient": "seconds of a bound and its gradient", "error": HEADER[-1]}
    for axis, (field, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for name in dict.fromkeys(str(row["method"]) for row in rows):
            mine = [row for row in rows if row["method"] == name]
            axis.loglog([row["rows"] for row in mine], [row[field] for row in mine], "o-", label=name)
        axis.set(xlabel="rows", ylabel=label)
        axis.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
