"""Regression by one Cholesky factor against dense algebra, differences, and the site algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from scipy.stats import multivariate_normal

from fewshot.inference import many_points
from fewshot.inference.many_points import Exact
from fewshot.models import regression
from fewshot.models.gaussian import GaussianPrior, Query, normal_log_density, observe
from fewshot.models.kernels import Matern52


def problem(seed=0, points=9, queries=4):
    rng = np.random.default_rng(seed)
    square = rng.normal(size=(points + queries, points + queries))
    full = square @ square.T / points + 0.2 * np.eye(points + queries)
    return jnp.asarray(full), jnp.asarray(rng.normal(size=points))


@double
def test_density_and_predictions_are_those_of_dense_algebra_and_of_the_sites():
    full, y = problem()
    kernel, cross, variance = full[:9, :9], full[9:, :9], jnp.diagonal(full)[9:]
    noise = 0.3
    covariance = kernel + noise * jnp.eye(9)
    found = jax.jit(observe)(covariance, y)
    np.testing.assert_allclose(found.log_density, multivariate_normal(np.zeros(9), covariance).logpdf(y), rtol=1e-12)
    mean, spread = found.predict(cross, variance)
    np.testing.assert_allclose(mean, cross @ np.linalg.solve(covariance, y), rtol=1e-10)
    np.testing.assert_allclose(spread, variance - np.diag(cross @ np.linalg.solve(covariance, cross.T)), rtol=1e-10)
    sites = jax.jit(regression.regress)(GaussianPrior(jnp.zeros((1, 9)), kernel), y, noise)
    other = regression.predict(sites.posterior, Query(jnp.zeros((1, 4)), cross, variance))
    np.testing.assert_allclose(found.log_density, sites.log_evidence, rtol=1e-12)
    np.testing.assert_allclose((mean, spread), other, rtol=1e-10)


@double
def test_the_derivatives_of_the_density_are_those_of_differences():
    full, y = problem(1)
    half = jnp.linalg.cholesky(full[:9, :9])
    rng = np.random.default_rng(2)
    way, change = jnp.asarray(rng.normal(size=(9, 9))), jnp.asarray(rng.normal(size=9))

    @jax.jit
    def density(step):
        root = half + step * way
        return normal_log_density(root @ root.T, y + step * change)

    slope = (density(1e-5) - density(-1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(density))(0.0), slope, rtol=1e-6)


@pytest.mark.long
@double
def test_an_exact_process_learns_in_stages_from_more_than_a_thousand_rows():
    assert many_points.stages(1000, 40) == [(1000, 40)]
    assert many_points.stages(2000, 40) == [(500, 25), (1000, 10), (2000, 5)]
    assert many_points.stages(1001, 1) == [(250, 1), (500, 1), (1001, 1)]
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(40, 2)))
    y = jnp.asarray(np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=40))
    method = Exact(Matern52())
    start = method.initial(x)
    first, _ = many_points.learn(method, 25, start, x[:20], y[:20])
    _, bound = many_points.learn(method, 5, first, x, y)
    assert bound > method.bound(start, x, y) + 5
    np.testing.assert_array_equal(first.log_weights.shape, start.log_weights.shape)
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf: leaf.dtype == jnp.float64, first)))
