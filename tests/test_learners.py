"""What holds for every registered learner of classes, on tiny tasks; and that every learner is registered."""

import dataclasses
import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot import learners
from fewshot.evaluation.learner_conformance import _knows_no_order_of_classes, answer, check_learner, task_of
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import LEARNERS, TrainsOn
from fewshot.learners.base import Learner, traced
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
# Whose programs compile in a second, and one that is like another.
QUICK = ["prototypical", "nearest-mean", "nearest-neighbour"]
MARKS = {**dict.fromkeys(QUICK, ()), "chaser": [pytest.mark.slow]}
SMALL = {"gaussian-process": {"inference.expectation": 64}}
# For Conv4, which has batch norms: images large enough for four poolings, and steps large enough to see them.
SHAPE_OF_CONV4 = (16, 16, 1)
LARGE_STEPS = {
    name: {"learner.inner_steps": 1, "learner.inner_rate": 1.0} for name in (*TRANSDUCTIVE, "inductive-maml")
}


@functools.cache
def make(name, seed=0):
    return learner_of(name, "mlp", SHAPE, seed, **{"backbone.width": 8, **SMALL.get(name, {})})


def learner_of(name, backbone, shape, seed=0, **settings):
    config = RunConfig(learner=name, backbone=backbone, way=WAY, seed=seed, query=QUERIES, settings=settings)
    return build_run(resolve(config), shape, TRAINING_CLASSES).learner


def each(names):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=MARKS.get(name, [pytest.mark.long])) for name in names]
    )


@each(OF_CLASSES)
def test_every_learner_keeps_its_promises(name):
    """Classes of a process are alike too, but its draws are not permuted with them."""
    draws = name == "gaussian-process"
    checked = check_learner(
        make(name), tolerance=2e-3 if draws else 2e-5, symmetric=not draws and name not in RANDOM_HEADS
    )
    assert {"answers", "is fitted to the labels", "has parameters of a dtype"} <= {*checked}
    assert ("answers each query alone" in checked) == (name in INDUCTIVE)
    assert ("ignores padding" in checked) == (name in INDUCTIVE and name != "inductive-maml")
    assert ("has a loss" in checked) == (name in TRAINED)
    if draws:
        _knows_no_order_of_classes(make(name), 0.03)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_CLASSES)
@pytest.mark.parametrize("double", [False, True])
def test_probabilities_have_the_precision_asked_for(name, double):
    with jax.enable_x64(double):
        found, code = answer(make.__wrapped__(name) if double else make(name), *task_of(SHAPE, 0)[:3], WAY)
    assert found.dtype == (np.float64 if double else np.float32) and code == Code.OK
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12 if double else 1e-5)


def changes_with_other_queries(learner, shape):
    """How far the probabilities of the first query move, and those of the others, when these are other images."""
    task = task_of(shape, 4)
    changed = jnp.concatenate([task.x_query[:1], task_of(shape, 5).x_query[1:]])
    before, after = (answer(learner, *task[:2], query, WAY)[0] for query in (task.x_query, changed))
    moved = np.abs(after - before)
    return moved[0].max(), moved[1:].max()


@pytest.mark.long
@pytest.mark.parametrize("name", OF_CLASSES)
def test_batch_norms_use_other_queries_where_the_traits_say_so(name):
    """And nowhere else; what is printed is the same."""
    settings = LARGE_STEPS.get(name, SMALL.get(name, {}))
    learner = learner_of(name, "conv4", SHAPE_OF_CONV4, **{"backbone.width": 4, **settings})
    same, others = changes_with_other_queries(learner, SHAPE_OF_CONV4)
    assert same > 1e-3 if learner.traits.transductive else same <= 1e-6
    assert others > 1e-4
    rule = "transductive" if learner.traits.transductive else "inductive"
    assert learner.batch_norm == ("labelled" if name == "inductive-maml" else rule)
    # An mlp has none; the relation module has its own.
    assert make(name).batch_norm == ("inductive" if name == "relation" else "")


@each([name for name, make in OF_CLASSES.items() if make.traits.traceable])
def test_another_task_and_other_parameters_need_no_new_program(name):
    first, _ = answer(make(name), *task_of(SHAPE, 6)[:3], WAY)
    programs = traced._cache_size()
    other = task_of(SHAPE, 7)
    second, _ = answer(make(name, seed=1), other.x_support, other.y_support[::-1], other.x_query, WAY, seed=1)
    assert traced._cache_size() == programs
    assert np.abs(second - first).max() > 1e-4


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


@pytest.mark.long
def test_a_process_has_the_prior_of_as_many_labelled_examples_as_its_task_has():
    """SHOT of them a class, padded or not: s2 SHOT^power, as a process that has these values for every task."""

    def process(constant, scale, **powers):
        settings = {"backbone.width": 8, "kernel.constant": constant, "kernel.prior_scale": scale}
        config = RunConfig(kernel="cosine", inference="laplace", backbone="mlp", way=WAY, query=QUERIES)
        settings |= {"likelihood.plug_in": True, **{f"kernel.{name}": value for name, value in powers.items()}}
        return build_run(resolve(dataclasses.replace(config, settings=settings)), SHAPE, TRAINING_CLASSES).learner

    powers = {"scale_power": 0.8, "constant_power": -1.5}
    learner, fixed = process(0.5, 3.0, **powers), process(0.5 * SHOT**-1.5, 3.0 * SHOT**0.8)
    task = task_of(SHAPE, 1)
    wanted = answer(fixed, *task[:3], WAY)[0]
    np.testing.assert_allclose(answer(learner, *task[:3], WAY)[0], wanted, atol=1e-5)
    x, y = jnp.concatenate([task.x_support] * 2), jnp.concatenate([task.y_support] * 2)
    mask = Mask(jnp.arange(len(y)) < len(task.y_support), jnp.arange(WAY + 2) < WAY)
    padded = answer(learner, x, y, task.x_query, WAY + 2, mask)[0]
    np.testing.assert_allclose(padded[:, :WAY], wanted, atol=1e-5)
    assert abs(answer(process(0.5, 3.0), *task[:3], WAY)[0] - wanted).max() > 0.01
    for got, expected in (
        (learner.prior(task.x_support, WAY), fixed.prior(task.x_support, WAY)),
        (learner.query(task.x_support, task.x_query, WAY), fixed.query(task.x_support, task.x_query, WAY)),
    ):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), got, expected)
