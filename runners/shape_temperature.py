"""The temperature of a run for tasks of another shape: it belongs to one number of classes and labelled images."""

from typing import NamedTuple

import tasks
from runners import scoring
from runners.build import Model, splits_of
from runners.data import calibration_episodes, load_splits, temperature_classes
from tasks.files import downloads_forbidden

MOST_CLASSES, MOST_POINTS = 20, 200  # of an episode that a temperature is fitted on, so that it takes seconds


class Temperatures(NamedTuple):
    """Of tasks of one shape, and of those with one image a class fewer, which a single image has not."""

    own: float
    fewer: float | None


def for_shape(model: Model, way: int, shot: int, data_root: str | None) -> float:
    """The run's temperature for that shape, fitted on its training classes where it was trained for another.

    Raises DataError.
    """
    if _is_trained(model, way, shot):
        return model.temperature
    return _at(model, splits_of(model, data_root).train, way, shot)


def for_user(model: Model, way: int, shot: int, data_root: str | None) -> Temperatures:
    """Those for a user's images: as near to the shape as MOST_* and the run's data set go, where it is at hand.

    Where it is not, the run's own temperature stays, and a line says so: nothing is downloaded for this.
    """
    trained = model.config
    if _is_trained(model, way, shot) and shot == 1:
        return Temperatures(model.temperature, None)
    try:
        with downloads_forbidden():
            train = load_splits(trained.dataset, data_root).train  # any of them serve, moved or not
    except tasks.DataError:
        if not _is_trained(model, way, shot):
            print(
                f"the temperature {model.temperature:.3g} was fitted for {trained.way}-way {trained.shot}-shot tasks; "
                f"where the data set {trained.dataset} is at hand (--data-root DIR) it is fitted for yours, "
                "or give one with --temperature"
            )
        return Temperatures(model.temperature, model.temperature if shot > 1 else None)
    known = temperature_classes(trained, train)
    way = min(way, known.classes, MOST_CLASSES)
    near = max(1, min(shot, known.smallest - 1, MOST_POINTS // way))
    own = _at(model, train, way, near)
    return Temperatures(own, _at(model, train, way, max(1, near - 1)) if shot > 1 else None)


def _is_trained(model: Model, way: int, shot: int) -> bool:
    return (way, shot) == (model.config.way, model.config.shot)


def _at(model: Model, train: tasks.Dataset, way: int, shot: int) -> float:
    if _is_trained(model, way, shot):
        return model.temperature
    print(f"fitting the temperature for {way}-way {shot}-shot on training classes of the run")
    return scoring.temperature_of(model, *calibration_episodes(model.config, train, way, shot))
