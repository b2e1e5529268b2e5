"""Calibration errors against hand-computed cases, loops, exact identities and repeated experiments."""

import itertools

import numpy as np
import pytest
from predicted import LABELS, PROBABILITIES, calibrated_labels, constant_predictions, dependent_labels
from predicted import random_predictions as random

from fewshot.evaluation import calibration_error as errors
from fewshot.evaluation import metrics


def gaps_of(confidence, right, edges):
    """(n_b, |accuracy - confidence|) of every bin (low, high] that holds anything."""
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            yield inside.sum(), abs(right[inside].mean() - confidence[inside].mean())


def mean_of(gaps, n):
    return sum(count * gap for count, gap in gaps) / n


def test_hand_computed_values():
    # Bins of 0.4 and 0.5: gaps 0.6 and 0.5, one query each; bin of 0.8: accuracy 0.5, gap 0.3, two queries.
    assert errors.ece(PROBABILITIES, LABELS) == pytest.approx((0.6 + 0.5 + 2 * 0.3) / 4)
    assert errors.mce(PROBABILITIES, LABELS) == pytest.approx(0.6)
    # Two bins of two queries: 0.4 and 0.5 (both right), 0.8 twice (one right).
    assert errors.ece_equal_mass(PROBABILITIES, LABELS, bins=2) == pytest.approx((1.1 + 0.6) / 4)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_errors_agree_with_a_loop(bins):
    probabilities, labels = random(0)
    confidence, right = probabilities.max(-1).ravel(), (probabilities.argmax(-1) == labels).ravel()
    gaps = list(gaps_of(confidence, right, np.arange(bins + 1) / bins))
    assert errors.ece(probabilities, labels, bins) == pytest.approx(mean_of(gaps, labels.size))
    assert errors.mce(probabilities, labels, bins) == pytest.approx(max(gap for _, gap in gaps))
    by_class = [
        mean_of(gaps_of(probabilities[..., c].ravel(), (labels == c).ravel(), np.arange(bins + 1) / bins), labels.size)
        for c in range(4)
    ]
    assert errors.ece_class_wise(probabilities, labels, bins) == pytest.approx(np.mean(by_class))


@pytest.mark.parametrize("bins", [1, 7, 11])
def test_bins_of_equal_mass_hold_equally_many(bins):
    probabilities, labels = random(1)
    confidence, right = probabilities.max(-1).ravel(), (probabilities.argmax(-1) == labels).ravel()
    order = np.argsort(confidence)
    parts = np.split(order, bins)  # 77 queries
    expected = [(len(part), abs(right[part].mean() - confidence[part].mean())) for part in parts]
    assert errors.ece_equal_mass(probabilities, labels, bins) == pytest.approx(mean_of(expected, 77))


def test_any_number_of_queries_falls_into_bins_of_equal_mass():
    """15 (500 / 15) is more than 500 in floating point: a bin's end must not be counted that way."""
    for queries in (*range(1, 300), 500):
        p = np.linspace(0.5, 1, queries)[None, :, None] * [1, 0] + [0, 1e-3]
        counts = errors.equal_mass(p, 15).counts.sum(0)
        assert counts.sum() == queries
        assert counts.max() - counts.min() <= 1


def test_equal_confidences_share_a_bin_in_any_order():
    probabilities, labels = constant_predictions(0.7, 3, 5), np.array([[0] * 5, [1] * 5, [0] * 5])
    for order in ([0, 1, 2], [1, 0, 2]):
        assert errors.ece_equal_mass(probabilities, labels[order], bins=4) == pytest.approx(abs(2 / 3 - 0.7))


def test_bins_are_closed_on_the_right():
    # With two bins 0.5 belongs to the lower one, so the gaps -0.5 and +0.4 do not cancel.
    probabilities, labels = np.array([[[0.5, 0.5], [0.6, 0.4]]]), np.array([[1, 0]])
    assert errors.ece(probabilities, labels, bins=2) == pytest.approx(0.45)


@pytest.mark.parametrize("seed", range(3))
def test_the_terms_of_the_brier_score_add_up_exactly(seed):
    probabilities, labels = random(seed, episodes=5, queries=9, classes=3 + seed)
    for bins in (1, 4, 15):
        parts = errors.brier_decomposition(probabilities, labels, bins)
        total = parts.reliability - parts.resolution + parts.uncertainty + parts.within_bins
        assert total == pytest.approx(metrics.brier(probabilities, labels), rel=1e-12)


