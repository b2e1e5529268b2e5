"""What elliptical slices buy Gibbs for logistic-softmax, by temperature: draws that count, and what a sweep costs.

    taskset -c 1 python benchmarks/slices.py --out docs/results/slices.md

Eight 5-way 5-shot tasks of random features (one centre a class, noise of 0.7 around it), RBF kernel of output scale 4,
mean -3, 20 chains. Costs are processor time where the process is held on one core, by turns. The fits of 40 such
tasks are then judged as users' are.
"""

import argparse
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from timing import HELD_ON_ONE_CORE, by_turns, markdown

from fewshot.inference.inner import gibbs
from fewshot.inference.inner.base import Code, Inference, prepared
from fewshot.inference.inner.mixing import effective_draws, split_r_hat
from fewshot.inference.inner.settle import SAMPLER_STEPS, fit_until_mixed
from fewshot.models import KERNELS
from fewshot.models.gaussian import GaussianPrior
from fewshot.models.likelihoods import LogisticSoftmax
from fewshot.models.process import LatentProcess

TEMPERATURES, COUNTS = (0.2, 0.5, 1.0), (0, 4, 12, 40)
WAY, WIDTH = 5, 16
TASKS, JUDGED, WARMUP, TIMED = 8, 40, 25, 10
HEADER = [
    "tau",
    "slices a sweep",
    "ms a sweep",
    "sweeps an effective draw",
    "ms an effective draw",
    "R-hat",
    "sweeps of a fit",
    "not mixed",
]
LEGEND = """
*ms a sweep*: of all eight tasks. *Sweeps an effective draw*: of one chain, by the scalar that mixes worst of three
(log p(y | f), one latent, |f|^2); the median of the tasks, then their range. *ms an effective draw*: the product, of a
task, its 20 chains together. *R-hat*: of sweeps 25 to 48, median of the tasks. *Sweeps of a fit*: until it
has mixed, mean of 40 tasks. *Not mixed*: tasks of 40 for which its code says so."""


class Measured(NamedTuple):
    """Of one temperature and number of slices: the worst scalar of every task, and the tasks that did not mix."""

    sweeps: np.ndarray
    r_hat: np.ndarray
    taken: float
    not_mixed: int


def main() -> None:
    """Measure, print the page, write it where --out says."""
    arguments = parse()
    rows = []
    prior, y = priors(TASKS, 0, arguments.shot)
    for temperature in arguments.temperatures:
        run = partial(traces, jax.random.key(0), temperature)
        runs = {str(count): partial(run, count, prior, y, TIMED) for count in arguments.slices}
        times = by_turns(runs, arguments.repeats)
        for count in arguments.slices:
            found = measured(temperature, count, arguments.shot, arguments.sweeps)
            rows.append(row_of(temperature, count, times[str(count)].minimum / TIMED, found))
            print(" | ".join(rows[-1]), flush=True)
    command = shlex.join(["python", "benchmarks/slices.py", *sys.argv[1:]])
    clock = "processor" if HELD_ON_ONE_CORE else "wall"
    head = f"# Elliptical slices in Gibbs for logistic-softmax\n\n`{command}` wrote this page ({clock} time).\n"
    page = f"{head}{LEGEND}\n\n{markdown(HEADER, rows)}\n"
    if arguments.out:
        Path(arguments.out).write_text(page)
    print(page)


def row_of(temperature: float, count: int, milliseconds: float, found: Measured) -> list[str]:
    """One line of the table."""
    sweeps = np.median(found.sweeps)
    return [
        f"{temperature:g}",
        str(count),
        f"{milliseconds:.0f}",
        f"{sweeps:.3g} ({found.sweeps.min():.3g} to {found.sweeps.max():.3g})",
        f"{sweeps * milliseconds / TASKS / 20:.3g}",
        f"{np.median(found.r_hat):.2f}",
        f"{found.taken:.0f}",
        f"{found.not_mixed}",
    ]


def priors(count: int, seed: int, shot: int) -> tuple[GaussianPrior, jax.Array]:
    """Priors of `count` tasks, along a leading axis, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(WAY), shot)
    x = rng.normal(size=(count, WAY, WIDTH))[:, labels] + 0.7 * rng.normal(size=(count, len(labels), WIDTH))
    hyper = {"log_scale": jnp.log(4.0), "log_lengthscale": jnp.log(4.0), "mean": -3.0}
    process = LatentProcess(KERNELS["rbf"](), hyper)
    return jax.vmap(lambda one: process.prior(one, WAY))(jnp.asarray(x, jnp.float32)), jnp.asarray(labels)


def sampler_of(temperature: float | jax.Array, slices: int) -> Inference:
    """Gibbs with 20 chains; the temperature may be traced, so that one program serves all."""
    return gibbs(LogisticSoftmax(temperature=temperature), slices=slices)


@partial(jax.jit, static_argnames=("slices", "sweeps"))
def traces(
    key: jax.Array, temperature: float, slices: int, prior: GaussianPrior, y: jax.Array, sweeps: int
) -> jax.Array:
    """The three scalars of every chain of every task after each sweep [B, S, M, K]."""
    sampler = sampler_of(temperature, slices)

    def of_task(key: jax.Array, prior: GaussianPrior) -> jax.Array:
        prior = prepared(sampler, prior)

        def sweep(state, key):
            state, _ = sampler.step(key, state, prior, y)
            return state, sampler.statistics(state, y)

        start, rest = jax.random.split(key)
        return jax.lax.scan(sweep, sampler.init(start, prior, y), jax.random.split(rest, sweeps))[1]

    return jax.vmap(of_task)(jax.random.split(key, len(prior.mean)), prior)


@partial(jax.jit, static_argnames="slices")
def fits(
    key: jax.Array, temperature: float, slices: int, prior: GaussianPrior, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The code of a user's fit of every task [B], and the sweeps that it took."""
    sampler = sampler_of(temperature, slices)
    keys = jax.random.split(key, len(prior.mean))
    return jax.vmap(lambda key, one: fit_until_mixed(key, sampler, one, y)[1:])(keys, prior)


def measured(temperature: float, slices: int, shot: int, sweeps: int) -> Measured:
    """Mixing over `sweeps` after the warm-up, and of a fit."""
    prior, y = priors(TASKS, 0, shot)
    found = traces(jax.random.key(1), temperature, slices, prior, y, WARMUP + sweeps)
    effective = jax.vmap(effective_draws)(found[:, WARMUP:]).min(axis=1)
    r_hat = jax.vmap(split_r_hat)(found[:, SAMPLER_STEPS // 2 : SAMPLER_STEPS]).max(axis=1)
    judged, taken = fits(jax.random.key(2), temperature, slices, *priors(JUDGED, 1, shot))
    chains = found.shape[2]
    return Measured(
        chains * sweeps / np.asarray(effective),
        np.asarray(r_hat),
        float(taken.mean()),
        int((judged == Code.NOT_MIXED).sum()),
    )


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--slices", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--shot", type=int, default=5, help="labelled points of each of five classes")
    parser.add_argument("--sweeps", type=int, default=400, help="after 25 of warm-up")
    parser.add_argument("--repeats", type=int, default=5, help="of a compiled run of 10 sweeps, the shortest counts")
    parser.add_argument("--out", metavar="FILE.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
