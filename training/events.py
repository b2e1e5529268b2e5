"""TensorBoard events beside metrics.jsonl, for those who watch a run there; an option with an extra of its own."""

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import RunError, told

FOLDER = "tensorboard"  # in the run folder

Rows = Callable[[int, Mapping[str, float | int]], None]  # takes the step and the values of a row


def no_events(step: int, values: Mapping[str, float | int]) -> None:
    """Nothing: what becomes of the rows of a run that was not asked for events."""


class EventFile:
    """Writes the numbers of a row as scalars to RUN/tensorboard; they are on disk when the call returns.

    Where a run is resumed, what an earlier process wrote after the first row of this one is no longer shown. Raises
    ConfigError where the extra is not installed, RunError where the system or the folder does not let it write.
    """

    def __init__(self, run: Path, resumed: bool) -> None:
        self.run, self.resumed = run, resumed
        self.files, self.messages = event_modules()
        self.opened: Any = None  # of a package without types

    def __enter__(self) -> "EventFile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self.opened:
            self.opened.close()

    def __call__(self, step: int, values: Mapping[str, float | int]) -> None:
        """Write a row; the first one makes the file."""
        with told(self.run / FOLDER):
            if self.opened is None:
                self.opened = self.files.EventsWriter(str(self._made_folder() / "events"), f".{step}")
                if self.resumed:
                    self._write(step, session_log={"status": self.messages.SessionLog.START})
            self._write(step, summary={"value": [{"tag": name, "simple_value": one} for name, one in values.items()]})

    def _made_folder(self) -> Path:
        """RUN/tensorboard; a link would lead out of the run folder."""
        folder = self.run / FOLDER
        if folder.is_symlink():
            raise RunError(f"expected a folder for events, got the link {folder}; remove it")
        folder.mkdir(exist_ok=True)
        return folder

    def _write(self, step: int, **content: object) -> None:
        self.opened.write_event(self.messages.Event(wall_time=time.time(), step=step, **content))
        self.opened.flush()


def event_modules() -> tuple[ModuleType, ModuleType]:
    """What writes event files, at once, and what is in them. Raises ConfigError where the extra is not installed.

    Not its `SummaryWriter`: that one hands over to a thread, and what has not been written is lost with the process.
    """
    try:
        files, messages = map(
            importlib.import_module, ("tensorboardX.event_file_writer", "tensorboardX.proto.event_pb2")
        )
    except ModuleNotFoundError as error:
        hint = 'try pip install "bayesian-few-shot[tensorboard]"'
        raise ConfigError(f"expected tensorboardX for --tensorboard, got no such package; {hint}") from error
    return files, messages
