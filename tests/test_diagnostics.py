"""ArviZ data of every kind of posterior, k-hat and PSIS-LOO, against closed forms."""

import os
import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.infer import MCMC
from problems import double, problem
from scipy.special import log_softmax, logsumexp, softmax
from scipy.stats import norm

from fewshot.inference import diagnostics
from fewshot.inference.diagnostics import (
    LeaveOneOut,
    doubt_about_laplace,
    label_loo,
    log_ratios,
    objection_to_ranking,
    pareto_k,
    pareto_k_of,
    psis_loo,
    relative_efficiency,
    save,
    summary_table,
    to_arviz,
)
from fewshot.inference.inner import cavi, cvi, exact, fit, gibbs, gradient, laplace
from fewshot.inference.mcmc import EllipticalSliceKernel
from fewshot.inference.posterior_draws import about_queries
from fewshot.inference.predictive import predict
from fewshot.models.gaussian import Sites, prior_root
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import log_densities
from fewshot.runners import diagnose

# Another process has just moved the file that ArviZ moves once a day.
MOVED_BY_ANOTHER = """
from pathlib import Path

replace = Path.replace

def moved(self, target):
    Path.replace = replace
    replace(self, target)
    raise FileNotFoundError(self)

Path.replace = moved
import fewshot.inference.diagnostics
assert Path.replace is replace
"""
GROUPS = {"posterior", "posterior_predictive", "log_likelihood", "sample_stats", "observed_data"}
KERNELS = {
    "exact": (exact, LabelRegression(noise=0.5)),
    "cvi": (cvi, Softmax()),
    "laplace": (laplace, Softmax()),
    "cavi": (cavi, OneVsEach()),
    "gradient": (gradient, Softmax()),
}


def group_names(data):
    names = data.groups() if callable(data.groups) else data.groups  # 0.23 and 1.x
    return {name.strip("/") for name in names} - {""}


def fitted(name, task, steps=30):
    make, likelihood = KERNELS[name]
    kernel = make(likelihood)
    state, _ = jax.jit(lambda key: fit(key, kernel, task.prior, task.y, steps=steps))(jax.random.key(0))
    return kernel, likelihood, state, kernel.posterior(state, task.prior)


@pytest.mark.long
@pytest.mark.skipif(not diagnostics.arviz.__version__.startswith("0."), reason="ArviZ 1 moves no file")
def test_two_processes_import_arviz_at_once(tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", MOVED_BY_ANOTHER], env=environment, check=True)
    assert (tmp_path / "arviz" / "daily_warning").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "cavi", "gradient"])  # one of each kind of posterior
def test_draws_have_the_moments_of_their_posterior(name):
    task = problem(0, points=5)
    kernel, _, state, q = fitted(name, task)
    f = np.asarray(q.draws(jax.random.key(1), task.prior, 4000))
    assert f.shape == (1, 4000, 3, 5)
    centred = f[0] - q.mean
    errors = np.sqrt(q.variance / 4000)
    assert (np.abs(centred.mean(0)) < 5 * errors).all()
    assert (np.abs((centred**2).mean(0) / q.variance - 1) < 5 * np.sqrt(2 / 4000)).all()
    between_points = np.einsum("dcn,dcm->cnm", centred, centred) / 4000
    scale = np.sqrt(np.einsum("cn,cm->cnm", q.variance, q.variance) * 2 / 4000)
    if name == "exact":
        expected = task.prior.given(kernel.sites(state)).covariance(task.prior)
        assert (np.abs(between_points - expected) < 5 * scale).all()
    if name == "cavi":  # the classes of a point are coupled
        between_classes = np.einsum("dcn,den->nce", centred, centred) / 4000
        scale = np.sqrt(np.einsum("cn,en->nce", q.variance, q.variance) * 2 / 4000)
        assert (np.abs(between_classes - q.covariance) < 5 * scale).all()


