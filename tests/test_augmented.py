"""Conformance of the augmented likelihoods, of CAVI's bound, and CDKT's two theorems."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double, problem
from scipy.integrate import quad
from scipy.special import expit, softmax

from fewshot.inference.inner import cavi, fit
from fewshot.models import LIKELIHOODS
from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import LogisticSoftmax, OneVsEach, logistic_softmax
from fewshot.models.likelihoods.base import AugmentedLikelihood

CLASSES, POINTS = 3, 6
Y = np.array([0, 1, 2, 2, 1, 0], np.int32)
REAL = np.array([True, False, True])
KEY = jax.random.key(0)
AUGMENTED = {
    "logistic-softmax": LogisticSoftmax(temperature=0.5),
    "one-vs-each": OneVsEach(),
}
each_likelihood = pytest.mark.parametrize("likelihood", AUGMENTED.values(), ids=AUGMENTED)


def latents(seed=0, spread=1.5):
    return jnp.asarray(spread * np.random.default_rng(seed).normal(size=(CLASSES, POINTS)))


def marginals(seed=0):
    rng = np.random.default_rng(seed)
    return Marginals(latents(seed), jnp.asarray(rng.uniform(0.05, 2.0, size=(CLASSES, POINTS))))


@pytest.mark.long
@pytest.mark.parametrize("logit", [-84.0, -100.0])
def test_counts_beyond_float32_end_as_a_failure(logit):
    """Where every logit is that low the rate is some e^-logit: the draw ends, and its sites say that it failed."""
    likelihood, y, f = LogisticSoftmax(), jnp.asarray(Y), jnp.full((CLASSES, POINTS), logit, jnp.float32)
    sites = jax.jit(lambda: likelihood.sites(y, likelihood.aux_conditional(KEY, y, f)))()
    assert not np.isfinite(sites.precision).any()


def test_every_augmented_likelihood_is_tested_here():
    registered = {type(make()) for make in LIKELIHOODS.values() if isinstance(make(), AugmentedLikelihood)}
    assert registered == {type(likelihood) for likelihood in AUGMENTED.values()}


@jax.jit
def densities(key, likelihood, y, f, other):
    """At latents aux drawn given another f (any aux will do): log p(y, aux | f), log p(aux | y, f), log p(y | f)."""
    aux = likelihood.aux_conditional(key, y, other)
    return likelihood.log_joint(y, aux, f), likelihood.log_conditional(y, aux, f), likelihood.log_prob(y, f)


@pytest.mark.long
@double
@each_likelihood
def test_joint_over_conditional_of_the_latents_is_the_likelihood(likelihood):
    """L2 and L3: log p(y, aux | f) - log p(aux | y, f) = log p(y | f) for every aux and every f."""
    for seed in range(4):
        joint, conditional, marginal = densities(
            jax.random.key(seed), likelihood, jnp.asarray(Y), latents(seed), latents(seed + 10)
        )
        np.testing.assert_allclose(joint - conditional, marginal, atol=1e-6)


@pytest.mark.slow
@double
@each_likelihood
def test_sites_are_the_joint_as_a_function_of_f(likelihood):
    """log p(y, aux | f) - log p(y, aux | f') = log t(f) - log t(f') with the sites t of aux."""
    y, f, g = jnp.asarray(Y), latents(0), latents(1)

    @jax.jit
    def both():
        aux = likelihood.aux_conditional(jax.random.key(0), y, f)
        sites = likelihood.sites(y, aux)
        logs = [jnp.sum(value * (sites.shift - 0.5 * sites.times(value)), axis=0) for value in (f, g)]
        return logs[0] - logs[1], likelihood.log_joint(y, aux, f) - likelihood.log_joint(y, aux, g)

    np.testing.assert_allclose(*both(), atol=1e-8)


@pytest.mark.slow
@double
@each_likelihood
def test_draws_of_the_latents_have_the_moments_of_their_sites(likelihood):
    """The mean over aux of the slope of log t at f is the slope of log p(y | f) there (Fisher's identity)."""
    y, f, count = jnp.asarray(Y), latents(2, spread=1.0), 40_000

    def slope(key):
        sites = likelihood.sites(y, likelihood.aux_conditional(key, y, f))
        return sites.shift - sites.times(f)

    slopes = np.asarray(jax.jit(jax.vmap(slope))(jax.random.split(jax.random.key(1), count)))
    expected = jax.grad(lambda value: jnp.sum(likelihood.log_prob(y, value)))(f)
    error = slopes.std(0) / np.sqrt(count)
    assert (np.abs(slopes.mean(0) - expected) <= 5 * error + 1e-12).all()


@double
def test_draws_of_the_latents_know_the_temperature_and_the_classes_that_exist(monkeypatch):
    """They depend on f / tau alone (LS7), and their rate on the sum over the classes that exist (LS5)."""
    monkeypatch.setattr(logistic_softmax, "sample_polya_gamma", lambda key, b, z: b + 100 * z)  # what it is asked for
    draw = jax.jit(lambda likelihood, f, classes: likelihood.aux_conditional(KEY, y, f, classes))
    y, f, real = jnp.asarray(np.where(REAL[Y], Y, 0)), latents(2).at[1].set(9.0), jnp.asarray(REAL)
    masked = draw(LogisticSoftmax(), f, real)
    for plain, sharp in zip(masked, draw(LogisticSoftmax(0.5), f / 2, real), strict=True):
        np.testing.assert_array_equal(sharp, plain)
    np.testing.assert_allclose(masked.omega, masked.counts + np.eye(CLASSES)[:, y] + 100 * f, rtol=1e-12)
    assert (masked.counts[1] == 0).all() and masked.counts.max() > 0
    among = draw(LogisticSoftmax(), f, jnp.ones(CLASSES, bool))
    s = expit(f)
    np.testing.assert_allclose(masked.rate * s[REAL].sum(0), among.rate * s.sum(0), rtol=1e-12)


@partial(jax.jit, static_argnames="count")
def updated(likelihood, y, q, classes=None, count=400):
    """q(aux) after repeated updates, and the bound after each, [count, N]."""

    def update(aux, _):
        aux = likelihood.aux_posterior(y, q, aux, classes)
        return aux, likelihood.augmented_bound(y, q, aux, classes)

    first = likelihood.aux_posterior(y, q, None, classes)
    aux, later = jax.lax.scan(update, first, length=count - 1)
    return aux, jnp.concatenate([likelihood.augmented_bound(y, q, first, classes)[None], later])


@double
@each_likelihood
@pytest.mark.parametrize("masked", [False, True])
def test_the_augmented_bound_is_below_and_meets_it_at_a_point(likelihood, masked):
    """L5. Over repeated updates of q(aux) the bound rises; at zero variance the optimum is still an inequality."""
    classes = jnp.asarray(REAL) if masked else None
    y = jnp.asarray(np.where(REAL[Y], Y, 0) if masked else Y)
    expected = jax.jit(
        lambda q: (likelihood.expected_log_prob(y, q, None, classes), likelihood.log_prob(y, q.mean, classes))
    )
    for seed in range(3):
        q = marginals(seed)
        exact, at_mean = expected(q)
        _, path = updated(likelihood, y, q, classes)
        assert (np.diff(path, axis=0) >= -1e-10).all() and (path <= exact + 1e-9).all()
        _, at_point = updated(likelihood, y, q._replace(variance=jnp.zeros_like(q.variance)), classes)
        gap = at_mean - at_point[0]
        assert (gap >= -1e-10).all()
        if isinstance(likelihood, OneVsEach):  # one layer of latents: exact at a point mass
            np.testing.assert_allclose(gap, 0.0, atol=1e-9)


@double
@each_likelihood
def test_the_optimal_latents_make_the_bound_stationary(likelihood):
    """The expected sites are the slope and curvature of the bound in the mean and variance of f."""
    y, q = jnp.asarray(Y), marginals(4)
    aux, _ = updated(likelihood, y, q)

    def bound(aux, q):
        return jnp.sum(likelihood.augmented_bound(y, q, aux))

    slope, (by_mean, by_variance) = jax.jit(jax.grad(bound, argnums=(0, 1)))(aux, q)
    if isinstance(likelihood, OneVsEach):
        slope = slope._replace(tilt=jnp.where(jnp.arange(CLASSES)[:, None] == y, 0.0, slope.tilt))
    assert max(float(jnp.abs(leaf).max()) for leaf in slope) < 1e-8
    sites = likelihood.expected_sites(y, aux)
    np.testing.assert_allclose(by_mean, sites.shift - sites.times(q.mean), atol=1e-9)
    variances = [sites.times(jnp.zeros_like(q.mean).at[c].set(1.0))[c] for c in range(CLASSES)]
    np.testing.assert_allclose(-2 * by_variance, jnp.stack(variances), atol=1e-9)


@pytest.mark.long
@double
@each_likelihood
def test_local_sites_have_the_slope_of_the_log_likelihood(likelihood):
    y, f = jnp.asarray(Y), latents(5)
    sites = jax.jit(likelihood.local_sites)(y, f)
    slope = jax.jit(jax.grad(lambda value: jnp.sum(likelihood.log_prob(y, value))))(f)
    np.testing.assert_allclose(sites.shift - sites.times(f), slope, atol=1e-12)

    @jax.jit
    def fisher(point):  # expected Hessian over y, which for one-vs-each does not depend on the draw but on y itself
        hessian = jax.hessian(lambda value, label: likelihood.log_prob(label[None], value[:, None])[0])
        if isinstance(likelihood, OneVsEach):
            return -hessian(f[:, point], y[point])
        p = jnp.exp(jnp.stack([likelihood.log_prob(jnp.full(POINTS, k), f) for k in range(CLASSES)]))[:, point]
        return -sum(p[k] * hessian(f[:, point], jnp.asarray(k)) for k in range(CLASSES))

    for point, block in enumerate(sites.blocks()):
        np.testing.assert_allclose(block, fisher(point), atol=1e-10)


# The likelihoods themselves


@double
def test_logistic_softmax_limits():
    """CDKT theorem 3.1 (temperature to 0) and 3.2 (a large negative mean gives softmax)."""
    f = latents(6)
    below = f - f.max() - 0.3
    everyone = lambda likelihood, f: np.exp(  # noqa: E731
        [likelihood.log_prob(jnp.full(POINTS, k, jnp.int32), f) for k in range(CLASSES)]
    )
    sharp = everyone(LogisticSoftmax(temperature=1e-2), below)
    np.testing.assert_allclose(sharp, np.asarray(below == below.max(0)), atol=1e-3)
    shared = everyone(LogisticSoftmax(temperature=1e-3), f)
    positive = np.asarray(f > 0)
    some = positive.any(0)
    np.testing.assert_allclose(shared[:, some], (positive / positive.sum(0).clip(1))[:, some], atol=1e-6)
    np.testing.assert_allclose(everyone(LogisticSoftmax(), f - 40.0), softmax(f, axis=0), atol=1e-10)


@double
def test_one_vs_each_is_below_softmax():
    """OVE(y | f) <= softmax(f)_y (Titsias 2016), so it sums to less than 1 over y."""
    f = latents(7)
    own = np.stack([OneVsEach().log_prob(jnp.full(POINTS, k, jnp.int32), f) for k in range(CLASSES)])
    by_hand = [np.sum([np.log(expit(f[k] - f[c])) for c in range(CLASSES) if c != k], axis=0) for k in range(CLASSES)]
    np.testing.assert_allclose(own, by_hand, atol=1e-12)
    assert (own <= np.log(softmax(f, axis=0)) + 1e-12).all() and (np.exp(own).sum(0) < 1).all()


@pytest.mark.long
@double
def test_expectations_of_one_class_are_one_dimensional_integrals():
    """A single class: E log s(f) - E log s(f) = 0; two: against nested adaptive quadrature."""
    mean, deviation = np.array([[-1.0], [0.7]]), np.array([[1.2], [0.4]])
    q = Marginals(jnp.asarray(mean), jnp.asarray(deviation**2))
    normal = lambda z: np.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)  # noqa: E731

    def inner(a):
        f0 = mean[0, 0] + deviation[0, 0] * a

        def integrand(b):
            f1 = mean[1, 0] + deviation[1, 0] * b
            return normal(b) * (np.log(expit(f0)) - np.log(expit(f0) + expit(f1)))

        return normal(a) * quad(integrand, -9, 9, epsabs=1e-11)[0]

    expected = quad(inner, -9, 9, epsabs=1e-10)[0]
    value = jax.jit(LogisticSoftmax().expected_log_prob)(jnp.asarray([0]), q)
    np.testing.assert_allclose(value, [expected], atol=1e-8)


