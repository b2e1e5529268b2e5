"""Exact regression against scikit-learn and dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.models import regression
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.kernels import RBF, Linear, Matern52

NOISE, SCALE, LENGTH = 0.07, 1.7, 0.9
HYPER = {"log_scale": np.log(SCALE), "log_lengthscale": np.log(LENGTH)}


def data(seed=0, points=40, queries=11, size=3):
    rng = np.random.default_rng(seed)
    x, new = rng.normal(size=(points, size)), rng.normal(size=(queries, size))
    return x, np.sin(x.sum(1)) + 0.2 * rng.normal(size=points), new


def prior_of(kernel, x, level=0.0):
    return GaussianPrior(jnp.full((1, len(x)), level), kernel.gram(HYPER, x, x))


def query_of(kernel, x, new, level=0.0):
    return Query(jnp.full((1, len(new)), level), kernel.gram(HYPER, new, x), kernel.diagonal(HYPER, new))


def peer(name, size):
    """scikit-learn's kernel of the same covariance: ours divides the inputs by the root of their number."""
    kernels = pytest.importorskip("sklearn.gaussian_process.kernels", reason="install scikit-learn to compare with it")
    length = LENGTH * np.sqrt(size)
    base = kernels.RBF(length) if name == "rbf" else kernels.Matern(length, nu=2.5)
    return kernels.ConstantKernel(SCALE) * base


@pytest.mark.long
@pytest.mark.parametrize("name, kernel", [("rbf", RBF()), ("matern52", Matern52())])
@double
def test_exact_regression_is_that_of_scikit_learn(name, kernel):
    peers = pytest.importorskip("sklearn.gaussian_process", reason="install scikit-learn to compare with it")
    x, y, new = data()
    theirs = peers.GaussianProcessRegressor(peer(name, x.shape[1]), alpha=NOISE, optimizer=None).fit(x, y)
    ours = jax.jit(regression.regress)(prior_of(kernel, jnp.asarray(x)), jnp.asarray(y), NOISE)
    found = regression.predict(ours.posterior, query_of(kernel, jnp.asarray(x), jnp.asarray(new)))
    mean, deviation = theirs.predict(new, return_std=True)
    np.testing.assert_allclose(found.mean, mean, atol=1e-8)
    np.testing.assert_allclose(found.variance, deviation**2, atol=1e-8)
    np.testing.assert_allclose(ours.log_evidence, theirs.log_marginal_likelihood_value_, atol=1e-8)


@pytest.mark.long
@double
def test_the_evidence_is_that_of_the_sites_with_a_mean_and_unequal_noise():
    x, y, _ = map(jnp.asarray, data(1))
    noise = jnp.asarray(np.random.default_rng(2).uniform(0.05, 2.0, len(y)))
    prior = prior_of(RBF(), x, level=0.4)
    total = prior.log_normaliser(regression.noise_sites(y, noise)) + regression.noise_scale(y, noise)
    found = regression.regress(prior, y, noise).log_evidence
    covariance = np.asarray(prior.covariance) + np.diag(noise)
    residual = np.asarray(y) - 0.4
    dense = -0.5 * (residual @ np.linalg.solve(covariance, residual) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    np.testing.assert_allclose(found, total, atol=1e-9)
    np.testing.assert_allclose(found, dense, atol=1e-9)


@pytest.mark.long
@double
def test_the_gradient_for_kernel_and_noise_is_that_of_finite_differences():
    x, y, _ = map(jnp.asarray, data(3, points=12))

    @jax.jit
    def evidence(values):
        hyper = {"log_scale": values[0], "log_lengthscale": values[1]}
        prior = GaussianPrior(jnp.zeros((1, len(y))), Matern52().gram(hyper, x, x))
        return regression.regress(prior, y, jnp.exp(values[2])).log_evidence

    at, step = jnp.array([0.3, -0.2, -1.5]), 1e-5
    slopes = [(evidence(at + step * e) - evidence(at - step * e)) / (2 * step) for e in jnp.eye(3)]
    np.testing.assert_allclose(jax.grad(evidence)(at), slopes, rtol=1e-6)


def test_a_singular_kernel_needs_no_jitter_in_single_precision():
    x, y, new = data(4, points=50, size=2)
    x[1:5] = x[0]
    x, y, new = (jnp.asarray(values, jnp.float32) for values in (x, y, new))
    kernel = Linear()
    prior = GaussianPrior(jnp.zeros((1, len(y))), kernel.gram(HYPER, x, x))
    ours = jax.jit(regression.regress)(prior, y, NOISE)
    assert np.isfinite(ours.log_evidence)
    features = np.asarray(kernel.feature_map(HYPER, x), np.float64)
    weights = np.linalg.solve(features.T @ features / NOISE + np.eye(2), features.T @ np.asarray(y) / NOISE)
    found = regression.predict(ours.posterior, query_of(kernel, x, new))
    np.testing.assert_allclose(found.mean, np.asarray(kernel.feature_map(HYPER, new)) @ weights, atol=2e-4)
