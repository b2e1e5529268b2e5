"""What runners print: progress, tables, estimates and one-line errors."""

import contextlib
import io
import shutil
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

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


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: first column flush left, the others flush right, a rule under the header."""
    table = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def format_markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table, which ends with a new line."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def format_seconds(seconds: float) -> str:
    """0.4 s, 12 s, 3:05 or 2:07:30."""
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_bytes(count: float) -> str:
    """512 B, 1.5 MiB, 12 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def format_percent(share: float, half_width: float | None = None) -> str:
    """87.3%, or 87.3 +- 0.6% with the half-width of an interval."""
    interval = "" if half_width is None else f" +- {100 * half_width:.1f}"
    return f"{100 * share:.1f}{interval}%"


# Categories of what a terminal acts on or cannot show: controls, directions and joiners, halves of pairs, unassigned.
UNSHOWN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet computes where a cell begins with it


def plain(text: object) -> str:
    """Text as a terminal may show it, whoever chose it: what would move the cursor or turn the line is written out.

    A byte of a file name that is no text is shown as \\xff.
    """
    return "".join(_written_out(one) if unicodedata.category(one) in UNSHOWN else one for one in str(text))


def _written_out(letter: str) -> str:
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is no text
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def csv_cell(text: object) -> str:
    """Text as a cell that a spreadsheet shows and does not compute: formulas get an apostrophe; numbers stay."""
    cell = str(text)
    return f"'{cell}" if cell.startswith(FORMULA) and not _is_number(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


@contextlib.contextmanager
def one_line_errors(*expected: type[Exception]) -> Iterator[None]:
    """Turn errors of the expected types into one line on stderr and exit code 2, without a traceback."""
    try:
        yield
    except expected as error:
        print("error:", plain(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(2) from None
