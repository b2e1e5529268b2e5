"""What holds for every registered learner of classes, on tiny tasks; and that every learner is registered."""

import dataclasses
import functools
import importlib
import pkgutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import weakly_typed

from fewshot import learners
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import LEARNERS, TrainsOn
from fewshot.learners.base import Learner, apply, traced
from fewshot.tasks import LabelledImages, Task
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import build_run

SHAPE, WAY, SHOT, QUERIES, TRAINING_CLASSES, TASKS = (6, 6, 1), 3, 2, 4, 7, 2
OF_CLASSES = {name: make for name, make in LEARNERS.items() if make.traits.class_labels}
TRANSDUCTIVE = [name for name, make in OF_CLASSES.items() if make.traits.transductive]
INDUCTIVE = [name for name in OF_CLASSES if name not in TRANSDUCTIVE]
TRAINED = [name for name, make in OF_CLASSES.items() if make.traits.trains_on is not TrainsOn.NOTHING]
UNTRAINED = [name for name in OF_CLASSES if name not in TRAINED]
# The columns of whose heads start at different random numbers, or are drawn.
RANDOM_HEADS = ["baseline++", "abml"]
SMALL = {"gaussian-process": {"inference.expectation": 64}}
# For Conv4, which has batch norms: images large enough for four poolings, and steps large enough to see them.
SHAPE_OF_CONV4 = (16, 16, 1)
LARGE_STEPS = {name: {"learner.inner_steps": 1, "learner.inner_rate": 1.0} for name in TRANSDUCTIVE}


@functools.cache
def make(name, seed=0):
    return learner_of(name, "mlp", SHAPE, seed, **{"backbone.width": 8, **SMALL.get(name, {})})


def learner_of(name, backbone, shape, seed=0, **settings):
    config = RunConfig(learner=name, backbone=backbone, way=WAY, seed=seed, query=QUERIES, settings=settings)
    return build_run(resolve(config), shape, TRAINING_CLASSES).learner


def images_of(rng, labels, patterns):
    noise = rng.normal(scale=0.2, size=(len(labels), *patterns.shape[1:]))
    return np.asarray(255 * np.clip(patterns[labels] + noise, 0, 1), "u1")


def make_task(seed, way=WAY, shape=SHAPE):
    """Noisy copies of a pattern for each class, as bytes; counts of a class differ."""
    rng = np.random.default_rng(seed)
    patterns = rng.uniform(size=(way, *shape))
    support, query = np.arange(way * SHOT) % way, np.arange(QUERIES) % way
    return Task(
        images_of(rng, support, patterns),
        support.astype(np.int32),
        images_of(rng, query, patterns),
        query.astype(np.int32),
    )


class Answer(NamedTuple):
    probabilities: np.ndarray
    code: int


def _answer(learner, classes, key, x, y, query, mask):
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, learner.embed(x), y, classes, mask)
    found = learner.predict(predict_key, state, learner.embed(query))
    return Answer(found.probabilities, jnp.maximum(code, found.code))


def answer(learner, x, y, query, classes=WAY, mask=None, seed=0):
    """The learner's answer to images, compiled where it can be, as NumPy arrays."""
    found = apply(_answer, learner, (classes,), jax.random.key(seed), *map(jnp.asarray, (x, y, query)), mask)
    return Answer(*map(np.asarray, found))


