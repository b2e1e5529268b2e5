"""Stochastic variational processes: natural steps, batches, and the optimum that Titsias' bound knows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import double

from fewshot.inference import sparse
from fewshot.models import inducing
from fewshot.models.inducing import InducingProcess
from fewshot.models.kernels import RBF, Matern52

PROCESS = InducingProcess(Matern52())


def problem(seed=0, points=24, count=5, size=2):
    rng = np.random.default_rng(seed)
    x, z = jnp.asarray(rng.normal(size=(points, size))), jnp.asarray(rng.normal(size=(count, size)))
    y = jnp.asarray(np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=points))
    parameters = PROCESS.initial(z, noise=0.2)
    return x, y, parameters._replace(log_weights=jnp.asarray([0.2, -0.1]))


def random_sites(seed, parameters):
    rng = np.random.default_rng(seed)
    count = len(parameters.inputs)
    half = rng.normal(size=(count, count))
    return sparse.DualSites(jnp.asarray(rng.normal(size=count)), jnp.asarray(half @ half.T))


def parts(parameters, x):
    whitener = PROCESS.whitening(parameters)
    return whitener, PROCESS.view(parameters, whitener, x)


@pytest.mark.long
@double
def test_one_full_step_from_anywhere_reaches_the_optimum_of_titsias():
    x, y, parameters = problem()
    whitener, seen = parts(parameters, x)
    noise = jnp.exp(parameters.log_noise)
    start = random_sites(1, parameters)
    target, clips = sparse.target_sites(start.weights(whitener), seen, y, sparse.normal_noise(noise))
    sites = sparse.natural_step(start, target, 1.0)
    best = inducing.titsias_bound(seen, y, noise)
    assert clips == 0
    direct = sparse.best_sites(PROCESS, parameters, x, y)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9), direct, target)
    np.testing.assert_allclose(sparse.bound(PROCESS, parameters, sites, x, y), best, rtol=1e-10)
    assert sparse.bound(PROCESS, parameters, start, x, y) < best - 0.1
    exact, found = inducing.posterior(seen, y, noise), sites.weights(whitener)
    np.testing.assert_allclose(found.predict(seen).variance, exact.predict(seen).variance, atol=1e-10)
    np.testing.assert_allclose(found.predict(seen).mean, exact.predict(seen).mean, atol=1e-10)


@pytest.mark.long
@double
def test_a_step_is_one_along_the_natural_gradient():
    """In natural parameters (V^-1 m, -V^-1/2) it is rho times the gradient for (m, V + m m^T), by autodiff."""
    x, y, parameters = problem(2)
    whitener, seen = parts(parameters, x)
    expected, rate, weight = sparse.normal_noise(0.2), 0.3, 1.7
    start = random_sites(3, parameters)

    def natural(sites):
        precision = np.eye(len(whitener)) + whitener.T @ sites.precision @ whitener
        return whitener.T @ sites.shift, -0.5 * precision

    def bound(first, second):
        covariance = second - jnp.outer(first, first)
        mean = seen.features @ first
        variance = seen.rest + jnp.sum((seen.features @ covariance) * seen.features, axis=1)
        kl = 0.5 * (jnp.trace(covariance) + first @ first - len(first) - jnp.linalg.slogdet(covariance)[1])
        return weight * jnp.sum(expected(y, mean, variance)) - kl

    first, second = natural(start)
    covariance = np.linalg.inv(-2 * second)
    mean = covariance @ first
    slopes = jax.grad(bound, argnums=(0, 1))(mean, covariance + np.outer(mean, mean))
    target, _ = sparse.target_sites(start.weights(whitener), seen, y, expected, weight)
    moved = natural(sparse.natural_step(start, target, rate))
    np.testing.assert_allclose(moved[0], first + rate * slopes[0], atol=1e-9)
    np.testing.assert_allclose(moved[1], second + rate * slopes[1], atol=1e-9)


@pytest.mark.long
@double
def test_batches_are_unbiased_in_bound_gradient_and_step():
    x, y, parameters = problem(4)
    sites = random_sites(5, parameters)
    whitener, _ = parts(parameters, x)

    @jax.jit
    def found(x, y, weight):
        _, seen = parts(parameters, x)
        target, _ = sparse.target_sites(sites.weights(whitener), seen, y, sparse.normal_noise(0.2), weight)
        best = sparse.best_sites(PROCESS, parameters, x, y, weight)
        slopes = jax.value_and_grad(lambda p: sparse.bound(PROCESS, p, sites, x, y, weight))(parameters)
        return target, slopes, best

    whole = found(x, y, 1.0)
    batches = [found(x[rows], y[rows], 6.0) for rows in np.random.default_rng(6).permutation(24).reshape(6, 4)]
    average = jax.tree.map(lambda *leaves: sum(leaves) / 6, *batches)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9), average, whole)
    assert abs(batches[0][1][0] - whole[1][0]) > 1.0


@pytest.mark.long
@double
def test_the_gradient_at_the_optimal_sites_is_that_of_titsias():
    x, y, parameters = problem(7)

    def titsias(parameters):
        _, seen = parts(parameters, x)
        return inducing.titsias_bound(seen, y, jnp.exp(parameters.log_noise))

    sites = sparse.best_sites(PROCESS, parameters, x, y)
    ours = jax.jit(jax.grad(lambda p: sparse.bound(PROCESS, p, sites, x, y)))(parameters)
    theirs = jax.jit(jax.grad(titsias))(parameters)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-8), ours, theirs)


@pytest.mark.long
@double
def test_a_likelihood_that_is_not_log_concave_clips_and_its_fixed_point_is_stationary_where_it_does_not():
    x, y, parameters = problem(8)
    whitener, seen = parts(parameters, x)
    nodes, masses = np.polynomial.hermite_e.hermegauss(20)

    def expected(y, mean, variance):  # Student-t noise of 4 degrees of freedom, by quadrature
        f = mean[:, None] + jnp.sqrt(variance)[:, None] * nodes
        return -2.5 * jnp.log1p((y[:, None] - f) ** 2 / 4 / 0.3) @ masses / masses.sum()

    @jax.jit
    def improve(sites):
        target, clips = sparse.target_sites(sites.weights(whitener), seen, y, expected)
        return sparse.natural_step(sites, target, 0.5), clips

    sites, clips = sparse.zero_sites(parameters.inputs), 0
    for _ in range(200):
        sites, clips = improve(sites)
    assert clips == 0

    def bound(change):
        moved = sparse.DualSites(sites.shift + change, sites.precision)
        return sparse.elbo(moved.weights(whitener), seen, y, expected)

    np.testing.assert_allclose(jax.grad(bound)(jnp.zeros(len(whitener))), 0.0, atol=1e-8)
    _, clips = sparse.target_sites(sites.weights(whitener), seen, y + 8.0 * (jnp.arange(24) == 0), expected)
    assert clips == 1


@pytest.mark.long
@pytest.mark.parametrize("batch", [8, 24])
def test_training_raises_the_bound_and_stays_finite_in_single_precision(batch):
    x, y, parameters = problem(9)
    optimiser, process = optax.adam(3e-2), InducingProcess(RBF(), inducing_noise=1e-4)
    x, y, parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (x, y, parameters))
    state = sparse.init(optimiser, parameters)
    moved, infos = sparse.run(jax.random.key(0), process, optimiser, state, x, y, batch, 60, 0.2)
    assert np.isfinite(infos.bound).all()
    best = sparse.best_sites(process, state.parameters, x, y)
    before, after = sparse.bound(process, parameters, best, x, y), sparse.bound(process, *moved[::2], x, y)
    assert after > before + 1.0
    assert np.mean((sparse.predict(process, moved, x).mean - y) ** 2) < 0.5 * np.var(y)
