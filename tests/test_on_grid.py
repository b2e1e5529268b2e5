"""Regression through a grid as a method of SparseRegressor: the exact process, and what is refused."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot import SparseRegressor
from fewshot.inference import on_grid
from fewshot.inference.many_points import Exact
from fewshot.inference.on_grid import OnGrid
from fewshot.models.kernels import RBF


def curve(rows=60, seed=0, columns=1):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(rows, columns)) * [1.0, 100.0][:columns]
    return x, 5 + np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=rows)


@pytest.mark.long
@pytest.mark.parametrize("columns, rows", [pytest.param(1, 40, marks=pytest.mark.slow), (2, 30)])
@double
def test_posterior_and_evidence_are_those_of_the_exact_process(monkeypatch, columns, rows):
    """With as many probes as it takes for 3% of the determinant; a length-scale has eight steps of the grid."""
    monkeypatch.setattr(on_grid, "STEPS", 8)
    monkeypatch.setattr(on_grid, "PROBES", 64)
    x, y = curve(rows, columns=columns)
    x, y = jnp.asarray((x - x.mean(0)) / x.std(0)), jnp.asarray(y - y.mean())
    exact, method = Exact(RBF()), OnGrid(RBF())
    parameters = method.initial(x)._replace(log_weights=jnp.full(columns, 0.5))
    method = method.laid(parameters, x)
    assert len(method.shape) == columns and min(method.shape) > 16
    found, expected = (jax.jit(one.condition)(parameters, x, y) for one in (method, exact))
    new = 0.9 * x[:7]
    ours, theirs = method.predict(parameters, found.state, new), exact.predict(parameters, expected.state, new)
    np.testing.assert_allclose(ours.mean, theirs.mean, atol=1e-3)
    np.testing.assert_allclose(ours.variance, theirs.variance, atol=1e-3)
    np.testing.assert_allclose(found.bound, expected.bound, atol=3)
    np.testing.assert_array_equal(method.bound(parameters, x, y), exact.bound(parameters, x, y))


@pytest.mark.long
def test_the_estimator_learns_a_curve_and_is_pickled():
    x, y = curve(80)
    regressor = SparseRegressor("rbf", "grid", steps=15).fit(x, y)
    new, truth = curve(30, 1)
    new = np.clip(new, x.min(), x.max())
    mean, deviation = regressor.predict(new, return_std=True)
    assert regressor.score(new, truth) > 0.95
    assert 0.3 < np.mean(((truth - mean) / deviation) ** 2) < 2
    exact = SparseRegressor("rbf", "exact", steps=15).fit(x, y)
    np.testing.assert_allclose(mean, exact.predict(new), atol=0.02)
    again = pickle.loads(pickle.dumps(regressor))
    np.testing.assert_array_equal(again.predict(new), regressor.predict(new))
    with pytest.raises(ValueError, match=r"within 10% of the range of those fitted, got row 1, column 0 beyond"):
        regressor.predict([[0.0], [9.0]])


@pytest.mark.long
@double
def test_the_grid_ends_a_tenth_of_the_range_beyond_the_rows():
    x = jnp.asarray(curve(20, columns=2)[0])
    method = OnGrid(RBF(), (16, 16))
    state = jax.jit(method.condition)(method.initial(x), x, x[:, 0]).state
    low, high = np.asarray(x.min(0)), np.asarray(x.max(0))
    for edge, sign in ((low, -1), (high, 1)):
        method.check_inside(state, (edge + sign * 0.099 * (high - low))[None])
        for column in range(2):
            beyond = np.array(x[:2])
            beyond[1, column] = edge[column] + sign * 0.101 * (high - low)[column]
            with pytest.raises(ValueError, match=f"got row 1, column {column} beyond"):
                method.check_inside(state, beyond)


@pytest.mark.parametrize(
    "columns, rows, parameters, message",
    [
        (3, 20, {}, "expected inputs of one or two columns for grid, got 3; use method='titsias'"),
        (1, 20, {"kernel": "linear"}, "expected rbf or matern52 for grid"),
        (1, 10_001, {"learning_rows": None}, "expected at most 10,000 as learning_rows for grid, got None"),
    ],
)
def test_what_a_grid_cannot_do_is_refused(columns, rows, parameters, message):
    x = np.random.default_rng(0).normal(size=(rows, columns))
    with pytest.raises(ValueError, match=message):
        SparseRegressor(method="grid", **parameters).fit(x, x[:, 0])
