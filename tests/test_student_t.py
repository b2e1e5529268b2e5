"""The Student-t distribution and process against SciPy, joints, Monte Carlo and the Gaussian limit."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from jax.flatten_util import ravel_pytree
from problems import double

from fewshot.models import regression, student_t, student_t_fisher
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.kernels import RBF
from fewshot.models.student_t_fisher import DiagonalStudent

DOF = 4.6
HYPER = {"log_scale": 0.3, "log_lengthscale": -0.4}


def joint(seed=0, count=5):
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(count, count))
    return (
        jnp.asarray(rng.normal(size=count)),
        jnp.asarray(rng.normal(size=count)),
        jnp.asarray(half @ half.T + np.eye(count)),
    )


def scipy_density(y, mean, covariance, dof):
    """SciPy takes the scale matrix, which is (nu - 2) / nu of the covariance."""
    return scipy.stats.multivariate_t(mean, np.asarray(covariance) * (dof - 2) / dof, dof).logpdf(y)


@pytest.mark.parametrize("dof", [2.1, 4.6, 300.0])
@double
def test_the_density_is_that_of_scipy(dof):
    y, mean, covariance = joint()
    expected = scipy_density(y, mean, covariance, dof)
    np.testing.assert_allclose(student_t.log_prob(y, mean, covariance, dof), expected, rtol=1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float64, 1e-13), (jnp.float32, 2e-6)])
@double
def test_ratios_of_gamma_functions_and_their_slopes(dtype, tolerance):
    for a in (0.0, 0.5, 10.0, 250.0):
        for b in (1.005, 8.0, 8.3, 60.0):
            expected = scipy.special.gammaln(a + b) - scipy.special.gammaln(b) - a * np.log(b)
            slope = scipy.special.digamma(a + b) - scipy.special.digamma(b) - a / b
            found = jax.value_and_grad(student_t.log_gamma_ratio, 1)(dtype(a), dtype(b))
            np.testing.assert_allclose(found, (expected, slope), rtol=tolerance, atol=tolerance * (1 + 10 * a))


@double
def test_many_degrees_of_freedom_give_the_normal_in_both_precisions():
    y, mean, covariance = joint(1)
    normal = scipy.stats.multivariate_normal(mean, covariance).logpdf(y)
    np.testing.assert_allclose(student_t.log_prob(y, mean, covariance, 1e9), normal, atol=1e-6)
    y, mean, covariance = (jnp.asarray(part, jnp.float32) for part in (y, mean, covariance))
    np.testing.assert_allclose(student_t.log_prob(y, mean, covariance, 1e6), normal, atol=1e-4)


@double
def test_the_conditional_is_the_ratio_of_joints():
    y, mean, covariance = joint(2)
    known, rest = slice(0, 3), slice(3, 5)
    gain = np.linalg.solve(covariance[known, known], covariance[known, rest]).T
    residual = np.asarray(y - mean)[known]
    beta = residual @ np.linalg.solve(covariance[known, known], residual)
    factor = student_t.conditional_factor(DOF, jnp.asarray(beta), 3)
    np.testing.assert_allclose(factor, (DOF + beta - 2) / (DOF + 3 - 2))
    schur = covariance[rest, rest] - gain @ covariance[known, rest]
    conditional = student_t.log_prob(y[rest], mean[rest] + gain @ residual, factor * schur, DOF + 3)
    ratio = scipy_density(y, mean, covariance, DOF) - scipy_density(
        y[known], mean[known], covariance[known, known], DOF
    )
    np.testing.assert_allclose(conditional, ratio, rtol=1e-10)


@double
def test_the_density_is_a_mixture_of_normals_over_the_scale():
    y, mean, covariance = joint(3, count=3)
    prior = student_t.scale_posterior(DOF)

    def integrand(log_scale):
        normal = scipy.stats.multivariate_normal(mean, np.exp(log_scale) * np.asarray(covariance)).pdf(y)
        return normal * np.exp(prior.log_density(jnp.exp(log_scale)) + log_scale)

    value, _ = scipy.integrate.quad(integrand, -12, 12, epsabs=0, epsrel=1e-10)
    np.testing.assert_allclose(np.log(value), student_t.log_prob(y, mean, covariance, DOF), rtol=1e-8)
    np.testing.assert_allclose(prior.mean(), 1.0)


def test_draws_have_the_covariance_and_the_square_of_the_density():
    """beta / M is F(M, nu) times (nu - 2) / nu: its distribution function, and the covariance of draws."""
    _, mean, covariance = joint(4, count=3)
    root, dof, draws = np.linalg.cholesky(covariance), 7.0, 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    found = np.asarray(jax.jit(jax.vmap(lambda key: student_t.sample(key, mean, jnp.asarray(root), dof)))(keys))
    squares = np.sum(np.linalg.solve(root, (found - mean).T) ** 2, axis=0)
    test = scipy.stats.kstest(squares / 3 * dof / (dof - 2), scipy.stats.f(3, dof).cdf)
    assert test.pvalue > 1e-3
    np.testing.assert_allclose(np.cov(found.T), covariance, atol=0.25)
    np.testing.assert_allclose(found.mean(0), mean, atol=0.06)


def process(seed=5, points=12, queries=3):
    rng = np.random.default_rng(seed)
    x, new = (jnp.asarray(rng.normal(size=(count, 2))) for count in (points, queries))
    kernel = RBF()
    prior = GaussianPrior(jnp.full((1, points), 0.2), kernel.gram(HYPER, x, x))
    query = Query(jnp.full((1, queries), 0.2), kernel.gram(HYPER, new, x), kernel.diagonal(HYPER, new))
    return prior, jnp.asarray(rng.standard_t(3, size=points)), query, kernel.gram(HYPER, new, new)


@pytest.mark.long
@double
def test_exact_inference_is_that_of_the_joint_density():
    prior, y, query, _ = process()
    noise = 0.3
    found = student_t.student_regress(prior, y, noise, DOF)
    covariance = np.asarray(prior.covariance) + noise * np.eye(len(y))
    np.testing.assert_allclose(found.log_evidence, scipy_density(y, prior.mean[0], covariance, DOF), rtol=1e-10)
    predicted = found.predict(query, noise)
    for q, value in enumerate((0.4, -1.0, 2.5)):
        cross = np.asarray(query.cross)[q]
        corner = float(query.variance[q]) + noise
        larger = np.block([[covariance, cross[:, None]], [cross[None], np.array([[corner]])]])
        both = scipy_density(np.append(y, value), np.full(len(y) + 1, 0.2), larger, DOF)
        density = predicted.log_density(jnp.full(len(query.variance), value))[q]
        np.testing.assert_allclose(density, both - found.log_evidence, rtol=1e-8)
    beta = (y - 0.2) @ np.linalg.solve(covariance, y - 0.2)
    np.testing.assert_allclose(found.scale.mean(), (DOF - 2 + beta) / (DOF + len(y) - 2))
    np.testing.assert_allclose(found.factor, found.scale.mean())


@pytest.mark.long
def test_the_evidence_is_exact_in_single_precision_where_a_label_lies_far_out():
    """By the determinant itself: beta, 7e8 here, leaves nothing of it where both are subtracted."""
    x = jnp.linspace(0.0, 1.0, 20)[:, None]
    prior = GaussianPrior(jnp.zeros((1, 20)), RBF().gram(HYPER, x, x))
    y = jnp.sin(6 * x[:, 0]).at[7].set(1000.0)
    found = student_t.student_regress(prior, y, 1e-3, DOF)
    covariance = np.asarray(prior.covariance, np.float64) + 1e-3 * np.eye(20)
    expected = scipy_density(np.asarray(y, np.float64), np.zeros(20), covariance, DOF)
    assert float(found.log_evidence) == pytest.approx(expected, abs=0.3)


@pytest.mark.long
@double
def test_exact_inference_tends_to_the_gaussian_process():
    prior, y, query, _ = process(6)
    ours, limit = student_t.student_regress(prior, y, 0.3, 1e9), regression.regress(prior, y, 0.3)
    np.testing.assert_allclose(ours.log_evidence, limit.log_evidence, atol=1e-6)
    found, expected = ours.predict(query), regression.predict(limit.posterior, query)
    np.testing.assert_allclose(found.mean, expected.mean)
    np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-6)


# Fisher information


def log_density(at, x):
    beta = jnp.sum((x - at.mean) ** 2 / at.scale)
    return student_t.log_density(beta, jnp.sum(at.log_scale), at.dof, x.shape[0])


def plain(dof, mean, scale):
    """The numbers (nu, m, S) as the unconstrained ones."""
    return DiagonalStudent(jnp.log(dof - 2), mean, jnp.log(scale))


def dense(blocks, count):
    matrix = np.zeros((1 + 2 * count, 1 + 2 * count))
    location, scale = slice(1, 1 + count), slice(1 + count, None)
    matrix[0, 0], matrix[0, scale], matrix[scale, 0] = blocks.dof, blocks.dof_scale, blocks.dof_scale
    matrix[location, location], matrix[scale, scale] = np.diag(blocks.location), blocks.scale
    return matrix


def rings(count, dof, nodes=400):
    """Points x [K, M] of ST(dof, 0, I) and masses: Gauss-Legendre over B in t, B = sin(t)^2, times even directions.

    A gradient's products are polynomials of degree 4 in the direction: eight directions on a circle, or two on a line,
    integrate them exactly.
    """
    t, mass = np.polynomial.legendre.leggauss(nodes)
    t, mass = (t + 1) * np.pi / 4, mass * np.pi / 4
    share = np.sin(t) ** 2
    mass = mass * scipy.stats.beta(count / 2, dof / 2).pdf(share) * 2 * np.sin(t) * np.cos(t)
    radius = np.sqrt((dof - 2) * share / (1 - share))
    angles = 2 * np.pi * np.arange(8) / 8
    directions = np.stack([np.cos(angles), np.sin(angles)], 1) if count == 2 else np.array([[1.0], [-1.0]])
    points = radius[:, None, None] * directions
    return jnp.asarray(points.reshape(-1, count)), np.repeat(mass / len(directions), len(directions))


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dof", [2.5, 6.0, 40.0])
@double
def test_fisher_blocks_are_the_mean_square_and_the_mean_curvature_of_the_log_density(count, dof):
    mean, scale = jnp.arange(1.0, 1.0 + count), jnp.asarray([0.7, 2.3])[:count]
    points, mass = rings(count, dof)
    x = mean + jnp.sqrt(scale) * points
    start = jnp.concatenate([jnp.asarray([dof]), mean, scale])

    def value(numbers, x):
        return log_density(plain(numbers[0], numbers[1 : 1 + count], numbers[1 + count :]), x)

    slopes = np.asarray(jax.jit(jax.vmap(jax.grad(value), (None, 0)))(start, x))
    curvature = np.asarray(jax.jit(jax.vmap(jax.hessian(value), (None, 0)))(start, x))
    ours = dense(student_t_fisher.fisher(jnp.asarray(dof), scale), count)
    np.testing.assert_allclose(mass.sum(), 1.0, rtol=1e-7)
    np.testing.assert_allclose(np.einsum("k,ki,kj->ij", mass, slopes, slopes), ours, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(-np.einsum("k,kij->ij", mass, curvature), ours, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@double
def test_fisher_blocks_by_monte_carlo():
    count, dof, draws = 7, 5.0, 400_000
    rng = np.random.default_rng(0)
    at = DiagonalStudent(jnp.log(dof - 2), jnp.asarray(rng.normal(size=count)), jnp.asarray(rng.normal(size=count)))
    keys = jax.random.split(jax.random.key(1), draws)
    root = jnp.diag(jnp.sqrt(at.scale))

    def slope(key):
        return ravel_pytree(jax.grad(log_density)(at, student_t.sample(key, at.mean, root, dof)))[0]

    slopes = np.asarray(jax.jit(jax.vmap(slope))(keys))
    products = slopes[:, :, None] * slopes[:, None]
    change = np.concatenate([[dof - 2], np.ones(count), at.scale])
    ours = dense(student_t_fisher.fisher(jnp.asarray(dof), at.scale), count) * np.outer(change, change)
    errors = (products.mean(0) - ours) / (products.std(0) / np.sqrt(draws))
    entries = (1 + 2 * count) ** 2
    assert np.abs(errors).max() < scipy.stats.norm.isf(0.01 / (2 * entries))


@pytest.mark.parametrize("dof", [2.01, 4.6, 80.0])
@double
def test_the_natural_gradient_solves_the_fisher_matrix(dof):
    count = 6
    rng = np.random.default_rng(1)
    at = DiagonalStudent(jnp.log(dof - 2), *(jnp.asarray(rng.normal(size=count)) for _ in range(2)))
    slopes = DiagonalStudent(jnp.asarray(rng.normal()), *(jnp.asarray(rng.normal(size=count)) for _ in range(2)))
    change = np.concatenate([[dof - 2], np.ones(count), at.scale])
    matrix = dense(student_t_fisher.fisher(at.dof, at.scale), count) * np.outer(change, change)
    found = ravel_pytree(student_t_fisher.natural_slopes(at, slopes))[0]
    np.testing.assert_allclose(matrix @ found, ravel_pytree(slopes)[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dof", [3, 30, 3000, 100_000])
def test_the_information_on_the_degrees_of_freedom_does_not_cancel_in_single_precision(dof):
    """For an even number of values psi'(b) - psi'(b + M / 2) is a sum of M / 2 fractions."""
    for count in (2, 20):
        total, half = dof + count, Fraction(dof, 2)
        difference = sum(1 / (half + k) ** 2 for k in range(count // 2))
        exact = (difference - Fraction(2 * count * (total + 2), dof * total**2)) / 4
        found = student_t_fisher.dof_information(jnp.float32(dof), count)
        np.testing.assert_allclose(float(found), float(exact), rtol=2e-2 if dof > 1e4 else 1e-3)


@double
def test_a_natural_step_is_shortened_to_its_radius():
    at = DiagonalStudent(jnp.asarray(1.0), jnp.zeros(3), jnp.zeros(3))
    slopes = DiagonalStudent(jnp.asarray(0.1), jnp.full(3, 4.0), jnp.full(3, -2.0))
    direction = student_t_fisher.natural_slopes(at, slopes)
    for rate, radius in ((1e-3, 1.0), (0.5, 0.2)):
        optimiser = student_t_fisher.natural_gradient(rate, radius)
        step, _ = optimiser.update(slopes, optimiser.init(at), at)
        matrix = dense(student_t_fisher.fisher(at.dof, at.scale), 3)
        matrix[0] *= np.exp(1.0)
        matrix[:, 0] *= np.exp(1.0)
        flat = ravel_pytree(step)[0]
        length = np.sqrt(flat @ matrix @ flat)
        np.testing.assert_allclose(flat / flat[0], ravel_pytree(direction)[0] / direction.log_excess, rtol=1e-9)
        assert length == pytest.approx(radius) if rate == 0.5 else length < radius
    short, _ = student_t_fisher.natural_gradient(1e-3).update(slopes, (), at)
    np.testing.assert_allclose(ravel_pytree(short)[0], -1e-3 * ravel_pytree(direction)[0])
    with pytest.raises(ValueError, match="positive rate"):
        student_t_fisher.natural_gradient(0.0)


@double
def test_a_step_of_the_degrees_of_freedom_is_a_factor_of_e_at_most_and_ends_at_the_limit():
    """The Fisher length to infinity is finite: without limits this step, which is short, would be one of 60 in log."""
    optimiser = student_t_fisher.natural_gradient(1.0, 1e3)
    zeros = jnp.zeros(3)
    for start, slope, expected in (
        (5.0, -1e-3, 1.0),
        (5.0, 1e-3, -1.0),
        (np.log(student_t_fisher.DOF_LIMIT) - 0.3, -1e-3, 0.3),
    ):
        at = DiagonalStudent(jnp.asarray(start), zeros, zeros)
        step, _ = optimiser.update(DiagonalStudent(jnp.asarray(slope), zeros, zeros), (), at)
        assert abs(student_t_fisher.natural_slopes(at, DiagonalStudent(jnp.asarray(slope), zeros, zeros))[0]) > 2
        assert step.log_excess == pytest.approx(expected)
    with pytest.raises(ValueError, match="current DiagonalStudent"):
        optimiser.update(DiagonalStudent(zeros[0], zeros, zeros), ())
