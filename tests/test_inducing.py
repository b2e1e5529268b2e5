"""Titsias' bound and FITC against dense algebra, and against the exact process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.models import inducing, regression
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.kernels import RBF, Linear, Matern52

LEVEL = 0.3
KERNELS = [RBF(), Matern52()]


def problem(seed, points=30, inducing_points=7, queries=6, size=2):
    rng = np.random.default_rng(seed)
    x, z, new = (jnp.asarray(rng.normal(size=(n, size))) for n in (points, inducing_points, queries))
    y = jnp.asarray(np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=points))
    hyper = {"log_scale": rng.normal(0, 0.3), "log_lengthscale": rng.normal(-0.5, 0.2)}
    return hyper, x, y, z, new, float(rng.uniform(0.05, 0.3))


def seen_through(kernel, hyper, x, z, **options):
    return inducing.view(kernel, hyper, x, z, inducing.whitening(kernel, hyper, z, **options), LEVEL)


def dense_log_density(residual, covariance):
    residual, covariance = np.asarray(residual), np.asarray(covariance)
    return -0.5 * (residual @ np.linalg.solve(covariance, residual) + np.linalg.slogdet(2 * np.pi * covariance)[1])


def nystrom(kernel, hyper, x, z, new):
    """K_xz K_zz^-1 K_z* by a plain solve."""
    gram = kernel.gram
    return np.asarray(gram(hyper, x, z)) @ np.linalg.solve(gram(hyper, z, z), np.asarray(gram(hyper, z, new)))


@pytest.mark.long
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@double
def test_both_are_their_dense_formulas(kernel):
    hyper, x, y, z, _, noise = problem(0)
    seen = seen_through(kernel, hyper, x, z)
    explained = nystrom(kernel, hyper, x, z, x)
    rest = np.asarray(kernel.diagonal(hyper, x)) - np.diag(explained)
    np.testing.assert_allclose(seen.rest, rest, atol=1e-9)
    bound = dense_log_density(y - LEVEL, explained + noise * np.eye(len(y))) - rest.sum() / (2 * noise)
    np.testing.assert_allclose(inducing.titsias_bound(seen, y, noise), bound, rtol=1e-9)
    fitc = dense_log_density(y - LEVEL, explained + np.diag(rest + noise))
    np.testing.assert_allclose(inducing.fitc_evidence(seen, y, noise), fitc, rtol=1e-9)
    unequal = jnp.linspace(0.1, 1.0, len(y))
    bound = dense_log_density(y - LEVEL, explained + np.diag(unequal)) - np.sum(rest / unequal) / 2
    np.testing.assert_allclose(inducing.titsias_bound(seen, y, unequal), bound, rtol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("fitc", [False, True])
@double
def test_predictions_are_those_of_dense_algebra(fitc):
    kernel = Matern52()
    hyper, x, y, z, new, noise = problem(1)
    whitener = inducing.whitening(kernel, hyper, z)
    seen, query = (inducing.view(kernel, hyper, inputs, z, whitener, LEVEL) for inputs in (x, new))
    found = (inducing.fitc_posterior if fitc else inducing.posterior)(seen, y, noise).predict(query)
    spread = noise + (np.asarray(seen.rest) if fitc else 0) * np.ones(len(y))
    covariance = nystrom(kernel, hyper, x, z, x) + np.diag(spread)
    cross = nystrom(kernel, hyper, new, z, x)
    np.testing.assert_allclose(found.mean, LEVEL + cross @ np.linalg.solve(covariance, y - LEVEL), atol=1e-9)
    variance = np.asarray(kernel.diagonal(hyper, new)) - np.sum(cross * np.linalg.solve(covariance, cross.T).T, axis=1)
    np.testing.assert_allclose(found.variance, variance, atol=1e-9)


@pytest.mark.long
@double
def test_inducing_points_at_the_inputs_give_the_exact_process():
    kernel = Matern52()
    hyper, x, y, _, new, noise = problem(2)
    exact = regression.regress(GaussianPrior(jnp.full((1, len(y)), LEVEL), kernel.gram(hyper, x, x)), y, noise)
    cross, variance = kernel.gram(hyper, new, x), kernel.diagonal(hyper, new)
    expected = regression.predict(exact.posterior, Query(jnp.full((1, len(new)), LEVEL), cross, variance))
    whitener = inducing.whitening(kernel, hyper, x)
    seen, query = (inducing.view(kernel, hyper, inputs, x, whitener, LEVEL) for inputs in (x, new))
    for evidence, posterior in (
        (inducing.titsias_bound, inducing.posterior),
        (inducing.fitc_evidence, inducing.fitc_posterior),
    ):
        np.testing.assert_allclose(evidence(seen, y, noise), exact.log_evidence, rtol=1e-8)
        found = posterior(seen, y, noise).predict(query)
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-8)
        np.testing.assert_allclose(found.variance, expected.variance, atol=1e-8)


@pytest.mark.parametrize("inducing_noise", [0.0, 0.1])
@double
def test_added_points_never_loosen_the_bound_and_none_exceeds_the_evidence(inducing_noise):
    kernel, points = RBF(), 9

    @jax.jit
    def bounds(hyper, x, y, z, noise):
        def bound(count):
            return inducing.titsias_bound(seen_through(kernel, hyper, x, z[:count], **options), y, noise)

        options = {"inducing_noise": inducing_noise}
        prior = GaussianPrior(jnp.full((1, len(y)), LEVEL), kernel.gram(hyper, x, x))
        return jnp.stack([*map(bound, range(1, points + 1)), regression.regress(prior, y, noise).log_evidence])

    for seed in range(40):
        hyper, x, y, z, _, noise = problem(seed, inducing_points=points)
        rises = np.diff(bounds(hyper, x, y, z, noise))
        assert rises.min() > -1e-7 and rises.max() > 1e-3


@double
def test_inducing_noise_is_noise_on_the_inducing_variables():
    kernel, noise = RBF(), 0.05
    hyper, x, _, z, _, _ = problem(3)
    seen = seen_through(kernel, hyper, x, z, inducing_noise=noise)
    noisy = np.asarray(kernel.gram(hyper, z, z)) + noise * np.eye(len(z))
    cross = np.asarray(kernel.gram(hyper, x, z))
    np.testing.assert_allclose(seen.features @ seen.features.T, cross @ np.linalg.solve(noisy, cross.T), atol=1e-10)


@pytest.mark.parametrize("evidence", [inducing.titsias_bound, inducing.fitc_evidence])
@double
def test_gradients_for_points_kernel_and_noise_are_those_of_finite_differences(evidence):
    kernel = Matern52()
    hyper, x, y, z, _, noise = problem(4, points=12, inducing_points=4)

    @jax.jit
    def value(change):
        moved = {"log_scale": hyper["log_scale"] + change[0], "log_lengthscale": hyper["log_lengthscale"] + change[1]}
        seen = seen_through(kernel, moved, x, z + change[3:].reshape(z.shape))
        return evidence(seen, y, noise * jnp.exp(change[2]))

    zero, step = jnp.zeros(3 + z.size), 1e-5
    slopes = [(value(step * e) - value(-step * e)) / (2 * step) for e in jnp.eye(3 + z.size)]
    np.testing.assert_allclose(jax.jit(jax.grad(value))(zero), slopes, rtol=1e-6, atol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@double
def test_repeated_inducing_points_and_a_kernel_of_low_rank_need_no_jitter(dtype):
    hyper, x, y, z, _, noise = problem(5)
    repeated = jnp.concatenate([z, z[:3], z]).astype(dtype)
    hyper = {name: jnp.asarray(value, dtype) for name, value in hyper.items()}
    x, y = x.astype(dtype), y.astype(dtype)
    tolerance = 1e-3 if dtype == jnp.float32 else 1e-8
    for kernel in (RBF(), Linear()):
        once = inducing.titsias_bound(seen_through(kernel, hyper, x, z.astype(dtype)), y, noise)
        again = inducing.titsias_bound(seen_through(kernel, hyper, x, repeated), y, noise)
        np.testing.assert_allclose(again, once, rtol=tolerance)


def test_no_matrix_of_all_pairs_of_points_is_formed():
    kernel, points = RBF(), 311
    hyper, x, y, z, _, noise = problem(6, points=points)

    def everything(x, y, z):
        seen = seen_through(kernel, hyper, x, z)
        found = inducing.fitc_posterior(seen, y, noise).predict(seen)
        return inducing.titsias_bound(seen, y, noise), inducing.fitc_evidence(seen, y, noise), found

    program = str(jax.make_jaxpr(lambda *inputs: jax.vjp(everything, *inputs)[0])(x, y, z))
    assert f"[{points},{len(z)}]" in program and f"{points},{points}" not in program


@double
def test_the_kl_is_that_of_two_normals():
    rng = np.random.default_rng(7)
    half = rng.normal(size=(4, 4))
    found = inducing.weights_of(jnp.asarray(rng.normal(size=4)), jnp.asarray(half @ half.T))
    covariance = np.linalg.inv(np.eye(4) + half @ half.T)
    kl = 0.5 * (np.trace(covariance) + found.mean @ found.mean - 4 - np.linalg.slogdet(covariance)[1])
    np.testing.assert_allclose(found.kl(), kl, rtol=1e-12)


def test_chosen_inputs_are_rows_that_lie_apart():
    x = jnp.concatenate([jnp.zeros((5, 2)), jnp.array([[4.0, 0.0], [0.0, 3.0], [0.1, 0.0]])])
    chosen = {tuple(row) for row in np.asarray(inducing.chosen_inputs(x, 3)).tolist()}
    assert (4.0, 0.0) in chosen and (0.0, 3.0) in chosen and len(chosen) == 3
    with pytest.raises(ValueError, match="1 to 8 inducing points, got 9"):
        inducing.chosen_inputs(x, 9)