@double
def test_joint_draws_are_those_of_the_sites_of_a_posterior():
    """(G4) gives the sites back: h = alpha + W m."""
    task = problem(0, points=4)
    sites = Sites(*LabelRegression(noise=0.5).gaussian_sites(task.y, 3))
    root = prior_root(task.prior).factor

    @jax.jit
    def both(key):
        posterior, keys = task.prior.given(sites), jax.random.split(key, 2)
        expected = jax.vmap(lambda one: task.prior._replace(root=root).draw(one, sites))(keys)
        return posterior.draws(key, task.prior, 2)[0], expected

    np.testing.assert_allclose(*both(jax.random.key(1)), rtol=1e-8)


def test_latents_at_queries_given_latents_have_the_moments_of_the_prior():
    """f_* given f: mean a_* + k_* K^-1 (f - a), variance k_** - k_* K^-1 k_*^T."""
    task, count = problem(2, points=5), 4000
    prior, query = task.prior, task.query
    f = prior.mean + jnp.asarray(np.random.default_rng(0).normal(size=prior.mean.shape), jnp.float32)
    given = jnp.broadcast_to(f, (1, count, *f.shape))
    found = jax.jit(lambda key: about_queries(key, Softmax(), prior, query, given))(jax.random.key(0))
    gain = np.linalg.solve(np.asarray(prior.covariance, np.float64), np.asarray(query.cross, np.float64).T).T
    variance = query.variance - np.sum(gain * query.cross, axis=1)
    drawn = np.asarray(found["f_query"][0], np.float64)
    mean = query.mean + (f - prior.mean) @ gain.T
    assert (np.abs(drawn.mean(0) - mean) < 5 * np.sqrt(variance / count) + 1e-3).all()
    np.testing.assert_allclose(drawn.var(0), np.broadcast_to(variance, mean.shape), rtol=6 * np.sqrt(2 / count))
    np.testing.assert_allclose(found["density"][0], softmax(drawn, axis=1).swapaxes(1, 2), atol=1e-5)


@pytest.mark.slow
def test_a_mixture_is_drawn_chain_by_chain():
    task = problem(0, points=5)
    kernel = gibbs(OneVsEach(), chains=4)
    state, _ = jax.jit(lambda key: fit(key, kernel, task.prior, task.y, steps=2))(jax.random.key(0))
    f = kernel.posterior(state, task.prior).draws(jax.random.key(1), task.prior, 400)
    assert f.shape == (4, 100, 3, 5)
    with pytest.raises(TypeError, match="it has no variational posterior"):
        pareto_k(jax.random.key(0), kernel, state, task.prior, OneVsEach(), task.y)


@pytest.mark.long
@pytest.mark.parametrize("likelihood", [Softmax(), LabelRegression()], ids=["labels", "coded"])
def test_arviz_data_of_a_chain(likelihood, tmp_path):
    task = problem(0, points=5)
    kernel = EllipticalSliceKernel(task.prior, likelihood, task.y)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=50, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), extra_fields=("tries",))
    data = to_arviz(jax.random.key(1), mcmc, likelihood, task.prior, task.y, task.query)
    assert group_names(data) == GROUPS | {"predictions"}
    f = data["posterior"]["f"]
    assert f.dims == ("chain", "draw", "class", "point") and f.shape == (2, 50, 3, 5)
    np.testing.assert_array_equal(f, mcmc.get_samples(group_by_chain=True)["f"])
    assert data["log_likelihood"]["y"].dims == ("chain", "draw", "point")
    coded = isinstance(likelihood, LabelRegression)
    labels = ("point", "class") if coded else ("point",)
    assert data["posterior_predictive"]["y"].dims == ("chain", "draw", *labels)
    assert data["observed_data"]["y"].dims == labels
    assert data["predictions"]["density"].dims == ("chain", "draw", "query", "class")
    assert {"total_log_likelihood", "tries"} == set(data["sample_stats"].data_vars)
    table = summary_table(data, ("f", "u"))
    assert len(table) == 30 and list(table.columns) == diagnostics.SUMMARY
    save(data, tmp_path / "data.nc")
    again = diagnostics.load(tmp_path / "data.nc")
    assert group_names(again) == group_names(data)
    np.testing.assert_array_equal(again["posterior"]["f"], f)


