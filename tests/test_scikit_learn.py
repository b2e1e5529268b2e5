"""Metrics against scikit-learn, which computes them independently."""

import numpy as np
import pytest
from predicted import random_predictions

from fewshot.evaluation import calibration_error, metrics

pytest.importorskip("sklearn", reason="install scikit-learn (pip install -e '.[test]') to compare metrics with it")

from sklearn import metrics as sklearn_metrics
from sklearn.calibration import calibration_curve

PROBABILITIES, LABELS = random_predictions(0, episodes=30, queries=20, classes=4)
FLAT, TRUE = PROBABILITIES.reshape(-1, 4), LABELS.ravel()
CONFIDENCE, RIGHT = FLAT.max(-1), FLAT.argmax(-1) == TRUE


def test_accuracy_and_proper_scores():
    assert metrics.accuracy(PROBABILITIES, LABELS) == pytest.approx(
        sklearn_metrics.accuracy_score(TRUE, FLAT.argmax(-1))
    )
    assert metrics.nll(PROBABILITIES, LABELS) == pytest.approx(sklearn_metrics.log_loss(TRUE, FLAT, labels=range(4)))
    one_by_one = [sklearn_metrics.brier_score_loss(c == TRUE, FLAT[:, c]) for c in range(4)]
    assert metrics.brier(PROBABILITIES, LABELS) == pytest.approx(sum(one_by_one))


def test_auroc_with_ties():
    scores = CONFIDENCE.round(1)
    assert metrics.auroc(scores, RIGHT) == pytest.approx(sklearn_metrics.roc_auc_score(RIGHT, scores))


@pytest.mark.parametrize("strategy, error", [("uniform", "ece"), ("quantile", "ece_equal_mass")])
def test_calibration_curves(strategy, error):
    right, confidence = calibration_curve(RIGHT, CONFIDENCE, n_bins=10, strategy=strategy)
    held = {"ece": calibration_error.equal_width, "ece_equal_mass": calibration_error.equal_mass}[error](
        PROBABILITIES, 10
    )
    count = held.counts.sum(0)
    used = count > 0
    predicted = held.predicted.sum(0)[used] / count[used]
    np.testing.assert_allclose(predicted, confidence, atol=1e-12)
    np.testing.assert_allclose(predicted + held.gaps(LABELS).sum(0)[used] / count[used], right, atol=1e-12)
    expected = (count[used] * np.abs(right - confidence)).sum() / count.sum()
    assert getattr(calibration_error, error)(PROBABILITIES, LABELS, 10) == pytest.approx(expected)
