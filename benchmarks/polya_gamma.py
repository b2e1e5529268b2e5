"""Polya-Gamma draws a second: PG(1, z) for z ~ N(0, 4), and other shapes, on the device that JAX has.

    taskset -c 0 python benchmarks/polya_gamma.py [--size 1000000] [--repeats 20]

On a processor the first lines are one core's only where the process is held on one, as above. If the optional package
`polyagamma` is installed its Devroye sampler is timed in turns with ours, so that both meet the same load.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewshot.models.polya_gamma import sample_polya_gamma, sample_polya_gamma_one

SHAPES = (2.0, 5.0, 30.0, 128.0, 0.5, 200.0, 1e4)  # timed on a tenth of the entries


def main() -> None:
    """Prints a table: million draws a second, median and best."""
    arguments = parse()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"device: {jax.devices()[0].device_kind}; processor cores open to this process: {cores}")
    z = 2 * np.random.default_rng(0).normal(size=arguments.size).astype(np.float32)
    samplers: dict[str, Callable[[], None]] = {
        "PG(1, z), sample_polya_gamma_one": drawing(sample_polya_gamma_one, z),
        "PG(b, z), b = 1": drawing(sample_polya_gamma, np.ones_like(z), z),
        "PG(b, z), b = 1 + Poisson(0.5)": drawing(sample_polya_gamma, counts(z.size), z),
    }
    peer = devroye(z)
    if peer is not None:
        samplers["polyagamma, Devroye, one thread"] = peer
    rates = report(samplers, z.size, arguments.repeats)
    if peer is None:
        print("polyagamma is not installed: no comparison")
    else:
        ours, theirs = rates[0], rates[-1]
        print(f"ratio of medians, ours at b = 1 to polyagamma: {ours / theirs:.2f}")
    few = z[: max(1, z.size // 10)]
    others = {f"b = {b:g}": drawing(sample_polya_gamma, np.full_like(few, b), few) for b in SHAPES}
    report(others, few.size, max(3, arguments.repeats // 4))


def counts(size: int) -> np.ndarray:
    """What a Gibbs step asks for: small counts, mostly 1 and 2."""
    return 1 + np.random.default_rng(1).poisson(0.5, size).astype(np.float32)


def drawing(sampler: Callable[..., jax.Array], *arguments: np.ndarray) -> Callable[[], None]:
    """One call of a sampler with a new key each time, its arguments on the device."""
    placed = [jnp.asarray(argument) for argument in arguments]
    keys = iter(jax.random.split(jax.random.key(0), 1000))

    def run() -> None:
        jax.block_until_ready(sampler(next(keys), *placed))

    return run


def devroye(z: np.ndarray) -> Callable[[], Any] | None:
    """The Devroye sampler of `polyagamma`, or None where the package is missing."""
    try:
        from polyagamma import random_polyagamma
    except ImportError:
        return None
    generator, tilt = np.random.default_rng(0), z.astype(float)
    return lambda: random_polyagamma(1, tilt, method="devroye", random_state=generator)


def report(samplers: dict[str, Callable[[], None]], size: int, repeats: int) -> list[float]:
    """Median rates in million draws a second, all samplers timed in turns; a first call compiles."""
    first = [clock(run) for run in samplers.values()]
    times = np.array([[clock(run) for run in samplers.values()] for _ in range(repeats)])
    medians, best = (1e-6 * size / statistic(times, axis=0) for statistic in (np.median, np.min))
    print(f"{'million draws a second':36}{'median':>9}{'best':>9}{'first call, s':>15}")
    for name, median, fastest, compiled in zip(samplers, medians, best, first, strict=True):
        print(f"{name:36}{median:9.2f}{fastest:9.2f}{compiled:15.2f}")
    return [float(median) for median in medians]


def clock(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