@pytest.mark.parametrize("name", OF_CLASSES)
def test_probabilities_sum_to_one(name):
    found = answer(make(name), *make_task(0)[:3])
    assert found.probabilities.shape == (QUERIES, WAY) and found.probabilities.dtype == np.float32
    assert found.code == Code.OK and (found.probabilities >= 0).all()
    np.testing.assert_allclose(found.probabilities.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize("name", OF_CLASSES)
def test_double_precision_stays_double(name):
    with jax.enable_x64(True):
        found = answer(make.__wrapped__(name), *make_task(0)[:3])
    assert found.probabilities.dtype == np.float64 and found.code == Code.OK
    np.testing.assert_allclose(found.probabilities.sum(1), 1, atol=1e-12)


@pytest.mark.parametrize("name", INDUCTIVE)
def test_a_padded_task_is_the_task(name):
    """Padded points have another image and a label of their own; a learner of any number of ways gets more classes."""
    learner, task = make(name), make_task(1)
    whole = answer(learner, *task[:3]).probabilities
    classes = WAY if learner.ways else WAY + 2
    x = np.concatenate([task.x_support, make_task(2).x_support[:3]])
    y = np.concatenate([task.y_support, np.zeros(3, np.int32)])
    mask = Mask(jnp.arange(len(y)) < len(task.y_support), jnp.arange(classes) < WAY)
    padded = answer(learner, x, y, task.x_query, classes, mask).probabilities
    np.testing.assert_allclose(padded[:, :WAY], whole, atol=2e-3 if name == "gaussian-process" else 2e-5)
    assert (padded[:, WAY:] == 0).all()


@pytest.mark.parametrize("name", [name for name in OF_CLASSES if name not in RANDOM_HEADS])
def test_labels_of_other_order_have_probabilities_of_other_order(name):
    learner, task, order = make(name), make_task(3), np.array([2, 0, 1], np.int32)
    whole = answer(learner, *task[:3]).probabilities
    other = answer(learner, task.x_support, order[task.y_support], task.x_query).probabilities
    tolerance = 0.03 if name == "gaussian-process" else 2e-5  # its draws are not permuted with the classes
    np.testing.assert_allclose(other[:, order], whole, atol=tolerance)
    assert np.abs(other - whole).max() > 5 * tolerance  # the order does matter


def changes_with_other_queries(learner, shape):
    """How far the probabilities of the first query move, and those of the others, when these are other images."""
    task = make_task(4, shape=shape)
    changed = np.concatenate([task.x_query[:1], make_task(5, shape=shape).x_query[1:]])
    before, after = (answer(learner, *task[:2], query).probabilities for query in (task.x_query, changed))
    moved = np.abs(after - before)
    return moved[0].max(), moved[1:].max()


@pytest.mark.parametrize("name", INDUCTIVE)
def test_no_query_depends_on_another(name):
    same, others = changes_with_other_queries(make(name), SHAPE)
    assert same <= 1e-6 and others > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", OF_CLASSES)
def test_batch_norms_use_other_queries_where_the_traits_say_so(name):
    """And nowhere else; what is printed is the same."""
    settings = LARGE_STEPS.get(name, SMALL.get(name, {}))
    learner = learner_of(name, "conv4", SHAPE_OF_CONV4, **{"backbone.width": 4, **settings})
    same, others = changes_with_other_queries(learner, SHAPE_OF_CONV4)
    assert same > 1e-3 if learner.traits.transductive else same <= 1e-6
    assert others > 1e-4
    assert learner.batch_norm == ("transductive" if learner.traits.transductive else "inductive")
    # An mlp has none; the relation module has its own.
    assert make(name).batch_norm == ("inductive" if name == "relation" else "")


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_trained_learner_needs_no_program_of_its_own(name):
    assert weakly_typed(make(name)) == []


@pytest.mark.parametrize("name", [name for name, make in OF_CLASSES.items() if make.traits.traceable])
def test_another_task_and_other_parameters_need_no_new_program(name):
    first = answer(make(name), *make_task(6)[:3]).probabilities
    programs = traced._cache_size()
    other = make_task(7)
    second = answer(make(name, seed=1), other.x_support, other.y_support[::-1], other.x_query, seed=1).probabilities
    assert traced._cache_size() == programs
    assert np.abs(second - first).max() > 1e-4


def training_data(learner):
    """What one step sees, with its leading axis."""
    if learner.traits.trains_on is TrainsOn.EPISODES:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make_task(seed) for seed in range(TASKS)))
    y = np.arange(TASKS * 5).reshape(TASKS, 5).astype(np.int32) % TRAINING_CLASSES
    images = make_task(0, way=TASKS * 5).x_support[: TASKS * 5]
    return LabelledImages(jnp.asarray(images.reshape(TASKS, 5, *SHAPE)), jnp.asarray(y))


