"""Run by test_by_rows.py with 8 simulated devices: the same regression on one of them and on all; prints JSON."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from fewshot import SparseRegressor
from fewshot.inference.by_rows import PROBES, ByRows
from fewshot.inference.many_points import Exact, condition, predict
from fewshot.models.kernels import RBF, Matern52
from fewshot.runners.cli import compilation_cache

ROWS, NEW = 1003, 5  # 1003 is a multiple of no number of devices


def problem():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS + NEW, 3))
    y = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * rng.normal(size=len(x))
    return jnp.asarray(x[:ROWS]), jnp.asarray(y[:ROWS]), jnp.asarray(x[ROWS:])


def start(method, x):
    return method.initial(x)._replace(log_weights=jnp.array([0.3, 0.0, -0.2]), log_noise=jnp.log(0.04))


def deviation(x):
    """Of log|A| / 2 by random signs z: the variance of z.(log A) z is twice the squares off the diagonal."""
    method = Exact(Matern52())
    values, vectors = np.linalg.eigh(np.asarray(method.noisy(start(method, x), x)))
    logarithm = vectors * np.log(values) @ vectors.T
    return 0.5 * np.sqrt(2 * (np.sum(logarithm**2) - np.sum(np.diag(logarithm) ** 2)) / PROBES)


def solved(method, x, y, new):
    """Alpha, bound, and the marginals of new labels."""
    parameters = start(method, x)
    found = condition(method, parameters, x, y)
    marginals = predict(method, parameters, found.state, new)
    alpha = found.state.observed.alpha if isinstance(method, Exact) else found.state.alpha
    return {
        "alpha": np.asarray(alpha).tolist(),
        "bound": float(found.bound),
        "mean": np.asarray(marginals.mean).tolist(),
        "variance": np.asarray(marginals.variance).tolist(),
    }


def bytes_of(method, x, y):
    """Of temporary numbers on one device."""
    parameters = method.initial(x)
    compiled = jax.jit(method.condition).lower(parameters, x, y).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main():
    compilation_cache.keep_programs()
    found = {"devices": jax.device_count()}
    with jax.enable_x64(True):
        x, y, new = problem()
        found["deviation"] = float(deviation(x))
        found["dense"] = solved(Exact(Matern52()), x, y, new)
        for name, settings in {
            "1": {"devices": 1},
            "8": {"devices": 8},
            "8 computed": {"devices": 8, "held": False},
            "3 plain": {"devices": 3, "preconditioned": 0},
        }.items():
            settings = {"preconditioned": 64, "tolerance": 1e-10, **settings}
            found[name] = solved(ByRows(Matern52(), **settings), x, y, new)
        sizes = {"1": {"devices": 1}, "8": {"devices": 8}, "computed": {"devices": 8, "held": False}}
        plain = {name: ByRows(RBF(), preconditioned=0, **settings) for name, settings in sizes.items()}
        more = jnp.tile(x, (4, 1)), jnp.tile(y, 4)
        found["bytes"] = {name: bytes_of(method, *more) for name, method in plain.items()}
    regressor = SparseRegressor("rbf", "iterative", inducing=32, steps=8).fit(np.asarray(x)[:300], np.asarray(y)[:300])
    exact = SparseRegressor("rbf", "exact", steps=8).fit(np.asarray(x)[:300], np.asarray(y)[:300])
    both = [np.stack(each.predict(np.asarray(new), return_std=True)).tolist() for each in (regressor, exact)]
    found["estimator"], found["exact estimator"] = both
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
