"""The temperature of a run for tasks of another shape: it belongs to one number of classes and labelled images.

One that was fitted is kept in the run folder, in temperatures.json, so that no call fits what is known.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

from fewshot import tasks
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.scoring import temperature_of
from fewshot.learners import Learner
from fewshot.tasks import Dataset
from fewshot.tasks.files import downloads_forbidden
from fewshot.tasks.replacing import replace_text
from fewshot.training.configuration import HELD_OUT, RunConfig
from fewshot.training.data import calibration_episodes, load_splits, temperature_classes
from fewshot.training.run import LARGEST_TEMPERATURE, Run

KEPT = "temperatures.json"
MOST_BYTES = 1 << 20  # of that file
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

    Where it is not, those that the run folder holds are known; otherwise the run's own temperature stays, and a line
    says so: nothing is downloaded for this.
    """
    trained = run.config
    if _is_trained(run, way, shot) and shot == 1:
        return Temperatures(run.temperature, None)
    try:
        with downloads_forbidden():
            train = load_splits(trained.dataset, data_root).train  # any of them serve, moved or not
    except tasks.DataError:
        own = _known(run, way, shot)
        if own is None:
            print(
                f"the temperature {run.temperature:.3g} was fitted for {trained.way}-way {trained.shot}-shot tasks; "
                f"where the data set {trained.dataset} is at hand (--data-root DIR) it is fitted for yours, "
                "or give one with --temperature"
            )
            return Temperatures(run.temperature, run.temperature if shot > 1 else None)
        return Temperatures(own, (_known(run, way, shot - 1) or own) if shot > 1 else None)
    known = temperature_classes(trained, train)
    way = min(way, known.classes, MOST_CLASSES)
    near = max(1, min(shot, known.smallest - 1, MOST_POINTS // way))
    own = _at(run, train, way, near)
    return Temperatures(own, _at(run, train, way, max(1, near - 1)) if shot > 1 else None)


def _is_trained(run: Run, way: int, shot: int) -> bool:
    return (way, shot) == (run.config.way, run.config.shot)


def _name(way: int, shot: int) -> str:
    return f"{way}-way {shot}-shot"


def _known(run: Run, way: int, shot: int) -> float | None:
    """That of the training, or one that was fitted before."""
    return run.temperature if _is_trained(run, way, shot) else kept(run).get(_name(way, shot))


def _at(run: Run, train: tasks.Dataset, way: int, shot: int) -> float:
    known = _known(run, way, shot)
    if known is None:
        print(f"fitting the temperature for {_name(way, shot)} on training classes of the run")
        known = fitted_temperature(run.learner, run.config, *calibration_episodes(run.config, train, way, shot))
        _keep(run, kept(run) | {_name(way, shot): known})
    return known


def kept(run: Run) -> dict[str, float]:
    """The temperatures that a run's folder holds by their shapes, "5-way 3-shot".

    None from a file that is damaged, or that belongs to other weights: a run may have been trained further.
    """
    path = _file(run)
    if path is None or not path.is_file() or path.stat().st_size > MOST_BYTES:
        return {}
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError):
        return {}  # they are fitted and written again
    if not isinstance(found, dict) or found.get("weights") != _digest(path):
        return {}
    held = found.get("temperatures")
    named = held.items() if isinstance(held, dict) else ()
    return {name: value for name, value in named if type(value) is float and 0 < value <= LARGEST_TEMPERATURE}


def _keep(run: Run, known: dict[str, float]) -> None:
    path = _file(run)
    if path is None:
        return
    content = {"weights": _digest(path), "temperatures": dict(sorted(known.items()))}
    try:
        replace_text(path, json.dumps(content, indent=2) + "\n", follow=False)
    except OSError as error:
        print(f"the temperature will be fitted again next time: {error}", file=sys.stderr)


def _digest(path: Path) -> str:
    """SHA-256 of the weights beside the file; "" where there are none."""
    weights = path.with_name("weights.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else ""


def _file(run: Run) -> Path | None:
    """Beside the weights that they belong to."""
    return Path(run.config.run_dir) / KEPT if run.config.run_dir else None


def fitted_temperature(learner: Learner, config: RunConfig, known: Dataset, episodes: Episodes) -> float:
    """The temperature for classes that a learner never saw, from `training.data.calibration_episodes`."""
    return temperature_of(learner, known, episodes, raised=config.trainer.temperature_from != HELD_OUT)
