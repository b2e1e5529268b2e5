"""Which letters are one class, and which split each class belongs to.

Letters whose canonical renderings in any shared face differ by less than THRESHOLD of the pixel range on average are
one class, and so are chains of them; this is settled over all scripts before the split. A class goes to the first
split, in the order train, validation, test, that one of its letters' scripts belongs to: what is like a training letter
is trained on and is not an evaluation class. It is drawn as one letter of that split, the one with the most faces.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt8

from fewshot.tasks.glyph_rendering import FACES, canonical, draw_letter, letters_of, script_of

SCRIPTS = {
    "train": ("LATIN", "GREEK", "CYRILLIC", "CANADIAN", "ARABIC"),
    "validation": ("ARMENIAN", "LAO", "OLD", "COPTIC", "LISU"),  # OLD is Old Italic
    "test": ("GEORGIAN", "HEBREW"),
}
THRESHOLD = 0.02  # of 255, mean over the pixels
MINIMUM_FACES = 4


class GlyphClass(NamedTuple):
    """A class: its split, the code point of the letter it is drawn as, and that letter's faces."""

    split: str
    code: int
    faces: tuple[str, ...]


def find_classes(scripts: Mapping[str, tuple[str, ...]] = SCRIPTS) -> list[GlyphClass]:
    """All classes, in the order of the splits and of their code points."""
    faces_of = {
        code: faces
        for code, faces in letters_of(tuple(sum(scripts.values(), ()))).items()
        if len(faces) >= MINIMUM_FACES
    }
    order = {script: place for place, members in enumerate(scripts.values()) for script in members}
    classes = []
    for group in _merge(faces_of):
        first = min(order[script_of(code)] for code in group)
        candidates = [code for code in group if order[script_of(code)] == first]
        code = max(candidates, key=lambda code: (len(faces_of[code]), -code))
        classes.append((first, code))
    return [GlyphClass(list(scripts)[first], code, faces_of[code]) for first, code in sorted(classes)]


def _merge(faces_of: Mapping[int, tuple[str, ...]]) -> list[list[int]]:
    """Groups of code points that are connected by near-identical renderings."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    codes = np.array(sorted(faces_of))
    pairs = []
    for face in FACES:
        members = np.array([place for place, code in enumerate(codes) if face in faces_of[int(code)]], int)
        if len(members):
            pairs.append(members[near_pairs(canonical_images(face, codes[members]), THRESHOLD)])
    left, right = np.concatenate(pairs).T
    graph = coo_array((np.ones(len(left), bool), (left, right)), shape=(len(codes), len(codes)))
    _, label = connected_components(graph, directed=False)
    return [codes[label == group].tolist() for group in np.unique(label)]


def canonical_images(face: str, codes: Int[np.ndarray, " n"]) -> UInt8[np.ndarray, "n 28 28"]:
    """The canonical rendering of each letter in one face."""
    return np.stack([canonical(draw_letter(face, int(code))) for code in codes])


def near_pairs(images: UInt8[np.ndarray, "n 28 28"], threshold: float) -> Int[np.ndarray, "p 2"]:
    """Pairs i < j whose mean absolute difference is below `threshold` of the pixel range.

    |d| <= 255 makes sum |d| >= sum d^2 / 255. That bound is one matrix product for all pairs and nearly tight for ink
    on an empty ground; only the few pairs that pass it are compared in full.
    """
    flat = images.reshape(len(images), -1)
    limit = threshold * 255 * flat.shape[1]
    ink = flat.astype(np.float32) / 255
    square = (ink**2).sum(1)
    bound = limit / 255 + 0.01  # rounding in float32 is below 0.001 here
    pairs = []
    for start in range(0, len(flat), 256):  # blocks that stay in the cache
        rows = slice(start, start + 256)
        squared = square[rows, None] + square[start:] - 2 * ink[rows] @ ink[start:].T
        left, right = np.array(np.nonzero(np.triu(squared < bound, k=1))) + start
        difference = flat[left].astype(np.int16) - flat[right]
        near = np.abs(difference).sum(1, dtype=np.int64) < limit
        pairs.append(np.stack([left[near], right[near]], axis=1))
    return np.concatenate(pairs)
