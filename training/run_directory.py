"""The folder of one run: config.json, metrics.jsonl, checkpoints/ and weights.safetensors.

    config.json           settings, with the schema version
    metrics.jsonl         one JSON object a line, each with its "step"
    checkpoints/<step>    everything needed to go on (inference.outer.checkpoint)
    weights.safetensors   what prediction needs, with the configuration in its metadata

Every file but metrics.jsonl is replaced in one move: a process killed at any time leaves the old or the new one.
Where several processes train one model, the first alone writes.
"""

import errno
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Required, TypedDict, cast

from jaxtyping import PyTree

from fewshot.evaluation.text import Json
from fewshot.tasks.replacing import replace_text
from fewshot.training import checkpoint, weights
from fewshot.training.weights import WeightTree

SCHEMA_VERSION = 2  # 1 had Gaussian processes alone; its folders are read
READABLE = (1, SCHEMA_VERSION)
CONFIG = "config.json"
FILES = (CONFIG, "metrics.jsonl", "weights.safetensors")  # those of a run itself, beside its checkpoints
MOST_BYTES = 1 << 26  # of config.json and of metrics.jsonl, which are read whole
NEVER_NULL = ("step", "episodes", "seconds", "validation_accuracy")  # a resumed run counts on from these
LARGEST_STEP = 1 << 53  # from which on JSON numbers are not exact


class Record(TypedDict, total=False):
    """A line of metrics.jsonl: what every learner has; its own diagnostics and hyper-parameters lie beside that."""

    step: Required[int]
    episodes: int
    loss: float
    failures: int
    seconds: float
    episodes_per_second: float
    validation_accuracy: float
    validation_nll: float
    validation_failures: int
    temperature: float


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
    config: dict[str, Json]
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

    def append_metrics(self, step: int, values: Mapping[str, object]) -> None:
        """Add one line to metrics.jsonl; before the checkpoint of the same step, so that none is lost in between.

        Numbers that are not finite become null, which is what JSON has for them.
        """
        if not self.writes:
            return
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        with told(self.metrics):
            append_line(self.metrics, json.dumps(record))

    def read_metrics(self) -> list[Record]:
        """All records. A last line that was cut off is left out. Raises: RunError naming any other damaged line."""
        if not self.metrics.exists():
            return []
        *lines, _cut_off = _read(self.metrics).split("\n")
        return [self._parse(number, line) for number, line in enumerate(lines, 1)]

    def cut_metrics(self, step: int) -> None:
        """Drop the records after `step`, so that a resumed run writes them again."""
        if not self.writes:
            return
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        with told(self.metrics):
            replace_text(self.metrics, "".join(json.dumps(record) + "\n" for record in kept), follow=False)

    def save_checkpoint(self, step: int, state: PyTree) -> None:
        """Save the state of the outer loop after `step` steps; the two newest checkpoints are kept."""
        if self.writes:
            with told(self.checkpoints / str(step)):
                checkpoint.save(self.checkpoints, step, state)

    def restore_checkpoint(self, example: PyTree, any_number: Collection[str] = ()) -> tuple[int, PyTree] | None:
        """Newest checkpoint as (step, state), shaped like `example`; None if the run was stopped before its first one.

        any_number: the parts of the state that may hold numbers that are not finite.

        Raises: CheckpointError on a damaged checkpoint or one of other settings.
        """
        steps = checkpoint.steps(self.checkpoints)
        if not steps:
            return None
        return steps[-1], checkpoint.restore(self.checkpoints, steps[-1], example, any_number=any_number)

    def save_weights(self, tree: WeightTree) -> None:
        """Export a nested dict of arrays, with the configuration."""
        if self.writes:
            with told(self.weights):
                weights.save(self.weights, tree, {"config": json.dumps(_with_version(self.config))})

    def load_weights(self) -> WeightTree:
        """The exported weights as a nested dict of NumPy arrays. Raises: RunError if missing or damaged."""
        if not self.weights.exists():  # written before the first row of metrics is
            advice = train_anew(str(self.path)) if self.read_metrics() else "train it with --resume first"
            raise RunError(f"no exported weights in {self.path}: expected {self.weights}; {advice}")
        try:
            return weights.load(self.weights)[0]
        except ValueError as error:
            raise RunError(f"{error}; {train_anew(str(self.path))}") from error

    def _parse(self, number: int, line: str) -> Record:
        record = _parsed(line)
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(record, dict) or type(step) is not int or not 0 <= step < LARGEST_STEP:
            raise RunError(
                f"{self.metrics} line {number}: expected a JSON object with a step, got {line[:40]!r}; delete that line"
            )
        for name, value in record.items():
            if not _is_measured(name, value):
                shown = json.dumps(value)[:40]
                raise RunError(
                    f"{self.metrics} line {number}: expected a number as {name[:40]!r}, got {shown}; delete that line"
                )
        return cast(Record, record)


