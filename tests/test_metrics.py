"""Metrics against hand-computed cases, loops, theory and repeated experiments."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from evaluation import metrics

# Two episodes of two queries. Largest probabilities 0.5, 0.8, 0.4, 0.8; right: yes, no, yes, yes.
PROBABILITIES = np.array([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], [[0.3, 0.3, 0.4], [0.8, 0.1, 0.1]]])
LABELS = np.array([[0, 2], [2, 0]])


def random_predictions(seed, episodes=7, queries=11, classes=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), size=(episodes, queries)).astype(dtype)
    return probabilities, rng.integers(0, classes, size=(episodes, queries))


def dependent_labels(rng, confidence, episodes, queries, sharing):
    """Right with probability `confidence`; with probability `sharing` a query uses its episode's uniform, else its own.

    Not the floor's own mechanism: pairs have covariance sharing^2 c (1 - c), exactly.
    """
    uses = rng.uniform(size=(episodes, queries)) < sharing
    uniform = np.where(uses, rng.uniform(size=(episodes, 1)), rng.uniform(size=(episodes, queries)))
    return (uniform >= confidence).astype(int)  # label 0 is the predicted class


def constant_predictions(confidence, episodes, queries):
    return np.broadcast_to(np.array([confidence, 1 - confidence]), (episodes, queries, 2)).copy()


def test_hand_computed_values():
    assert metrics.accuracy(PROBABILITIES, LABELS) == 0.75
    # Episode accuracies 0.5 and 1: sd = 0.5 / sqrt(2), divided by sqrt(2).
    assert metrics.accuracy_ci95(PROBABILITIES, LABELS) == pytest.approx(1.959964 * 0.25, rel=1e-6)
    assert metrics.accuracy_std_batches(PROBABILITIES, LABELS, 2) == pytest.approx(0.25)
    assert metrics.nll(PROBABILITIES, LABELS) == pytest.approx(-np.log([0.5, 0.1, 0.4, 0.8]).mean())
    # .25+.09+.04 = .38; .01+.64+.81 = 1.46; .09+.09+.36 = .54; .04+.01+.01 = .06
    assert metrics.brier(PROBABILITIES, LABELS) == pytest.approx((0.38 + 1.46 + 0.54 + 0.06) / 4)
    # Bins of 0.4 and 0.5: gaps 0.6 and 0.5, one query each; bin of 0.8: accuracy 0.5, gap 0.3, two queries.
    assert metrics.ece(PROBABILITIES, LABELS) == pytest.approx((0.6 + 0.5 + 2 * 0.3) / 4)
    assert metrics.mce(PROBABILITIES, LABELS) == pytest.approx(0.6)


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_errors_agree_with_a_loop(bins):
    probabilities, labels = random_predictions(0)
    confidence, right = probabilities.max(-1).ravel(), (probabilities.argmax(-1) == labels).ravel()
    gaps = []
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        if inside.any():
            gaps.append((inside.sum(), abs(right[inside].mean() - confidence[inside].mean())))
    assert metrics.ece(probabilities, labels, bins) == pytest.approx(sum(n * gap for n, gap in gaps) / labels.size)
    assert metrics.mce(probabilities, labels, bins) == pytest.approx(max(gap for _, gap in gaps))


def test_bins_are_closed_on_the_right():
    # With two bins 0.5 belongs to the lower one, so the gaps -0.5 and +0.4 do not cancel.
    probabilities, labels = np.array([[[0.5, 0.5], [0.6, 0.4]]]), np.array([[1, 0]])
    assert metrics.ece(probabilities, labels, bins=2) == pytest.approx(0.45)


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
    assert [f(right, labels) for f in (metrics.nll, metrics.brier, metrics.ece, metrics.mce)] == [0, 0, 0, 0]
    assert [f(wrong, labels) for f in (metrics.brier, metrics.ece, metrics.mce)] == [2, 1, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_underflowed_probability_counts_as_the_smallest_normal_number(dtype):
    probabilities = np.array([[[1, 0]]], dtype)
    assert metrics.nll(probabilities, np.array([[1]])) == pytest.approx(-np.log(np.finfo(dtype).tiny))


def test_jax_arrays_and_numpy_arrays_give_the_same():
    probabilities, labels = random_predictions(2, dtype=np.float32)
    rows = [metrics.summarise(np.random.default_rng(0), p, y) for p, y in
            ((probabilities, labels), (jnp.asarray(probabilities), jnp.asarray(labels)))]  # fmt: skip
    assert rows[0] == rows[1]


@pytest.mark.parametrize("correlation, independent", [(0.0, 300 * 20), (1.0, 300)])
def test_floor_of_one_confidence_is_that_of_a_binomial(correlation, independent):
    # One bin: ECE = |share right - c|. Queries that succeed together count as one query per episode.
    probabilities = constant_predictions(0.7, 300, 20)
    labels = np.zeros((300, 20), int)
    floor = metrics.ece_floor(np.random.default_rng(0), probabilities, labels, draws=1000, correlation=correlation)
    sd = np.sqrt(0.7 * 0.3 / independent)
    assert floor.mean == pytest.approx(np.sqrt(2 / np.pi) * sd, rel=0.08)
    assert floor.quantile95 == pytest.approx(1.96 * sd, rel=0.08)


@pytest.mark.parametrize("sharing", [0.0, 0.3])
def test_floor_is_the_mean_ece_of_repeated_calibrated_experiments(sharing):
    rng = np.random.default_rng(1)
    probabilities = constant_predictions(0.9, 200, 30)
    experiments = [dependent_labels(rng, 0.9, 200, 30, sharing) for _ in range(200)]
    truth = np.mean([metrics.ece(probabilities, labels) for labels in experiments])
    floors = [metrics.ece_floor(rng, probabilities, labels, draws=100).mean for labels in experiments[:10]]
    assert np.mean(floors) == pytest.approx(truth, rel=0.1)
    independent = metrics.ece_floor(rng, probabilities, experiments[0], draws=400, correlation=0.0).mean
    assert (truth > 1.5 * independent) == (sharing > 0)


def test_miscalibration_does_not_raise_the_floor():
    # Confidence 0.55, right 95% of the time, independently: a gap of 0.4 and no dependence.
    rng = np.random.default_rng(2)
    probabilities = constant_predictions(0.55, 400, 30)
    labels = dependent_labels(rng, 0.95, 400, 30, 0.0)
    assert metrics.ece(probabilities, labels) == pytest.approx(0.4, abs=0.01)
    assert metrics.within_episode_correlation(probabilities, labels) < 0.02
    floor = metrics.ece_floor(rng, probabilities, labels)
    assert floor.mean == pytest.approx(np.sqrt(2 / np.pi * 0.55 * 0.45 / 12000), rel=0.15)


def test_floor_depends_on_the_generator_only_through_its_state():
    probabilities, labels = random_predictions(3)
    first, again = (metrics.ece_floor(np.random.default_rng(5), probabilities, labels, draws=10) for _ in range(2))
    assert first == again
    assert first != metrics.ece_floor(np.random.default_rng(6), probabilities, labels, draws=10)


def test_correlation_of_predictions_that_are_all_right_is_zero():
    probabilities, labels = np.eye(3)[np.array([[0, 1, 2]] * 2)], np.array([[0, 1, 2]] * 2)
    assert metrics.within_episode_correlation(probabilities, labels) == 0.0


def test_summary_names_and_json():
    summary = metrics.summarise(np.random.default_rng(0), PROBABILITIES, LABELS, batches=2)
    names = "accuracy accuracy_ci95 accuracy_std_batches nll brier ece mce ece_floor ece_floor_q95 episodes"
    assert set(summary) == set(names.split())
    assert json.loads(json.dumps(summary)) == summary
    assert summary["episodes"] == 2 and summary["ece"] == metrics.ece(PROBABILITIES, LABELS)


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
@pytest.mark.parametrize("metric", ["accuracy", "nll", "brier", "ece", "mce"])
def test_malformed_predictions_are_refused_in_one_line(case, metric):
    probabilities, labels, message = malformed()[case]
    function = getattr(metrics, metric)
    function = getattr(function, "__wrapped__", function)  # below the run-time shape checks of the test suite
    with pytest.raises(ValueError) as error:
        function(probabilities, labels)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("batches", [0, 3])
def test_number_of_batches_must_fit(batches):
    with pytest.raises(ValueError, match="between 1 and the 2 episodes"):
        metrics.accuracy_std_batches(PROBABILITIES, LABELS, batches)
