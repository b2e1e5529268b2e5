"""Adaptive importance sampling of a posterior: normal and two-peaked ones whose integrals are known."""

import numpy as np
import pytest
from problems import double
from scipy import stats
from scipy.special import logsumexp

from fewshot.inference.hyperparameters import BLOCK, LEAST_CURVATURE, Mode, posterior_modes, posterior_points

CENTRE, SPREAD = np.array([0.3, -1.0, 0.0]), np.array([2.0, 1.0, 2.0])


def moments(found):
    mean = found.weights @ found.points
    away = found.points - mean
    return mean, (found.weights * away.T) @ away


@double
@pytest.mark.parametrize("narrower", [0.3, 1.0, 3.0, 20.0])
def test_a_normal_likelihood_has_its_normal_posterior_and_evidence(narrower):
    """Also where it is 20 times narrower than the prior, correlated and two deviations off."""
    root = np.array([[1.0, 0.0, 0.0], [0.9, 0.5, 0.0], [-0.7, 0.2, 0.4]]) / narrower
    seen, noise, prior = CENTRE + 2 * SPREAD * [1, -1, 0.5], root @ root.T, np.diag(SPREAD**2)
    likelihood = stats.multivariate_normal(seen, noise)
    asked = []

    def log_likelihood(points):
        asked.append(len(points))
        return likelihood.logpdf(points)

    found = posterior_points(log_likelihood, CENTRE, SPREAD)
    gain = prior @ np.linalg.inv(prior + noise)
    mean, covariance = moments(found)
    expected = prior - gain @ prior
    deviation = np.sqrt(np.diag(expected))
    np.testing.assert_allclose((mean - CENTRE - gain @ (seen - CENTRE)) / deviation, 0, atol=0.12)
    np.testing.assert_allclose(covariance / np.outer(deviation, deviation),
                               expected / np.outer(deviation, deviation), atol=0.15)  # fmt: skip
    exact = stats.multivariate_normal(CENTRE, prior + noise).logpdf(seen)
    np.testing.assert_allclose(found.log_evidence, exact, atol=0.1)
    np.testing.assert_allclose(found.weights.sum(), 1)
    assert set(asked) == {BLOCK}
    assert 1 / np.sum(found.weights**2) > 180


def normal_and_slope(mean, covariance):
    inverse, density = np.linalg.inv(covariance), stats.multivariate_normal(mean, covariance)
    return lambda point: (float(density.logpdf(point)), -inverse @ (point - mean))


@double
def test_the_mode_of_a_normal_posterior_is_its_mean():
    root = np.array([[1.0, 0.0, 0.0], [0.9, 0.5, 0.0], [-0.7, 0.2, 0.4]])
    seen, noise, prior = np.array([2.0, -3.0, 1.0]), root @ root.T, np.diag(SPREAD**2)
    starts = np.stack([CENTRE, CENTRE + SPREAD, CENTRE - 5 * SPREAD])
    (mode,) = posterior_modes(normal_and_slope(seen, noise), CENTRE, SPREAD, starts)
    gain = prior @ np.linalg.inv(prior + noise)
    np.testing.assert_allclose(mode.point, CENTRE + gain @ (seen - CENTRE), atol=0.02)
    np.testing.assert_allclose(mode.covariance, prior - gain @ prior, atol=1e-3)


@double
def test_a_flat_mode_is_no_wider_than_allowed():
    """A likelihood that takes nine tenths of the prior's curvature away."""

    def almost_the_prior_undone(point):
        unit = (point - CENTRE) / SPREAD
        return 0.45 * float(unit @ unit), 0.9 * unit / SPREAD

    (mode,) = posterior_modes(almost_the_prior_undone, CENTRE, SPREAD, CENTRE + SPREAD[None])
    np.testing.assert_allclose((mode.point - CENTRE) / SPREAD, 0, atol=0.1)
    np.testing.assert_allclose(mode.covariance, np.diag(SPREAD**2) / LEAST_CURVATURE, atol=1e-3)


def two_peaks(point, lower):
    """Log of two normal peaks in one dimension, the second lower by so many nats, and its slope; none beyond 5."""
    at, value = np.array([-2.0, 2.0]), np.array([0.0, -lower])
    if abs(point[0]) > 5:
        return np.nan, np.full(1, np.nan)
    logs = value - 0.5 * ((point - at) / 0.1) ** 2
    weights = np.exp(logs - logsumexp(logs))
    return float(logsumexp(logs)), np.array([-(weights @ (point - at)) / 0.01])


