"""The curvature of CVI's target: expected instead of differentiated, and along the common shift of block sites."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import FixedPoints, double, problem

from fewshot.inference.inner import Code, Mask, cvi, fit
from fewshot.inference.inner.cavi import _residual as cavi_residual
from fewshot.inference.inner.cvi import Curvature, _residual, _secant_length
from fewshot.models.expectations import GaussHermite, MonteCarlo, expect
from fewshot.models.gaussian import (
    BlockPosterior,
    BlockSites,
    DiagonalPosterior,
    GaussianPrior,
    JointMarginals,
    Marginals,
    Sites,
)
from fewshot.models.likelihoods import LogisticSoftmax, OneVsEach, Softmax

CLASSES = 3


def first_target(task, points, **settings):
    """Target sites (C1) at the prior."""
    kernel = cvi(Softmax(), expectation=FixedPoints(points), **settings)
    return jax.jit(lambda: kernel.init(jax.random.key(0), task.prior, task.y).target)()


@pytest.mark.long
@double
def test_the_expected_curvature_is_that_of_the_likelihood_over_the_same_nodes():
    task = problem(0, classes=CLASSES, points=4)
    points = MonteCarlo(32).points(jax.random.key(0), CLASSES, jnp.float64)
    diagonal = first_target(task, points, curvature=Curvature.EXPECTED)
    spread = np.sqrt(np.diagonal(task.prior.covariance))
    p = np.asarray(jax.nn.softmax(task.prior.mean + spread * np.asarray(points.nodes)[:, :, None], axis=1))
    np.testing.assert_allclose(diagonal.precision, (p - p**2).mean(0), rtol=1e-12)
    np.testing.assert_allclose(
        diagonal.shift, (np.eye(CLASSES)[:, task.y] - p).mean(0) + diagonal.precision * task.prior.mean, rtol=1e-9
    )
    many = GaussHermite(40).points(jax.random.key(0), CLASSES, jnp.float64)
    small = problem(0, classes=CLASSES, points=4, scale=1.0)
    for kind in (Sites, BlockSites):  # over all of f the two are the same (Price)
        found = [
            first_target(small, many, sites=kind, curvature=curvature).precision
            for curvature in (Curvature.EXPECTED, Curvature.GRADIENT)
        ]
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)


@pytest.mark.long
@double
def test_the_inner_product_of_sites_is_the_covariance_of_their_logarithms():
    """(C4): Cov(h.u - u.L u / 2, h'.u - u.L' u / 2) for u ~ N(0, Sigma), by a rule that is exact for degree 6."""
    rng, classes, points = np.random.default_rng(0), 2, 3
    root = rng.normal(size=(points, classes, classes))
    sigma = jnp.asarray(root @ np.swapaxes(root, 1, 2))
    rule = GaussHermite(4).points(jax.random.key(0), classes, jnp.float64)
    shifts, weights = jnp.asarray(rng.normal(size=(2, 2, classes, points)))
    blocks = jnp.asarray(rng.normal(size=(2, points, classes, classes)))
    blocks = blocks + jnp.swapaxes(blocks, 2, 3)
    coupled = BlockPosterior(jnp.zeros((classes, points)), sigma, None, None, None)
    alone = Marginals(coupled.mean, coupled.variance)
    pairs = [[BlockSites(shifts[i], blocks[i]) for i in (0, 1)], [Sites(shifts[i], weights[i]) for i in (0, 1)]]
    for q, made in zip((coupled.marginals, alone), pairs, strict=True):

        def logs(u, made=made):
            return jnp.stack([jnp.sum(one.shift * u - 0.5 * u * one.times(u), axis=0) for one in made])

        mean = expect(logs, q, rule)
        covariance = expect(lambda u, logs=logs, mean=mean: jnp.prod(logs(u) - mean, axis=0), q, rule)
        np.testing.assert_allclose(made[0].inner(made[1], q), jnp.sum(covariance), rtol=1e-10)


def test_the_length_of_a_step_is_the_secant_within_its_limits():
    """rho <d, d> / <d, d - d'>: at most 3 rho and the limit, at least 0.02; the limit where curvature is negative."""
    one = jnp.ones((2, 3))
    d, q = Sites(one, one), Marginals(one, one)

    def length(rho, share, d=d, q=q):
        return float(_secant_length(jnp.asarray(rho), d, jax.tree.map(lambda leaf: share * leaf, d), q))

    shares = {2.0: 0.25, 0.5: 1.0, 0.25: 1.5, -1.0: 1.5, 1e4: 0.02}
    for share, expected in shares.items():
        assert length(0.5, share) == pytest.approx(expected)
    blocks = jnp.broadcast_to(jnp.eye(2), (3, 2, 2))
    coupled = BlockSites(one, blocks), JointMarginals(one, blocks)
    assert length(4.0, 0.1) == 8.0 and length(0.5, 0.1, *coupled) == 1.0
    nothing = Sites(0 * one, 0 * one)
    assert _secant_length(jnp.asarray(0.5), nothing, nothing, q) == 1.0
    beyond = d.moved(jnp.asarray(2.0), jax.tree.map(jnp.negative, d))  # a precision never becomes negative
    assert (beyond.shift == -1).all() and (beyond.precision == 0).all()


