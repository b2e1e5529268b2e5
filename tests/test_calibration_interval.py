"""The interval of the debiased calibration error: coverage in repeated experiments, limits with closed forms."""

import numpy as np
import pytest
from predicted import LABELS, PROBABILITIES, constant_predictions, dependent_labels, random_predictions
from scipy.optimize import brentq
from scipy.special import expit, ndtr
from scipy.stats import ncx2, norm

from fewshot.evaluation import calibration_error
from fewshot.evaluation.calibration_error import equal_mass, equal_width, mean_gap
from fewshot.evaluation.calibration_interval import _seen, calibration_interval, gap_interval
from fewshot.evaluation.resampling import bootstrap

CORRELATION = 0.1  # of what makes two queries of an episode right


def confidences(rng, episodes, queries):
    """As those of a 5-way model: most near 1, episodes easier and harder."""
    level = 2.5 + 0.5 * rng.normal(size=(episodes, 1)) + 1.5 * rng.normal(size=(episodes, queries))
    return 0.2 + 0.8 * expit(level)


def miscalibrated(rng, shape, size, truth):
    """Predictions [E, Q, 5] and labels whose root mean squared calibration error is `truth`, in their own bins.

    shape: how much too confident a query of that confidence is, to a factor. Queries of an episode succeed together.
    """
    confidence = confidences(rng, *size)
    gap = -shape(confidence)
    if truth:
        gap = gap * truth / root_mean_square(confidence, gap)
        assert (confidence + gap >= 0).all()
    uniform = ndtr(
        np.sqrt(CORRELATION) * rng.normal(size=(size[0], 1)) + np.sqrt(1 - CORRELATION) * rng.normal(size=size)
    )
    right = uniform < confidence + (gap if truth else 0)
    rest = (1 - confidence) / 4
    probabilities = np.stack([confidence, *[rest] * 4], axis=-1)
    return probabilities, np.where(right, 0, 1)


def root_mean_square(confidence, gap):
    """Of the gaps of the bins, each the mean over its queries."""
    held = equal_mass(np.stack([confidence, 0 * confidence], axis=-1), 15)
    number = held.cell[..., 0].ravel()
    means = np.bincount(number, gap.ravel(), minlength=15) / np.maximum(np.bincount(number, minlength=15), 1)
    return np.sqrt(np.square(means[number]).mean())


SHAPES = {"all alike": np.ones_like, "as by a temperature": lambda c: (c - 0.2) * (1 - c)}


def covered(shape, size, truth, experiments, draws):
    rng, hits = np.random.default_rng(1), []
    for _ in range(experiments):
        probabilities, labels = miscalibrated(rng, SHAPES[shape], size, truth)
        low, high = calibration_interval(rng, probabilities, labels, draws=draws)
        hits.append(low <= truth <= high)
    return np.mean(hits)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("truth", [0.0, 0.01, 0.05])
def test_intervals_hold_the_truth_in_92_to_98_of_100_experiments(shape, truth):
    """2,000 data sets of 200 episodes: the standard error of a coverage of 0.95 is 0.005.

    Seen: 0.970 at 0; 0.979 and 0.975 at .01; 0.962 and 0.952 at .05. At 0 there is nothing to miss below.
    """
    assert 0.92 <= covered(shape, (200, 25), truth, 2000, 500) <= 0.98


@pytest.mark.parametrize("truth", [0.0, 0.05])
def test_intervals_hold_the_truth_in_most_of_a_few_experiments(truth):
    """The chance of fewer than 50 of 60 at a coverage of 0.95 is 1e-4."""
    assert covered("all alike", (80, 15), truth, 60, 300) >= 50 / 60


def test_the_basic_bootstrap_of_ece_misses_a_perfect_model():
    """Why ECE has no interval: of B equal bins its centre is 0.47 B noises above 0 (docs/evaluation.md)."""
    rng, hits = np.random.default_rng(0), []
    for _ in range(40):
        probabilities, labels = miscalibrated(rng, np.ones_like, (80, 15), 0.0)
        held = equal_width(probabilities, 15)
        low, _ = bootstrap(rng, mean_gap, held.gaps(labels), held.counts, draws=200, least=-1.0)
        hits.append(low <= 0)
    assert np.mean(hits) < 0.8


