"""Scores of predictions of numbers, on fixed episodes: what `scoring.py` is for classes.

An episode is the unit of independence. Letters: E episodes, Q queries. Intervals are named by the percent that they
should hold; widths and RMSE are in the unit of the labels.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jaxtyping import Array, Float, Int, Key, Shaped

from fewshot.evaluation import scoring
from fewshot.evaluation.crps import crps, quantile
from fewshot.evaluation.episodes import SPLITS
from fewshot.evaluation.resampling import bootstrap, plain_interval
from fewshot.evaluation.text import format_table
from fewshot.inference.inner.base import Code
from fewshot.learners.base import Learner, apply, solve
from fewshot.tasks.curves import Curves, RealTask, check_curves

ENDS = {"50": (0.25, 0.75), "90": (0.05, 0.95)}  # of the intervals, as quantiles
BLOCK = 50  # episodes solved at once


class Judged(NamedTuple):
    """What is kept of the predictions of some queries, all [..., Q]; lower and upper have a last axis over ENDS."""

    mean: Float[Array | np.ndarray, "*E Q"]
    log_density: Float[Array | np.ndarray, "*E Q"]
    crps: Float[Array | np.ndarray, "*E Q"]
    lower: Float[Array | np.ndarray, "*E Q I"]
    upper: Float[Array | np.ndarray, "*E Q I"]


class RealSummary(TypedDict):
    """The metrics of regression. intervals: 95% of each by the bootstrap over episodes, None of a single episode."""

    nll: float
    rmse: float
    crps: float
    coverage50: float
    width50: float
    coverage90: float
    width90: float
    episodes: int
    intervals: dict[str, list[float] | None]


class RealEpisodes(NamedTuple):
    """Fixed tasks with a leading axis [E], and a key [E] each for the inference."""

    tasks: RealTask
    keys: Key[Array, " E"]


class RealScores(NamedTuple):
    """Labels and what the predictions say of them, all [E, Q, ...] on the host; codes [E]; the seconds it took."""

    labels: np.ndarray
    judged: Judged
    codes: np.ndarray
    seconds: float

    def failures(self) -> dict[str, int]:
        """Episodes by result code, those that went well left out."""
        return scoring.failures(self.codes)

    def by_episode(self) -> dict[str, np.ndarray]:
        """Means over the queries of each episode [E]; of the squared error where RMSE is asked for."""
        y, found = self.labels, self.judged
        inside = (y[..., None] >= found.lower) & (y[..., None] <= found.upper)
        widths = found.upper - found.lower
        means = {"nll": -found.log_density, "rmse": (y - found.mean) ** 2, "crps": found.crps}
        for number, name in enumerate(ENDS):
            means |= {f"coverage{name}": inside[..., number], f"width{name}": widths[..., number]}
        return {name: np.asarray(values, np.float64).mean(axis=1) for name, values in means.items()}

    def metrics(self) -> dict[str, float]:
        """Every metric by its name."""
        return {name: _statistic(name)(values) for name, values in self.by_episode().items()}

    def validation(self) -> dict[str, float]:
        """What a row of the training log says."""
        found = self.metrics()
        return {f"validation_{name}": found[name] for name in ("nll", "rmse")}

    def summary(self) -> RealSummary:
        """All metrics with their intervals, from a fixed random generator."""
        rng, means = np.random.default_rng(0), self.by_episode()
        least = {name: -np.inf if name == "nll" else 0.0 for name in means}
        most = {name: 1.0 if name.startswith("coverage") else np.inf for name in means}
        intervals = {
            name: plain_interval(bootstrap(rng, _statistic(name), values, least=least[name], most=most[name]))
            for name, values in means.items()
        }
        found = self.metrics()
        return RealSummary(
            nll=found["nll"],
            rmse=found["rmse"],
            crps=found["crps"],
            coverage50=found["coverage50"],
            width50=found["width50"],
            coverage90=found["coverage90"],
            width90=found["width90"],
            episodes=len(self.labels),
            intervals=intervals,
        )


def _mean(values: np.ndarray) -> float:
    return float(values.mean())


def _root_mean(values: np.ndarray) -> float:
    return float(np.sqrt(values.mean()))


def _statistic(name: str) -> Callable[[np.ndarray], float]:
    return _root_mean if name == "rmse" else _mean


def judge(distribution: dist.Distribution, y: Float[Array, " Q"]) -> Judged:
    """What a prediction says of the labels of its queries."""
    lower, upper = (jnp.stack([quantile(distribution, ends[side]) for ends in ENDS.values()], -1) for side in (0, 1))
    return Judged(distribution.mean, distribution.log_prob(y), crps(distribution, y), lower, upper)


def draw_real_episodes(seed: int, split: str, curves: Curves, shot: int, query: int, count: int) -> RealEpisodes:
    """`count` tasks of a split; the first n are the same for every count. Raises DataError."""
    check_curves(curves, shot, query)
    task_key, inference_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), SPLITS.index(split)))

    def each(key: Array) -> Array:
        return jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(count))

    tasks = jax.jit(jax.vmap(lambda key: curves.sample(key, shot, query)))(each(task_key))
    return RealEpisodes(tasks, each(inference_key))


def score_reals(learner: Learner, episodes: RealEpisodes, block: int | None = None) -> RealScores:
    """Solve the episodes and judge the predictions, `block` at a time; one by one where JAX cannot trace the learner.

    An episode without finite predictions counts as NON_FINITE, and is judged as if its queries were predicted by a
    normal with mean and variance of the labels of all episodes.
    """
    start, count = time.perf_counter(), len(episodes.keys)
    size = min(block or BLOCK, count) if learner.traits.traceable else 1
    parts = [apply(_answers, learner, (), *scoring.rows(episodes, first, size)) for first in range(0, count, size)]
    joined = jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves])[:count], *parts)
    labels = np.asarray(episodes.tasks.y_query)
    judged, codes = _vague_where_failed(labels, *joined)
    return RealScores(labels, judged, codes, time.perf_counter() - start)


def _answers(learner: Learner, tasks: RealTask, keys: Array) -> tuple[Judged, Array]:
    """What the learner's answers to tasks [B] say, and their codes [B]."""
    if learner.traits.traceable:
        return learner.for_tasks(lambda task, key: _answer(learner, task, key))(tasks, keys)
    found = _answer(learner, jax.tree.map(lambda leaf: leaf[0], tasks), keys[0])
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], found)


