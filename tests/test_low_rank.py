"""A kernel of fewer features than points (G10): factors of size R, and every number as with factors of size N."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.inference.inner import cavi, cvi, exact, fit_to_tolerance, gibbs, settle
from fewshot.models.gaussian import DiagonalPosterior, GaussianPrior, LowRankPosterior, Query, Sites
from fewshot.models.kernels import Cosine, Linear
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, Softmax
from fewshot.models.process import LatentProcess

CLASSES, POINTS, FEATURES, QUERIES = 3, 12, 4, 5
HYPER = {"log_scale": 1.2, "mean": -0.4}


def problem(seed=0, kernel=None, points=POINTS):
    """The same prior and query with and without their root, and labels."""
    rng = np.random.default_rng(seed)
    x, new = jnp.asarray(rng.normal(size=(points, FEATURES))), jnp.asarray(rng.normal(size=(QUERIES, FEATURES)))
    process = LatentProcess(kernel or Linear(), HYPER)
    prior, query = process.prior(x, CLASSES), process.query(x, new, CLASSES)
    return prior, query, prior._replace(root=None), query._replace(root=None), jnp.asarray(rng.integers(0, 3, points))


def some_sites(seed=0, largest=2.0):
    rng = np.random.default_rng(seed)
    precision = 10 ** rng.uniform(-3, largest, size=(CLASSES, POINTS))
    precision[0, :2] = 0.0
    return Sites(jnp.asarray(rng.normal(size=(CLASSES, POINTS))), jnp.asarray(precision))


@pytest.mark.long
@double
@pytest.mark.parametrize("kernel", [Linear(), Cosine()])
def test_every_number_is_that_of_factors_of_size_n(kernel):
    prior, query, plain, plain_query, _ = problem(1, kernel)
    sites = some_sites()
    short, full = prior.given(sites), plain.given(sites)
    assert isinstance(short, LowRankPosterior) and isinstance(full, DiagonalPosterior)
    assert short.weights.inverse.shape == (CLASSES, FEATURES, FEATURES)
    for name in ("mean", "variance", "kl", "log_determinant"):
        np.testing.assert_allclose(getattr(short, name), getattr(full, name), rtol=1e-9, err_msg=name)
    np.testing.assert_allclose(short.alpha, full.alpha, rtol=1e-9, atol=1e-10)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *(short.predict(query), full.predict(plain_query))
    )
    np.testing.assert_allclose(short.covariance(prior), full.covariance(plain), rtol=1e-8, atol=1e-11)
    np.testing.assert_allclose(prior.log_normaliser(sites), plain.log_normaliser(sites), rtol=1e-10)
    np.testing.assert_allclose(sites.deviation(prior), sites.deviation(plain), rtol=1e-9, atol=1e-12)


@double
def test_derivatives_are_those_of_factors_of_size_n():
    """Of the bound's KL, of log Z and of a prediction, in features, scale, mean and sites."""
    rng = np.random.default_rng(2)
    x, new, sites = rng.normal(size=(POINTS, FEATURES)), rng.normal(size=(QUERIES, FEATURES)), some_sites(2, 1.0)
    # Factors of size N take the square root of a precision, with derivative 0 at 0.
    sites = sites._replace(precision=jnp.maximum(sites.precision, 1e-3))

    def value(x, hyper, sites, short):
        process = LatentProcess(Linear(), hyper)
        prior, query = process.prior(x, CLASSES), process.query(x, jnp.asarray(new), CLASSES)
        prior = prior if short else prior._replace(root=None)
        q = prior.given(sites)
        predicted = q.predict(query)
        return q.kl + 0.3 * prior.log_normaliser(sites) + jnp.sum(jnp.sin(predicted.mean) + predicted.variance)

    slopes = jax.jit(jax.grad(value, argnums=(0, 1, 2)), static_argnums=3)
    hyper = {name: jnp.asarray(one) for name, one in HYPER.items()}
    found, expected = (slopes(jnp.asarray(x), hyper, sites, short) for short in (True, False))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), found, expected)


@pytest.mark.long
@double
@pytest.mark.parametrize(
    "inference",
    [
        cvi(Softmax()),
        cvi(LogisticSoftmax()),
        cavi(LogisticSoftmax()),
        exact(LabelRegression()),
    ],
    ids=["cvi", "cvi, projected", "cavi", "exact"],
)
def test_inferences_end_where_they_end_with_factors_of_size_n(inference):
    prior, query, plain, plain_query, y = problem(3)

    def predicted(prior, query):
        state, info, _ = fit_to_tolerance(jax.random.key(0), inference, prior, y, tolerance=1e-7, max_steps=200)
        return inference.posterior(state, prior).predict(query), info.elbo

    found, expected = jax.jit(predicted)(prior, query), jax.jit(predicted)(plain, plain_query)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.slow
@double
def test_draws_have_the_moments_of_the_posterior():
    prior, _, plain, _, y = problem(4)
    sites = some_sites(4)
    full = plain.given(sites)
    f = np.asarray(prior.given(sites).draws(jax.random.key(0), prior, 40_000))[0]
    error = np.sqrt(np.asarray(full.variance) / len(f))
    assert (np.abs(f.mean(0) - np.asarray(full.mean)) < 5 * error + 1e-9).all()
    spread = np.einsum("dcn,dcm->cnm", f - f.mean(0), f - f.mean(0)) / len(f)
    scale = np.sqrt(np.asarray(full.variance))
    assert (np.abs(spread - full.covariance(plain)) < 5 * 1.5 * scale[:, :, None] * scale[:, None] / 200 + 1e-9).all()
    # A sweep of Gibbs draws by the same factors.
    state, _ = settle(jax.random.key(1), gibbs(LogisticSoftmax(), chains=2), prior, y)
    assert np.isfinite(state.f).all()


def test_a_query_without_its_root_is_refused():
    prior, _, _, query, _ = problem(5)
    with pytest.raises(ValueError, match="expected a query with its root"):
        prior.given(some_sites()).predict(query)


def test_few_points_keep_factors_of_size_n():
    prior, *_ = problem(6, points=FEATURES)
    assert prior.root is not None and prior.features is None
    assert isinstance(prior.given(Sites.zero(prior)), DiagonalPosterior)
    assert GaussianPrior(prior.mean, prior.covariance).features is None and isinstance(
        Query(*[prior.mean[:1]] * 3), Query
    )


@pytest.mark.long
def test_single_precision_keeps_digits_that_factors_of_size_n_lose():
    """At an output scale and precisions of 1,000 W K is 1e6: the other factors have no digit of the mean right."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(85, 64)) + 0.5
    root = 1000**0.5 * x / np.linalg.norm(x, axis=1, keepdims=True)
    shift, precision = rng.normal(size=(CLASSES, 85)), 1000 * rng.uniform(0.05, 1, size=(CLASSES, 85))

    def mean(dtype, short):
        prior = GaussianPrior(jnp.zeros((CLASSES, 85), dtype), jnp.asarray(root @ root.T, dtype))
        prior = prior._replace(root=jnp.asarray(root, dtype)) if short else prior
        return np.asarray(prior.given(Sites(jnp.asarray(shift, dtype), jnp.asarray(precision, dtype))).mean)

    with jax.enable_x64(True):
        exact = mean(jnp.float64, short=False)
    short, full = (np.abs(mean(jnp.float32, one) - exact).max() / np.abs(exact).max() for one in (True, False))
    assert short < 1e-4 < full
