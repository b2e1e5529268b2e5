"""Weights by name: `load_pretrained(NAME)` gives a learner, its encoder and its temperatures, without any data.

A file `weights/NAME.safetensors` of this package holds what a run folder's does, and beside it the temperatures of
common shapes; `weights/NAME.md` is its model card. It is read as carefully as a run folder of somebody else.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from fewshot.evaluation.text import plain
from fewshot.learners import Learner
from fewshot.models.networks import ENCODERS
from fewshot.training import weights
from fewshot.training.configuration import RunConfig, data_of
from fewshot.training.overrides import ConfigError
from fewshot.training.run import LARGEST_TEMPERATURE, Run, build_run, exported, with_weights
from fewshot.training.run_directory import READABLE, SCHEMA_VERSION, RunError
from fewshot.training.shape_temperature import Temperatures

FOLDER = Path(__file__).resolve().parent / "weights"
PRETRAINED = ("photographs", "omniglot", "glyphs", "omniglot-emnist")
DEFAULT = "photographs"
HEAD_OF = {"efficientnet-lite0": "photographs"}  # the weights that belong to an encoder
MOST_CELLS = 100  # ways or shots of a table


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


@dataclass(frozen=True)
class Pretrained:
    """What is shipped under a name.

    encoder: the name of what turns pictures into the learner's features, None where it reads images itself.
    """

    name: str
    run: Run
    encoder: str | None
    table: TemperatureTable

    @property
    def learner(self) -> Learner:
        """What answers a task."""
        return self.run.learner

    def temperature(self, counts: Sequence[int]) -> float:
        """The temperature of tasks with so many labelled examples of each class; nothing is fitted."""
        return self.table.at(counts)

    def temperatures(self, counts: Sequence[int]) -> Temperatures:
        """That temperature, and the one with an example a class fewer; none where no class has two."""
        fewer = [max(count - 1, 1) for count in counts]
        return Temperatures(self.temperature(counts), self.temperature(fewer) if max(counts) > 1 else None)


def load_pretrained(name: str) -> Pretrained:
    """The weights of that name. Raises ValueError for an unknown name, RunError for a damaged file."""
    if name not in PRETRAINED:
        raise ValueError(f"expected weights named {', '.join(PRETRAINED)}, got {str(name)[:80]!r}")
    return read(FOLDER / f"{name}.safetensors", name)


def read(path: Path, name: str) -> Pretrained:
    """The weights in a file that `store` wrote. Raises RunError, in one line, for a file that is missing or damaged."""
    if not path.exists():
        raise RunError(f"expected the weights {name} in {path}, got no such file; install the package again")
    try:
        tree, metadata = weights.load(path)
        config = json.loads(metadata.get("config", "null"))
    except ValueError as error:
        raise RunError(f"{error}; install the package again") from error
    if (
        not isinstance(config, dict)
        or config.pop("schema_version", None) not in READABLE
        or "image_shape" not in config
    ):
        raise RunError(f"expected {path} to hold a configuration of this version; install the package again")
    table, encoder = _table(tree.pop("temperatures", None), path), metadata.get("encoder", "")
    if encoder not in ("", *ENCODERS):
        raise RunError(f"expected {path} to name one of {', '.join(ENCODERS)}, got {plain(encoder)[:80]}")
    try:
        checked, data = RunConfig.from_json(config), data_of(config)
        assert data.image_shape is not None
        run = build_run(checked, data.image_shape, data.training_classes)
    except ConfigError as error:
        raise RunError(f"{path}: {plain(error)[:300]}; install the package again") from error
    return Pretrained(name, with_weights(run, tree, path), encoder or None, table)


def store(path: Path, run: Run, table: TemperatureTable, encoder: str | None = None) -> None:
    """Write the file that `read` reads, replacing `path` in one move."""
    config = {**run.config.to_json(), "image_shape": run.learner.image_shape, "schema_version": SCHEMA_VERSION}
    tree = {**exported(run, 0), "temperatures": {name: np.asarray(value) for name, value in table._asdict().items()}}
    weights.save(path, tree, {"config": json.dumps(config), "encoder": encoder or ""})


def _table(found: Any, path: Path) -> TemperatureTable:
    """The table of a file. Raises RunError."""
    names = TemperatureTable._fields
    if not isinstance(found, dict) or found.keys() != set(names):
        raise RunError(f"expected temperatures in {path}, got none; install the package again")
    ways, shots, logs = (np.asarray(found[name]) for name in names)
    sizes = all(one.dtype.kind == "i" and one.ndim == 1 and 0 < len(one) <= MOST_CELLS for one in (ways, shots))
    rising = sizes and all(one[0] > 0 and (np.diff(one) > 0).all() for one in (ways, shots))
    if not rising or logs.dtype.kind != "f" or logs.shape != (len(ways), len(shots)):
        raise RunError(f"expected rising ways and shots and a table of them in {path}; install the package again")
    if not (np.abs(logs) <= np.log(LARGEST_TEMPERATURE)).all():  # false for NaN
        raise RunError(f"expected temperatures up to {LARGEST_TEMPERATURE:g} in {path}; install the package again")
    return TemperatureTable(tuple(map(int, ways)), tuple(map(int, shots)), logs)
