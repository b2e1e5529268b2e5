"""Tasks with real labels: each a function of its own, judged by the density of its labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
from jaxtyping import Array, Key

from fewshot.evaluation import tables
from fewshot.evaluation.episodes import EVALUATION_SEED
from fewshot.evaluation.known_process import KnownProcess
from fewshot.evaluation.plain_labels import MeanLabel, NearestLabel
from fewshot.evaluation.real_scores import (
    RealEpisodes,
    RealScores,
    RealSummary,
    draw_real_episodes,
    real_table,
    score_reals,
)
from fewshot.inference.outer.svi import Trainer
from fewshot.learners import Learner, TrainsOn
from fewshot.tasks.curves import Curves, CurveSplits, Pixels, ProcessCurves, RealTask, check_curves, load_curves
from fewshot.training import defaults, optimisation
from fewshot.training.configuration import RunConfig
from fewshot.training.problem import Selection, Tested
from fewshot.training.run import Run
from fewshot.training.untrained import recorded

TEST_QUERIES = 50  # of a task: this many, or what its data set has
FRACTION = 4  # of a small data set, the part that a task's queries are at most


@dataclass(frozen=True)
class CurveProblem:
    """A data set with real labels: see `Problem`."""

    splits: CurveSplits

    selection: ClassVar[Selection] = Selection("validation_nll", False, "NLL {:.3f}".format)
    class_names: ClassVar[None] = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(1, 1, D)."""
        return self.splits.image_shape

    def check_classes(self, trained_with: Mapping[str, Sequence[str]] | None) -> None:
        """There are none."""

    def training_classes(self, config: RunConfig) -> int:
        """There are none."""
        del config
        return 0

    def trainer(self, run: Run) -> Trainer:
        """The outer loop."""
        return optimisation.trainer_on(run, self._sampler(run.config))

    def validation(self, config: RunConfig) -> Callable[[Learner], RealScores]:
        """Fixed validation tasks."""
        episodes = self.episodes(config, "validation", config.trainer.validation_episodes)
        return lambda learner: score_reals(learner, episodes)

    def calibration(self, config: RunConfig) -> Callable[[Learner], float]:
        """Densities have no temperature."""
        del config
        return lambda learner: 1.0

    def untrained(self, run: Run) -> Learner:
        """Nothing learned."""
        return recorded(run, self._sampler(run.config))

    def episodes(self, config: RunConfig, split: str, count: int) -> RealEpisodes:
        """Fixed tasks of a split, the same for every run."""
        curves = getattr(self.splits, split)
        return draw_real_episodes(EVALUATION_SEED, split, curves, config.shot, test_queries(curves), count)

    def test(self, run: Run, best: Run, failures: int) -> Tested:
        """The best weights and the untrained learner on test tasks, and what there is to compare with."""
        config = run.config
        episodes = self.episodes(config, "test", config.trainer.test_episodes)
        scores = score_reals(best.learner, episodes)
        results = {"trained": scores.summary()}
        if run.learner.traits.trains_on is not TrainsOn.NOTHING:
            results["untrained"] = score_reals(self.untrained(run), episodes).summary()
        results |= compared(self.splits.test, episodes)
        print(curve_heading(config.dataset, config.shot, episodes))
        print(real_table(results))
        print(tables.failures_note(scores.failures()), f"In training: {failures or 'none'}.")
        return {"failures": scores.failures(), "test": results}

    def _sampler(self, config: RunConfig) -> Callable[[Key[Array, ""]], RealTask]:
        return jax.tree_util.Partial(_Draw(config.shot, config.query), self.splits.train)


@dataclass(frozen=True)
class _Draw:
    """A task of a split; equal ones are compiled once."""

    shot: int
    query: int

    def __call__(self, curves: Curves, key: Key[Array, ""]) -> RealTask:
        return curves.sample(key, self.shot, self.query)


def compared(curves: Curves, episodes: RealEpisodes) -> dict[str, RealSummary]:
    """Rows beside a learner's: of draws of a known process the best possible, of images what all should beat."""
    others: dict[str, Learner] = {}
    if isinstance(curves, ProcessCurves):
        others = {"the process they are drawn from": KnownProcess(curves)}
    if isinstance(curves, Pixels):
        others = {"mean of the labelled": MeanLabel(curves.inputs), "nearest labelled": NearestLabel(curves.inputs)}
    return {name: score_reals(learner, episodes).summary() for name, learner in others.items()}


def curve_heading(dataset: str, shot: int, episodes: RealEpisodes) -> str:
    """What a table is about."""
    count, queries = episodes.tasks.y_query.shape
    points = "1 labelled point" if shot == 1 else f"{shot} labelled points"
    return f"\nTest on {dataset}: {count} tasks of {points} and {queries} queries"


def test_queries(curves: Curves) -> int:
    """Queries of a test task."""
    return TEST_QUERIES if curves.largest is None else max(1, min(TEST_QUERIES, curves.largest // FRACTION))


def load_curve_problem(config: RunConfig) -> tuple[RunConfig, CurveProblem]:
    """The data of a run, and its configuration with the queries decided. Raises DataError."""
    problem = CurveProblem(load_curves(config.dataset, config.data_root))
    if config.query == 0:
        config = replace(config, query=defaults.TRAINING_QUERIES, chosen=(*config.chosen, "query"))
    check_curves(problem.splits.train, config.shot, config.query)
    for curves in (problem.splits.validation, problem.splits.test):
        check_curves(curves, config.shot, test_queries(curves))
    return config, problem
