"""The judges: annealed importance sampling and quadrature against closed forms, and every bound below the evidence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import CLASSES, each_deterministic_cell, fitting, kernel_for, sampled_nodes
from problems import double, problem

from fewshot.inference.evidence import _annealed_log_weight, annealed_evidence, bound, quadrature_evidence
from fewshot.inference.inner import cvi, fit
from fewshot.models import LIKELIHOODS
from fewshot.models.expectations import GaussHermite
from fewshot.models.gaussian import BlockSites, Sites
from fewshot.models.likelihoods import LabelRegression

KEY = jax.random.key(0)
LONG = {"particles": 256, "steps": 400}  # of annealing, where the output scale is large or a density narrow
# Of a fit that converges. Label regression has the curvature of the output scale over a noise of 0.1: short steps.
CONVERGED = {("gradient", "gaussian"): {"steps": 6000, "learning_rate": 0.0003}}


@functools.cache
def annealing(name, particles=128, steps=60):
    """Compiled once for each likelihood, precision and shape."""
    return jax.jit(
        lambda key, prior, y: annealed_evidence(key, prior, LIKELIHOODS[name](), y, particles=particles, steps=steps)
    )


def exact_evidence(task, likelihood):
    """log N(coded labels; a, K + s2 I), summed over the classes."""
    prior = jax.device_get(task.prior)
    noisy = np.asarray(prior.covariance, np.float64) + likelihood.noise * np.eye(len(task.y))
    error = np.asarray(likelihood.observed(task.y, len(prior.mean)) - prior.mean, np.float64)
    quadratic = np.sum(error * np.linalg.solve(noisy, error.T).T)
    return -0.5 * (quadratic + len(error) * np.linalg.slogdet(2 * np.pi * noisy)[1])


def evidence_of(name, task, **settings):
    """log p(y) and the error of what is known of it."""
    likelihood = LIKELIHOODS[name]()
    if name == "gaussian":
        return exact_evidence(task, likelihood), 0.0
    found = annealing(name, **settings)(jax.random.key(8), task.prior, task.y)
    assert found.effective > 10
    return found.value, found.error


@pytest.mark.long
@double
def test_quadrature_is_exact_for_a_gaussian_likelihood():
    task, likelihood = problem(0, classes=2, points=2, scale=1.0), LabelRegression(noise=1.0)
    value = jax.jit(lambda: quadrature_evidence(task.prior, likelihood, task.y))()
    np.testing.assert_allclose(value, exact_evidence(task, likelihood), rtol=1e-8)
    with pytest.raises(ValueError, match="at most 4 latents, got 9; use annealed_evidence"):
        quadrature_evidence(problem(0, classes=3, points=3).prior, likelihood, task.y)


@pytest.mark.slow
def test_annealing_finds_the_closed_form_of_a_gaussian_likelihood():
    task, likelihood = problem(1, classes=3, points=5, scale=1.0), LabelRegression(noise=1.0)
    found = jax.jit(lambda key: annealed_evidence(key, task.prior, likelihood, task.y, particles=256, steps=60))(
        jax.random.key(0)
    )
    assert found.error < 0.2
    assert abs(found.value - exact_evidence(task, likelihood)) < 4 * found.error


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name == "softmax" else pytest.param(name, marks=pytest.mark.slow) for name in LIKELIHOODS],
)
def test_annealing_finds_what_quadrature_finds(name):
    """Or the closed form, where the density is a peak that falls between the nodes of a rule of any size."""
    task, likelihood = problem(2, classes=2, points=2, scale=10.0), LIKELIHOODS[name]()
    closed = name == "gaussian"
    found = annealing(name, **(LONG if closed else {}))(jax.random.key(1), task.prior, task.y)
    expected = exact_evidence(task, likelihood) if closed else quadrature_evidence(task.prior, likelihood, task.y)
    print(f"{name}: {found.value:.4f} +- {found.error:.4f} by annealing, {expected:.4f} expected")
    assert found.error < 0.1 and abs(found.value - expected) < 4 * found.error


@pytest.mark.long
def test_annealing_is_unbiased_in_few_steps():
    """E exp(-(u - 2)^2) = exp(-4/3) / sqrt(3), u ~ N(0, 1); in one step the weight is that of the prior's draw."""
    count = 50_000
    start, keys = jax.random.normal(KEY, (count, 1, 1)), jax.random.split(jax.random.key(1), count)

    def data(u):
        return -jnp.sum((u - 2.0) ** 2)

    def weights(steps):
        return np.asarray(jax.jit(jax.vmap(lambda key, u: _annealed_log_weight(key, data, u, steps)))(keys, start))

    np.testing.assert_allclose(weights(1), -((start[:, 0, 0] - 2) ** 2), rtol=1e-5)
    weight = np.exp(weights(3), dtype=np.float64)
    assert abs(weight.mean() - np.exp(-4 / 3) / np.sqrt(3)) < 5 * weight.std() / np.sqrt(count)


