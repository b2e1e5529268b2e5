"""Random Fourier features: no bias, errors of order M^-1/2, and linear regression that is their process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.models import inducing, regression
from fewshot.models.gaussian import GaussianPrior, Query, prior_root
from fewshot.models.kernels import RBF, Matern52, Stationary
from fewshot.models.random_features import RandomFourier

HYPER = {"log_scale": 0.4, "log_lengthscale": -0.8}
BASES = [RBF(), Matern52(), RBF(unit=True)]


def inputs(seed, count=12, size=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, size)))


def errors(base, features, seeds):
    """Of K [S, N, N], over seeds."""
    x = inputs(0)
    exact = base.gram(HYPER, x, x)
    grams = [RandomFourier(base, features, seed).gram(HYPER, x, x) for seed in range(seeds)]
    return np.asarray(jnp.stack(grams) - exact)


@pytest.mark.long
@pytest.mark.parametrize("base", BASES, ids=["rbf", "matern52", "rbf-norm"])
def test_the_kernel_is_that_of_the_base_on_average_with_errors_of_order_one_over_root_m(base):
    sizes, seeds = [32, 256, 2048], 16
    found = [errors(base, size, seeds) for size in sizes]
    deviations = [np.sqrt(np.mean(error**2)) for error in found]
    slope = np.polyfit(np.log(sizes), np.log(deviations), 1)[0]
    assert slope == pytest.approx(-0.5, abs=0.07)
    # Of the entries of one Gram matrix errors are dependent: the band is that of their mean over independent seeds.
    means = found[-1].mean(axis=(1, 2))
    assert abs(means.mean()) < 4 * means.std(ddof=1) / np.sqrt(seeds)
    assert np.abs(found[-1].mean(0)).max() < 5 * deviations[-1] / np.sqrt(seeds)


@pytest.mark.long
@double
def test_the_root_is_one_and_regression_on_it_is_the_process():
    kernel, x, new = RandomFourier(Matern52(), 20, 3), inputs(1, 30), inputs(2, 5)
    y, noise = jnp.sin(x[:, 0]), 0.1
    root = kernel.root(HYPER, x)
    prior = GaussianPrior(jnp.full((1, 30), 0.2), kernel.gram(HYPER, x, x), root)
    np.testing.assert_allclose(prior_root(prior).factor, root)
    np.testing.assert_allclose(root @ root.T, prior.covariance, atol=1e-12)
    np.testing.assert_allclose(kernel.diagonal(HYPER, x), jnp.diagonal(prior.covariance), atol=1e-12)
    exact = regression.regress(prior._replace(root=None), y, noise)  # factors of size N
    query = Query(jnp.full((1, 5), 0.2), kernel.gram(HYPER, new, x), kernel.diagonal(HYPER, new))
    expected = regression.predict(exact.posterior, query)
    seen = kernel.view(HYPER, x, 0.2)
    found = inducing.posterior(seen, y, noise).predict(kernel.view(HYPER, new, 0.2))
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-9)
    np.testing.assert_allclose(found.variance, expected.variance, atol=1e-9)
    np.testing.assert_allclose(inducing.titsias_bound(seen, y, noise), exact.log_evidence, rtol=1e-9)


@pytest.mark.long
def test_features_are_those_of_their_seed_and_learn_their_length():
    x = inputs(4)
    one, again, other = (RandomFourier(RBF(), 8, seed).feature_map(HYPER, x) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - other).max() > 0.1

    def entry(log_length):
        return RandomFourier(RBF(), 4000, 0).gram({**HYPER, "log_lengthscale": log_length}, x[:1], x[1:2])[0, 0]

    def exact(log_length):
        return RBF().gram({**HYPER, "log_lengthscale": log_length}, x[:1], x[1:2])[0, 0]

    assert float(jax.grad(entry)(0.0)) == pytest.approx(float(jax.grad(exact)(0.0)), abs=0.1)


def test_kernels_without_a_spectrum_are_refused():
    with pytest.raises(ValueError, match="RBF, Matern52"):
        RandomFourier(Stationary(), 10, 0)
    with pytest.raises(ValueError, match="at least one feature"):
        RandomFourier(RBF(), 0, 0)