@pytest.mark.slow
def test_predictions_of_draws_are_those_of_the_posterior():
    task = problem(1, points=6)
    _, likelihood, _, q = fitted("exact", task)
    data = to_arviz(jax.random.key(1), q, likelihood, task.prior, task.y, task.query, draws=4000)
    assert set(data["sample_stats"].data_vars) == {"total_log_likelihood"}
    f_query, marginals = data["predictions"]["f_query"].values[0], q.predict(task.query)
    errors = np.sqrt(marginals.variance / 4000)
    assert (np.abs(f_query.mean(0) - marginals.mean) < 5 * errors).all()
    assert (np.abs(f_query.var(0) / marginals.variance - 1) < 5 * np.sqrt(2 / 4000)).all()
    density = data["predictions"]["density"].values[0].mean(0)
    expected = predict(jax.random.key(0), likelihood, q, task.query)
    np.testing.assert_allclose(density / density.sum(1, keepdims=True), expected, atol=0.05)
    assert np.isfinite(summary_table(data)["ess_bulk"]).all() and np.isnan(summary_table(data)["r_hat"]).all()


@double
def test_the_ratio_of_an_exact_posterior_is_constant():
    task = problem(0, points=4)
    make, likelihood = KERNELS["exact"]

    @jax.jit
    def both(key):
        state = make(likelihood).init(key, task.prior, task.y, None)
        return log_ratios(key, make(likelihood), state, task.prior, likelihood, task.y, 50), state.log_scale

    np.testing.assert_allclose(*both(jax.random.key(0)), rtol=1e-9)


@pytest.mark.slow
@double
def test_ratios_of_every_posterior_find_the_same_evidence():
    """log p(y) = log Z(sites) + log E_q[ratio]; the baseline's constant is log|L|."""
    task = problem(0, points=4, scale=1.5)
    evidence = {}
    for name in ("cvi", "laplace", "gradient"):
        kernel, likelihood, state, _ = fitted(name, task)
        ratios = np.asarray(log_ratios(jax.random.key(0), kernel, state, task.prior, likelihood, task.y, 4000))
        if name == "gradient":
            constant = np.log(np.abs(np.diagonal(state.factor, axis1=1, axis2=2))).sum()
        else:
            constant = task.prior.log_normaliser(kernel.sites(state))
        weights = np.exp(ratios - ratios.max())
        evidence[name] = float(constant + logsumexp(ratios) - np.log(4000))
        error = weights.std() / weights.mean() / np.sqrt(4000)
        assert error < 0.02, name
    assert np.ptp(list(evidence.values())) < 0.08, evidence


@pytest.mark.long
def test_k_hat_tells_a_good_posterior_from_a_narrow_one():
    task = problem(0, points=5)
    kernel, likelihood, state, _ = fitted("cvi", task)
    arguments = (task.prior, likelihood, task.y)
    assert pareto_k(jax.random.key(0), kernel, state, *arguments) < 0.7
    precision = 20 * (state.sites.precision + 0.1)
    mean = task.prior.given(state.sites).mean
    narrow = state._replace(sites=state.sites._replace(precision=precision, shift=precision * mean))
    assert pareto_k(jax.random.key(0), kernel, narrow, *arguments) > 1.0


def test_k_hat_of_a_known_tail():
    """Weights U^-k have a Pareto tail with shape k."""
    uniform = np.random.default_rng(0).uniform(size=20_000)
    for k in (0.3, 0.9):
        assert abs(pareto_k_of(-k * np.log(uniform)) - k) < 0.15
    assert pareto_k_of(np.array([0.0, np.nan] * 100)) == np.inf


