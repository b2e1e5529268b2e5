"""MAML: its gradient by finite differences and through plain layers, its inner steps, and what it refuses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import double
from test_backbones import plain_block

from fewshot.learners import MAML, BayesianMAML, FirstOrderMAML, InductiveMAML
from fewshot.learners.adapted import sum_in_turn
from fewshot.models.backbones import Backbone, Conv4
from fewshot.tasks import Task
from fewshot.tasks.curves import RealTask

KEY = jax.random.key(0)
WAY, T = 2, 2


class Smooth(Backbone):
    """One layer with tanh, whose gradient has no kinks."""

    def __init__(self, image_shape, *, rngs, width=4):
        self.image_shape, self.features = image_shape, width
        self.weights = nnx.Param(0.5 * jax.random.normal(rngs.params(), (int(np.prod(image_shape)), width)))

    def __call__(self, x, train):
        return jnp.tanh(x.reshape(*x.shape[:2], -1) @ self.weights[...])


def batch(shape, seed=0, shot=2, queries=4):
    rng = np.random.default_rng(seed)
    support, query = (np.tile(np.arange(count) % WAY, (T, 1)).astype(np.int32) for count in (WAY * shot, queries))
    patterns = rng.uniform(size=(T, WAY, *shape))

    def images(labels):
        return np.stack([patterns[t][labels[t]] for t in range(T)]) + 0.3 * rng.uniform(size=(*labels.shape, *shape))

    return jax.tree.map(jnp.asarray, Task(images(support), support, images(query), query))


def started(learner, seed=1):
    """With a head that is not zero, so that no gradient vanishes."""
    head = learner.network.weights
    head[...] = 0.5 * jax.random.normal(jax.random.key(seed), head[...].shape)
    return learner


def objective_of(learner, tasks):
    """The loss a query as a function of the parameters, and these."""
    graph, parameters, rest = nnx.split(learner, nnx.Param, ...)

    def objective(parameters):
        outcome = nnx.merge(graph, parameters, rest, copy=True).loss(jax.random.split(KEY, T), tasks, jax.vmap)
        return outcome.objective / outcome.points

    return jax.jit(objective), parameters


def along(objective, parameters, step=1e-5):
    """Directional derivatives along one random direction: by autodiff, and by central differences."""
    leaves, tree = jax.tree.flatten(parameters)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    direction = jax.tree.unflatten(
        tree, [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )
    gradient = jax.jit(jax.grad(objective))(parameters)
    exact = sum(jnp.vdot(g, d) for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True))
    up, down = (objective(optax.tree.add_scale(parameters, sign * step, direction)) for sign in (1, -1))
    return float(exact), float((up - down) / (2 * step))


@pytest.mark.long
@double
def test_the_gradient_is_that_of_finite_differences():
    learner = started(MAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY, inner_steps=3, inner_rate=0.4))
    exact, differences = along(*objective_of(learner, batch((3, 3, 1))))
    assert exact == pytest.approx(differences, rel=1e-7) and abs(exact) > 1e-2
    first_order = started(FirstOrderMAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY, inner_steps=3, inner_rate=0.4))
    other, same = along(*objective_of(first_order, batch((3, 3, 1))))
    assert same == pytest.approx(differences, rel=1e-9) and abs(other - exact) > 1e-3  # one value, another gradient


@pytest.mark.long
@double
def test_the_first_order_gradient_is_that_of_the_adapted_parameters():
    tasks = batch((3, 3, 1))
    learner = started(FirstOrderMAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY, inner_steps=2, inner_rate=0.4))
    objective, parameters = objective_of(learner, tasks)

    def adapted_loss(adapted, x, y):
        return jnp.mean(jax.nn.log_softmax(learner.logits(adapted, x))[jnp.arange(len(y)), y])

    expected = []
    for t in range(T):
        adapted, _ = learner.fit(KEY, tasks.x_support[t], tasks.y_support[t], WAY)
        expected.append(jax.grad(adapted_loss)(adapted, tasks.x_query[t], tasks.y_query[t]))
    found = jax.grad(objective)(parameters)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / T, *expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("cls", [MAML, pytest.param(BayesianMAML, marks=pytest.mark.slow)])
@double
def test_networks_one_after_another_are_what_vmap_makes_of_them(cls):
    """A processor takes those that convolve in a loop, not in groups; the gradients of both forms are the same."""
    learner = cls(Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=2), way=WAY, rngs=nnx.Rngs(1), inner_steps=1)
    tasks = batch((16, 16, 1))
    found = []
    for loop in (True, False):
        learner.convolutional = loop
        objective, parameters = objective_of(learner, tasks)
        program = jax.jit(jax.value_and_grad(objective))
        assert (f"feature_group_count = {T} " in program.lower(parameters).as_text()) != loop
        found.append(program(parameters))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


@double
def test_a_sum_in_turn_has_the_gradient_of_the_sum():
    def wave(parameters, shift, x):
        return jnp.sin(parameters["rate"] * x + shift).sum() * parameters["height"]

    def squared(total):
        return lambda parameters: total(parameters) ** 2  # its derivative is not 1

    xs, parameters = jnp.arange(12.0).reshape(3, 4), {"rate": jnp.asarray(0.7), "height": jnp.asarray(1.3)}
    found = jax.value_and_grad(squared(lambda p: sum_in_turn(wave, p, 0.2, (xs,))))(parameters)
    expected = jax.value_and_grad(squared(lambda p: sum(wave(p, 0.2, x) for x in xs)))(parameters)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert float(one) == pytest.approx(float(other), rel=1e-12)


def test_a_sum_in_turn_needs_no_more_memory_for_more_rows():
    def chain(parameters, _, x):
        for _ in range(5):
            parameters = jnp.sin(parameters * x)
        return parameters.sum()

    def memory(rows, total):
        program = jax.jit(jax.grad(lambda p: total(p, jnp.arange(1.0, rows + 1))))
        return program.lower(jnp.ones(1_000)).compile().memory_analysis().temp_size_in_bytes

    in_turn = lambda p, xs: sum_in_turn(chain, p, None, (xs,))  # noqa: E731
    looped = lambda p, xs: jax.lax.map(lambda x: chain(p, None, x), xs).sum()  # noqa: E731
    assert memory(20, in_turn) < memory(2, in_turn) + 1_000
    assert memory(20, looped) > 2 * memory(2, looped)  # what it is compared with


def plain_maml(parameters, task, rate, inductive):
    """One inner step of Conv4 from plain layers, and the objective of the queries; parameters are a dict."""

    def log_probabilities(parameters, x, y, labelled=None):
        count, x = len(x), x[None]
        for kernel, scale, shift in parameters["blocks"]:
            x = plain_block(x, kernel, scale, shift, labelled)
        logits = x.reshape(count, -1) @ parameters["weights"] + parameters["bias"]
        return jax.nn.log_softmax(logits)[jnp.arange(count), y].mean() if labelled is None else logits[labelled:]

    slope = jax.grad(log_probabilities)(parameters, task.x_support, task.y_support)
    adapted = jax.tree.map(lambda value, g: value + rate * g, parameters, slope)
    if not inductive:
        return log_probabilities(adapted, task.x_query, task.y_query)
    images = jnp.concatenate([task.x_support, task.x_query])
    logits = log_probabilities(adapted, images, None, len(task.x_support))
    return jax.nn.log_softmax(logits)[jnp.arange(len(logits)), task.y_query].mean()


@pytest.mark.long
@pytest.mark.parametrize("cls", [MAML, InductiveMAML])
@double
def test_the_gradient_through_conv4_is_that_of_plain_layers(cls):
    """Second derivatives pass the fused blocks' hand-written gradients."""
    learner = started(cls(Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=3), way=WAY, inner_steps=1, inner_rate=0.1))
    tasks = batch((16, 16, 1), shot=1, queries=2)
    blocks = [getattr(learner.network.backbone, f"block{i}") for i in range(4)]
    for i, block in enumerate(blocks):
        block.norm.scale[...] = jnp.asarray([0.8, -1.1, 0.6]) + 0.1 * i  # of both signs
        block.norm.shift[...] = jnp.asarray([0.2, 0.4, -0.1])
    plain = {
        "blocks": [(block.kernel[...], block.norm.scale[...], block.norm.shift[...]) for block in blocks],
        "weights": learner.network.weights[...],
        "bias": learner.network.bias[...],
    }
    objective, parameters = objective_of(learner, tasks)

    @jax.jit
    @jax.value_and_grad
    def by_plain_layers(plain):
        one = (jax.tree.map(lambda leaf: leaf[t], tasks) for t in range(T))  # noqa: B023
        return sum(plain_maml(plain, task, 0.1, cls is InductiveMAML) for task in one) / T

    expected, slopes = by_plain_layers(plain)
    found, gradient = jax.jit(jax.value_and_grad(objective))(parameters)
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    network = nnx.to_pure_dict(gradient)["network"]
    np.testing.assert_allclose(network["weights"], slopes["weights"], rtol=1e-7, atol=1e-10)
    for i, (kernel, scale, shift) in enumerate(slopes["blocks"]):
        block = network["backbone"][f"block{i}"]
        np.testing.assert_allclose(block["kernel"], kernel, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(block["norm"]["scale"], scale, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(block["norm"]["shift"], shift, rtol=1e-6, atol=1e-9)


@pytest.mark.long
@double
def test_labelled_images_as_queries_have_the_answers_of_maml():
    """Then both normalise the same images, be they bytes or numbers."""
    task = jax.tree.map(lambda leaf: leaf[0], batch((16, 16, 1)))
    support = (255 * task.x_support / task.x_support.max()).astype(jnp.uint8)
    found = []
    for cls in (MAML, InductiveMAML):
        learner = started(cls(Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=3), way=WAY, inner_steps=2, inner_rate=0.1))
        state, _ = jax.jit(partial(learner.fit, classes=WAY))(KEY, support, task.y_support)
        predict = jax.jit(learner.predict)
        found += [predict(KEY, state, query).probabilities for query in (support, support / 255, task.x_query)]
    for same in (found[1], found[3], found[4]):
        np.testing.assert_allclose(same, found[0], rtol=1e-6)
    assert np.abs(found[5] - found[2]).max() > 1e-3


@pytest.mark.long
@double
def test_one_inner_step_from_a_zero_head_is_known_in_closed_form():
    """The head moves by rate/N sum_n (e_y - 1/C) phi_n; the features stay."""
    learner = MAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY, inner_steps=1, inner_rate=0.3)
    task = jax.tree.map(lambda leaf: leaf[0], batch((3, 3, 1)))
    adapted, _ = learner.fit(KEY, task.x_support, task.y_support, WAY)
    features = learner.network.backbone(task.x_support[None], True)[0]
    residual = jax.nn.one_hot(task.y_support, WAY) - 1 / WAY
    values = nnx.to_pure_dict(adapted)
    np.testing.assert_allclose(values["weights"], 0.3 * features.T @ residual / len(features), rtol=1e-9)
    np.testing.assert_allclose(values["backbone"]["weights"], learner.network.backbone.weights[...], rtol=1e-12)


