"""Class probabilities of softmax by one-dimensional sums and by draws: errors and time, in single precision.

    taskset -c 0 python benchmarks/class_probabilities.py [--classes 2 5 20 100] [--queries 64] [--repeats 5]

The logits of a query are independent normals, with deviations about one number from 0.05 to 20 and means within a few
of these. The reference is the same sum in double precision. Columns: largest error of a probability; of its logarithm
where it is above 1e-3, and above 1e-5 (of draws the root mean square of the first); fastest milliseconds of all.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fewshot.models.expectations import expected_softmax
from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import Softmax
from fewshot.runners.cli import processor

RULES = {"sums": Softmax(summed=True)} | {f"{n} draws": Softmax(prediction_draws=n) for n in (512, 1024, 4096)}
HEADER = ["classes", "by", "probability", "log, p > 1e-3", "log, p > 1e-5", "ms"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", type=int, default=[2, 5, 20, 100])
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    processor.tune()
    lines = [HEADER, ["---"] * len(HEADER)]
    for classes in arguments.classes:
        mean, variance = logits(classes, arguments.queries)
        with jax.enable_x64(True):
            exact = np.asarray(jax.jit(expected_softmax)(Marginals(jnp.asarray(mean), jnp.asarray(variance)))).T
        marginals = Marginals(jnp.asarray(mean, jnp.float32), jnp.asarray(variance, jnp.float32))
        for name, likelihood in RULES.items():
            ask = jax.jit(lambda q, one=likelihood: one.predict(jax.random.key(0), q))
            found, seconds = timed(ask, marginals, arguments.repeats)
            away = np.log(np.maximum(found, np.finfo(np.float32).tiny)) - np.log(exact)
            likely, rare = away[exact > 1e-3], np.abs(away[exact > 1e-5]).max()
            logs = [np.abs(likely).max(), rare] if name == "sums" else [np.sqrt(np.mean(likely**2)), None]
            errors = [f"{value:.0e}" if value is not None else "-" for value in (np.abs(found - exact).max(), *logs)]
            lines.append([str(classes), name, *errors, f"{1e3 * seconds:.1f}"])
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


def logits(classes: int, queries: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances [C, Q]."""
    rng = np.random.default_rng(classes)
    size = np.exp(rng.uniform(np.log(0.05), np.log(20), size=queries))
    deviation = size * np.exp(0.2 * rng.normal(size=(classes, queries)))
    return rng.normal(size=(classes, queries)) * np.maximum(size, 1), deviation**2


def timed(function: Callable[[Marginals], jax.Array], marginals: Marginals, repeats: int) -> tuple[np.ndarray, float]:
    """What a compiled function finds, and the seconds of its fastest call."""
    found, seconds = np.asarray(function(marginals)), []
    for _ in range(repeats):
        begun = time.perf_counter()
        function(marginals).block_until_ready()
        seconds.append(time.perf_counter() - begun)
    return found, min(seconds)


if __name__ == "__main__":
    main()