# K5: the bound of CAVI


def random_task(seed):
    rng = np.random.default_rng(seed)
    scale = float(10 ** rng.uniform(-1, 2))
    task = problem(seed, scale=scale, kernel=("rbf", "cosine", "linear", "matern52")[seed % 4])
    return task.prior._replace(mean=task.prior.mean + rng.uniform(-5, 1)), task.y


@partial(jax.jit, static_argnames=("name", "steps"))
def bounds(prior, y, name, steps=25):
    kernel = cavi(AUGMENTED[name])
    return jax.vmap(lambda prior, y: fit(jax.random.key(0), kernel, prior, y, steps=steps)[1].elbo)(prior, y)


def check_monotone(name, count, tolerance):
    tasks = [random_task(seed) for seed in range(count)]
    ours = [task for task in tasks if task[0].root is None], [task for task in tasks if task[0].root is not None]
    worst = 0.0
    for group in ours:
        roots = {task[0].root.shape for task in group if task[0].root is not None}
        assert len(roots) <= 1
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *group)
        path = np.asarray(bounds(*stacked, name))
        assert np.isfinite(path).all()
        fall = (path[:, :-1] - path[:, 1:]) / (1 + np.abs(path[:, 1:]))
        worst = max(worst, float(fall.max()))
    print(f"{name}: largest relative fall of the bound {worst:.1e} over {count} tasks")
    assert worst <= tolerance


