"""The temperature of a run for tasks of another shape: it belongs to one number of classes and labelled images."""

from typing import NamedTuple

from fewshot import tasks
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.scoring import temperature_of
from fewshot.learners import Learner
from fewshot.tasks import Dataset
from fewshot.tasks.files import downloads_forbidden
from fewshot.training.configuration import HELD_OUT, RunConfig
from fewshot.training.data import calibration_episodes, load_splits, temperature_classes
from fewshot.training.run import Run

MOST_CLASSES, MOST_POINTS = 20, 200  # of an episode that a temperature is fitted on, so that it takes seconds


class Temperatures(NamedTuple):
    """Of tasks of one shape, and of those with one image a class fewer, which a single image has not."""

    own: float
    fewer: float | None


def for_shape(run: Run, way: int, shot: int, data_root: str | None) -> float:
    """The run's temperature for that shape, fitted on its training classes where it was trained for another.

    Raises DataError.
    """
    if _is_trained(run, way, shot):
        return run.temperature
    return _at(run, run.splits(data_root).train, way, shot)


def for_user(run: Run, way: int, shot: int, data_root: str | None) -> Temperatures:
    """Those for a user's images: as near to the shape as MOST_* and the run's data set go, where it is at hand.

    Where it is not, the run's own temperature stays, and a line says so: nothing is downloaded for this.
    """
    trained = run.config
    if _is_trained(run, way, shot) and shot == 1:
        return Temperatures(run.temperature, None)
    try:
        with downloads_forbidden():
            train = load_splits(trained.dataset, data_root).train  # any of them serve, moved or not
    except tasks.DataError:
        if not _is_trained(run, way, shot):
            print(
                f"the temperature {run.temperature:.3g} was fitted for {trained.way}-way {trained.shot}-shot tasks; "
                f"where the data set {trained.dataset} is at hand (--data-root DIR) it is fitted for yours, "
                "or give one with --temperature"
            )
        return Temperatures(run.temperature, run.temperature if shot > 1 else None)
    known = temperature_classes(trained, train)
    way = min(way, known.classes, MOST_CLASSES)
    near = max(1, min(shot, known.smallest - 1, MOST_POINTS // way))
    own = _at(run, train, way, near)
    return Temperatures(own, _at(run, train, way, max(1, near - 1)) if shot > 1 else None)


def _is_trained(run: Run, way: int, shot: int) -> bool:
    return (way, shot) == (run.config.way, run.config.shot)


def _at(run: Run, train: tasks.Dataset, way: int, shot: int) -> float:
    if _is_trained(run, way, shot):
        return run.temperature
    print(f"fitting the temperature for {way}-way {shot}-shot on training classes of the run")
    return fitted_temperature(run.learner, run.config, *calibration_episodes(run.config, train, way, shot))


def fitted_temperature(learner: Learner, config: RunConfig, known: Dataset, episodes: Episodes) -> float:
    """The temperature for classes that a learner never saw, from `training.data.calibration_episodes`."""
    return temperature_of(learner, known, episodes, raised=config.trainer.temperature_from != HELD_OUT)