@pytest.mark.slow
def test_loo_of_label_regression_is_the_closed_form():
    """Its density, and that normalised over the labels (R5)."""
    task = problem(0, points=8, scale=1.0)
    likelihood = LabelRegression(noise=1.0)
    q = task.prior.given(exact(likelihood).init(jax.random.key(0), task.prior, task.y, None).sites)
    data = to_arviz(jax.random.key(1), q, likelihood, task.prior, task.y, draws=4000)
    found, of_labels = psis_loo(data), label_loo(data, likelihood)
    coded = np.asarray(likelihood.observed(task.y, 3), np.float64)
    total = np.asarray(task.prior.covariance, np.float64) + np.eye(8)
    inverse = np.linalg.inv(total)
    variance = 1 / np.diag(inverse)
    mean = coded - (coded - task.prior.mean) @ inverse * variance
    np.testing.assert_allclose(found.elpd, norm.logpdf(coded, mean, np.sqrt(variance)).sum(), atol=0.3)
    assert found.pareto_k.shape == (8,) and found.pareto_k.max() < 1 and found.se > 0 and found.parameters > 0
    labels = log_softmax(2 * mean / variance, axis=0)[task.y, np.arange(8)]
    np.testing.assert_allclose(of_labels.pointwise, labels, atol=0.1)
    np.testing.assert_allclose(of_labels.elpd, labels.sum(), atol=0.2)


@pytest.mark.long
def test_loo_of_labels_divides_by_all_labels_with_the_same_weights():
    """log sum_d w_d p(y | f_d) - log sum_d w_d sum_k p(k | f_d); psis_loo where the second is 1."""
    f = jnp.asarray(np.random.default_rng(0).normal(size=(1, 400, 3, 5)), jnp.float32)
    y = jnp.asarray([0, 1, 2, 0, 1])
    for likelihood in (Softmax(), OneVsEach()):
        every = np.asarray(jax.jit(jax.vmap(partial(log_densities, likelihood)))(f[0]), np.float64)
        own = np.take_along_axis(every, np.asarray(y)[None, None], axis=1)[:, 0]
        data = diagnostics._from_groups({"posterior": {"f": f}, "log_likelihood": {"y": own[None]}}, {}, {})
        found, plain = label_loo(data, likelihood), psis_loo(data)
        efficiency = diagnostics.relative_efficiency(own[None])
        weights = np.exp(diagnostics._smoothed_log_weights(own, efficiency))
        ratio = (weights * np.exp(own)).sum(0) / (weights[:, None] * np.exp(every)).sum((0, 1))
        np.testing.assert_allclose(found.pointwise, np.log(ratio), rtol=1e-4)
        np.testing.assert_allclose(
            [found.elpd, found.se], [np.log(ratio).sum(), np.log(ratio).std() * 5**0.5], rtol=1e-4
        )
        assert np.allclose(found.pointwise, plain.pointwise, rtol=1e-4) == isinstance(likelihood, Softmax)


@pytest.mark.slow
def test_loo_of_labels_is_psis_loo_for_a_density_that_is_normalised():
    task = problem(0, points=5)
    data = to_arviz(jax.random.key(1), fitted("cvi", task)[3], Softmax(), task.prior, task.y)
    found, of_labels = psis_loo(data), label_loo(data, Softmax())
    np.testing.assert_allclose(of_labels.pointwise, found.pointwise, rtol=1e-4)
    np.testing.assert_allclose([of_labels.elpd, of_labels.se], [found.elpd, found.se], rtol=1e-4)
    one_vs_each = label_loo(to_arviz(jax.random.key(1), fitted("cavi", task)[3], OneVsEach(), *task[:2]), OneVsEach())
    assert (one_vs_each.pointwise < 0).all()


