"""Checks that a learner keeps its promises, for authors of new ones.

    check_learner(MyLearner(backbone, way=3, rngs=nnx.Rngs(0)))

It returns the names of the checks it made and raises ConformanceError at the first that fails, in seconds: on small
tasks of noisy copies of a random image for each class, of the shape that the learner reads.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.inference.conformance import ConformanceError
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Images, Labels, Learner, TrainsOn, apply
from fewshot.tasks import LabelledImages, Task

WAY, SHOT, QUERIES, TASKS = 3, 2, 4, 2
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
        checks += [_embeds_each_image_alone, _ignores_padding, _answers_each_query_alone]
        checks += [_ignores_absent_classes] if learner.ways is None else []
    if symmetric:
        checks.append(_knows_no_order_of_classes)
    if learner.traits.trains_on is not TrainsOn.NOTHING:
        checks.append(_has_a_loss)
    return [_name_of_passed(check, learner, tolerance) for check in checks]


def _name_of_passed(check: Check, learner: Learner, tolerance: float) -> str:
    """The name of a check that the learner passes; whatever ends it otherwise is a ConformanceError with that name."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        check(learner, tolerance)
    except ConformanceError:
        raise
    except Exception as error:  # of code that nobody has seen, which may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConformanceError(f"{name}: expected an answer, got {reason}") from error
    return name


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


def _same(name: str, value: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    difference = float(np.abs(value - expected).max())
    if not difference <= tolerance:  # written so that nan fails
        raise ConformanceError(f"{name}: expected a difference of at most {tolerance:.0e}, got {difference:.1e}")


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
    _same("the sum of a query's probabilities", found.sum(1), np.ones(QUERIES), 1e-5)


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
    _same("the embedding of an image among other images", other, one, tolerance * max(1.0, float(np.abs(one).max())))


def _ignores_padding(learner: Learner, tolerance: float) -> None:
    """Padded points have other images, and labels of a class."""
    task, more = _task(learner, 4), _task(learner, 5).x_support[:3]
    x = jnp.concatenate([task.x_support, more])
    y = jnp.concatenate([task.y_support, jnp.zeros(len(more), jnp.int32)])
    mask = Mask(jnp.arange(len(x)) < len(task.x_support), jnp.ones(_way(learner), bool))
    padded = answer(learner, x, y, task.x_query, _way(learner), mask)[0]
    _same("probabilities of a padded task", padded, _probabilities(learner, task), tolerance)


def _answers_each_query_alone(learner: Learner, tolerance: float) -> None:
    task, others = _task(learner, 6), _task(learner, 7).x_query
    changed = jnp.concatenate([task.x_query[:1], others[1:]])
    one, other = _probabilities(learner, task), _probabilities(learner, task, x_query=changed)
    _same("probabilities of a query beside other queries", other[:1], one[:1], tolerance)


def _ignores_absent_classes(learner: Learner, tolerance: float) -> None:
    task, way = _task(learner, 8), _way(learner)
    mask = Mask(jnp.ones(len(task.x_support), bool), jnp.arange(way + 2) < way)
    found = answer(learner, *task[:3], way + 2, mask)[0]
    _same("probabilities of classes that are absent", found[:, way:], np.zeros((QUERIES, 2)), 0.0)
    _same("probabilities beside absent classes", found[:, :way], _probabilities(learner, task), tolerance)


def _knows_no_order_of_classes(learner: Learner, tolerance: float) -> None:
    task = _task(learner, 9)
    order = (jnp.arange(_way(learner), dtype=jnp.int32) + 1) % _way(learner)
    moved = _probabilities(learner, task, y_support=order[task.y_support])[:, np.asarray(order)]
    _same("probabilities of permuted labels, put back", moved, _probabilities(learner, task), tolerance)


def _has_parameters_of_a_dtype(learner: Learner, tolerance: float) -> None:
    del tolerance
    if weak := weakly_typed(learner):
        raise ConformanceError(
            f"parameters: expected arrays of a dtype, got a Python number at {weak[0]}; make it by jnp.asarray"
        )


def weakly_typed(learner: Learner) -> list[str]:
    """Parameters whose type is that of a Python number; training gives them one, and every program is compiled anew."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(learner))
    return [jax.tree_util.keystr(path) for path, leaf in leaves if getattr(leaf, "weak_type", False)]


def loss_and_gradient(learner: Learner, tasks: PyTree) -> tuple[Array, nnx.State]:
    """What the outer loop descends, by the tasks or batches [T, ...] of a step, and its gradient."""
    graph, parameters, *others = nnx.split(learner, nnx.Param, ...)
    keys = jax.random.split(jax.random.key(0), len(tasks[0]))

    def loss(parameters: nnx.State) -> Float[Array, ""]:
        outcome = nnx.merge(graph, parameters, *others, copy=True)(keys, tasks, jax.vmap)[0]
        if outcome.diagnostics.keys() != learner.diagnostics.keys():
            named = [", ".join(sorted(names)) or "none" for names in (learner.diagnostics, outcome.diagnostics)]
            raise ConformanceError(f"diagnostics: expected those of the class ({named[0]}), got {named[1]}")
        return -outcome.objective / outcome.points

    value, gradient = jax.jit(jax.value_and_grad(loss))(parameters)
    return value, gradient


def _has_a_loss(learner: Learner, tolerance: float) -> None:
    """On tasks of as many classes as it is trained on; of one of them labels are wrong, so that there is a loss."""
    del tolerance
    way = getattr(learner, "way", None) or _way(learner)
    task, wrong = (task_of(learner.image_shape, seed, way) for seed in range(TASKS))
    wrong = wrong._replace(y_query=(wrong.y_query + 1) % way)
    tasks = jax.tree.map(lambda *leaves: jnp.stack(leaves), task, wrong)
    batches = learner.traits.trains_on is TrainsOn.BATCHES
    data = LabelledImages(tasks.x_support, tasks.y_support % 2) if batches else tasks  # two classes are in all data
    value, gradient = loss_and_gradient(learner, data)
    leaves = jax.tree.leaves(gradient)
    if not (np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in leaves)):
        raise ConformanceError(f"the loss and its gradient: expected finite numbers, got {float(value)} or some beside")
    if leaves and not max(float(jnp.abs(leaf).max()) for leaf in leaves) > 0:
        raise ConformanceError("the gradient of the loss: expected one, got zeros alone; nothing would be learned")
