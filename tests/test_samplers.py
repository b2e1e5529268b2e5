"""The Gibbs samplers are exact: against quadrature, against NUTS, by joint-distribution tests and by calibration.

Every check takes `sign`, by which the shifts of the sites are multiplied: 1 is the sampler as it is, -1 a planted
error that the check has to catch. The slow ones test that too. Sizes are such that a check takes a minute or two.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC
from problems import double, problem
from scipy.stats import ks_2samp, kstest, norm

from fewshot.inference.diagnostics import summary_table, to_arviz
from fewshot.inference.inner import Code, Info, Mask, fit, gibbs
from fewshot.inference.inner.gibbs import GibbsState
from fewshot.inference.inner.settle import SAMPLER_STEPS, fit_pooled, fit_until_mixed, settle
from fewshot.inference.mcmc import GibbsKernel, nuts
from fewshot.inference.predictive import predict
from fewshot.models import KERNELS
from fewshot.models.gaussian import GaussianPrior, with_root
from fewshot.models.likelihoods import LogisticSoftmax, OneVsEach
from fewshot.models.likelihoods.logistic_softmax import LogisticSoftmaxLatents
from fewshot.models.process import LatentProcess

gibbs_module, settle_module = (  # whose names functions have too
    importlib.import_module(f"fewshot.inference.inner.{name}") for name in ("gibbs", "settle")
)
LIKELIHOODS = {"logistic-softmax": LogisticSoftmax(), "one-vs-each": OneVsEach()}
FAMILY = 0.01  # error rate of a family of comparisons; four statistics of two samplers make 8
REPLICATES = 1000
names = pytest.mark.parametrize("name", LIKELIHOODS)


def signed(likelihood, sign):
    """The likelihood with the shift of its sites multiplied by `sign`, which may be traced."""

    class Signed(type(likelihood)):
        def sites(self, y, aux, classes=None):
            sites = super().sites(y, aux, classes)
            return sites._replace(shift=sign * sites.shift)

    return Signed()


def small_prior(classes, points, level=-0.3):
    """Correlated latents with means that differ between the classes."""
    distance = jnp.arange(points)[:, None] - jnp.arange(points)
    mean = level * jnp.arange(1.0, classes + 1.0)[:, None] * jnp.ones(points)
    prior = GaussianPrior(mean, 1.5 * jnp.exp(-0.5 * (distance / 1.5) ** 2))
    return with_root(prior)


def prior_draws(key, prior, count):
    normal = jax.random.normal(key, (count, prior.mean.shape[0], prior.root.shape[1]))
    return prior.mean + normal @ prior.root.T


def sweep_of(likelihood, prior, sign, slices=0):
    """One Gibbs sweep of one chain for each replicate, f [T, C, N] and y [T, N] -> f."""
    kernel = gibbs(signed(likelihood, sign), chains=1, slices=slices)

    def one(key, f, y):
        aux_key, sweep_key = jax.random.split(key)
        aux = likelihood.aux_conditional(aux_key, y, f)
        state = GibbsState(f[None], jax.tree.map(lambda value: value[None], aux), y, None)
        return draw_f(kernel, sweep_key, state, prior, y)

    return lambda key, f, y: jax.vmap(one)(jax.random.split(key, len(f)), f, y)


def draw_f(kernel, key, state, prior, y):
    """f given aux. The step's own draw of the next aux is not used, and the compiler leaves it out."""
    return kernel.step(key, state, prior, y, None)[0].f[0]


# One sweep leaves the exact posterior invariant


def moments(f):
    """Functions of f [..., C, N] whose expectations are compared: f, f^2, and a product across classes and points."""
    first = f[..., 0, 0] * f[..., -1, -1]
    flat = f.reshape(*f.shape[:-2], -1)
    return jnp.concatenate([flat, flat**2, first[..., None]], axis=-1)


