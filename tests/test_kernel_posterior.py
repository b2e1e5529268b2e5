"""Hyper-parameters as sample sites: densities by hand, and NUTS against sums over a grid."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from problems import double
from scipy.special import expit, logsumexp

from fewshot.inference import diagnostics
from fewshot.inference.mcmc import nuts_of
from fewshot.models.gaussian import triangular_root
from fewshot.models.generative import evidence_model, kernel_model, student_t_process_model
from fewshot.models.kernels import RBF, Linear
from fewshot.models.likelihoods import Normal, Softmax, StudentT

KERNEL = RBF(prior_scale=1.0)
X = np.array([[-1.0], [-0.2], [0.4], [1.5]])
Y = np.array([0.9, 1.4, 0.3, -1.2])
NOISE = Normal(0.1, learn_noise=False)


def covariance(log_scale, log_lengthscale, x=X):
    return np.exp(log_scale - 0.5 * (x - x.T) ** 2 * np.exp(-2 * log_lengthscale))


def log_prior(log_scale, log_lengthscale):
    return scipy.stats.norm(0, 0.5).logpdf(log_scale) + scipy.stats.norm.logpdf(log_lengthscale)


def test_a_triangular_root_is_that_of_the_matrix_whatever_its_rank():
    rng = np.random.default_rng(0)
    for rank in (6, 3):
        half = jnp.asarray(rng.normal(size=(6, rank)), jnp.float32)
        root = triangular_root(half @ half.T)
        np.testing.assert_allclose(root @ root.T, half @ half.T, atol=1e-5)
        np.testing.assert_array_equal(np.triu(root, 1), 0)
        assert (np.diagonal(root) > 0).sum() == rank
    matrix, direction = (rng.normal(size=(6, 6)) for _ in range(2))
    with jax.enable_x64(True):
        matrix, direction = jnp.asarray(matrix @ matrix.T), jnp.asarray(direction + direction.T)
        np.testing.assert_allclose(triangular_root(matrix), np.linalg.cholesky(matrix), rtol=1e-9)
        _, slope = jax.jvp(triangular_root, (matrix,), (direction,))
        difference = [np.linalg.cholesky(matrix + step * direction) for step in (1e-6, -1e-6)]
        np.testing.assert_allclose(slope, (difference[0] - difference[1]) / 2e-6, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@double
def test_the_density_of_hyper_parameters_is_their_prior_times_the_evidence():
    x, y, hyper = jnp.asarray(X), jnp.asarray(Y), {"log_scale": 0.4, "log_lengthscale": -0.3}
    spread = covariance(**hyper) + 0.25 * np.eye(4)
    value, _ = log_density(evidence_model, (KERNEL, Normal(), x, y), {}, {**hyper, "log_noise": jnp.log(0.25)})
    noise = scipy.stats.norm(np.log(0.1), 2.0).logpdf(np.log(0.25))
    expected = log_prior(**hyper) + noise + scipy.stats.multivariate_normal(cov=spread).logpdf(Y)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    value, _ = log_density(
        student_t_process_model, (KERNEL, Normal(0.25, False), x, y), {}, {**hyper, "log_excess": 0.2}
    )
    dof = 2 + np.exp(0.2)
    student = scipy.stats.multivariate_t(np.zeros(4), spread * (dof - 2) / dof, dof).logpdf(Y)
    expected = log_prior(**hyper) + scipy.stats.norm(np.log(3.0), 1.0).logpdf(0.2) + student
    np.testing.assert_allclose(value, expected, rtol=1e-9)


@double
def test_the_density_with_latents_moves_smoothly_with_the_hyper_parameters():
    """log N(u) + log p(y | L u) by hand, and its slope, which a root from eigenvectors does not have."""
    x, y, u = jnp.asarray(X), jnp.asarray(Y), np.random.default_rng(1).normal(size=(1, 4))

    def by_hand(log_scale, log_lengthscale):
        f = np.linalg.cholesky(covariance(log_scale, log_lengthscale)) @ u[0]
        noise = scipy.stats.t(4.0, f, np.sqrt(0.2)).logpdf(Y).sum()
        return log_prior(log_scale, log_lengthscale) + scipy.stats.norm.logpdf(u).sum() + noise

    likelihood = StudentT(0.2, 4.0, learn_noise=False, learn_dof=False)

    def ours(hyper):
        return log_density(kernel_model, (KERNEL, likelihood, x, 1, y), {}, {**hyper, "u": u})[0]

    value, slopes = jax.jit(jax.value_and_grad(ours))(
        {"log_scale": jnp.asarray(0.4), "log_lengthscale": jnp.asarray(-0.3)}
    )
    np.testing.assert_allclose(value, by_hand(0.4, -0.3), rtol=1e-9)
    expected = (by_hand(0.4, -0.3 + 1e-5) - by_hand(0.4, -0.3 - 1e-5)) / 2e-5
    np.testing.assert_allclose(slopes["log_lengthscale"], expected, rtol=1e-6)


def test_draws_of_the_prior_have_the_expected_scale_of_the_hyper_parameters():
    """E f_n^2 = E s2 = exp(0.5^2 / 2), also for a kernel with features; labels come with them."""
    for kernel, size in ((KERNEL, 1.0), (Linear(prior_scale=1.0), X[:, 0] ** 2)):
        predictive = Predictive(kernel_model, num_samples=4000)
        found = predictive(jax.random.key(0), kernel, Softmax(), jnp.asarray(X, jnp.float32), 2)
        squares = np.asarray(found["f"]) ** 2
        error = squares.std(0) / np.sqrt(4000)
        assert (np.abs(squares.mean(0) - np.exp(0.125) * size) < 5 * error).all()
        assert found["y"].shape == (4000, 4) and set(np.unique(found["y"])) == {0, 1}


# NUTS against a grid


def grid_moments(log_evidence, axes):
    """First and second moments of the hyper-parameters from a grid."""
    places = np.meshgrid(*axes, indexing="ij")
    values = np.vectorize(log_evidence)(*places)
    mass = np.exp(values - logsumexp(values))
    edges = [np.take(mass, side, axis).sum() for axis in range(mass.ndim) for side in (0, -1)]
    assert max(edges) < 1e-3  # the grid holds the posterior
    return np.array([[np.sum(mass * place**power) for power in (1, 2)] for place in places])


def check_against_grid(model, log_evidence, axes, names, samples=1500):
    mcmc = nuts_of(model, num_warmup=500, num_samples=samples)
    mcmc.run(jax.random.key(0))
    expected = grid_moments(log_evidence, axes)
    draws = mcmc.get_samples(group_by_chain=True)
    table = diagnostics.summary_table(diagnostics.samples_to_arviz(mcmc), tuple(names))
    assert table["r_hat"].max() < 1.02 and table["ess_bulk"].min() > 400
    np.testing.assert_allclose(table["mean"], [np.mean(draws[name]) for name in names], rtol=1e-5)
    for name, moments in zip(names, expected, strict=True):
        for power, moment in enumerate(moments, 1):
            values = np.asarray(draws[name]) ** power
            error = values.std() / np.sqrt(effective_sample_size(values))
            assert abs(values.mean() - moment) < 4 * error, (name, power)


SCALES, LENGTHS = np.linspace(-2.6, 2.6, 40), np.linspace(-4.5, 4.5, 60)
HYPER = ("log_scale", "log_lengthscale")


def normal_evidence(log_scale, log_lengthscale):
    spread = covariance(log_scale, log_lengthscale) + 0.1 * np.eye(4)
    return log_prior(log_scale, log_lengthscale) + scipy.stats.multivariate_normal(cov=spread).logpdf(Y)


@pytest.mark.slow
@pytest.mark.parametrize("collapsed", [True, False])
@double
def test_nuts_finds_the_grid_posterior_of_regression(collapsed):
    x, y = jnp.asarray(X), jnp.asarray(Y)
    whole = partial(kernel_model, KERNEL, NOISE, x, 1, y)
    model = partial(evidence_model, KERNEL, NOISE, x, y) if collapsed else whole
    check_against_grid(model, normal_evidence, (SCALES, LENGTHS), HYPER)


@pytest.mark.slow
@double
def test_nuts_finds_the_grid_posterior_of_the_student_t_process():
    def log_evidence(log_scale, log_lengthscale, log_excess):
        dof, spread = 2 + np.exp(log_excess), covariance(log_scale, log_lengthscale) + 0.1 * np.eye(4)
        student = scipy.stats.multivariate_t(np.zeros(4), spread * (dof - 2) / dof, dof).logpdf(4 * Y)
        prior = log_prior(log_scale, log_lengthscale) + scipy.stats.norm(np.log(3.0), 1.0).logpdf(log_excess)
        return prior + student

    axes = (SCALES[::2], LENGTHS[::2], np.linspace(-3.5, 5.5, 20))
    model = partial(student_t_process_model, KERNEL, NOISE, jnp.asarray(X), jnp.asarray(4 * Y))
    check_against_grid(model, log_evidence, axes, (*HYPER, "log_excess"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "student-t"])
@double
def test_nuts_finds_the_grid_posterior_where_latents_have_no_closed_form(kind):
    """Two points: p(y | hyper) is an integral over two numbers: of the difference of logits, or of f."""
    nodes = np.linspace(-8, 8, 61)
    mass = scipy.stats.norm.pdf(nodes)
    weights = np.outer(mass, mass) / mass.sum() ** 2
    first, second = np.meshgrid(nodes, nodes, indexing="ij")
    x, y = X[1:3], np.array([0, 1]) if kind == "softmax" else np.array([1.5, -1.0])

    def log_evidence(log_scale, log_lengthscale):
        root = np.linalg.cholesky(covariance(log_scale, log_lengthscale, x) + 1e-12 * np.eye(2))
        one, two = root[0, 0] * first, root[1, 0] * first + root[1, 1] * second
        if kind == "softmax":  # the difference of two logits has twice the variance
            density = expit(np.sqrt(2) * one) * expit(-np.sqrt(2) * two)
        else:
            noise = scipy.stats.t(4.0, scale=np.sqrt(0.1))
            density = noise.pdf(y[0] - one) * noise.pdf(y[1] - two)
        return log_prior(log_scale, log_lengthscale) + np.log(np.sum(weights * density))

    likelihood = Softmax() if kind == "softmax" else StudentT(0.1, 4.0, learn_noise=False, learn_dof=False)
    labels = jnp.asarray(y, jnp.int32) if kind == "softmax" else jnp.asarray(y)
    classes = 2 if kind == "softmax" else 1
    model = partial(kernel_model, KERNEL, likelihood, jnp.asarray(x), classes, labels)
    check_against_grid(model, log_evidence, (SCALES, LENGTHS), HYPER)