@double
@pytest.mark.parametrize("lower", [3.0, -3.0, 30.0])
def test_modes_come_with_the_highest_first_and_none_far_below(lower):
    starts = np.array([[-1.8], [1.8], [-2.1], [9.0]])
    found = posterior_modes(lambda point: two_peaks(point, lower), np.zeros(1), np.ones(1), starts)
    expected = {3.0: [-2, 2], -3.0: [2, -2], 30.0: [-2]}[lower]
    np.testing.assert_allclose([mode.point[0] for mode in found], np.array(expected) / 1.01, atol=0.01)
    np.testing.assert_allclose([mode.covariance for mode in found], 1 / 101, rtol=1e-3)
    nowhere = posterior_modes(lambda point: (np.nan, point), np.zeros(1), np.ones(1), starts)
    assert nowhere == []


@double
@pytest.mark.parametrize("seed", range(3))
def test_a_peak_that_no_point_of_the_prior_meets_is_found_by_its_mode(seed):
    peak = stats.multivariate_normal(CENTRE + 3 * SPREAD, np.diag((SPREAD / 100) ** 2))
    share = np.exp(stats.norm.logpdf(3.0) * 3 - np.log(SPREAD).sum())  # of the prior's density at the peak

    def log_likelihood(points):
        return np.logaddexp(0, peak.logpdf(points) - np.log(share))  # as much evidence as the rest, 1

    modes = [Mode(CENTRE + 3 * SPREAD, np.diag((SPREAD / 100) ** 2))]
    found = posterior_points(log_likelihood, CENTRE, SPREAD, seed, modes)
    assert found.log_evidence == pytest.approx(np.log(2), abs=0.1)
    near = np.linalg.norm((found.points - modes[0].point) / SPREAD, axis=1) < 0.2
    assert found.weights[near].sum() == pytest.approx(0.5, abs=0.05)
    assert posterior_points(log_likelihood, CENTRE, SPREAD, seed).log_evidence == pytest.approx(0, abs=0.1)


@double
def test_two_peaks_keep_their_shares():
    def log_likelihood(points):
        peaks = [np.log(share) + stats.norm(at, 0.15).logpdf(points[:, 0]) for share, at in ((0.8, -1.5), (0.2, 1.5))]
        return logsumexp(peaks, axis=0)

    found = posterior_points(log_likelihood, np.zeros(1), np.ones(1))
    for points in (found, found.thinned(100)):
        np.testing.assert_allclose(points.weights[points.points[:, 0] > 0].sum(), 0.2, atol=0.03)
        np.testing.assert_allclose(points.weights.sum(), 1)
    assert found.thinned(100).points.shape == (100, 1)


@double
def test_what_is_not_finite_has_no_weight():
    def half(points):
        return np.where(points[:, 0] > 0, 0.0, np.nan)

    found = posterior_points(half, np.zeros(1), np.ones(1))
    assert found.weights[found.points[:, 0] < 0].sum() == 0
    np.testing.assert_allclose(found.log_evidence, np.log(0.5), atol=0.01)
    with pytest.raises(FloatingPointError, match="no point"):
        posterior_points(lambda points: np.full(len(points), np.inf), np.zeros(1), np.ones(1))


@double
def test_points_in_fewer_dimensions_are_too_few():
    """One point alone that has a likelihood says nothing of a posterior."""

    def at_one(points):
        return np.where(np.arange(len(points)) == 7, 0.0, -np.inf)

    with pytest.raises(FloatingPointError, match="too few points"):
        posterior_points(at_one, np.zeros(2), np.ones(2))


@double
def test_coordinates_may_be_known_unlike_well():
    deviations = np.array([1e-5, 1.0])
    likelihood = stats.norm(0.1, deviations)
    found = posterior_points(lambda points: likelihood.logpdf(points).sum(axis=1), np.zeros(2), np.ones(2))
    mean, covariance = moments(found)
    np.testing.assert_allclose(mean, [0.1, 0.05], atol=0.05)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), [1e-5, np.sqrt(0.5)], rtol=0.1)