def quadrature_moments(prior, likelihood, y):
    """Posterior expectations of `moments` by product Gauss-Hermite in the whitened basis."""
    classes, rank = prior.mean.shape[0], prior.root.shape[1]
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    grid = np.stack(np.meshgrid(*[nodes] * (classes * rank), indexing="ij"), -1).reshape(-1, classes, rank)
    weight = np.prod(np.meshgrid(*[weights] * (classes * rank), indexing="ij"), axis=0).reshape(-1)
    f = prior.mean + jnp.asarray(grid, jnp.float32) @ prior.root.T
    weight = weight * np.exp(np.asarray(jax.vmap(lambda one: jnp.sum(likelihood.log_prob(y, one)))(f), np.float64))
    return weight @ np.asarray(moments(f), np.float64) / weight.sum()


def one_sweep(likelihood, y, count, slices=0):
    """Errors of the moments as a function of the sign, after one sweep from exact posterior draws.

    In standard errors of independent draws, which those after the sweep are.
    """
    prior = small_prior(2, len(y))
    f = np.asarray(prior_draws(jax.random.key(0), prior, count))
    density = np.exp(jax.vmap(lambda one: jnp.sum(likelihood.log_prob(y, one)))(f))  # at most 1: accept with it
    exact = jnp.asarray(f[np.random.default_rng(0).uniform(size=count) < density])
    expected = quadrature_moments(prior, likelihood, y)

    @jax.jit
    def sweep(key, f, sign):
        return moments(sweep_of(likelihood, prior, sign, slices)(key, f, jnp.broadcast_to(y, (len(f), len(y)))))

    def errors(sign):
        values = np.asarray(sweep(jax.random.key(1), exact, sign), np.float64)
        return np.abs(values.mean(0) - expected) / values.std(0) * np.sqrt(len(values))

    return errors


@pytest.mark.long
@names
def test_one_sweep_leaves_the_posterior_invariant(name):
    errors = one_sweep(LIKELIHOODS[name], jnp.asarray([0, 1], jnp.int32), 20_000)
    assert errors(1.0).max() < 5
    assert errors(-1.0).max() > 10  # a wrong sign is seen


class Doubled(LogisticSoftmax):
    """A planted error: the slices see the density squared, the sites as it is."""

    def log_prob(self, y, f, classes=None):
        return 2 * super().log_prob(y, f, classes)


def test_the_number_of_slices_follows_the_temperature_and_the_points():
    """2 points / tau^2, rounded up, from 1 to 40; tau may be traced."""
    assert [int(LogisticSoftmax().slices(points)) for points in (1, 5, 25)] == [2, 10, 40]
    found = jax.jit(lambda tau: LogisticSoftmax(temperature=tau).slices(5))
    assert [int(found(tau)) for tau in (0.2, 0.6, 10.0)] == [40, 28, 1]


def first_of_all(number, deviation):
    """A planted error: all classes move as the first does, which is not independent of what is left."""
    return jnp.broadcast_to(deviation[0], deviation.shape)


def test_parts_of_slices_are_projections_independent_of_what_is_left():
    """P^2 = P and P (I - P)^T = 0 over the classes, with alike covariances; together they reach all there is."""
    parts = np.stack([gibbs_module._part(jnp.asarray(number), jnp.eye(4)) for number in range(5)])
    for matrix in parts:
        np.testing.assert_allclose(matrix @ matrix, matrix, atol=1e-6)
        np.testing.assert_allclose(matrix @ (np.eye(4) - matrix).T, 0, atol=1e-6)
    assert [int(np.linalg.matrix_rank(matrix)) for matrix in parts] == [1] * 5
    np.testing.assert_allclose(parts[:4].sum(0), np.eye(4), atol=1e-6)
    np.testing.assert_allclose(parts[4], 1 / 4, atol=1e-6)
    np.testing.assert_array_equal(gibbs_module._part(jnp.asarray(9), jnp.eye(4)), parts[4])  # in turn


def test_what_a_slice_moves_towards_is_drawn_as_that_part_of_the_prior():
    """P nu nu^T P^T has the mean P P^T over the classes, and _fresh makes it of one draw."""
    for number in range(10):
        part = gibbs_module._part(jnp.asarray(number), jnp.eye(4))
        weights = gibbs_module._fresh(jnp.asarray(number), jnp.ones(1), 4)
        np.testing.assert_allclose(weights @ weights.T, part @ part.T, atol=1e-6)


class SlicedOfThree(LogisticSoftmax):
    """Takes no slice, but where it is told of three points."""

    def slices(self, points):
        return jnp.where(points == 3, 40, 0)


