"""The folder of one run: config.json, metrics.jsonl, checkpoints/ and weights.safetensors.

    config.json           settings, with the schema version
    metrics.jsonl         one JSON object a line, each with its "step"
    checkpoints/<step>    everything needed to go on (inference.outer.checkpoint)
    weights.safetensors   what prediction needs, with the configuration in its metadata

Every file but metrics.jsonl is replaced in one move: a process killed at any time leaves the old or the new one.
Where several processes train one model, the first alone writes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewshot.tasks.replacing import replace_text
from fewshot.training import checkpoint, weights

SCHEMA_VERSION = 1


class RunError(ValueError):
    """A run folder that cannot be used as asked; the message is one line."""


class DivergedError(RunError):
    """Training came to a loss that is not finite; what was written before is kept."""


@dataclass(frozen=True)
class RunDirectory:
    """A run folder that exists and whose configuration has been read. Made by `create` and `load`.

    writes: whether this process may change it; where not, what would be written is left out.
    """

    path: Path
    config: dict[str, Any]
    writes: bool = True

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The metrics file."""
        return self.path / "metrics.jsonl"

    @property
    def weights(self) -> Path:
        """The exported weights."""
        return self.path / "weights.safetensors"

    def append_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl; before the checkpoint of the same step, so that none is lost in between.

        Numbers that are not finite become null, which is what JSON has for them.
        """
        if not self.writes:
            return
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records. A last line that was cut off is left out. Raises: RunError naming any other damaged line."""
        if not self.metrics.exists():
            return []
        *lines, _cut_off = self.metrics.read_text().split("\n")
        return [self._parse(number, line) for number, line in enumerate(lines, 1)]

    def cut_metrics(self, step: int) -> None:
        """Drop the records after `step`, so that a resumed run writes them again."""
        if not self.writes:
            return
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        replace_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))

    def save_checkpoint(self, step: int, state: Any) -> None:
        """Save the state of the outer loop after `step` steps; the two newest checkpoints are kept."""
        if self.writes:
            checkpoint.save(self.checkpoints, step, state)

    def restore_checkpoint(self, example: Any) -> tuple[int, Any] | None:
        """Newest checkpoint as (step, state), shaped like `example`; None if the run was stopped before its first one.

        Raises: CheckpointError on a damaged checkpoint or one of other settings.
        """
        steps = checkpoint.steps(self.checkpoints)
        return (steps[-1], checkpoint.restore(self.checkpoints, steps[-1], example)) if steps else None

    def save_weights(self, tree: Mapping[Any, Any]) -> None:
        """Export a nested dict of arrays, with the configuration."""
        if self.writes:
            weights.save(self.weights, tree, {"config": json.dumps(_with_version(self.config))})

    def load_weights(self) -> dict[Any, Any]:
        """The exported weights as a nested dict of NumPy arrays. Raises: RunError if missing or damaged."""
        if not self.weights.exists():
            raise RunError(f"no exported weights in {self.path}: expected {self.weights}; train it with --resume first")
        try:
            return weights.load(self.weights)[0]
        except ValueError as error:
            raise RunError(f"{error}; export it again with meta_train.py --resume --run-dir {self.path}") from error

    def _parse(self, number: int, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
            int(record["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{self.metrics} line {number}: expected a JSON object with a step, got {line[:40]!r}; delete that line"
            ) from error
        return dict(record)


def check_new(path: Path) -> None:
    """Raises: RunError if the path is a file, or a folder that already holds anything."""
    if path.exists() and not path.is_dir():
        raise RunError(f"expected a folder for the run, got the file {path}; choose another --run-dir")
    if path.exists() and any(path.iterdir()):
        raise RunError(f"run folder {path} already exists; continue it with --resume or choose another --run-dir")


def create(path: Path, config: Mapping[str, Any]) -> RunDirectory:
    """Make a run folder and write its config.json. Raises: RunError if the folder already holds anything."""
    check_new(path)
    path.mkdir(parents=True, exist_ok=True)
    replace_text(path / "config.json", json.dumps(_with_version(config), indent=2) + "\n")
    return load(path)


def load(path: Path, writes: bool = True) -> RunDirectory:
    """Read a run folder. Raises: RunError if it is missing, damaged or of a schema version not known here."""
    file = path / "config.json"
    if not file.is_file():
        raise RunError(f"no run in {path}: expected {file}; train one with meta_train.py --run-dir {path}")
    try:
        config = json.loads(file.read_text())
        version = config.pop("schema_version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"damaged configuration: {file} is no JSON object with a schema_version; train again") from error
    if version != SCHEMA_VERSION:
        raise RunError(f"{file} has schema version {version!r}, this program reads {SCHEMA_VERSION}; train again")
    return RunDirectory(path, config, writes)


def _with_version(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **config}


def _plain(value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain
