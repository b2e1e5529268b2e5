"""A CVI step is a natural-gradient step, a mirror step and a conjugate update (MD theorems 3.1 and 3.2).

The other sides are built here without sites: full Gaussians over the N latents of every class, in natural parameters
(K^-1 a + h, -1/2 (K^-1 + W)), in mean parameters (m, V + m m^T) or as (m, chol V), with autodiff for every derivative.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import FixedPoints, double, problem

from fewshot.inference.inner import cvi
from fewshot.models.expectations import GaussHermite
from fewshot.models.gaussian import Marginals, Sites
from fewshot.models.likelihoods import LabelRegression, Softmax

CLASSES, POINTS = 3, 4
LOWER = np.tril_indices(POINTS)
RHO = 0.3


def nodes():
    return GaussHermite(6).points(jax.random.key(0), CLASSES, jnp.result_type(float))


# Three parametrisations of q, each a flat vector for all classes: natural, mean, and (m, chol V).


def pack(vectors, matrices):
    return jnp.concatenate([vectors, matrices[:, LOWER[0], LOWER[1]]], axis=1).ravel()


def unpack(flat):
    """Vectors [C, N] and symmetric matrices [C, N, N] whose lower triangles are the parameters."""
    rows = flat.reshape(CLASSES, -1)
    lower = jnp.zeros((CLASSES, POINTS, POINTS)).at[:, LOWER[0], LOWER[1]].set(rows[:, POINTS:])
    return rows[:, :POINTS], lower + jnp.swapaxes(jnp.tril(lower, -1), 1, 2)


def natural_of(prior, sites):
    precision = jnp.linalg.inv(prior.covariance)
    return pack(prior.mean @ precision + sites.shift, -0.5 * (precision + jax.vmap(jnp.diag)(sites.precision)))


def moments_of_natural(flat):
    first, second = unpack(flat)
    sigma = jnp.linalg.inv(-2 * second)
    return jnp.einsum("cij,cj->ci", sigma, first), sigma


def moments_of_mean(flat):
    mean, second = unpack(flat)
    return mean, second - mean[:, :, None] * mean[:, None, :]


def moments_of_cholesky(flat):
    rows = flat.reshape(CLASSES, -1)
    factor = jnp.zeros((CLASSES, POINTS, POINTS)).at[:, LOWER[0], LOWER[1]].set(rows[:, POINTS:])
    return rows[:, :POINTS], factor @ jnp.swapaxes(factor, 1, 2)


def mean_of_moments(mean, sigma):
    return pack(mean, sigma + mean[:, :, None] * mean[:, None, :])


def gaussian_kl(left, right):
    """KL between full Gaussians given as moments, summed over classes."""
    (mean, sigma), (other_mean, other_sigma) = left, right
    precision = jnp.linalg.inv(other_sigma)
    difference = other_mean - mean
    trace = jnp.einsum("cij,cji->", precision, sigma)
    quadratic = jnp.einsum("ci,cij,cj->", difference, precision, difference)
    log_ratio = jnp.sum(jnp.linalg.slogdet(other_sigma)[1] - jnp.linalg.slogdet(sigma)[1])
    return 0.5 * (trace + quadratic - mean.size + log_ratio)


def bound(task, points, moments):
    """ELBO of a full Gaussian."""
    mean, sigma = moments
    marginals = Marginals(mean, jnp.diagonal(sigma, axis1=1, axis2=2))
    prior = task.prior.mean, jnp.broadcast_to(task.prior.covariance, sigma.shape)
    return jnp.sum(Softmax().expected_log_prob(task.y, marginals, points)) - gaussian_kl(moments, prior)


def fisher(parameters, moments_of):
    """Fisher information: the Hessian of KL(q_fixed || q) in the parameters of q, at q_fixed."""
    fixed = moments_of(parameters)
    return jax.hessian(lambda moved: gaussian_kl(fixed, moments_of(moved)))(parameters)


def cvi_step(task, points, sites, rho):
    """Sites after one step from the given ones."""
    kernel = cvi(Softmax(), rho=rho, expectation=FixedPoints(points))
    state = kernel.init(jax.random.key(0), task.prior, task.y)
    # A step from other sites than zero: one unit step of a state whose target they are.
    unit = cvi(Softmax(), rho=1.0, expectation=FixedPoints(points))
    arrived, _ = unit.step(
        jax.random.key(0), state._replace(target=sites, rho=jnp.ones_like(state.rho)), task.prior, task.y
    )
    moved, _ = kernel.step(jax.random.key(0), arrived._replace(rho=jnp.asarray(rho)), task.prior, task.y)
    return moved.sites


def setting():
    task = problem(0, classes=CLASSES, points=POINTS, kernel="rbf", features=8)
    rng = np.random.default_rng(1)
    sites = Sites(jnp.asarray(rng.normal(size=(CLASSES, POINTS))), jnp.asarray(rng.gamma(1.0, size=(CLASSES, POINTS))))
    return task, sites, nodes()


@jax.jit
def all_steps():
    """Natural parameters before and after one step of length RHO, by each of the four routes."""
    task, sites, points = setting()
    natural = natural_of(task.prior, sites)
    elbo = partial(bound, task, points)
    by_sites = natural_of(task.prior, cvi_step(task, points, sites, RHO))
    # Natural gradient: solve with the Fisher information of the natural parameters.
    slope = jax.grad(lambda flat: elbo(moments_of_natural(flat)))(natural)
    by_fisher = natural + RHO * jnp.linalg.solve(fisher(natural, moments_of_natural), slope)
    # Mirror descent: the gradient in the mean parameters is added to the natural ones. Off-diagonal entries of a
    # symmetric matrix are one parameter each, which counts them twice in the inner product of the two.
    means = mean_of_moments(*moments_of_natural(natural))
    mean_slope = jax.grad(lambda flat: elbo(moments_of_mean(flat)))(means)
    by_mirror = natural + RHO * mean_slope / twice()
    # Conjugate update: q^(1 - rho) times (prior times the Gaussian that has the likelihood's gradient)^rho.
    mean, sigma = moments_of_mean(means)

    def data(vectors, squares):
        marginals = Marginals(vectors, squares - vectors**2)
        return jnp.sum(Softmax().expected_log_prob(task.y, marginals, points))

    by_mean, by_square = jax.grad(data, argnums=(0, 1))(mean, jnp.diagonal(sigma, axis1=1, axis2=2) + mean**2)
    pseudo = natural_of(task.prior, Sites(by_mean, -2 * by_square))
    by_conjugacy = (1 - RHO) * natural + RHO * pseudo
    return natural, by_sites, by_fisher, by_mirror, by_conjugacy


def twice():
    ones = 2.0 * jnp.ones((CLASSES, POINTS, POINTS)) - jnp.eye(POINTS)
    return pack(jnp.ones((CLASSES, POINTS)), ones)


@pytest.mark.long
@double
def test_one_step_is_a_natural_gradient_step_a_mirror_step_and_a_conjugate_update():
    start, by_sites, *others = jax.device_get(all_steps())
    moved = np.abs(by_sites - start).max()
    assert moved > 0.1
    for other in others:
        np.testing.assert_allclose(by_sites, other, atol=1e-9 * moved)


@double
def test_one_step_solves_the_mirror_problem():
    """mu' = argmax <grad, mu> - KL(q_mu || q_mu_t) / rho (MD equation 4): its gradient vanishes there."""

    @jax.jit
    def slope_of_the_mirror_problem():
        task, sites, points = setting()
        means = mean_of_moments(*moments_of_natural(natural_of(task.prior, sites)))
        slope = jax.grad(lambda flat: bound(task, points, moments_of_mean(flat)))(means)

        def problem_at(flat):
            return slope @ flat - gaussian_kl(moments_of_mean(flat), moments_of_mean(means)) / RHO

        moved = natural_of(task.prior, cvi_step(task, points, sites, RHO))
        return jax.grad(problem_at)(mean_of_moments(*moments_of_natural(moved))), jax.grad(problem_at)(means)

    at_step, at_start = slope_of_the_mirror_problem()
    assert np.abs(at_start).max() > 0.1
    np.testing.assert_allclose(at_step, 0.0, atol=1e-8)


