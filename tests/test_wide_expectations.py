"""Deterministic expectations at standard deviations up to 100, against dense sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, log_expit

from fewshot.models.expectations import expected_log_sigmoid, expected_log_sum_exp, expected_log_sum_sigmoid
from fewshot.models.gaussian import Marginals

MEANS = ((0.0, 0.0), (2.0, -1.0), (-50.0, 10.0))
WIDE = (30.0, 100.0)
# Largest errors observed at 30 and 100, over max(1, |mean|, deviation): 1e-12, 4e-12, 3e-14; 1.2e-6, 3e-7, 6e-8.
TOLERANCE = {
    "log-sum-exp": (1e-11, 3e-6),
    "log-sum-sigmoid": (2e-11, 1e-6),
    "log-sigmoid": (1e-12, 3e-7),
}


def normal(mean, deviation, spacing):
    """Nodes and weights of the trapezoidal rule: for functions without poles within pi, its error is below 1e-30."""
    z = np.linspace(-9, 9, max(401, int(18 * deviation / spacing) | 1))
    weights = np.exp(-0.5 * z**2)
    return mean + deviation * z, weights / weights.sum()


def dense(function, mean, deviation):
    """E function(f_1, f_2) over the product of two rules."""
    (a, of_a), (b, of_b) = (normal(*one, 0.4) for one in zip(mean, deviation, strict=True))
    halves = np.split(a, [len(a) // 2]), np.split(of_a, [len(a) // 2])
    return sum(part @ (function(x[:, None], b) @ of_b) for x, part in zip(*halves, strict=True))


def log_sum_sigmoid(a, b):
    return np.logaddexp(log_expit(a), log_expit(b))


def error(name, function, mean, deviation, reference, double):
    dtype = jnp.float64 if double else jnp.float32
    with jax.enable_x64(double):
        given = jnp.asarray(mean, dtype)[:, None], jnp.asarray(np.square(deviation), dtype)[:, None]
        function = jax.jit(function)
        found = function(*given) if name == "log-sigmoid" else function(Marginals(*given))
        return np.max(np.abs(np.ravel(found) - reference)) / max(1.0, np.abs(mean).max(), np.max(deviation))


@pytest.mark.long
@pytest.mark.parametrize("double", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("deviation", [pytest.param(WIDE[0], marks=pytest.mark.slow), WIDE[1]])
def test_two_classes_of_which_one_may_be_narrow(deviation, double):
    for other in (1.0, 0.1):
        for mean in MEANS:
            deviations = np.array([deviation, other * deviation])
            for name, function, sampled in (
                ("log-sum-exp", expected_log_sum_exp, np.logaddexp),
                ("log-sum-sigmoid", expected_log_sum_sigmoid, log_sum_sigmoid),
            ):
                reference = dense(sampled, mean, deviations)
                found = error(name, function, np.array(mean), deviations, reference, double)
                assert found < TOLERANCE[name][not double], (name, mean, other)


@jax.jit
def slope_of_log_sigmoid(mean, variance):
    return jax.grad(lambda mean: expected_log_sigmoid(mean, variance).sum())(mean)


@pytest.mark.long
@pytest.mark.parametrize("double", [True, False])
def test_one_class_beside_a_certain_one_and_its_slope(double):
    """E log s(f), twice: by its own sums, and as log-sum-exp of f and 0. Its slope in the mean is E s(-f)."""
    means = np.array([-50.0, -3.0, 0.0, 5.0])
    for deviation in (0.0, 0.9, 1.1, *WIDE):
        rules = [normal(mean, deviation, 0.2) for mean in means]
        reference = np.array([weights @ log_expit(f) for f, weights in rules])
        deviations = np.full(4, deviation)
        found = error("log-sigmoid", expected_log_sigmoid, means, deviations, reference, double)
        assert found < TOLERANCE["log-sigmoid"][not double], deviation
        dtype = jnp.float64 if double else jnp.float32
        with jax.enable_x64(double):
            two = Marginals(*(jnp.asarray([values, 0 * values], dtype) for values in (-means, deviations**2)))
            size = max(50.0, deviation)
            found = jax.jit(expected_log_sum_exp)(two)
            assert np.abs(found + reference).max() / size < TOLERANCE["log-sum-exp"][not double]
            variance = jnp.asarray(deviations**2, dtype)[:, None]
            slope = slope_of_log_sigmoid(jnp.asarray(means, dtype)[:, None], variance)
        wanted = [weights @ expit(-f) for f, weights in rules]
        np.testing.assert_allclose(slope[:, 0], wanted, atol=1e-10 if double else 2e-6)
