"""Class probabilities from posteriors: one query at a time, mixtures, absent classes, temperature."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import product_nodes, start
from problems import FixedPoints, problem

from fewshot.inference.inner import cvi, gibbs, run
from fewshot.inference.predictive import draws_of_each, log_expected_density, predict, predict_marginals, temper
from fewshot.models import LIKELIHOODS
from fewshot.models.gaussian import Marginals, Query
from fewshot.models.likelihoods import OneVsEach, Softmax
from fewshot.models.likelihoods.base import log_densities


@pytest.fixture(scope="module")
def posterior():
    task, kernel = problem(15), cvi(Softmax(), expectation=FixedPoints(product_nodes()))
    return task, jax.jit(lambda: run(*start(task)[:1], kernel, *start(task)[1:], steps=4))()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_query_does_not_depend_on_the_others(posterior, likelihood):
    task, fitted = posterior
    predicted = jax.jit(lambda query: predict(jax.random.key(1), LIKELIHOODS[likelihood](), fitted, query))
    junk = Query(task.query.mean.at[:, 1:].set(30.0), task.query.cross.at[1:].set(-3.0), task.query.variance + 1.0)
    junk = junk._replace(variance=junk.variance.at[0].set(task.query.variance[0]))
    np.testing.assert_array_equal(predicted(task.query)[0], predicted(junk)[0])
    alone = Query(task.query.mean[:, :1], task.query.cross[:1], task.query.variance[:1])
    np.testing.assert_allclose(predicted(alone)[0], predicted(task.query)[0], rtol=1e-5)
    assert not np.allclose(predicted(task.query)[1], predicted(junk)[1])


def test_prediction_is_that_of_the_query_marginals_and_of_existing_classes(posterior):
    task, fitted = posterior
    real = jnp.asarray([True, True, False])

    @jax.jit
    def both_ways(query):
        by_hand = Softmax().predict(jax.random.key(2), fitted.predict(query), real)
        return predict(jax.random.key(2), Softmax(), fitted, query, real), by_hand

    probabilities, by_hand = both_ways(task.query)
    np.testing.assert_allclose(probabilities, by_hand, rtol=1e-6)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    assert (probabilities[:, 2] == 0).all()


@pytest.mark.long
def test_sums_predict_independent_classes_without_noise(posterior):
    """Any key gives the same, which many draws approach; what is differentiated and mixtures keep their draws."""
    task, fitted = posterior
    summed = Softmax(summed=True)
    found = [predict(jax.random.key(seed), summed, fitted, task.query) for seed in (0, 1)]
    np.testing.assert_array_equal(*found)
    drawn = predict(jax.random.key(0), Softmax(prediction_draws=2**14), fitted, task.query)
    assert 0 < np.abs(drawn - found[0]).max() < 2e-3
    marginals = fitted.predict(task.query)
    mixture = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), marginals)
    ends = [predict_marginals(jax.random.key(seed), summed, mixture) for seed in (0, 1)]
    assert np.abs(ends[0] - ends[1]).max() > 0
    own = jnp.zeros(marginals.mean.shape[1], int)
    values = [log_expected_density(jax.random.key(seed), summed, marginals, own) for seed in (0, 1)]
    assert np.abs(values[0] - values[1]).max() > 0


def test_plugging_in_reads_the_mean_alone(posterior):
    """p(k | m) is the softmax of the query means; bounds and expected densities stay as they are."""
    task, fitted = posterior
    plug_in, real = Softmax(plug_in=True), jnp.asarray([True, True, False])
    mean = np.asarray(fitted.predict(task.query).mean, float)
    by_hand = np.exp(mean) / np.exp(mean).sum(0)
    found = predict(jax.random.key(1), plug_in, fitted, task.query)
    np.testing.assert_allclose(found, by_hand.T, rtol=1e-5)
    assert np.abs(found - predict(jax.random.key(1), Softmax(), fitted, task.query)).max() > 0.01
    kept = predict(jax.random.key(1), plug_in, fitted, task.query, real)
    np.testing.assert_allclose(kept[:, :2], by_hand.T[:, :2] / by_hand.T[:, :2].sum(1, keepdims=True), rtol=1e-5)
    assert (kept[:, 2] == 0).all()
    marginals = fitted.predict(task.query)
    own = jnp.zeros(marginals.mean.shape[1], int)
    for value in (
        lambda one: one.expected_log_prob(own, marginals),
        lambda one: log_expected_density(jax.random.key(2), one, marginals, own),
    ):
        np.testing.assert_array_equal(value(plug_in), value(Softmax()))


def test_tempering_changes_confidence_and_not_the_order():
    probabilities = jnp.asarray([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    np.testing.assert_allclose(temper(probabilities, 1.0), probabilities, atol=1e-6)
    squared = np.square([0.7, 0.2, 0.1])
    np.testing.assert_allclose(temper(probabilities, 0.5)[0], squared / squared.sum(), rtol=1e-5)
    for smallest in (1e-10, float(np.finfo(np.float32).tiny)):
        np.testing.assert_array_equal(temper(jnp.array([0.2, 0.5, 0.3]), smallest), [0, 1, 0])
    flat = temper(probabilities, 100.0)
    assert np.isfinite(flat).all() and (np.argsort(flat[0]) == np.argsort(probabilities[0])).all()
    assert flat[0].max() < 0.35


def test_a_mixture_of_points_divides_the_draws_and_averages_densities():
    """At certain f every draw is the same: (O12) is then a ratio of sums; for softmax, a mean of probabilities."""
    mean = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)) * [[[3.0]], [[0.1]]], jnp.float32)  # [M, C, Q]
    marginals = Marginals(mean, jnp.zeros_like(mean))
    for likelihood in (OneVsEach(), Softmax()):
        found = jax.jit(partial(predict_marginals, jax.random.key(0), likelihood))(marginals)
        densities = np.mean([np.exp(log_densities(likelihood, f)) for f in mean], axis=0)
        np.testing.assert_allclose(found, (densities / densities.sum(0)).T, rtol=1e-5)
    assert [draws_of_each(512, components) for components in (1, 3, 4, 20)] == [512, 170, 128, 32]


@pytest.mark.slow
def test_a_mixture_of_composite_densities_is_normalised_once():
    """(O12): the mean over the chains of E[OVE_k], then normalised; not the mean of what each chain predicts."""
    task, likelihood = problem(5, scale=100.0), OneVsEach(prediction_draws=4096)
    kernel = gibbs(likelihood, chains=4)
    posterior = run(jax.random.key(0), kernel, task.prior, task.y, steps=2)
    value = predict(jax.random.key(1), likelihood, posterior, task.query)
    marginals = posterior.predict(task.query)
    chains = [jax.tree.map(lambda leaf, chain=chain: leaf[chain], marginals) for chain in range(4)]
    densities = np.stack([likelihood.expected_density(jax.random.key(2), chain) for chain in chains])
    once = densities.mean(0) / densities.mean(0).sum(1, keepdims=True)
    each = np.mean(densities / densities.sum(2, keepdims=True), axis=0)
    assert np.abs(value - once).max() < 2e-3 < np.abs(each - once).max()
    assert np.abs(value - once).max() < 0.5 * np.abs(value - each).max()
