"""Samplers as NumPyro kernels: they run with every kind of chains, under jit, and agree with one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC
from problems import double, problem

from fewshot.inference.inner.base import Mask
from fewshot.inference.mcmc import EllipticalSliceKernel, GibbsKernel, elliptical_slice, nuts
from fewshot.models import LIKELIHOODS
from fewshot.models.gaussian import Sites
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax

AUGMENTED = {"logistic-softmax": LogisticSoftmax(), "one-vs-each": OneVsEach()}
LATENTS = {"logistic-softmax": {"f", "rate", "counts", "omega"}, "one-vs-each": {"f", "omega"}}
METHODS = ["vectorized", "sequential"]


def run(kernel, key=0, warmup=5, samples=20, chains=2, method="vectorized", fields=("log_likelihood",), **more):
    mcmc = MCMC(
        kernel, num_warmup=warmup, num_samples=samples, num_chains=chains, chain_method=method, progress_bar=False
    )
    mcmc.run(jax.random.key(key), extra_fields=fields, **more)
    return mcmc


@pytest.mark.long
@pytest.mark.parametrize("name", AUGMENTED)
def test_gibbs_runs_as_a_numpyro_kernel(name):
    task, likelihood = problem(0, points=5), AUGMENTED[name]
    mcmc = run(GibbsKernel(task.prior, likelihood, task.y), fields=("log_likelihood", "code"))
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples.keys() == LATENTS[name]
    assert samples["f"].shape == samples["omega"].shape == (2, 20, 3, 5)
    assert mcmc.get_samples()["f"].shape == (40, 3, 5)
    assert not np.array_equal(samples["f"][0], samples["f"][1])
    extra = mcmc.get_extra_fields(group_by_chain=True)
    assert (extra["code"] == 0).all()
    expected = jax.vmap(jax.vmap(lambda f: jnp.sum(likelihood.log_prob(task.y, f))))(samples["f"])
    np.testing.assert_allclose(extra["log_likelihood"], expected, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [GibbsKernel, EllipticalSliceKernel])
def test_chains_depend_on_their_key_alone(kernel):
    """Vectorized or sequential, under jit and vmap over tasks: the draws of a chain are the same."""
    tasks = [problem(seed, points=5) for seed in (0, 1)]
    vectorized, sequential = (
        run(kernel(tasks[0].prior, OneVsEach(), tasks[0].y), method=method).get_samples(group_by_chain=True)["f"]
        for method in METHODS
    )
    prior, y = jax.tree.map(lambda *parts: jnp.stack(parts), *[(task.prior, task.y) for task in tasks])

    @jax.jit
    @jax.vmap
    def draw(prior, y):
        return run(kernel(prior, OneVsEach(), y)).get_samples(group_by_chain=True)["f"]

    batched = draw(prior, y)
    assert batched.shape == (2, 2, 20, 3, 5)
    for draws in (sequential, batched[0]):  # the first few: rounding makes accepted tries differ in the end
        np.testing.assert_allclose(draws[:, :3], vectorized[:, :3], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_chain_goes_on_where_its_warm_up_ended():
    task = problem(0, points=5)
    mcmc = MCMC(GibbsKernel(task.prior, OneVsEach(), task.y), num_warmup=3, num_samples=4, progress_bar=False)
    mcmc.warmup(jax.random.key(0))
    assert mcmc.post_warmup_state.f.shape == (3, 5)
    mcmc.run(mcmc.post_warmup_state.rng_key)
    assert mcmc.get_samples()["f"].shape == (4, 3, 5)


@pytest.mark.slow
def test_first_latents_can_be_given():
    task = problem(0, points=5)
    f = jnp.full((2, 3, 5), 4.0).at[:, 0].set(-4.0)
    kernel = GibbsKernel(task.prior, OneVsEach(), task.y)
    states = kernel.init(jax.random.split(jax.random.key(0), 2), 0, f, (), {})
    np.testing.assert_array_equal(states.f, f)


@pytest.mark.slow
def test_masked_points_and_classes_say_nothing():
    task = problem(0, classes=3, points=6)
    real = Mask(jnp.arange(6) < 4, jnp.arange(3) < 2)
    y = jnp.where(real.points, task.y % 2, 0).astype(jnp.int32)
    mcmc = run(GibbsKernel(task.prior, OneVsEach(), y, real), samples=400, chains=4)
    f = mcmc.get_samples()["f"][:, 2]  # the class that does not exist keeps its prior
    error = jnp.sqrt(jnp.diagonal(task.prior.covariance) / f.shape[0])
    assert (jnp.abs(f.mean(0) - task.prior.mean[2]) < 5 * error).all()


def test_refusals():
    task = problem(0, points=5)
    for likelihood in (Softmax(), LabelRegression()):
        with pytest.raises(TypeError):
            GibbsKernel(task.prior, likelihood, task.y)
    kernel = GibbsKernel(task.prior, OneVsEach(), task.y)
    with pytest.raises(ValueError, match="without model arguments"):
        MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), task.y)
    with pytest.raises(ValueError, match="leave init_params out"):
        run(EllipticalSliceKernel(task.prior, OneVsEach(), task.y), init_params=jnp.zeros((2, 3, 5)))


@pytest.mark.long
@pytest.mark.parametrize("slices, correlation", [(1, 0.8), (4, 0.3)])
def test_slices_leave_the_posterior_invariant(slices, correlation):
    """Prior N(0, 1), likelihood exp(-(u - 2)^2): exact draws of the posterior N(4/3, 1/3) before and after."""
    count, mean, deviation = 100_000, 4 / 3, np.sqrt(1 / 3)
    before = mean + deviation * np.random.default_rng(0).normal(size=(count, 1))

    def log_likelihood(u):
        return -jnp.sum((u - 2.0) ** 2)

    @jax.jit
    @jax.vmap
    def once(key, u):
        return elliptical_slice(key, u, log_likelihood(u), log_likelihood, count=slices)

    keys = jax.random.split(jax.random.key(0), count)
    after, value, tries = (np.asarray(part, np.float64) for part in once(keys, jnp.asarray(before, jnp.float32)))
    z = (after[:, 0] - mean) / deviation
    for power, expected in enumerate((0.0, 1.0, 0.0, 3.0), 1):
        assert abs((z**power).mean() - expected) < 5 * (z**power).std() / np.sqrt(count)
    np.testing.assert_allclose(value, -((after[:, 0] - 2) ** 2), rtol=1e-4, atol=1e-5)
    assert abs(np.corrcoef(z, before[:, 0])[0, 1]) < correlation and (z != before[:, 0]).all()
    assert tries.min() == slices and tries.max() < 100


@pytest.mark.parametrize("most, taken", [(2, None), (5, 2)])
def test_every_slice_of_a_chain_turns_by_an_angle_of_its_own(most, taken):
    """Without data, and with ellipses through 0, u is multiplied by cos t each time: E cos^2 t cos^2 t' = 1/4."""
    keys = jax.random.split(jax.random.key(1), 20_000)
    one, zero = jnp.ones(1), jnp.asarray(0.0)

    @jax.jit
    @jax.vmap
    def once(key, taken):
        return elliptical_slice(key, one, zero, lambda u: 0 * u[0], lambda key: 0 * one, most, taken)

    ends, _, tries = once(keys, None if taken is None else jnp.full(len(keys), taken))
    squares = np.asarray(ends[:, 0], np.float64) ** 2
    assert (tries == 2).all()
    assert abs(squares.mean() - 0.25) < 5 * squares.std() / np.sqrt(len(keys))


