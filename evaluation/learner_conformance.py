"""Checks that a learner keeps its promises, for authors of new ones.

    check_learner(MyLearner(backbone, way=3, rngs=nnx.Rngs(0)))

It returns the names of the checks it made and raises ConformanceError at the first that fails, in seconds: on small
tasks of noisy copies of a random image for each class, of the shape that the learner reads.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Images, Labels, Learner, TrainsOn, apply
from fewshot.models.conformance import (
    ConformanceError,
    check_every_gradient,
    has_parameters_of_a_dtype,
    moved_at_random,
    passed,
    same,
)
from fewshot.tasks import LabelledImages, Task

WAY, SHOT, QUERIES, TASKS = 3, 2, 4, 2
STEPS, STEP = 15, 0.003  # of Adam, which must make answers better
CERTAIN = 0.001  # a loss that can hardly become less, in nats
PASSES = 30  # until running statistics are those of the images, within 5% at the usual momentum
QueryImages = Shaped[Array, "Q H W Ch"]
Check = Callable[[Learner, float], None]  # of a learner, with a tolerance; raises ConformanceError


def check_learner(learner: object, *, tolerance: float = 1e-4, symmetric: bool = True) -> list[str]:
    """What every command relies on: see the names that are returned. The learner may be trained or not.

    tolerance: how much probabilities may differ that should be the same; draws ask for more. symmetric: classes are
    alike, so probabilities follow a permutation of the labels; not where each class starts at random numbers of its
    own. Raises ConformanceError, and TypeError for a learner of real labels or what is no learner.
    """
    if not isinstance(learner, Learner) or not learner.traits.class_labels:
        raise TypeError(f"expected a Learner of labels that are classes, got {type(learner).__name__}")
    checks: list[Check] = [_answers, _answers_unlike_numbers_of_images, _tells_queries_apart, _is_fitted_to_the_labels]
    checks.append(_has_parameters_of_a_dtype)
    if not learner.traits.transductive:
        checks += [_embeds_each_image_alone, *[_ignores_padding] * learner.traits.padded, _answers_each_query_alone]
        checks += [_ignores_absent_classes] if learner.ways is None else []
    if symmetric:
        checks.append(_knows_no_order_of_classes)
    if learner.traits.trains_on is not TrainsOn.NOTHING:
        checks += [_has_a_loss, _learns_every_parameter]
    if learner.traits.trains_on is TrainsOn.EPISODES:
        checks.append(_learns_to_answer)
    return [passed(check, learner, tolerance) for check in checks]


def task_of(shape: tuple[int, int, int], seed: int, way: int = WAY, shot: int = SHOT, queries: int = QUERIES) -> Task:
    """Noisy copies of a random image for each class, as bytes; labels and queries run through the classes."""
    rng = np.random.default_rng(seed)
    patterns = rng.uniform(size=(way, *shape))

    def images(labels: np.ndarray) -> Array:
        noise = rng.normal(scale=0.2, size=(len(labels), *shape))
        return jnp.asarray(255 * np.clip(patterns[labels] + noise, 0, 1), jnp.uint8)

    support, query = np.arange(way * shot) % way, np.arange(queries) % way
    return Task(images(support), jnp.asarray(support, jnp.int32), images(query), jnp.asarray(query, jnp.int32))


def answer(
    learner: Learner, x: Images, y: Labels, query: QueryImages, classes: int, mask: Mask | None = None, seed: int = 0
) -> tuple[Float[np.ndarray, "Q C"], int]:
    """Probabilities of query images by labelled images, compiled where that is possible, and the result code."""
    probabilities, code = apply(_answer, learner, (classes,), jax.random.key(seed), x, y, query, mask)
    return np.asarray(probabilities), int(code)


def _answer(
    learner: Learner, classes: int, key: Key[Array, ""], x: Images, y: Labels, query: QueryImages, mask: Mask | None
) -> tuple[Float[Array, "Q C"], Int[Array, ""]]:
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, learner.embed(x), y, classes, mask)
    found = learner.predict(predict_key, state, learner.embed(query))
    return found.probabilities, jnp.maximum(code, found.code)


def _embedded(learner: Learner, x: Images) -> Shaped[Array, "N ..."]:
    return learner.embed(x)


def _way(learner: Learner) -> int:
    return learner.ways or WAY


def _task(learner: Learner, seed: int) -> Task:
    return task_of(learner.image_shape, seed, _way(learner))


def _probabilities(learner: Learner, task: Task, **changes: Array) -> np.ndarray:
    """Of the queries of a task, of which some parts may be others."""
    x, y, query, _ = task._replace(**changes)
    return answer(learner, x, y, query, _way(learner))[0]


def _other(name: str, value: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    difference = float(np.abs(value - expected).max())
    if not difference > 2 * tolerance:
        raise ConformanceError(f"{name}: expected other numbers, got a difference of {difference:.1e}")


def _answers(learner: Learner, tolerance: float) -> None:
    del tolerance
    _check_answer(learner, _task(learner, 0))


def _answers_unlike_numbers_of_images(learner: Learner, tolerance: float) -> None:
    """Two of the first class, one of the others."""
    del tolerance
    task, few = _task(learner, 0), _way(learner) + 1
    _check_answer(learner, task._replace(x_support=task.x_support[:few], y_support=task.y_support[:few]))


def _check_answer(learner: Learner, task: Task) -> None:
    found, code = answer(learner, *task[:3], _way(learner))
    if code != Code.OK:
        raise ConformanceError(f"result code: expected {Code.OK.name}, got {Code(code).name} on a task of small images")
    if found.shape != (QUERIES, _way(learner)):
        raise ConformanceError(f"probabilities: expected the shape {(QUERIES, _way(learner))}, got {found.shape}")
    if not (found >= 0).all():
        raise ConformanceError(f"probabilities: expected none below 0, got {found.min()}")
    same("the sum of a query's probabilities", found.sum(1), np.ones(QUERIES), 1e-5)


def _tells_queries_apart(learner: Learner, tolerance: float) -> None:
    task = _task(learner, 0)  # asked of two labelled images, which rules that answer 0 or 1 tell apart too
    found = _probabilities(learner, task, x_query=task.x_support[:2])
    _other("probabilities of queries of two classes", found[0], found[1], tolerance)


def _is_fitted_to_the_labels(learner: Learner, tolerance: float) -> None:
    task = _task(learner, 1)
    moved = (task.y_support + 1) % _way(learner)
    name = "probabilities after every label was moved to the next class"
    _other(name, _probabilities(learner, task, y_support=moved), _probabilities(learner, task), tolerance)


def _embeds_each_image_alone(learner: Learner, tolerance: float) -> None:
    x, others = _task(learner, 2).x_support, _task(learner, 3).x_support
    changed = jnp.concatenate([x[:1], others[1:]])
    one, other = (np.asarray(apply(_embedded, learner, (), images)[0], np.float64) for images in (x, changed))
    same("the embedding of an image among other images", other, one, tolerance * max(1.0, float(np.abs(one).max())))


def _ignores_padding(learner: Learner, tolerance: float) -> None:
    """Padded points have other images, and labels of a class."""
    task, more = _task(learner, 4), _task(learner, 5).x_support[:3]
    x = jnp.concatenate([task.x_support, more])
    y = jnp.concatenate([task.y_support, jnp.zeros(len(more), jnp.int32)])
    mask = Mask(jnp.arange(len(x)) < len(task.x_support), jnp.ones(_way(learner), bool))
    padded = answer(learner, x, y, task.x_query, _way(learner), mask)[0]
    same("probabilities of a padded task", padded, _probabilities(learner, task), tolerance)


def _answers_each_query_alone(learner: Learner, tolerance: float) -> None:
    task, others = _task(learner, 6), _task(learner, 7).x_query
    changed = jnp.concatenate([task.x_query[:1], others[1:]])
    one, other = _probabilities(learner, task), _probabilities(learner, task, x_query=changed)
    same("probabilities of a query beside other queries", other[:1], one[:1], tolerance)


def _ignores_absent_classes(learner: Learner, tolerance: float) -> None:
    task, way = _task(learner, 8), _way(learner)
    mask = Mask(jnp.ones(len(task.x_support), bool), jnp.arange(way + 2) < way)
    found = answer(learner, *task[:3], way + 2, mask)[0]
    same("probabilities of classes that are absent", found[:, way:], np.zeros((QUERIES, 2)), 0.0)
    same("probabilities beside absent classes", found[:, :way], _probabilities(learner, task), tolerance)


def _knows_no_order_of_classes(learner: Learner, tolerance: float) -> None:
    task = _task(learner, 9)
    order = (jnp.arange(_way(learner), dtype=jnp.int32) + 1) % _way(learner)
    moved = _probabilities(learner, task, y_support=order[task.y_support])[:, np.asarray(order)]
    same("probabilities of permuted labels, put back", moved, _probabilities(learner, task), tolerance)


def _has_parameters_of_a_dtype(learner: Learner, tolerance: float) -> None:
    del tolerance
    has_parameters_of_a_dtype(learner)


def loss_and_gradient(learner: Learner, tasks: PyTree) -> tuple[Array, nnx.State]:
    """What the outer loop descends, by the tasks or batches [T, ...] of a step, and its gradient."""
    graph, parameters, *others = nnx.split(learner, nnx.Param, ...)
    return _loss_and_gradient(graph, parameters, others[0], jax.random.split(jax.random.key(0), len(tasks[0])), tasks)


@partial(jax.jit, static_argnums=0)
def _loss_and_gradient(
    graph: nnx.GraphDef, parameters: nnx.State, others: nnx.State, keys: Key[Array, " T"], tasks: PyTree
) -> tuple[Array, nnx.State]:
    def loss(parameters: nnx.State) -> Float[Array, ""]:
        learner = nnx.merge(graph, parameters, others, copy=True)
        outcome = learner(keys, tasks, jax.vmap)[0]
        if outcome.diagnostics.keys() != learner.diagnostics.keys():
            named = [", ".join(sorted(names)) or "none" for names in (learner.diagnostics, outcome.diagnostics)]
            raise ConformanceError(f"diagnostics: expected those of the class ({named[0]}), got {named[1]}")
        return -outcome.objective / outcome.points

    return jax.value_and_grad(loss)(parameters)


def _tasks(learner: Learner, wrong: bool) -> Task:
    """Two tasks of as many classes as it is trained on; the labels of the queries of one may be wrong."""
    way = getattr(learner, "way", None) or _way(learner)
    one, other = (task_of(learner.image_shape, seed, way) for seed in range(TASKS))
    if wrong:
        other = other._replace(y_query=(other.y_query + 1) % way)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), one, other)


def _data(learner: Learner) -> Task | LabelledImages:
    """What it is trained on, with some labels that are wrong, so that there is a loss."""
    tasks = _tasks(learner, wrong=True)
    if learner.traits.trains_on is TrainsOn.BATCHES:
        return LabelledImages(tasks.x_support, tasks.y_support % 2)  # two classes are in all data
    return tasks


def _has_a_loss(learner: Learner, tolerance: float) -> None:
    del tolerance
    value, gradient = loss_and_gradient(learner, _data(learner))
    leaves = jax.tree.leaves(gradient)
    if not (np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in leaves)):
        raise ConformanceError(f"the loss and its gradient: expected finite numbers, got {float(value)} or some beside")
    if leaves and not max(float(jnp.abs(leaf).max()) for leaf in leaves) > 0:
        raise ConformanceError("the gradient of the loss: expected one, got zeros alone; nothing would be learned")


def _learns_every_parameter(learner: Learner, tolerance: float) -> None:
    """Beside where they are: the first gradient of one that starts at zero may be zero."""
    del tolerance
    beside = moved_at_random(nnx.state(learner, nnx.Param))
    check_every_gradient(loss_and_gradient(_with(learner, beside), _data(learner))[1])


def _learns_to_answer(learner: Learner, tolerance: float) -> None:
    """By a few steps down the loss of two tasks, the labels of whose queries become more probable."""
    del tolerance
    tasks = _tasks(learner, wrong=False)
    optimiser = optax.adam(STEP)
    parameters = nnx.state(learner, nnx.Param)
    state = optimiser.init(parameters)
    before = _log_probability(learner, tasks)
    for _ in range(STEPS):
        gradient = loss_and_gradient(_with(learner, parameters), tasks)[1]
        changes, state = optimiser.update(gradient, state)
        parameters = optax.apply_updates(parameters, changes)
    after = _log_probability(_with(learner, parameters), tasks)
    if not (after > before or before > -CERTAIN):
        raise ConformanceError(
            f"log-probability of the queries' labels after {STEPS} steps down the loss: expected more than "
            f"{before:.4f}, as before, got {after:.4f}"
        )


def _with(learner: Learner, parameters: nnx.State) -> Learner:
    """A copy with other parameters."""
    copy = nnx.clone(learner)
    nnx.update(copy, parameters)
    return copy


def _log_probability(learner: Learner, tasks: Task) -> float:
    """The mean over the queries of tasks, on whose images batch statistics are brought up to date."""
    learner = nnx.clone(learner)
    for _ in range(PASSES):
        learner.observe(tasks)
    way, found = int(tasks.y_support.max()) + 1, []
    for i in range(TASKS):
        x, y, query, labels = jax.tree.map(lambda leaf, i=i: leaf[i], tasks)
        probabilities = answer(learner, x, y, query, way)[0]
        found += [probabilities[np.arange(QUERIES), labels]]
    return float(np.log(np.maximum(found, np.finfo(np.float32).tiny)).mean())
