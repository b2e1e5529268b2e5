"""The metric of frozen features: (M1), (M2), and the covariance behind them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fewshot.models.backbones import Identity
from fewshot.models.networks.metric import FeatureMetric, gains, unit, within_class_covariance

D, A = 7, 0.3


@pytest.fixture
def features():
    generator = np.random.default_rng(0)
    return generator.normal(size=(40, D)) * np.geomspace(0.2, 2, D) + 1.0, generator.integers(0, 4, 40)


def with_values(rank, mean, values, vectors):
    with jax.enable_x64(True):
        metric = FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=rank)
        metric.mean[...] = jnp.asarray(mean)
        metric.directions[...] = jnp.asarray(vectors[:, :rank])
        metric.gains[...] = jnp.asarray(gains(values, rank, A))
        return metric


def applied(metric, x):
    with jax.enable_x64(True):
        return np.asarray(metric(jnp.asarray(x)[None, :, None, None], train=False)[0])


def test_it_starts_at_unit_features(features):
    x, _ = features
    metric = FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=3)
    basis = np.asarray(metric.directions[...])
    np.testing.assert_allclose(basis.T @ basis, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(applied(metric, x), unit(x), atol=1e-6)


def test_the_covariance_is_that_about_the_means_of_classes(features):
    x, y = features
    z, total = unit(x), np.zeros((D, D))
    for label in range(4):
        rows = z[y == label]
        total += np.cov(rows.T, ddof=1) * (len(rows) - 1)
    np.testing.assert_allclose(within_class_covariance(x, y + 3), total / (40 - 4), rtol=1e-10)


@pytest.mark.parametrize("rank", [D, 3])
def test_it_whitens_by_the_shrunk_covariance(features, rank):
    """By solving with that matrix: y.y' is z.z' in the metric of its inverse, up to a constant."""
    x, y = features
    covariance = within_class_covariance(x, y)
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1], vectors[:, ::-1]
    mean = unit(x).mean(0)
    got = applied(with_values(rank, mean, values, vectors), x)
    kept = np.where(np.arange(D) < rank, values, values[rank:].mean() if rank < D else 0.0)
    shrunk = (1 - A) * values.mean() * np.eye(D) + A * (vectors * kept) @ vectors.T
    z = unit(x) - mean
    wanted = z @ np.linalg.solve(shrunk, z.T)
    rest = (1 - A) * values.mean() + A * (kept[-1] if rank < D else 0.0)
    np.testing.assert_allclose(got @ got.T, rest * wanted, rtol=1e-9, atol=1e-12)


def test_nothing_is_learned_without_shrinkage_weight():
    np.testing.assert_array_equal(gains(np.array([3.0, 2.0, 1.0]), 2, 0.0), 0.0)


@pytest.mark.parametrize("rank", [-1, D + 1])
def test_a_rank_that_makes_no_sense_is_refused(rank):
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.7"):
        FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=rank)


@pytest.mark.parametrize("power", [0.0, -0.5, np.inf, np.nan])
def test_a_power_that_makes_no_sense_is_refused(power):
    with pytest.raises(ValueError, match="power must be a positive number"):
        FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=3, power=power)
    with pytest.raises(ValueError, match="power must be a positive number"):
        Identity((1, 1, D), power=power)


@pytest.mark.parametrize(("rank", "power"), [(0, 0.5), (3, 0.5), (3, 0.7)])
def test_features_are_raised_to_the_power_before_they_get_length_one(features, rank, power):
    """Signed, one by one; without directions nothing follows."""
    x, _ = features
    x[0, :3] = [-4.0, 0.0, 9.0]
    metric = FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=rank, power=power)
    raised = np.array([[math.copysign(math.pow(abs(value), power), value) for value in row] for row in x])
    if power == 0.5:
        np.testing.assert_allclose(raised[0, :3], [-2.0, 0.0, 3.0])
    np.testing.assert_allclose(applied(metric, x), unit(raised), atol=1e-6)


def test_nothing_is_infinite_where_a_feature_is_zero():
    """Neither the value nor the gradient of a metric's own parameters, where the root's slope is infinite."""
    x = jnp.asarray([[0.0, 4.0, 0.0, 1.0, 0.0, 0.0, 9.0], [0.0] * D])[None, :, None, None]
    metric = FeatureMetric((1, 1, D), rngs=nnx.Rngs(0), rank=2, power=0.5)
    value, gradient = nnx.value_and_grad(lambda one: (one(x, train=False) ** 2).sum())(metric)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
