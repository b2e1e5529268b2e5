"""Metrics against hand-computed cases, loops and exhaustive sums."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from predicted import LABELS, PROBABILITIES, calibrated_labels, random_predictions

from fewshot.evaluation import calibration_error, metrics
from fewshot.evaluation.calibration_error import ERRORS
from fewshot.evaluation.predictions import checked


def test_hand_computed_values():
    assert metrics.accuracy(PROBABILITIES, LABELS) == 0.75
    # Episode accuracies 0.5 and 1: sd = 0.5 / sqrt(2), divided by sqrt(2).
    assert metrics.accuracy_ci95(PROBABILITIES, LABELS) == pytest.approx(1.959964 * 0.25, rel=1e-6)
    assert metrics.accuracy_std_batches(PROBABILITIES, LABELS, 2) == pytest.approx(0.25)
    assert metrics.nll(PROBABILITIES, LABELS) == pytest.approx(-np.log([0.5, 0.1, 0.4, 0.8]).mean())
    # .25+.09+.04 = .38; .01+.64+.81 = 1.46; .09+.09+.36 = .54; .04+.01+.01 = .06
    assert metrics.brier(PROBABILITIES, LABELS) == pytest.approx((0.38 + 1.46 + 0.54 + 0.06) / 4)
    # Of the most confident one (0.8 twice, one right), two, three (and 0.5, right), four: errors 1/2, 1/2, 1/3, 1/4.
    assert metrics.aurc(PROBABILITIES, LABELS) == pytest.approx((1 / 2 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_scores_agree_with_a_loop():
    probabilities, labels = random_predictions(1)
    one_hot = np.eye(4)[labels]
    assert metrics.brier(probabilities, labels) == pytest.approx(((probabilities - one_hot) ** 2).sum(-1).mean())
    assert metrics.nll(probabilities, labels) == pytest.approx(-np.log(probabilities[one_hot == 1]).mean())
    episodes = [np.mean(p.argmax(-1) == y) for p, y in zip(probabilities, labels, strict=True)]
    assert metrics.accuracy(probabilities, labels) == pytest.approx(np.mean(episodes))
    # Seven episodes in three batches: 3, 2, 2.
    batches = [np.mean(episodes[:3]), np.mean(episodes[3:5]), np.mean(episodes[5:])]
    assert metrics.accuracy_std_batches(probabilities, labels, 3) == pytest.approx(np.std(batches))


def test_perfect_and_worst_predictions():
    labels = np.array([[0, 1, 2]])
    right, wrong = np.eye(3)[labels], np.eye(3)[(labels + 1) % 3]
    errors = (metrics.nll, metrics.brier, calibration_error.ece, calibration_error.mce, metrics.aurc)
    assert [error(right, labels) for error in errors] == [0, 0, 0, 0, 0]
    assert [error(wrong, labels) for error in errors[1:]] == [2, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_underflowed_probability_counts_as_the_smallest_normal_number(dtype):
    probabilities = np.array([[[1, 0]]], dtype)
    assert metrics.nll(probabilities, np.array([[1]])) == pytest.approx(-np.log(np.finfo(dtype).tiny))


def test_jax_arrays_and_numpy_arrays_give_the_same():
    probabilities, labels = random_predictions(2, dtype=np.float32)
    rows = [metrics.summarise(np.random.default_rng(0), p, y) for p, y in
            ((probabilities, labels), (jnp.asarray(probabilities), jnp.asarray(labels)))]  # fmt: skip
    assert rows[0] == rows[1]
    low, high = metrics.intervals(np.random.default_rng(0), probabilities, labels)["ece_debiased"]
    assert 0 < low < high < 1  # sums to 1 as well as float32 can, which is all that is asked


@pytest.mark.parametrize("seed", range(3))
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed):
    rng = np.random.default_rng(seed)
    scores, positive = rng.integers(0, 6, size=(4, 12)), rng.uniform(size=(4, 12)) < 0.4  # with many ties
    for row, chosen, found in zip(scores, positive, metrics.auroc(scores.astype(float), positive), strict=True):
        pairs = [(a > b) + 0.5 * (a == b) for a in row[chosen] for b in row[~chosen]]
        assert found == pytest.approx(np.mean(pairs))


def test_auroc_of_one_kind_alone_is_undefined():
    assert np.isnan(metrics.auroc(np.array([0.1, 0.2]), np.array([True, True])))
    assert metrics.auroc(np.array([0.1, 0.2]), np.array([False, True])) == 1


def test_risk_of_equally_confident_queries_is_the_mean_over_their_orders():
    confidence = np.array([0.9, 0.6, 0.6, 0.6, 0.5])
    probabilities, labels = np.stack([confidence, 1 - confidence], axis=-1)[None], np.array([[0, 1, 0, 0, 1]])
    wrong = labels[0] == 1
    orders = [[0, *middle, 4] for middle in itertools.permutations([1, 2, 3])]
    risks = [wrong[order].cumsum() / np.arange(1, 6) for order in orders]
    curve = metrics.risk_coverage(probabilities, labels)
    np.testing.assert_allclose(curve.risk, np.mean(risks, axis=0))
    np.testing.assert_allclose(curve.coverage, [0.2, 0.4, 0.6, 0.8, 1.0])


def test_area_under_the_risk_coverage_curve_ranks_confidences():
    rng = np.random.default_rng(0)
    probabilities, labels = random_predictions(0, episodes=40)
    assert metrics.risk_coverage(probabilities, labels).risk[-1] == pytest.approx(
        1 - metrics.accuracy(probabilities, labels)
    )
    knowing = calibrated_labels(rng, probabilities)  # right as often as confident
    assert metrics.aurc(probabilities, knowing) < 0.8 * (1 - metrics.accuracy(probabilities, knowing))


def test_intervals_hold_the_metrics_and_fit_the_normal_one():
    probabilities, labels = random_predictions(0, episodes=300)
    found = metrics.intervals(np.random.default_rng(0), probabilities, labels)
    for name in ("accuracy", "nll", "brier"):
        low, high = found[name]
        assert low < getattr(metrics, name)(probabilities, labels) < high
    half = metrics.accuracy_ci95(probabilities, labels)
    assert found["accuracy"].high - found["accuracy"].low == pytest.approx(2 * half, rel=0.15)
    # Of the ECE there is none; of the debiased error there is (test_calibration_interval.py).
    assert np.isnan(found["ece"]).all()
    assert (
        found["ece_debiased"].low < calibration_error.ece_debiased(probabilities, labels) < found["ece_debiased"].high
    )


def test_summary_names_and_json():
    summary = metrics.summarise(np.random.default_rng(0), PROBABILITIES, LABELS, batches=2)
    names = ["accuracy", "accuracy_ci95", "accuracy_std_batches", "nll", "brier", "aurc", "auroc"]
    names += ["ece_within_band", "episodes"]
    names += [f"brier_{term}" for term in ("reliability", "resolution", "uncertainty", "within_bins")]
    names += [f"{error}{end}" for error in ERRORS for end in ("", "_floor", "_floor_q95")]
    assert set(summary) == set(names)
    assert json.loads(json.dumps(summary)) == summary
    assert summary["episodes"] == 2 and summary["ece"] == calibration_error.ece(PROBABILITIES, LABELS)
    for name in ERRORS:
        assert summary[name] == getattr(calibration_error, name)(PROBABILITIES, LABELS)


def test_the_band_of_a_perfect_model_holds_a_perfect_model():
    probabilities, _ = random_predictions(0, episodes=60)
    labels = calibrated_labels(np.random.default_rng(1), probabilities)
    summary = metrics.summarise(np.random.default_rng(0), probabilities, labels)
    assert summary["ece_within_band"] is True
    assert summary["auroc"] > 0.6  # it is right where it is confident
    wrong = (probabilities.argmax(-1) + 1) % 4
    assert metrics.summarise(np.random.default_rng(0), probabilities, wrong)["ece_within_band"] is False


def test_one_episode_has_no_interval():
    summary = metrics.summarise(np.random.default_rng(0), PROBABILITIES[:1], LABELS[:1], batches=1)
    assert summary["accuracy_ci95"] is None
    assert "NaN" not in json.dumps(summary)


def malformed():
    nan = PROBABILITIES.copy()
    nan[1, 0] = np.nan
    negative = PROBABILITIES.copy()
    negative[0, 1] = [1.1, -0.1, 0.0]
    return {
        "nan": (nan, LABELS, "episode 1, query 0"),
        "negative": (negative, LABELS, "episode 0, query 1"),
        "not normalised": (PROBABILITIES * 1.01, LABELS, "sum to 1"),
        "labels out of range": (PROBABILITIES, LABELS + 1, "labels must lie in 0..2, got 1..3"),
        "shapes": (PROBABILITIES, LABELS[:1], "got (2, 2, 3) and (1, 2)"),
        "empty": (PROBABILITIES[:0], LABELS[:0], "got (0, 2, 3)"),
    }


@pytest.mark.parametrize("case", malformed())
def test_malformed_predictions_are_refused_in_one_line(case):
    probabilities, labels, message = malformed()[case]
    with pytest.raises(ValueError) as error:
        checked(probabilities, labels)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "metric", [metrics.accuracy, metrics.nll, metrics.brier, metrics.aurc, *map(calibration_error.__dict__.get, ERRORS)]
)
def test_every_metric_refuses_malformed_predictions(metric):
    probabilities, labels, message = malformed()["nan"]
    with pytest.raises(ValueError, match=message):
        metric(probabilities, labels)


@pytest.mark.parametrize("batches", [0, 3])
def test_number_of_batches_must_fit(batches):
    with pytest.raises(ValueError, match="between 1 and the 2 episodes"):
        metrics.accuracy_std_batches(PROBABILITIES, LABELS, batches)