@pytest.mark.long
@pytest.mark.parametrize("real", [2, 3])
def test_points_that_are_not_real_call_for_no_slices(real):
    prior, y, key = small_prior(2, 3), jnp.asarray([0, 1, 0], jnp.int32), jax.random.key(0)
    mask = Mask(jnp.arange(3) < real, jnp.ones(2, bool))
    without, with_slices = gibbs(LogisticSoftmax(), chains=2, slices=0), gibbs(SlicedOfThree(), chains=2)
    state = without.init(key, prior, y, mask)
    same = [one.step(key, state, prior, y, mask)[0].f for one in (without, with_slices)]
    assert np.allclose(*same, atol=1e-5) == (real == 2)


@pytest.mark.long
def test_slices_within_a_sweep_leave_the_posterior_invariant(monkeypatch):
    prior, y, count = small_prior(2, 2), jnp.asarray([0, 1], jnp.int32), 20_000
    f = np.asarray(prior_draws(jax.random.key(0), prior, count))
    density = np.exp(jax.vmap(lambda one: jnp.sum(LogisticSoftmax().log_prob(y, one)))(f))
    exact = jnp.asarray(f[np.random.default_rng(0).uniform(size=count) < density])
    expected = quadrature_moments(prior, LogisticSoftmax(), y)

    def errors(likelihood):
        kernel = gibbs(likelihood, chains=len(exact), slices=10)

        @jax.jit
        def sweep(key):
            aux_key, sweep_key = jax.random.split(key)
            keys = jax.random.split(aux_key, len(exact))
            aux = jax.vmap(lambda one, f: LogisticSoftmax().aux_conditional(one, y, f))(keys, exact)
            return moments(kernel.step(sweep_key, GibbsState(exact, aux, y, None), prior, y, None)[0].f)

        values = np.asarray(sweep(jax.random.key(1)), np.float64)
        return np.abs(values.mean(0) - expected) / values.std(0) * np.sqrt(len(values))

    bound = norm.isf(FAMILY / (2 * len(expected)))  # of the largest of all moments
    assert errors(LogisticSoftmax()).max() < bound
    # So large an error is found with all but one of 10,000 seeds.
    assert errors(Doubled()).max() > bound + norm.isf(1e-4)
    monkeypatch.setattr(gibbs_module, "_part", first_of_all)
    assert errors(LogisticSoftmax()).max() > bound + norm.isf(1e-4)


# Means and standard deviations against NUTS


@functools.cache
def nuts_table(name):
    task, likelihood = problem(0, classes=3, points=12), LIKELIHOODS[name]
    mcmc = nuts(task.prior, likelihood, task.y, num_warmup=500, num_samples=3000, num_chains=4)
    mcmc.run(jax.random.key(0))
    return summary_table(to_arviz(jax.random.key(0), mcmc, likelihood, task.prior, task.y))


@functools.cache
def gibbs_program(name, chains, warmup, samples):
    task, likelihood = problem(0, classes=3, points=12), LIKELIHOODS[name]

    @jax.jit
    def draw(key, sign):
        kernel = GibbsKernel(task.prior, signed(likelihood, sign), task.y)
        mcmc = MCMC(
            kernel,
            num_warmup=warmup,
            num_samples=samples,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key)
        return mcmc.get_samples(group_by_chain=True)["f"]

    return draw


class Drawn:
    """Draws in the form that `to_arviz` reads."""

    def __init__(self, f):
        self.f = f

    def get_samples(self, group_by_chain):
        return {"f": self.f}

    def get_extra_fields(self, group_by_chain):
        return {}


def differences_from_nuts(name, sign, chains=32, samples=2500):
    """|difference| of every mean and standard deviation in their joint MCSE, and the smallest bulk ESS of either."""
    task, likelihood = problem(0, classes=3, points=12), LIKELIHOODS[name]
    f = gibbs_program(name, chains, 200, samples)(jax.random.key(1), sign)
    table = summary_table(to_arviz(jax.random.key(0), Drawn(f), likelihood, task.prior, task.y))
    reference = nuts_table(name)
    scores = [
        np.abs(table[value] - reference[value]) / np.hypot(table[error], reference[error])
        for value, error in (("mean", "mcse_mean"), ("sd", "mcse_sd"))
    ]
    return np.concatenate(scores), min(table["ess_bulk"].min(), reference["ess_bulk"].min())


