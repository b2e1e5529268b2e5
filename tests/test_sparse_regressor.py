"""SparseRegressor: scikit-learn's contract, and each method's posterior against the exact one."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_regressor import TYPED

from fewshot import SparseRegressor
from fewshot.inference import many_points
from fewshot.inference.many_points import Exact, Features, Inducing
from fewshot.models.inducing import InducingProcess, titsias_bound
from fewshot.models.kernels import RBF, Matern52
from fewshot.models.random_features import RandomFourier
from fewshot.sparse_regressor import METHODS


def surface(rows=80, seed=0):
    """Two inputs that count in units that are far apart, and one that does not."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(rows, 3)) * [1.0, 1000.0, 1.0] + [5.0, 0.0, 0.0]
    return x, 40 + 7 * (np.sin(2 * (x[:, 0] - 5)) + x[:, 1] / 2000 + 0.1 * rng.normal(size=rows))


def problem(rows=40, seed=0):
    x, y = surface(rows, seed)
    return tuple(jnp.asarray((part - part.mean(axis=0)) / part.std(axis=0)) for part in (x, y))


@double
def test_exact_is_what_scikit_learn_predicts_at_the_same_hyper_parameters():
    x, y = surface(60)
    found = SparseRegressor("rbf", "exact", steps=20).fit(x, y)
    assert found.lengthscales_[1] > 100 * found.lengthscales_[0]
    scale = float(np.exp(found.parameters_.hyper["log_scale"])) * y.var()
    kernel = ConstantKernel(scale) * SklearnRBF(found.lengthscales_) + WhiteKernel(found.noise_)
    other = GaussianProcessRegressor(kernel, optimizer=None).fit(x, y - y.mean())
    np.testing.assert_allclose(found.bound_, other.log_marginal_likelihood_value_, rtol=1e-9)
    new = surface(30, 1)[0]
    mean, deviation = other.predict(new, return_std=True)
    ours = found.predict(new, return_std=True)
    np.testing.assert_allclose(ours[0], mean + y.mean(), rtol=1e-8)
    np.testing.assert_allclose(ours[1], deviation, rtol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("fitc", [False, True])
@double
def test_sums_over_blocks_are_the_bound_of_all_rows(monkeypatch, fitc):
    """(P10): several blocks, the last of them filled up; and Z = X is the exact process."""
    monkeypatch.setattr(many_points, "BLOCK", 16)
    x, y = problem(40)
    method = Inducing(InducingProcess(Matern52()), 7, fitc)
    parameters = method.initial(x)
    found = method.condition(parameters, x, y)
    np.testing.assert_allclose(found.bound, method.bound(parameters, x, y), rtol=1e-9)
    exact = Exact(Matern52())
    expected = exact.condition(parameters, x, y)
    full = parameters._replace(inputs=x)
    found = method.condition(full, x, y)
    np.testing.assert_allclose(found.bound, expected.bound, rtol=1e-8)
    new = problem(10, 1)[0]
    for ours, theirs in zip(
        method.predict(full, found.state, new), exact.predict(parameters, expected.state, new), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-8)


@pytest.mark.long
@double
def test_features_are_regression_on_their_own_kernel():
    x, y = problem(30)
    method, parameters = Features(RandomFourier(RBF(), 12, 3)), Exact(RBF()).initial(x)
    weighted = parameters.weighted(x)
    covariance = method.features.gram(parameters.hyper, weighted, weighted) + np.exp(parameters.log_noise) * np.eye(30)
    sign, determinant = np.linalg.slogdet(2 * np.pi * covariance)
    expected = -0.5 * (y @ np.linalg.solve(covariance, y) + determinant)
    assert sign == 1
    np.testing.assert_allclose(method.bound(parameters, x, y), expected, rtol=1e-9)
    np.testing.assert_allclose(method.condition(parameters, x, y).bound, expected, rtol=1e-9)


@pytest.mark.long
@double
def test_the_cholesky_root_is_one_and_its_gradient_that_of_finite_differences():
    x, y = problem(30)
    process = InducingProcess(Matern52(), inducing_noise=1e-6)
    parameters = process.initial(x[:6])._replace(log_weights=jnp.array([0.1, -0.2, 0.3]))
    root = process.whitening(parameters)
    np.testing.assert_array_equal(np.tril(root, -1), 0.0)

    @jax.jit
    def bound(p):
        return titsias_bound(process.view(p, process.whitening(p), x), y, 0.1)

    covariance = process.prior(parameters).covariance
    np.testing.assert_allclose(root @ root.T, np.linalg.inv(covariance), rtol=1e-7)
    slopes = jax.jit(jax.grad(bound))(parameters)
    step = 1e-5
    moved = [bound(parameters._replace(inputs=parameters.inputs.at[2, 1].add(s))) for s in (step, -step)]
    np.testing.assert_allclose(slopes.inputs[2, 1], (moved[0] - moved[1]) / (2 * step), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("method", ["titsias", "fitc", "stochastic", "features"])
def test_each_method_learns_the_surface(method):
    x, y = surface(200)
    steps = 300 if method == "stochastic" else 50
    regressor = SparseRegressor(
        method=method, inducing=120 if method == "features" else 40, steps=steps, batch=64, learning_rows=120
    )
    new, truth = surface(100, 1)
    mean, deviation = regressor.fit(x, y).predict(new, return_std=True)
    assert regressor.score(new, truth) > 0.95
    assert 0.5 < np.mean(((truth - mean) / deviation) ** 2) < 2
    assert 0.3 < regressor.noise_ / 0.49 < 3


@pytest.mark.long
def test_it_is_cloned_pickled_and_part_of_a_pipeline():
    x, y = surface(50)
    regressor = SparseRegressor(inducing=10, steps=5, random_state=3)
    fitted = clone(regressor).fit(x, y)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    piped = make_pipeline(StandardScaler(), regressor).fit(x, y)  # standardising twice changes nothing
    np.testing.assert_allclose(piped.predict(x), fitted.predict(x), rtol=1e-6)
    many = np.concatenate([x] * 21)[:1030]  # more than a chunk
    np.testing.assert_allclose(fitted.predict(many)[1000:], fitted.predict(many[1000:]), rtol=1e-12)


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"kernel": "poly1"}, "expected a kernel without statistics of features"),
        ({"kernel": "linear", "method": "features"}, "expected rbf or matern52 for features"),
        (
            {"method": "dtc"},
            "expected one of exact, titsias, fitc, stochastic, grid, iterative, features as method, got 'dtc'",
        ),
        ({"inducing": 0}, "expected a whole number above 0 as inducing, got 0"),
        ({"learning_rows": 0}, "expected a whole number above 0 or None as learning_rows, got 0"),
        ({"rate": -1.0}, "expected a positive number as rate"),
    ],
)
def test_what_makes_no_sense_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        SparseRegressor(**parameters).fit(*surface(5))


