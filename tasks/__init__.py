"""Few-shot tasks and the data sets they are drawn from. Imports nothing else of this project."""

import os
from collections.abc import Callable

from fewshot.tasks import birds, embeddings, flowers102, folders, glyphs, mini_imagenet, omniglot, tinyimagenet
from fewshot.tasks.augmentation import AUGMENTATIONS, Augmentation, augment
from fewshot.tasks.curves import has_real_labels
from fewshot.tasks.episodes import (
    Dataset,
    LabelledImages,
    OpenTask,
    Splits,
    Task,
    TaskIndices,
    check_task_size,
    flat_images,
    make_dataset,
    make_splits,
    sample_batch,
    sample_indices,
    sample_task,
    take_images,
)
from fewshot.tasks.files import DataError
from fewshot.tasks.images import Prepare, whole
from fewshot.tasks.ink import STYLES, InkPreparation
from fewshot.tasks.photographs import Crop, split_name

DATASETS: dict[str, Callable[[str | os.PathLike | None], Splits]] = {
    "glyphs": glyphs.load,
    "omniglot": omniglot.load,
    "omniglot-emnist": omniglot.load_with_emnist,
}
# Of these images can be had at any size: their names may end in the pixels of a side.
PHOTOGRAPHS: dict[str, Callable[[str | os.PathLike | None, int | None], Splits]] = {
    "flowers102": flowers102.load,
    "tinyimagenet": tinyimagenet.load,
    "cub": birds.load,
    "mini-imagenet": mini_imagenet.load,
    "mini-imagenet-cub": mini_imagenet.load_with_birds,
}
# How their data sets make a square image of a photograph.
CROPS: dict[str, Crop] = {
    "flowers102": flowers102.crop,
    "tinyimagenet": tinyimagenet.crop,
    "cub": birds.crop,
    "mini-imagenet": mini_imagenet.crop,
    "mini-imagenet-cub": mini_imagenet.crop,
}
# Files of the user, named after a colon.
OWN: dict[str, Callable[[str, int | None], Splits]] = {"folder": folders.load, "embeddings": embeddings.load}


def names() -> tuple[str, ...]:
    """What a user may write as a data set, those that a module of the user's registered among them."""
    return *DATASETS, *PHOTOGRAPHS, *(f"{own}:PATH" for own in OWN)


def load(name: str, data_root: str | os.PathLike | None = None) -> Splits:
    """Load a data set in three splits without common classes.

    Names are those of DATASETS and PHOTOGRAPHS (a loader of your own is a line in one of them), `folder:PATH` and
    `embeddings:PATH`; photographs and folders also come at another size: `flowers102-32`, `folder-28:PATH`. Files are
    read from `data_root`, else from the folder `$FEWSHOT_DATA`, else from the user's cache folder; a PATH is taken as
    it is.

    Raises:
        DataError: an unknown name, or files that are missing or damaged.
    """
    if name in DATASETS:
        return DATASETS[name](data_root)
    stem, colon, path = name.partition(":")
    base, size = split_name(stem)
    if base in PHOTOGRAPHS and not colon:
        return PHOTOGRAPHS[base](data_root, size)
    if base in OWN and path:
        return OWN[base](path, size)
    if has_real_labels(name):
        raise DataError(f"expected a data set of classes, got {name}, which has real labels: it trains and evaluates")
    raise DataError(f"expected the name of a data set, got {name!r}; try one of {', '.join(names())}")


def preparation(name: str, find_ink: bool = True) -> Prepare:
    """How the data set of a name makes an image of a picture, for new pictures to be treated alike.

    Photographs are cropped as their data set crops them; of characters, and of the pictures of a folder, all is kept.
    A photograph of a character on paper is read as `tasks.ink` does, unless find_ink is false.
    """
    if find_ink and name in STYLES:
        return InkPreparation(name)
    crop = CROPS.get(split_name(name.partition(":")[0])[0])
    return whole if crop is None else lambda picture, shape: crop(picture, shape[0])


__all__ = [
    "AUGMENTATIONS",
    "CROPS",
    "DATASETS",
    "OWN",
    "PHOTOGRAPHS",
    "Augmentation",
    "DataError",
    "Dataset",
    "LabelledImages",
    "OpenTask",
    "Splits",
    "Task",
    "TaskIndices",
    "augment",
    "check_task_size",
    "flat_images",
    "load",
    "make_dataset",
    "make_splits",
    "names",
    "preparation",
    "sample_batch",
    "sample_indices",
    "sample_task",
    "take_images",
]