@pytest.mark.slow
@names
def test_gibbs_agrees_with_nuts(name, record_property):
    """The largest of all M comparisons is below the normal quantile at .01/(2M)."""
    scores, effective = differences_from_nuts(name, 1.0)
    bound = norm.isf(FAMILY / (2 * len(scores)))
    record_property("largest", float(scores.max()))
    print(f"{name}: largest of {len(scores)} differences {scores.max():.2f} of {bound:.2f}, bulk ESS {effective:.0f}")
    assert effective > 1000
    assert scores.max() < bound
    wrong, _ = differences_from_nuts(name, -1.0)
    print(f"{name}: with the wrong sign {wrong.max():.0f}")
    assert wrong.max() > 2 * bound


# Joint-distribution test and calibration


def statistics(likelihood, f, y):
    """One latent, one latent difference, the log likelihood and |f|^2 of every replicate."""
    data = jax.vmap(lambda latent, labels: jnp.sum(likelihood.log_prob(labels, latent)))(f, y)
    return jnp.stack([f[:, 0, 0], f[:, 0, 0] - f[:, 1, -1], data, jnp.sum(f**2, axis=(1, 2))], axis=-1)


def labels_given(key, likelihood, f):
    """Labels from p(y | f), for one-vs-each normalised: what its joint has given f."""
    keys = jax.random.split(key, len(f))
    return jax.vmap(lambda one, latent: likelihood.observation(latent).sample(one))(keys, f).astype(jnp.int32)


def joint_draws(key, likelihood, prior, count):
    """Exact draws of (f, y) from p(f) prod_n p(y_n | f_n), normalised over both.

    For one-vs-each a draw of f is kept with probability prod_n Z_n(f), Z_n = sum_k p(k | f_n) <= 1.
    """
    f_key, y_key, accept_key = jax.random.split(key, 3)
    f = prior_draws(f_key, prior, 40 * count)
    y = labels_given(y_key, likelihood, f)

    def log_mass(latent):
        every = jnp.broadcast_to(jnp.arange(latent.shape[0])[:, None], latent.shape)
        return jnp.sum(jax.nn.logsumexp(jax.vmap(lambda label: likelihood.log_prob(label, latent))(every), axis=0))

    kept = np.flatnonzero(jax.random.uniform(accept_key, (len(f),)) < jnp.exp(jax.vmap(log_mass)(f)) + 1e-5)
    assert len(kept) >= count
    return f[kept[:count]], y[kept[:count]]


@functools.cache
def geweke_program(name, steps):
    likelihood, prior = LIKELIHOODS[name], small_prior(3, 4)

    @jax.jit
    def run(key, sign, f, y):
        sweep = sweep_of(likelihood, prior, sign)

        def turn(carry, key):
            f, y = carry
            sweep_key, label_key = jax.random.split(key)
            f = sweep(sweep_key, f, y)
            return (f, labels_given(label_key, likelihood, f)), None

        (f, y), _ = jax.lax.scan(turn, (f, y), jax.random.split(key, steps))
        return statistics(likelihood, f, y)

    return run


def geweke_p_values(name, sign, replicates=4 * REPLICATES, steps=30):
    """Two-sample KS of the four statistics: exact joint draws, and such draws after turns of sweep and y | f.

    A transition that leaves the joint invariant leaves every replicate an exact and independent draw of it.
    """
    likelihood, prior = LIKELIHOODS[name], small_prior(3, 4)
    first, second = (joint_draws(jax.random.key(seed), likelihood, prior, replicates) for seed in (0, 1))
    moved = np.asarray(geweke_program(name, steps)(jax.random.key(2), sign, *first))
    fresh = np.asarray(statistics(likelihood, *second))
    return np.array([ks_2samp(a, b).pvalue for a, b in zip(moved.T, fresh.T, strict=True)])


@pytest.mark.slow
@names
def test_geweke_joint_distribution(name):
    right, wrong = geweke_p_values(name, 1.0), geweke_p_values(name, -1.0)
    print(f"{name}: p-values {right.round(4)}; with the wrong sign {wrong}")
    assert right.min() > FAMILY / 8
    assert wrong.min() < 1e-6