def loss_and_gradient(learner, data, for_each=jax.vmap):
    graph, parameters, rest = nnx.split(learner, nnx.Param, ...)

    @jax.jit
    def value_and_gradient(parameters, data):
        def loss(parameters):
            outcome, _ = nnx.merge(graph, parameters, rest, copy=True)(
                jax.random.split(jax.random.key(0), TASKS), data, for_each
            )
            assert outcome.diagnostics.keys() == learner.diagnostics.keys()
            return -outcome.objective / outcome.points

        return jax.value_and_grad(loss)(parameters)

    return value_and_gradient(parameters, data)


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_and_its_gradient_are_finite(name):
    learner = make(name)
    value, gradient = loss_and_gradient(learner, training_data(learner))
    leaves = jax.tree.leaves(gradient)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in leaves)
    assert max(float(jnp.abs(leaf).max()) for leaf in leaves) > 1e-4


@pytest.mark.parametrize("name", UNTRAINED)
def test_what_does_not_learn_says_so(name):
    with pytest.raises(NotImplementedError, match="does not learn"):
        make(name).loss(jax.random.split(jax.random.key(0), TASKS), None, jax.vmap)


def all_subclasses(base):
    return {base, *(deeper for below in base.__subclasses__() for deeper in all_subclasses(below))}


def unregistered(registry):
    """Learners of the package that are neither registered nor the base of one that is."""
    for module in pkgutil.iter_modules(learners.__path__):
        importlib.import_module(f"{learners.__name__}.{module.name}")
    own = {one for one in all_subclasses(Learner) if one.__module__.startswith(learners.__name__ + ".")}
    return {one.__name__ for one in own if not any(issubclass(made, one) for made in registry.values())}


def test_every_learner_is_registered():
    """And its labels are classes, tested here, or real numbers, tested in test_learners_real.py."""
    assert unregistered(LEARNERS) == set()
    assert all(make.traits.class_labels or make.traits.real_labels for make in LEARNERS.values())


@pytest.mark.parametrize("name", LEARNERS)
def test_one_that_is_not_registered_would_be_seen(name):
    left = {other: made for other, made in LEARNERS.items() if other != name}
    bases = any(issubclass(made, LEARNERS[name]) for made in left.values())
    assert unregistered(left) == (set() if bases else {LEARNERS[name].__name__})


def test_a_process_has_the_prior_of_as_many_labelled_examples_as_its_task_has():
    """SHOT of them a class, padded or not: s2 SHOT^power, as a process that has these values for every task."""

    def process(constant, scale, **powers):
        settings = {"backbone.width": 8, "kernel.constant": constant, "kernel.prior_scale": scale}
        config = RunConfig(kernel="cosine", inference="laplace", backbone="mlp", way=WAY, query=QUERIES)
        settings |= {"likelihood.plug_in": True, **{f"kernel.{name}": value for name, value in powers.items()}}
        return build_run(resolve(dataclasses.replace(config, settings=settings)), SHAPE, TRAINING_CLASSES).learner

    powers = {"scale_power": 0.8, "constant_power": -1.5}
    learner, fixed = process(0.5, 3.0, **powers), process(0.5 * SHOT**-1.5, 3.0 * SHOT**0.8)
    task = make_task(1)
    wanted = answer(fixed, *task[:3]).probabilities
    np.testing.assert_allclose(answer(learner, *task[:3]).probabilities, wanted, atol=1e-5)
    x, y = np.concatenate([task.x_support] * 2), np.concatenate([task.y_support] * 2)
    mask = Mask(jnp.arange(len(y)) < len(task.y_support), jnp.arange(WAY + 2) < WAY)
    padded = answer(learner, x, y, task.x_query, WAY + 2, mask).probabilities
    np.testing.assert_allclose(padded[:, :WAY], wanted, atol=1e-5)
    assert abs(answer(process(0.5, 3.0), *task[:3]).probabilities - wanted).max() > 0.01
    for got, expected in (
        (learner.prior(task.x_support, WAY), fixed.prior(task.x_support, WAY)),
        (learner.query(task.x_support, task.x_query, WAY), fixed.query(task.x_support, task.x_query, WAY)),
    ):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), got, expected)
