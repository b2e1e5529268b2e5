"""Cavities: the posterior without one site, point by point, and the objectives made of them (E4, E5)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double, problem, relu_features
from scipy.stats import multivariate_normal

from fewshot.inference.inner import cavi, cvi, exact, fit
from fewshot.inference.outer.hypergradients import sites, unroll
from fewshot.inference.outer.objectives import EmbeddedTask, Inner, cavity_evidence, elbo, evidence, leave_one_out
from fewshot.inference.predictive import log_expected_density, predict
from fewshot.models import KERNELS
from fewshot.models.expectations import Exact, GaussHermite
from fewshot.models.gaussian import BlockSites, GaussianPrior, JointMarginals, Query, Sites
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.process import LatentProcess

CLASSES, SUPPORT, KEY = 3, 3, jax.random.key(3)
LABELS = np.array([0, 1, 2, 0, 2, 1], np.int32)
THETA = np.array([np.log(4.0), 0.2, -0.5])
KINDS = {
    "diagonal": (Softmax(), partial(cvi, expectation=GaussHermite(4))),
    "block": (Softmax(), partial(cvi, expectation=GaussHermite(4), sites=BlockSites)),
    "star": (OneVsEach(), cavi),
}


def at_theta(theta):
    """Process and task at theta = (log scale, log length-scale, prior mean)."""
    x, y = jnp.asarray(relu_features(np.random.default_rng(4), LABELS, 6)), jnp.asarray(LABELS)
    hyper = dict(zip(("log_scale", "log_lengthscale", "mean"), theta, strict=True))
    return LatentProcess(KERNELS["rbf"](), hyper), EmbeddedTask(x[:SUPPORT], y[:SUPPORT], x[SUPPORT:], y[SUPPORT:])


def merged(theta=THETA):
    process, task = at_theta(theta)
    return process.prior(jnp.concatenate([task.support, task.query]), CLASSES)


def value_of(objective, likelihood, inference, theta=THETA, mode=sites, steps=20):
    process, task = at_theta(theta)
    return objective(KEY, Inner(inference, steps, mode, CLASSES), likelihood, process, task).value


@double
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.long, *[pytest.mark.slow] * (name == "block")]) for name in KINDS]
)
def test_a_cavity_is_the_posterior_without_the_site(kind):
    """And its integral with the site is the ratio of the two log Z."""
    likelihood, make = KINDS[kind]
    task, inference = problem(1, points=6), make(likelihood)
    held = inference.sites(jax.jit(lambda: fit(KEY, inference, task.prior, task.y, steps=4)[0])())
    cavities, log_sites = jax.jit(lambda: task.prior.given(held).marginals.without(held))()

    @jax.jit
    def left_out(n):
        left = held.masked(jnp.broadcast_to(jnp.arange(6) != n, task.prior.mean.shape))
        marginals = task.prior.given(left).marginals
        ratio = task.prior.log_normaliser(held) - task.prior.log_normaliser(left)
        return marginals.mean[:, n], marginals.covariance_blocks()[n], ratio

    for n in range(6):
        mean, block, ratio = left_out(n)
        np.testing.assert_allclose(cavities.mean[:, n], mean, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(cavities.covariance_blocks()[n], block, rtol=1e-7, atol=1e-8)
        assert float(log_sites[n]) == pytest.approx(float(ratio), abs=1e-8)
    assert isinstance(cavities, JointMarginals) == (kind != "diagonal")


@pytest.mark.long
@double
def test_leaving_one_out_of_label_regression_is_a_fit_without_it():
    likelihood, prior = LabelRegression(noise=0.3), merged()
    total, predictive = 0.0, jax.jit(lambda q, query: predict(KEY, likelihood, q, query))
    for n, label in enumerate(LABELS):
        kept = np.delete(np.arange(6), n)
        less = GaussianPrior(prior.mean[:, kept], prior.covariance[np.ix_(kept, kept)])
        shift, precision = likelihood.gaussian_sites(jnp.asarray(LABELS[kept]), CLASSES)
        query = Query(prior.mean[:, n : n + 1], prior.covariance[n : n + 1, kept], prior.covariance[n, n : n + 1])
        total += np.log(predictive(less.given(Sites(shift, precision)), query)[0, label])
    found = jax.jit(lambda: value_of(leave_one_out, likelihood, exact(likelihood)))()
    assert float(found) == pytest.approx(float(total), rel=1e-9)


@pytest.mark.long
@double
@pytest.mark.parametrize("make", [exact, partial(cvi, rho=1.0)])
def test_evidence_from_cavities_is_the_evidence_of_label_regression(make):
    """One step of cvi with rho = 1 ends at the exact sites."""
    likelihood, prior = LabelRegression(noise=0.3), merged()
    targets = 2 * np.eye(CLASSES)[LABELS].T - 1
    covariance = np.asarray(prior.covariance) + 0.3 * np.eye(6)
    expected = sum(multivariate_normal.logpdf(targets[c], prior.mean[c], covariance) for c in range(CLASSES))
    found = value_of(cavity_evidence, likelihood, make(likelihood), steps=1)
    assert float(found) == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
@double
@pytest.mark.parametrize("likelihood", [Softmax(), OneVsEach(), LogisticSoftmax(), LabelRegression(noise=1.0)])
def test_evidence_from_the_cavity_of_one_point_is_its_evidence_whatever_its_site(likelihood):
    """The cavity is the prior, and the site's own integral falls out."""
    prior = GaussianPrior(jnp.asarray([[0.3], [-0.2], [0.5]]), jnp.asarray([[2.0]]))
    held, y = Sites(jnp.asarray([[0.7], [-0.4], [0.1]]), jnp.asarray([[0.3], [0.2], [0.9]])), jnp.asarray([1])

    @jax.jit
    def evidence_from_the_cavity():
        cavities, log_site = prior.given(held).marginals.without(held)
        return prior.log_normaliser(held) + log_expected_density(KEY, likelihood, cavities, y)[0] - log_site[0]

    rng = np.random.default_rng(0)
    f = prior.mean + np.sqrt(2.0) * rng.normal(size=(CLASSES, 400_000))
    density = np.exp(likelihood.log_prob(jnp.full(400_000, 1), jnp.asarray(f)))
    sampled = not isinstance(likelihood, LabelRegression)  # ours takes 512 draws
    error = 5 * density.std() * (400_000**-0.5 + sampled * 512**-0.5)
    assert abs(np.exp(evidence_from_the_cavity()) - density.mean()) < error < 0.3 * density.mean()


