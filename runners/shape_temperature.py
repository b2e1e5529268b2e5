"""The temperature of a run for tasks of another shape: it belongs to one number of classes and labelled images."""

from dataclasses import replace

import tasks
from runners import scoring
from runners.build import Model
from runners.data import calibration_episodes, load_splits, temperature_classes
from tasks.files import downloads_forbidden

MOST_CLASSES, MOST_POINTS = 20, 200  # of an episode that a temperature is fitted on, so that it takes seconds


def for_shape(model: Model, way: int, shot: int, data_root: str | None) -> Model:
    """The run with the temperature of that shape, fitted on its training classes where it was trained for another.

    Raises DataError.
    """
    if (way, shot) == (model.config.way, model.config.shot):
        return model
    return _fitted(model, load_splits(model.config.dataset, data_root).train, way, shot)


def for_user(model: Model, way: int, shot: int, data_root: str | None) -> Model:
    """`for_shape` for a user's images: as near to the shape as MOST_* and the run's data set go, where it is at hand.

    Where it is not, the run's own temperature stays, and a line says so: nothing is downloaded for this.
    """
    trained = model.config
    if (way, shot) == (trained.way, trained.shot):
        return model
    try:
        with downloads_forbidden():
            train = load_splits(trained.dataset, data_root).train
    except tasks.DataError:
        print(
            f"the temperature {model.temperature:.3g} was fitted for {trained.way}-way {trained.shot}-shot tasks; "
            f"where the data set {trained.dataset} is at hand (--data-root DIR) it is fitted for yours, "
            "or give one with --temperature"
        )
        return model
    known = temperature_classes(trained, train)
    way = min(way, known.classes, MOST_CLASSES)
    return _fitted(model, train, way, max(1, min(shot, known.smallest - 1, MOST_POINTS // way)))


def _fitted(model: Model, train: tasks.Dataset, way: int, shot: int) -> Model:
    print(f"fitting the temperature for {way}-way {shot}-shot on training classes of the run")
    return replace(
        model, temperature=scoring.temperature_of(model, *calibration_episodes(model.config, train, way, shot))
    )
