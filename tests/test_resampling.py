"""Floors and intervals against theory and repeated experiments."""

import itertools

import numpy as np
import pytest
from predicted import (
    LABELS,
    PROBABILITIES,
    calibrated_labels,
    constant_predictions,
    dependent_labels,
    random_predictions,
)
from scipy.stats import multivariate_normal, norm

from fewshot.evaluation import calibration_error, resampling
from fewshot.evaluation.resampling import bootstrap, floors, redraw


@pytest.mark.parametrize("correlation", [0.0, 0.4, 1.0])
def test_redrawn_labels_have_the_given_probabilities(correlation):
    probabilities = np.broadcast_to(np.array([0.2, 0.5, 0.3]), (4000, 2, 3))
    (labels,) = redraw(np.random.default_rng(0), probabilities, correlation, draws=1)
    shares = np.bincount(labels.ravel(), minlength=3) / labels.size
    error = np.sqrt(0.25 * (1 + correlation) / labels.size)
    np.testing.assert_allclose(shares, [0.2, 0.5, 0.3], atol=4 * error)
    # Classes lie between the quantiles of 0, 0.5, 0.8 and 1: two queries agree where both fall between the same two.
    joint = multivariate_normal(cov=[[1, correlation], [correlation, 1]], allow_singular=True)
    ends = norm.ppf([1e-12, 0.5, 0.8, 1 - 1e-12])
    below = {(a, b): joint.cdf([a, b]) for a in ends for b in ends}
    agree = sum(
        below[high, high] - below[low, high] - below[high, low] + below[low, low]
        for low, high in itertools.pairwise(ends)
    )
    assert (labels[:, 0] == labels[:, 1]).mean() == pytest.approx(agree, abs=4 * 0.5 / np.sqrt(len(labels)))


def test_certain_predictions_come_true():
    labels = np.array([[0, 1, 2]])
    assert all((drawn == labels).all() for drawn in redraw(np.random.default_rng(0), np.eye(3)[labels], 0.3, 20))


@pytest.mark.long
@pytest.mark.parametrize("correlation, independent", [(0.0, 300 * 20), (1.0, 300)])
def test_floor_of_one_confidence_is_that_of_a_binomial(correlation, independent):
    # One bin: ECE = |share right - c|. Queries that succeed together count as one query per episode.
    probabilities, labels = constant_predictions(0.7, 300, 20), np.zeros((300, 20), int)
    found = floors(np.random.default_rng(0), probabilities, labels, draws=1000, correlation=correlation)
    sd = np.sqrt(0.7 * 0.3 / independent)
    # Of two classes one is wrong where the other is right: class-wise, both show the same gap.
    for name in ("ece", "mce", "ece_equal_mass", "ece_class_wise"):
        assert found[name].mean == pytest.approx(np.sqrt(2 / np.pi) * sd, rel=0.08)
        assert found[name].quantile95 == pytest.approx(1.96 * sd, rel=0.08)
    assert abs(found["ece_debiased"].mean) < 0.3 * sd


@pytest.mark.long
@pytest.mark.parametrize("sharing", [0.0, 0.3])
def test_floor_is_the_mean_error_of_repeated_calibrated_experiments(sharing):
    rng = np.random.default_rng(1)
    probabilities = constant_predictions(0.9, 200, 30)
    experiments = [dependent_labels(rng, 0.9, 200, 30, sharing) for _ in range(200)]
    truth = np.mean([calibration_error.ece(probabilities, labels) for labels in experiments])
    found = [floors(rng, probabilities, labels, draws=100)["ece"].mean for labels in experiments[:10]]
    assert np.mean(found) == pytest.approx(truth, rel=0.1)
    independent = floors(rng, probabilities, experiments[0], draws=400, correlation=0.0)["ece"].mean
    assert (truth > 1.5 * independent) == (sharing > 0)


def test_floors_of_all_errors_hold_for_many_confidences():
    rng = np.random.default_rng(3)
    probabilities = rng.dirichlet(np.ones(5), size=(30, 20))
    experiments = [calibrated_labels(rng, probabilities) for _ in range(150)]
    found = floors(rng, probabilities, experiments[0], draws=200, correlation=0.0)
    for name, (binned, error) in calibration_error.ERRORS.items():
        held = binned(probabilities, 15)
        seen = np.array([error(held.gaps(labels), held.counts) for labels in experiments])
        assert abs(seen.mean() - found[name].mean) < 4 * seen.std() * np.sqrt(1 / 150 + 1 / 200)
        assert 0.83 < (seen <= found[name].quantile95).mean() <= 1


