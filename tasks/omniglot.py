"""Omniglot (Lake et al. 2015): 1,623 handwritten characters of 50 alphabets, 20 images each, 28x28, ink bright.

`omniglot`: 25 background alphabets train, their quarter turns as further classes; the five background alphabets of
VALIDATION_ALPHABETS validate and the 20 evaluation alphabets (659 characters) test, both upright only.
`omniglot-emnist`: the 1,597 characters outside the Latin alphabet train, upright only; the EMNIST classes
at even positions validate, those at odd positions test.
"""

import os
import zipfile
from pathlib import Path, PurePosixPath

import numpy as np

from fewshot.tasks import emnist
from fewshot.tasks.arrays import Arrays
from fewshot.tasks.episodes import Dataset, Splits, make_dataset, make_splits
from fewshot.tasks.files import DAMAGE, Archive, DataError, check_digest, find_or_convert, resolve_root

# Fixed once: five families of writing (Indic, Semitic old and new, invented, Philippine) with 111 characters.
VALIDATION_ALPHABETS = ("Balinese", "Early_Aramaic", "Futurama", "Hebrew", "Tagalog")
FILE = "omniglot.npz"
SUBSETS = ("background", "evaluation")
_URL = "https://raw.githubusercontent.com/brendenlake/omniglot/master/python/"
ARCHIVES = (
    Archive(
        "images_background.zip",
        _URL + "images_background.zip",
        "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        9,
    ),
    Archive(
        "images_evaluation.zip",
        _URL + "images_evaluation.zip",
        "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        6,
    ),
)
IMAGES_SHA256 = "d76a1451bb8709f84cd8678e2c1e218339e26c1e23790e402fb39f8144e9a3db"
_ARRAYS = ("images", "character", "character_names", "character_alphabet", "alphabet_names")


def load(data_root: str | os.PathLike | None = None) -> Splits:
    """Omniglot alone: 853 x 4 training, 111 validation and 659 test classes.

    Raises:
        DataError: `omniglot.npz` is damaged, or missing and cannot be made.
    """
    arrays = _read(resolve_root(data_root))
    alphabet = arrays["alphabet_names"][arrays["character_alphabet"]]
    test = arrays["character_alphabet"] >= 30
    validation = np.isin(alphabet, VALIDATION_ALPHABETS)
    parts = {
        "train": _select(arrays, ~test & ~validation, rotations=4),
        "validation": _select(arrays, validation),
        "test": _select(arrays, test),
    }
    return make_splits("omniglot", parts)


def load_with_emnist(data_root: str | os.PathLike | None = None) -> Splits:
    """Train on Omniglot without Latin (1,597 classes), validate on 31 and test on 31 classes of EMNIST.

    Raises:
        DataError: `omniglot.npz` or `emnist.npz` is damaged, or missing and cannot be made.
    """
    root = resolve_root(data_root)
    arrays = _read(root)
    other = arrays["alphabet_names"][arrays["character_alphabet"]] != "Latin"
    validation, test = emnist.load_halves(root)
    return make_splits("omniglot-emnist", {"train": _select(arrays, other), "validation": validation, "test": test})


def _read(root: Path) -> Arrays:
    return find_or_convert(root, FILE, ARCHIVES, _convert_checked, _ARRAYS)


def _select(arrays: Arrays, wanted: np.ndarray, rotations: int = 1) -> tuple[Dataset, tuple[str, ...]]:
    """The characters where `wanted` [1623] is true, as a data set and its class names."""
    rows = wanted[arrays["character"]]
    new_label = np.cumsum(wanted) - 1
    dataset = make_dataset(arrays["images"][rows][..., None], new_label[arrays["character"][rows]], rotations)
    turns = ("", " turned 90", " turned 180", " turned 270")[:rotations]
    return dataset, tuple(f"{name}{turn}" for name in arrays["character_names"][wanted] for turn in turns)


def _convert_checked(background: Path, evaluation: Path) -> Arrays:
    arrays = convert(background, evaluation)
    check_digest("Omniglot", arrays["images"], IMAGES_SHA256)
    return arrays


def convert(background: Path, evaluation: Path) -> Arrays:
    """Turn the two public zip files (105x105 PNGs, ink dark) into the arrays of `omniglot.npz`.

    Images are ordered by subset, alphabet, character and drawer, and are area averages of the ink (0 or 255).

    Raises:
        DataError: a file is no zip file of such images.
    """
    images, keys = [], []
    for subset, path in enumerate((background, evaluation)):
        try:
            with zipfile.ZipFile(path) as archive:
                for alphabet, character, drawer, member in sorted(_members(archive)):
                    keys.append((subset, alphabet, f"{alphabet}/{character}", drawer))
                    images.append(_shrink(archive, member))
        except DAMAGE as error:
            raise DataError(f"expected a zip file of Omniglot images in {path}, got {error}; fetch it again") from error
    subsets, alphabets, characters, drawers = zip(*keys, strict=True)
    alphabet_names, alphabet_of = _number(alphabets)
    character_names, character_of = _number(characters)
    first_image = np.unique(character_of, return_index=True)[1]
    return {
        "images": np.stack(images),
        "alphabet": alphabet_of.astype(np.uint8),
        "character": character_of.astype(np.int16),
        "drawer": np.array(drawers, np.uint8),
        "subset": np.array(subsets, np.uint8),
        "alphabet_names": alphabet_names,
        "character_names": character_names,
        "character_alphabet": alphabet_of[first_image].astype(np.uint8),
        "subset_names": np.array(SUBSETS),
    }


def _members(archive: zipfile.ZipFile) -> list[tuple[str, str, int, str]]:
    """(alphabet, character, drawer, member) of every `images_*/ALPHABET/CHARACTER/NUMBER_DRAWER.png`."""
    paths = [PurePosixPath(name) for name in archive.namelist()]
    images = [path for path in paths if path.suffix == ".png" and len(path.parts) == 4]
    if not images:
        raise ValueError("no image folders")
    return [(path.parts[1], path.parts[2], int(path.stem.split("_")[1]), str(path)) for path in images]


def _shrink(archive: zipfile.ZipFile, member: str) -> np.ndarray:
    """One 105x105 drawing as a 28x28 area average, ink bright."""
    from PIL import Image

    with archive.open(member) as file, Image.open(file, formats=("PNG",)) as drawing:
        ink = Image.fromarray(np.where(np.asarray(drawing.convert("L")) < 128, np.uint8(255), np.uint8(0)))
    return np.asarray(ink.resize((28, 28), Image.Resampling.BOX))


def _number(names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Distinct names in order of first appearance, and each entry's position among them."""
    positions: dict[str, int] = {}
    numbers = np.array([positions.setdefault(name, len(positions)) for name in names])
    return np.array(list(positions)), numbers
