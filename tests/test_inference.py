"""Conformance of every registered inference kernel (K1-K4, K7-K9), its optimum, and what is refused."""

import functools
import inspect
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from problems import FixedPoints, accepts, double, problem, relu_features
from scipy.optimize import minimize

from inference import HYPERGRADIENTS, INFERENCE, OBJECTIVES
from inference.inner import (
    Code,
    InferenceKernel,
    Info,
    Mask,
    cavi,
    cvi,
    exact,
    fit,
    fit_to_tolerance,
    gibbs,
    gradient,
    laplace,
    run,
)
from inference.inner.base import usable_kernels
from inference.outer.hypergradients import implicit, sites, unroll
from inference.outer.objectives import EmbeddedTask, Inner, check_combination, elbo, evidence, predictive
from inference.outer.svi import latent_process
from inference.predictive import predict, temper
from models import KERNELS, LIKELIHOODS
from models.block_gaussian import JointMarginals
from models.expectations import Exact, GaussHermite, MonteCarlo
from models.gaussian import GaussianPrior, Marginals, Query, Sites, condition
from models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax

CLASSES, POINTS, QUERIES = 3, 9, 5
ORDER = 4  # of the product rule: 64 nodes, a number that the sampled rule shares, and with it the compiled functions
KEY_SEED = 11


def cells():
    """Every pair of registered inference and likelihood that can be built."""
    for inference, constructor in INFERENCE.items():
        for name, likelihood in LIKELIHOODS.items():
            try:
                constructor(likelihood())
            except TypeError:
                continue
            yield inference, name


CELLS = list(cells())
SAMPLED = {"gibbs"}  # their states are random draws: what is asked of them is in test_samplers.py
DETERMINISTIC = [cell for cell in CELLS if cell[0] not in SAMPLED]
# Cells that repeat what others show are run with the slow tests.
REPEATS = {
    ("gibbs", "logistic-softmax"),
    ("laplace", "logistic-softmax"),
    ("cvi", "one-vs-each"),
    ("gradient", "logistic-softmax"),
    ("gradient", "one-vs-each"),
}


def parametrised(chosen):
    marked = [
        pytest.param(*cell, marks=pytest.mark.slow if cell in REPEATS else [], id="-".join(cell)) for cell in chosen
    ]
    return pytest.mark.parametrize("inference, likelihood", marked)


each_cell, each_deterministic_cell = parametrised(CELLS), parametrised(DETERMINISTIC)
# Steps after which tests of a fixed number of steps stop, and settings under which `gradient` converges.
STEPS = {"gradient": 12}
CONVERGING = {"gradient": {"learning_rate": 0.02}}
CONVERGED_STEPS = {"gradient": 1500, "cvi": 80, "exact": 1, "cavi": 120, "laplace": 80}


def kernel_for(inference, likelihood, points=None, **settings):
    constructor = INFERENCE[inference]
    if accepts(constructor, "expectation"):
        settings = {"expectation": FixedPoints(points), **settings}
    if accepts(constructor, "chains"):
        settings = {"chains": 3, **settings}
    return constructor(likelihood, **settings)


def product_nodes():
    return GaussHermite(ORDER).points(jax.random.key(0), CLASSES, jnp.result_type(float))


def sampled_nodes(seed=0):
    return MonteCarlo(ORDER**CLASSES).points(jax.random.key(seed), CLASSES, jnp.result_type(float))


@functools.cache
def fitting(inference, likelihood, steps=None):
    """Compiled once for each cell, precision and shape: state, Info of each step, marginals and query marginals."""

    @jax.jit
    def fitted(prior, y, query, points, mask=None):
        kernel = kernel_for(inference, LIKELIHOODS[likelihood](), points, **CONVERGING.get(inference, {}))
        count = steps or STEPS.get(inference, 5)
        state, info = fit(jax.random.key(KEY_SEED), kernel, prior, y, mask, steps=count)
        posterior = kernel.posterior(state, prior)
        return state, info, posterior.marginals, posterior.predict(query)

    return fitted


def assert_trees_close(left, right, **tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# K1: the protocol


@each_cell
def test_fields_and_argument_names(inference, likelihood):
    kernel = kernel_for(inference, LIKELIHOODS[likelihood]())
    assert isinstance(kernel, InferenceKernel) and kernel.traits.name == inference
    expected = {
        "init": ["key", "prior", "y", "mask"],
        "step": ["key", "state", "prior", "y", "mask"],
        "posterior": ["state", "prior"],
        "sites": ["state"],
        "elbo": ["state", "posterior", "y", "mask"],
        "log_evidence": ["state", "prior"],
    }
    assert (kernel.log_evidence is None) == (kernel.sites is None) == (inference == "gradient")
    assert kernel.traits.sampled == (inference in SAMPLED)
    for field, names in expected.items():
        function = getattr(kernel, field)
        assert function is None or list(inspect.signature(function).parameters) == names, field


def start(task, seed=0):
    return jax.random.key(seed), task.prior, task.y


# K2: one compilation, and a state that loops and branches can carry


@each_cell
@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_state_keeps_its_shape_and_type(inference, likelihood, wide):
    with jax.enable_x64(wide):
        task = problem(1)
        kernel = kernel_for(inference, LIKELIHOODS[likelihood](), product_nodes())
        first = jax.eval_shape(kernel.init, *start(task))
        following, info = jax.eval_shape(kernel.step, jax.random.key(0), first, task.prior, task.y)

        def types(tree):
            return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree)

        assert jax.tree.structure(first) == jax.tree.structure(following)
        assert types(first) == types(following)
        assert isinstance(info, Info) and all(leaf.shape == () for leaf in info)
        leaves = jax.tree.leaves((first, info.elbo, info.residual))
        floats = {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)}
        assert floats == {jnp.dtype("float64" if wide else "float32")}

        def either(choice, state):
            return jax.lax.cond(
                choice, lambda: kernel.step(jax.random.key(0), state, task.prior, task.y)[0], lambda: state
            )

        assert types(jax.eval_shape(either, True, first)) == types(first)


