"""Precisions that a likelihood without a concave logarithm wants negative: what `cvi` steps to (C8), and stalls."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double, problem
from scipy.optimize import minimize, nnls
from test_cvi_grid import task

from fewshot.inference.inner import Code, cvi, fit, fit_to_tolerance
from fewshot.inference.inner.cone import nearest_precisions, project_onto_cone, squared_correlations
from fewshot.models import KERNELS, LogisticSoftmax, Softmax
from fewshot.models.gaussian import GaussianPrior, Sites

TOLERANCE = 1e-5
LOGISTIC = LogisticSoftmax()


def cone(seed, classes=2, points=7, duplicates=False):
    """M of random covariances, precisions b of both signs and w >= 0, both in units of the variances."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(classes, points, points // 2 if duplicates else points))
    if duplicates:
        root[:, 1] = root[:, 0]
    v = root @ np.swapaxes(root, 1, 2)
    scale = np.sqrt(np.diagonal(v, axis1=1, axis2=2))
    metric = (v / scale[:, :, None] / scale[:, None]) ** 2
    b, w = rng.normal(size=(classes, points)), np.maximum(rng.normal(size=(classes, points)), 0.0)
    return tuple(map(jnp.asarray, (metric, b, w, np.ones((classes, points), bool))))


@double
@pytest.mark.parametrize("duplicates", [False, True], ids=["regular", "duplicates"])
def test_the_projection_is_that_of_non_negative_least_squares(duplicates):
    """|R (x - b)|^2 + e |x - w|^2 over x >= 0, M = R^T R."""
    near = np.finfo(float).eps ** 0.5
    for seed in range(5):
        metric, b, w, real = map(np.asarray, cone(seed, duplicates=duplicates))
        found = jax.jit(project_onto_cone)(metric, b, w, real)
        for k in range(len(b)):
            values, vectors = np.linalg.eigh(metric[k])
            root = np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T
            stacked = np.concatenate([root, near**0.5 * np.eye(len(root))])
            expected, _ = nnls(stacked, np.concatenate([root @ b[k], near**0.5 * w[k]]))
            np.testing.assert_allclose(found[k], expected, atol=1e-4 if duplicates else 1e-6)
        assert (found == 0).any() and (b[np.asarray(found) > 0] < 0).sum() >= 0


@pytest.mark.long
@double
def test_the_projection_has_the_derivative_of_the_face_it_lies_on():
    metric, b, w, real = map(jnp.asarray, cone(1))
    rng = np.random.default_rng(0)
    turn = rng.normal(size=metric.shape)
    change = [0.1 * metric * (turn + np.swapaxes(turn, 1, 2)), rng.normal(size=b.shape), rng.normal(size=b.shape)]

    def along(t):
        moved = [one + t * move for one, move in zip((metric, b, w), change, strict=True)]
        return project_onto_cone(*moved, real)

    _, slope = jax.jvp(along, (0.0,), (1.0,))
    np.testing.assert_allclose(slope, (along(1e-5) - along(-1e-5)) / 2e-5, atol=1e-6)
    weights = jnp.asarray(rng.normal(size=b.shape))
    back = jax.grad(lambda b: jnp.sum(weights * project_onto_cone(metric, b, w, real)))(b)
    forward = jax.jvp(lambda b: project_onto_cone(metric, b, w, real), (b,), (change[1],))[1]
    np.testing.assert_allclose(jnp.sum(back * change[1]), jnp.sum(weights * forward), rtol=1e-6)


@pytest.mark.long
@double
def test_precisions_are_as_wanted_where_none_is_negative_and_masked_ones_take_no_part():
    metric, b, w, real = cone(2)
    variance = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2.0, b.shape))
    nearest = partial(nearest_precisions, lambda: metric, variance)
    np.testing.assert_array_equal(nearest(jnp.abs(b), w, real), jnp.abs(b))
    fewer = real.at[:, 3:].set(False)
    small = nearest_precisions(lambda: metric[:, :3, :3], variance[:, :3], b[:, :3], w[:, :3], real[:, :3])
    assert (b[:, :3] < 0).any() and (b[:, 3:] < 0).any()
    np.testing.assert_allclose(nearest(jnp.where(fewer, b, 0.0), w, fewer)[:, :3], small, atol=1e-9)


