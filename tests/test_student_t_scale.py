"""The augmented scale: a sum over it against dense algebra, and Gibbs and CAVI against that sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from problems import double

from fewshot.inference import student_t_scale
from fewshot.models.gaussian import GaussianPrior
from fewshot.models.kernels import RBF, Linear
from fewshot.models.student_t import ScalePosterior, scale_posterior

DOF, NOISE = 4.0, 0.2
HYPER = {"log_scale": -0.5, "log_lengthscale": -1.0}


def problem(seed=0, points=9, kernel=None):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(points, 2)))
    prior = GaussianPrior(jnp.full((1, points), 0.3), (kernel or RBF()).gram(HYPER, x, x))
    return prior, jnp.asarray(0.3 + 2 * rng.normal(size=points))


@pytest.mark.long
@pytest.mark.parametrize("kernel", [RBF(), Linear()])
@double
def test_the_sum_is_the_integral_over_normals(kernel):
    prior, y = problem(kernel=kernel)
    found = student_t_scale.summed(prior, y, NOISE, DOF)
    covariance, residual = np.asarray(prior.covariance), np.asarray(y) - 0.3

    def weight(log_scale):
        density = scipy.stats.multivariate_normal(cov=np.exp(log_scale) * covariance + NOISE * np.eye(len(y)))
        prior = scipy.stats.invgamma(DOF / 2, scale=(DOF - 2) / 2)
        return density.pdf(residual) * prior.pdf(np.exp(log_scale)) * np.exp(log_scale)

    def moment(log_scale):
        gain = np.exp(log_scale) * covariance @ np.linalg.inv(np.exp(log_scale) * covariance + NOISE * np.eye(len(y)))
        mean = gain @ residual
        return weight(log_scale) * np.concatenate([mean, NOISE * np.diag(gain) + mean**2])

    total = scipy.integrate.quad(weight, -12, 12, epsrel=1e-10, epsabs=0, limit=200)[0]
    moments = scipy.integrate.quad_vec(moment, -12, 12, epsrel=1e-10, epsabs=1e-25)[0] / total
    mean, squares = moments[: len(y)], moments[len(y) :]
    np.testing.assert_allclose(found.log_evidence, np.log(total), rtol=1e-7)
    np.testing.assert_allclose(found.mean, 0.3 + mean, rtol=1e-6)
    np.testing.assert_allclose(found.variance, squares - mean**2, rtol=1e-6)


@pytest.mark.long
@double
def test_the_bound_of_cavi_rises_to_a_fixed_point_below_the_evidence():
    prior, y = problem(1)
    exact = student_t_scale.summed(prior, y, NOISE, DOF)
    found, bounds = student_t_scale.cavi(prior, y, NOISE, DOF, steps=100)
    assert np.diff(bounds).min() > -1e-10 * (1 + abs(bounds[-1]))
    assert bounds[0] < bounds[-1] - 1e-3 and bounds[-1] <= exact.log_evidence
    again = student_t_scale.cavi_step(prior, y, NOISE, DOF, found.scale, 9.0)
    np.testing.assert_allclose(again.scale, found.scale, rtol=1e-6)


def conditional(covariance, residual, scales):
    """p(f | y, r): means [G, N] and covariances [G, N, N] for every scale."""
    inverses = np.linalg.inv(scales[:, None, None] * covariance + NOISE * np.eye(len(residual)))
    gains = scales[:, None, None] * covariance @ inverses
    return gains @ residual, NOISE * gains


def normal_kl(mean, covariance, means, covariances):
    """KL(N(mean, covariance) || N(means_g, covariances_g)) [G]."""
    inverses, away = np.linalg.inv(covariances), np.broadcast_to(means - mean, covariances.shape[:2])
    trace = np.einsum("gij,ji->g", inverses, covariance) + np.einsum("gi,gij,gj->g", away, inverses, away)
    return 0.5 * (trace - len(mean) + np.linalg.slogdet(covariances)[1] - np.linalg.slogdet(covariance)[1])


@double
def test_what_cavi_loses_is_its_distance_from_the_posterior_and_no_factorised_q_loses_less():
    """log p(y) - bound = KL(q(f) q(r) || p(f, r | y)), by quadrature over r with dense matrices.

    Given any q(r), the best q(f) is p(f | y, r = 1/k) for one number k, and given that the best q(r) is
    proportional to p(r) exp E_q log N(f; a, r K): on a grid of r no form of it is assumed. The best of all k is CAVI's.
    """
    prior, y = problem(1)
    covariance, residual = np.asarray(prior.covariance), np.asarray(y) - 0.3
    log_scale = np.linspace(-12, 12, 2001)
    scales, width, count = np.exp(log_scale), log_scale[1] - log_scale[0], len(residual)
    means, covariances = conditional(covariance, residual, scales)
    log_prior = scipy.stats.invgamma(DOF / 2, scale=(DOF - 2) / 2).logpdf(scales) + log_scale + np.log(width)
    spreads = scales[:, None, None] * covariance + NOISE * np.eye(count)
    squares = np.einsum("i,gij,j->g", residual, np.linalg.inv(spreads), residual)
    log_joint = log_prior - 0.5 * (np.linalg.slogdet(spreads)[1] + squares + count * np.log(2 * np.pi))
    evidence = scipy.special.logsumexp(log_joint)

    found, bounds = student_t_scale.cavi(prior, y, NOISE, DOF, steps=100)
    precision = float(found.scale.mean_precision())
    ((mean,), (own,)) = conditional(covariance, residual, np.array([1 / precision]))
    np.testing.assert_allclose(found.mean, 0.3 + mean, rtol=1e-6)
    np.testing.assert_allclose(found.variance, np.diag(own), rtol=1e-6)
    log_q = scipy.stats.invgamma(found.scale.shape, scale=found.scale.rate).logpdf(scales) + log_scale + np.log(width)
    distance = normal_kl(mean, own, means, covariances) + log_q - (log_joint - evidence)
    np.testing.assert_allclose(evidence - bounds[-1], np.sum(np.exp(log_q) * distance), rtol=1e-6)

    def best_bound(k):
        ((mean,), (own,)) = conditional(covariance, residual, np.array([1 / k]))
        latent = normal_kl(mean, own, np.zeros(count), scales[:, None, None] * covariance)
        data = scipy.stats.norm(mean, np.sqrt(NOISE)).logpdf(residual).sum() - 0.5 * np.trace(own) / NOISE
        return data + scipy.special.logsumexp(log_prior - latent)

    bests = [best_bound(k) for k in precision * np.linspace(0.2, 5.0, 41)]
    np.testing.assert_allclose(best_bound(precision), bounds[-1], rtol=1e-8)
    assert max(bests) <= best_bound(precision) + 1e-9 and max(bests) > best_bound(precision) - 1e-2


@pytest.mark.long
@double
def test_the_bound_of_cavi_is_the_average_of_log_joint_over_q():
    """E_q[log p(y, f, r) - log q(f) - log q(r)] by draws of q, with q(f) drawn from its whole covariance."""
    prior, y = problem(2, points=4)
    start = scale_posterior(jnp.asarray(DOF))
    found = student_t_scale.cavi_step(prior, y, NOISE, DOF, start, 4.0)
    covariance = np.asarray(prior.covariance)
    v = np.linalg.inv(np.linalg.inv(covariance) * float(start.mean_precision()) + np.eye(4) / NOISE)
    q = scipy.stats.multivariate_normal(found.mean, v)
    np.testing.assert_allclose(np.diag(v), found.variance, rtol=1e-9)
    rng, draws = np.random.default_rng(0), 100_000
    f = q.rvs(draws, random_state=rng)
    scale = scipy.stats.invgamma(found.scale.shape, scale=found.scale.rate)
    r = scale.rvs(draws, random_state=rng)
    beta = np.sum((f - 0.3) * np.linalg.solve(covariance, (f - 0.3).T).T, axis=1)
    latent = -0.5 * (4 * np.log(2 * np.pi * r) + np.linalg.slogdet(covariance)[1] + beta / r)
    terms = (
        scipy.stats.norm(f, np.sqrt(NOISE)).logpdf(y).sum(1)
        + latent
        + scipy.stats.invgamma(DOF / 2, scale=(DOF - 2) / 2).logpdf(r)
        - q.logpdf(f)
        - scale.logpdf(r)
    )
    assert abs(terms.mean() - found.bound) < 4 * terms.std() / np.sqrt(draws)


@double
def test_the_kl_of_two_scales_is_its_integral():
    q, p = ScalePosterior(jnp.asarray(3.5), jnp.asarray(2.0)), ScalePosterior(jnp.asarray(2.0), jnp.asarray(1.3))

    def integrand(r):
        one, other = (scipy.stats.invgamma(s.shape, scale=s.rate).logpdf(r) for s in (q, p))
        return np.exp(one) * (one - other)

    np.testing.assert_allclose(student_t_scale.scale_kl(q, p), scipy.integrate.quad(integrand, 0, np.inf)[0], rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [RBF(), Linear()])
@double
def test_gibbs_draws_the_exact_posterior(kernel):
    prior, y = problem(3, kernel=kernel)
    exact = student_t_scale.summed(prior, y, NOISE, DOF)
    chains, sweeps = 64, 400
    keys = jax.random.split(jax.random.key(0), chains)
    draws = jax.vmap(lambda key: student_t_scale.gibbs(key, prior, y, NOISE, DOF, sweeps))(keys)
    kept = np.concatenate([draws.f[:, 50:], np.log(draws.scale)[:, 50:, None]], axis=2)
    chain_means = kept.mean(1)  # of independent chains
    log_scale = np.log(exact.scale)
    expected = np.append(exact.mean, exact.mass @ log_scale)
    errors = (chain_means.mean(0) - expected) / (chain_means.std(0, ddof=1) / np.sqrt(chains))
    assert np.abs(errors).max() < scipy.stats.t(chains - 1).isf(0.01 / (2 * len(expected)))
    variance = np.append(exact.variance, exact.mass @ log_scale**2 - expected[-1] ** 2)
    np.testing.assert_allclose(kept.reshape(-1, len(expected)).var(0), variance, rtol=0.15)
