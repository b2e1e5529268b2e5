"""Classification through inducing points: Z = X is `cvi`, Gaussian noise is Titsias, more points are a better bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot import FewShotClassifier, GaussianProcessHead
from fewshot.inference import cvi, many_labels
from fewshot.inference.inner.base import Code, Mask, fit_to_tolerance
from fewshot.inference.many_labels import ManyLabels, Rows, Sites
from fewshot.models import inducing
from fewshot.models.expectations import Exact, MonteCarlo
from fewshot.models.gaussian import Marginals
from fewshot.models.kernels import RBF
from fewshot.models.likelihoods import LogisticSoftmax, Normal, OneVsEach, Softmax
from fewshot.models.process import LatentProcess

KEY = jax.random.key(0)
WAYS = 3


def process(scale=5.0):
    hyper = {"log_scale": jnp.log(scale), "log_lengthscale": jnp.asarray(0.0), "mean": jnp.asarray(0.3)}
    return LatentProcess(RBF(), hyper)


def task(points=40, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, WAYS, points)
    return jnp.asarray(rng.normal(size=(points, 4)) + np.eye(WAYS, 4)[y]), jnp.asarray(y)


def fitted(solver, inputs, likelihood, x, y, mask=None):
    solve = jax.jit(lambda key, *given: solver.fit_at(key, *given, likelihood, x, y, WAYS, mask))
    return solve(KEY, inputs, process())


@pytest.mark.long
@pytest.mark.parametrize("likelihood, batches", [pytest.param(Softmax(), 0, marks=pytest.mark.slow), (OneVsEach(), 20)])
@double
def test_all_points_as_inducing_points_end_where_cvi_ends(likelihood, batches):
    """The same key gives both the same nodes, so that both raise the same sampled bound."""
    x, y = task(20)
    prior, rule = process().prior(x, WAYS), MonteCarlo(256)
    algorithm = cvi(likelihood, expectation=rule)
    state, info, _ = fit_to_tolerance(KEY, algorithm, prior, y, tolerance=1e-6, max_steps=300)
    expected = algorithm.posterior(state, prior)
    solver = ManyLabels(batch=10, batch_steps=batches, steps=200, tolerance=1e-5, expectation=rule)
    found = fitted(solver, x, likelihood, x, y)
    assert found.code == Code.OK and info.clipped == 0
    np.testing.assert_allclose(found.posterior.bound, info.elbo, atol=1e-7)
    marginals = found.posterior.predict(process().query(x, x, WAYS))
    np.testing.assert_allclose(marginals.mean, expected.mean, atol=1e-3)
    np.testing.assert_allclose(marginals.variance, expected.variance, atol=1e-4)


@pytest.mark.long
@double
def test_more_inducing_points_never_loosen_the_bound():
    x, y = task(40)
    solver = ManyLabels(batch_steps=0, steps=200, tolerance=1e-5, expectation=MonteCarlo(64))
    bounds = [float(fitted(solver, x[:count], Softmax(), x, y).posterior.bound) for count in (2, 8, 40)]
    assert np.all(np.diff(bounds) > -1e-6)
    assert bounds[-1] - bounds[0] > 1


@pytest.mark.long
@double
def test_gaussian_noise_is_the_bound_of_titsias_after_one_step():
    x, _ = task(30)
    y = jnp.sin(x[:, 0])
    solver = ManyLabels(batch_steps=0, steps=2, expectation=Exact())
    found = jax.jit(lambda key: solver.fit_at(key, x[:7], process(), Normal(0.2), x, y, 1))(KEY)
    whitener = inducing.whitening(RBF(), process().hyper, x[:7])
    seen = inducing.view(RBF(), process().hyper, x, x[:7], whitener, 0.3)
    rows = Rows(seen, y, jnp.ones(30))
    model = many_labels._Model(Normal(0.2), None, None)
    start = Sites.zero(1, seen)

    @jax.jit
    def one_step(start):
        sites = start.moved(1.0, model.sums(start.weights(), rows, clip=False).target)
        return sites, model.sums(sites.weights(), rows, clip=False).data - sites.weights().kl()

    sites, value = one_step(start)
    np.testing.assert_allclose(value, inducing.titsias_bound(seen, y, 0.2), rtol=1e-10)
    np.testing.assert_allclose(found.posterior.bound, value, rtol=1e-6)
    exact = inducing.posterior(seen, y, 0.2).predict(seen)
    ours = Marginals(*sites.weights().predict(seen))
    np.testing.assert_allclose((ours.mean[0], ours.variance[0]), exact, rtol=1e-8)


@pytest.mark.long
@double
def test_a_step_is_along_the_natural_gradient_and_half_the_square_of_its_length_is_the_divergence():
    """(C2) in natural parameters is the gradient in mean parameters; <d, d> / 2 is KL to second order (P13)."""
    x, y = task(12)
    whitener = inducing.whitening(RBF(), process().hyper, x[:4])
    seen = inducing.view(RBF(), process().hyper, x, x[:4], whitener, 0.3)
    nodes = MonteCarlo(32).points(KEY, WAYS, jnp.float64)
    model, rows = many_labels._Model(Softmax(), nodes, None), Rows(seen, y, jnp.ones(12))
    rng = np.random.default_rng(1)
    half = rng.normal(size=(WAYS, 4, 4))
    sites = Sites(jnp.asarray(rng.normal(size=(WAYS, 4))), jnp.asarray(half @ half.swapaxes(1, 2)))

    def bound(mean, second):
        spread = second - mean[:, :, None] * mean[:, None]
        phi = seen.features
        variance = seen.rest + jnp.einsum("nm,cmk,nk->cn", phi, spread, phi)
        data = Softmax().expected_log_prob(y, Marginals(0.3 + mean @ phi.T, variance), nodes).sum()
        kl = 0.5 * (jnp.trace(second, axis1=1, axis2=2).sum() - jnp.linalg.slogdet(spread)[1].sum() - 4 * WAYS)
        return data - kl

    weights = sites.weights()
    spread = jnp.swapaxes(weights.inverse, 1, 2) @ weights.inverse
    moments = weights.mean, spread + weights.mean[:, :, None] * weights.mean[:, None]
    slopes = jax.jit(jax.grad(bound, (0, 1)))(*moments)
    found = jax.jit(lambda weights: model.sums(weights, rows, clip=False))(weights)
    way = found.target.less(sites)
    np.testing.assert_allclose(bound(*moments), found.data - weights.kl(), rtol=1e-10)
    np.testing.assert_allclose(way.shift, slopes[0], atol=1e-8)
    np.testing.assert_allclose(way.precision, -(slopes[1] + jnp.swapaxes(slopes[1], 1, 2)), atol=1e-8)
    small = 1e-4
    near = sites.moved(small, found.target).weights()
    divergence = 0.0
    for a, r, b, s in zip(weights.mean, weights.inverse, near.mean, near.inverse, strict=True):
        p, q = r.T @ r, jnp.linalg.inv(s.T @ s)  # covariance of the one, precision of the other
        divergence += 0.5 * (jnp.trace(q @ p) - 4 + (a - b) @ q @ (a - b) - jnp.linalg.slogdet(q @ p)[1])
    np.testing.assert_allclose(divergence / small**2, 0.5 * way.inner(way, weights), rtol=1e-2)


@pytest.mark.long
@double
def test_batches_are_unbiased_and_blocks_are_the_whole(monkeypatch):
    x, y = task(23)
    whitener = inducing.whitening(RBF(), process().hyper, x[:4])
    seen = inducing.view(RBF(), process().hyper, x, x[:4], whitener, 0.3)
    mask = Mask(jnp.arange(23) < 20, jnp.array([True, True, True]))
    nodes = MonteCarlo(8).points(KEY, WAYS, jnp.float64)
    model, rows = many_labels._Model(Softmax(), nodes, mask), Rows(seen, y, mask.points.astype(float))
    weights = Sites.zero(WAYS, seen).weights()
    sums = jax.jit(lambda rows: model.sums(weights, rows, clip=True))
    whole = sums(rows)
    real = Rows(jax.tree.map(lambda leaf: leaf[:20], seen), y[:20], jnp.ones(20))
    alone = many_labels._Model(Softmax(), nodes, None).sums(weights, real, clip=True)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-10), whole, alone)
    each = [sums(rows.at(jnp.array([n]), 23.0)) for n in range(23)]
    mean = jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), axis=0), *each)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-10), mean, whole)
    monkeypatch.setattr(many_labels, "BLOCK", 5)
    parts = rows.blocks()
    assert parts.y.shape == (5, 5)
    blocked = [sums(jax.tree.map(lambda leaf, n=n: leaf[n], parts)) for n in range(5)]
    total = jax.tree.map(lambda *leaves: sum(leaves), *blocked)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-10), total, whole)


@pytest.mark.long
@double
def test_steps_on_batches_stand_for_all_rows_at_the_rate_of_p12():
    """Of rows that are all alike every batch tells the same; Gaussian noise asks for the same sites at every q."""
    x = jnp.tile(jnp.array([[0.3, -0.2]]), (30, 1))
    whitener = inducing.whitening(RBF(), process().hyper, x[:1])
    seen = inducing.view(RBF(), process().hyper, x, x[:1], whitener, 0.3)
    rows = Rows(seen, jnp.full(30, 0.7), jnp.ones(30))
    model, start = many_labels._Model(Normal(0.2), None, None), Sites.zero(1, seen)
    whole = model.sums(start.weights(), rows, clip=True).target
    np.testing.assert_allclose(whole.precision[0], 30 * jnp.outer(seen.features[0], seen.features[0]) / 0.2, rtol=1e-10)
    found = jax.jit(lambda key: model.by_batches(key, rows, start, 7, 3))(KEY)
    left = np.prod([1 - (5 / (5 + t)) ** 0.75 for t in (1, 2, 3)])
    for ours, theirs in zip(found, whole, strict=True):
        np.testing.assert_allclose(ours, (1 - left) * theirs, rtol=1e-10)


def test_inducing_points_stand_at_rows_that_are_real():
    x = jnp.arange(30.0)[:, None]
    mask = Mask(jnp.arange(30) % 3 == 0, jnp.ones(WAYS, bool))
    chosen = ManyLabels(inducing=10).choose(KEY, x, mask)
    assert sorted(np.asarray(chosen)[:, 0]) == list(range(0, 30, 3))


@pytest.mark.long
@double
def test_a_step_that_would_lower_the_bound_is_refused(monkeypatch):
    """A first step of eight times the way goes too far: it is not taken, and half as long a one is tried."""
    x, y = task(12)
    whitener = inducing.whitening(RBF(), process().hyper, x[:4])
    seen = inducing.view(RBF(), process().hyper, x, x[:4], whitener, 0.3)
    nodes = MonteCarlo(16).points(KEY, WAYS, jnp.float64)
    model, rows, start = many_labels._Model(Softmax(), nodes, None), Rows(seen, y, jnp.ones(12)), Sites.zero(WAYS, seen)
    limit = jnp.asarray(1e-6)
    usual = jax.jit(lambda: model.by_all(start, rows, 100, limit))()
    monkeypatch.setattr(many_labels, "FIRST_STEP", 8.0)
    none, one, all_ = (jax.jit(model.by_all, static_argnums=2)(start, rows, steps, limit) for steps in (0, 1, 100))
    far = start.moved(8.0, model.sums(start.weights(), rows, clip=False).target)
    there = model.sums(far.weights(), rows, clip=False).data - far.weights().kl()
    assert there < none.bound - 1
    assert one.bound == none.bound and one.length == 4 and (one.sites.shift == 0).all()
    np.testing.assert_allclose(all_.bound, usual.bound, atol=1e-9)


@pytest.mark.slow
@double
def test_a_likelihood_that_is_not_log_concave_ends_above_cvi_that_keeps_precisions_positive():
    x, y = task(10)
    likelihood, rule = LogisticSoftmax(0.5), MonteCarlo(16)
    prior = process().prior(x, WAYS)
    algorithm = cvi(likelihood, expectation=rule)
    _, info, _ = fit_to_tolerance(KEY, algorithm, prior, y, tolerance=1e-4, max_steps=100)
    solver = ManyLabels(batch_steps=10, batch=6, steps=100, tolerance=3e-4, expectation=rule)
    found = fitted(solver, x, likelihood, x, y)
    assert found.code == Code.OK
    assert info.clipped > 0
    assert found.posterior.bound > info.elbo + 1e-4


def test_numbers_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="expected a whole number of at least 1 as inducing, got 0"):
        ManyLabels(inducing=0)
    with pytest.raises(ValueError, match="expected a positive number as tolerance, got 0"):
        ManyLabels(tolerance=0)


@pytest.mark.long
def test_a_classifier_sees_many_examples_through_few_and_comes_back_from_a_file(tmp_path):
    x, y = (np.asarray(part, np.float32) for part in task(48))
    head = GaussianProcessHead(kernel="rbf", scale=5.0, inducing=24)
    seen = FewShotClassifier(head, temperature=1.0, draws=64).fit(x, y.astype(int))
    assert seen.code_ == Code.OK
    posterior = seen._task.state.posterior
    assert seen._task.state.x.shape[0] == 24 and posterior.weights.mean.shape[1] == 24
    draws = posterior.draws(KEY, posterior.prior, 2000)
    np.testing.assert_allclose(draws.mean((0, 1)), posterior.marginals.mean, atol=0.2)
    np.testing.assert_allclose(draws.var((0, 1)), posterior.marginals.variance, atol=0.2, rtol=0.2)
    whole = FewShotClassifier(GaussianProcessHead(kernel="rbf", scale=5.0), temperature=1.0, draws=64).fit(
        x, y.astype(int)
    )
    ours, theirs = seen.predict_proba(x), whole.predict_proba(x)
    assert np.abs(ours - theirs).mean() < 0.1
    seen.save(tmp_path / "classifier")
    again = FewShotClassifier.load(tmp_path / "classifier")
    assert again.learner.inducing == 24
    np.testing.assert_allclose(again.predict_proba(x[:3]), ours[:3], atol=1e-5)


def test_an_inference_that_is_not_its_own_is_refused():
    with pytest.raises(ValueError, match="expected cvi or exact as inference with inducing points, got gibbs"):
        GaussianProcessHead(likelihood="one-vs-each", inference="gibbs", inducing=10).build(3)
    with pytest.raises(ValueError, match="expected a whole number of at least 1 as inducing, got 0"):
        GaussianProcessHead(inducing=0).build(3)
