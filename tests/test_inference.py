"""Conformance of every registered inference kernel, and the loops that run it."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import (
    CELLS,
    CLASSES,
    CONVERGED_STEPS,
    CONVERGING,
    POINTS,
    QUERIES,
    SAMPLED,
    each_cell,
    each_deterministic_cell,
    each_sampled_cell,
    fitting,
    kernel_for,
    product_nodes,
    sampled_nodes,
    start,
)
from problems import FixedPoints, double, problem

from fewshot.inference.inner import Code, Inference, Info, Mask, cvi, exact, fit, fit_to_tolerance, gradient
from fewshot.models import LIKELIHOODS
from fewshot.models.gaussian import GaussianPrior, JointMarginals, Marginals, Query
from fewshot.models.likelihoods import LabelRegression, Softmax


def assert_trees_close(left, right, **tolerance):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# K1: the protocol


@each_cell
def test_fields_and_argument_names(inference, likelihood):
    kernel = kernel_for(inference, LIKELIHOODS[likelihood]())
    assert isinstance(kernel, Inference) and kernel.traits.name == inference
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


# K2: one compilation, and a state that loops and branches can carry


@each_cell
@pytest.mark.parametrize("wide", [pytest.param(False, marks=pytest.mark.long), True], ids=["32 bits", "64 bits"])
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


@pytest.mark.long
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
        values = [info.elbo[-1]]  # the bound is tight
        if kernel.traits.evidence_value:
            values.append(kernel.log_evidence(state, task.prior))
        return posterior.marginals, posterior.predict(task.query), jnp.stack(values)

    marginals, predicted, values = fitted()
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
    close(values, np.full_like(values, log_evidence))


# K4 and the optimum of the bound


@pytest.mark.long
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


@double
def test_laplace_never_lowers_the_log_joint():
    """At an output scale at which full Newton steps jump between two points, 500 nats down at worst."""
    task, kernel = problem(1, scale=30.0), kernel_for("laplace", Softmax(), product_nodes())

    @jax.jit
    def path():
        def step(state, _):
            state, info = kernel.step(jax.random.key(0), state, task.prior, task.y)
            return state, (state.objective, info.residual)

        return jax.lax.scan(step, kernel.init(*start(task)), length=15)[1]

    objective, residual = path()
    assert np.diff(objective).min() > -1e-9 and residual[-1] < 1e-9


# K8: vmap is a loop, and padding with a mask changes nothing


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
    query = Query(query_mean, query_root @ root.T, task.query.variance, query_root)
    return jax.tree.map(jnp.asarray, (prior, y, query, more_nodes, mask))


SEEDS, ORDERS = (7, 8, 9), ((0, 1, 2), (2, 0, 1))


def stacked(items, order):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *[items[i] for i in order])


@pytest.mark.long
@double
@each_deterministic_cell
def test_padded_tasks_under_vmap_equal_a_loop_of_unpadded_ones_in_any_order(inference, likelihood):
    """K of rank 6 with 9 points. The root of the features leaves the basis of u alone when points are added."""
    tasks, nodes = [problem(seed, kernel="linear") for seed in SEEDS], [sampled_nodes(seed) for seed in SEEDS]
    fitted, rng = fitting(inference, likelihood), np.random.default_rng(11)
    loop = [fitted(*task, points)[1:] for task, points in zip(tasks, nodes, strict=True)]
    more = [padded(task, points, rng) for task, points in zip(tasks, nodes, strict=True)]
    batched = jax.jit(jax.vmap(fitted))
    close = partial(assert_trees_close, rtol=1e-9, atol=1e-10)
    for order in ORDERS:
        _, *results = batched(*stacked(more, order))
        for position, i in enumerate(order):
            info, marginals, predicted = jax.tree.map(lambda leaf, p=position: leaf[p], tuple(results))
            close(info, loop[i][0])
            close(of_classes(marginals, np.arange(CLASSES), np.arange(POINTS)), loop[i][1])
            close(of_classes(predicted, np.arange(CLASSES)), loop[i][2])
            absent = more[i][2].mean[-1]  # of the class that does not exist: the prior
            np.testing.assert_allclose(predicted.mean[-1], absent, atol=1e-12)


@pytest.mark.long
@double
@each_sampled_cell
def test_chains_under_vmap_equal_a_loop_in_any_order(inference, likelihood):
    """Draws depend on the shapes, so these tasks are not padded."""
    tasks = [(*problem(seed, kernel="linear"), sampled_nodes(seed)) for seed in SEEDS]
    fitted = fitting(inference, likelihood)
    loop = [fitted(*task) for task in tasks]
    batched = jax.jit(jax.vmap(fitted))
    for order in ORDERS:
        results = batched(*stacked(tasks, order))
        for position, i in enumerate(order):
            assert_trees_close(jax.tree.map(lambda leaf, p=position: leaf[p], results), loop[i], rtol=1e-9, atol=1e-10)


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


def test_a_residual_that_is_not_a_number_is_no_convergence():
    task, kernel = problem(16, points=4), exact(LabelRegression())

    def step(*arguments):
        state, info = kernel.step(*arguments)
        return state, info._replace(residual=jnp.nan * info.residual)

    lost = kernel._replace(step=step)
    _, info, _ = jax.jit(lambda: fit_to_tolerance(*start(task)[:1], lost, *start(task)[1:]))()
    assert np.isnan(info.residual) and info.code == Code.NOT_CONVERGED


@pytest.mark.long
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