@double
def test_in_mean_and_cholesky_factor_only_the_direction_agrees():
    """The natural gradient of (m, chol V) leads elsewhere, but not to first order in rho."""

    @jax.jit
    def distances(rho):
        task, sites, points = setting()
        mean, sigma = moments_of_natural(natural_of(task.prior, sites))
        start = pack(mean, jnp.linalg.cholesky(sigma))
        slope = jax.grad(lambda flat: bound(task, points, moments_of_cholesky(flat)))(start)
        moved = start + rho * jnp.linalg.solve(fisher(start, moments_of_cholesky), slope)
        kernel_moved = (1 - rho) * natural_of(task.prior, sites) + rho * natural_of(
            task.prior, cvi_step(task, points, sites, 1.0)
        )
        expected = mean_of_moments(*moments_of_natural(kernel_moved))
        difference = mean_of_moments(*moments_of_cholesky(moved)) - expected
        return jnp.abs(difference).max(), jnp.abs(expected - mean_of_moments(mean, sigma)).max()

    (coarse, coarse_step), (fine, fine_step) = (distances(rho) for rho in (1e-2, 1e-3))
    np.testing.assert_allclose(coarse_step / fine_step, 10, rtol=0.1)  # the step is of first order,
    np.testing.assert_allclose(coarse / fine, 100, rtol=0.1)  # the difference of second order
    assert distances(0.5)[0] > 0.01  # and there is one


@double
@pytest.mark.parametrize("rho", [1.0, 0.3])
def test_a_gaussian_likelihood_converges_in_one_full_step(rho):
    task, likelihood = problem(2, classes=CLASSES, points=POINTS), LabelRegression(0.3)
    kernel = cvi(likelihood, rho=rho)
    target = Sites(*likelihood.gaussian_sites(task.y, CLASSES))

    @jax.jit
    def steps():
        state = kernel.init(jax.random.key(0), task.prior, task.y)
        first, info = kernel.step(jax.random.key(0), state, task.prior, task.y)
        return state.target, first.sites, info

    aimed, reached, info = steps()
    for name in Sites._fields:
        np.testing.assert_allclose(getattr(aimed, name), getattr(target, name), rtol=1e-10)
        np.testing.assert_allclose(getattr(reached, name), rho * getattr(target, name), rtol=1e-10)
    assert (info.residual < 1e-10) == (rho == 1.0)


@double
def test_sites_and_full_gaussians_describe_the_same_posterior():
    """The dense references of this file against the algebra with sites."""

    @jax.jit
    def both():
        task, sites, points = setting()
        dense = moments_of_natural(natural_of(task.prior, sites))
        posterior = task.prior.given(sites)
        data = jnp.sum(Softmax().expected_log_prob(task.y, posterior.marginals, points))
        with_sites = posterior.mean, task.prior.given(sites).covariance(task.prior), data - posterior.kl
        return with_sites, (*dense, bound(task, points, dense))

    for value, reference in zip(*both(), strict=True):
        np.testing.assert_allclose(value, reference, atol=1e-9)
