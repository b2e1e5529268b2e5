"""What the data sets of photographs share: decoding once to one size, a cache of the result, and splits by class.

A name may end in the side of the square images in pixels, as `flowers102-32` does: small images train on a CPU.
Letters: I images, K classes, side pixels of a side.
"""

import hashlib
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Integer, UInt8

from fewshot.tasks.episodes import Dataset, Splits, make_dataset, make_splits
from fewshot.tasks.files import DataError, cache_folder, read_npz, write_npz
from fewshot.tasks.images import SUFFIXES, image_files, opened

if TYPE_CHECKING:
    from PIL.Image import Image

VERSION = 1  # of decoding and resizing: raise it when a change of the code changes an image
SMALLEST, LARGEST = 16, 224
SPLITS = ("train", "validation", "test")
Crop = Callable[["Image", int], np.ndarray]  # a picture as a square of that many pixels a side, RGB


def split_name(name: str) -> tuple[str, int | None]:
    """("flowers102", 32) from "flowers102-32"; no size where there is none.

    Raises:
        DataError: a size that no network here is for.
    """
    found = re.fullmatch(r"(.*)-(\d+)", name)
    if not found:
        return name, None
    size = int(found[2])
    if not SMALLEST <= size <= LARGEST:
        raise DataError(f"expected images of {SMALLEST} to {LARGEST} pixels a side, got {name!r}; try {found[1]}-84")
    return found[1], size


def centre_square(picture: "Image", side: int) -> UInt8[np.ndarray, "side side 3"]:
    """The largest square in the middle, in RGB, resized with the triangle filter."""
    from PIL.Image import Resampling

    width, height = picture.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    box = (left, top, left + short, top + short)
    return np.asarray(picture.convert("RGB").resize((side, side), Resampling.BILINEAR, box))


def stretched_centre(picture: "Image", side: int) -> UInt8[np.ndarray, "side side 3"]:
    """The papers' test images: both sides stretched to 1.15 times the size, of which the middle is kept, in RGB."""
    from PIL.Image import Resampling

    large = int(1.15 * side)
    margin = round((large - side) / 2)
    pixels = np.asarray(picture.convert("RGB").resize((large, large), Resampling.BILINEAR))
    return pixels[margin : margin + side, margin : margin + side]


def decode(content: Path | bytes, side: int, crop: Crop, name: str) -> np.ndarray:
    """One image file, or its bytes, as a square.

    Raises:
        DataError: it cannot be read; `name` says which it was.
    """
    with opened(io.BytesIO(content) if isinstance(content, bytes) else content, name) as picture:
        return crop(picture, side)


def decode_all(
    contents: Iterable[Path | bytes], count: int, side: int, crop: Crop, what: str
) -> UInt8[np.ndarray, "I side side 3"]:
    """All images of a data set as squares; says on the error stream that it may take a while."""
    print(f"decoding {count} images of {what} at {side} pixels, once ...", file=sys.stderr)
    images = np.empty((count, side, side, 3), np.uint8)
    for number, content in enumerate(contents):
        name = str(content) if isinstance(content, Path) else f"{what}, image {number}"
        images[number] = decode(content, side, crop, name)
    return images


def packed_jpegs(jpeg: UInt8[np.ndarray, " bytes"], offsets: Integer[np.ndarray, " edges"]) -> Iterable[bytes]:
    """The JPEG files that an `.npz` file holds end to end."""
    return (jpeg[start:end].tobytes() for start, end in pairwise(offsets))


def cached(name: str, side: int, files: Sequence[Path], make: Callable[[], np.ndarray]) -> np.ndarray:
    """`make()`, or what it returned when it was last called for this name, side and unchanged `files`."""
    path, stamp = cache_folder() / f"{name}-{side}-{VERSION}.npz", _stamp(files)
    if path.exists():
        try:
            arrays = read_npz(path, ("images", "stamp"))
        except DataError:
            arrays = {}
        if arrays and str(arrays["stamp"]) == stamp:
            return arrays["images"]
    images = make()
    try:
        write_npz(path, {"images": images, "stamp": np.array(stamp)}, compress=False)
    except DataError as error:
        print(f"{name} will be decoded again next time: {error}", file=sys.stderr)
    return images


def _stamp(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def alternate(classes: int) -> UInt8[np.ndarray, " K"]:
    """Split of each class by its number i, as the papers divide CUB: 0 (train) for even i, 1 for i % 4 = 1, else 2."""
    number = np.arange(classes)
    return np.where(number % 2 == 0, 0, np.where(number % 4 == 1, 1, 2)).astype(np.uint8)


def divide(
    name: str,
    images: UInt8[np.ndarray, "I H W Ch"],
    labels: Integer[np.ndarray, " I"],
    class_names: Sequence[str] | np.ndarray,
    split: UInt8[np.ndarray, " K"],
) -> Splits:
    """Splits of images with labels 0..K-1 by each class's position in SPLITS; other positions leave a class out."""
    parts: dict[str, tuple[Dataset, tuple[str, ...]]] = {}
    for number, part in enumerate(SPLITS):
        wanted = split == number
        rows = wanted[labels]
        new_label = np.cumsum(wanted) - 1
        names = tuple(str(class_names[k]) for k in np.flatnonzero(wanted).tolist())
        parts[part] = make_dataset(images[rows], new_label[labels[rows]]), names
    return make_splits(name, parts)


def named(name: str, size: int | None, default: int) -> tuple[str, int]:
    """Full name and size of a data set whose size was left open or named."""
    return (name, default) if size is None else (f"{name}-{size}", size)


def folder_splits(name: str, side: int, classes: dict[str, list[Path]], crop: Crop, cache: str) -> Splits:
    """Splits from one list of class folders for each split, with their images as squares.

    Raises:
        DataError: a class folder without images, or an image that cannot be read.
    """
    folders = [folder for split in SPLITS for folder in classes[split]]
    files = [image_files(folder) for folder in folders]
    for folder, found in zip(folders, files, strict=True):
        if not found:
            raise DataError(f"expected images ({', '.join(SUFFIXES)}) in {folder}, got none; remove the folder")
    flat = [file for found in files for file in found]
    images = cached(cache, side, flat, lambda: decode_all(flat, len(flat), side, crop, name))
    labels = np.repeat(np.arange(len(folders)), [len(found) for found in files])
    split = np.repeat(np.arange(3, dtype=np.uint8), [len(classes[split]) for split in SPLITS])
    return divide(name, images, labels, [folder.name for folder in folders], split)


def find_folder(root: Path, name: str, advice: str) -> Path:
    """`root/name`.

    Raises:
        DataError: there is no such folder.
    """
    path = root / name
    if not path.is_dir():
        raise DataError(f"expected the folder {path}, got no such folder; {advice}")
    return path
