"""Student-t noise: its identities, its limits, and every inference that can use it."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from scipy import integrate, stats

from fewshot.inference.inner import cavi, cvi, exact, fit, fit_to_tolerance, gibbs
from fewshot.inference.inner.base import Code, usable_inferences
from fewshot.inference.mcmc import nuts
from fewshot.models.expectations import Exact
from fewshot.models.gaussian import GaussianPrior, Marginals
from fewshot.models.likelihoods import Normal, StudentT

Y = np.array([0.3, -1.2, 0.8, 6.0, -0.1])  # one outlier
F = np.array([[0.1, -1.0, 0.2, 0.9, 0.4]])


def task(points=12, outlier=4.0, dtype=float):
    """A curve with one label that is far off, and the prior of a process that is not."""
    x = np.linspace(-2, 2, points)
    y = np.sin(2 * x) + 0.1 * np.random.default_rng(0).normal(size=points)
    y[points // 2] += outlier
    covariance = np.exp(-0.5 * (x[:, None] - x) ** 2 / 0.5)
    return GaussianPrior(jnp.zeros((1, points)), jnp.asarray(covariance, dtype)), jnp.asarray(y, dtype), x


@pytest.mark.long
@pytest.mark.parametrize("dof", [1.3, 4.0, 60.0])
@double
def test_densities_are_those_of_the_distribution(dof):
    """log p(y | f), Bayes' identity for any omega, E log p(y | f) and the predictive density, against quadrature."""
    likelihood, y, f = StudentT(0.2, dof), jnp.asarray(Y), jnp.asarray(F)
    log_p = stats.t(dof, loc=F[0], scale=np.sqrt(0.2)).logpdf
    np.testing.assert_allclose(likelihood.log_prob(y, f), log_p(Y), rtol=1e-10)
    aux = likelihood.aux_conditional(jax.random.key(0), y, 0.5 * f)
    for omega in (aux, aux._replace(omega=3 * aux.omega)):
        difference = likelihood.log_joint(y, omega, f) - likelihood.log_conditional(y, omega, f)
        np.testing.assert_allclose(difference, log_p(Y), rtol=1e-9)
    variance = np.array([[0.02, 0.5, 1.0, 0.3, 0.1]])
    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    at = F + np.sqrt(variance) * nodes[:, None]
    each = stats.t(dof, scale=np.sqrt(0.2)).logpdf(Y - at)
    expected = weights @ each / weights.sum()
    found = likelihood.expected_log_prob(y, Marginals(f, jnp.asarray(variance)))
    np.testing.assert_allclose(found, expected, atol=2e-6 if dof < 4 else 1e-8)
    density = np.exp(likelihood.distribution(Marginals(f, jnp.asarray(variance))).log_prob(y))
    exact_density = weights @ np.exp(each) / weights.sum()
    np.testing.assert_allclose(density, exact_density, rtol=5e-4 if dof < 2 else 1e-6, atol=1e-12)


