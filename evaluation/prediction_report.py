"""Predictions of a task's queries for people: as text, CSV, JSON and a page of pictures."""

import base64
import csv
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fewshot.evaluation.prediction_scores import Count, Scores, scores, scores_lines
from fewshot.evaluation.report import STYLE
from fewshot.evaluation.text import csv_cell, format_percent, format_table, plain
from fewshot.tasks.images import Images, picture_of, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN = 20  # rows of the table; --csv has them all
SIDE, QUALITY = 160, 80  # of thumbnails
STRANGE = 0.9  # how unknown a picture looks that is marked; with 9 labelled pictures it can be reached
PAGE_STYLE = """
.cards { display: flex; flex-wrap: wrap; gap: 1rem; }
.card { width: 11rem; border: 1px solid #ddd; border-radius: 6px; padding: .5rem; font-size: .85rem; }
.card img { display: block; width: 100%; height: 8rem; object-fit: contain; background: #f4f4f4; }
.card b { overflow-wrap: anywhere; } .card small { color: #666; overflow-wrap: anywhere; display: block; }
.left { border-color: #c60; background: #fff8ef; } .strange { border-color: #b00; background: #fff0f0; }
.wrong b { text-decoration: line-through; }
"""


class Predicted(NamedTuple):
    """Of every query its name, probabilities [Q, C], whether its answer is kept [Q], and how unknown it looks [Q].

    unknown: the share of the task's own labelled pictures, each left out, that look less unknown than the query; None
    where no class has two. left_out: how many of these were answered right, and how many there are. counts: labelled
    images of each class. before: the temperature that was expected before these were looked at, None where it was not
    learned from them. means: so many of each class were shown to what answers, None where each image was. to_label:
    which queries to label next, the first one first. labels: what every query shows, where that is given.
    """

    names: list[str]
    classes: list[str]
    counts: list[int]
    probabilities: np.ndarray
    unknown: np.ndarray | None
    kept: np.ndarray
    temperature: float
    before: float | None
    read_as: str
    means: int | None = None
    to_label: Sequence[int] = ()
    left_out: tuple[int, int] | None = None
    labels: Sequence[str] | None = None

    @property
    def shown(self) -> str:
        """How the labelled images were shown, "" where each was by itself."""
        return "" if self.means is None else f", averaged to {self.means} a class"

    @property
    def strange(self) -> np.ndarray:
        """Which queries look stranger than nearly all labelled pictures [Q]."""
        return np.zeros(len(self.names), bool) if self.unknown is None else self.unknown >= STRANGE

    @property
    def predictions(self) -> list[str]:
        """The most probable class of every query."""
        return [self.classes[k] for k in self.probabilities.argmax(axis=1)]

    @property
    def wrong(self) -> np.ndarray:
        """Which queries have another label than their most probable class [Q]; none without labels."""
        given = self.predictions if self.labels is None else self.labels
        return np.array([one != other for one, other in zip(self.predictions, given, strict=True)], bool)

    @property
    def scores(self) -> Scores | None:
        """How right the answers are, where labels are given."""
        if self.labels is None:
            return None
        return scores(self.classes, self.labels, self.probabilities, self.kept, self.strange)

    def unknown_cell(self, number: int, digits: int = 3) -> str:
        """How unknown one query looks, empty where that is not known."""
        return "" if self.unknown is None else f"{self.unknown[number]:.{digits}f}"