def train_anew(run: str = "RUN") -> str:
    """What to try where the best weights of a run are lost: they are kept nowhere else."""
    return f"train it anew with meta_train.py --config {run} --run-dir NEW"


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all. Raises OSError, also where the path is a link: none is followed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        content = (line + "\n").encode()
        try:
            while content:
                content = content[file.write(content) or 0 :]
        except OSError:
            file.truncate(size)
            raise


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a run folder, so that no other process trains in it; the end of this one, however it comes, lets go of it.

    Raises: RunError where another process holds it. Systems without such locks have none.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    with told(path / ".lock"):
        handle = os.open(path / ".lock", flags, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunError(f"expected to train in {path} alone, got another process that does; wait for it") from error
        yield
    finally:
        os.close(handle)


def check_new(path: Path, by_flags: bool = True) -> None:
    """Raises: RunError, advising flags or none, if the path is a file, or a folder that already holds anything."""
    another = "choose another --run-dir" if by_flags else "choose another"
    if path.exists() and not path.is_dir():
        raise RunError(f"expected a folder for the run, got the file {path}; {another}")
    if path.exists() and any(path.iterdir()):
        resume = "continue it with --resume or " if by_flags else ""
        raise RunError(f"run folder {path} already exists; {resume}{another}")


def create(path: Path, config: Mapping[str, Json]) -> RunDirectory:
    """Make a run folder and write its config.json. Raises: RunError if the folder already holds anything."""
    check_new(path)
    with told(path / CONFIG):
        path.mkdir(parents=True, exist_ok=True)
        replace_text(path / CONFIG, json.dumps(_with_version(config), indent=2) + "\n", follow=False)
    return load(path)


def load(path: Path, writes: bool = True) -> RunDirectory:
    """Read a run folder. Raises: RunError if it is missing, damaged or of a schema version not known here."""
    file = path / CONFIG
    if not file.is_file():
        raise RunError(f"no run in {path}: expected {file}; train one with meta_train.py --run-dir {path}")
    config = _parsed(_read(file))
    if not isinstance(config, dict) or "schema_version" not in config:
        raise RunError(f"damaged configuration: {file} is no JSON object with a schema_version; train again")
    version = config.pop("schema_version")
    if type(version) is not int or version not in READABLE:
        raise RunError(
            f"{file} has schema version {repr(version)[:40]}, this program reads {' and '.join(map(str, READABLE))}; "
            "train again"
        )
    return RunDirectory(path, config, writes)


def _with_version(config: Mapping[str, Json]) -> dict[str, Json]:
    return {"schema_version": SCHEMA_VERSION, **config}


def _plain(value: object) -> object:
    plain = value.item() if hasattr(value, "item") else value
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _read(path: Path) -> str:
    """A text file of a run. Raises RunError for one that is none, or too large to be one."""
    if not path.is_file():
        raise RunError(f"expected the file {path}, got something else of that name; remove it")
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise RunError(f"expected at most {MOST_BYTES:,} bytes in {path}, got {size:,}; train again")
    return path.read_bytes().decode("utf-8", "replace")


def _parsed(text: str) -> object:
    """The value of a JSON text, None for one that is none: NaN and nesting without end are not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _is_measured(name: str, value: object) -> bool:
    """Whether a row may hold it: numbers, counts by name, words; null for a number that was not finite."""
    if isinstance(value, dict):
        return all(_is_number(count) for count in value.values())
    if name in NEVER_NULL and not _is_number(value):
        return False
    return value is None or isinstance(value, str) or _is_number(value)


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system refuses to write as a RunError."""
    try:
        yield
    except OSError as error:
        reason, full = error.strerror or error, error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room" if full else "choose another folder"
        raise RunError(f"expected to write {path}, got: {reason}; what was there before is kept, {remedy}") from error