@functools.cache
def bounds(likelihood):
    """Compiled once for each likelihood: E_q log p(y | f) over many nodes, and what it exceeds that over the few by.

    Its own estimate, over the few nodes that it was raised on, can lie above them.
    """

    @jax.jit
    def both(y, marginals, points):
        model, nodes = LIKELIHOODS[likelihood](), GaussHermite(16).points(KEY, CLASSES, marginals.mean.dtype)
        many = jnp.sum(model.expected_log_prob(y, marginals, nodes))
        few = jnp.sum(model.expected_log_prob(y, marginals, points))
        return many, many - few

    return both


def check_bounds(inference, likelihood, task, fit_settings=None, annealing_settings=None):
    """No bound lies above log p(y) by more than 4 of its standard errors, nor an augmented one above the other."""
    points = sampled_nodes()
    state, info, marginals, _ = fitting(inference, likelihood, **(fit_settings or {}))(*task, points)
    many, correction = bounds(likelihood)(task.y, marginals, points)
    value, error = evidence_of(likelihood, task, **(annealing_settings or {}))
    own = info.elbo[-1]
    if inference == "cavi":  # its bound is closed and augmented
        plain = many - kernel_for(inference, LIKELIHOODS[likelihood]()).posterior(state, task.prior).kl
        assert own <= plain + 1e-9
    else:
        plain = own + correction
    print(f"{inference}, {likelihood}: {plain:.4f} (its own {own:.4f}), log p(y) = {value:.4f} +- {error:.4f}")
    assert plain <= value + 4 * error + 1e-9
    return value - plain


@pytest.mark.long
@double
@each_deterministic_cell
def test_no_bound_exceeds_the_evidence(inference, likelihood):
    check_bounds(inference, likelihood, problem(1, kernel="linear"))


@pytest.mark.slow
@double
@each_deterministic_cell
def test_no_bound_exceeds_the_evidence_on_more_tasks(inference, likelihood):
    """Run to convergence, at three output scales; the exact posterior of label regression has no gap."""
    settings = CONVERGED.get((inference, likelihood), {"steps": 400 if inference == "gradient" else 60})
    for seed in range(12):
        task = problem(seed, kernel="linear", scale=(1.0, 4.0, 30.0)[seed % 3])
        gap = check_bounds(inference, likelihood, task, settings, LONG)
        if inference == "exact":
            assert abs(gap) < 1e-8


@pytest.mark.slow
@double
@pytest.mark.parametrize("likelihood", ["softmax", "logistic-softmax", "one-vs-each"])
def test_block_sites_are_below_the_evidence_and_above_diagonal_ones(likelihood):
    model, nodes = LIKELIHOODS[likelihood](), GaussHermite(16).points(KEY, CLASSES, jnp.float64)

    @functools.partial(jax.jit, static_argnames="sites")
    def value(prior, y, sites):
        kernel = cvi(model, sites=sites, expectation=GaussHermite(8))
        state, _ = fit(KEY, kernel, prior, y, steps=60)
        q = kernel.posterior(state, prior)
        return jnp.sum(model.expected_log_prob(y, q.marginals, nodes)) - q.kl

    for seed in range(6):
        task = problem(seed, kernel="linear", scale=(1.0, 10.0)[seed % 2])
        evidence, error = evidence_of(likelihood, task, **LONG)
        diagonal, block = (value(task.prior, task.y, sites) for sites in (Sites, BlockSites))
        print(f"{likelihood}: log p(y) {evidence:.3f} +- {error:.3f}, block {block:.3f}, diagonal {diagonal:.3f}")
        assert diagonal < block + 1e-6 and block < evidence + 4 * error


@pytest.mark.long
@double
def test_the_bound_of_an_exact_posterior_is_the_evidence():
    task, likelihood = problem(0, points=4), LabelRegression(noise=0.5)
    q = task.prior.given(Sites(*likelihood.gaussian_sites(task.y, CLASSES)))
    found = jax.jit(lambda: bound(KEY, likelihood, q, task.y, draws=32))()
    np.testing.assert_allclose(found.value, exact_evidence(task, likelihood), rtol=1e-9)


@pytest.mark.slow
@double
def test_a_bound_over_other_nodes_is_that_of_many():
    task, likelihood = problem(0, points=5, scale=10.0), LIKELIHOODS["softmax"]()
    kernel = cvi(likelihood)
    state, _ = jax.jit(lambda: fit(KEY, kernel, task.prior, task.y, steps=60))()
    q = kernel.posterior(state, task.prior)
    found = jax.jit(lambda key: bound(key, likelihood, q, task.y))(jax.random.key(5))
    exact = jnp.sum(likelihood.expected_log_prob(task.y, q.marginals)) - q.kl
    assert found.error < 0.02 and abs(found.value - exact) < 4 * found.error
