"""One HTML file that holds everything: text, tables, and pictures inside it. It loads nothing, so it can be mailed.

A report is a list of sections; what is in them is the caller's business.
"""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fewshot.evaluation.figures import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #eee; }
td + td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { border-bottom: 1px solid #888; }
.wide { overflow-x: auto; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; } figcaption { color: #555; font-size: .85rem; max-width: 30rem; }
img { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
"""


class Table(NamedTuple):
    """A header and rows of texts; the first column names the row."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Section(NamedTuple):
    """A heading; paragraphs, tables, matplotlib Figures by their captions, and text shown as it is, in this order."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, Figure] = {}
    verbatim: str = ""


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole file as a text."""
    body = "\n".join([f"<h1>{html.escape(title)}</h1>", *map(_section, sections)])
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def png(figure: Figure, dpi: int = 130) -> bytes:
    """A Figure as the bytes of a PNG file; the same figure gives the same bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def _section(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    parts += [f"<p>{html.escape(text)}</p>" for text in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    if section.figures:
        pictures = "\n".join(_picture(caption, figure) for caption, figure in section.figures.items())
        parts.append(f'<div class="figures">\n{pictures}\n</div>')
    if section.verbatim:
        parts.append(f"<pre>{html.escape(section.verbatim)}</pre>")
    return "\n".join(parts)


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows]
    lines = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody></table></div>'


def _picture(caption: str, figure: Figure) -> str:
    text, data = html.escape(caption, quote=True), base64.b64encode(png(figure)).decode()
    width = round(96 * figure.get_figwidth())  # pixels on the page; the picture has more, for sharp screens
    image = f'<img src="data:image/png;base64,{data}" width="{width}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"
