"""The sparse variational Student-t process: its bound, draws, limits, and the optimisers that raise it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.integrate
import scipy.stats
from jax.flatten_util import ravel_pytree
from problems import double

from fewshot.inference import sparse, student_t, student_t_scale
from fewshot.inference.student_t import Basis, SparseStudent
from fewshot.models.gaussian import GaussianPrior
from fewshot.models.inducing import InducingProcess, Weights
from fewshot.models.kernels import Matern52
from fewshot.models.student_t_fisher import DiagonalStudent, natural_gradient, natural_slopes

KERNEL = Matern52()


def problem(seed=0, points=16, count=5, **options):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(points, 2)))
    y = jnp.asarray(np.sin(2 * x[:, 0]) + 0.2 * rng.standard_t(3, size=points))
    student = SparseStudent(KERNEL, **options)
    q, model = student.initial(x[:count], noise=0.2, dof=4.0)
    q = DiagonalStudent(
        jnp.asarray(0.9), jnp.asarray(rng.normal(size=count)), jnp.asarray(rng.normal(-1.0, 0.5, size=count))
    )
    return student, q, model, x, y


def one_value(root, scale, dof, mean):
    """q and the basis of a single inducing variable."""
    q = DiagonalStudent(jnp.log(dof - 2), jnp.asarray([mean]), jnp.log(jnp.asarray([scale])))
    basis = Basis(jnp.ones((1, 1)), jnp.zeros(1), jnp.asarray([[root]]), jnp.asarray(-2 * np.log(root)))
    return q, basis


def density(u, dof, mean, scale):
    return scipy.stats.t(dof, mean, np.sqrt(scale * (dof - 2) / dof)).logpdf(u)


@pytest.mark.long
@pytest.mark.parametrize("dof, prior_dof", [(2.3, 5.0), (6.0, 2.5), (50.0, 8.0)])
@double
def test_the_kl_is_its_integral(dof, prior_dof):
    root, scale, mean = 0.8, 0.6, 1.3
    q, basis = one_value(root, scale, dof, mean)

    def integrand(u, ratio):
        own = density(u, dof, mean, scale)
        return np.exp(own) * (own - density(u, prior_dof, 0.0, root**-2) if ratio else own)

    def integral(ratio):  # in u = mean + sinh(t), for the tails
        return scipy.integrate.quad(
            lambda t: integrand(mean + np.sinh(t), ratio) * np.cosh(t), -25, 25, epsrel=1e-9, limit=400
        )[0]

    np.testing.assert_allclose(student_t.mean_log_density(q), integral(False), rtol=1e-7)
    keys = jax.random.split(jax.random.key(0), 200)
    found = np.asarray(jax.jit(jax.vmap(lambda key: student_t.kl(key, q, basis, prior_dof, 200)))(keys))
    assert abs(found.mean() - integral(True)) < 4 * found.std() / np.sqrt(200)
    assert found.std() * np.sqrt(200) < 2.0  # finite also where beta has no variance (nu~ < 4)


@pytest.mark.long
@double
def test_the_gradient_for_the_degrees_of_freedom_of_q_is_that_of_the_integral():
    root, scale, mean, prior_dof = 0.8, 0.6, 1.3, 3.0
    keys = jax.random.split(jax.random.key(1), 400)

    def average(log_excess):
        q, basis = one_value(root, scale, 2 + jnp.exp(log_excess), mean)
        return jax.vmap(lambda key: student_t.kl(key, q, basis, prior_dof, 100))(keys)

    def integral(log_excess):
        dof = 2 + np.exp(log_excess)

        def integrand(t):
            u = mean + np.sinh(t)
            own = density(u, dof, mean, scale)
            return np.exp(own) * (own - density(u, prior_dof, 0.0, root**-2)) * np.cosh(t)

        return scipy.integrate.quad(integrand, -25, 25, epsrel=1e-10, limit=400)[0]

    slopes = np.asarray(jax.jit(jax.jacfwd(average))(jnp.asarray(1.1)))
    expected = (integral(1.1 + 1e-4) - integral(1.1 - 1e-4)) / 2e-4
    assert abs(slopes.mean() - expected) < 4 * slopes.std() / np.sqrt(400)
    assert abs(expected) > 10 * slopes.std() / np.sqrt(400)


@pytest.mark.long
@pytest.mark.parametrize("whitened", [True, False])
@double
def test_many_degrees_of_freedom_give_the_gaussian_bound(whitened):
    student, q, model, x, y = problem(1, whitened=whitened)
    large = jnp.log(1e9)
    q, model = q._replace(log_excess=large), model._replace(log_excess=large)
    found = student_t.elbo(jax.random.key(0), student, q, model, x, y)
    process = InducingProcess(KERNEL, student.inducing_noise)
    prior = np.asarray(process.prior(model.process).covariance)
    cross = np.asarray(KERNEL.gram(model.process.hyper, x, model.process.inputs))
    gain = np.linalg.solve(prior, cross.T).T
    transform = np.linalg.cholesky(prior) if whitened else np.eye(len(prior))
    mean, covariance = transform @ q.mean, transform @ np.diag(q.scale) @ transform.T
    rest = 1 - np.sum(gain * cross, axis=1)
    variance = rest + np.sum(gain @ covariance * gain, axis=1)
    data = scipy.stats.norm(gain @ mean, np.sqrt(0.2)).logpdf(y).sum() - variance.sum() / 0.4
    ratio = np.linalg.solve(prior, covariance)
    kl = 0.5 * (np.trace(ratio) + mean @ np.linalg.solve(prior, mean) - 5 - np.linalg.slogdet(ratio)[1])
    np.testing.assert_allclose(found, data - kl, rtol=1e-6)


@pytest.mark.long
@double
def test_natural_steps_of_many_degrees_of_freedom_are_those_of_diagonal_sites():
    """d/d rho of (C2) at rho = 0 is -F^-1 times the gradient: the target (C1) is that of `inference.sparse`.

    A diagonal q = N(m, 1 / (1 + W)) is the prior N(0, I) of the whitened v times sites (h, W), h = (1 + W) m. Of the
    full target its diagonal is kept, and its shift less what the other values explain.
    """
    student, q, model, x, y = problem(7)
    large = jnp.log(1e9)
    q, model = q._replace(log_excess=large), model._replace(log_excess=large)
    key = jax.random.key(5)
    slopes = jax.jit(jax.grad(lambda at: -student_t.elbo(key, student, at, model, x, y, 3.0)))(q)
    step = natural_slopes(q, slopes)
    process = InducingProcess(KERNEL, student.inducing_noise)
    whitener = jnp.linalg.inv(jnp.linalg.cholesky(process.prior(model.process).covariance)).T
    weights = Weights(q.mean, jnp.diag(jnp.sqrt(q.scale)), -jnp.sum(q.log_scale))
    seen = process.view(model.process, whitener, x)
    full, _ = sparse.target_sites(weights, seen, y, sparse.normal_noise(model.noise), 3.0)
    shift, precision = whitener.T @ full.shift, whitener.T @ full.precision @ whitener
    target = sparse.DualSites(shift - (precision - jnp.diag(jnp.diag(precision))) @ q.mean, jnp.diag(precision))
    start = sparse.DualSites(q.mean / q.scale, 1 / q.scale - 1)

    def moved(rate):
        sites = sparse.natural_step(start, target, rate)
        return np.stack([sites.shift / (1 + sites.precision), -jnp.log1p(sites.precision)])

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(-step.mean, expected[0], rtol=1e-4)
    np.testing.assert_allclose(-step.log_scale, expected[1], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("whitened", [True, False])
@double
def test_marginals_are_those_of_draws_of_the_joint(whitened):
    student, q, model, x, y = problem(2, whitened=whitened)
    draws = 20_000
    mixture = jax.jit(lambda key: student_t.predictive_mixture(key, student, q, model, x, draws))(jax.random.key(0))
    found = student_t.predict(student, q, model, x)
    mean, error = mixture.mean.mean(0), mixture.mean.std(0) / np.sqrt(draws)
    assert (np.abs(mean - found.mean) < 5 * error).all()
    squares = mixture.variance + (mixture.mean - found.mean) ** 2 - model.noise
    assert (np.abs(squares.mean(0) - found.variance) < 5 * squares.std(0) / np.sqrt(draws)).all()
    fewer = jax.tree.map(lambda leaf: leaf[:300], mixture)
    density = scipy.stats.norm(fewer.mean, np.sqrt(fewer.variance)).pdf(y).mean(0)
    np.testing.assert_allclose(fewer.log_density(y), np.log(density), rtol=1e-9)


@pytest.mark.long
@double
def test_the_bound_is_the_same_in_both_bases_where_they_meet():
    """With one inducing point both bases hold the same q's: scaled by the prior's deviation."""
    student, q, model, x, y = problem(3, count=1, draws=20_000)
    plain = SparseStudent(KERNEL, whitened=False, draws=20_000)
    variance = 1 + student.inducing_noise
    scaled = q._replace(mean=q.mean * np.sqrt(variance), log_scale=q.log_scale + np.log(variance))
    bounds = [student_t.elbo(jax.random.key(0), one, at, model, x, y) for one, at in ((student, q), (plain, scaled))]
    np.testing.assert_allclose(bounds[0], bounds[1], rtol=1e-9)


@pytest.mark.long
@double
def test_gradients_are_those_of_finite_differences_and_batches_are_unbiased():
    student, q, model, x, y = problem(4)
    key = jax.random.key(2)
    flat, restore = ravel_pytree((q, model))

    @jax.jit
    def value_and_slopes(numbers, x, y, weight):
        return jax.value_and_grad(lambda n: student_t.elbo(key, student, *restore(n), x, y, weight))(numbers)

    _, slopes = value_and_slopes(flat, x, y, 1.0)
    for place in range(1, len(flat)):  # the first is nu~, whose draws are no smooth function of it
        change = 1e-5 * np.eye(len(flat))[place]
        above, below = (value_and_slopes(flat + sign * change, x, y, 1.0)[0] for sign in (1, -1))
        np.testing.assert_allclose(slopes[place], (above - below) / 2e-5, rtol=1e-5, atol=1e-6)
    batches = [value_and_slopes(flat, x[rows], y[rows], 4.0)[1] for rows in np.arange(16).reshape(4, 4)]
    np.testing.assert_allclose(np.mean(batches, axis=0), slopes, rtol=1e-8, atol=1e-8)


@pytest.mark.long
@double
def test_the_bound_stays_below_the_evidence_and_comes_close():
    student, q, model, x, y = problem(5, points=10, count=10, inducing_noise=1e-6, draws=8)
    prior = GaussianPrior(jnp.zeros((1, 10)), KERNEL.gram(model.process.hyper, x, x))
    evidence = student_t_scale.summed(prior, y, model.noise, model.dof).log_evidence
    method = student_t.Method(natural_gradient(0.1, 0.3), optax.set_to_zero())
    state, _ = student_t.run(jax.random.key(3), student, method, student_t.init(method, q, model), x, y, 10, 300)
    accurate = SparseStudent(KERNEL, inducing_noise=1e-6, draws=20_000)
    bound = student_t.elbo(jax.random.key(4), accurate, state.q, state.model, x, y)
    assert evidence - 1.0 < bound < evidence + 1e-3


@pytest.mark.long
@double
def test_batches_of_a_run_stand_for_all_points():
    """Where nothing moves, the mean of the bounds of batches is the bound of all."""
    student, q, model, x, y = problem(8)
    still = student_t.Method(optax.set_to_zero(), optax.set_to_zero())
    state = student_t.init(still, q, model)
    _, bounds = student_t.run(jax.random.key(0), student, still, state, x, y, 4, 400)
    _, whole = student_t.run(jax.random.key(1), student, still, state, x, y, 16, 400)
    error = np.hypot(np.std(bounds), np.std(whole)) / np.sqrt(400)
    assert abs(np.mean(bounds) - np.mean(whole)) < 4 * error
    assert abs(np.mean(whole)) > 20 * error  # a wrong weight of the batches would be seen


@double
def test_plain_methods_are_those_of_their_names():
    """Steps of a gradient 1 and then one of 0.1, by hand."""
    q = DiagonalStudent(jnp.asarray(1.0), jnp.zeros(2), jnp.zeros(2))
    rate = 0.1
    first, second = 0.9 * 0.1 + 0.1 * 0.1, 0.999e-3 + 1e-3 * 0.01  # moments after both
    adam = first / (1 - 0.9**2) / np.sqrt(second / (1 - 0.999**2))
    amsgrad = first / (1 - 0.9**2) / np.sqrt(max(1.0, second / (1 - 0.999**2)))
    expected = {"sgd": 0.1, "adam": adam, "amsgrad": amsgrad, "adagrad": 0.1 / np.sqrt(0.1 + 1 + 0.01)}
    for name, size in expected.items():
        method = student_t.methods(rate)[name].q
        memory = method.init(q)
        for slope in (1.0, 0.1):
            step, memory = method.update(jax.tree.map(lambda leaf, s=slope: jnp.full_like(leaf, s), q), memory, q)
        np.testing.assert_allclose(step.mean, -rate * size, rtol=1e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["natural", "adam", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "amsgrad", "adagrad"))]
)
def test_every_method_raises_the_bound_in_single_precision(name):
    student, q, model, x, y = problem(6)
    q, model, x, y = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (q, model, x, y))
    method = student_t.methods(0.005 if name == "sgd" else 0.1)[name]
    state, bounds = student_t.run(jax.random.key(0), student, method, student_t.init(method, q, model), x, y, 8, 80)
    assert np.isfinite(bounds).all() and bounds.dtype == jnp.float32
    assert np.mean(bounds[-20:]) > np.mean(bounds[:5]) + 5.0
    jax.tree.map(lambda old, new: new.dtype == old.dtype or pytest.fail("a dtype changed"), (q, model), state[:2])
