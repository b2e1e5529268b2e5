"""FewShotRegressor: scikit-learn's contract, its own regressor's numbers, and learners of run folders."""

import pickle

import numpy as np
import pytest
from problems import double
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_real_labels import gaussian_process

from fewshot import FewShotRegressor, SparseRegressor
from fewshot.inference.inner.base import Code
from fewshot.learners import NearestNeighbour
from fewshot.models.backbones import Identity
from fewshot.models.kernels import Matern52


def curve(points=25, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-3, 3, size=(points, 1))
    return x, 40 + 7 * np.sin(x[:, 0]) + 7 * noise * rng.normal(size=points)


@double
def test_it_finds_what_scikit_learn_finds():
    """The same evidence, hyper-parameters and predictions, in y's own unit."""
    x, y = curve()
    found = FewShotRegressor().fit(x, y)
    kernel = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.1)
    other = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0).fit(x, y)
    expected = other.log_marginal_likelihood_value_ - len(y) * np.log(y.std())
    np.testing.assert_allclose(found.log_marginal_likelihood_, expected, atol=1e-5)
    new = np.linspace(-4, 4, 70)[:, None]  # more than a chunk
    for mine, theirs in zip(found.predict(new, return_std=True), other.predict(new, return_std=True), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3)
    assert found.code_ == Code.OK and found.score(x, y) > 0.97


@pytest.mark.long
@pytest.mark.parametrize("regressor", [FewShotRegressor, SparseRegressor])
def test_other_labels_of_as_many_points_compile_nothing(regressor, compiled):
    for seed in (0, 1):
        compiled()
        x, y = curve(20, seed)
        regressor().fit(x, y).predict(2 * x, return_std=True)
        assert bool(compiled()) == (seed == 0)


@pytest.mark.long
def test_a_given_noise_and_kernel_are_taken():
    x, y = curve(12)
    regressor = FewShotRegressor(kernel=Matern52(), noise=0.5).fit(x, y)
    np.testing.assert_allclose(regressor.learner_.likelihood.noise * y.var(), 0.5, rtol=1e-5)
    searched = GridSearchCV(clone(regressor), {"noise": [0.5, 30.0], "kernel": ["rbf"]}, cv=3).fit(x, y)
    assert searched.best_params_ == {"kernel": "rbf", "noise": 0.5}
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(x), regressor.predict(x))


def test_a_trained_learner_sees_the_labels_as_they_are():
    x, y = curve(10)
    learner = gaussian_process(0.05, inputs=1)
    regressor = FewShotRegressor(learner).fit(x, y - 40)
    mean, deviation = regressor.predict(np.array([[100.0]]), return_std=True)
    np.testing.assert_allclose([mean[0], deviation[0]], [0.0, np.sqrt(30.05)], rtol=1e-5)  # far away: the prior
    assert regressor.learner_ is learner


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"kernel": "cubic"}, "expected a kernel without statistics of features, one of cosine, linear, rbf"),
        ({"kernel": "poly1"}, "expected a kernel without statistics of features"),
        ({"noise": -1.0}, "expected a positive number or None as noise, got -1.0"),
        ({"learner": NearestNeighbour(Identity((1, 1, 1)))}, "expected a Learner with real labels"),
        ({"learner": gaussian_process(inputs=3)}, "expected 3 features, as the learner has, got 1"),
    ],
)
def test_what_makes_no_sense_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        FewShotRegressor(**parameters).fit(*curve(5))


def test_constant_labels():
    mean, deviation = FewShotRegressor().fit([[0.0], [1.0], [2.0]], [5.0, 5.0, 5.0]).predict([[1.5]], return_std=True)
    np.testing.assert_allclose(mean, 5.0, atol=1e-3)
    assert 0 < deviation[0] < 1


# The tests' run-time type checker refuses the -1 that this check hands to every parameter of the constructor.
TYPED = {"check_do_not_raise_errors_in_init_or_set_params": "the run-time type checker of the tests"}


@pytest.mark.slow
@parametrize_with_checks([FewShotRegressor()], expected_failed_checks=lambda estimator: TYPED)
def test_all_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("name", ["check_estimator_cloneable", "check_set_params", "check_complex_data", "check_fit1d"])
def test_checks_of_scikit_learn_that_cost_nothing(name):
    getattr(estimator_checks, name)("FewShotRegressor", FewShotRegressor())