@double
@each_cell
def test_a_second_call_does_not_compile_again(inference, likelihood):
    fitted = fitting(inference, likelihood)
    _, info, _, _ = fitted(*problem(1, kernel="linear"), sampled_nodes())
    compiled = fitted._cache_size()
    fitted(*problem(2, kernel="linear"), product_nodes())
    assert fitted._cache_size() == compiled
    assert (info.code == Code.OK).all()


# K3: a Gaussian likelihood gives exact GP regression


@double
@pytest.mark.parametrize("inference", [name for name, likelihood in CELLS if likelihood == "gaussian"])
def test_gaussian_likelihood_gives_the_exact_gp(inference):
    """The noise 0.5 and output scale 1 keep plain gradient ascent stable."""
    task, noise = problem(2, scale=1.0, kernel="matern52"), 0.5

    @jax.jit
    def fitted():
        kernel = kernel_for(inference, LabelRegression(noise), product_nodes(), **CONVERGING.get(inference, {}))
        state, info = fit(*start(task)[:1], kernel, *start(task)[1:], steps=CONVERGED_STEPS[inference])
        posterior = kernel.posterior(state, task.prior)
        return posterior.marginals, posterior.predict(task.query), info.elbo[-1]

    marginals, predicted, bound = fitted()
    target = 2.0 * (np.arange(CLASSES)[:, None] == np.asarray(task.y)) - 1
    prior, query = jax.device_get((task.prior, task.query))
    noisy = prior.covariance + noise * np.eye(POINTS)
    close = partial(np.testing.assert_allclose, atol=1e-7 if inference == "gradient" else 1e-11)
    for result, mean, cross, variance in (
        (marginals, prior.mean, prior.covariance, np.diagonal(prior.covariance)),
        (predicted, query.mean, query.cross, query.variance),
    ):
        gain = np.linalg.solve(noisy, cross.T).T
        close(result.mean, mean + (target - prior.mean) @ gain.T)
        close(result.variance, np.broadcast_to(variance - np.sum(gain * cross, axis=1), result.variance.shape))
    error = target - prior.mean
    quadratic = np.einsum("cn,cn->", error, np.linalg.solve(noisy, error.T).T)
    log_evidence = -0.5 * (quadratic + CLASSES * np.linalg.slogdet(2 * np.pi * noisy)[1])
    close(bound, log_evidence)  # the bound is tight


# K4 and the optimum of the bound


@double
@each_deterministic_cell
def test_a_step_at_the_fixed_point_moves_nothing_and_the_bound_is_stationary(inference, likelihood):
    """For logistic-softmax a prior mean at which no precision of CVI is clipped: a clip ends elsewhere."""
    task, model = problem(3, scale=1.0), LIKELIHOODS[likelihood]()
    if likelihood == "logistic-softmax":
        task = task._replace(prior=task.prior._replace(mean=task.prior.mean - 4.0))
    settings = {"learning_rate": 0.005} if inference == "gradient" else {}  # noise 0.1 allows no more

    @jax.jit
    def check(points):
        kernel = kernel_for(inference, model, points, **settings)
        state, _ = fit(*start(task)[:1], kernel, *start(task)[1:], steps=3 * CONVERGED_STEPS[inference])
        moved, info = kernel.step(jax.random.key(0), state, task.prior, task.y)
        names = ("sites", "mean", "factor", "aux", "mode")
        free = {name: getattr(state, name) for name in names if hasattr(state, name)}

        def bound(values):
            if inference == "laplace":  # its optimum is that of the log joint, with the f of alpha
                f = task.prior.mean + values["mode"].alpha @ task.prior.covariance
                data = jnp.sum(model.log_prob(task.y, f))
                return data - 0.5 * jnp.sum((f - task.prior.mean) * values["mode"].alpha)
            there = state._replace(**values)
            return kernel.elbo(there, kernel.posterior(there, task.prior), task.y, None)

        value, slope = jax.value_and_grad(bound)(free)
        if "factor" in slope:
            slope["factor"] = jnp.tril(slope["factor"])
        return state, free, {name: getattr(moved, name) for name in free}, value, slope, info

    for points in (product_nodes(), sampled_nodes()):
        state, free, moved, value, slope, info = check(points)
        assert_trees_close(moved, free, atol=1e-9)
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(slope)) < 1e-7
        np.testing.assert_allclose(state.objective if inference == "laplace" else info.elbo, value, rtol=1e-12)
        assert info.code == Code.OK and info.residual < 1e-7 and info.clipped == 0


