"""PG(b, z): moments and divergence against sums over its gamma variables, the density and the draws against the series.

The oracle is the alternating series of the distribution function (and of its derivative) in float64, in NumPy. With
c = z/2 and T_m the first passage of a Brownian motion with drift c through m = 2n + b,

    P(4 w <= x) = (1 + e^(-2c))^b sum_n (-1)^n C(n + b - 1, n) e^(-2cn) P(T_m <= x).
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from jax.sharding import AxisType, PartitionSpec
from numpyro import handlers
from problems import double
from scipy.special import log_ndtr, ndtr
from scipy.stats import kstwobign, norm

from fewshot.models import polya_gamma, polya_gamma_draws, rejection
from fewshot.models.polya_gamma import (
    EXACT_UP_TO,
    PolyaGamma,
    log_cosh_half,
    polya_gamma_kl,
    polya_gamma_log_prob,
    polya_gamma_mean,
    polya_gamma_variance,
    sample_polya_gamma,
    sample_polya_gamma_one,
)

TILTS = (0.0, 0.1, 1.0, 5.0, 20.0, 50.0)
FAMILY = 1e-4  # probability that a right sampler fails any check of one test


# The oracle


def series_weights(b, c, terms=120):
    """(1 + e^(-2c))^b (-1)^n C(n + b - 1, n) e^(-2cn) and m = 2n + b, each [terms, 1]."""
    n = np.arange(terms)[:, None]
    steps = -np.exp(-2 * c) * (n[1:] + b - 1) / n[1:]
    return (1 + np.exp(-2 * c)) ** b * np.cumprod(np.vstack([[[1.0]], steps]), axis=0), 2 * n + b


def series_cdf(w, b, z):
    """P(PG(b, z) <= w) for w [G] > 0."""
    x, c = 4 * np.asarray(w, float)[None], abs(z) / 2
    weights, m = series_weights(b, c)
    passed = ndtr((c * x - m) / np.sqrt(x)) + np.exp(2 * c * m + log_ndtr(-(c * x + m) / np.sqrt(x)))
    return np.sum(weights * passed, axis=0)


def series_density(w, b, z):
    """Density of PG(b, z) at w [G] > 0."""
    x, c = 4 * np.asarray(w, float)[None], abs(z) / 2
    weights, m = series_weights(b, c)
    return 4 * np.sum(weights * m / np.sqrt(2 * np.pi * x**3) * np.exp(-((c * x - m) ** 2) / (2 * x)), axis=0)


def rates(z, count=200_000):
    """1 / (2 pi^2 ((k - 1/2)^2 + z^2/(4 pi^2))), k = 1..count: the scales of the gamma variables."""
    return 0.5 / ((np.pi * (np.arange(count) + 0.5)) ** 2 + z * z / 4)


def cumulant(b, z, n):
    """(n - 1)! b sum_k rates^n; the terms that are left out add an integral."""
    count = 200_000
    tail = count ** (1.0 - 2 * n) / (2 * n - 1) / (2 * np.pi**2) ** n
    return [1, 1, 2, 6][n - 1] * b * (np.sum(rates(z, count) ** n) + tail)


def log_laplace(t, b, z):
    """log E exp(-t w)."""
    low, high = abs(z) / 2, np.sqrt(z * z / 4 + t / 2)
    return b * (low - high + np.log1p(np.exp(-2 * low)) - np.log1p(np.exp(-2 * high)))


def grid_of(b, z, count=400):
    """Points that hold all but a negligible part of PG(b, z)."""
    mean, deviation = cumulant(b, z, 1), np.sqrt(cumulant(b, z, 2))
    return np.linspace(max(mean - 7 * deviation, mean / 30), mean + 8 * deviation, count)


@pytest.mark.parametrize("b, z", [(0.5, 0.0), (1, 0.0), (1, 5.0), (2, 1.0), (5, 50.0), (30, 0.0), (30, 5.0)])
def test_the_oracle_is_a_distribution(b, z):
    """Its density integrates to its distribution function, and gives the Laplace transform of the definition."""
    points, t = grid_of(b, z, 30), 1 / cumulant(b, z, 1)
    nodes, weights = np.polynomial.legendre.leggauss(20)
    low, width = points[:-1, None], np.diff(points)[:, None]
    w = low + width * (nodes + 1) / 2
    mass = series_density(w.reshape(-1), b, z).reshape(w.shape) * weights / 2 * width
    tolerance = 1e-10 if b < 10 else 5e-6  # where b is large, digits cancel in the upper tail
    np.testing.assert_allclose(mass.sum(1), np.diff(series_cdf(points, b, z)), atol=tolerance)
    outside = 5e-4 if b < 1 else 1e-6  # what the grid leaves out
    np.testing.assert_allclose(np.sum(mass * np.exp(-t * w)), np.exp(log_laplace(t, b, z)), atol=outside)


# Moments and divergence


@jax.jit
def formulas(b, z):
    """log cosh(z/2), mean, variance and divergence, one row each."""
    return jnp.stack([log_cosh_half(z), polya_gamma_mean(b, z), polya_gamma_variance(b, z), polya_gamma_kl(b, z)])


def test_formulas_in_single_precision_equal_sums():
    """Over the roots of cosh: log cosh x = sum_k log(1 + x^2 / roots_k)."""
    b, z = 3.0, np.array([0.0, 1e-3, -0.05, 0.1, 0.3, 1.0, 1.599, -1.601, 3.0, 10.0, 50.0], np.float32)
    count = 200_000
    roots = (np.pi * (np.arange(count) + 0.5)) ** 2
    for tilt, (log_cosh, mean, variance, divergence) in zip(z.astype(float), formulas(b, z).T, strict=True):
        ratio = tilt**2 / 4 / roots
        tail = tilt**2 / 4 / np.pi**2 / count
        np.testing.assert_allclose(log_cosh, np.sum(np.log1p(ratio)) + tail, rtol=1e-6)
        np.testing.assert_allclose(mean, cumulant(b, tilt, 1), rtol=1e-6)
        np.testing.assert_allclose(variance, cumulant(b, tilt, 2), rtol=2e-6)
        np.testing.assert_allclose(divergence, b * np.sum(np.log1p(ratio) - ratio / (1 + ratio)), rtol=3e-6)


@double
def test_formulas_meet_where_series_and_closed_form_meet():
    """Values and derivatives on both sides, in float64."""
    z = 2 * polya_gamma._NEAR * np.array([1 - 1e-15, 1 + 1e-15])
    for function in (formulas, jax.jit(jax.vmap(jax.jacfwd(formulas, 1), (None, 0), 1))):
        low, high = function(1.0, z).T
        np.testing.assert_allclose(low, high, rtol=1e-11)


@pytest.mark.parametrize("b, z", [(1, 0.5), (1, 5.0), (4, 1.0), (7, 20.0)])
def test_kl_is_the_integral_of_the_log_ratio(b, z):
    mean = cumulant(b, z, 1)
    points = np.linspace(mean / 60, mean + 30 * np.sqrt(cumulant(b, z, 2)), 20_001)
    ratio = b * (z / 2 + np.log1p(np.exp(-z)) - np.log(2)) - z * z * points / 2
    integral = np.trapezoid(series_density(points, b, z) * ratio, points)
    np.testing.assert_allclose(formulas(float(b), np.array([z], np.float32))[3], integral, rtol=2e-5)


def test_derivatives_at_zero_tilt():
    """The functions are even: first derivatives are 0 there; those of large |z| are finite."""

    @jax.jit
    def slopes(z):
        density = jax.vmap(jax.grad(lambda z: polya_gamma_log_prob(0.4, 2.0, z)))(z)
        return jnp.vstack([jax.vmap(jax.jacrev(formulas, 1), (None, 0), 1)(2.0, z), density])

    values = slopes(jnp.array([0.0, 50.0, -1e4]))
    np.testing.assert_allclose(values[:, 0], 0, atol=1e-10)
    assert np.all(np.isfinite(values))
    np.testing.assert_allclose(values[3, 1], 0.5, rtol=1e-5)  # KL ~ b |z| / 4


# Density


@pytest.mark.long
@pytest.mark.parametrize("b", [0.2, 0.5, 1, 1.5, 3, 8, 20])
def test_log_density_equals_the_series(b):
    """float32 and float64, from far below the mean to 6 standard deviations above."""
    for z in (*TILTS, -3.0):
        w = grid_of(b, z, 60)
        reference = np.log(np.maximum(series_density(w, b, z), 1e-300))
        likely = (reference > reference.max() - (15 if b < 10 else 8)) & (
            w < cumulant(b, z, 1) + 6 * np.sqrt(cumulant(b, z, 2))
        )
        single = w.astype(np.float32)
        rounded = np.log(series_density(single[likely].astype(float), float(np.float32(b)), float(np.float32(z))))
        # Observed: 1e-5.
        np.testing.assert_allclose(polya_gamma_log_prob(single, float(b), z)[likely], rounded, atol=3e-5)
        with jax.enable_x64(True):
            tolerance = 5e-6 if b > 8 else 1e-9  # the series loses digits when b is large
            np.testing.assert_allclose(polya_gamma_log_prob(w, float(b), z)[likely], reference[likely], atol=tolerance)


@pytest.mark.parametrize("b, tolerance", [(0.05, 2e-3), (1, 1e-5), (2.5, 1e-5), (40, 1e-4), (1e3, 3e-4), (1e5, 3e-3)])
def test_density_integrates_to_one_with_the_right_mean(b, tolerance):
    """In float32, by the trapezoidal rule in log w. At b = 1e5 w itself carries rounding of 1e-5 of a deviation."""
    for z in (0.0, 1.0, 50.0):
        mean, deviation = cumulant(b, z, 1), np.sqrt(cumulant(b, z, 2))
        reach = 12 * min(deviation / mean, 1.0)
        u = np.linspace(np.log(mean) - reach, np.log(mean) + min(reach, 5), 20_001)
        w = np.exp(u).astype(np.float32)
        density = np.exp(np.asarray(polya_gamma_log_prob(w, b, z), float)) * w
        np.testing.assert_allclose(np.trapezoid(density, u), 1, atol=tolerance)
        np.testing.assert_allclose(np.trapezoid(density * w, u), mean, rtol=tolerance)


@double
def test_gradients_of_the_log_density():
    """In w, b and z, against central differences of the series."""
    w, b, z, step = 0.7, 2.3, 1.4, 1e-5
    gradient = jax.grad(polya_gamma_log_prob, argnums=(0, 1, 2))(w, b, z)

    def reference(*shift):
        return np.log(series_density([w + shift[0]], b + shift[1], z + shift[2])[0])

    for value, direction in zip(gradient, np.eye(3) * step, strict=True):
        np.testing.assert_allclose(value, (reference(*direction) - reference(*-direction)) / (2 * step), rtol=1e-7)


def test_outside_the_support():
    w, b = np.array([0.0, -1.0, 0.0, 0.5, np.nan], np.float32), np.array([1, 1, 0, 0, 1], np.float32)
    np.testing.assert_array_equal(polya_gamma_log_prob(w, b, np.zeros_like(b)), [-np.inf, -np.inf, 0, -np.inf, np.nan])
    with pytest.warns(UserWarning, match="support"):
        PolyaGamma(np.ones(5, np.float32), np.zeros(5, np.float32), validate_args=True).log_prob(
            -np.ones(5, np.float32)
        )
    with pytest.raises(ValueError, match="b"):
        PolyaGamma(-1.0, 0.0, validate_args=True)


# Draws


def deviations(draws, b, z):
    """z-scores of mean, variance and Laplace transform at t = 1 / mean, and the Kolmogorov-Smirnov statistic.

    The last is the largest difference on a grid, so not above the full one.
    """
    draws = np.sort(np.asarray(draws).reshape(-1))
    root = np.sqrt(draws.size)
    mean, variance = cumulant(b, z, 1), cumulant(b, z, 2)
    centred = draws.astype(float) - mean
    transformed, t = np.exp(-draws.astype(float) / mean), 1 / mean
    expected = np.exp(log_laplace(t, b, z))
    spread = np.sqrt(np.exp(log_laplace(2 * t, b, z)) - expected**2)
    scores = [
        centred.mean() / np.sqrt(variance),
        (np.mean(centred**2) - variance) / np.sqrt(cumulant(b, z, 4) + 2 * variance**2),
        (transformed.mean() - expected) / spread,
    ]
    grid = grid_of(b, z)
    below = np.searchsorted(draws, grid.astype(draws.dtype), side="right") / draws.size
    distance = np.abs(below - series_cdf(grid.astype(draws.dtype), b, z)).max()
    return root * np.array(scores), root * distance


def check_draws(draws, b, z, checks, allowed=0.0):
    """Fails if a statistic leaves the band that `checks` tests of a right sampler leave with probability FAMILY."""
    scores, distance = deviations(draws, b, z)
    assert np.all(np.abs(scores) < norm.isf(FAMILY / 2 / (4 * checks))), (b, z, scores)
    limit = kstwobign.isf(FAMILY / (4 * checks)) + allowed * np.sqrt(np.size(draws))
    assert distance < limit, (b, z, distance, limit)


def draws_of(seed, cases, dtype=np.float32, count=20_000, rows=24):
    """One row of draws for each (b, z) in `cases`, padded to one shape with b = 0 so that one program serves them."""
    table = np.zeros((rows, 2), dtype)
    table[: len(cases)] = cases
    b, z = (np.repeat(column[:, None], count, 1) for column in table.T)
    return np.asarray(sample_polya_gamma(jax.random.key(seed), b, z))[: len(cases)]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_draws_follow_the_distribution(dtype):
    cases = [(b, z) for b in (1, 2, 5, 30) for z in TILTS]
    b, z = np.array(cases, dtype).T
    with jax.enable_x64(dtype == np.float64):
        draws = np.asarray(
            sample_polya_gamma(jax.random.key(1), *(np.repeat(value[:, None], 20_000, 1) for value in (b, z)))
        )
    assert draws.dtype == dtype
    for case, values in zip(cases, draws, strict=True):
        check_draws(values, *case, checks=len(cases))


@pytest.mark.slow
@pytest.mark.parametrize("seed, b, count", [(1, 1, 10**7), (2, 2, 10**6), (3, 5, 10**6), (4, 30, 10**6)])
def test_many_draws_follow_the_distribution(seed, b, count):
    """Draws in float32, sums in float64."""
    keys = jax.random.split(jax.random.key(seed), len(TILTS))
    for key, z in zip(keys, TILTS, strict=True):
        check_draws(sample_polya_gamma(key, float(b), np.full(count, z, np.float32)), b, z, checks=len(TILTS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_path_of_one_and_small_arrays_follow_the_distribution(dtype):
    """PG(1, z) for small arrays (every entry one lane), in many calls."""
    with jax.enable_x64(dtype == np.float64):
        keys = jax.random.split(jax.random.key(5), 20_000)
        draws = jax.jit(jax.vmap(lambda key: sample_polya_gamma_one(key, np.array(TILTS, dtype))))(keys)
    for values, z in zip(np.asarray(draws).T, TILTS, strict=True):
        check_draws(values, 1, z, checks=len(TILTS))


ratio_of_density = jax.jit(polya_gamma_draws._ratio)
remainder = jax.jit(polya_gamma_draws._remainder)


def test_the_bound_of_the_acceptance_probability_holds_and_is_tight():
    """log sup_x r(x) exp(delta x/2) is below the polynomial in use, and nowhere far."""
    x = np.linspace(0.01, 12, 20_001)[:, None]
    with jax.enable_x64(True):
        log_ratio = np.log(np.asarray(ratio_of_density(jnp.asarray(x))))
    delta = np.linspace(0, polya_gamma_draws._DELTA, 141)
    excess = delta * np.polyval(polya_gamma_draws._BOUND[::-1], delta) - np.max(log_ratio + delta * x / 2, axis=0)
    assert np.all(excess > -1e-12) and np.all(excess < 3e-3)


@double
def test_the_ratio_of_the_density_to_its_first_term():
    """r(x) from 120 terms of the series at b = 1, across its switch at x = 2."""
    x = np.concatenate([np.linspace(0.02, 4, 300), [2 - 1e-12, 2 + 1e-12]])
    weights, m = series_weights(1, 0.0)
    reference = np.sum(weights / 2 * m * np.exp(-(m**2 - 1) / (2 * x)), axis=0)
    np.testing.assert_allclose(ratio_of_density(jnp.asarray(x)), reference, atol=1e-13)
    np.testing.assert_allclose(ratio_of_density(jnp.asarray(x, jnp.float32)), reference, atol=2e-6)


# Errors stated in the docstring of `sample_polya_gamma`, and what the statistics add to them.
STATED = [(0.2, 9e-4), (0.5, 3e-4), (1.5, 8e-5), (33.0, 4e-6)]


@pytest.mark.slow
def test_draws_for_other_shapes_stay_within_the_stated_error():
    cases = [(b, z) for b, _ in STATED[:3] for z in TILTS]
    for (b, z), values in zip(cases, draws_of(2, cases), strict=True):
        check_draws(values, b, z, checks=len(cases), allowed=dict(STATED)[b])


@pytest.mark.long
def test_large_shapes_have_the_right_moments():
    """Mean, variance and skewness; the distribution itself is compared in the slow test below."""
    shapes = (EXACT_UP_TO - 1, EXACT_UP_TO + 1, 999, 1001, 10**5, 10**7)
    cases = [(b, z) for b in shapes for z in (0, 1, 50)]
    for (b, z), values in zip(cases, draws_of(3, cases), strict=True):
        variance = cumulant(b, z, 2)
        score = (values.astype(float) - cumulant(b, z, 1)) / np.sqrt(variance)
        skewness = cumulant(b, z, 3) / variance**1.5
        observed = np.array([score.mean(), np.mean(score**2) - 1, np.mean(score**3) - skewness])
        spread = np.sqrt(np.array([1, 2 + 12 / b, 15 + 300 / b]) / values.size)
        assert np.all(np.abs(observed) / spread < norm.isf(FAMILY / 6 / len(cases))), (b, z, observed / spread)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 3e-6), (np.float64, 3e-8)])
def test_the_remainder_has_the_cumulants_of_what_is_left_out(dtype, tolerance):
    """Of b = 2 after 16 terms, and of b = 2000 after none; the third cumulant only shapes the remainder."""
    with jax.enable_x64(dtype == np.float64):
        for z in (0.0, 0.1, 5.0, 50.0, 1e3):
            for b, terms in ((2.0, polya_gamma_draws._TERMS), (2000.0, 0)):
                theta = jnp.asarray([z / (2 * np.pi)], dtype)
                fit = remainder(jnp.asarray([b], dtype), theta, jnp.asarray([terms]))
                shift, shape, scale = (float(value[0]) for value in fit)
                assert shift > 0
                left = [cumulant(b, z, n) - [1, 1, 2][n - 1] * b * np.sum(rates(z, terms) ** n) for n in (1, 2, 3)]
                np.testing.assert_allclose(shift + shape * scale, left[0], rtol=tolerance)
                np.testing.assert_allclose(shape * scale**2, left[1], rtol=2e-6)
                np.testing.assert_allclose(2 * shape * scale**3, left[2], rtol=1e-5)


def inverted_cdf(w, b, z, log_transform, shift=0.0):
    """P(W <= w) from the Laplace transform exp(log_transform(t)) of W - shift, on a parabola right of t = 0."""
    if w <= shift:
        return 0.0
    c, deviation = z / 2, np.sqrt(cumulant(b, z, 2))
    saddle = float(polya_gamma._saddle(jnp.float32(4 * w / b))) - np.pi**2 / 4
    vertex = max(saddle, c * c + 0.5 / deviation)
    side = np.sqrt(vertex + np.pi**2 / 4)
    y = np.linspace(-12, 12, 4001) / np.sqrt(w - shift)
    v = vertex - y**2 + 2j * side * y
    t = 2 * (v - c * c)
    integrand = np.exp(t * (w - shift) + log_transform(t)) / t * 4j * (side + 1j * y)
    return float((integrand.sum() * (y[1] - y[0]) / (2j * np.pi)).real)


@pytest.mark.slow
@pytest.mark.parametrize("b, error", [(0.05, 7e-3), *STATED, (129.0, 1e-6), (1000.0, 1e-6), (1001.0, 7e-6)])
def test_the_stated_error_of_the_gamma_sum(b, error):
    """Both distribution functions by inversion of their transforms, on 60 points."""
    for z in (0.0, 1.0, 5.0, 20.0, 50.0, 200.0):
        terms = polya_gamma_draws._TERMS if b <= polya_gamma_draws._REMAINDER_ONLY else 0
        with jax.enable_x64(True):
            fit = remainder(jnp.array([b]), jnp.array([z / (2 * np.pi)]), jnp.array([terms]))
        shift, shape, scale = (float(value[0]) for value in fit)
        head = rates(z, terms)

        def approximate(t, b=b, head=head, shape=shape, scale=scale):
            return -b * np.log1p(np.multiply.outer(t, head)).sum(-1) - shape * np.log1p(t * scale)

        points = grid_of(b, z, 30)
        if b < 10:
            points = np.concatenate([np.geomspace(1e-3 * cumulant(b, z, 1), points[0], 30), points])
        for w in points:
            exact = inverted_cdf(w, b, z, lambda t, b=b, z=z: log_laplace(t, b, z))
            assert abs(inverted_cdf(w, b, z, approximate, shift) - exact) < error


@pytest.mark.long
def test_mixed_shapes_in_one_call():
    """Zeros, ordinary counts, huge and fractional values side by side; each entry has its own mean."""
    b = np.array([0, 1, 2, 0.7, 40, 300, 5e6, 0], np.float32)
    count = 20_000
    tiled = np.tile(b, count).reshape(8, 20_000)
    draws = np.asarray(sample_polya_gamma(jax.random.key(4), tiled, np.full_like(tiled, 1.5)), float).reshape(count, 8)
    np.testing.assert_array_equal(draws[:, [0, 7]], 0)
    draws, b = draws[:, 1:7], b[1:7]
    assert np.all(draws > 0)
    scores = (draws.mean(0) - cumulant(b, 1.5, 1)) / np.sqrt(cumulant(b, 1.5, 2) / count)
    assert np.all(np.abs(scores) < norm.isf(FAMILY / 12))
    correlation = np.corrcoef(draws.T) - np.eye(6)
    assert np.all(np.abs(correlation) < norm.isf(FAMILY / 30) / np.sqrt(count))


@pytest.mark.slow
def test_lanes_that_work_down_several_rows_are_filled_in_order(monkeypatch):
    """A table of few lanes gives every entry the draws of its own b and z, whatever its neighbours need."""
    monkeypatch.setattr(rejection, "lanes", lambda size: 7)
    b = np.tile(np.array([0, 1, 60, 2, 0], np.float32), 6_000)[:-3]
    z = np.tile(np.array([0, 50, 3, 0, 1], np.float32), 6_000)[:-3]
    draws = np.asarray(jax.jit(lambda key: sample_polya_gamma(key, b, z))(jax.random.key(6)))
    for start, shape, tilt in ((1, 1, 50.0), (2, 60, 3.0), (3, 2, 0.0)):
        scores, distance = deviations(draws[start::5], shape, tilt) if shape < 60 else (np.zeros(3), 0.0)
        assert np.all(np.abs(scores) < 5) and distance < 2.5
        mean, variance = cumulant(shape, tilt, 1), cumulant(shape, tilt, 2)
        assert abs(draws[start::5].mean(dtype=float) - mean) < 5 * np.sqrt(variance / 6_000)
    np.testing.assert_array_equal(draws[0::5], 0)


@pytest.mark.long
def test_the_largest_numbers_end():
    """Logits of logistic-softmax below -80 in all classes ask for them: the shape of the gamma variable overflows."""
    b, z = jnp.array([1e30, 1e36, 3e38, 3e38], jnp.float32), jnp.array([80.0, 80.0, 0.1, 88.0], jnp.float32)
    draws, mean = sample_polya_gamma(jax.random.key(0), b, z), polya_gamma_mean(b, z)
    assert float(draws[0]) == pytest.approx(float(mean[0]), rel=1e-5) and np.isnan(draws[3])
    assert np.all(np.isnan(draws) | (np.abs(draws / mean - 1) < 1e-5))


@pytest.mark.long
def test_invalid_entries_give_nan_and_end():
    b, z = jnp.array([-1, np.nan, np.inf, 1, 1.5]), jnp.array([0, 0, 0, np.nan, np.inf])
    assert np.all(np.isnan(sample_polya_gamma(jax.random.key(0), b, z)))
    np.testing.assert_array_equal(np.isnan(sample_polya_gamma_one(jax.random.key(0), z)), [0, 0, 0, 1, 1])
    assert jax.eval_shape(sample_polya_gamma, jax.random.key(0), jnp.zeros(0), jnp.zeros(0)).shape == (0,)


# The distribution object, and transformations


def test_shapes_moments_and_dtypes():
    distribution = PolyaGamma(np.array([[1], [2], [0]]), np.array([0.0, 1.0], np.float32))
    assert distribution.batch_shape == (3, 2) and distribution.event_shape == ()
    draws = jax.eval_shape(lambda key: distribution.sample(key, (5, 4)), jax.random.key(0))
    assert draws.shape == (5, 4, 3, 2) and draws.dtype == jnp.float32
    assert jax.eval_shape(distribution.log_prob, draws).shape == (5, 4, 3, 2)
    np.testing.assert_allclose(distribution.mean[:, 0], [0.25, 0.5, 0])
    np.testing.assert_allclose(distribution.variance[:, 0], np.array([1, 2, 0]) / 24, rtol=1e-6)
    assert distribution.expand((7, 3, 2)).batch_shape == (7, 3, 2)
    assert jax.eval_shape(PolyaGamma(1, 0.3).sample, jax.random.key(0)).shape == ()


def test_distribution_is_a_tree():
    distribution = PolyaGamma(jnp.array([0.0, 1, 3, 200, 0.5]), 0.5)
    leaves, structure = jax.tree.flatten(distribution)
    again = jax.tree.unflatten(structure, leaves)
    assert len(leaves) == 2 and again.batch_shape == (5,)
    key = jax.random.key(3)
    np.testing.assert_array_equal(again.sample(key), sample_polya_gamma(key, distribution.b, distribution.z))


@pytest.mark.long
def test_transformations_give_the_same_draws():
    """vmap over keys and tilts, and scan, repeat the plain calls: no draw depends on what is drawn beside it."""
    keys = jax.random.split(jax.random.key(7), 6)
    b, z = jnp.array([0.0, 1, 3, 200, 0.5]), jnp.linspace(-4, 4, 30).reshape(6, 5)
    plain = np.stack([sample_polya_gamma(key, b, row) for key, row in zip(keys, z, strict=True)])
    mapped = jax.jit(jax.vmap(sample_polya_gamma, (0, None, 0)))(keys, b, z)
    np.testing.assert_array_equal(mapped, plain)
    twice = jax.vmap(jax.vmap(sample_polya_gamma, (0, None, 0)), (0, None, 0))
    np.testing.assert_array_equal(twice(keys.reshape(2, 3), b, z.reshape(2, 3, 5)).reshape(6, 5), plain)
    one = jax.lax.scan(lambda _, pair: (None, sample_polya_gamma_one(*pair)), None, (keys, z))[1]
    np.testing.assert_allclose(one[2], sample_polya_gamma_one(keys[2], z[2]), rtol=1e-6)
    assert len(np.unique(plain[:, 1:])) == plain[:, 1:].size


def test_in_a_model():
    """NumPyro's handlers draw it, and its log density is a sample site's."""

    def model():
        return numpyro.sample("w", PolyaGamma(jnp.array([0.0, 1, 3, 200, 0.5]), jnp.zeros(5)))

    trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace()
    # NumPyro also takes a key of the old kind, an array of words, and hands it on as it is.
    old = handlers.trace(handlers.seed(model, jax.random.key_data(jax.random.key(0)))).get_trace()
    np.testing.assert_array_equal(trace["w"]["value"], old["w"]["value"])
    assert trace["w"]["value"].shape == (5,)
    log_joint = numpyro.infer.util.log_density(model, (), {}, {"w": trace["w"]["value"]})[0]
    np.testing.assert_allclose(log_joint, trace["w"]["fn"].log_prob(trace["w"]["value"]).sum(), rtol=1e-6)


def test_extreme_tilts_in_single_precision():
    """Draws of PG(1, z) concentrate at 1/(2 |z|), and every loop ends."""
    z = jnp.array([-1e4, 1e8, 1e19, 1e25, 3e38])
    draws = sample_polya_gamma(jax.random.key(0), jnp.ones(5), z)
    np.testing.assert_allclose(draws[:4] * jnp.abs(z[:4]), 0.5, atol=0.05)


@pytest.mark.long
def test_draws_under_shard_map():
    """Every shard has its own key, as `jax.random` asks for."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    split, same = PartitionSpec("i"), PartitionSpec()
    b, z = jnp.array([0.0, 1, 3, 200]), jnp.linspace(-4, 4, 4)

    def shard(key, b, z):
        return sample_polya_gamma(key[0], b, z)

    keys = jax.random.split(jax.random.key(8), 1)
    draws = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(split, same, same), out_specs=split))(keys, b, z)
    assert np.all(draws[1:] > 0) and draws[0] == 0
    jax.eval_shape(jax.shard_map(shard, mesh=mesh, in_specs=(split, split, split), out_specs=split), keys, b, z)


def test_draws_carry_no_gradient():
    gradient = jax.grad(lambda z: jnp.sum(sample_polya_gamma_one(jax.random.key(0), z)))(jnp.ones(5))
    np.testing.assert_array_equal(gradient, 0)
    sampler = jax.grad(lambda b, z: jnp.sum(sample_polya_gamma(jax.random.key(0), b, z)), (0, 1))
    jax.eval_shape(sampler, jnp.array([0.0, 1, 3, 200, 0.5]), jnp.ones(5))


def test_no_recompilation():
    before = sample_polya_gamma._cache_size()
    for seed, b in enumerate((1.0, 3.0, 0.0, 500.0, 0.3)):
        sample_polya_gamma(jax.random.key(seed), jnp.full(5, b), jnp.full(5, float(seed)))
    assert sample_polya_gamma._cache_size() <= before + 1


def test_keys_matter_and_repeat():
    b, z = jnp.ones(5), jnp.linspace(-3, 3, 5)
    first, again, other = (np.asarray(sample_polya_gamma(jax.random.key(seed), b, z)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.all(first != other)
