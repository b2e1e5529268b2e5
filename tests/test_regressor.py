"""FewShotRegressor: scikit-learn's contract, its own regressor's numbers, and learners of run folders."""

import pickle
from functools import partial

import numpy as np
import pytest
from problems import double
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.model_selection import GridSearchCV
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_real_labels import gaussian_process

from fewshot import FewShotRegressor, SparseRegressor
from fewshot.conditioning import InferenceFailedError
from fewshot.contract import seed_of
from fewshot.inference.few_points import Process
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
    """The same evidence, hyper-parameters and predictions, in y's own unit, where it does not average."""
    x, y = curve()
    found = FewShotRegressor(average=False).fit(x, y)
    kernel = ConstantKernel(1.0) * RBF(1.0) + WhiteKernel(0.1)
    other = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0).fit(x, y)
    # The labels are divided by a deviation of another divisor: the same process but for where the search ends.
    expected = other.log_marginal_likelihood_value_ - len(y) * np.log(y.std())
    np.testing.assert_allclose(found.log_marginal_likelihood_, expected, atol=1e-5)
    new = np.linspace(-4, 4, 70)[:, None]  # more than a chunk
    for mine, theirs in zip(found.predict(new, return_std=True), other.predict(new, return_std=True), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3)
    assert found.code_ == Code.OK and found.score(x, y) > 0.97


@pytest.mark.long
@pytest.mark.parametrize("regressor, other", [(FewShotRegressor, 25), (SparseRegressor, 20)])
def test_other_labels_compile_nothing(regressor, other, compiled):
    for seed, points in ((0, 20), (1, other)):
        compiled()
        x, y = curve(points, seed)
        regressor().fit(x, y).predict(2 * x, return_std=True)
        assert bool(compiled()) == (seed == 0)


@pytest.mark.long
def test_a_given_noise_and_kernel_are_taken():
    x, y = curve(12)
    regressor = FewShotRegressor(kernel=Matern52(), noise=0.5).fit(x, y)
    np.testing.assert_allclose(np.exp(regressor.hyperparameters_["log_noise"]) * y.var(ddof=1), 0.5, rtol=1e-5)
    searched = GridSearchCV(clone(regressor), {"noise": [0.5, 30.0], "kernel": ["rbf"]}, cv=3).fit(x, y)
    assert searched.best_params_ == {"kernel": "rbf", "noise": 0.5}
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(x), regressor.predict(x))


@double
def test_the_learner_of_a_process_predicts_as_the_regressor():
    x, y = curve(12)
    regressor = FewShotRegressor(average=False).fit(x, y)
    unit, new = y.std(ddof=1), np.linspace(-4, 4, 9)[:, None]
    again = FewShotRegressor(regressor.learner_).fit(x, (y - y.mean()) / unit)
    (mean, deviation), found = regressor.predict(new, return_std=True), again.predict(new, return_std=True)
    np.testing.assert_allclose(found, [(mean - y.mean()) / unit, deviation / unit], atol=1e-8)


def test_a_posterior_that_is_not_finite_is_said(monkeypatch):
    monkeypatch.setattr(Process, "condition", lambda self, data: (np.ones(3), np.array([1.0, np.nan])))
    with pytest.raises(InferenceFailedError, match="the posterior is not finite"):
        FewShotRegressor().fit(*curve(5))


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
        ({"noise": 1e-15}, "expected at least 1e-10 of the variance of y as noise, got .*e-1[67] of it"),
        ({"learner": NearestNeighbour(Identity((1, 1, 1)))}, "expected a Learner with real labels"),
        ({"learner": gaussian_process(inputs=3)}, "expected 3 features, as the learner has, got 1"),
    ],
)
def test_what_makes_no_sense_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        FewShotRegressor(**parameters).fit(*curve(5))


def test_an_average_of_another_kind_is_refused():
    regressor = FewShotRegressor()
    regressor.average = "yes"
    with pytest.raises(ValueError, match="expected True, False or None as average, got 'yes'"):
        regressor.fit(*curve(5))


@pytest.mark.parametrize("labels", [[5.1], [0.1] * 3, [0.1] * 10])
def test_labels_that_do_not_differ_say_nothing_of_their_scale(labels):
    x = np.arange(len(labels))[:, None]
    with pytest.warns(UserWarning, match=f"got {len(labels)} of {labels[0]}: nothing tells how far others may lie"):
        regressor = FewShotRegressor().fit(x, labels)
    mean, deviation = regressor.predict([[0.5], [50.0]], return_std=True)
    np.testing.assert_allclose(mean, labels[0], atol=1e-6)
    assert 0 < deviation[0] < deviation[1] < 20
    assert len(labels) == 1 or deviation[0] < 1