@pytest.mark.parametrize("episodes", [3, 5])
def test_what_is_seen_of_few_episodes_has_the_spread_that_their_noise_says(episodes):
    """Of one bin without a gap: the mean square of the sum, and of the noise that stands for it, over 4,000 sets."""
    rng, count = np.random.default_rng(5), np.full((episodes, 1), 20.0)
    sets = [_seen(rng.normal(size=(episodes, 1)), count) for _ in range(4000)]
    seen, noise = (np.mean([np.square(getattr(one, name)).sum() for one in sets]) for name in ("gaps", "noise"))
    assert noise / seen == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("gap", [0.0, 0.004, 0.01, 0.05])
def test_one_bin_has_the_interval_of_a_squared_normal(gap):
    """One bin: the square is noncentral chi-square of one degree of freedom, whose tails can be inverted exactly."""
    rng = np.random.default_rng(3)
    count = np.full((1000, 1), 20.0)
    sums = rng.normal(20 * gap, 1.0, size=(1000, 1))
    sums += 20 * gap - sums.mean()  # so that what is seen is the gap itself
    low, high = gap_interval(rng, sums, count, draws=10_000)
    variance = sums.var(ddof=1) / (1000 * 400)
    square = gap**2 - variance  # debiased

    def limit(seen, tail):
        total = (seen + variance) / variance
        if ncx2.cdf(total, 1, 1e-12) <= tail:
            return 0.0
        return np.sqrt(variance * brentq(lambda by: ncx2.cdf(total, 1, by) - tail, 1e-12, 1e5))

    np.testing.assert_allclose(
        [low, high], [limit(square, 0.975), limit(max(square, 0.0), 0.025)], atol=0.06 * variance**0.5
    )


def test_a_large_error_has_the_interval_of_the_delta_method():
    """Far from 0 the root is as good as linear: one bin right 60% of the time, at a confidence of 0.8."""
    rng = np.random.default_rng(0)
    probabilities = constant_predictions(0.8, 400, 10)
    labels = dependent_labels(rng, 0.6, 400, 10, 0.6)
    right = (labels == 0).mean(-1)
    half = norm.ppf(0.975) * right.std(ddof=1) / 20
    low, high = calibration_interval(rng, probabilities, labels, draws=4000)
    gap = 0.8 - right.mean()
    np.testing.assert_allclose([low, high], [gap - half, gap + half], atol=0.06 * half)


def test_the_interval_is_about_the_estimate():
    probabilities, labels = random_predictions(0, episodes=100)
    low, high = calibration_interval(np.random.default_rng(0), probabilities, labels)
    assert 0 < low < calibration_error.ece_debiased(probabilities, labels) < high < 1


def test_where_less_is_seen_than_chance_offers_the_interval_begins_at_0():
    """Exactly as many right as predicted: the debiased square is negative."""
    probabilities = constant_predictions(0.75, 40, 4)
    labels = np.tile([0, 0, 0, 1], (40, 1))
    rng = np.random.default_rng(0)
    labels = rng.permutation(labels.ravel()).reshape(40, 4)
    assert calibration_error.squared_error_debiased(probabilities, labels) < 0
    low, high = calibration_interval(rng, probabilities, labels)
    assert low == 0 and 0.01 < high < 0.2


def test_predictions_without_noise_have_an_interval_without_width():
    labels = np.array([[0, 1, 2]] * 5)
    assert calibration_interval(np.random.default_rng(0), np.eye(3)[labels], labels) == (0, 0)
    assert calibration_interval(np.random.default_rng(0), np.eye(3)[labels], (labels + 1) % 3) == (1, 1)


def test_one_episode_has_no_interval():
    found = calibration_interval(np.random.default_rng(0), PROBABILITIES[:1], LABELS[:1])
    assert np.isnan(found).all()


def test_the_episode_is_the_unit():
    """Every query twice is no more evidence; every episode twice is."""
    probabilities, labels = random_predictions(1, episodes=60)
    width = np.diff(calibration_interval(np.random.default_rng(0), probabilities, labels))
    same = [np.concatenate([array] * 2, axis=1) for array in (probabilities, labels)]
    assert np.diff(calibration_interval(np.random.default_rng(0), *same)) == pytest.approx(width, rel=0.1)
    twice = [np.concatenate([array] * 2, axis=0) for array in (probabilities, labels)]
    assert np.diff(calibration_interval(np.random.default_rng(0), *twice)) < 0.8 * width