@pytest.mark.long
@double
@pytest.mark.parametrize("name", AUGMENTED)
def test_cavi_never_lowers_its_bound(name):
    check_monotone(name, 40, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", AUGMENTED)
def test_cavi_never_lowers_its_bound_by_more_than_rounding_in_single_precision(name):
    check_monotone(name, 40, 2e-4)


@pytest.mark.slow
@double
@pytest.mark.parametrize("name, count", [("logistic-softmax", 8_000), ("one-vs-each", 2_000)])
def test_cavi_never_lowers_its_bound_on_ten_thousand_tasks(name, count):
    check_monotone(name, count, 1e-10)


@pytest.mark.long
@double
@pytest.mark.parametrize("name", AUGMENTED)
def test_the_bound_of_cavi_is_the_evidence_of_its_sites_and_a_constant_of_the_latents(name):
    """ELBO = log Z(theta, sites) + const(aux): its derivative in theta at fixed aux is that of log Z (E2)."""
    prior, y = random_task(4)
    likelihood = AUGMENTED[name]
    kernel = cavi(likelihood)
    state, info = jax.jit(lambda: fit(jax.random.key(0), kernel, prior, y, steps=3))()

    @jax.jit
    def difference(scale):
        scaled = prior._replace(covariance=scale * prior.covariance)
        posterior = scaled.given(likelihood.expected_sites(y, state.aux))
        return kernel.elbo(state, posterior, y, None) - kernel.log_evidence(state, scaled)

    values = [float(difference(scale)) for scale in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(values, values[0], atol=1e-9)
    whole = jax.jit(lambda: kernel.elbo(state, kernel.posterior(state, prior), y, None))()
    np.testing.assert_allclose(whole, info.elbo[-1], atol=1e-9)


@pytest.mark.long
@double
def test_log_prob_of_logistic_softmax_is_that_of_its_definition_with_its_derivatives():
    """Where logarithms are saved, in the far tails, at 0 where |g| has a kink, and among classes that exist."""
    classes = jnp.array([True, True, False, True])
    f = jnp.concatenate([2 * latents(4), jnp.zeros((CLASSES, 2)), 60 * latents(5)], axis=1)
    f, y = jnp.concatenate([f, jnp.full((1, f.shape[1]), 1e3)])[jnp.array([0, 1, 3, 2])], jnp.arange(f.shape[1]) % 2
    likelihood = LogisticSoftmax(temperature=0.7)

    def expected(f):
        logits = jnp.where(classes[:, None], jax.nn.log_sigmoid(f / 0.7), -jnp.inf)
        return jax.nn.log_softmax(logits, axis=0)[y, jnp.arange(len(y))]

    def found(f):
        return likelihood.log_prob(y, f, classes)

    np.testing.assert_allclose(found(f), expected(f), rtol=1e-12)
    np.testing.assert_allclose(found(f.astype(jnp.float32)), expected(f), rtol=2e-6, atol=1e-6)
    for derivative in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(*(jax.jit(derivative(each))(f) for each in (found, expected)), atol=1e-12)
    second = [jax.jit(jax.jacfwd(jax.jacrev(lambda f, each=each: each(f).sum())))(f) for each in (found, expected)]
    np.testing.assert_allclose(*second, atol=1e-12)
    assert np.isfinite(second[0]).all() and np.abs(second[0]).max() > 0.1