@pytest.mark.long
def test_intervals_of_few_points_cover_what_they_say():
    """Of draws of processes of many length-scales and noises: 95% intervals of the average, not of the best alone."""
    points, rng, inside = 6, np.random.default_rng(6), {None: [], False: []}
    for _ in range(50):
        x = rng.uniform(-2, 2, size=(points + 20, 1))
        length, noise = np.exp(0.6 * rng.normal()), rng.choice([0.001, 0.01, 0.1, 0.5])
        covariance = np.exp(-0.5 * ((x - x.T) / length) ** 2) + noise * np.eye(len(x))
        y = 10 + 3 * np.linalg.cholesky(covariance) @ rng.normal(size=len(x))
        for average, found in inside.items():
            regressor = FewShotRegressor(average=average).fit(x[:points], y[:points])
            mean, deviation = regressor.predict(x[points:], return_std=True)
            found.append(np.mean(np.abs(y[points:] - mean) < 1.96 * deviation))
    assert 0.9 < np.mean(inside[None]) < 0.98
    assert np.mean(inside[False]) < 0.83


@pytest.mark.long
def test_the_average_ends_where_rows_are_many():
    x, y = curve(201)
    best, mean_of_many = (len(FewShotRegressor().fit(x[:n], y[:n])._fitted.chosen.points) for n in (201, 200))
    assert best == 1 and mean_of_many > 100


def test_inputs_far_from_zero_keep_their_digits():
    """Time stamps: the differences are a few parts in a million of the numbers."""
    x, y = curve(20)
    new = np.linspace(-3, 3, 9)[:, None]
    near, far = (FewShotRegressor(average=False).fit(1e4 * x + at, y).predict(1e4 * new + at) for at in (0, 1.7e9))
    np.testing.assert_allclose(far, near, rtol=1e-4)


@pytest.mark.parametrize("make", [FewShotRegressor, partial(SparseRegressor, inducing=4)])
def test_a_fit_that_fails_changes_nothing(make):
    x, y = curve(12)
    regressor = make()
    never = clone(regressor).set_params(kernel="cubic")
    with pytest.raises(ValueError, match="kernel"):
        never.fit(x, y)
    with pytest.raises(NotFittedError):
        never.predict(x)
    before = regressor.fit(x, y).predict(x)
    with pytest.raises(ValueError, match="kernel"):
        regressor.set_params(kernel="cubic").fit(np.c_[x, x], y)
    np.testing.assert_array_equal(regressor.predict(x), before)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(regressor)).predict(x), before)


@pytest.mark.parametrize("make", [FewShotRegressor, partial(SparseRegressor, inducing=4)])
@pytest.mark.parametrize("x_unit, y_unit, called", [(1.0, 1e200, "y"), (1e200, 1.0, "X")])
def test_numbers_that_cannot_be_squared_are_refused(make, x_unit, y_unit, called):
    x, y = curve(6)
    with pytest.raises(ValueError, match=f"expected numbers that can be squared as {called}, got .*use another unit"):
        make().fit(x * x_unit, y * y_unit)


def test_a_learner_refuses_numbers_beyond_its_precision():
    x, y = curve(6)
    learner = gaussian_process(0.05, inputs=1)
    for called, given in (("X", (1e60 * x, y)), ("y", (x, 1e60 * y))):
        with pytest.raises(ValueError, match=f"expected numbers below 3.4e\\+38 as {called}, got "):
            FewShotRegressor(learner).fit(*given)


@pytest.mark.parametrize("make", [FewShotRegressor, partial(SparseRegressor, inducing=4)])
def test_random_states_of_scikit_learn_are_taken(make):
    x, y = curve(8)
    ends = [make(random_state=np.random.RandomState(3)).fit(x, y).predict(x) for _ in range(2)]
    np.testing.assert_array_equal(*ends)
    assert np.isfinite(make(random_state=None).fit(x, y).predict(x)).all()
    assert seed_of(np.int64(7)) == 7


# The tests' run-time type checker refuses the -1 that this check hands to every parameter of the constructor.
TYPED = {"check_do_not_raise_errors_in_init_or_set_params": "the run-time type checker of the tests"}


@pytest.mark.slow
@parametrize_with_checks([FewShotRegressor()], expected_failed_checks=lambda estimator: TYPED)
def test_all_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("name", ["check_estimator_cloneable", "check_set_params", "check_complex_data", "check_fit1d"])
def test_checks_of_scikit_learn_that_cost_nothing(name):
    getattr(estimator_checks, name)("FewShotRegressor", FewShotRegressor())