@functools.cache
def calibration_program(name, draws, thin, warmup):
    likelihood, prior = LIKELIHOODS[name], small_prior(3, 4)

    @jax.jit
    def run(key, sign, y):
        sweep = sweep_of(likelihood, prior, sign)
        start_key, warm_key, loop_key = jax.random.split(key, 3)

        def some(key, f, count):
            return jax.lax.fori_loop(0, count, lambda i, f: sweep(jax.random.fold_in(key, i), f, y), f)

        def keep(f, key):
            f = some(key, f, thin)
            return f, statistics(likelihood, f, y)

        f = some(warm_key, prior_draws(start_key, prior, len(y)), warmup)
        return jax.lax.scan(keep, f, jax.random.split(loop_key, draws))[1]

    return run


def calibration(name, sign, draws=31, thin=10, warmup=50):
    """p-values of the ranks of the truth among thinned posterior draws, and the lag-one correlation of those."""
    likelihood, prior = LIKELIHOODS[name], small_prior(3, 4)
    f, y = joint_draws(jax.random.key(3), likelihood, prior, REPLICATES)
    truth = np.asarray(statistics(likelihood, f, y))
    posterior = np.asarray(calibration_program(name, draws, thin, warmup)(jax.random.key(4), sign, y))
    ranks = (posterior < truth).sum(0) + np.random.default_rng(0).uniform(size=truth.shape)  # uniform on (0, draws + 1)
    centred = posterior - posterior.mean(0)
    correlation = (centred[1:] * centred[:-1]).mean((0, 1)) / (centred**2).mean((0, 1)) + 1 / draws
    return np.array([kstest(rank / (draws + 1), "uniform").pvalue for rank in ranks.T]), correlation


@pytest.mark.slow
@names
def test_simulation_based_calibration(name):
    (right, correlation), (wrong, _) = calibration(name, 1.0), calibration(name, -1.0)
    print(f"{name}: p-values {right.round(4)}, lag-one correlation {correlation.round(3)}; wrong sign {wrong}")
    assert correlation.max() < 0.15  # thinned to the effective sample size
    assert right.min() > FAMILY / 8
    assert wrong.min() < 1e-6


@pytest.mark.parametrize(
    ("chains", "draws"),
    [(4, 64), pytest.param(20, 80, marks=pytest.mark.slow), pytest.param(100, 100, marks=pytest.mark.slow)],
)
def test_a_settled_sampler_holds_draws_of_several_sweeps_and_ends_with_the_last(chains, draws):
    task, kernel = problem(0, points=4), gibbs(OneVsEach(), chains=chains)
    key = jax.random.key(3)
    state, infos = jax.jit(lambda: fit_pooled(key, kernel, task.prior, task.y))()
    last, path = jax.jit(lambda: fit(key, kernel, task.prior, task.y, steps=SAMPLER_STEPS))()
    assert state.f.shape == (draws, 3, 4) and len(infos.elbo) == SAMPLER_STEPS
    np.testing.assert_allclose(infos.elbo, path.elbo, rtol=1e-4)
    np.testing.assert_allclose(state.f[-chains:], last.f, rtol=1e-4, atol=1e-4)
    assert len(np.unique(state.f[:, 0, 0])) == draws
    np.testing.assert_array_equal(state.y, task.y)


def autoregression(correlation, chains=20):
    """A sampler whose chains are x <- r x + (1 - r^2)^1/2 N(0, 1), begun at draws three times as wide."""
    info = Info(jnp.zeros(()), jnp.zeros(()), jnp.asarray(Code.OK), jnp.asarray(0))

    def step(key, state, prior, y, mask):
        noise = jax.random.normal(key, state.shape)
        return correlation * state + np.sqrt(1 - correlation**2) * noise, info

    return gibbs(OneVsEach())._replace(
        init=lambda key, prior, y, mask: 3 * jax.random.normal(key, (chains,)),
        step=step,
        sites=lambda state: state,
        pool=lambda states: states,
        statistics=lambda state, y, mask: jnp.stack([state, state**2], axis=1),
    )