SUPPORT, LABELS = 3, np.array([0, 1, 2, 0, 2, 1], np.int32)  # the merged task of the objectives
THETA = np.array([np.log(4.0), 0.2, 0.1])


def at_theta(theta):
    """Process and task at theta = (log scale, log length-scale, distance along a direction of the features)."""
    rng = np.random.default_rng(4)
    x, direction = relu_features(rng, LABELS, 6), rng.normal(size=(len(LABELS), 6))
    moved, y = jnp.asarray(x) + theta[2] * jnp.asarray(direction), jnp.asarray(LABELS)
    hyper = {"log_scale": theta[0], "log_lengthscale": theta[1]}
    task = EmbeddedTask(moved[:SUPPORT], y[:SUPPORT], moved[SUPPORT:], y[SUPPORT:])
    return latent_process(KERNELS["rbf"](), hyper, CLASSES), task


@jax.jit
def prior_at(theta):
    process, task = at_theta(theta)
    return process.prior(jnp.concatenate([task.support, task.query]))


@jax.jit
def converge_exactly(prior, y):
    """The fixed point of CVI with deterministic expectations, to rounding."""
    kernel = cvi(Softmax(), expectation=Exact())
    return fit_to_tolerance(jax.random.key(0), kernel, prior, y, tolerance=1e-9, max_steps=500)


@jax.jit
def exact_bound(factors, prior, y):
    """ELBO of the posterior with these sites, and its gradient in them."""

    def bound(inner):
        posterior = condition(prior, inner)
        return jnp.sum(Softmax().expected_log_prob(y, posterior.marginals)) - posterior.kl

    return jax.value_and_grad(bound)(factors)