# Degrees of freedom, and how many s a label may be off for one Gaussian and for a mixture: docs/student_t_noise.md.
REACHES = [(2.0, 1e4, 5e3), (4.0, 1e4, 300.0), (10.0, 1e4, 70.0), (30.0, 560.0, 31.0), (100.0, 120.0, 23.0)]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("dof", "single", "many"), REACHES)
@double
def test_outliers_have_the_density_of_a_student_t_distribution(dof, single, many, dtype):
    """Up to the distances of docs/student_t_noise.md: where f is certain, and with its variance by quadrature."""
    likelihood = StudentT(0.04, dof)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    for shape, reach in (((1, 1), single), ((2, 1, 1), many)):
        off = np.geomspace(1.0, reach, 40)
        y = dtype(0.2 * off)
        mean = jnp.zeros((*shape[:-1], len(y)), dtype)
        wide = jnp.full_like(mean, 0.02)
        found = likelihood.distribution(Marginals(mean, jnp.zeros_like(mean))).log_prob(y)
        np.testing.assert_allclose(found, stats.t(dof, scale=0.2).logpdf(y), atol=1e-3)
        given_f = stats.t(dof, scale=0.2).logpdf(y - np.sqrt(0.02) * nodes[:, None])
        expected = np.logaddexp.reduce(given_f + np.log(weights / weights.sum())[:, None])
        np.testing.assert_allclose(likelihood.distribution(Marginals(mean, wide)).log_prob(y), expected, atol=1e-3)

    def density(values):
        return likelihood.with_parameters(values).distribution(Marginals(mean, wide)).log_prob(y).sum()

    assert all(np.isfinite(slope) for slope in jax.grad(density)(likelihood.parameters()).values())


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@double
def test_little_noise_beside_an_unsure_function(dtype):
    """(N5) where log p has its singularities much nearer than the nodes of any sum over f."""
    tolerance = 1e-9 if dtype == np.float64 else 3e-6
    offset, variance = np.array([0.0, 1.0, 30.0, 1e-3, 0.5]), np.array([1.0, 1.0, 4.0, 1e-6, 0.0])
    likelihood, dof = StudentT(1e-6, 3.0), 3.0
    q = Marginals(jnp.zeros((1, 5), dtype), jnp.asarray(variance[None], dtype))
    found = likelihood.expected_log_prob(jnp.asarray(offset, dtype), q)
    scale = 1e-6 * dof
    for n, (d, v) in enumerate(zip(offset, variance, strict=True)):
        # log(1 + x^2 / c) = log(c + x^2) - log c has its corner at x = 0, within some (c / v)^1/2 of z = d / v^1/2.
        at, width = (d / np.sqrt(v), np.sqrt(scale / v)) if v else (0.0, 1.0)
        ends = np.unique(np.clip([-12, 0, 12, *(at + width * np.array([-1e3, -10, 0, 10, 1e3]))], -12, 12))

        def integrand(z, d=d, v=v):
            return np.log1p((d - np.sqrt(v) * z) ** 2 / scale) * stats.norm.pdf(z)

        tail = sum(integrate.quad(integrand, *pair, epsrel=1e-12)[0] for pair in pairwise(ends))
        expected = stats.t(dof, scale=1e-3).logpdf(0.0) - 0.5 * (dof + 1) * tail
        np.testing.assert_allclose(found[n], expected, rtol=tolerance)


@pytest.mark.long
@double
def test_the_bound_is_that_of_quadrature_and_tight():
    """(N3) is E_q[log p(y, omega | f) - log q(omega)] by integration over omega, and log p(y | f) at a point mass."""
    likelihood, y, f = StudentT(0.2, 4.0), jnp.asarray(Y), jnp.asarray(F)
    q = Marginals(f, jnp.full_like(f, 0.3))
    aux = likelihood.aux_posterior(y, q)._replace(rate=jnp.asarray([2.0, 3.0, 1.0, 5.0, 4.0]))
    bound = likelihood.augmented_bound(y, q, aux)
    square = (Y - F[0]) ** 2 + 0.3

    def integrand(omega, n):
        inside = stats.norm.logpdf(0.0, scale=np.sqrt(0.2 / omega)) - 0.5 * omega * square[n] / 0.2
        own = stats.gamma(2.5, scale=1 / float(aux.rate[n]))
        return own.pdf(omega) * (inside + stats.gamma(2.0, scale=0.5).logpdf(omega) - own.logpdf(omega))

    for n in range(len(Y)):
        np.testing.assert_allclose(bound[n], integrate.quad(integrand, 0, np.inf, args=(n,))[0], rtol=1e-7)
    certain = Marginals(f, jnp.zeros_like(f))
    tight = likelihood.augmented_bound(y, certain, likelihood.aux_posterior(y, certain))
    np.testing.assert_allclose(tight, likelihood.log_prob(y, f), rtol=1e-10)


