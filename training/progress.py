"""Progress of a loop, as a person watches it."""

import io
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from fewshot.evaluation.text import format_seconds

CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Progress of a loop: one line that updates itself on a terminal, plain lines at intervals elsewhere.

    Shows what was done of the total, the values given, the rate since the first update and the time left: what comes
    before it, compilation above all, does not come again. `done` is where a resumed loop starts, `first` once known.
    """

    def __init__(
        self,
        total: int,
        unit: str = "episodes",
        *,
        done: int = 0,
        stream: TextIO | io.TextIOBase | None = None,
        interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval`: least seconds between two displays; by default 0.1 on a terminal and 10 elsewhere."""
        self.total, self.unit, self.stream, self.clock = total, unit, stream or sys.stdout, clock
        self.terminal = self.stream.isatty()
        self.interval = interval if interval is not None else (0.1 if self.terminal else 10.0)
        self.first = done
        self.started: float | None = None
        self.shown_at, self.shown_done = -float("inf"), -1

    def update(self, done: int, values: Mapping[str, str]) -> None:
        """Show that `done` of the total are finished, unless the last display is too recent (the end is shown)."""
        now, done = self.clock(), max(done, self.first)
        if self.started is None:
            self.first, self.started = done, now
        if done == self.shown_done or (now - self.shown_at < self.interval and done < self.total):
            return
        self.shown_at, self.shown_done = now, done
        line = self._line(done, values, now - self.started)
        if self.terminal:
            self.stream.write(CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])
        else:
            self.stream.write(line + "\n")
        self.stream.flush()

    def message(self, text: str) -> None:
        """Print a line of its own; on a terminal the progress line comes back below it at the next update."""
        self.stream.write((CLEAR_LINE if self.terminal else "") + text + "\n")
        self.stream.flush()
        self.shown_at, self.shown_done = -float("inf"), -1

    def close(self) -> None:
        """Leave the progress line as it stands."""
        if self.terminal and self.shown_done >= 0:
            self.stream.write("\n")
            self.stream.flush()

    def _line(self, done: int, values: Mapping[str, str], seconds: float) -> str:
        parts = [f"{done:,}/{self.total:,} {self.unit}", *(f"{name} {value}" for name, value in values.items())]
        if done > self.first and seconds > 0:
            rate = (done - self.first) / seconds
            digits = 0 if rate >= 99.5 else 1
            parts += [f"{rate:,.{digits}f} {self.unit}/s", f"{format_seconds((self.total - done) / rate)} left"]
        return "  ".join(parts)
