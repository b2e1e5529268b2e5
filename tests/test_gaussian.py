"""G1-G8 against dense algebra with explicit inverses, textbook regression, quadrature, and singular kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from problems import double, hyper_of, relu_features
from scipy.stats import multivariate_normal

from fewshot.models import KERNELS
from fewshot.models.gaussian import GaussianPrior, Query, Sites, prior_root
from fewshot.models.process import LatentProcess

CLASSES, POINTS, QUERIES = 3, 7, 4


@jax.jit
def algebra(prior, sites, query):
    """All results of the module for one problem, compiled once for each shape and precision."""
    posterior = prior.given(sites)
    return posterior, posterior.predict(query), prior.given(sites).covariance(prior), prior.log_normaliser(sites)


def random_problem(seed, shared=True, silent=True, dtype=np.float64):
    """A well-conditioned K with its query, a non-zero mean, and sites of which some say nothing."""
    rng = np.random.default_rng(seed)
    leading = () if shared else (CLASSES,)
    square = rng.normal(size=(*leading, POINTS + QUERIES, POINTS + QUERIES))
    full = square @ square.swapaxes(-1, -2) / POINTS + 0.5 * np.eye(POINTS + QUERIES)
    mean, query_mean = rng.normal(size=(CLASSES, POINTS)), rng.normal(size=(CLASSES, QUERIES))
    shift, precision = rng.normal(size=(CLASSES, POINTS)), rng.gamma(1.0, size=(CLASSES, POINTS))
    if silent:
        shift[:, 2], precision[:, 2] = 0.0, 0.0
    gram = full[..., :POINTS, :POINTS]
    # A query has one cross-covariance for all classes; that of the first class serves where K differs by class.
    shared_full = full if shared else full[0]
    query = Query(query_mean, shared_full[POINTS:, :POINTS], np.diagonal(shared_full)[POINTS:].copy())
    convert = partial(jax.tree.map, partial(np.asarray, dtype=dtype))
    return convert(GaussianPrior(mean, gram)), convert(Sites(shift, precision)), convert(query)


def dense_class(mean, gram, shift, precision):
    """Posterior mean and covariance, KL and log Z of one class, with explicit inverses."""
    inverse, weight = np.linalg.inv(gram), np.diag(precision)
    posterior_precision = inverse + weight
    sigma = np.linalg.inv(posterior_precision)
    centre = sigma @ (inverse @ mean + shift)
    log_ratio = np.linalg.slogdet(gram)[1] - np.linalg.slogdet(sigma)[1]
    deviation = centre - mean
    kl = 0.5 * (np.trace(inverse @ sigma) + deviation @ inverse @ deviation - len(mean) + log_ratio)
    log_z = 0.5 * (centre @ posterior_precision @ centre - mean @ inverse @ mean - log_ratio)
    return centre, sigma, kl, log_z


def dense(prior, sites):
    grams = np.broadcast_to(prior.covariance, (CLASSES, POINTS, POINTS))
    results = [dense_class(*parts) for parts in zip(prior.mean, grams, *sites, strict=True)]
    means, sigmas, kls, log_zs = zip(*results, strict=True)
    return np.stack(means), np.stack(sigmas), sum(kls), sum(log_zs)


def check_against_dense(prior, sites, query, tolerance):
    exact_prior, exact_sites, exact_query = jax.tree.map(np.float64, (prior, sites, query))
    posterior, predicted, sigma, log_z = algebra(prior, sites, query)
    means, sigmas, kl, exact_log_z = dense(exact_prior, exact_sites)
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(posterior.mean, means)
    close(posterior.variance, np.diagonal(sigmas, axis1=1, axis2=2))
    close(posterior.marginals.variance, posterior.variance)
    close(sigma, sigmas)
    close(posterior.kl, kl)
    close(log_z, exact_log_z)
    deviation = means - exact_prior.mean
    inverses = np.linalg.inv(np.broadcast_to(exact_prior.covariance, sigmas.shape))
    alpha = np.einsum("cij,cj->ci", inverses, deviation)
    close(posterior.alpha, alpha)  # (G4)
    close(predicted.mean, exact_query.mean + alpha @ exact_query.cross.T)
    inner = inverses - inverses @ sigmas @ inverses
    explained = np.einsum("qi,cij,qj->cq", exact_query.cross, inner, exact_query.cross)
    close(predicted.variance, exact_query.variance - explained)  # (G7)


@double
@pytest.mark.parametrize("shared", [True, False], ids=["one K", "K by class"])
@pytest.mark.parametrize("silent", [True, False])
def test_posterior_evidence_and_prediction_equal_dense_algebra(shared, silent):
    check_against_dense(*random_problem(0, shared, silent), tolerance=1e-11)


@pytest.mark.parametrize("shared", [True, False], ids=["one K", "K by class"])
def test_dense_algebra_in_single_precision(shared):
    problem = random_problem(1, shared, dtype=np.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(algebra(*problem))} == {jnp.dtype("float32")}
    check_against_dense(*problem, tolerance=2e-5)


@double
def test_gaussian_sites_give_textbook_regression_with_a_nonzero_mean():
    prior, sites, query = random_problem(2)
    noise, target = 0.37, np.random.default_rng(3).normal(size=(CLASSES, POINTS))
    sites = Sites(target / noise, np.full_like(target, 1 / noise))
    posterior, predicted, sigma, log_z = algebra(prior, sites, query)
    noisy = prior.covariance + noise * np.eye(POINTS)
    gain = np.linalg.solve(noisy, query.cross.T).T
    np.testing.assert_allclose(predicted.mean, query.mean + (target - prior.mean) @ gain.T, rtol=1e-11)
    variance = query.variance - np.sum(gain * query.cross, axis=1)
    np.testing.assert_allclose(predicted.variance, np.broadcast_to(variance, predicted.variance.shape), rtol=1e-11)
    smoother = np.linalg.solve(noisy, prior.covariance).T
    np.testing.assert_allclose(posterior.mean, prior.mean + (target - prior.mean) @ smoother.T, rtol=1e-11)
    np.testing.assert_allclose(sigma[1], prior.covariance - smoother @ prior.covariance, atol=1e-12)
    # t(f) is the likelihood up to the part of its density that does not depend on f.
    constant = -0.5 * np.sum(np.log(2 * np.pi * noise) + target**2 / noise)
    evidence = sum(multivariate_normal(m, noisy).logpdf(t) for m, t in zip(prior.mean, target, strict=True))
    np.testing.assert_allclose(log_z + constant, evidence, rtol=1e-12)


def grid_integrals(mean, gram, shift, precision, half_width=9.0, count=241):
    """log Z, KL, posterior mean and variances of 1 or 2 points by the trapezoidal rule, densities written out."""
    size = len(mean)
    centre, sigma, _, _ = dense_class(mean, gram, shift, precision)  # only to place the grid
    steps = np.linspace(-half_width, half_width, count)
    axes = [c + np.sqrt(s) * steps for c, s in zip(centre, np.diag(sigma), strict=True)]
    f = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, size)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    log_prior = multivariate_normal(mean, gram).logpdf(f)
    log_joint = log_prior + f @ shift - 0.5 * f**2 @ precision
    z = cell * np.exp(log_joint).sum()
    q = cell * np.exp(log_joint) / z
    kl = np.sum(q * (log_joint - np.log(z) - log_prior))
    first = q @ f
    return np.log(z), kl, first, q @ (f - first) ** 2


@double
@pytest.mark.parametrize("size", [1, 2])
def test_kl_and_log_normaliser_equal_quadrature(size):
    rng = np.random.default_rng(size)
    gram = np.array([[2.0, 1.1], [1.1, 1.5]])[:size, :size]
    mean, shift, precision = rng.normal(size=(1, size)), rng.normal(size=(1, size)), rng.gamma(1.0, size=(1, size))
    log_z, kl, centre, variance = grid_integrals(mean[0], gram, shift[0], precision[0])
    query = Query(mean[:, :1], gram[:1], gram[0, :1])
    posterior, _, _, value = algebra(GaussianPrior(mean, gram), Sites(shift, precision), query)
    np.testing.assert_allclose(value, log_z, atol=1e-11)
    np.testing.assert_allclose(posterior.kl, kl, atol=1e-11)
    np.testing.assert_allclose(posterior.mean[0], centre, atol=1e-11)
    np.testing.assert_allclose(posterior.variance[0], variance, atol=1e-11)


@double
@pytest.mark.parametrize("shared", [True, False], ids=["one K", "K by class"])
def test_bound_equals_evidence_plus_likelihood_less_sites(shared):
    """-KL = log Z - E log t, so that ELBO = log Z + sum_n (E log p - E log t) for any likelihood (E2)."""
    prior, sites, query = random_problem(4, shared)
    posterior, _, _, log_z = algebra(prior, sites, query)
    second = posterior.mean**2 + posterior.variance
    expected_log_sites = np.sum(sites.shift * posterior.mean - 0.5 * sites.precision * second)
    np.testing.assert_allclose(-posterior.kl, log_z - expected_log_sites, rtol=1e-12)


@double
def test_zero_sites_give_back_the_prior():
    prior, _, query = random_problem(5)
    posterior, predicted, _, log_z = algebra(prior, Sites.zero(prior), query)
    np.testing.assert_array_equal(posterior.mean, prior.mean)
    np.testing.assert_allclose(posterior.variance, prior.marginals().variance)
    assert posterior.kl == 0 and log_z == 0
    np.testing.assert_array_equal(predicted.mean, query.mean)
    np.testing.assert_allclose(predicted.variance, np.broadcast_to(query.variance, predicted.variance.shape))


@double
def test_far_from_the_data_the_mean_goes_back_to_that_of_the_prior():
    prior, sites, query = random_problem(6)
    far = query._replace(cross=np.zeros_like(query.cross))
    _, predicted, _, _ = algebra(prior, sites, far)
    np.testing.assert_array_equal(predicted.mean, query.mean)
    np.testing.assert_array_equal(predicted.variance, np.broadcast_to(query.variance, predicted.variance.shape))


@double
def test_masked_points_change_nothing():
    prior, sites, query = random_problem(7, silent=False)
    keep = np.array([0, 1, 3, 4, 6])
    small_prior = GaussianPrior(prior.mean[:, keep], prior.covariance[np.ix_(keep, keep)])
    small_sites = jax.tree.map(lambda leaf: leaf[:, keep], sites)
    small, predicted, _, log_z = algebra(small_prior, small_sites, query._replace(cross=query.cross[:, keep]))
    real = np.isin(np.arange(POINTS), keep)
    masked, padded, _, padded_log_z = algebra(prior, jax.tree.map(lambda leaf: np.where(real, leaf, 0), sites), query)
    np.testing.assert_allclose(masked.mean[:, keep], small.mean, rtol=1e-12)
    np.testing.assert_allclose(masked.kl, small.kl, rtol=1e-12)
    np.testing.assert_allclose(padded_log_z, log_z, rtol=1e-12)
    np.testing.assert_array_equal(masked.alpha[:, ~real], 0)
    for left, right in zip(padded, predicted, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-12)


@double
def test_derivatives_at_zero_precision_are_finite_and_right():
    """(G1) takes a square root of W: a point that says nothing must not turn that into an infinite slope."""
    prior, sites, _ = jax.tree.map(jnp.asarray, random_problem(8))
    slope = jax.jit(jax.grad(GaussianPrior.log_normaliser, argnums=1))(prior, Sites.zero(prior))
    np.testing.assert_allclose(slope.shift, prior.mean, rtol=1e-12)
    assert np.isfinite(slope.precision).all()
    by_gram = jax.jit(jax.grad(lambda inner, factors: inner.given(factors).kl))(prior, sites).covariance
    assert np.isfinite(by_gram).all()
    np.testing.assert_array_equal(by_gram[2], 0.0)  # the point whose site says nothing


# Singular kernels in float32, error relative to the largest entry. Observed: 2e-5, 2e-5, 2e-6, 1e-6, 2e-6, 1e-3, 2e-7.
SINGULAR = {
    "mean": 1e-4,
    "alpha": 1e-4,
    "variance": 2e-5,
    "kl": 1e-5,
    "log_z": 1e-5,
    "query mean": 5e-3,
    "query variance": 2e-6,
}


def singular_problem(seed, scale, kernel="cosine", points=85, features=64, duplicates=10, dtype=np.float32):
    """More points than features, some of them the same image twice, with sites as a softmax would set them."""
    rng = np.random.default_rng(seed)
    labels = np.arange(points) % 5
    x = relu_features(rng, labels, features).astype(np.float32)
    x[-duplicates:] = x[:duplicates]
    chosen = KERNELS[kernel]()
    prior = LatentProcess(chosen, hyper_of(chosen, log_scale=np.log(scale))).prior(jnp.asarray(x, dtype), 5)
    precision = rng.uniform(0, 0.25, size=(5, points)).astype(np.float32)
    precision[:, ::7] = 0.0
    precision[:, 1] = 1e-12  # saturated
    shift = (rng.normal(size=(5, points)) * np.sqrt(precision)).astype(np.float32)
    cross = prior.covariance[:QUERIES] * 0.5
    query = Query(jnp.zeros((5, QUERIES)), cross, jnp.full(QUERIES, scale))
    return jax.device_get((prior._replace(root=None), Sites(shift, precision), query))


def named_results(problem):
    posterior, predicted, _, log_z = jax.device_get(algebra(*problem))
    names = ("mean", "alpha", "variance", "kl")
    results = {name: getattr(posterior, name) for name in names}
    return results | {"log_z": log_z, "query mean": predicted.mean, "query variance": predicted.variance}


@pytest.mark.long
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("kernel", ["cosine", "linear", "rbf"])
def test_singular_kernels_in_single_precision(kernel, scale):
    problem = singular_problem(9, scale, kernel)
    single = named_results(problem)
    with jax.enable_x64(True):
        exact = named_results(jax.tree.map(np.float64, problem))
    assert all(np.isfinite(value).all() and value.dtype == np.float32 for value in single.values())
    errors = {name: np.abs(single[name] - exact[name]).max() / np.abs(exact[name]).max() for name in SINGULAR}
    assert all(errors[name] < SINGULAR[name] for name in SINGULAR), errors
    assert (single["variance"] >= 0).all() and (single["query variance"] >= 0).all()


# W K >> 1, float32, error relative to the largest entry. Observed at most: 4e-6, 9e-5, 1e-7, 6e-7, 3e-6, 1e-4, 4e-6.
PRECISE = {
    "mean": 2e-5,
    "alpha": 5e-4,
    "kl": 1e-6,
    "log_z": 5e-6,
    "deviation": 2e-5,
    "slope in K": 5e-4,
    "query mean": 2e-5,
}


def precise_problem(scale, precision, dtype=np.float32):
    """Sites of every precision up to some times the given, none among them, that agree with one draw of f."""
    prior, sites, query = singular_problem(10, scale, "rbf", dtype=dtype)
    rng = np.random.default_rng(11)
    f = np.linalg.cholesky(prior.covariance + 1e-4 * scale * np.eye(85)) @ rng.normal(size=(85, 5))
    size = precision * rng.gamma(0.3, size=(5, 85)) * (sites.precision > 0)
    shift = size * f.T + np.sqrt(size) * rng.normal(size=(5, 85))
    return jax.tree.map(dtype, (prior, Sites(shift, size), query))


def precise_results(problem):
    prior, sites, _ = problem
    results = named_results(problem)
    slope = jax.jit(jax.grad(GaussianPrior.log_normaliser))(prior, sites)
    results |= {"deviation": jax.jit(Sites.deviation)(sites, prior), "slope in K": slope.covariance}
    return jax.device_get({name: results[name] for name in PRECISE} | {"slope in mean": slope.mean})


@pytest.mark.parametrize(("scale", "precision"), [(1.0, 1e3), (30.0, 10.0), (30.0, 100.0), (1e3, 0.25)])
def test_precise_sites_in_single_precision(scale, precision):
    """Polya-Gamma draws and small noise make W K large: h - W m and V r = K r - ... lose all their digits there."""
    problem = precise_problem(scale, precision)
    single = precise_results(problem)
    with jax.enable_x64(True):
        exact = precise_results(jax.tree.map(np.float64, problem))
    np.testing.assert_array_equal(single.pop("slope in mean"), single["alpha"])  # d log Z / da = alpha
    errors = {name: np.abs(single[name] - exact[name]).max() / np.abs(exact[name]).max() for name in PRECISE}
    assert all(errors[name] < PRECISE[name] for name in PRECISE), errors


@pytest.mark.long
@double
@pytest.mark.parametrize("shared", [True, False], ids=["one K", "K by class"])
def test_derivatives_of_the_evidence_equal_differences(shared):
    """First and second, along every argument, at points whose sites are strong, weak and silent."""
    prior, sites, _ = random_problem(12, shared)
    precision = sites.precision * np.geomspace(1e-3, 1e3, POINTS)

    @jax.jit
    def evidence(covariance, mean, shift, log_factor):
        symmetric = 0.5 * (covariance + jnp.swapaxes(covariance, -1, -2))
        return GaussianPrior(mean, symmetric).log_normaliser(Sites(shift, precision * jnp.exp(log_factor)))

    point = prior.covariance, prior.mean, sites.shift, np.zeros_like(precision)
    check_grads(evidence, point, order=2, modes=("fwd", "rev"), rtol=1e-5)


def test_variances_that_cancel_in_single_precision_are_not_negative():
    """Precise observations with a K of rank 3: V is below the rounding of K."""
    features = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    gram, mean = 100 * features @ features.T, np.zeros((1, 40), np.float32)
    query = Query(mean, gram, np.diagonal(gram).copy())
    posterior, predicted, _, _ = algebra(GaussianPrior(mean, gram), Sites(mean, np.full_like(mean, 1e4)), query)
    for variance in (posterior.variance, predicted.variance):
        assert (variance >= 0).all() and (variance < 100 * 1e-5).all()


def test_the_singular_kernel_defeats_a_plain_cholesky():
    """Why (G1): the same matrix has no Cholesky factor in float32."""
    prior, _, _ = singular_problem(9, 1.0)
    assert np.isnan(jax.jit(jnp.linalg.cholesky)(prior.covariance)).any()


# (G8)
# More points than features (poly2 has 6 of 2 dimensions), then fewer.
ROOT_CASES = [(name, 9, 2) for name in KERNELS] + [("cosine", 5, 9), ("poly2", 5, 9)]


def moving_kernel(name, points, features, queries=3):
    """K, its root and k_* as functions of a number t that moves features and hyper-parameters.

    The first two points are one image twice, and stay so. The length-scale is short, so that the K of a stationary
    kernel is well conditioned otherwise.
    """
    rng = np.random.default_rng(13)
    kernel = KERNELS[name]()
    x, direction = rng.normal(size=(2, points + queries, features))
    x[1], direction[1] = x[0], direction[0]
    start = hyper_of(kernel, log_scale=1.0)
    if "log_lengthscale" in start:
        start["log_lengthscale"] = -1.5
    tilt = {hyper: float(rng.normal()) for hyper in start}

    def at(t):
        hyper = {key: value + t * tilt[key] for key, value in start.items()}
        moved = jnp.asarray(x) + t * jnp.asarray(direction)
        prior = LatentProcess(kernel, hyper).prior(moved[:points], CLASSES)
        return prior, kernel.gram(hyper, moved[points:], moved[:points])

    return at


def slope_by_differences(function, step=1e-3):
    """Fourth-order central difference at 0."""
    values = jax.vmap(function)(step * jnp.asarray([-2.0, -1.0, 1.0, 2.0]))
    return jax.tree.map(lambda v: (v[0] - 8 * v[1] + 8 * v[2] - v[3]) / (12 * step), values)


def root_and_slopes(at):
    """K and its root; the derivatives by autodiff and by differences of what follows from them.

    Eigenvectors are one choice of many, so only what a change of basis of u leaves alone is compared: S S^T,
    k_* P S^T, k_* P P^T k_*^T, and k_* P itself where S is the kernel's own features.
    """

    def invariants(t):
        prior, cross = at(t)
        root = prior_root(prior)
        basis = cross @ root.pseudo_inverse
        own = () if prior.root is None else (basis,)
        return root.factor @ root.factor.T, basis @ root.factor.T, basis @ basis.T, *own

    slopes = jax.jvp(invariants, (0.0,), (1.0,))[1]
    gram_slope = jax.jvp(lambda t: at(t)[0].covariance, (0.0,), (1.0,))[1]
    prior = at(0.0)[0]
    return prior.covariance, prior_root(prior), slopes, (gram_slope, *slope_by_differences(invariants)[1:])


@double
@pytest.mark.parametrize("name, points, features", ROOT_CASES)
def test_roots_of_all_kernels_and_their_first_derivatives(name, points, features):
    at = moving_kernel(name, points, features)
    gram, root, slopes, expected = jax.device_get(jax.jit(lambda: root_and_slopes(at))())
    assert not root.indefinite
    np.testing.assert_allclose(root.factor @ root.factor.T, gram, atol=1e-12 * gram.max())
    # E[u | f] for u ~ N(0, I), f = a + S u is S^+ (f - a).
    np.testing.assert_allclose(root.pseudo_inverse.T, np.linalg.pinv(root.factor, rcond=1e-7), atol=1e-9)
    np.testing.assert_allclose(slopes[0], expected[0], atol=1e-10 * np.abs(expected[0]).max())
    for slope, reference in zip(slopes[1:], expected[1:], strict=True):
        np.testing.assert_allclose(slope, reference, atol=1e-7 * max(1, np.abs(reference).max()))


@double
def test_a_root_of_an_indefinite_matrix_is_flagged_and_a_singular_one_is_not():
    rooted = jax.jit(lambda gram: prior_root(GaussianPrior(jnp.zeros((CLASSES, 6)), gram)))
    assert rooted(np.diag([3.0, 2.0, 1.0, 1.0, 1.0, -1e-6])).indefinite
    assert not rooted(np.ones((6, 6))).indefinite
    zero = rooted(np.zeros((6, 6)))
    assert not zero.indefinite
    assert np.all(zero.factor == 0) and np.all(zero.pseudo_inverse == 0)


def test_a_root_of_a_singular_kernel_in_single_precision():
    with jax.enable_x64(True):
        prior, _, _ = singular_problem(12, 30.0, dtype=np.float64)
    prior = jax.tree.map(np.float32, prior)  # rounded once, however the kernel is compiled
    root = jax.device_get(jax.jit(prior_root)(prior))
    assert not root.indefinite
    np.testing.assert_allclose(root.factor @ root.factor.T, prior.covariance, atol=30 * 2e-6)
    assert np.abs(root.pseudo_inverse).max() < 1e3  # directions of rounding are left out, not inverted


def test_a_root_needs_one_kernel_matrix():
    with pytest.raises(ValueError, match="shared by the classes"):
        prior_root(GaussianPrior(jnp.zeros((2, 3)), jnp.zeros((2, 3, 3))))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="these are the processor's library calls; run it on one")
def test_a_posterior_and_its_gradient_take_one_factorisation_and_one_triangular_solve():
    """Two large batches of triangular solves side by side can hang: jaxlib 0.10.2 on CPU."""
    prior, sites = GaussianPrior(jnp.zeros((2, 40)), jnp.eye(40)), Sites(jnp.ones((2, 40)), jnp.ones((2, 40)))
    query = Query(jnp.zeros((2, 3)), jnp.ones((3, 40)), jnp.ones(3))

    def value(covariance):
        posterior = prior._replace(covariance=covariance).given(sites)
        return posterior.kl + jnp.sum(posterior.variance) + jnp.sum(posterior.predict(query).variance)

    program = jax.jit(jax.grad(value)).lower(prior.covariance).compile().as_text()
    assert program.count('custom_call_target="lapack_spotrf_ffi"') == 1
    assert program.count('custom_call_target="lapack_strsm_ffi"') == 1
