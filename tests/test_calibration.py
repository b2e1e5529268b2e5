"""The fitted temperature: the optimum of the NLL, known where predictions were tempered on purpose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.evaluation import calibration_error, metrics
from fewshot.evaluation.calibration import BOUNDS, fit_temperature, papers_temperatures
from fewshot.inference.predictive import temper


@pytest.fixture
def calibrated():
    """Probabilities [E, Q, C] and labels that were drawn from them."""
    rng = np.random.default_rng(0)
    probabilities = np.asarray(jax.nn.softmax(rng.normal(scale=1.5, size=(400, 30, 5)), axis=-1))
    labels = (probabilities.cumsum(-1) < rng.uniform(size=(400, 30, 1))).sum(-1).clip(max=4)
    return probabilities, labels


@pytest.mark.parametrize("distortion", [0.3, 1.0, 4.0])
def test_a_known_distortion_is_undone(calibrated, distortion):
    probabilities, labels = calibrated
    distorted = np.asarray(temper(jnp.asarray(probabilities), distortion))
    fitted = fit_temperature(distorted, labels)
    assert fitted == pytest.approx(1 / distortion, rel=0.05)
    assert calibration_error.ece(np.asarray(temper(jnp.asarray(distorted), fitted)), labels) < 0.015


def test_the_nll_has_no_slope_at_the_fit(calibrated):
    probabilities, labels = calibrated
    probabilities = probabilities.astype(np.float64) ** 2 / (probabilities.astype(np.float64) ** 2).sum(
        -1, keepdims=True
    )
    fitted = fit_temperature(probabilities, labels)

    def nll(temperature):
        tempered = probabilities ** (1 / temperature)
        return metrics.nll(tempered / tempered.sum(-1, keepdims=True), labels)

    assert nll(fitted) < min(nll(1.01 * fitted), nll(0.99 * fitted))


def test_perfect_and_useless_predictions_reach_the_bounds():
    labels = np.zeros((2, 3), int)
    right = np.broadcast_to([0.9, 0.1], (2, 3, 2))
    assert fit_temperature(right, labels) == pytest.approx(BOUNDS[0], rel=0.3)  # flat there
    assert fit_temperature(right[..., ::-1], labels) == pytest.approx(BOUNDS[1], rel=0.01)


def test_probabilities_that_underflowed_are_no_infinite_loss():
    certain = np.array([[[1.0, 0.0], [1.0, 0.0], [0.6, 0.4]]], np.float32)
    assert BOUNDS[0] < fit_temperature(certain, np.array([[0, 1, 0]])) <= BOUNDS[1]


def test_the_papers_pair_is_the_least_ece_of_the_grid(calibrated):
    probabilities, labels = (array[:40] for array in calibrated)
    at = {0.5: np.asarray(temper(jnp.asarray(probabilities), 3.0)), 2.0: probabilities}
    grid = (0.2, 1 / 3, 0.6, 1.0)
    found = papers_temperatures(at, labels, grid)
    each = {
        (latent, t): calibration_error.ece(np.asarray(temper(jnp.asarray(p), t)), labels)
        for latent, p in at.items() for t in grid
    }  # fmt: skip
    assert (found.latent, found.predictive) == min(each, key=each.get)
    assert found.ece == min(each.values())
    # Both pairs that give back what the labels were drawn from are near it; a temperature fitted by NLL is 1 there.
    assert found.ece <= each[0.5, 1 / 3] and found.ece <= each[2.0, 1.0]
