"""Weights by name: `load_pretrained(NAME)` gives a learner, its encoder and its temperatures, without any data.

A file `weights/NAME.safetensors` of this package holds what a run folder's does, and beside it the temperatures of
common shapes; `weights/NAME.md` is its model card. It is read as carefully as a run folder of somebody else.

What makes pictures of flowers alike is not what makes groceries alike: a metric that was learned for one kind of
pictures is worse than none for another (docs/results/heads/kinds.md). So weights may be joined by special ones for some
kinds of pictures, and the labelled pictures of a task tell which answers it (`Pretrained.for_task`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from fewshot.evaluation.text import plain
from fewshot.learners import Learner
from fewshot.models.networks import ENCODERS
from fewshot.models.networks.metric import unit
from fewshot.training import weights
from fewshot.training.configuration import RunConfig, data_of
from fewshot.training.overrides import ConfigError
from fewshot.training.run import LARGEST_TEMPERATURE, Run, build_run, exported, with_weights
from fewshot.training.run_directory import READABLE, SCHEMA_VERSION, RunError, train_anew
from fewshot.training.shape_temperature import Temperatures

FOLDER = Path(__file__).resolve().parent / "weights"
SPECIAL = {"photographs": ("photographs-flowers", "photographs-groceries")}  # joins what is right for any picture
PRETRAINED = ("photographs", *SPECIAL["photographs"], "omniglot", "glyphs", "omniglot-emnist")
DEFAULT = "photographs"
HEAD_OF = {"efficientnet-lite0": "photographs"}  # the weights that belong to an encoder
MOST_CELLS = 100  # ways or shots of a table
MOST_CLASSES = 10_000  # of the pictures of a kind
UNIT_TOLERANCE = 1e-3  # of the squared length of class means


class TemperatureTable(NamedTuple):
    """log T at the crossings of numbers of classes `ways` [A] and of labelled examples a class `shots` [B], rising."""

    ways: tuple[int, ...]
    shots: tuple[int, ...]
    logs: Float[np.ndarray, "A B"]

    def at(self, counts: Sequence[int]) -> float:
        """T of a task with so many labelled examples of each class.

        log T = 1/C sum_c l(C, n_c), l linear between the crossings in log C and log n, and constant beyond them.
        Raises ValueError for fewer than two classes, or one without examples.
        """
        if len(counts) < 2 or min(counts) < 1:
            raise ValueError(f"expected at least two classes with an example each, got the counts {list(counts)}")
        along = [np.interp(np.log(len(counts)), np.log(self.ways), column) for column in self.logs.T]
        return float(np.exp(np.interp(np.log(counts), np.log(self.shots), along).mean()))


class Kind(NamedTuple):
    """Pictures of a kind by their features: means [K, D], of length 1, of classes of it.

    A picture is as like the kind as it is to the nearest of them, by the cosine; a task whose pictures have the mean
    `least` or more is of the kind.
    """

    means: Float[np.ndarray, "K D"]
    least: float

    def likeness(self, features: Float[np.ndarray, "N D"]) -> float:
        """How like the kind the pictures of a task are: the mean over them of the cosine with the nearest mean."""
        return float((unit(features) @ self.means.T.astype(np.float64)).max(axis=1).mean())


@dataclass(frozen=True)
class Pretrained:
    """What is shipped under a name.

    encoder: the name of what turns pictures into the learner's features, None where it reads images itself. kind: the
    pictures that it is for, None where it is for all. special: what is better than it for pictures of a kind.
    """

    name: str
    run: Run
    encoder: str | None
    table: TemperatureTable
    kind: Kind | None = None
    special: tuple["Pretrained", ...] = ()

    @property
    def learner(self) -> Learner:
        """What answers a task."""
        return self.run.learner

    def for_task(self, images: Shaped[np.ndarray, "N H W Ch"]) -> "Pretrained":
        """What answers a task with these labelled images or features: the special one that they are most like, or this.

        Nothing of a special one counts for pictures that are not of its kind.
        """
        if images.shape[1:] != self.learner.image_shape:
            return self  # which says what it reads
        features = images.reshape(len(images), -1)
        found = [(one.kind.likeness(features), one) for one in self.special if one.kind is not None]
        likeness, best = max(found, key=itemgetter(0), default=(-math.inf, self))
        return best if best.kind is not None and likeness >= best.kind.least else self

    def temperature(self, counts: Sequence[int]) -> float:
        """The temperature of tasks with so many labelled examples of each class; nothing is fitted."""
        return self.table.at(counts)

    def temperatures(self, counts: Sequence[int]) -> Temperatures:
        """That temperature, and the one with an example a class fewer; none where no class has two."""
        fewer = [max(count - 1, 1) for count in counts]
        return Temperatures(self.temperature(counts), self.temperature(fewer) if max(counts) > 1 else None)


def load_pretrained(name: str) -> Pretrained:
    """The weights of that name. Raises ValueError for an unknown name, RunError for a damaged file."""
    _check_name(name)
    found = read(FOLDER / f"{name}.safetensors", name)
    return replace(found, special=tuple(load_pretrained(one) for one in SPECIAL.get(name, ())))


class Content(NamedTuple):
    """What a file of weights holds: the arrays of a run, of its temperatures and of its kind, and words about them."""

    tree: weights.WeightTree
    metadata: Mapping[str, str]


def content_of(name: str) -> Content:
    """What is shipped under a name. Raises ValueError for an unknown name, RunError for a damaged file."""
    _check_name(name)
    return _content(FOLDER / f"{name}.safetensors", name)


def read(path: Path, name: str) -> Pretrained:
    """The weights in a file that `store` wrote. Raises RunError, in one line, for a file that is missing or damaged."""
    content = _content(path, name)
    try:
        return parsed(content, path, name)
    except RunError as error:
        raise RunError(f"{error}; install the package again") from error


def parsed(content: Content, path: Path, name: str) -> Pretrained:
    """The weights of a content, which came from the file `path`. Raises RunError."""
    tree, config = dict(content.tree), _json(content.metadata.get("config", "null"))
    if (
        not isinstance(config, dict)
        or config.pop("schema_version", None) not in READABLE
        or "image_shape" not in config
    ):
        raise RunError(f"expected {path} to hold a configuration of this version")
    table, encoder = _table(tree.pop("temperatures", None), path), content.metadata.get("encoder", "")
    kind = _kind(tree.pop("kind", None), path)
    if encoder not in ("", *ENCODERS):
        raise RunError(f"expected {path} to name one of {', '.join(ENCODERS)}, got {plain(encoder)[:80]}")
    try:
        checked, data = RunConfig.from_json(config), data_of(config)
        assert data.image_shape is not None
        run = build_run(checked, data.image_shape, data.training_classes)
    except ConfigError as error:
        raise RunError(f"{path}: {plain(error)[:300]}") from error
    features = math.prod(run.learner.image_shape)
    if kind is not None and kind.means.shape[1] != features:
        raise RunError(f"expected class means of {features} features in {path}")
    try:
        return Pretrained(name, with_weights(run, tree, path), encoder or None, table, kind)
    except RunError as error:
        raise RunError(str(error).removesuffix(f"; {train_anew()}")) from error


def _content(path: Path, name: str) -> Content:
    """Raises RunError."""
    if not path.exists():
        raise RunError(f"expected the weights {name} in {path}, got no such file; install the package again")
    try:
        return Content(*weights.load(path))
    except ValueError as error:
        raise RunError(f"{error}; install the package again") from error


def _json(text: str) -> Any:
    """The value of a JSON text, None for one that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _check_name(name: str) -> None:
    if name not in PRETRAINED:
        raise ValueError(f"expected weights named {', '.join(PRETRAINED)}, got {str(name)[:80]!r}")


