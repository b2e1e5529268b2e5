"""Numbers and tables as text."""

from collections.abc import Sequence


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
