"""Exact regression by conjugate gradients on rows that devices share: seconds, steps and error against rows.

    taskset -c 0 python benchmarks/shared_rows.py [--rows 10000 20000] [--devices 8] [--out FILE]

Three inputs, a draw of an RBF process by its spectrum, noise variance 0.05, true hyper-parameters, double precision,
residuals to 1e-4. Processor seconds of A^-1 y, compiled before; whether devices hold their rows of K or compute them
again for each product; with and without a preconditioner of 512 points. Devices are simulated on the processor.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np

HEADER = ["rows", "devices", "K", "points of P", "steps", "seconds", "MiB of a device", "error of the mean"]
LENGTH, NOISE, WAVES, NEW, TOLERANCE = 0.25, 0.05, 2000, 500, 1e-4
CASES = [(True, 512), (True, 0), (False, 512)]


def main() -> None:
    """Measure, print the table, write it."""
    arguments = parse()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(arguments.devices)}"
    os.environ.setdefault("PJRT_NPROC", str(4 * max(arguments.devices)))
    import jax  # counts devices once
    from timing import markdown

    lines = []
    with jax.enable_x64(True):
        for rows in arguments.rows:
            for devices in arguments.devices:
                for held, points in CASES:
                    lines.append(measure(rows, devices, held, points))
                    print(lines[-1], flush=True)
    page = markdown(HEADER, lines)
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page + "\n")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 20_000])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", default=None)
    return parser.parse_args(given)


def measure(rows: int, devices: int, held: bool, points: int) -> list[str]:
    """One line of the table; a step is a product with A, of which the first is for the residual of 0."""
    import jax
    import jax.numpy as jnp

    from fewshot.inference.by_rows import ByRows
    from fewshot.inference.many_points import Exact
    from fewshot.models.inducing import Parameters
    from fewshot.models.kernels import RBF

    x, y, new, truth = generate(rows)
    method = ByRows(RBF(), preconditioned=points, devices=devices, held=held, tolerance=TOLERANCE)
    parameters = Exact(RBF()).initial(jnp.asarray(x))._replace(log_noise=jnp.log(NOISE))
    parameters.hyper["log_lengthscale"] = jnp.log(LENGTH / np.sqrt(x.shape[1]))

    products: list[None] = []

    def alpha(parameters: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
        product = method.noisy(parameters, x)

        def counted(vector: jax.Array) -> jax.Array:
            jax.debug.callback(lambda: products.append(None))
            return product(vector)

        return method.solved(parameters, x, counted, y[None])[0]

    program = jax.jit(alpha).lower(parameters, jnp.asarray(x), jnp.asarray(y)).compile()
    begun = time.process_time()
    found = np.asarray(program(parameters, jnp.asarray(x), jnp.asarray(y)))
    seconds = time.process_time() - begun
    jax.effects_barrier()
    cross = np.exp(-0.5 * ((new[:, None] - x) ** 2).sum(-1) / LENGTH**2)
    error = float(np.sqrt(np.mean((cross @ found - truth) ** 2)))
    size = program.memory_analysis().temp_size_in_bytes / 2**20
    name = "held" if held else "computed"
    return [
        f"{rows:,}",
        str(devices),
        name,
        str(points),
        str(len(products) - 1),
        f"{seconds:.1f}",
        f"{size:,.0f}",
        f"{error:.4f}",
    ]


def generate(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows and targets, new inputs and the true function there."""
    rng = np.random.default_rng(0)
    frequencies, phases = rng.normal(size=(3, WAVES)) / LENGTH, rng.uniform(0, 2 * np.pi, WAVES)
    x = rng.uniform(-1, 1, size=(NEW + rows, 3))
    f = np.concatenate([np.cos(part @ frequencies + phases).sum(1) for part in np.array_split(x, 20)])
    f *= np.sqrt(2 / WAVES)
    y = f[NEW:] + np.sqrt(NOISE) * rng.normal(size=rows)
    return x[NEW:], y, x[:NEW], f[:NEW]


if __name__ == "__main__":
    main()
