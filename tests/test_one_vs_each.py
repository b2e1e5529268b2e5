"""The densities of one-vs-each, which are products and have a derivative of their own, against sums of logarithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.models.expectations import MonteCarlo, expect
from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import OneVsEach

CLASSES, POINTS, KEY = 4, 3, jax.random.key(0)
REAL = {"all": None, "masked": jnp.array([True, True, False, True])}


def marginals(seed=0, deviation=1.0):
    rng = np.random.default_rng(seed)
    mean, variance = rng.normal(size=(2, CLASSES, POINTS))
    return Marginals(jnp.asarray(3 * mean), jnp.asarray(deviation * variance**2))


def by_logarithms(q, real):
    """E exp log p(k | f) over the nodes that the likelihood itself takes."""
    points = MonteCarlo(OneVsEach().prediction_draws).points(KEY, CLASSES, q.mean.dtype)

    def densities(f):
        own = [OneVsEach().log_prob(jnp.full(POINTS, k, jnp.int32), f, real) for k in range(CLASSES)]
        return jnp.exp(jnp.stack(own)) * (1.0 if real is None else real[:, None])

    return expect(densities, q, points).T


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
@double
def test_densities_and_their_gradients_are_those_of_sums_of_logarithms(name):
    real, q = REAL[name], marginals()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(POINTS, CLASSES)))

    def weighted(densities):
        return jax.value_and_grad(lambda q: jnp.sum(weights * densities(q)))(q)

    ours = weighted(lambda q: OneVsEach().expected_density(KEY, q, real))
    theirs = weighted(lambda q: by_logarithms(q, real))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), ours, theirs)


@pytest.mark.long
def test_a_density_far_from_the_others_keeps_its_relative_accuracy_in_single_precision():
    f = jnp.array([[0.0], [12.0], [-15.0], [16.0]], jnp.float32)
    point = Marginals(f, jnp.zeros_like(f))
    wide = np.asarray(f, float)[:, 0]
    log = [-sum(np.log1p(np.exp(c - k)) for j, c in enumerate(wide) if j != i) for i, k in enumerate(wide)]
    density = OneVsEach(prediction_draws=2).expected_density(KEY, point)[0]
    np.testing.assert_allclose(np.asarray(density, float), np.exp(log), rtol=1e-5)
