"""A task's own temperature, (T2) to (T4): which images are left out, what is learned, and what it is good for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import FixedPrior, double, problem
from scipy.integrate import quad
from scipy.stats import norm

from fewshot.evaluation.html_report import ADAPTED, CALIBRATED, TEMPERED
from fewshot.inference.inner import cvi, exact, gibbs, run
from fewshot.inference.inner.base import Mask
from fewshot.inference.predictive import predict, temper
from fewshot.learners.task_temperature import (
    FOLDS,
    SPREAD,
    TemperatureMixture,
    left_out,
    posterior_of,
    single,
    task_temperature,
)
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.likelihoods import LabelRegression, OneVsEach, Softmax
from fewshot.training import assessment
from fewshot.training.assessment import EvaluationConfig

KEPT = Path(__file__).resolve().parents[1] / "docs" / "results" / "omniglot-emnist" / "5shot"
KEY = jax.random.key(0)


def learned(kernel, likelihood, prior, y, *temperatures, **options):
    """The temperature of a task on a prior that is given."""
    learner, classes = FixedPrior(prior, kernel, likelihood), prior.mean.shape[0]
    return task_temperature(KEY, learner, jnp.arange(len(y)), y, classes, *temperatures, **options)


def tempered(p, temperature):
    powers = np.asarray(p, np.float64) ** (1 / temperature)
    return powers / powers.sum(-1, keepdims=True)


def test_each_fold_leaves_one_image_of_every_class_out_that_has_another():
    y, real = np.array([0, 1, 0, 2, 1, 0, 0, 1]), np.array([1, 1, 1, 1, 1, 1, 0, 0], bool)
    held = np.asarray(left_out(jnp.asarray(y), jnp.asarray(real), 4))
    assert [list(np.flatnonzero(fold)) for fold in held] == [[0, 1], [2, 4], [5], []]  # class 2 has one image


@pytest.mark.long
@double
def test_left_out_images_are_predicted_from_the_others_alone():
    """Label regression, whose task of the remaining points can be solved by itself: (T3) term by term."""
    likelihood, task = LabelRegression(0.3), problem(1, points=8)
    held = np.asarray(left_out(task.y, jnp.ones(8, bool), FOLDS))
    logs, spread = 0.0, 0.35
    nodes = spread * np.linspace(-5, 5, 41)
    for fold in held[held.any(1)]:
        rest, new = np.flatnonzero(~fold), np.flatnonzero(fold)
        mean, covariance = task.prior.mean, task.prior.covariance
        prior = GaussianPrior(mean[:, rest], covariance[np.ix_(rest, rest)])
        query = Query(mean[:, new], covariance[np.ix_(new, rest)], jnp.diagonal(covariance)[new])
        posterior = run(KEY, exact(likelihood), prior, task.y[rest], steps=1)
        p = np.asarray(predict(KEY, likelihood, posterior, query))
        right = np.stack([tempered(p, 0.7 * np.exp(node))[np.arange(len(new)), task.y[new]] for node in nodes])
        logs += np.log(right).sum(1)
    weights = np.exp(logs - nodes**2 / (2 * spread**2))
    found = learned(exact(likelihood), likelihood, task.prior, task.y, 2.0, 0.7, spread=spread)
    np.testing.assert_allclose(found.weights, weights / weights.sum(), rtol=1e-6)
    np.testing.assert_allclose(found.temperatures, 2.0 * np.exp(nodes), rtol=1e-12)


@double
def test_the_rule_over_temperatures_is_the_integral():
    rng = np.random.default_rng(0)
    p, y, new = rng.dirichlet(np.ones(3), (1, 12)), rng.integers(0, 3, 12), rng.dirichlet(np.ones(3))

    def density(departure, of=1.0):
        right = tempered(p[0], 0.6 * np.exp(departure))[np.arange(12), y]
        return np.prod(right) * norm.pdf(departure, scale=SPREAD) * of

    total = quad(density, -2, 2)[0]
    expected = [quad(lambda d, k=k: density(d, tempered(new, 0.9 * np.exp(d))[k]), -2, 2)[0] / total for k in range(3)]
    found = posterior_of(jnp.asarray(p), jnp.asarray(y), jnp.ones((1, 12), bool), 0.9, 0.6)
    np.testing.assert_allclose(found.temper(jnp.asarray(new[None]))[0], expected, rtol=1e-4)
    mean = quad(lambda d: density(d, np.log(0.9) + d), -2, 2)[0] / total
    np.testing.assert_allclose(found.mean, np.exp(mean), rtol=1e-4)


def test_many_images_tell_their_temperature():
    """Labels drawn at 1.5 times the temperature of training, within three standard deviations of the estimate."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(0.3 * np.ones(5), 4000).astype(np.float32)
    y = [rng.choice(5, p=row) for row in tempered(p, 0.4 * 1.5)]
    found = posterior_of(jnp.asarray(p[None]), jnp.asarray(y), jnp.ones((1, 4000), bool), 0.8, 0.4)
    spread = np.sqrt(np.sum(found.weights * (np.log(found.temperatures) - np.log(found.mean)) ** 2))
    assert spread < 0.06
    assert abs(np.log(float(found.mean) / 1.2)) < 3 * max(spread, 0.02)