@pytest.mark.long
def test_a_sampler_that_has_not_mixed_is_reported_and_one_that_has_is_not():
    task = problem(0, points=4)

    def codes(kernel, count=20):
        keys = jax.random.split(jax.random.key(5), count)
        return np.asarray(jax.jit(jax.vmap(lambda key: settle(key, kernel, task.prior, task.y)[1]))(keys))

    for correlation, code in ((0.0, Code.OK), (0.7, Code.OK), (0.97, Code.NOT_MIXED), (0.99, Code.NOT_MIXED)):
        found = codes(autoregression(correlation))
        assert (found == code).mean() >= 0.95, (correlation, found)
    stuck = autoregression(0.0)
    lost = stuck._replace(statistics=lambda state, y, mask: jnp.nan * state[:, None])
    assert (codes(lost) == Code.NOT_MIXED).all()
    broken = Info(jnp.zeros(()), jnp.zeros(()), jnp.asarray(Code.NON_FINITE), jnp.asarray(0))
    failed = lost._replace(step=lambda key, state, prior, y, mask: (state, broken))
    assert (codes(failed) == Code.NON_FINITE).all()  # what is worse is said


@pytest.mark.slow
def test_logistic_softmax_mixes_at_a_small_temperature():
    """5-way 5-shot at tau = 0.2 and mean -3, where the two blocks alone do not."""
    rng, y = np.random.default_rng(1), jnp.repeat(jnp.arange(5, dtype=jnp.int32), 5)
    x = rng.normal(size=(8, 5, 16))[:, y] + 0.7 * rng.normal(size=(8, 25, 16))
    process = LatentProcess(KERNELS["rbf"](), {"log_scale": np.log(4.0), "log_lengthscale": np.log(4.0), "mean": -3.0})
    prior = jax.vmap(lambda one: process.prior(one, 5))(jnp.asarray(x, jnp.float32))
    likelihood, keys = LogisticSoftmax(temperature=0.2), jax.random.split(jax.random.key(0), 8)

    def not_mixed(kernel):
        codes = jax.jit(jax.vmap(lambda key, one: settle(key, kernel, one, y)[1]))(keys, prior)
        return int(np.sum(np.asarray(codes) == Code.NOT_MIXED))

    assert not_mixed(gibbs(likelihood)) == 0
    assert not_mixed(gibbs(likelihood, slices=0)) >= 3


