"""The untrained learner that a trained one must beat."""

from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Key

from fewshot import tasks
from fewshot.learners import Learner
from fewshot.tasks import Dataset
from fewshot.training.run import Run

STATISTICS_TASKS = 50


def with_statistics(run: Run, train: Dataset) -> Learner:
    """The learner of a run with the batch statistics of training tasks, and nothing learned.

    The initial ones (mean 0, variance 1) would make an untrained network look far worse than it is.
    """
    graph, parameters, *others = nnx.split(run.learner, nnx.Param, ...)
    statistics = others[0]
    if not jax.tree.leaves(statistics):
        return run.learner
    sizes = run.config.way, run.config.shot, run.config.query
    for key in jax.random.split(jax.random.key(run.config.seed), STATISTICS_TASKS):
        statistics = _record(graph, sizes, parameters, statistics, key, train)
    return nnx.merge(graph, parameters, statistics)


@partial(jax.jit, static_argnums=(0, 1))
def _record(
    graph: nnx.GraphDef,
    sizes: tuple[int, ...],
    parameters: nnx.State,
    statistics: nnx.State,
    key: Key[Array, ""],
    train: Dataset,
) -> nnx.State:
    task = tasks.sample_task(key, train, *sizes)
    learner = nnx.merge(graph, parameters, statistics)
    learner.observe(jax.tree.map(lambda leaf: leaf[None], task))
    return nnx.state(learner, nnx.Not(nnx.Param))
