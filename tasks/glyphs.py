"""The built-in data set: characters of many scripts, drawn from the fonts that ship with matplotlib. No download.

20 fixed images a class, 28x28, ink bright, each in one of the letter's faces with random rotation, scale, shear, shift
and stroke width. Classes and splits are those of `tasks.glyph_classes`. The first call draws everything and keeps it in
the user's cache folder; each class has its own random generator, so the images depend on nothing else.
"""

import os
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from fewshot.tasks.arrays import Arrays
from fewshot.tasks.episodes import Dataset, Splits, make_dataset, make_splits
from fewshot.tasks.files import DataError, cache_folder, read_npz, write_npz
from fewshot.tasks.glyph_classes import SCRIPTS, GlyphClass, find_classes
from fewshot.tasks.glyph_rendering import CANVAS, draw_letter, random_variation, vary

IMAGES_PER_CLASS = 20
VERSION = 1  # of classes and images: raise it when a change of the code changes either
_ARRAYS = ("version", "images", "codes", "split")


def load(data_root: str | os.PathLike | None = None) -> Splits:
    """The glyphs in three splits; `data_root` is not needed and only taken because all loaders are called alike."""
    arrays = _read_cache()
    if arrays is None:
        print("drawing the glyphs data set, once (10 to 20 seconds) ...", file=sys.stderr)
        start = time.perf_counter()
        arrays = draw(find_classes())
        print(f"drew {len(arrays['codes'])} classes in {time.perf_counter() - start:.0f} s", file=sys.stderr)
        _write_cache(arrays)
    parts = {split: _select(arrays, arrays["split"] == number) for number, split in enumerate(SCRIPTS)}
    return make_splits("glyphs", parts)


def _select(arrays: Arrays, wanted: np.ndarray) -> tuple[Dataset, tuple[str, ...]]:
    images = arrays["images"][wanted]
    labels = np.repeat(np.arange(len(images)), IMAGES_PER_CLASS)
    names = tuple(unicodedata.name(chr(code)) for code in arrays["codes"][wanted])
    return make_dataset(images.reshape(-1, CANVAS, CANVAS, 1), labels), names


def draw(classes: list[GlyphClass]) -> Arrays:
    """All arrays of the cache file: images [K, 20, 28, 28], codes [K], split [K] (position in SCRIPTS), version."""
    return {
        "version": np.array(VERSION),
        "images": np.stack([draw_class(member) for member in classes]),
        "codes": np.array([member.code for member in classes], np.int32),
        "split": np.array([list(SCRIPTS).index(member.split) for member in classes], np.uint8),
    }


def draw_class(member: GlyphClass) -> UInt8[np.ndarray, "20 28 28"]:
    """The fixed images of one class; its faces take turns in a random order."""
    rng = np.random.default_rng((VERSION, member.code))
    faces = np.resize(rng.permutation(member.faces), IMAGES_PER_CLASS)
    drawn = {face: draw_letter(face, member.code) for face in member.faces}
    return vary([drawn[face] for face in faces], random_variation(rng, IMAGES_PER_CLASS))


def _cache_path() -> Path:
    return cache_folder() / f"glyphs-{VERSION}.npz"


def _read_cache() -> Arrays | None:
    """The cached arrays, or None where there are none, or none that can be used: they are drawn again then."""
    path = _cache_path()
    if not path.exists():
        return None
    try:
        arrays = read_npz(path, _ARRAYS)
    except DataError:
        return None
    classes = len(arrays["codes"])
    expected = (classes, IMAGES_PER_CLASS, CANVAS, CANVAS)
    usable = arrays["version"] == VERSION and arrays["images"].shape == expected and len(arrays["split"]) == classes
    return arrays if usable else None


def _write_cache(arrays: Arrays) -> None:
    try:
        write_npz(_cache_path(), arrays)
    except DataError as error:
        print(f"the glyphs will be drawn again next time: {error}", file=sys.stderr)