@pytest.mark.long
def test_nothing_is_learned_where_nothing_can_be_left_out():
    p = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(3), (1, 4))).at[0, 0].set(jnp.nan)
    found = posterior_of(p, jnp.zeros(4, int), jnp.zeros((1, 4), bool), 0.5, 0.4)
    np.testing.assert_allclose(found.temper(p[0, 1:]), temper(p[0, 1:], 0.5), rtol=1e-6)
    one = learned(cvi(Softmax()), Softmax(), problem(0, points=3).prior, jnp.arange(3), 0.5, 0.4)
    assert one.weights.max() == 1.0 and abs(one.mean - 0.5) < 1e-6  # one image a class


@pytest.mark.long
def test_a_fold_that_fails_teaches_nothing():
    task = problem(0, points=9)
    kernel = cvi(Softmax())
    usual = kernel.init

    def failing(key, prior, y, mask=None):
        """Not finite where the first point is left out."""
        return jax.tree.map(
            lambda leaf: jnp.where(mask.points[0], leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            usual(key, prior, y, mask),
        )

    held = left_out(task.y, jnp.ones(9, bool), FOLDS)
    assert held[0, 0] and held[1:].any()
    found = learned(kernel._replace(init=failing), Softmax(), task.prior, task.y, 0.5, 0.4)
    others = learned(kernel, Softmax(), task.prior, task.y, 0.5, 0.4)
    assert np.isfinite(found.weights).all() and not np.allclose(found.weights, others.weights, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "make, likelihood",
    [(cvi, Softmax()), pytest.param(gibbs, OneVsEach(), marks=pytest.mark.slow), (exact, LabelRegression())],
    ids=["cvi", "gibbs", "exact"],
)
@double
def test_any_inference_will_do_and_padding_changes_nothing(make, likelihood):
    task = problem(2, points=8)
    kernel = make(likelihood)
    found = learned(kernel, likelihood, task.prior, task.y, 0.5, 0.4)
    np.testing.assert_allclose(np.sum(found.weights), 1.0, rtol=1e-5)
    assert 0.2 < found.mean < 1.2
    if make is exact:  # the others draw once for each point
        points = np.minimum(np.arange(11), 7)
        learner, mask = FixedPrior(task.prior, kernel, likelihood), Mask(jnp.arange(11) < 8, jnp.ones(3, bool))
        again = task_temperature(KEY, learner, jnp.asarray(points), task.y[points], 3, 0.5, 0.4, mask)
        np.testing.assert_allclose(again.weights, found.weights, rtol=1e-9)


def test_tasks_are_tempered_each_by_its_own():
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.dirichlet(np.ones(3), (2, 4)))
    each = TemperatureMixture(jnp.asarray([[0.5, 2.0], [1.0, 3.0]]), jnp.asarray([[0.25, 0.75], [1.0, 0.0]]))
    expected = 0.25 * tempered(p[0], 0.5) + 0.75 * tempered(p[0], 2.0)
    np.testing.assert_allclose(each.temper(p), np.stack([expected, p[1]]), rtol=1e-5)
    np.testing.assert_allclose(single(0.5).temper(p), tempered(p, 0.5), rtol=1e-5)


@pytest.mark.slow
def test_letters_are_predicted_better_at_a_temperature_of_their_own():
    """The kept run from Omniglot to EMNIST: better than at the temperature of EMNIST's validation classes."""
    _, found = assessment.assess(EvaluationConfig(str(KEPT), episodes=400, calibrate=True, adapt=True))
    usual, adapted, calibrated = (found.rows[name].summary.metrics for name in (TEMPERED, ADAPTED, CALIBRATED))
    assert adapted["nll"] < 0.99 * usual["nll"] and adapted["nll"] < calibrated["nll"]
    assert adapted["ece"] < usual["ece"] < 0.02 and adapted["accuracy"] >= usual["accuracy"] - 0.002
