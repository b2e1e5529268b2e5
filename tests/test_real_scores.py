"""Scores of predictions of numbers: closed forms against quadrature, planted answers, failed episodes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from problems import double
from scipy import integrate, stats

from fewshot.evaluation.crps import crps, integrated_crps, quantile, student_t_cdf
from fewshot.evaluation.real_scores import RealScores, _vague_where_failed, judge
from fewshot.inference.inner.base import Code

Y = np.array([-4.0, -0.3, 0.2, 1.0, 9.0])


def mixture():
    shares, means, deviations = np.array([0.5, 0.3, 0.2]), np.array([-1.0, 0.5, 4.0]), np.array([0.3, 1.0, 2.0])
    each = [jnp.asarray(np.broadcast_to(part, (len(Y), 3))) for part in (shares, means, deviations)]
    return dist.MixtureSameFamily(dist.CategoricalProbs(each[0]), dist.Normal(*each[1:]))


def distributions():
    ones = jnp.ones(len(Y))
    yield "normal", dist.Normal(0.4 * ones, 1.3 * ones), lambda t: stats.norm.cdf(t, 0.4, 1.3)
    yield "student-t", dist.StudentT(3.5 * ones, 0.4 * ones, 1.3 * ones), lambda t: stats.t.cdf(t, 3.5, 0.4, 1.3)
    parts = [(0.5, -1.0, 0.3), (0.3, 0.5, 1.0), (0.2, 4.0, 2.0)]
    yield "mixture", mixture(), lambda t: sum(p * stats.norm.cdf(t, m, s) for p, m, s in parts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["normal", "student-t", "mixture"])
@double
def test_crps_and_quantiles_are_those_of_the_distribution_function(name):
    found, cdf = next((one, function) for other, one, function in distributions() if other == name)
    expected = [
        integrate.quad(lambda t: cdf(t) ** 2, -np.inf, y, epsabs=1e-12)[0]
        + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, np.inf, epsabs=1e-12)[0]
        for y in Y
    ]
    tolerance = 2e-5 if name == "mixture" else 1e-8
    np.testing.assert_allclose(crps(found, jnp.asarray(Y)), expected, rtol=tolerance)
    if name == "normal":
        np.testing.assert_allclose(integrated_crps(found, jnp.asarray(Y)), expected, rtol=1e-6)
    for probability in (0.05, 0.5, 0.75):
        np.testing.assert_allclose(cdf(np.asarray(quantile(found, probability))), probability, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("dof", [5.5, 49.9, 50.0, 1e3, 1e6])
def test_many_degrees_of_freedom_lose_no_digits(dof, dtype):
    """Beside SciPy's, about the number from which on Hill's deviate is taken, and far beyond."""
    exact, at = stats.t(dof), np.array([-4.0, -2.5, -0.3, 0.0, 1.0, 2.0, 9.0])
    expected = [
        integrate.quad(lambda t: exact.cdf(t) ** 2, -np.inf, y, epsabs=1e-12)[0]
        + integrate.quad(lambda t: exact.sf(t) ** 2, y, np.inf, epsabs=1e-12)[0]
        for y in at
    ]
    with jax.enable_x64(dtype == np.float64):
        y, ones = jnp.asarray(at, dtype), jnp.ones(len(at), dtype)
        found = dist.StudentT(dof * ones, 0 * ones, ones)
        share, score, ends = student_t_cdf(y, dof * ones), crps(found, y), [quantile(found, p) for p in (0.025, 0.9)]
    single = dtype == np.float32
    np.testing.assert_allclose(share, exact.cdf(at), atol=4e-6 if single else 2e-13)
    np.testing.assert_allclose(score, expected, atol=1e-5 if single else 1e-9)
    for end, p in zip(ends, (0.025, 0.9), strict=True):
        np.testing.assert_allclose(end, exact.ppf(p), atol=1e-5 if single else 1e-9)


def test_other_distributions_are_refused():
    with pytest.raises(TypeError, match="expected a normal, a Student-t or a mixture of normals, got Laplace"):
        quantile(dist.Laplace(jnp.zeros(2)), 0.5)


def scores(episodes=400, queries=20, deviation=1.0, shift=0.0):
    """Standard normal labels, predicted by N(shift, deviation^2)."""
    y = jax.random.normal(jax.random.key(0), (episodes, queries))
    judged = jax.vmap(lambda each: judge(dist.Normal(jnp.full(queries, shift), deviation), each))(y)
    host = jax.tree.map(np.asarray, judged)
    return RealScores(np.asarray(y), host, np.zeros(episodes, int), 0.0)


@pytest.mark.long
def test_a_true_prediction_has_the_scores_of_theory():
    found = scores().summary()
    expected = {"nll": 0.5 * np.log(2 * np.pi * np.e), "rmse": 1.0, "crps": 1 / np.sqrt(np.pi)}
    expected |= {"coverage50": 0.5, "width50": 2 * stats.norm.ppf(0.75), "coverage90": 0.9}
    for name, value in {**expected, "width90": 2 * stats.norm.ppf(0.95)}.items():
        assert abs(found[name] - value) < 0.02, name
        low, high = found["intervals"][name]
        assert low - 1e-6 <= found[name] <= high + 1e-6
    assert found["episodes"] == 400
    over = scores(deviation=0.5).summary()
    assert over["coverage90"] < 0.65 and over["nll"] > found["nll"] + 0.3
    assert scores(shift=1.0).summary()["rmse"] > 1.3


@pytest.mark.long
def test_an_episode_without_finite_predictions_is_a_vague_one():
    whole = scores(episodes=6)
    broken = whole.judged._replace(crps=np.where(np.arange(6)[:, None] == 2, np.nan, whole.judged.crps))
    judged, codes = _vague_where_failed(whole.labels, broken, whole.codes)
    assert list(codes) == [Code.NON_FINITE if number == 2 else Code.OK for number in range(6)]
    y = whole.labels
    np.testing.assert_allclose(judged.log_density[2], stats.norm.logpdf(y[2], y.mean(), y.std()), rtol=1e-4)
    assert (judged.log_density[3] == whole.judged.log_density[3]).all()
    assert RealScores(y, judged, codes, 0.0).failures() == {"non_finite": 1}