def store(path: Path, run: Run, table: TemperatureTable, encoder: str | None = None, kind: Kind | None = None) -> None:
    """Write the file that `read` reads, replacing `path` in one move."""
    config = {**run.config.to_json(), "image_shape": run.learner.image_shape, "schema_version": SCHEMA_VERSION}
    tree = {**exported(run, 0), "temperatures": {name: np.asarray(value) for name, value in table._asdict().items()}}
    if kind is not None:
        tree["kind"] = {"means": kind.means.astype(np.float32), "least": np.float32(kind.least)}
    weights.save(path, tree, {"config": json.dumps(config), "encoder": encoder or ""})


def _table(found: Any, path: Path) -> TemperatureTable:
    """The table of a file. Raises RunError."""
    names = TemperatureTable._fields
    if not isinstance(found, dict) or found.keys() != set(names):
        raise RunError(f"expected temperatures in {path}, got none")
    ways, shots, logs = (np.asarray(found[name]) for name in names)
    sizes = all(one.dtype.kind == "i" and one.ndim == 1 and 0 < len(one) <= MOST_CELLS for one in (ways, shots))
    rising = sizes and all(one[0] > 0 and (np.diff(one) > 0).all() for one in (ways, shots))
    if not rising or logs.dtype.kind != "f" or logs.shape != (len(ways), len(shots)):
        raise RunError(f"expected rising ways and shots and a table of them in {path}")
    if not (np.abs(logs) <= np.log(LARGEST_TEMPERATURE)).all():  # false for NaN
        raise RunError(f"expected temperatures up to {LARGEST_TEMPERATURE:g} in {path}")
    return TemperatureTable(tuple(map(int, ways)), tuple(map(int, shots)), logs)


def _kind(found: Any, path: Path) -> Kind | None:
    """The kind of pictures of a file, None where it is for all. Raises RunError."""
    if found is None:
        return None
    if not isinstance(found, dict) or found.keys() != set(Kind._fields):
        raise RunError(f"expected class means and a least likeness in {path}")
    means, least = np.asarray(found["means"]), np.asarray(found["least"])
    if means.dtype.kind != "f" or means.ndim != 2 or not 0 < len(means) <= MOST_CLASSES or least.shape != ():
        raise RunError(f"expected class means [K, D] and a least likeness in {path}")
    lengths = np.square(means).sum(axis=1)
    if not (np.abs(lengths - 1) < UNIT_TOLERANCE).all() or not -1 <= least <= 1:  # false for NaN
        raise RunError(f"expected class means of length 1 and a cosine in {path}")
    return Kind(means, float(least))