def _answer(learner: Learner, task: RealTask, key: Array) -> tuple[Judged, Array]:
    support, query = learner.embed(task.x_support), learner.embed(task.x_query)
    found = solve(learner, key, support, task.y_support, query, 1)
    return judge(found.distribution, task.y_query), found.code


def _vague_where_failed(
    labels: Shaped[np.ndarray, "E Q"], judged: Judged, codes: Int[np.ndarray, " E"]
) -> tuple[Judged, np.ndarray]:
    finite = [np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1) for leaf in judged]
    failed = ~np.all(finite, axis=0)
    if not failed.any():
        return judged, codes
    vague = judge(dist.Normal(jnp.full(labels.size, labels.mean()), labels.std()), jnp.asarray(labels.ravel()))
    shaped = Judged(*(np.asarray(leaf).reshape(*labels.shape, *leaf.shape[1:]) for leaf in vague))
    chosen = [
        np.where(failed.reshape(-1, *[1] * (old.ndim - 1)), new, old) for old, new in zip(judged, shaped, strict=True)
    ]
    return Judged(*chosen), np.where(failed, Code.NON_FINITE, codes)


def real_table(results: Mapping[str, RealSummary]) -> str:
    """A row per model; NLL with its 95% interval over episodes."""
    header = ["", "NLL", "95% interval", "RMSE", "CRPS", "in 50%", "width", "in 90%", "width"]
    return format_table(header, [[name, *_cells(row)] for name, row in results.items()]) + f"\n{LEGEND}"


LEGEND = (
    "NLL: nats a query, of a density, so it can be negative. CRPS: like the absolute error, for distributions.\n"
    "in 50%, in 90%: share of the labels inside these intervals of the prediction, and how wide they are."
)


def _cells(row: RealSummary) -> list[str]:
    interval = row["intervals"]["nll"]
    ends = "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
    numbers = (row["rmse"], row["crps"])
    shares = [f"{100 * row['coverage50']:.1f}%", f"{row['width50']:.3f}"]
    shares += [f"{100 * row['coverage90']:.1f}%", f"{row['width90']:.3f}"]
    return [f"{row['nll']:.4f}", ends, *(f"{value:.4f}" for value in numbers), *shares]