@pytest.mark.long
def test_the_residual_sees_both_halves_of_the_fixed_point():
    """(C3): alpha against the slope, and W against W^ in units of 1 / v; either alone calls unsettled sites settled."""
    zero, variance = jnp.zeros((2, 3)), jnp.full((2, 3), 4.0)
    slope = zero.at[1, 2].set(10.0)
    at_rest, spread = Marginals(zero, variance), variance.T[:, :, None] * jnp.eye(2)
    coupled = BlockPosterior(zero, spread, slope, None, None)
    moved = zero.at[0, 1].set(0.3)  # where the slope is 0

    def of_cvi(alpha, precision):
        posterior = DiagonalPosterior(zero, variance, alpha, None, None, None)
        return _residual(posterior, Sites(zero, precision), slope, Sites(zero, zero))

    for of_diagonal in (
        of_cvi,
        lambda alpha, precision: cavi_residual(Sites(alpha, precision), Sites(slope, zero), at_rest),
    ):
        assert of_diagonal(slope, zero) == 0
        assert of_diagonal(slope, moved) == pytest.approx(0.3 * 4)
        assert of_diagonal(slope + moved, zero) == pytest.approx(0.3)
        assert of_diagonal(1.5 * slope, zero) == pytest.approx(0.5)  # relative to a slope above 1
    blocks = jnp.zeros((3, 2, 2))
    target = BlockSites(zero, blocks)
    between = BlockSites(zero, blocks.at[1, 0, 1].set(0.3).at[1, 1, 0].set(0.3))
    assert _residual(coupled, between, slope, target) == pytest.approx(0.3 * 4)
    assert _residual(coupled._replace(alpha=slope + moved), target, slope, target) == pytest.approx(0.3)


def check_nothing_is_clipped(likelihood, classes, points, scales, steps=12, last=12, **settings):
    """In the last steps W^ is positive semi-definite, and it is 0 along the common shift, over few nodes."""
    kernel = cvi(likelihood, sites=BlockSites, **settings)
    run = jax.jit(lambda prior, y: fit(jax.random.key(1), kernel, prior, y, steps=steps))
    for seed, scale in enumerate(scales):
        task = problem(seed, classes=classes, points=points, scale=scale, mean=False)
        state, info = run(task.prior, task.y)
        assert info.clipped[-last:].max() == 0 and (info.code == Code.OK).all()
        blocks = np.asarray(state.target.precision)
        assert np.abs(blocks.sum(1)).max() < 1e-4 * np.abs(blocks).max()