def test_the_terms_of_the_brier_score_are_murphys_where_a_bin_holds_one_value():
    # One confidence, right in 8 of 20: reliability 2 (.7 - .4)^2, no resolution, uncertainty 2 * .4 * .6.
    probabilities, labels = constant_predictions(0.7, 2, 10), np.repeat([[0, 1]], [8, 12], axis=1).reshape(2, 10)
    parts = errors.brier_decomposition(probabilities, labels)
    np.testing.assert_allclose(parts, [2 * 0.09, 0, 2 * 0.24, 0], atol=1e-12)
    # Certain and always right: all of the uncertainty is resolved.
    parts = errors.brier_decomposition(np.eye(2)[labels], labels)
    np.testing.assert_allclose(parts, [0, 2 * 0.24, 2 * 0.24, 0], atol=1e-12)


def test_the_debiased_square_is_kumars_for_one_query_an_episode():
    rng = np.random.default_rng(0)
    probabilities = constant_predictions(0.8, 40, 1)
    labels = dependent_labels(rng, 0.6, 40, 1, 0.0)
    right = (labels == 0).mean()
    expected = (right - 0.8) ** 2 - right * (1 - right) / 39
    assert errors.squared_error_debiased(probabilities, labels) == pytest.approx(expected, rel=1e-10)
    root = errors.ece_debiased(probabilities, labels)
    assert root == pytest.approx(np.sign(expected) * np.sqrt(abs(expected)))


def test_the_debiased_square_is_the_mean_over_pairs_of_different_episodes():
    probabilities, labels = random(2, episodes=4, queries=3)
    residual = (probabilities.argmax(-1) == labels) - probabilities.max(-1)
    pairs = [
        residual[a, i] * residual[b, j]
        for a in range(4) for b in range(4) if a != b for i in range(3) for j in range(3)
    ]  # fmt: skip
    assert errors.squared_error_debiased(probabilities, labels, bins=1) == pytest.approx(np.mean(pairs))


def test_bins_of_the_debiased_square_weigh_as_many_queries_as_they_hold():
    """Three queries each, of three episodes and of two: 3 and 2 pairs, but the same weight (M1)."""
    confidence, episode = np.array([0.6, 0.65, 0.7, 0.8, 0.85, 0.9]), [0, 1, 2, 0, 0, 1]
    probabilities, labels = np.zeros((3, 3, 2)), np.zeros((3, 3), int)
    probabilities[..., 0], probabilities[..., 1] = 0.5, 0.5
    residual = np.array([1, 0, 1, 1, 0, 0]) - confidence
    place = [0, 0, 0, 1, 2, 1]
    for p, r, e, q in zip(confidence, residual, episode, place, strict=True):
        probabilities[e, q], labels[e, q] = (p, 1 - p), r < 0
    held = errors.equal_mass(probabilities, 3)
    products = [
        np.mean([residual[i] * residual[j] for i in members for j in members if episode[i] != episode[j]])
        for members in ([0, 1, 2], [3, 4, 5])
    ]
    undecided = 0.5**2  # three queries of episodes 1 and 2, all right with confidence 0.5
    assert held.counts.sum(0).tolist() == [3, 3, 3]
    expected = np.mean([undecided, *products])
    assert errors.squared_error_debiased(probabilities, labels, bins=3) == pytest.approx(expected)


@pytest.mark.parametrize("truth, sharing", [(0.8, 0.0), (0.8, 0.7), (0.7, 0.7)])
def test_the_debiased_square_is_unbiased_and_the_plain_one_is_not(truth, sharing):
    # Confidence 0.8, right with probability `truth`, alike within an episode or not: 300 experiments.
    rng = np.random.default_rng(1)
    probabilities = constant_predictions(0.8, 30, 10)
    labels = [dependent_labels(rng, truth, 30, 10, sharing) for _ in range(300)]
    found = np.array([errors.squared_error_debiased(probabilities, one) for one in labels])
    assert abs(found.mean() - (truth - 0.8) ** 2) < 4 * found.std() / np.sqrt(300)
    plain = np.array([errors.ece(probabilities, one) ** 2 for one in labels])
    assert plain.mean() - (truth - 0.8) ** 2 > 4 * plain.std() / np.sqrt(300)


def test_the_debiased_error_of_a_calibrated_model_scatters_around_zero():
    rng = np.random.default_rng(2)
    probabilities = rng.dirichlet(np.ones(5), size=(40, 15))
    labels = [calibrated_labels(rng, probabilities) for _ in range(200)]
    found = np.array([errors.ece_debiased(probabilities, one) for one in labels])
    assert abs(found.mean()) < 4 * found.std() / np.sqrt(200) < 0.02
    assert np.mean([errors.ece(probabilities, one) for one in labels[:20]]) > 0.03


def test_one_episode_has_no_debiased_error():
    assert np.isnan(errors.ece_debiased(PROBABILITIES[:1], LABELS[:1]))