def table(found: Predicted, csv_file: str | None = None) -> str:
    """The first rows, the temperature, and how many answers are kept; csv_file: where all rows are.

    With labels the rows of wrong answers come first, and the scores are said.
    """
    low, high = min(found.counts), max(found.counts)
    images = f"{low} labelled image{'s' if low > 1 else ''}" if low == high else f"{low} to {high} labelled images"
    queries = "1 query" if len(found.names) == 1 else f"{len(found.names)} queries"
    queries += ", those that are answered wrong first" if found.wrong.any() else ""
    heading = f"{len(found.classes)} classes with {images} each{found.shown}, {queries}; read as {found.read_as}"
    before = "" if found.before is None else f", learned from the labelled images; before them {found.before:.3g}"
    lines = [heading, f"temperature {found.temperature:.3g}{before}"]
    best = np.argsort(-found.probabilities, axis=1)[:, :2]
    rows = [
        [
            plain(found.names[q]),
            *([plain(found.labels[q])] if found.labels is not None else []),
            *(f"{plain(found.classes[k])} {format_percent(float(found.probabilities[q, k]))}" for k in best[q]),
            "kept" if found.kept[q] else "left open",
            found.unknown_cell(q, 2),
        ]
        for q in np.argsort(~found.wrong, kind="stable")[:SHOWN].tolist()
    ]
    label = [] if found.labels is None else ["label"]
    lines.append(format_table(["image", *label, "most probable", "then", "answer", "unknown"], rows))
    if len(found.names) > SHOWN:
        where = f"{plain(csv_file)} has" if csv_file else "--csv FILE writes"
        lines.append(f"... and {len(found.names) - SHOWN} more; {where} all of them")
    lines.append(summary(found))
    if found.scores is not None:
        lines += scores_lines(found.scores)
    if found.to_label:
        lines.append(f"label next: {asked_for(found)}")
    if found.left_out is not None:
        lines += [trial(found), f"unknown: {_meaning(found)}"]
    return "\n".join(lines)


def summary(found: Predicted) -> str:
    """How many answers are kept, and what to expect of them."""
    confidence = found.probabilities.max(axis=1)
    if not found.kept.any():
        return f"no answer is certain enough to be kept of {len(found.names)}"
    expected = format_percent(float(confidence[found.kept].mean()))
    kept, strange = int(found.kept.sum()), int((found.kept & found.strange).sum())
    text = f"{kept} of {len(found.names)} answers kept, of which {expected} are expected to be right"
    if not strange:
        return text
    look = f"{strange} of them {'looks' if strange == 1 else 'look'}"
    return f"{text} if all show your classes; {look} strange (unknown {STRANGE} or more)"


def trial(found: Predicted) -> str:
    """How the labelled pictures were answered by each other, where they were left out."""
    right, number = found.left_out or (0, 0)
    return f"{right} of {number} labelled pictures answered right by the others (left out, one of each class at a time)"


def ceiling(number: int) -> float:
    """The largest `unknown` that there is with so many labelled pictures that were left out."""
    return number / (number + 1)


def _meaning(found: Predicted) -> str:
    """What `unknown` is, from where on a query is strange, and the most that few labelled pictures allow."""
    most = ceiling(found.left_out[1] if found.left_out else 0)
    few = "" if most >= STRANGE else f"at most {most:.2f}; "
    return f"share of these that look less strange than the query ({few}{STRANGE} is strange)"


def asked_for(found: Predicted) -> str:
    """The names of the queries to label next."""
    return ", ".join(plain(found.names[q]) for q in found.to_label)


