"""Block sites against brute-force algebra on all N C latents, the routes against each other, masks and draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double, problem

from fewshot.models.expectations import GaussHermite, MonteCarlo, expect
from fewshot.models.gaussian import (
    BlockSites,
    GaussianPrior,
    JointMarginals,
    Marginals,
    SimplexSites,
    Sites,
    StarSites,
    factors,
    prior_root,
)
from fewshot.models.gaussian.blocks import covariance_root
from fewshot.models.gaussian.dense import DENSE_LIMIT, positive_part
from fewshot.models.gaussian.factors import WRITTEN_OUT, semidefinite_cholesky

CLASSES, POINTS, QUERIES = 3, 9, 5
KINDS = ("diagonal", "block", "star", "simplex")
each_kind = pytest.mark.parametrize("kind", KINDS)


def some_sites(kind, y, seed=0, size=1.0, classes=CLASSES):
    """Sites of one kind at labels y; one point of the star has no rays, one class of the simplex no weight."""
    rng = np.random.default_rng(seed)
    points = len(y)
    shift = jnp.asarray(rng.normal(size=(classes, points)))
    if kind == "diagonal":
        return Sites(shift, jnp.asarray(size * rng.gamma(1.0, size=(classes, points))))
    if kind == "block":
        root = rng.normal(size=(points, classes, classes - 1))  # of rank C - 1
        return BlockSites(shift, jnp.asarray(size * root @ np.swapaxes(root, 1, 2)))
    if kind == "star":
        centre = (np.arange(classes)[:, None] == np.asarray(y)).astype(float)
        rays = size * rng.gamma(1.0, size=(classes, points)) * (1 - centre)
        rays[:, 1] = 0.0
        shift = shift - shift.mean(0)  # as that of one-vs-each, whose density knows differences of classes only
        return StarSites(shift, jnp.asarray(rays), jnp.asarray(centre))
    p = rng.dirichlet(np.ones(classes), size=points).T
    p[:, 2] = np.eye(classes)[0]
    return SimplexSites(shift, jnp.asarray(p), jnp.asarray(np.sqrt(size) * rng.uniform(0.2, 1.0, (classes, points))))


def blocks_of(sites):
    if isinstance(sites, Sites):
        return np.einsum("cn,cd->ncd", sites.precision, np.eye(CLASSES))
    return np.asarray(sites.blocks())


def dense(prior, sites):
    """Prior and posterior covariance of all latents [CN, CN]; K must be regular."""
    c, n = prior.mean.shape
    full = np.kron(np.eye(c), np.asarray(prior.covariance))
    big = np.zeros((c, n, c, n))
    for point, block in enumerate(blocks_of(sites)):
        big[:, point, :, point] = block
    return full, np.linalg.inv(np.linalg.inv(full) + big.reshape(c * n, c * n))


def brute(prior, sites, query):
    """Mean, covariance, KL, log Z and query marginals by inverting (CN, CN) matrices; K must be regular."""
    a, h = np.ravel(prior.mean), np.ravel(sites.shift)
    c, n = prior.mean.shape
    full, covariance = dense(prior, sites)
    mean = covariance @ (np.linalg.solve(full, a) + h)
    step = mean - a
    inverse = np.linalg.inv(full)
    kl = 0.5 * (
        np.trace(inverse @ covariance)
        - c * n
        + step @ inverse @ step
        + np.linalg.slogdet(full)[1]
        - np.linalg.slogdet(covariance)[1]
    )
    # log of the integral of N(a, K) exp(h f - f L f / 2)
    log_z = 0.5 * (np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(full)[1])
    log_z += 0.5 * mean @ np.linalg.solve(covariance, mean) - 0.5 * a @ inverse @ a
    cross = np.kron(np.eye(c), np.asarray(query.cross))
    gain = cross @ inverse
    seen = np.kron(np.eye(c), np.diag(query.variance)) - cross @ gain.T + gain @ covariance @ gain.T
    q = query.cross.shape[0]
    at_query = JointMarginals(
        np.asarray(query.mean) + (gain @ step).reshape(c, q),
        np.einsum("cqdq->qcd", seen.reshape(c, q, c, q)),
    )
    marginals = JointMarginals(mean.reshape(c, n), np.einsum("cndn->ncd", covariance.reshape(c, n, c, n)))
    return marginals, kl, log_z, at_query


@jax.jit
def algebra(prior, sites, query):
    posterior = prior.given(sites)
    predicted = posterior.predict(query)
    return posterior, predicted, prior.log_normaliser(sites), sites.deviation(prior)


@double
@each_kind
@pytest.mark.parametrize("size", [1.0, 50.0])
def test_the_algebra_is_that_of_the_whole_matrix(kind, size):
    task = problem(1, scale=6.0)
    sites = some_sites(kind, task.y, size=size)
    marginals, kl, log_z, at_query = brute(task.prior, sites, task.query)
    posterior, predicted, value, deviation = algebra(task.prior, sites, task.query)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-8)  # noqa: E731
    close(posterior.mean, marginals.mean)
    close(posterior.marginals.covariance_blocks(), marginals.covariance)
    close(posterior.kl, kl)
    close(value, log_z)
    close(predicted.mean, at_query.mean)
    close(predicted.covariance_blocks(), at_query.covariance)
    close(deviation, posterior.mean - task.prior.mean)
    close(posterior.alpha, sites.shift - sites.times(posterior.mean))  # G4


@pytest.mark.long
@pytest.mark.parametrize("kind", ["star", "simplex"])
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_fast_routes_in_single_precision_are_the_dense_one(kind, scale):
    """N > D, so that K is singular; the dense route in float64 is the reference."""
    with jax.enable_x64(True):
        task = problem(2, points=24, features=6, scale=scale, kernel="cosine")
        sites = some_sites(kind, task.y, size=0.3)
        reference = algebra(task.prior, BlockSites(sites.shift, sites.blocks()), task.query)
        reference = jax.device_get((reference[0].marginals, reference[0].kl, *reference[1:]))
        inputs = jax.device_get((task.prior, sites, task.query))
    posterior, *rest = algebra(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs))
    for value, expected in zip(
        jax.tree.leaves((posterior.marginals, posterior.kl, *rest)), jax.tree.leaves(reference), strict=True
    ):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, expected, rtol=2e-3, atol=3e-4 * (1 + np.abs(expected).max()))


@double
@each_kind
def test_gradients_agree_with_the_dense_route(kind):
    task = problem(3)
    sites = some_sites(kind, task.y)
    dense = BlockSites(sites.shift, jnp.asarray(blocks_of(sites)))

    @jax.jit
    @jax.grad
    def slope(covariance, sites):
        prior = task.prior._replace(covariance=covariance)
        posterior = prior.given(sites)
        predicted = posterior.predict(task.query)
        values = posterior.mean.sum() + posterior.kl + prior.log_normaliser(sites) + predicted.mean.sum()
        return values + jnp.sum(predicted.covariance_blocks() ** 2)

    def symmetric(matrix):
        return matrix + matrix.T

    np.testing.assert_allclose(
        symmetric(slope(task.prior.covariance, sites)), symmetric(slope(task.prior.covariance, dense)), atol=1e-8
    )


@jax.jit
@functools.partial(jax.grad, argnums=(0, 1))
def slopes(prior, sites):
    return prior.log_normaliser(sites)


posterior_of = jax.jit(GaussianPrior.given)


def dense_star(sites):
    return BlockSites(sites.shift, sites.blocks())


@pytest.mark.long
@double
@pytest.mark.parametrize("shared", [True, False])
def test_derivatives_of_log_z_in_closed_form(shared):
    """(O13) in K, a, h and the rays against the dense route; along one direction against a finite difference."""
    task = problem(6, scale=8.0)
    sites, prior = some_sites("star", task.y), task.prior
    if not shared:
        factors = jnp.asarray([0.5, 1.0, 2.0])[:, None, None]
        prior = prior._replace(covariance=factors * prior.covariance)
    found = slopes(prior, sites)
    expected = jax.jit(jax.grad(lambda *task: task[0].log_normaliser(dense_star(task[1])), argnums=(0, 1)))(
        prior, sites
    )
    symmetric = [(one.covariance + jnp.swapaxes(one.covariance, -1, -2)) for one in (found[0], expected[0])]
    np.testing.assert_allclose(*symmetric, atol=1e-9)
    np.testing.assert_allclose(found[0].mean, expected[0].mean, atol=1e-9)
    np.testing.assert_allclose(found[1].shift, expected[1].shift, atol=1e-9)
    known = posterior_of(prior, sites).differences
    others = np.asarray(sites.centre) == 0  # the ray to the own class is no parameter
    squares = known.mean**2 + known.variance
    np.testing.assert_allclose(found[1].rays[others], -0.5 * squares[others], atol=1e-9)
    others &= np.asarray(sites.rays) > 0  # the dense route has no derivative at L = 0
    np.testing.assert_allclose(found[1].rays[others], expected[1].rays[others], atol=1e-9)
    move = lambda step: prior._replace(covariance=prior.covariance * (1 + step), mean=prior.mean * (1 - step))  # noqa: E731
    up, down = (move(step).log_normaliser(sites) for step in (1e-4, -1e-4))
    along = jnp.sum(found[0].covariance * prior.covariance) - jnp.sum(found[0].mean * prior.mean)
    np.testing.assert_allclose(along, (up - down) / 2e-4, rtol=1e-6)


@pytest.mark.long
def test_derivatives_of_log_z_in_single_precision_and_batches():
    """At output scale 100 with a singular K, for two chains at once, against float64."""
    with jax.enable_x64(True):
        task = problem(2, points=24, features=6, scale=100.0, kernel="cosine")
        chains = [some_sites("star", task.y, seed=seed, size=0.3) for seed in (0, 1)]
        sites = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chains)
        batched = jax.vmap(lambda prior, one: slopes(prior, one)[0].covariance, in_axes=(None, 0))
        expected = np.stack([slopes(task.prior, one)[0].covariance for one in chains])
        np.testing.assert_allclose(batched(task.prior, sites), expected, atol=1e-9)
        inputs = jax.device_get((task.prior, sites))
    found = batched(*jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())


@double
def test_differences_from_the_own_class():
    """Their marginals are those of the whole covariance, and KL(q || p) that of the dense route."""
    task = problem(4)
    real = np.ones((CLASSES, POINTS), bool)
    real[:, 3] = False
    real[2] = False
    y = np.where(np.asarray(task.y) == 2, 0, task.y)
    sites = some_sites("star", y).masked(jnp.asarray(real))
    posterior, *_ = algebra(task.prior, sites, task.query)
    blocks, mean = np.asarray(posterior.covariance), np.asarray(posterior.mean)
    points = np.arange(POINTS)
    own = blocks[points, y, y]
    variance = own + np.diagonal(blocks, axis1=1, axis2=2).T - 2 * blocks[points, :, y].T
    np.testing.assert_allclose(posterior.differences.variance, variance, atol=1e-9)
    np.testing.assert_allclose(posterior.differences.mean, mean - mean[y, points], atol=1e-12)
    np.testing.assert_allclose(posterior.kl, algebra(task.prior, dense_star(sites), task.query)[0].kl, atol=1e-9)


@double
@each_kind
def test_masked_points_and_classes_say_nothing(kind):
    """The posterior with masked sites is the posterior of the real points and classes, and the prior elsewhere."""
    task = problem(4)
    real = np.ones((CLASSES, POINTS), bool)
    real[:, [3, 5]] = False
    real[2] = False
    y = np.where(np.asarray(task.y) == 2, 0, task.y)
    sites = some_sites(kind, y).masked(jnp.asarray(real))
    prior = task.prior._replace(mean=jnp.asarray(np.where(real, task.prior.mean, -3.0)))
    posterior, predicted, value, _ = algebra(prior, sites, task.query)
    np.testing.assert_allclose(posterior.mean[2], prior.mean[2])
    blocks = np.asarray(posterior.marginals.covariance_blocks())
    np.testing.assert_allclose(blocks[:, 2, :2], 0.0, atol=1e-12)
    np.testing.assert_allclose(predicted.covariance_blocks()[:, 2, 2], task.query.variance)
    kept = [n for n in range(POINTS) if n not in (3, 5)]
    small = GaussianPrior(prior.mean[:2][:, np.array(kept)], prior.covariance[np.ix_(kept, kept)])
    big = BlockSites(sites.shift[:2][:, np.array(kept)], jnp.asarray(blocks_of(sites))[np.array(kept)][:, :2, :2])
    query = task.query._replace(mean=task.query.mean[:2], cross=task.query.cross[:, np.array(kept)])
    reference, at_query, log_z, _ = algebra(small, big, query)
    np.testing.assert_allclose(posterior.mean[:2][:, np.array(kept)], reference.mean, atol=1e-9)
    np.testing.assert_allclose(posterior.kl, reference.kl, atol=1e-9)
    np.testing.assert_allclose(value, log_z, atol=1e-9)
    np.testing.assert_allclose(predicted.covariance_blocks()[:, :2, :2], at_query.covariance, atol=1e-9)


@double
@each_kind
def test_draws_have_the_moments_of_the_posterior(kind):
    task, count = problem(5, scale=3.0), 20_000
    sites = some_sites(kind, task.y)
    prior = task.prior._replace(root=prior_root(task.prior).factor)
    draws = jax.jit(jax.vmap(lambda key: prior.draw(key, sites)))(jax.random.split(jax.random.key(0), count))
    posterior, *_ = algebra(task.prior, sites, task.query)
    centred = np.asarray(draws - posterior.mean)
    assert (np.abs(centred.mean(0)) < 5 * centred.std(0) / np.sqrt(count)).all()
    products = np.einsum("mcn,mdn->mncd", centred, centred)
    error = products.std(0) / np.sqrt(count)
    assert (np.abs(products.mean(0) - posterior.marginals.covariance_blocks()) < 5 * error).all()
    noise = jax.vmap(sites.noise)(jax.random.split(jax.random.key(1), count))
    squares = np.einsum("mcn,mdn->mncd", noise, noise)
    assert (np.abs(squares.mean(0) - blocks_of(sites)) <= 5 * squares.std(0) / np.sqrt(count)).all()


@double
def test_the_root_of_the_covariance_of_all_latents():
    task = problem(5, scale=3.0)
    sites = some_sites("star", task.y)
    posterior, *_ = algebra(task.prior, sites, task.query)
    root = jax.jit(covariance_root)(posterior, task.prior)
    np.testing.assert_allclose(root @ root.T, dense(task.prior, sites)[1], atol=1e-9)


@double
def test_differences_are_those_from_the_first_class_that_exists():
    """(C6): D Sigma D^T and D m with D = I - 1 e_r^T, 0 at r and at classes that do not exist."""
    rng = np.random.default_rng(2)
    factor, mean = rng.normal(size=(2, 4, 4)), jnp.asarray(rng.normal(size=(4, 2)))
    whole = JointMarginals(mean, jnp.asarray(factor @ np.swapaxes(factor, 1, 2)))
    for real, first in ((None, 0), (np.array([False, True, True, False]), 1)):
        found = whole.differences(None if real is None else jnp.asarray(real))
        matrix = np.eye(4) - np.outer(np.ones(4), np.eye(4)[first])
        matrix[~(np.ones(4, bool) if real is None else real)] = 0.0
        np.testing.assert_allclose(found.mean, matrix @ mean, atol=1e-14)
        np.testing.assert_allclose(found.covariance, matrix @ np.asarray(whole.covariance) @ matrix.T, atol=1e-13)


@double
def test_a_class_of_probability_zero_has_no_gradient_and_leaves_the_others_theirs():
    """As one that is masked, or far below the others in single precision."""
    task, rng = problem(5), np.random.default_rng(3)
    f, direction = jnp.asarray(rng.normal(size=(2, CLASSES, POINTS)))
    real = jnp.arange(CLASSES) != 1

    @jax.jit
    @jax.value_and_grad
    def log_z(f):
        p = jax.nn.softmax(jnp.where(real[:, None], f, -jnp.inf), axis=0)
        return task.prior.log_normaliser(SimplexSites(jnp.zeros_like(f), p, jnp.ones_like(f)))

    _, slope = log_z(f)
    change = (log_z(f + 1e-5 * direction)[0] - log_z(f - 1e-5 * direction)[0]) / 2e-5
    np.testing.assert_array_equal(slope[1], 0.0)
    np.testing.assert_allclose(jnp.sum(slope * direction), change, rtol=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("classes", [4, WRITTEN_OUT + 1])
@double
def test_semidefinite_cholesky_of_any_rank(classes):
    rng = np.random.default_rng(0)
    slope_of_squares = jax.jit(jax.grad(lambda value: jnp.sum(semidefinite_cholesky(value) ** 2)))
    for rank in range(classes + 1):
        factor = rng.normal(size=(6, classes, rank))
        blocks = jnp.asarray(factor @ np.swapaxes(factor, 1, 2))
        root = jax.jit(semidefinite_cholesky)(blocks)
        np.testing.assert_allclose(root @ np.swapaxes(root, 1, 2), blocks, atol=1e-7)
        np.testing.assert_array_equal(np.triu(root, 1), 0.0)
        assert np.isfinite(slope_of_squares(blocks)).all()
    nothing = np.diag(np.where(np.arange(classes) == 1, 1e-17, 1.0))[None]  # one pivot is 0 to rounding
    np.testing.assert_array_equal(semidefinite_cholesky(jnp.asarray(nothing)), nothing.round())
    slope = jax.grad(lambda value: jnp.sum(semidefinite_cholesky(value)))(jnp.asarray(nothing))
    assert slope[0, 1, 1] == 0


@pytest.mark.long
@double
def test_a_semidefinite_cholesky_of_many_columns_is_a_loop_of_the_same_values(monkeypatch):
    """And its program does not grow with them."""

    def root(blocks):
        return semidefinite_cholesky(blocks)  # anew: what was traced is kept by the function

    factor = np.random.default_rng(0).normal(size=(3, WRITTEN_OUT + 4, WRITTEN_OUT + 4))
    factor[:, 2] = 0.0  # a class that does not exist
    blocks = jnp.asarray(factor @ np.swapaxes(factor, 1, 2))
    weights = np.random.default_rng(1).normal(size=blocks.shape)
    loop = jax.value_and_grad(lambda value: jnp.sum(weights * root(value)))(blocks)
    monkeypatch.setattr(factors, "WRITTEN_OUT", blocks.shape[1])
    written_out = jax.value_and_grad(lambda value: jnp.sum(weights * root(value)))(blocks)
    for one, other in zip(loop, written_out, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    monkeypatch.undo()
    sizes = [len(str(jax.make_jaxpr(lambda value: root(value))(np.ones((1, count, count))))) for count in (20, 200)]
    assert sizes[1] < 1.1 * sizes[0]


@double
def test_the_positive_part_drops_negative_eigenvalues_and_counts_them():
    """Not what is negative by rounding alone; derivatives pass unclipped."""
    rng = np.random.default_rng(4)
    vectors, values = np.linalg.qr(rng.normal(size=(2, 3, 3)))[0], np.array([[2.0, -1.0, 0.5], [1.0, -1e-16, 3.0]])
    blocks, expected = (np.einsum("nci,ni,ndi->ncd", vectors, part, vectors) for part in (values, values.clip(0)))
    change = jnp.asarray(rng.normal(size=blocks.shape))
    kept, moved, count = jax.jvp(positive_part, (jnp.asarray(blocks),), (change,), has_aux=True)
    np.testing.assert_allclose(kept, expected, atol=1e-14)
    np.testing.assert_array_equal(moved, change)
    assert count == 1


@pytest.mark.long
@double
def test_expectations_over_coupled_classes():
    rng = np.random.default_rng(1)
    factor = rng.normal(size=(4, CLASSES, CLASSES))
    marginals = JointMarginals(
        jnp.asarray(rng.normal(size=(CLASSES, 4))), jnp.asarray(factor @ np.swapaxes(factor, 1, 2))
    )
    points = GaussHermite(8).points(jax.random.key(0), CLASSES, jnp.float64)
    mean = expect(lambda f: f, marginals, points)
    products = expect(lambda f: jnp.einsum("cn,dn->ncd", f, f), marginals, points)
    np.testing.assert_allclose(mean, marginals.mean, atol=1e-12)
    outer = np.einsum("cn,dn->ncd", marginals.mean, marginals.mean)
    np.testing.assert_allclose(products - outer, marginals.covariance, atol=1e-11)
    diagonal = Marginals(marginals.mean, marginals.variance)
    same = JointMarginals(marginals.mean, diagonal.covariance_blocks())
    draws = MonteCarlo(16).points(jax.random.key(0), CLASSES, jnp.float64)
    np.testing.assert_allclose(expect(jnp.exp, same, draws), expect(jnp.exp, diagonal, draws), rtol=1e-12)


def test_dense_sites_beyond_the_limit_are_refused():
    points = DENSE_LIMIT // CLASSES + 1
    prior = GaussianPrior(jnp.zeros((CLASSES, points)), jnp.zeros((points, points)))
    sites = BlockSites(prior.mean, jnp.zeros((points, CLASSES, CLASSES)))
    with pytest.raises(ValueError, match="4,000"):
        jax.eval_shape(GaussianPrior.given, prior, sites)