@pytest.mark.long
@double
def test_evidence_from_cavities_is_nearer_the_evidence_than_the_bound():
    """Two points, by a sum over a grid of every f."""
    process = LatentProcess(KERNELS["rbf"](), {"log_scale": np.log(6.0), "log_lengthscale": 0.2})
    x, y = jnp.asarray([[0.0, 0.3], [0.5, 0.1]]), jnp.asarray([0, 1])
    task = EmbeddedTask(x[:1], y[:1], x[1:], y[1:])
    likelihood = Softmax(prediction_draws=8192)
    inner = Inner(cvi(likelihood, expectation=Exact()), 40, sites, 2)
    nodes, weights = np.polynomial.hermite_e.hermegauss(24)
    z = np.stack(np.meshgrid(*[nodes] * 4, indexing="ij")).reshape(2, 2, -1)
    root = np.linalg.cholesky(np.asarray(process.prior(x, 2).covariance))
    f = np.einsum("nm,cmk->cnk", root, z)
    density = np.prod([1 / (1 + np.exp(f[1 - c, n] - f[c, n])) for n, c in enumerate((0, 1))], axis=0)
    weight = np.prod(np.stack(np.meshgrid(*[weights] * 4, indexing="ij")), axis=0).ravel() / (2 * np.pi) ** 2
    expected = np.log(np.sum(weight * density))
    bound, found = (
        float(jax.jit(lambda of=objective: of(KEY, inner, likelihood, process, task).value)())
        for objective in (elbo, cavity_evidence)
    )
    print(f"log evidence {expected:.4f}: from cavities {found:.4f}, bound {bound:.4f}")
    assert bound < expected and bound < found and abs(found - expected) < 0.7 * (expected - bound)


@pytest.mark.long
@double
@pytest.mark.parametrize("objective", [cavity_evidence, leave_one_out])
@pytest.mark.parametrize("mode", [sites, pytest.param(unroll, marks=pytest.mark.slow)])
def test_gradients_are_differences(objective, mode):
    """With `unroll` of the value itself, with `sites` of the value at the sites of the first theta."""
    likelihood = Softmax()
    inference = cvi(likelihood, expectation=GaussHermite(4), rho=0.5)
    fixed, infos = fit(jax.random.split(KEY)[0], inference, merged(), jnp.asarray(LABELS), steps=4)
    if mode is sites:
        last = jax.tree.map(lambda leaf: leaf[-1], infos)
        inference = inference._replace(init=lambda *_: fixed, step=lambda *_: (fixed, last))

    value = jax.jit(lambda theta: value_of(objective, likelihood, inference, theta, mode, steps=4))
    slope = jax.grad(value)(jnp.asarray(THETA))
    step = 1e-4 * np.eye(3)
    expected = [(value(THETA + one) - value(THETA - one)) / 2e-4 for one in step]
    np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(slope[:2]).min() > 1e-3  # a common mean is nothing to softmax


@pytest.mark.long
@double
@pytest.mark.parametrize(
    "likelihood, make, steps",
    [
        pytest.param(LogisticSoftmax(), cavi, 2, marks=pytest.mark.slow),
        (Softmax(), partial(cvi, expectation=GaussHermite(4)), 1),
    ],
    ids=["cavi", "cvi"],
)
def test_stopping_the_gradient_at_the_posterior_is_that_of_the_evidence_at_fixed_sites(likelihood, make, steps):
    """(H8): what of the bound sees theta is then -KL(N(m, V), N(a, K)) alone, here with K inverted."""
    inference, y = make(likelihood), jnp.asarray(LABELS)

    @jax.jit
    def fitted():
        state, _ = fit(KEY, inference, merged(), y, steps=steps)
        q = merged().given(inference.sites(state))
        return q.mean, q.covariance(merged())

    mean, spread = fitted()

    def seen(theta):
        prior = merged(theta)
        inverse, left = jnp.linalg.inv(prior.covariance), mean - prior.mean
        quadratic = jnp.einsum("cn,nm,cm->", left, inverse, left) + jnp.einsum("nm,cmn->", inverse, spread)
        return -0.5 * (quadratic + CLASSES * jnp.linalg.slogdet(prior.covariance)[1])

    def slope(function):
        return jax.jit(jax.grad(function))(jnp.asarray(THETA))

    found = slope(lambda theta: value_of(evidence, likelihood, inference, theta, steps=steps))
    bound = slope(lambda theta: value_of(elbo, likelihood, inference, theta, steps=steps))
    np.testing.assert_allclose(found, slope(seen), rtol=1e-6, atol=1e-9)
    apart = np.abs(found - bound).max() / np.abs(bound).max()
    print(f"after {steps} steps the two differ by {apart:.1e} of the largest slope")
    assert apart < 1e-9 if make is cavi else apart > 1e-2  # q of cavi is the best one for its latents