def csv_text(found: Predicted) -> str:
    """A row for each query; `answer` is empty where it is left open, and `label` is there where labels are given."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [csv_cell(one) for one in found.classes]
    labels = None if found.labels is None else list(map(csv_cell, found.labels))
    writer.writerow(["image", *([] if labels is None else ["label"]), "prediction", "answer", "unknown", *names])
    for q, (name, row) in enumerate(zip(found.names, found.probabilities, strict=True)):
        prediction = names[int(np.argmax(row))]
        answer = prediction if found.kept[q] else ""
        label = [] if labels is None else [labels[q]]
        cells = [csv_cell(name), *label, prediction, answer, found.unknown_cell(q)]
        writer.writerow([*cells, *(f"{value:.6f}" for value in row)])
    return text.getvalue()


def json_text(found: Predicted) -> str:
    """The same as JSON; `answer` and `unknown` are null where there is none. With labels there are `scores`."""
    queries = [
        {
            "image": name,
            **({} if found.labels is None else {"label": found.labels[q]}),
            "prediction": prediction,
            "answer": prediction if found.kept[q] else None,
            "unknown": None if found.unknown is None else float(found.unknown[q]),
            "probabilities": dict(zip(found.classes, map(float, found.probabilities[q]), strict=True)),
        }
        for q, (name, prediction) in enumerate(zip(found.names, found.predictions, strict=True))
    ]
    about = {"classes": found.classes, "labelled": found.counts, "temperature": found.temperature}
    left_out = None if found.left_out is None else dict(zip(("right", "of"), found.left_out, strict=True))
    asked = {"label_next": [found.names[q] for q in found.to_label]} if found.to_label else {}
    scored = {} if found.scores is None else {"scores": _scores_json(found.scores)}
    return json.dumps({**about, "left_out": left_out, **scored, **asked, "queries": queries}, indent=2) + "\n"


def _scores_json(found: Scores) -> dict[str, object]:
    """Every count as its number and of how many that is."""
    each = {name: count._asdict() for name, count in found.classes.items()}
    others = {name: one._asdict() if isinstance(one, Count) else one for name, one in found._asdict().items()}
    return others | {"classes": each}


def html_page(found: Predicted, query: Images) -> str:
    """One file with a small picture of every query, the least certain first; it loads nothing."""
    order = np.argsort(found.probabilities.max(axis=1), kind="stable")
    cards = "\n".join(_card(found, query, int(q)) for q in order)
    classes = ", ".join(f"{name} ({count})" for name, count in zip(found.classes, found.counts, strict=True))
    head = f"<h1>{len(found.names)} pictures, the least certain first</h1>"
    notes = [
        f"Classes and their labelled pictures: {classes}{found.shown}.",
        f"{summary(found)}. Orange: left open.",
        *([*(f"{line}." for line in scores_lines(found.scores)), "Struck out: wrong."] if found.scores else []),
        *([f"{trial(found)}. Unknown: {_meaning(found)}. Red: strange."] if found.left_out else []),
        *([f"Label next: {asked_for(found)}."] if found.to_label else []),
    ]
    text = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Predictions</title>\n'
        f'<style>{STYLE}{PAGE_STYLE}</style>\n</head>\n<body>\n{head}{text}\n<div class="cards">\n{cards}\n</div>\n'
        "</body>\n</html>\n"
    )


def _card(found: Predicted, query: Images, q: int) -> str:
    best = np.argsort(-found.probabilities[q])[:2]
    first, *then = (f"{found.classes[k]} {format_percent(float(found.probabilities[q, k]))}" for k in best)
    kind = "card strange" if found.strange[q] else "card" if found.kept[q] else "card left"
    kind += " wrong" if found.wrong[q] else ""
    label = [f"<small>label {_text(found.labels[q])}</small>"] if found.labels is not None else []
    unknown = f"unknown {found.unknown_cell(q, 2)}" if found.unknown is not None else ""
    lines = [
        f"<b>{_text(first)}</b>",
        *label,
        f"<small>{_text(', '.join([f'then {one}' for one in then] + [unknown]))}</small>",
    ]
    return f'<div class="{kind}">{_thumbnail(query, q)}{"".join(lines)}<small>{_text(found.names[q])}</small></div>'


def _text(text: str) -> str:
    return html.escape(plain(text))


def _thumbnail(query: Images, q: int) -> str:
    """The picture of a query inside the page; nothing where there are features alone."""
    path, pixels = Path(query.names[q]), query.pixels[q]
    if path.is_file():
        picture: Image = read_picture(path)
    elif pixels.dtype == np.uint8:
        picture = picture_of(pixels)
    else:
        return ""
    picture = picture.convert("RGB")
    picture.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=QUALITY)
    return f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}">'
