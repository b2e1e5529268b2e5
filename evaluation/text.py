"""Numbers and tables as text."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:  # checkers at run time do not follow a type into itself
    Json: TypeAlias = object


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


def format_percent(share: float | None, half_width: float | None = None) -> str:
    """87.3%, or 87.3 +- 0.6% with the half-width of an interval; a dash where it is undefined."""
    if share is None:
        return "-"
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