@pytest.mark.long
@double
def test_many_degrees_of_freedom_are_gaussian_noise():
    prior, y, _ = task(outlier=0.0)
    q = Marginals(jnp.asarray(F), jnp.full_like(jnp.asarray(F), 0.3))
    far, near = StudentT(0.05, 1e7), Normal(0.05)
    np.testing.assert_allclose(far.log_prob(jnp.asarray(Y), q.mean), near.log_prob(jnp.asarray(Y), q.mean), rtol=1e-4)
    for ours, theirs in ((far.distribution(q), near.distribution(q)),):
        np.testing.assert_allclose(ours.log_prob(jnp.asarray(Y)), theirs.log_prob(jnp.asarray(Y)), rtol=1e-4)
    found = [fit(jax.random.key(0), kernel, prior, y, steps=30)[0] for kernel in (cavi(far), exact(near))]
    means = [kernel.posterior(state, prior).mean for kernel, state in zip((cavi(far), exact(near)), found, strict=True)]
    np.testing.assert_allclose(*means, atol=1e-5)


@pytest.mark.long
@double
def test_cavi_climbs_lets_the_outlier_go_and_cvi_ends_above():
    """CAVI's bound is that of q(f) q(omega); CVI, with q(f) alone, can only be higher."""
    prior, y, x = task()
    likelihood = StudentT(0.01, 3.0)
    state, info = fit(jax.random.key(0), cavi(likelihood), prior, y, steps=60)
    assert (np.diff(info.elbo) > -1e-10 * (1 + np.abs(info.elbo[1:]))).all() and info.residual[-1] < 1e-4
    mean = cavi(likelihood).posterior(state, prior).mean[0]
    robust = np.abs(mean - np.sin(2 * x)).max()
    gaussian = exact(Normal(0.01))
    fitted, _ = fit(jax.random.key(0), gaussian, prior, y, steps=1)
    plain = np.abs(gaussian.posterior(fitted, prior).mean[0] - np.sin(2 * x)).max()
    assert robust < 0.25 < 1.0 < plain
    free = cvi(likelihood, expectation=Exact())
    _, found, _ = jax.jit(lambda: fit_to_tolerance(jax.random.key(0), free, prior, y, max_steps=200))()
    assert found.code in (Code.OK, Code.STALLED) and found.elbo > info.elbo[-1] - 1e-6


def test_the_inferences_that_can_use_it():
    assert {"cvi", "cavi", "gibbs"} <= set(usable_inferences(StudentT()))
    assert "exact" not in usable_inferences(StudentT())
    with pytest.raises(ValueError, match="dof must be positive"):
        StudentT(dof=-1.0)
    learned = StudentT(0.3, 5.0, learn_dof=False).with_parameters({"log_noise": jnp.log(0.7)})
    assert learned.dof == 5.0 and np.isclose(learned.noise, 0.7)


@pytest.mark.slow
@double
def test_gibbs_is_nuts():
    """Means and standard deviations of f by Gibbs and by NUTS without the augmentation, within 5 standard errors."""
    prior, y, _ = task(points=6, outlier=3.0)
    likelihood = StudentT(0.1, 3.0)
    mcmc = nuts(prior, likelihood, y, num_warmup=1000, num_samples=4000)
    mcmc.run(jax.random.key(0))
    kernel = gibbs(likelihood, chains=1000)

    def sweep(state, key):
        state, _ = kernel.step(key, state, prior, y)
        return state, state.f[:, 0]

    state = kernel.init(jax.random.key(1), prior, y)
    _, draws = jax.jit(lambda state: jax.lax.scan(sweep, state, jax.random.split(jax.random.key(2), 200)))(state)
    mine = np.asarray(draws[100:])  # [sweeps, chains, N]
    f = np.asarray(mcmc.get_samples()["f"])[:, 0]
    from numpyro.diagnostics import effective_sample_size

    for power in (1, 2):
        theirs = f**power
        ess = effective_sample_size(theirs.reshape(4, -1, theirs.shape[-1]))
        by_chain = (mine**power).mean(axis=0)
        error = np.sqrt(theirs.var(axis=0) / ess + by_chain.var(axis=0) / len(by_chain))
        assert (ess > 1000).all()
        assert (np.abs(by_chain.mean(axis=0) - theirs.mean(axis=0)) < 5 * error).all()