@pytest.mark.long
@double
def test_the_metric_is_that_of_the_posterior_covariance():
    one = problem(0, points=5)
    sites = Sites(one.prior.mean, jnp.abs(one.prior.mean))
    v = np.asarray(one.prior.given(sites).covariance(one.prior))
    expected = v**2 / (np.diagonal(v, axis1=1, axis2=2)[:, :, None] * np.diagonal(v, axis1=1, axis2=2)[:, None])
    np.testing.assert_allclose(squared_correlations(one.prior, one.prior.given(sites)), expected, rtol=1e-9)


def slope_towards(target, sites, prior, y, points):
    """Derivative of the bound along the way from sites to their target."""

    def bound(sites):
        q = prior.given(sites)
        return jnp.sum(LOGISTIC.expected_log_prob(y, q.marginals, points)) - q.kl

    return jax.jvp(bound, (sites,), (jax.tree.map(jnp.subtract, target, sites),))[1]


@pytest.mark.long
@double
def test_every_target_is_uphill_where_setting_precisions_to_0_one_by_one_is_not():
    """From the fixed point of the targets set to 0 one by one, where the step down used to be refused for ever."""
    one, kernel = problem(2, points=8, scale=20.0, mean=False), cvi(LOGISTIC)
    plain = cvi(LOGISTIC, rho=0.5)  # a number is used without a safeguard

    @jax.jit
    def slopes():
        state, info = fit(jax.random.key(0), plain, one.prior, one.y, steps=6)

        def slope(state):
            return slope_towards(state.target, state.sites, one.prior, one.y, state.points)

        def down(sites, _):
            q = one.prior.given(sites)

            def data(marginals):
                return jnp.sum(LOGISTIC.expected_log_prob(one.y, marginals, state.points))

            g = jax.grad(data)(q.marginals)
            w = jnp.maximum(-2 * g.variance, 0.0)
            target = Sites(g.mean + w * q.mean, w)
            moved = jax.tree.map(lambda a, b: a + 0.3 * (b - a), sites, target)
            return moved, slope_towards(target, sites, one.prior, one.y, state.points)

        _, one_by_one = jax.lax.scan(down, state.sites, length=60)
        settled, last, _ = fit_to_tolerance(jax.random.key(0), kernel, one.prior, one.y, tolerance=1e-6, max_steps=200)
        return slope(state), info.clipped[-1], one_by_one, slope(settled), last

    on_the_way, clipped, one_by_one, settled, last = slopes()
    assert clipped > 0 and on_the_way > 0
    assert one_by_one.min() < -1e-6
    assert last.code == Code.OK and last.clipped > 0 and abs(settled) < 1e-9