def check_no_other_sites_are_better(task, evaluations):
    """The ELBO at the fixed point of CVI against L-BFGS over all sites, started elsewhere; deterministic E_q."""
    state, info, _ = converge_exactly(task.prior, task.y)
    assert info.code == Code.OK and info.residual <= 1e-9
    shape = state.sites.shift.shape

    def negative(flat):
        value, slope = exact_bound(Sites(*jnp.asarray(flat).reshape(2, *shape)), task.prior, task.y)
        return -float(value), -np.concatenate([np.ravel(leaf) for leaf in slope])

    optimum = np.concatenate([np.ravel(leaf) for leaf in state.sites])
    value, slope = negative(optimum)
    np.testing.assert_allclose(-value, info.elbo, rtol=1e-13)
    assert np.abs(slope).max() < 1e-7
    # Not 0: at W = 0 the derivative of W^1/2 is set to 0, and a line search that ends there does not move again.
    bounds = [(None, None)] * np.prod(shape) + [(1e-9, None)] * np.prod(shape)
    options = {"maxfun": evaluations, "maxiter": evaluations, "ftol": 1e-15, "gtol": 1e-8}
    begin = np.full_like(optimum, 0.01)
    found = minimize(negative, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    gap = found.fun - value
    print(f"ELBO {-value:.6f} at the fixed point; {found.nfev} L-BFGS evaluations end {gap:.1e} nats below")
    assert gap > -1e-6  # 1e-4 is asked for
    assert gap < 1e-4  # L-BFGS did arrive


@double
def test_no_other_sites_have_a_higher_bound():
    check_no_other_sites_are_better(problem(5, points=len(LABELS), features=5), evaluations=80)


@pytest.mark.slow
@double
@pytest.mark.parametrize("kernel, scale", [("rbf", 1.0), ("rbf", 30.0), ("cosine", 100.0), ("poly2", 4.0)])
def test_no_other_sites_have_a_higher_bound_on_a_grid(kernel, scale):
    check_no_other_sites_are_better(problem(6, scale=scale, kernel=kernel), evaluations=3000)


# K7: hyper-gradients

STEP = 1e-3
DIRECTIONS = np.eye(len(THETA))


def differences(value, directions=DIRECTIONS):
    """Derivatives along directions of a function of theta, by fourth-order central differences."""

    def along(direction):
        values = [float(value(THETA + k * STEP * direction)) for k in (-2, -1, 1, 2)]
        return (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * STEP)

    return np.array([along(direction) for direction in directions])


def relative_error(value, reference):
    return np.abs(np.asarray(value) - reference).max() / np.abs(reference).max()


@functools.cache
def objective_slope(objective, hypergradient, steps, inference="cvi", expectation=None):
    """Value and gradient in theta of a registered objective, compiled."""
    likelihood = Softmax()
    settings = CONVERGING.get(inference, {}) | {"expectation": expectation or MonteCarlo(64)}

    @jax.jit
    def slope(theta):
        def value(inner_theta):
            kernel = INFERENCE[inference](likelihood, **settings)
            inner = Inner(kernel, steps, HYPERGRADIENTS[hypergradient])
            process, task = at_theta(inner_theta)
            return OBJECTIVES[objective](jax.random.key(7), inner, likelihood, process, task).value

        return jax.value_and_grad(value)(theta)

    return slope


def check_exact_hypergradients(directions):
    def converged_bound(theta):
        _, info, _ = converge_exactly(prior_at(theta), jnp.asarray(LABELS))
        assert info.code == Code.OK
        return info.elbo

    expected = differences(converged_bound, directions)
    for objective in ("elbo", "evidence"):
        value, slope = objective_slope(objective, "sites", 40, expectation=Exact())(THETA)
        error = relative_error(directions @ slope, expected)
        print(f"{objective} with sites, deterministic expectations: relative error {error:.1e}")
        np.testing.assert_allclose(value, converged_bound(THETA), rtol=1e-10)
        assert error < 1e-6


@double
def test_hypergradients_at_fixed_sites_are_those_of_the_converged_bound():
    """Along one direction that moves everything, so that few evaluations are enough."""
    check_exact_hypergradients(np.array([[0.5, -0.7, 0.6]]))


@pytest.mark.slow
@double
def test_hypergradients_at_fixed_sites_are_those_of_the_converged_bound_in_each_coordinate():
    check_exact_hypergradients(DIRECTIONS)


@functools.cache
def sampled_differences(objective):
    """Differences of an objective whose nodes are held fixed by the key, once it has settled."""
    return differences(lambda theta: objective_slope(objective, "sites", 60)(theta)[0])


@double
def test_hypergradients_at_fixed_sites_with_sampled_nodes_and_after_more_steps():
    expected = sampled_differences("elbo")
    slopes = [
        objective_slope(objective, "sites", steps)(THETA)[1]
        for objective, steps in (("elbo", 50), ("elbo", 60), ("evidence", 60))
    ]
    for slope in slopes:
        assert relative_error(slope, expected) < 1e-6
    assert relative_error(slopes[0], np.asarray(slopes[1])) < 1e-8


@double
def test_unrolling_converges_to_the_same_hypergradient_and_stays_there():
    """Once a step moves nothing, the secant rule divides nothing by nothing; its derivative must not."""
    error = relative_error(objective_slope("elbo", "unroll", 120)(THETA)[1], sampled_differences("elbo"))
    print(f"elbo with unroll: relative error {error:.1e} after 120 steps")
    assert error < 1e-6


@pytest.mark.slow
def test_unrolling_past_the_fixed_point_stays_finite_in_single_precision():
    value, slope = objective_slope("elbo", "unroll", 200)(jnp.asarray(THETA))
    assert np.isfinite(value) and np.isfinite(slope).all()


@double
def test_implicit_and_unrolled_are_exact_for_the_predictive_objective_and_fixed_sites_are_not():
    expected = sampled_differences("predictive")
    assert relative_error(objective_slope("predictive", "implicit", 60)(THETA)[1], expected) < 1e-6
    assert relative_error(objective_slope("predictive", "unroll", 60)(THETA)[1], expected) < 1e-6
    assert relative_error(objective_slope("predictive", "sites", 60)(THETA)[1], expected) > 1e-3


# Cells that claim exactness besides softmax with cvi, their settings, and steps enough to settle to rounding.
CLAIMS = {
    "laplace softmax": (Softmax(), laplace, {"expectation": MonteCarlo(64)}, 40),
    "cvi block softmax": (Softmax(), cvi, {"expectation": MonteCarlo(64), "covariance": "block"}, 80),
    "cavi logistic-softmax": (LogisticSoftmax(), cavi, {}, 250),
    "cavi one-vs-each": (OneVsEach(), cavi, {}, 250),
}


@functools.cache
def claimed_slope(name, objective, hypergradient):
    """Value and gradient in theta and, for logistic-softmax, log tau."""
    likelihood, constructor, settings, steps = CLAIMS[name]

    @jax.jit
    def slope(theta):
        def value(theta):
            learned = {parameter: theta[3] for parameter in likelihood.parameters()}
            model = likelihood.with_parameters(learned)
            inner = Inner(constructor(model, **settings), steps, HYPERGRADIENTS[hypergradient])
            process, task = at_theta(theta)
            outcome = OBJECTIVES[objective](jax.random.key(7), inner, model, process, task)
            return outcome.value, outcome.info

        return jax.value_and_grad(value, has_aux=True)(theta)

    return slope


@double
@pytest.mark.parametrize("likelihood", [Softmax(), LogisticSoftmax(), OneVsEach()], ids=lambda one: type(one).__name__)
def test_laplace_evidence_is_the_textbook_formula(likelihood):
    """log p(y | f) - (f - a) K^-1 (f - a) / 2 - log|I + K L| / 2 at the mode f (Rasmussen and Williams 2006, 3.32)."""
    task = problem(3, scale=1.0)
    kernel = laplace(likelihood)
    state, info = jax.jit(lambda: fit(jax.random.key(0), kernel, task.prior, task.y, steps=60))()
    assert info.residual[-1] < 1e-7
    blocks, step = np.asarray(kernel.sites(state).blocks()), np.asarray(state.mode.f - task.prior.mean)
    size = CLASSES * POINTS
    precision = np.zeros((CLASSES, POINTS, CLASSES, POINTS))
    for point, block in enumerate(blocks):
        precision[:, point, :, point] = block
    product = np.kron(np.eye(CLASSES), task.prior.covariance) @ precision.reshape(size, size)
    quadratic = np.sum(step * np.linalg.solve(task.prior.covariance, step.T).T)
    expected = np.sum(likelihood.log_prob(task.y, state.mode.f)) - 0.5 * quadratic
    expected -= 0.5 * np.linalg.slogdet(np.eye(size) + product)[1]
    np.testing.assert_allclose(kernel.log_evidence(state, task.prior), expected, rtol=1e-7)


def test_a_mixture_of_composite_densities_is_normalised_once():
    """(O12): the mean over the chains of E[OVE_k], then normalised; not the mean of what each chain predicts."""
    task, likelihood = problem(5, scale=10.0), OneVsEach(prediction_draws=4096)
    kernel = gibbs(likelihood, chains=4)
    posterior = run(jax.random.key(0), kernel, task.prior, task.y, steps=2)
    value = predict(jax.random.key(1), likelihood, posterior, task.query)
    marginals = posterior.predict(task.query)
    chains = [jax.tree.map(lambda leaf, chain=chain: leaf[chain], marginals) for chain in range(4)]
    densities = np.stack([likelihood.expected_density(jax.random.key(2), chain) for chain in chains])
    once = densities.mean(0) / densities.mean(0).sum(1, keepdims=True)
    each = np.mean(densities / densities.sum(2, keepdims=True), axis=0)
    assert np.abs(value - once).max() < 5e-3 < 2 * np.abs(each - once).max()
    assert np.abs(value - once).max() < 0.5 * np.abs(value - each).max()


def claims():
    """Each pair with the modes in which it is exact: Laplace through its mode only. Most compile for long: slow."""
    quick = {("cavi logistic-softmax", "elbo", "sites"), ("cavi one-vs-each", "evidence", "sites")}
    quick |= {("laplace softmax", "predictive", "implicit")}
    for name in CLAIMS:
        modes = [("elbo", "implicit"), ("predictive", "implicit")]
        modes += (
            [("evidence", "implicit")] if name.startswith("laplace") else [("elbo", "sites"), ("evidence", "sites")]
        )
        for mode in modes:
            yield pytest.param(name, *mode, marks=[] if (name, *mode) in quick else pytest.mark.slow)


@double
@pytest.mark.parametrize("name, objective, hypergradient", list(claims()))
def test_every_claim_of_an_exact_hypergradient(name, objective, hypergradient):
    """Against fourth-order differences of the converged value."""
    theta = np.append(THETA, -0.2)[: 3 + len(CLAIMS[name][0].parameters())]
    direction = np.array([0.5, -0.7, 0.6, 0.4])[: len(theta)]
    (_, info), slope = claimed_slope(name, objective, hypergradient)(theta)
    assert info.code == Code.OK and info.residual < 1e-9
    reference = "elbo" if (objective, hypergradient) == ("evidence", "sites") else objective

    def value(at):
        return float(claimed_slope(name, reference, hypergradient)(at)[0][0])

    steps = {k: value(theta + k * STEP * direction) for k in (-2, -1, 1, 2)}
    expected = (steps[-2] - 8 * steps[-1] + 8 * steps[1] - steps[2]) / (12 * STEP)
    error = abs(direction @ slope - expected) / abs(expected)
    print(f"{name}, {objective} with {hypergradient}: relative error {error:.1e}")
    assert error < 1e-6


@double
def test_an_implicit_hypergradient_short_of_the_fixed_point_is_reported():
    inner = Inner(cvi(Softmax(), expectation=MonteCarlo(64)), 1, HYPERGRADIENTS["implicit"])
    process, task = at_theta(THETA)
    outcome = jax.jit(lambda: predictive(jax.random.key(7), inner, Softmax(), process, task))()
    assert outcome.info.code == Code.IMPLICIT_UNRELIABLE


@double
def test_the_baseline_converges_to_the_same_hypergradient():
    """Plain gradient ascent has the same optimum, so unrolled far enough it has the same derivative."""
    slope = objective_slope("elbo", "unroll", CONVERGED_STEPS["gradient"], inference="gradient")(THETA)[1]
    assert relative_error(slope, sampled_differences("elbo")) < 1e-5


@double
@pytest.mark.parametrize("hypergradient", ["sites", "unroll"])
@pytest.mark.parametrize("objective", ["elbo", "evidence"])
def test_exact_inference_learns_kernel_and_noise_by_the_marginal_likelihood(objective, hypergradient):
    likelihood = LabelRegression(0.3)
    log_noise = float(likelihood.parameters()["log_noise"])
    start_at = np.append(THETA, log_noise)

    @jax.jit
    def slope(theta):
        def value(theta):
            model = likelihood.with_parameters({"log_noise": theta[3]})
            inner = Inner(exact(model), 1, HYPERGRADIENTS[hypergradient])
            process, task = at_theta(theta)
            return OBJECTIVES[objective](jax.random.key(0), inner, model, process, task).value

        return jax.value_and_grad(value)(theta)

    @jax.jit
    def marginal_likelihood(theta):
        def value(theta):
            prior = prior_at(theta)
            noisy = prior.covariance + jnp.exp(theta[3]) * jnp.eye(len(LABELS))
            target = likelihood.observed(jnp.asarray(LABELS), CLASSES)
            log_density = jax.vmap(partial(jax.scipy.stats.multivariate_normal.logpdf, cov=noisy))(target, prior.mean)
            return jnp.sum(log_density)

        return jax.value_and_grad(value)(theta)

    for result, reference in zip(slope(start_at), marginal_likelihood(start_at), strict=True):
        assert np.abs(reference).max() > 0.1
        np.testing.assert_allclose(result, reference, rtol=1e-9)


# K8: vmap is a loop, and padding with a mask changes nothing


@double
@each_cell
def test_tasks_under_vmap_equal_a_loop_in_any_order(inference, likelihood):
    tasks = [problem(seed, kernel="linear") for seed in (7, 8, 9)]
    nodes = [sampled_nodes(seed) for seed in (7, 8, 9)]
    fitted = fitting(inference, likelihood)
    loop = [fitted(*task, points) for task, points in zip(tasks, nodes, strict=True)]
    batched = jax.jit(jax.vmap(lambda task, points: fitted(*task, points)))
    stack = partial(jax.tree.map, lambda *leaves: np.stack(leaves))
    for order in ((0, 1, 2), (2, 0, 1)):
        results = batched(*[stack(*[items[i] for i in order]) for items in (tasks, nodes)])
        for position, i in enumerate(order):
            assert_trees_close(jax.tree.map(lambda leaf, p=position: leaf[p], results), loop[i], rtol=1e-9, atol=1e-10)


def of_classes(marginals, classes, points=None):
    """Marginals with their classes, and points, in another order."""
    points = np.arange(marginals.mean.shape[1]) if points is None else points
    mean = marginals.mean[np.ix_(classes, points)]
    if isinstance(marginals, JointMarginals):
        return JointMarginals(mean, marginals.covariance[np.ix_(points, classes, classes)])
    return Marginals(mean, marginals.variance[np.ix_(classes, points)])


def padded(task, nodes, rng):
    """The task with two more points and one more class, all of them junk, and the mask that says so."""
    count, classes = POINTS + 2, task.prior.mean.shape[0] + 1
    root = np.concatenate([task.prior.root, 5 * rng.normal(size=(2, task.prior.root.shape[1]))])
    mean = rng.normal(size=(classes, count))
    mean[:-1, :POINTS] = task.prior.mean
    query_mean = np.concatenate([task.query.mean, rng.normal(size=(1, QUERIES))])
    query_root = task.query.cross @ np.linalg.pinv(task.prior.root).T
    prior = GaussianPrior(mean, root @ root.T, root)
    y = np.concatenate([task.y, np.array([classes - 1, 0], np.int32)])
    mask = Mask(np.arange(count) < POINTS, np.arange(classes) < classes - 1)
    more_nodes = nodes._replace(nodes=np.concatenate([nodes.nodes, rng.normal(size=(len(nodes.nodes), 1))], axis=1))
    query = Query(query_mean, query_root @ root.T, task.query.variance)
    return jax.tree.map(jnp.asarray, (prior, y, query, more_nodes, mask))


@double
@each_deterministic_cell
def test_a_padded_and_masked_task_equals_the_unpadded_one(inference, likelihood):
    """K of rank 6 with 9 points. The root of the features leaves the basis of u alone when points are added."""
    task, nodes = problem(10, kernel="linear"), sampled_nodes()
    fitted = fitting(inference, likelihood)
    _, info, marginals, predicted = fitted(*task, nodes)
    prior, y, query, more_nodes, mask = padded(task, nodes, np.random.default_rng(11))
    _, padded_info, padded_marginals, padded_predicted = fitted(prior, y, query, more_nodes, mask)
    close = partial(assert_trees_close, rtol=1e-9, atol=1e-10)
    close(padded_info, info)
    close(of_classes(padded_marginals, np.arange(CLASSES), np.arange(POINTS)), marginals)
    close(of_classes(padded_predicted, np.arange(CLASSES)), predicted)
    np.testing.assert_allclose(padded_predicted.mean[-1], query.mean[-1], atol=1e-12)  # the absent class: the prior


# K9: equivariance


@double
@each_deterministic_cell
@pytest.mark.parametrize("nodes", [product_nodes, sampled_nodes], ids=["product", "sampled"])
def test_permuting_labels_permutes_the_posterior(inference, likelihood, nodes):
    task, points, order = problem(12, kernel="linear"), nodes(), np.array([2, 0, 1])
    fitted = fitting(inference, likelihood)
    _, info, marginals, predicted = fitted(*task, points)
    moved_prior = task.prior._replace(mean=task.prior.mean[order])
    moved_query = task.query._replace(mean=task.query.mean[order])
    moved_points = points._replace(nodes=points.nodes[:, order])
    labels = jnp.asarray(np.argsort(order), jnp.int32)[task.y]
    _, moved_info, moved_marginals, moved_predicted = fitted(moved_prior, labels, moved_query, moved_points)
    close = partial(assert_trees_close, rtol=1e-9, atol=1e-10)
    if inference == "laplace":  # over coupled classes, the nodes go through a Cholesky factor that knows their order
        moved_info, info = moved_info._replace(elbo=0.0), info._replace(elbo=0.0)
    close(moved_info, info)
    close(moved_marginals, of_classes(marginals, order))
    close(moved_predicted, of_classes(predicted, order))


@double
@each_deterministic_cell
def test_permuting_points_permutes_the_posterior(inference, likelihood):
    task, points, order = problem(13, kernel="linear"), sampled_nodes(), np.random.default_rng(14).permutation(POINTS)
    fitted = fitting(inference, likelihood)
    _, info, marginals, predicted = fitted(*task, points)
    prior = GaussianPrior(
        task.prior.mean[:, order], task.prior.covariance[np.ix_(order, order)], task.prior.root[order]
    )
    query = task.query._replace(cross=task.query.cross[:, order])
    _, moved_info, moved_marginals, moved_predicted = fitted(prior, task.y[order], query, points)
    close = partial(assert_trees_close, rtol=1e-8, atol=1e-9)
    close(moved_info, info)
    close(moved_marginals, of_classes(marginals, np.arange(CLASSES), order))
    close(moved_predicted, predicted)


@pytest.fixture(scope="module")
def posterior():
    task, kernel = problem(15), cvi(Softmax(), expectation=FixedPoints(product_nodes()))
    return task, jax.jit(lambda: run(*start(task)[:1], kernel, *start(task)[1:], steps=4))()


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_query_does_not_depend_on_the_others(posterior, likelihood):
    task, fitted = posterior
    predicted = jax.jit(lambda query: predict(jax.random.key(1), LIKELIHOODS[likelihood](), fitted, query))
    junk = Query(task.query.mean.at[:, 1:].set(30.0), task.query.cross.at[1:].set(-3.0), task.query.variance + 1.0)
    junk = junk._replace(variance=junk.variance.at[0].set(task.query.variance[0]))
    np.testing.assert_array_equal(predicted(task.query)[0], predicted(junk)[0])
    alone = Query(task.query.mean[:, :1], task.query.cross[:1], task.query.variance[:1])
    np.testing.assert_allclose(predicted(alone)[0], predicted(task.query)[0], rtol=1e-5)
    assert not np.allclose(predicted(task.query)[1], predicted(junk)[1])


def test_prediction_is_that_of_the_query_marginals_and_of_existing_classes(posterior):
    task, fitted = posterior
    real = jnp.asarray([True, True, False])

    @jax.jit
    def both_ways(query):
        by_hand = Softmax().predict(jax.random.key(2), fitted.predict(query), real)
        return predict(jax.random.key(2), Softmax(), fitted, query, real), by_hand

    probabilities, by_hand = both_ways(task.query)
    np.testing.assert_allclose(probabilities, by_hand, rtol=1e-6)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    assert (probabilities[:, 2] == 0).all()


def test_tempering_changes_confidence_and_not_the_order():
    probabilities = jnp.asarray([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    np.testing.assert_allclose(temper(probabilities, 1.0), probabilities, atol=1e-6)
    squared = np.square([0.7, 0.2, 0.1])
    np.testing.assert_allclose(temper(probabilities, 0.5)[0], squared / squared.sum(), rtol=1e-5)
    flat = temper(probabilities, 100.0)
    assert np.isfinite(flat).all() and (np.argsort(flat[0]) == np.argsort(probabilities[0])).all()
    assert flat[0].max() < 0.35


# Loops and result codes


@double
def test_running_to_a_tolerance_stops_at_it_and_reports():
    task, kernel = problem(16), cvi(LabelRegression())

    @partial(jax.jit, static_argnames="max_steps")
    def converge(max_steps):
        settings = {"tolerance": 1e-6, "max_steps": max_steps}
        return fit_to_tolerance(*start(task)[:1], kernel, *start(task)[1:], **settings)

    state, info, count = converge(100)
    assert info.code == Code.OK and info.residual <= 1e-6 and 3 <= count < 100
    _, each = jax.jit(lambda: fit(*start(task)[:1], kernel, *start(task)[1:], steps=100))()
    assert np.argmax(each.residual <= 1e-6) + 1 == count  # the first step that reaches it
    np.testing.assert_allclose(state.elbo, each.elbo[count - 1], rtol=1e-12)
    _, short, steps = converge(2)
    assert short.code == Code.NOT_CONVERGED and steps == 2


def test_numbers_that_are_not_finite_are_reported():
    task = problem(17)
    broken = task.prior._replace(covariance=task.prior.covariance.at[0, 0].set(jnp.nan))
    first = {inference: likelihood for inference, likelihood in reversed(CELLS)}
    for inference, likelihood in first.items():
        kernel = kernel_for(inference, LIKELIHOODS[likelihood](), product_nodes())
        _, info = jax.jit(lambda prior, kernel=kernel: fit(*start(task)[:1], kernel, prior, task.y, steps=2))(broken)
        assert info.code[-1] == Code.NON_FINITE, inference


def test_an_indefinite_kernel_is_reported_by_the_baseline():
    task = problem(18)
    broken = task.prior._replace(covariance=task.prior.covariance - 3.0 * jnp.eye(POINTS))
    kernel = gradient(Softmax(), expectation=FixedPoints(product_nodes()))
    _, info = jax.jit(lambda prior: fit(*start(task)[:1], kernel, prior, task.y, steps=1))(broken)
    assert info.code[-1] == Code.INDEFINITE_KERNEL


# What is refused


@pytest.fixture
def unchecked():
    """Without the run-time type checks of the tests, as a user calls: those would object first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


class NoLikelihood:
    def log_prob(self, y, f):
        return f


@pytest.mark.parametrize(
    "constructor, likelihood, message",
    [
        (exact, Softmax(), "exact needs gaussian_sites; Softmax offers none: use cvi, laplace, gradient"),
        (cavi, Softmax(), "cavi needs augmented latents; Softmax offers none: use cvi, laplace, gradient"),
        (gibbs, LabelRegression(), "gibbs needs .*; LabelRegression offers none: use cvi, exact, gradient"),
        (laplace, LabelRegression(), "laplace needs .*; LabelRegression offers none: use cvi, exact, gradient"),
        (exact, OneVsEach(), "exact needs .*; OneVsEach offers none: use cvi, cavi, gibbs, laplace, gradient"),
        (cvi, NoLikelihood(), "cvi needs .*; NoLikelihood offers none: use a Likelihood"),
        (gradient, NoLikelihood(), "gradient needs .*; NoLikelihood offers none: use a Likelihood"),
    ],
)
def test_likelihoods_that_a_kernel_cannot_use_are_refused(constructor, likelihood, message, unchecked):
    with pytest.raises(TypeError, match=message):
        constructor(likelihood)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.01, float("nan")])
def test_step_lengths_outside_their_range_are_refused(rho):
    with pytest.raises(ValueError, match=r"rho must lie in \(0, 1\]"):
        cvi(Softmax(), rho=rho)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_learning_rates_that_are_not_positive_are_refused(rate):
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        gradient(Softmax(), learning_rate=rate)


def test_no_steps_are_refused():
    task = problem(0)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        fit(*start(task)[:1], cvi(Softmax()), *start(task)[1:], steps=0)


NO_SITES, DRAWS, NO_BOUND = "it has no sites", "random draws, through which no gradient", "draws maximise no bound"
NO_FIXED_POINT, NO_VALUE = "there is no fixed point", "its own total derivative is not that of any bound"
REFUSED = {
    "cvi": {("evidence", "unroll"): NO_VALUE, ("evidence", "implicit"): NO_VALUE},
    "cavi": {("evidence", "unroll"): NO_VALUE, ("evidence", "implicit"): NO_VALUE},
    "gibbs": {(objective, mode): DRAWS for objective in OBJECTIVES for mode in ("unroll", "implicit")}
    | {("elbo", "sites"): NO_BOUND},
    "laplace": {("evidence", "sites"): "its evidence follows its mode"},
    "exact": {(objective, "implicit"): NO_FIXED_POINT for objective in OBJECTIVES},
    "gradient": {(objective, mode): NO_SITES for objective in OBJECTIVES for mode in ("sites", "implicit")}
    | {("evidence", "unroll"): NO_SITES},
}


@pytest.mark.parametrize("hypergradient", HYPERGRADIENTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("inference", INFERENCE)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(inference, objective, hypergradient):
    likelihood = dict(reversed(CELLS))[inference]
    cell = kernel_for(inference, LIKELIHOODS[likelihood]()), OBJECTIVES[objective], HYPERGRADIENTS[hypergradient]
    message = REFUSED[inference].get((objective, hypergradient))
    if message is None:
        check_combination(*cell)
    else:
        with pytest.raises(ValueError, match=f"inference {inference} with objective {objective} and .*{message}"):
            check_combination(*cell)


def test_objectives_and_hypergradients_are_the_ones_tested_here():
    assert {"elbo": elbo, "evidence": evidence, "predictive": predictive} == OBJECTIVES
    assert {"sites": sites, "unroll": unroll, "implicit": implicit} == HYPERGRADIENTS
    assert set(INFERENCE) == set(CONVERGED_STEPS) | SAMPLED, "a new inference kernel needs its number of steps here"


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_kernels_named_for_a_likelihood_are_those_that_take_it(likelihood):
    assert set(usable_kernels(LIKELIHOODS[likelihood]())) == {name for name, other in CELLS if other == likelihood}
