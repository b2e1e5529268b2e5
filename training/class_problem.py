"""Tasks of classes: images with whole numbers as labels, judged by accuracy and by their probabilities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fewshot.evaluation import tables
from fewshot.evaluation.episodes import EVALUATION_SEED, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, score
from fewshot.evaluation.text import format_percent
from fewshot.inference.outer.svi import Trainer
from fewshot.learners import Learner, NearestNeighbour, TrainsOn
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import holds_features
from fewshot.tasks import Splits
from fewshot.training import optimisation
from fewshot.training.configuration import HELD_OUT, RunConfig
from fewshot.training.data import (
    calibration_episodes,
    check_own_classes,
    load_splits,
    own_classes,
    test_shape,
    training_classes,
    with_queries,
)
from fewshot.training.problem import Selection, Tested
from fewshot.training.run import Run
from fewshot.training.shape_temperature import fitted_temperature
from fewshot.training.untrained import with_statistics


@dataclass(frozen=True)
class ClassProblem:
    """A data set of images in classes: see `Problem`."""

    splits: Splits

    selection: ClassVar[Selection] = Selection("validation_accuracy", True, format_percent)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, Ch)."""
        return self.splits.image_shape

    @property
    def class_names(self) -> dict[str, list[str]] | None:
        """Of a user's own files."""
        return own_classes(self.splits)

    def check_classes(self, trained_with: Mapping[str, Sequence[str]] | None) -> None:
        """Raises DataError."""
        check_own_classes(self.splits, trained_with)

    def training_classes(self, config: RunConfig) -> int:
        """Without those that are held out for the temperature."""
        return training_classes(config, self.splits.train).classes

    def trainer(self, run: Run) -> Trainer:
        """The outer loop."""
        return optimisation.build_trainer(run, self.splits.train)

    def validation(self, config: RunConfig) -> Callable[[Learner], Scores]:
        """Fixed episodes of validation classes."""
        shape = test_shape(config, self.splits.validation)
        count = config.trainer.validation_episodes
        fixed = draw_episodes(EVALUATION_SEED, "validation", self.splits.validation, shape, count)
        return lambda learner: score(learner, embed(learner, self.splits.validation), fixed)

    def calibration(self, config: RunConfig) -> Callable[[Learner], float]:
        """Fitted on training classes."""
        calibration = calibration_episodes(config, self.splits.train, config.way, config.shot)
        return lambda learner: fitted_temperature(learner, config, *calibration)

    def untrained(self, run: Run) -> Learner:
        """Nothing learned."""
        return with_statistics(run, self.splits.train)

    def test(self, run: Run, best: Run, failures: int) -> Tested:
        """The best weights, the untrained network and the nearest neighbour on the test classes, as a table."""
        config, test = run.config, self.splits.test
        shape = test_shape(config, test)
        episodes = draw_episodes(EVALUATION_SEED, "test", test, shape, config.trainer.test_episodes)
        raw = score(best.learner, embed(best.learner, test), episodes)
        learns = run.learner.traits.trains_on is not TrainsOn.NOTHING
        name = "trained" if learns else "not trained"
        results = {name: raw.tempered(best.temperature).summary(), f"{name}, raw (temperature 1)": raw.summary()}
        if learns:
            untrained = self.untrained(run)
            results["untrained network"] = score(untrained, embed(untrained, test), episodes).summary()
        inputs = "features" if holds_features(self.splits.image_shape) else "pixels"
        nearest = NearestNeighbour(Identity(self.splits.image_shape))
        pixels = score(nearest, embed(nearest, test), episodes)
        results[f"1-nearest neighbour on {inputs}"] = pixels.accuracies()
        print(tables.heading(config.dataset, config.dataset, shape, len(episodes.keys), test.classes))
        print(tables.metrics_table(results))
        print(tables.temperature_note(best.temperature, shape, held_out=config.trainer.temperature_from == HELD_OUT))
        print(tables.failures_note(raw.failures()), f"In training: {failures or 'none'}.")
        return {"temperature": best.temperature, "failures": raw.failures(), "test": results}


def load_class_problem(config: RunConfig) -> tuple[RunConfig, ClassProblem]:
    """The data of a run, and its configuration with the queries decided. Raises DataError."""
    splits = load_splits(config.dataset, config.data_root)
    return with_queries(config, splits), ClassProblem(splits)