def test_too_many_rows_for_exact_are_refused():
    with pytest.raises(ValueError, match="at most 10,000 rows for exact, got 10,001; use method='iterative'"):
        SparseRegressor(method="exact").fit(np.arange(10_001.0)[:, None], np.arange(10_001.0))


# `grid` takes one or two inputs, and the checks come with more.
OTHERS = [SparseRegressor(method=name, inducing=16, steps=5) for name in METHODS if name not in ("titsias", "grid")]


@pytest.mark.slow
@parametrize_with_checks(
    [SparseRegressor(inducing=20, steps=40), *OTHERS], expected_failed_checks=lambda estimator: TYPED
)
def test_all_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("name", ["check_estimator_cloneable", "check_set_params", "check_fit1d"])
def test_checks_of_scikit_learn_that_cost_nothing(name):
    getattr(estimator_checks, name)("SparseRegressor", SparseRegressor())


@double
def test_learning_ends_where_the_slope_is_zero_and_the_noise_stays_within_its_bounds():
    x, y = problem(30)
    method = Exact(RBF())
    found, bound = many_points.learn(method, 200, method.initial(x), x, y)
    value, slopes = jax.jit(jax.value_and_grad(lambda p: method.bound(p, x, y)))(found)
    np.testing.assert_allclose(bound, value, rtol=1e-9)
    assert max(float(jnp.abs(leaf).max(initial=0.0)) for leaf in jax.tree.leaves(slopes)) < 0.05
    silent, _ = many_points.learn(method, 200, method.initial(x), x, x[:, 0])
    np.testing.assert_allclose(silent.log_noise, many_points.NOISE[0])


def test_an_optimiser_is_one_object_for_equal_numbers():
    assert many_points.falling_adam(5, 0.1) is many_points.falling_adam(5, 0.1)