@pytest.mark.long
@double
def test_no_sites_with_non_negative_precisions_are_better_than_those_it_settles_at():
    """L-BFGS from there, over the same nodes; and precisions are held at 0."""
    one, kernel = problem(2, points=8, scale=20.0, mean=False), cvi(LOGISTIC)
    settle = jax.jit(
        lambda: fit_to_tolerance(jax.random.key(0), kernel, one.prior, one.y, tolerance=1e-7, max_steps=200)
    )
    state, info, _ = settle()
    assert info.code == Code.OK and (state.sites.precision == 0).any()
    shape = state.sites.shift.shape

    @jax.jit
    @jax.value_and_grad
    def bound(flat):
        q = one.prior.given(Sites(*flat.reshape(2, *shape)))
        return jnp.sum(LOGISTIC.expected_log_prob(one.y, q.marginals, state.points)) - q.kl

    def negative(flat):
        value, slope = bound(jnp.asarray(flat))
        return -float(value), -np.asarray(slope)

    start = np.concatenate([np.ravel(leaf) for leaf in state.sites])
    # Not 0: at W = 0 the derivative of W^1/2 is set to 0, and a line search that ends there does not move again.
    start[start.size // 2 :] = np.maximum(start[start.size // 2 :], 1e-9)
    limits = [(None, None)] * (start.size // 2) + [(1e-9, None)] * (start.size // 2)
    best = minimize(negative, start, jac=True, method="L-BFGS-B", bounds=limits, options={"ftol": 1e-15, "gtol": 1e-9})
    assert -best.fun - float(info.elbo) < 1e-7


@partial(jax.jit, static_argnums=(0, 1))
def settle_all(way, likelihood, keys, covariances, ys):
    def one(key, prior_covariance, y):
        prior = GaussianPrior(jnp.zeros((way, len(y))), prior_covariance)
        _, info, steps = fit_to_tolerance(key, cvi(likelihood), prior, y, tolerance=TOLERANCE, max_steps=300)
        return info, steps

    return jax.vmap(one)(keys, covariances, ys)


def settled(likelihood, shapes, tasks_per_shape):
    """Codes of tasks of all kernels at output scales 0.1 to 100, prior mean 0, and how many hold a precision at 0."""
    codes, held = [], 0
    for number, (way, shot) in enumerate(shapes):
        rng = np.random.default_rng(number)
        kernels = [KERNELS[name]() for name in sorted(KERNELS)]
        drawn = [task(rng, way, shot, kernels[i % len(kernels)]) for i in range(tasks_per_shape)]
        covariances, ys = (jnp.asarray(np.stack(column)) for column in zip(*drawn, strict=True))
        keys = jax.random.split(jax.random.key(number), tasks_per_shape)
        info, steps = settle_all(way, likelihood, keys, covariances.astype(float), ys)
        codes += [Code(int(code)).name for code in info.code]
        held += int((info.clipped > 0).sum())
        print(f"{way}-way {shot}-shot: {steps.mean():.0f} steps on average, {steps.max()} at most")
    return codes, held


@pytest.mark.long
@double
def test_logistic_softmax_settles_where_precisions_are_clipped():
    codes, held = settled(LOGISTIC, [(3, 2)], 14)
    assert set(codes) == {"OK"} and held > 3


@pytest.mark.slow
@double
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_logistic_softmax_never_stalls_on_a_thousand_tasks(temperature):
    shapes = [(2, 1), (2, 5), (3, 2), (5, 1), (5, 3), (8, 1)]
    codes, held = settled(LogisticSoftmax(temperature), shapes, 84)
    print(f"{len(codes)} tasks, {held} with precisions at 0")
    assert set(codes) == {"OK"}


class Backwards(Softmax):
    """The slope of its expected log likelihood has the wrong sign: every step lowers the bound."""

    def expected_log_prob(self, y, marginals, points=None, classes=None):
        value = super().expected_log_prob(y, marginals, points, classes)
        return 2 * jax.lax.stop_gradient(value) - value


def test_a_stall_is_reported_and_ends_the_search():
    one, kernel = problem(0, points=4), cvi(Backwards())
    state, info, steps = jax.jit(lambda: fit_to_tolerance(jax.random.key(0), kernel, one.prior, one.y))()
    assert info.code == Code.STALLED
    assert steps == 5  # of lengths 0.2, 0.1, 0.05, 0.025, 0.02
    assert jnp.all(state.sites.shift == 0)


@pytest.mark.long
def test_a_refused_step_reports_the_clips_of_the_state_that_is_kept():
    one, kernel = problem(2, points=8, scale=20.0, mean=False), cvi(LOGISTIC)

    @jax.jit
    def both():
        first = kernel.init(jax.random.key(0), one.prior, one.y, None)._replace(rho=jnp.float32(1.0))
        _, taken = kernel.step(jax.random.key(0), first, one.prior, one.y, None)
        refused, info = kernel.step(jax.random.key(0), first._replace(elbo=jnp.float32(1e3)), one.prior, one.y, None)
        return first.clipped, taken.clipped, refused.clipped, info.clipped

    first, taken, refused, reported = both()
    assert first != taken
    assert reported == refused == first