@pytest.mark.long
def test_a_sampler_ends_once_it_has_mixed_and_draws_what_all_its_sweeps_would():
    """Tasks do not change one another in a batch; one that takes every sweep pools what `fit_pooled` does."""
    task, keys = problem(0, points=4), jax.random.split(jax.random.key(5), 20)

    def settled(correlation):
        kernel = autoregression(correlation)
        return jax.jit(jax.vmap(lambda key: fit_until_mixed(key, kernel, task.prior, task.y)))(keys), kernel

    taken = {correlation: np.asarray(settled(correlation)[0][2]) for correlation in (0.0, 0.5, 0.8, 0.97)}
    print({correlation: np.unique(sweeps, return_counts=True) for correlation, sweeps in taken.items()})
    assert (taken[0.0] == 12).mean() >= 0.9
    assert (taken[0.5] <= 24).mean() >= 0.5
    assert (taken[0.8] == SAMPLER_STEPS).mean() >= 0.9
    assert (taken[0.97] == SAMPLER_STEPS).all()
    (states, _, sweeps), kernel = settled(0.5)
    for i in (np.argmin(sweeps), np.argmax(sweeps)):
        alone = jax.jit(lambda key, kernel=kernel: fit_until_mixed(key, kernel, task.prior, task.y))(keys[i])
        assert alone[2] == sweeps[i]
        np.testing.assert_allclose(alone[0], states[i], rtol=1e-5, atol=1e-6)
    (states, _, _), kernel = settled(0.97)
    whole = jax.jit(jax.vmap(lambda key: fit_pooled(key, kernel, task.prior, task.y)[0]))(keys)
    np.testing.assert_allclose(states, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_task_has_its_own_answer_whatever_is_worked_on_beside_it(monkeypatch):
    """By itself, or in a batch of batches, of which one task, three or all are worked on at a time.

    Keys, priors, labels and what the inference itself hides, here `offset`, may differ or be the same.
    """
    task, kernel = problem(0, points=4), autoregression(0.5)

    def settled(key, prior, y, offset):
        def level(prior, y):
            return prior.mean[0, 0] + y[0] + offset

        def init(key, prior, y, mask):
            return kernel.init(key, prior, y, mask) + level(prior, y)

        def step(key, state, prior, y, mask):
            moved, info = kernel.step(key, state - level(prior, y), prior, y, mask)
            return moved + level(prior, y), info

        def statistics(state, y, mask):
            return jnp.where(offset < 900, kernel.statistics(state, y, mask), jnp.nan)  # nan never mixes

        return fit_until_mixed(key, kernel._replace(init=init, step=step, statistics=statistics), prior, y)

    keys, levels = jax.random.split(jax.random.key(5), (5, 4)), 10.0 * jnp.arange(20).reshape(5, 4)
    priors = jax.vmap(jax.vmap(lambda level: task.prior._replace(mean=task.prior.mean + level)))(levels)
    labels = task.y + jnp.arange(5, dtype=task.y.dtype)[:, None]  # the same for all tasks of an inner batch
    offsets = 300.0 * jnp.arange(4)  # the same for all inner batches
    found = {}
    for lanes in (1, 3, 100):
        monkeypatch.setattr(settle_module, "LANES", lanes)
        batch = jax.vmap(jax.vmap(settled, in_axes=(0, 0, None, 0)), in_axes=(0, 0, 0, None))
        found[lanes] = jax.device_get(jax.jit(batch)(keys, priors, labels, offsets))
    states, codes, sweeps = found[3]
    assert set(np.unique(sweeps[:, :3])) >= {12, 24} and states.shape == (5, 4, 4, 20)
    assert (sweeps[:, 3] == SAMPLER_STEPS).all() and (codes[:, 3] == Code.NOT_MIXED).all()
    where = task.prior.mean[0, 0] + levels + labels[:, :1] + offsets
    np.testing.assert_allclose(states.mean(axis=(2, 3)), where, atol=1)  # standard deviations of 0.2
    for other in (found[1], found[100]):
        np.testing.assert_array_equal(other[2], sweeps)
        np.testing.assert_array_equal(other[1], codes)
        np.testing.assert_allclose(other[0], states, rtol=1e-5, atol=1e-3)
    alone = jax.jit(settled)
    for at in np.ndindex(5, 4):
        prior = jax.tree.map(lambda leaf, at=at: leaf[at], priors)
        one = alone(keys[at], prior, labels[at[0]], offsets[at[1]])
        np.testing.assert_allclose(one[0], states[at], rtol=1e-5, atol=1e-3)
        assert one[2] == sweeps[at]


@pytest.mark.long
def test_what_mixing_is_judged_by():
    """log p(y | f), one latent and |f|^2 of every chain, of the points and classes that are real."""
    task, kernel = problem(0, points=4), gibbs(OneVsEach(), chains=3)
    state = kernel.init(jax.random.key(0), task.prior, task.y, None)
    found = kernel.statistics(state, task.y, None)
    data = jax.vmap(lambda f: jnp.sum(OneVsEach().log_prob(task.y, f)))(state.f)
    np.testing.assert_allclose(found[:, 0], data, rtol=1e-5)
    np.testing.assert_array_equal(found[:, 1], state.f[:, task.y[0], 0])
    np.testing.assert_allclose(found[:, 2], np.sum(np.asarray(state.f) ** 2, axis=(1, 2)), rtol=1e-5)
    mask = Mask(jnp.asarray([True, True, False, True]), jnp.asarray([True, True, True]))
    fewer = kernel.statistics(state, task.y, mask)
    np.testing.assert_allclose(fewer[:, 2], np.sum(np.asarray(state.f)[:, :, [0, 1, 3]] ** 2, axis=(1, 2)), rtol=1e-5)


@pytest.mark.parametrize(
    ("chains", "sweeps"), [(1, range(24, 48)), (4, range(32, 48)), (20, (29, 35, 41, 47)), (100, (47,))]
)
def test_kept_sweeps_are_spread_over_the_second_half(chains, sweeps):
    """A sampler whose state is the number of its last sweep."""
    info = Info(jnp.zeros(()), jnp.zeros(()), jnp.asarray(Code.OK), jnp.asarray(0))
    counter = gibbs(OneVsEach())._replace(
        init=lambda key, prior, y, mask: jnp.asarray(-1),
        step=lambda key, state, prior, y, mask: (state + 1, info),
        sites=lambda state: jnp.zeros(chains),
        pool=lambda states: states,
        statistics=None,
    )
    task = problem(0, points=4)
    assert SAMPLER_STEPS == 48
    assert fit_pooled(jax.random.key(0), counter, task.prior, task.y)[0].tolist() == list(sweeps)


@pytest.mark.long
@names
def test_chains_draw_by_keys_of_their_own(name):
    """Of chains at the same latents the next aux differ, of those with the same aux the next latents."""
    task, kernel, key = problem(0, points=4), gibbs(LIKELIHOODS[name], chains=3), jax.random.key(1)

    def each_differs(draws):
        chains = np.asarray(draws).reshape(3, -1)
        return len(np.unique(chains, axis=0)) == 3

    nothing = task.prior._replace(covariance=jnp.zeros((4, 4)), root=jnp.zeros((4, 1)))
    still = kernel.init(key, nothing, task.y)
    assert np.ptp(still.f, axis=0).max() == 0 and each_differs(jax.tree.leaves(still.aux)[-1])
    alike = still._replace(aux=jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), still.aux))
    assert each_differs(kernel.step(key, alike, task.prior, task.y)[0].f)