def real_batch(shape=(3, 3, 1), points=5, queries=4):
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=size) for size in ((T, points, *shape), (T, points), (T, queries, *shape), (T, queries))]
    return RealTask(*map(jnp.asarray, parts))


@pytest.mark.long
@double
def test_real_labels_descend_the_squared_error():
    """From a zero head one step is rate 2/N sum_n y_n phi_n; the prediction has the learned variance."""
    learner = MAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=1, inner_steps=1, inner_rate=0.3)
    learner.likelihood_parameters["log_noise"][...] = jnp.log(0.04)
    task = jax.tree.map(lambda leaf: leaf[0], real_batch())
    adapted, _ = learner.fit(KEY, task.x_support, task.y_support, 1)
    features = learner.network.backbone(task.x_support[None], True)[0]
    values = nnx.to_pure_dict(adapted)
    np.testing.assert_allclose(values["weights"][:, 0], 0.3 * 2 / 5 * features.T @ task.y_support, rtol=1e-9)
    np.testing.assert_allclose(values["bias"], 0.3 * 2 * task.y_support.mean(), rtol=1e-9)
    found = learner.predict(KEY, adapted, task.x_query).distribution
    expected = learner.network.backbone(task.x_query[None], True)[0] @ values["weights"][:, 0] + values["bias"]
    np.testing.assert_allclose(found.mean, expected, rtol=1e-9)
    np.testing.assert_allclose(found.variance, 0.04, rtol=1e-9)


@pytest.mark.long
@double
def test_the_gradient_of_real_labels_is_that_of_finite_differences():
    """Of network, head and log variance; the first-order one has another, but for the variance."""
    both = [
        started(make(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=1, inner_steps=2, inner_rate=0.1))
        for make in (MAML, FirstOrderMAML)
    ]
    (exact, differences), (other, same) = (along(*objective_of(learner, real_batch())) for learner in both)
    assert exact == pytest.approx(differences, rel=1e-7) and same == pytest.approx(differences, rel=1e-9)
    assert abs(other - exact) > 1e-3


def test_other_numbers_of_classes_and_steps_are_refused():
    learner = MAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY)
    assert learner.ways == WAY
    with pytest.raises(ValueError, match="expected tasks of 2 classes, got 3; train with --way 3"):
        learner.fit(KEY, jnp.zeros((3, 3, 3, 1)), jnp.arange(3), 3)
    with pytest.raises(ValueError, match="expected inner_steps of at least 1 and a positive inner_rate, got 0 and"):
        MAML(Smooth((3, 3, 1), rngs=nnx.Rngs(0)), way=WAY, inner_steps=0)
