"""Conjugate gradients on rows that devices share: dense algebra, one device and eight, memory, what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot import SparseRegressor
from fewshot.inference import structured
from fewshot.inference.by_rows import INDUCING_NOISE, ByRows
from fewshot.inference.many_points import Exact
from fewshot.models.kernels import RBF

TESTS = Path(__file__).resolve().parent
TOLERANCE = 1e-10
ROWS = 4012  # of the program whose memory is counted


@pytest.fixture(scope="module")
def shared():
    """What by_rows.py printed; JAX counts devices once, so eight need a process of their own."""
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "32"}
    done = subprocess.run(
        [sys.executable, TESTS / "by_rows.py"], env=variables, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1", "8", "8 computed", "3 plain"])
def test_shared_rows_give_the_dense_solution(shared, name):
    """To what the residual allows: |A^-1| <= 1 / s2 = 25."""
    assert shared["devices"] == 8
    dense, found = shared["dense"], shared[name]
    error = np.linalg.norm(np.subtract(found["alpha"], dense["alpha"]))
    assert error < 25 * TOLERANCE * 1003**0.5 * 2
    np.testing.assert_allclose(found["mean"], dense["mean"], atol=1e-7)
    np.testing.assert_allclose(found["variance"], dense["variance"], atol=1e-8)
    assert abs(found["bound"] - dense["bound"]) < 3 * shared["deviation"] < 60  # eight random signs


@pytest.mark.slow
def test_one_device_and_eight_agree(shared):
    for field in ("alpha", "bound", "mean", "variance"):
        np.testing.assert_allclose(shared["8"][field], shared["1"][field], rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_no_device_holds_the_matrix(shared):
    matrix, found = 8 * ROWS**2, shared["bytes"]
    assert found["1"] > matrix
    assert matrix / 8 < found["8"] < matrix / 4
    assert found["computed"] < matrix / 4


@pytest.mark.slow
def test_the_estimator_on_eight_devices_is_the_exact_one(shared):
    np.testing.assert_allclose(shared["estimator"], shared["exact estimator"], atol=1e-4)


@double
def test_the_preconditioner_is_the_inverse_of_the_low_rank_process():
    """P^-1 of a matrix formed densely; where its points are all rows, it is A^-1."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(12, 2)))
    for count in (4, 12):
        method = ByRows(RBF(), preconditioned=count)
        parameters = method.initial(x)._replace(log_noise=jnp.log(0.3))
        gram = np.asarray(RBF().gram(parameters.hyper, x, x))
        points = gram[:count, :count] + INDUCING_NOISE * np.eye(count)
        low_rank = gram[:, :count] @ np.linalg.solve(points, gram[:count])
        found = jax.jit(lambda: jax.vmap(method.preconditioner(parameters, x))(jnp.eye(12)))()  # noqa: B023
        np.testing.assert_allclose(found, np.linalg.inv(low_rank + 0.3 * np.eye(12)), atol=1e-9)
    np.testing.assert_allclose(found, np.linalg.inv(gram + 0.3 * np.eye(12)), atol=1e-4)


@double
def test_a_preconditioner_saves_steps():
    """Where it is A^-1 itself, one step is enough; without it, one step is not."""
    a = jnp.asarray(np.diag([1.0, 10.0, 100.0, 1000.0]))
    right = jnp.ones((1, 4))
    near = structured.solve(lambda v: a @ v, right, 1e-12, 1, lambda v: v / jnp.diag(a))
    np.testing.assert_allclose(near[0], 1 / np.diag(a), rtol=1e-12)
    far = structured.solve(lambda v: a @ v, right, 1e-12, 1)
    assert np.abs(far[0] - 1 / np.diag(a)).max() > 0.1


@double
def test_it_learns_by_the_exact_evidence():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(9, 2)))
    method, exact = ByRows(RBF()), Exact(RBF())
    parameters = method.initial(x)
    assert method.bound(parameters, x, x[:, 0]) == exact.bound(parameters, x, x[:, 0])


def test_too_many_rows_to_learn_from_are_refused():
    x = np.random.default_rng(0).normal(size=(10_001, 2))
    with pytest.raises(ValueError, match="expected at most 10,000 as learning_rows for iterative, got None"):
        SparseRegressor(method="iterative", learning_rows=None).fit(x, x[:, 0])
