"""CUB-200-2011 (Wah et al. 2011): 11,788 photographs of 200 kinds of birds, for users who have the data.

`cub` reads the folder `CUB_200_2011/images` of the public archive, unpacked in the data root: one folder a class, from
`001.Black_footed_Albatross` to `200.Common_Yellowthroat`. Splits are those of Chen et al. (2019), which DKT and later
papers use: of the classes in the order of their names, numbered from 0, those with even numbers train (100), those with
number % 4 = 1 validate (50) and those with number % 4 = 3 test (50). Images are stretched to 1.15 times the size on
both sides, of which the middle is kept.
"""

import os

import numpy as np

from fewshot.tasks.episodes import Splits
from fewshot.tasks.files import Archive, DataError, resolve_root
from fewshot.tasks.images import subfolders
from fewshot.tasks.photographs import SPLITS, alternate, find_folder, folder_splits, named, stretched_centre

SIZE, CLASSES = 84, 200
ARCHIVE = Archive(
    "CUB_200_2011.tgz",
    "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
    "0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
    1150,
)
crop = stretched_centre  # what makes an image of a photograph


def load(data_root: str | os.PathLike | None = None, size: int | None = None) -> Splits:
    """100 training, 50 validation and 50 test classes, at 84 pixels or at `size`.

    Raises:
        DataError: the folder is missing or holds another number of classes.
    """
    name, side = named("cub", size, SIZE)
    advice = (
        f"fetch {ARCHIVE.url} ({ARCHIVE.megabytes} MB, SHA-256 {ARCHIVE.sha256}) and unpack it there"
        f" (tar -xzf {ARCHIVE.name}), or point --data-root at the folder that has it"
    )
    path = find_folder(resolve_root(data_root), "CUB_200_2011/images", advice)
    folders = np.array(subfolders(path), object)
    if len(folders) != CLASSES:
        raise DataError(f"expected {CLASSES} class folders in {path}, got {len(folders)}; {advice}")
    split = alternate(CLASSES)
    classes = {part: list(folders[split == number]) for number, part in enumerate(SPLITS)}
    return folder_splits(name, side, classes, crop, "cub")