def correlated(correlation, draws=400, seed=0):
    """Log likelihoods [M, D, N] of autoregressive chains."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(size=(4, 3))]
    for _ in range(draws - 1):
        rows.append(correlation * rows[-1] + np.sqrt(1 - correlation**2) * rng.normal(size=(4, 3)))
    return np.stack(rows, axis=1)


@pytest.mark.long
def test_the_efficiency_of_correlated_chains_enters_the_smoothing():
    independent, slow = correlated(0.0), correlated(0.9)
    assert relative_efficiency(independent) > 0.9
    assert 0.02 < relative_efficiency(slow) < 0.15  # (1 - .9) / (1 + .9) = .05 of the latents themselves
    assert relative_efficiency(slow[:, :3]) == 1.0
    data = diagnostics._from_groups({"posterior": {"f": slow}, "log_likelihood": {"y": slow}}, {}, {})
    found = psis_loo(data)
    as_independent, known = psis_loo(data, 1.0), psis_loo(data, relative_efficiency(slow))
    np.testing.assert_array_equal(found.pareto_k, known.pareto_k)
    assert (np.abs(found.pareto_k - as_independent.pareto_k) > 1e-3).any()  # another tail is fitted
    flat = slow.reshape(-1, 3)
    weights = [diagnostics._smoothed_log_weights(flat, efficiency) for efficiency in (1.0, relative_efficiency(slow))]
    assert (weights[0] != weights[1]).any()


def test_a_ranking_needs_small_k_hats_and_two_points_of_every_class():
    def found(*k_hats):
        return LeaveOneOut(0.0, 0.0, 0.0, np.array(k_hats), np.zeros(len(k_hats)))

    assert objection_to_ranking(found(0.1, 0.7, 0.3, -0.2), np.array([0, 0, 1, 1])) is None
    assert objection_to_ranking(found(0.1, 0.3, 0.2, 0.1), jnp.array([0, 2, 2, 0])) is None  # 1 has no points at all
    assert re.search("at 1 of 4; judge", objection_to_ranking(found(0.1, 0.71, 0.3, 0.2), np.array([0, 0, 1, 1])))
    assert "at 2 of 4" in objection_to_ranking(found(np.nan, np.inf, 0.3, 0.2), np.array([0, 0, 1, 1]))
    assert "one of class 1" in objection_to_ranking(found(0.1, 0.3, 0.2), np.array([0, 0, 1]))


def test_laplace_is_doubted_for_logistic_softmax_at_small_temperatures():
    assert "got 0.2" in doubt_about_laplace(LogisticSoftmax(0.2))
    for trusted in (LogisticSoftmax(1.0), Softmax(), OneVsEach()):
        assert doubt_about_laplace(trusted) is None


def test_samples_without_latents_are_refused():
    class Finished:
        def get_samples(self, group_by_chain):
            return {"u": np.zeros((1, 2, 3, 5))}

        def get_extra_fields(self, group_by_chain):
            return {}

    task = problem(0, points=5)
    with pytest.raises(ValueError, match="expected samples of f, got u"):
        to_arviz(jax.random.key(0), Finished(), Softmax(), task.prior, task.y)
    with pytest.raises(TypeError, match="expected a posterior or an MCMC object that has run, got Marginals"):
        to_arviz(jax.random.key(0), task.prior.given(fitted("cvi", task)[2].sites).marginals, Softmax(), *task[:2])


@pytest.mark.long
def test_the_runner_writes_data_tables_and_plots(tiny_run, tiny_data, tmp_path, capfd):
    out = tmp_path / "out"
    flags = [str(tiny_run.path), "--out", str(out), "--data-root", tiny_data, "--query", "4"]
    assert diagnose.command_line([*flags, "--draws", "400", "--compare", "gaussian"]) == 0
    plots = {f"{name}.png" for name in ("trace", "rank", "forest", "elbo", "predictive")}
    assert {path.name for path in out.iterdir()} == plots | {"own.nc", "own.csv", "nuts.nc", "nuts.csv"}
    data = diagnostics.load(out / "nuts.nc")
    assert group_names(data) == GROUPS | {"predictions"} and data["posterior"]["f"].shape == (4, 100, 3, 3)
    assert {"lp", "n_steps", "acceptance_rate"} <= set(data["sample_stats"].data_vars)
    printed = capfd.readouterr().out
    assert "One 3-way 1-shot task of omniglot (seed 0), likelihood softmax" in printed
    assert (
        "No ranking by PSIS-LOO: expected at least two labelled points" in printed
        and "\nnuts " in printed
        and "\ncvi (the run's own) " in printed
    )
    assert re.search(r"\ngaussian +exact ", printed)
    for more, message in (
        ([], "expected --out to be a new or empty folder"),
        (["--draws", "10"], "--draws must be at least 400"),
        (["--compare", "probit"], "--compare: expected all, none, or some of softmax"),
        (["--way", "9", "--out", str(tmp_path / "other")], "expected at least 9 classes"),
    ):
        with pytest.raises(SystemExit) as stopped:
            diagnose.command_line([*flags, *more])
        error = capfd.readouterr().err
        assert stopped.value.code == 2 and error.startswith(f"error: {message}") and error.count("\n") == 1
