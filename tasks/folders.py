"""`folder:PATH`: a user's own images, one subfolder a class.

Where PATH holds the folders train, validation and test, these are the splits. Otherwise its class folders, numbered
from 0 in the order of their names, are divided 60 : 20 : 20: those whose number % 5 is below 3 train, 3 validate and 4
test. `folder-32:PATH` is at 32 pixels a side instead of 84. Images become grey if every file is grey, else RGB, and all
of each image fits in (`tasks.images.whole`).
"""

from pathlib import Path

import numpy as np

from fewshot.tasks.episodes import Splits
from fewshot.tasks.files import DataError
from fewshot.tasks.images import Images, image_files, opened, prepared_files, subfolders, tell_left_out, whole
from fewshot.tasks.photographs import SPLITS, cached, divide

SIZE, FEWEST = 84, 10


def load(path: str, size: int | None = None) -> Splits:
    """The images of a folder in three splits; class names are the subfolders'.

    Raises:
        DataError: no such folder, too few classes, or an image that cannot be read.
    """
    folder, side = Path(path).expanduser(), size or SIZE
    classes = _class_folders(folder)
    files = [(file, number) for number, (_, one) in enumerate(classes) for file in image_files(one)]
    labels = np.array([number for _, number in files], int)
    empty = np.setdiff1d(np.arange(len(classes)), labels)
    if len(empty):
        raise DataError(f"expected images in every class, got none in {classes[empty[0]][1]}; remove that folder")
    shape = (side, side, 1 if all(_is_grey(file) for file, _ in files) else 3)
    name = f"folder:{path}" if size is None else f"folder-{size}:{path}"
    only = [file for file, _ in files]
    tell_left_out(folder, only)

    def make() -> np.ndarray:
        images: Images = prepared_files([(file, "") for file in only], shape, whole)
        return images.pixels

    # One cache file for each folder; the channels follow from the files, whose changes the cache notices.
    key = "folder-" + "".join(letter if letter.isalnum() else "-" for letter in str(folder.resolve()))[-80:]
    images = cached(key, side, only, make)
    return divide(name, images, labels, [one.name for _, one in classes], np.array([s for s, _ in classes], np.uint8))


def _class_folders(folder: Path) -> list[tuple[int, Path]]:
    """(position in SPLITS, folder) of every class."""
    if not folder.is_dir():
        raise DataError(f"expected a folder with a subfolder of images for each class, got {folder}, which is none")
    if all((folder / part).is_dir() for part in SPLITS):
        given = [(number, path) for number, part in enumerate(SPLITS) for path in subfolders(folder / part)]
        names = [path.name for _, path in given]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(
                f"expected other classes in each of {', '.join(SPLITS)} in {folder}, got {twice[0]} in two: "
                "a model is tested on classes that it was not trained on; put all classes into one folder"
            )
        return given
    found = subfolders(folder)
    if len(found) < FEWEST:
        raise DataError(
            f"expected {FEWEST} class folders or more in {folder}, got {len(found)};"
            f" add classes, or choose the splits yourself with the folders {', '.join(SPLITS)} in it"
        )
    return [(max(0, number % 5 - 2), path) for number, path in enumerate(found)]


def _is_grey(file: Path) -> bool:
    with opened(file, file) as picture:
        return picture.mode in ("1", "L", "I", "F", "LA") or picture.mode.startswith("I;16")
