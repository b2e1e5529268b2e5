"""Mirror descent settles on a wide grid of tasks in float32: all kernels, output scales 0.1 to 100, duplicates."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.inference.inner import Code, cvi, fit, fit_to_tolerance
from fewshot.models import KERNELS, Softmax
from fewshot.models.gaussian import GaussianPrior

SHAPES = [(2, 1), (2, 5), (3, 10), (5, 1), (5, 5), (5, 10), (8, 3), (10, 1), (10, 5), (15, 2), (20, 1), (20, 10)]
TOLERANCE, MOST_STEPS, FEATURES = 1e-3, 100, 64


def features(rng, y):
    """ReLU features [N, D] around one centre a class, with a random spread; a third of the tasks hold duplicates."""
    centres = rng.normal(size=(y.max() + 1, FEATURES))
    x = np.maximum(centres[y] + rng.uniform(0.2, 2.0) * rng.normal(size=(len(y), FEATURES)), 0.0)
    if rng.random() < 1 / 3:
        x[rng.integers(len(y), size=max(1, len(y) // 4))] = x[0]
    return x


def labels(rng, way, shot):
    """Labels [N] of a class-major task; half of the tasks move labels, so that counts are unequal (at least 1 each)."""
    y = np.repeat(np.arange(way), shot)
    if shot > 1 and rng.random() < 0.5:
        free = np.arange(len(y)) % shot > 0
        y[free] = rng.integers(way, size=free.sum())
    return y


def task(rng, way, shot, kernel):
    """Covariance [N, N] in float32 at a log-uniform output scale, and labels [N]."""
    y = labels(rng, way, shot)
    start = kernel.initial() | {"log_scale": np.log(10 ** rng.uniform(-1.0, 2.0))}
    x = features(rng, y)
    if kernel.normalise_features:
        x = (x - x.mean(0)) / (x.std(0) + 1e-3)
    hyper = {name: jnp.float32(value) for name, value in start.items()}
    return np.asarray(kernel.gram(hyper, jnp.float32(x), jnp.float32(x))), y


@partial(jax.jit, static_argnums=0)
def solve(way, keys, covariances, ys):
    """Sites, elbo, residual, code and number of steps of every task of a block."""
    algorithm = cvi(Softmax())

    def one(key, covariance, y):
        prior = GaussianPrior(jnp.zeros((way, len(y)), covariance.dtype), covariance)
        state, info, steps = fit_to_tolerance(key, algorithm, prior, y, tolerance=TOLERANCE, max_steps=MOST_STEPS)
        return state.sites, info, steps

    return jax.vmap(one)(keys, covariances, ys)


def outcomes(shapes, tasks_per_shape):
    """Counts by code, the largest number of steps, and whether everything was finite."""
    codes, most, worst, finite = Counter(), 0, 0.0, True
    for number, (way, shot) in enumerate(shapes):
        rng = np.random.default_rng(number)
        kernels = [KERNELS[name]() for name in sorted(KERNELS)]
        drawn = [task(rng, way, shot, kernels[i % len(kernels)]) for i in range(tasks_per_shape)]
        keys = jax.random.split(jax.random.key(number), tasks_per_shape)
        # Under vmap all tasks of a block wait for the slowest: large ones run one by one.
        block = 28 if way * shot < 40 else 1
        for first in range(0, tasks_per_shape, block):
            part = slice(first, first + block)
            covariances, ys = (jnp.asarray(np.stack(column)) for column in zip(*drawn[part], strict=True))
            sites, info, steps = solve(way, keys[part], covariances, ys)
            codes.update(Code(int(code)).name for code in info.code)
            most, worst = max(most, int(steps.max())), max(worst, float(info.residual.max()))
            finite &= all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((sites, info)))
    print(f"\n{codes}, at most {most} steps, largest residual {worst:.1e}")
    return codes, finite


@pytest.mark.long
def test_mirror_descent_settles_on_small_tasks():
    codes, finite = outcomes([(3, 2)], 24)
    assert finite
    assert codes == {"OK": 24}


@pytest.mark.long
def test_full_steps_never_settle_where_chosen_steps_do_and_those_never_lower_the_bound():
    """5-way 5-shot, cosine, output scale 100, where one of the chosen steps has to be refused."""
    rng, kernel = np.random.default_rng(0), KERNELS["cosine"]()
    y = labels(rng, 5, 5)
    x = jnp.float32(features(rng, y))
    covariance = kernel.gram({"log_scale": jnp.log(100.0)}, x, x)

    @partial(jax.jit, static_argnums=0)
    def path(rho):
        prior = GaussianPrior(jnp.zeros((5, len(y)), covariance.dtype), covariance)
        _, info = fit(jax.random.key(0), cvi(Softmax(), rho=rho), prior, jnp.asarray(y), steps=MOST_STEPS)
        return info.residual, info.elbo

    chosen, full = path(None), path(1.0)
    assert chosen[0][-1] < TOLERANCE and full[0][-20:].min() > 10 * TOLERANCE
    assert jnp.diff(chosen[1]).min() > -0.01 and jnp.diff(full[1]).min() < -1  # nats; 0.01 is rounding


@pytest.mark.slow
def test_mirror_descent_settles_on_a_thousand_tasks():
    codes, finite = outcomes(SHAPES, 84)
    assert finite
    assert codes["NON_FINITE"] == 0
    assert codes["OK"] >= 0.99 * 84 * len(SHAPES)
