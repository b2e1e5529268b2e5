"""How often `cvi` clips a negative precision of logistic-softmax on training tasks, and what that costs.

    python benchmarks/clipping.py RUN_DIR [--episodes 40] [--optimised 5]

Tasks are those of the run's training, merged (support and query, as the objective `elbo` sees them) and support alone,
with the run's features. A likelihood that is not the run's own has its first parameters and prior mean. The fixed point
is compared with the best bound over sites W >= 0 that L-BFGS finds from there, over the same nodes, and with
`curvature=Curvature.EXPECTED`.
"""

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from fewshot import tasks
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import embed_images
from fewshot.inference.inner import cvi, fit_to_tolerance
from fewshot.inference.inner.cvi import Curvature
from fewshot.learners import GaussianProcess
from fewshot.models.expectations import MonteCarlo
from fewshot.models.gaussian import GaussianPrior, Sites
from fewshot.models.likelihoods import LogisticSoftmax
from fewshot.models.likelihoods.base import Likelihood
from fewshot.runners.cli import compilation_cache
from fewshot.training.run import Run, load_run

NODES = 256


def main() -> None:
    """Prints a line for each kind of task."""
    arguments = parse()
    compilation_cache.keep_programs()
    run = load_run(arguments.run_dir)
    if not isinstance(run.learner, GaussianProcess):
        raise SystemExit(f"expected a run of a Gaussian process, got learner {run.config.learner}; name another run")
    own = isinstance(run.learner.likelihood, LogisticSoftmax)
    likelihood = run.learner.likelihood if own else LogisticSoftmax()
    for name, support_only in (("support", True), ("support and query", False)):
        found = []
        for number, task in enumerate(training_tasks(run, likelihood, own, support_only, arguments.episodes)):
            found.append(examine(jax.random.key(number), likelihood, *task, number < arguments.optimised))
            print(number, found[-1], file=sys.stderr, flush=True)
        report(name, found)


def training_tasks(run: Run, likelihood: Likelihood, own: bool, support_only: bool, count: int) -> Any:
    """Prior and labels of training tasks."""
    config, learner, dataset = run.config, run.learner, run.splits().train
    episodes = draw_episodes(1, "train", dataset, Shape(config.way, config.shot, config.query), count).indices
    images, process = tasks.flat_images(dataset), learner.deep_kernel.process()
    for number in range(count):
        one = jax.tree.map(lambda values, n=number: np.asarray(values[n]), episodes)
        positions, y = (one.x_support, one.y_support)
        if not support_only:
            positions, y = np.concatenate([positions, one.x_query]), np.concatenate([y, one.y_query])
        features = embed_images(learner, images[positions])
        prior = jax.tree.map(np.float64, jax.device_get(process.prior(features, config.way)))
        if not own:
            prior = prior._replace(mean=np.full_like(prior.mean, likelihood.prior_mean))
        yield prior, y


@jax.jit
def settled(key: jax.Array, likelihood: Likelihood, prior: GaussianPrior, y: jax.Array) -> tuple[Any, Any]:
    """State and Info of `cvi` where it settles."""
    kernel = cvi(likelihood, expectation=MonteCarlo(NODES))
    state, info, _ = fit_to_tolerance(key, kernel, prior, y, tolerance=1e-5, max_steps=500)
    return state, info


@jax.jit
def settled_expected(key: jax.Array, likelihood: Likelihood, prior: GaussianPrior, y: jax.Array) -> tuple[Any, Any]:
    """The same with the expected curvature."""
    kernel = cvi(likelihood, expectation=MonteCarlo(NODES), curvature=Curvature.EXPECTED)
    state, info, _ = fit_to_tolerance(key, kernel, prior, y, tolerance=1e-5, max_steps=500)
    return state, info


@jax.jit
def bound_and_slope(flat: jax.Array, likelihood: Likelihood, prior: GaussianPrior, y: jax.Array, points: Any) -> Any:
    """ELBO of sites given as one vector, with its gradient."""

    def bound(flat: jax.Array) -> jax.Array:
        q = prior.given(Sites(*flat.reshape(2, *prior.mean.shape)))
        return jnp.sum(likelihood.expected_log_prob(y, q.marginals, points)) - q.kl

    return jax.value_and_grad(bound)(flat)


def examine(
    key: jax.Array, likelihood: Likelihood, prior: GaussianPrior, y: jax.Array, optimise: bool
) -> dict[str, float]:
    """What one task shows, in double precision."""
    with jax.enable_x64(True):
        return examine_double(key, likelihood, prior, y, optimise)


def examine_double(
    key: jax.Array, likelihood: Likelihood, prior: GaussianPrior, y: jax.Array, optimise: bool
) -> dict[str, float]:
    """`examine` where numbers have 64 bits."""
    state, info = settled(key, likelihood, prior, y)
    _, other = settled_expected(key, likelihood, prior, y)
    found = {
        "clipped": float(info.clipped) / prior.mean.size,
        "any": float(info.clipped > 0),
        "code": float(info.code),
        "expected": float(other.elbo - info.elbo),
    }
    if not optimise:
        return found

    def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = bound_and_slope(jnp.asarray(flat), likelihood, prior, y, state.points)
        return -float(value), -np.asarray(slope)

    size = prior.mean.size
    start = np.concatenate([np.ravel(state.sites.shift), np.maximum(np.ravel(state.sites.precision), 1e-9)])
    limits = [(None, None)] * size + [(1e-9, None)] * size
    best = minimize(negative, start, jac=True, method="L-BFGS-B", bounds=limits, options={"maxfun": 600})
    slope = negative(start)[1]
    return {**found, "short": -best.fun - float(info.elbo), "slope": float(np.abs(slope).max())}


def report(name: str, found: list[dict[str, float]]) -> None:
    """Means and extremes over the tasks."""

    def values(entry: str) -> np.ndarray:
        return np.array([one[entry] for one in found if entry in one])

    clipped, short, expected = values("clipped"), values("short"), values("expected")
    print(f"{name}, {len(found)} tasks: {values('any').mean():.0%} clip, {np.sum(values('code') > 0)} did not settle")
    print(f"  precisions clipped at the fixed point: mean {clipped.mean():.2%}, largest {clipped.max():.2%}")
    print(f"  nats below the best sites: mean {short.mean():.1e}, largest {short.max():.1e} ({len(short)} tasks)")
    print(f"  largest slope at the fixed point: {values('slope').max():.1e}")
    print(f"  expected curvature: {expected.mean():+.1e} nats ({expected.min():+.1e} to {expected.max():+.1e})")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--optimised", type=int, default=5, help="of them compared with L-BFGS")
    return parser.parse_args()


if __name__ == "__main__":
    main()