@pytest.mark.long
def test_nothing_is_clipped_along_the_common_shift_of_block_sites():
    check_nothing_is_clipped(Softmax(), 4, 6, (1.0, 30.0))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [Softmax(), OneVsEach()], ids=["softmax", "one-vs-each"])
@pytest.mark.parametrize("curvature", list(Curvature))
def test_nothing_is_clipped_along_the_common_shift_of_block_sites_on_more_tasks(likelihood, curvature):
    """At scale 100 the gradient's first steps clip along other directions: nodes far apart sample log p badly there."""
    check_nothing_is_clipped(likelihood, 5, 25, (1.0, 3.0, 10.0, 30.0, 10.0), curvature=curvature)
    last = {"steps": 40, "last": 10} if curvature is Curvature.GRADIENT else {}
    check_nothing_is_clipped(likelihood, 5, 25, (100.0,), curvature=curvature, **last)


@pytest.mark.slow
@double
@pytest.mark.parametrize("likelihood", [Softmax(), OneVsEach(), LogisticSoftmax()], ids=lambda one: type(one).__name__)
def test_block_sites_of_a_padded_and_masked_task_are_those_of_the_unpadded_one(likelihood):
    """One more point and one more class, the junk class last."""
    task, nodes = problem(0, points=5), MonteCarlo(64).points(jax.random.key(0), CLASSES + 1, jnp.float64)
    mean = jnp.zeros((CLASSES + 1, 6)).at[:CLASSES, :5].set(task.prior.mean).at[CLASSES].set(7.0)
    covariance = jnp.eye(6).at[:5, :5].set(task.prior.covariance)
    mask = Mask(jnp.arange(6) < 5, jnp.arange(CLASSES + 1) < CLASSES)
    found = []
    for prior, y, points, masked in (
        (task.prior, task.y, nodes._replace(nodes=nodes.nodes[:, :CLASSES]), None),
        (GaussianPrior(mean, covariance), jnp.append(task.y, CLASSES), nodes, mask),
    ):
        kernel = cvi(likelihood, sites=BlockSites, expectation=FixedPoints(points))
        state, info = fit(jax.random.key(0), kernel, prior, y, masked, steps=6)
        found.append((state.sites.shift[:CLASSES, :5], state.sites.precision[:5, :CLASSES, :CLASSES], info.elbo))
    for left, right in zip(*found, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@double
def test_the_expected_curvature_leaves_the_sampled_bound_below_its_best():
    """With mean(p - p^2) of the same draws the fixed point is not stationary, only near."""
    task = problem(1, scale=30.0)
    points = MonteCarlo(64).points(jax.random.key(0), CLASSES, jnp.float64)
    ends = {}
    for curvature in (Curvature.GRADIENT, Curvature.EXPECTED):
        kernel = cvi(Softmax(), curvature=curvature, expectation=FixedPoints(points))
        _, info = jax.jit(lambda kernel=kernel: fit(jax.random.key(0), kernel, task.prior, task.y, steps=200))()
        ends[curvature] = info.elbo[-1]
        assert info.residual[-1] < 1e-3
    print(ends)
    assert 0 <= ends[Curvature.GRADIENT] - ends[Curvature.EXPECTED] < 0.5


@pytest.mark.long
@double
def test_no_step_of_block_sites_is_longer_than_the_full_one():
    """The secant rule asks for more here; beyond 1 a site is no mean of two semi-definite ones."""
    task, kernel = problem(0, points=5, scale=1000.0), cvi(Softmax(), sites=BlockSites)
    step = jax.jit(lambda key, state: kernel.step(key, state, task.prior, task.y, None)[0])
    state, lengths = kernel.init(jax.random.key(0), task.prior, task.y), []
    for key in jax.random.split(jax.random.key(1), 30):
        state = step(key, state)
        lengths.append(float(state.rho))
    assert max(lengths) == 1.0
