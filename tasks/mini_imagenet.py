"""mini-ImageNet (Vinyals et al. 2016) with the splits of Ravi & Larochelle (2017), for users who have the data.

64 classes train, 16 validate and 20 test, of 600 images each. `mini-imagenet` reads the folder `mini-imagenet` in the
data root, in one of two layouts:

    train/CLASS/*.jpg, val/CLASS/*.jpg, test/CLASS/*.jpg
    images/*.jpg with train.csv, val.csv and test.csv, which have the columns filename and label

The three lists are published at https://github.com/twitter/meta-learning-lstm/tree/master/data/miniImagenet, the images
are those of ImageNet (ILSVRC 2012, https://www.image-net.org), which its terms of use do not let us pass on. Images are
stretched to 1.15 times the size on both sides, of which the middle is kept, as Chen et al. (2019) do.

`mini-imagenet-cub` trains on its training classes, and validates and tests on those of CUB (`birds`), as the papers do.
"""

import csv
import os
from pathlib import Path

import numpy as np

from fewshot.tasks import birds
from fewshot.tasks.episodes import Splits, make_splits
from fewshot.tasks.files import DataError, resolve_root
from fewshot.tasks.images import subfolders
from fewshot.tasks.photographs import (
    SPLITS,
    cached,
    decode_all,
    divide,
    find_folder,
    folder_splits,
    named,
    stretched_centre,
)

SIZE = 84
CLASSES = {"train": 64, "val": 16, "test": 20}
LAYOUT = (
    "make it hold train/CLASS/*.jpg, val/CLASS/*.jpg and test/CLASS/*.jpg, or images/*.jpg with the train.csv, val.csv"
    " and test.csv of https://github.com/twitter/meta-learning-lstm/tree/master/data/miniImagenet"
)

crop = stretched_centre  # what makes an image of a photograph


def load(data_root: str | os.PathLike | None = None, size: int | None = None) -> Splits:
    """64 training, 16 validation and 20 test classes, at 84 pixels or at `size`.

    Raises:
        DataError: the folder is missing, or has neither layout or another number of classes.
    """
    name, side = named("mini-imagenet", size, SIZE)
    path = find_folder(resolve_root(data_root), "mini-imagenet", LAYOUT)
    if all((path / f"{part}.csv").is_file() for part in CLASSES) and (path / "images").is_dir():
        return _from_lists(name, side, path)
    if all((path / part).is_dir() for part in CLASSES):
        classes = {part: subfolders(path / folder) for part, folder in zip(SPLITS, CLASSES, strict=True)}
        _check(path, [len(classes[part]) for part in SPLITS])
        return folder_splits(name, side, classes, crop, "mini-imagenet")
    raise DataError(f"expected images in one of two layouts in {path}, got neither; {LAYOUT}")


def load_with_birds(data_root: str | os.PathLike | None = None, size: int | None = None) -> Splits:
    """64 training classes of mini-ImageNet, 50 validation and 50 test classes of CUB, at 84 pixels or at `size`.

    Raises:
        DataError: what either of the two raises.
    """
    name, side = named("mini-imagenet-cub", size, SIZE)
    new = birds.load(data_root, side)  # first: it is checked faster
    known = load(data_root, side)
    parts = {"train": known, "validation": new, "test": new}
    return make_splits(name, {part: (getattr(of, part), of.class_names[part]) for part, of in parts.items()})


def _from_lists(name: str, side: int, path: Path) -> Splits:
    rows = [(part, *row) for part in CLASSES for row in _read_list(path / f"{part}.csv")]
    classes = list(dict.fromkeys((part, label) for part, _, label in rows))
    counts = [sum(part == wanted for part, _ in classes) for wanted in CLASSES]
    _check(path, counts)
    if len({label for _, label in classes}) < len(classes):
        raise DataError(f"expected splits without common classes in {path}, got a label in two lists; {LAYOUT}")
    files = [path / "images" / file for _, file, _ in rows]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise DataError(f"expected the {len(files)} images of the lists, got no {missing[0]} ({len(missing)} missing)")
    number = {key: position for position, key in enumerate(classes)}
    labels = np.array([number[part, label] for part, _, label in rows])
    images = cached("mini-imagenet", side, files, lambda: decode_all(files, len(files), side, crop, name))
    split = np.repeat(np.arange(3, dtype=np.uint8), counts)
    return divide(name, images, labels, [label for _, label in classes], split)


def _read_list(path: Path) -> list[tuple[str, str]]:
    """(file name, label) of every row. Raises DataError for a file that is no such list."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if not {"filename", "label"} <= set(columns):
                raise DataError(f"expected the columns filename and label in {path}, got {columns}; {LAYOUT}")
            rows = [(row["filename"], row["label"]) for row in reader]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"expected a list of images in {path}, got one that cannot be read ({error}); {LAYOUT}"
        ) from error
    for number, (name, label) in enumerate(rows, 2):
        if not name or not label or Path(name).name != name or "\0" in name:
            raise DataError(
                f"expected the name of a file and a label in row {number} of {path}, got {name!r}, {label!r}"
            )
    return rows


def _check(path: Path, counts: list[int]) -> None:
    if counts != list(CLASSES.values()):
        expected = ", ".join(f"{count} {part}" for part, count in CLASSES.items())
        raise DataError(f"expected {expected} classes in {path}, got {', '.join(map(str, counts))}; {LAYOUT}")