def test_the_band_of_a_reliability_diagram_is_that_of_a_binomial():
    rng = np.random.default_rng(0)
    probabilities = constant_predictions(0.7, 100, 20)
    labels = dependent_labels(rng, 0.9, 100, 20, 0.0)
    curve = resampling.reliability(rng, probabilities, labels)
    right = (labels == 0).mean()
    np.testing.assert_allclose([curve.confidence, curve.accuracy, curve.counts], [[0.7], [right], [2000]])
    half = 1.96 * np.sqrt(0.7 * 0.3 / 2000)
    np.testing.assert_allclose([curve.low[0], curve.high[0]], [0.7 - half, 0.7 + half], atol=0.2 * half)


def test_miscalibration_does_not_raise_the_floor():
    # Confidence 0.55, right 95% of the time, independently: a gap of 0.4 and no dependence.
    rng = np.random.default_rng(2)
    probabilities = constant_predictions(0.55, 400, 30)
    labels = dependent_labels(rng, 0.95, 400, 30, 0.0)
    assert calibration_error.ece(probabilities, labels) == pytest.approx(0.4, abs=0.01)
    assert resampling.within_episode_correlation(probabilities, labels) < 0.02
    found = floors(rng, probabilities, labels, draws=400)["ece"]
    assert found.mean == pytest.approx(np.sqrt(2 / np.pi * 0.55 * 0.45 / 12000), rel=0.15)


def test_floors_depend_on_the_generator_only_through_its_state():
    probabilities, labels = random_predictions(3)
    first, again = (floors(np.random.default_rng(5), probabilities, labels, draws=10) for _ in range(2))
    assert first == again
    assert first != floors(np.random.default_rng(6), probabilities, labels, draws=10)


def test_correlation_of_predictions_that_are_all_right_is_zero():
    probabilities, labels = np.eye(3)[np.array([[0, 1, 2]] * 2)], np.array([[0, 1, 2]] * 2)
    assert resampling.within_episode_correlation(probabilities, labels) == 0.0


def test_the_bootstrap_of_a_mean_is_its_normal_interval():
    values = np.random.default_rng(0).gamma(2.0, size=500)
    low, high = bootstrap(np.random.default_rng(1), np.mean, values, draws=4000)
    half = 1.96 * values.std(ddof=1) / np.sqrt(500)
    np.testing.assert_allclose([low, high], [values.mean() - half, values.mean() + half], atol=0.08 * half)


def test_the_bootstrap_draws_whole_episodes():
    # All queries of an episode agree: the interval is that of 50 numbers, not of 2,000.
    episodes = np.random.default_rng(0).integers(0, 2, size=50).astype(float)
    low, high = bootstrap(np.random.default_rng(1), np.mean, np.repeat(episodes[:, None], 40, axis=1))
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(50), rel=0.15)


def test_the_bootstrap_takes_off_what_chance_adds():
    # |mean| of 400 standard normals: a biased estimate of 0, raised again by resampling.
    values = np.random.default_rng(3).normal(size=400)
    low, high = bootstrap(np.random.default_rng(1), lambda x: abs(x.mean()), values)
    assert low <= 0 < high


def test_one_episode_has_no_interval():
    assert np.isnan(bootstrap(np.random.default_rng(0), np.mean, np.ones((1, 5)))).all()


def test_two_episodes_have_floors():
    found = floors(np.random.default_rng(0), PROBABILITIES, LABELS, draws=20)
    assert set(found) == set(calibration_error.ERRORS)


def test_intervals_stay_where_the_statistic_can_be():
    values = np.array([1.0, 1.0, 1.0, 1.0, 0.9])
    free = bootstrap(np.random.default_rng(0), np.mean, values)
    cut = bootstrap(np.random.default_rng(0), np.mean, values, least=0.0, most=1.0)
    assert free.high > 1.0 == cut.high and cut.low == free.low
