"""Poisson counts: their distribution at every size of rate, in both precisions and in batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from scipy.stats import chisquare, norm, poisson

from fewshot.models.poisson import COUNTED, INVERTED, _hat, _log_probability, _try, sample_poisson

KEY, SIZE = jax.random.key(5), 200_000
RATES = [0.02, 0.7, 3.0, 9.99, 10.0, 14.0, 80.0, 900.0]


def drawn(rate, dtype=jnp.float32, key=KEY, size=SIZE):
    return np.asarray(jax.jit(sample_poisson)(key, jnp.full(size, rate, dtype)), np.float64)


def check(counts, rate):
    """Chi-squared over counts that are expected at least 20 times, and both tails; one time in a million by chance."""
    assert (counts == counts.round()).all() and counts.min() >= 0
    values = np.arange(poisson.ppf(1e-9, rate), poisson.isf(1e-9, rate) + 2)
    expected = SIZE * poisson.pmf(values, rate)
    inside = values[expected >= 20]
    edges = [-np.inf, *(inside[:-1] + 0.5), np.inf]
    found = np.histogram(counts, edges)[0]
    assert chisquare(found, SIZE * np.diff(poisson.cdf(edges, rate))).pvalue > 1e-6


@pytest.mark.parametrize("rate", RATES)
def test_counts_follow_the_distribution(rate):
    check(drawn(rate), rate)


@pytest.mark.long
@double
@pytest.mark.parametrize("rate", RATES)
def test_counts_follow_the_distribution_in_double_precision(rate):
    check(drawn(rate, jnp.float64), rate)


@pytest.mark.long
@pytest.mark.parametrize("rate", [1e3, 9e3, 1.1e4, 1e5, 9e5, 1e7])
def test_counts_of_large_rates_have_their_moments_in_single_precision(rate):
    """JAX's own have a variance of .954 of the rate at 9e5. The mean of so many shows counts that are one too high."""
    size = 1_000_000
    counts = drawn(rate, size=size)
    assert (counts == counts.round()).all()
    assert abs(counts.mean() - rate) < 5 * np.sqrt(rate / size)
    assert counts.var() == pytest.approx(rate, rel=5 * np.sqrt(2 / size))


def test_the_distribution_of_large_counts_is_as_close_as_is_said():
    """P(count <= k) is Phi(z) with rate + rate^1/2 z + (z^2 - 1)/6 = k + 1/2; without the last term by 7e-4."""
    rate = COUNTED
    k = np.arange(int(rate - 5 * rate**0.5), int(rate + 5 * rate**0.5))
    excess = k + 0.5 - rate
    z = 3 * (-(rate**0.5) + np.sqrt(rate + 2 * (excess + 1 / 6) / 3))
    np.testing.assert_allclose(rate**0.5 * z + (z**2 - 1) / 6, excess, atol=1e-8)
    error = np.abs(norm.cdf(z) - poisson.cdf(k, rate)).max()
    assert error < 2e-6
    assert np.abs(norm.cdf(excess / rate**0.5) - poisson.cdf(k, rate)).max() > 6e-4


@pytest.mark.long
@pytest.mark.parametrize("rate", [INVERTED, 14.86, 25.0, 300.0, COUNTED])
@double
def test_the_hat_of_the_rejection_is_nowhere_too_low_and_seldom_too_high(rate):
    """p(count) G'(U) <= c, and 1 / c of the proposals are accepted."""
    u = np.linspace(-0.5, 0.5, 400_003)[1:-1]
    a, b, log_bound = (float(part[0]) for part in _hat(jnp.asarray([rate])))
    count = np.floor((2 * a / (0.5 - abs(u)) + b) * u + rate + 0.43)
    share = poisson.pmf(count, rate) * (a / (0.5 - abs(u)) ** 2 + b) / np.exp(log_bound)
    assert share.max() <= 1
    assert share.mean() == pytest.approx(np.exp(-log_bound), rel=1e-3)
    assert share.mean() > 0.74
    v = 1 - share * (1 - 1e-9)  # 1 - v is the largest uniform number with which a proposal is accepted
    for lower, expected in ((v, share > 0), (v - 1e-6, np.zeros_like(u, bool))):
        proposed, accepted = _try([jnp.asarray(u + 0.5), jnp.asarray(lower)], jnp.asarray(0), jnp.full(len(u), rate))
        clear = np.abs(share) > 1e-5
        np.testing.assert_array_equal(np.asarray(accepted)[clear], expected[clear])
        np.testing.assert_array_equal(np.asarray(proposed)[clear], count[clear])


@double
@pytest.mark.parametrize("dtype, error", [(jnp.float64, 1e-10), (jnp.float32, 3e-4)])
def test_log_probabilities(dtype, error):
    """In single precision too, where log p by its definition is off by .01 at a rate of 1e4."""
    for rate in (10.0, 55.0, 1e3, 1e4):
        counts = np.arange(max(0, rate - 6 * rate**0.5), rate + 6 * rate**0.5).round()
        found = jax.jit(_log_probability)(jnp.asarray(counts, dtype), jnp.full(len(counts), rate, dtype))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, poisson.logpmf(counts, rate), atol=error)


@pytest.mark.long
def test_a_count_depends_on_its_own_rate_and_key_alone():
    """Bit for bit, in any company and under vmap."""
    rates = jnp.asarray([0.0, 0.3, 5.0, 80.0, 9e3, 2e5, 1e7, 12.0], jnp.float32)
    keys = jax.random.split(KEY, 3)
    one = jax.jit(sample_poisson)
    alone = np.stack([one(key, rates) for key in keys])
    np.testing.assert_array_equal(jax.jit(jax.vmap(sample_poisson, (0, None)))(keys, rates), alone)
    for number in range(len(rates)):
        np.testing.assert_array_equal(
            one(KEY, jnp.where(jnp.arange(8) == number, rates, 20.0))[number], one(KEY, rates)[number]
        )
    assert (alone[:, 0] == 0).all() and len({tuple(row) for row in alone}) == 3


@pytest.mark.long
def test_entries_are_independent_and_odd_rates_are_told():
    counts = drawn(30.0)
    assert abs(np.corrcoef(counts[:-1], counts[1:])[0, 1]) < 5 / np.sqrt(SIZE)
    found = sample_poisson(KEY, jnp.asarray([[np.nan, -1.0], [np.inf, 0.0]], jnp.float32))
    np.testing.assert_array_equal(found, [[np.nan, np.nan], [np.nan, 0.0]])
    assert sample_poisson(KEY, jnp.zeros((0, 3))).shape == (0, 3)
    assert (jax.grad(lambda rate: sample_poisson(KEY, rate).sum())(jnp.ones(3)) == 0).all()
