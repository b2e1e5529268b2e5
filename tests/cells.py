"""Every pair of inference and likelihood that can be built, and its compiled fit, shared by the numerical tests."""

import functools

import jax
import jax.numpy as jnp
import pytest
from problems import FixedPoints, accepts

from fewshot.inference import INFERENCE
from fewshot.inference.inner import fit
from fewshot.models import LIKELIHOODS
from fewshot.models.expectations import GaussHermite, MonteCarlo

CLASSES, POINTS, QUERIES = 3, 9, 5
ORDER = 4  # of the product rule: 64 nodes, a number that the sampled rule shares, and with it the compiled functions
KEY_SEED = 11


def cells():
    """Every pair of registered inference and likelihood that can be built."""
    for inference, constructor in INFERENCE.items():
        for name, likelihood in LIKELIHOODS.items():
            try:
                constructor(likelihood())
            except TypeError:
                continue
            yield inference, name


CELLS = list(cells())
SAMPLED = {"gibbs"}  # their states are random draws: what is asked of them is in test_samplers.py
DETERMINISTIC = [cell for cell in CELLS if cell[0] not in SAMPLED]
# Cells that repeat what others show are run with the slow tests.
REPEATS = {
    ("gibbs", "logistic-softmax"),
    ("laplace", "logistic-softmax"),
    ("cvi", "one-vs-each"),
    ("gradient", "logistic-softmax"),
    ("gradient", "one-vs-each"),
}


def parametrised(chosen):
    marked = [
        pytest.param(*cell, marks=pytest.mark.slow if cell in REPEATS else [], id="-".join(cell)) for cell in chosen
    ]
    return pytest.mark.parametrize("inference, likelihood", marked)


each_cell, each_deterministic_cell = parametrised(CELLS), parametrised(DETERMINISTIC)
each_sampled_cell = parametrised([cell for cell in CELLS if cell[0] in SAMPLED])
# Steps after which tests of a fixed number of steps stop, and settings under which `gradient` converges.
STEPS = {"gradient": 12}
CONVERGING = {"gradient": {"learning_rate": 0.02}}
CONVERGED_STEPS = {"gradient": 1500, "cvi": 80, "exact": 1, "cavi": 120, "laplace": 80}


def kernel_for(inference, likelihood, points=None, **settings):
    constructor = INFERENCE[inference]
    if accepts(constructor, "expectation"):
        settings = {"expectation": FixedPoints(points), **settings}
    if accepts(constructor, "chains"):
        settings = {"chains": 3, **settings}
    return constructor(likelihood, **settings)


def product_nodes():
    return GaussHermite(ORDER).points(jax.random.key(0), CLASSES, jnp.result_type(float))


def sampled_nodes(seed=0):
    return MonteCarlo(ORDER**CLASSES).points(jax.random.key(seed), CLASSES, jnp.result_type(float))


@functools.cache
def fitting(inference, likelihood, steps=None, **settings):
    """Compiled once for each cell, precision and shape: state, Info of each step, marginals and query marginals."""
    settings = CONVERGING.get(inference, {}) | settings

    @jax.jit
    def fitted(prior, y, query, points, mask=None):
        kernel = kernel_for(inference, LIKELIHOODS[likelihood](), points, **settings)
        count = steps or STEPS.get(inference, 5)
        state, info = fit(jax.random.key(KEY_SEED), kernel, prior, y, mask, steps=count)
        posterior = kernel.posterior(state, prior)
        return state, info, posterior.marginals, posterior.predict(query)

    return fitted


def start(task, seed=0):
    return jax.random.key(seed), task.prior, task.y