@pytest.mark.slow
def test_a_slice_that_is_nowhere_leaves_the_chain_where_it_is():
    u = jnp.asarray([1.0, 2.0])
    moved, value, tries = elliptical_slice(jax.random.key(0), u, jnp.asarray(0.0), lambda u: jnp.sum(u) * jnp.nan)
    np.testing.assert_array_equal(moved, u)
    assert value == 0.0 and tries == 200


def test_a_chain_whose_value_is_not_a_number_stays_and_costs_nothing():
    """Under vmap the others would wait for all tries of all its slices."""
    u = jnp.asarray([1.0, 2.0])
    moved, value, tries = elliptical_slice(jax.random.key(0), u, jnp.asarray(jnp.nan), jnp.sum, count=40)
    np.testing.assert_array_equal(moved, u)
    assert jnp.isnan(value) and tries == 0


@pytest.mark.slow
@pytest.mark.parametrize("sampler, kernel", [("slice", "rbf"), ("nuts", "linear")])
def test_references_reach_the_exact_posterior_of_label_regression(sampler, kernel):
    """Mean and variance of every latent within 5 standard errors; for `linear` K is singular."""
    task, likelihood = problem(0, points=6, kernel=kernel, features=3), LabelRegression(noise=0.5)
    exact = task.prior.given(sites_of(likelihood, task))
    if sampler == "slice":
        mcmc = run(EllipticalSliceKernel(task.prior, likelihood, task.y), warmup=100, samples=3000, chains=4)
    else:
        mcmc = nuts(task.prior, likelihood, task.y, num_warmup=200, num_samples=500)
        mcmc.run(jax.random.key(1))
    f = np.asarray(mcmc.get_samples(group_by_chain=True)["f"])
    for values, expected in ((f, exact.mean), ((f - exact.mean) ** 2, exact.variance)):
        error = values.std((0, 1)) / np.sqrt(effective_sample_size(values))
        assert (np.abs(values.mean((0, 1)) - expected) < 5 * error + 1e-4).all()


def sites_of(likelihood, task):
    return Sites(*likelihood.gaussian_sites(task.y, task.prior.mean.shape[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic-softmax", "one-vs-each"])
def test_nuts_runs_for_every_likelihood(name):
    task, likelihood = problem(0, points=5), LIKELIHOODS[name]()
    mcmc = nuts(task.prior, likelihood, task.y, num_warmup=20, num_samples=10, num_chains=2)
    mcmc.run(jax.random.key(0), extra_fields=("potential_energy",))
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples.keys() == {"u", "f"} and samples["f"].shape == (2, 10, 3, 5)
    assert np.isfinite(samples["f"]).all()


@pytest.mark.slow
@double
def test_gibbs_runs_in_double_precision():
    task = problem(0, points=5)
    assert run(GibbsKernel(task.prior, OneVsEach(), task.y), chains=1).get_samples()["f"].dtype == jnp.float64
