"""The untrained learner that a trained one must beat."""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx
from jaxtyping import Array, Key

from fewshot import tasks
from fewshot.inference.outer.svi import Sampler
from fewshot.learners import Learner
from fewshot.tasks import Dataset
from fewshot.training.run import Run

STATISTICS_TASKS = 50


def with_statistics(run: Run, train: Dataset) -> Learner:
    """The learner of a run with the batch statistics of training tasks, and nothing learned.

    The initial ones (mean 0, variance 1) would make an untrained network look far worse than it is.
    """
    config = run.config
    return recorded(run, jax.tree_util.Partial(_Draw(config.way, config.shot, config.query), train))


def recorded(run: Run, draw: Sampler) -> Learner:
    """The same with the tasks that `draw`, a `jax.tree_util.Partial`, draws from keys."""
    graph, parameters, *others = nnx.split(run.learner, nnx.Param, ...)
    statistics = others[0]
    if not jax.tree.leaves(statistics):
        return run.learner
    for key in jax.random.split(jax.random.key(run.config.seed), STATISTICS_TASKS):
        statistics = _record(graph, parameters, statistics, key, draw)
    return nnx.merge(graph, parameters, statistics)


@dataclass(frozen=True)
class _Draw:
    """A task of these sizes; equal ones are compiled once."""

    way: int
    shot: int
    query: int

    def __call__(self, train: Dataset, key: Key[Array, ""]) -> tasks.Task | tasks.OpenTask:
        return tasks.sample_task(key, train, self.way, self.shot, self.query)


@partial(jax.jit, static_argnums=0)
def _record(
    graph: nnx.GraphDef, parameters: nnx.State, statistics: nnx.State, key: Key[Array, ""], draw: Sampler
) -> nnx.State:
    task = draw(key)
    learner = nnx.merge(graph, parameters, statistics)
    learner.observe(jax.tree.map(lambda leaf: leaf[None], task))
    return nnx.state(learner, nnx.Not(nnx.Param))