@pytest.mark.long
@double
def test_evidence_and_bound_of_a_sampler_are_means_over_its_chains():
    """Of two chains that are alike they are those of one; of two others the mean (OVE 39)."""
    task, likelihood, rng = problem(0, points=4), LogisticSoftmax(), np.random.default_rng(0)
    kernel = gibbs(likelihood, chains=2)
    omega, counts = rng.gamma(1.0, size=(2, 2, 3, 4))
    drawn = LogisticSoftmaxLatents(*map(jnp.asarray, (np.ones((2, 4)), counts.round(), omega)))

    @jax.jit
    def values(latents):
        state = GibbsState(jnp.zeros_like(latents.omega), latents, task.y, None)
        q = kernel.posterior(state, task.prior)
        one, sites = (jax.tree.map(lambda leaf: leaf[0], tree) for tree in (q.components, kernel.sites(state)))
        bound = likelihood.augmented_bound(task.y, one.marginals, likelihood.aux_posterior(task.y, one.marginals))
        together = kernel.log_evidence(state, task.prior), kernel.elbo(state, q, task.y, None)
        return jnp.stack(together), jnp.stack([task.prior.log_normaliser(sites), jnp.sum(bound) - one.kl])

    alike = [values(jax.tree.map(lambda leaf, i=i: leaf[jnp.array([i, i])], drawn)) for i in (0, 1)]
    for together, one in alike:
        np.testing.assert_allclose(together, one, rtol=1e-12)
    np.testing.assert_allclose(values(drawn)[0], (alike[0][0] + alike[1][0]) / 2, rtol=1e-12)


@pytest.mark.slow
@names
def test_predictions_of_pooled_draws_vary_less_and_are_those_of_many_chains(name):
    task, likelihood = problem(1, points=6, scale=10.0), LIKELIHOODS[name]

    def probabilities(settled, chains):
        def one(key):
            kernel = gibbs(likelihood, chains=chains)
            fit_key, predict_key = jax.random.split(key)
            state = settled(fit_key, kernel, task.prior, task.y)[0]
            return predict(predict_key, likelihood, kernel.posterior(state, task.prior), task.query)

        return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 40)))

    last, pooled = probabilities(functools.partial(fit, steps=SAMPLER_STEPS), 4), probabilities(settle, 4)
    exact = probabilities(functools.partial(fit, steps=SAMPLER_STEPS), 100).mean(axis=0)
    assert pooled.var(axis=0).mean() < 0.35 * last.var(axis=0).mean()
    for found in (pooled, probabilities(settle, 20)):
        error = found.std(axis=0) / np.sqrt(len(found))
        assert (np.abs(found.mean(axis=0) - exact) < 5 * error + 0.005).all()
