"""Few-shot tasks and the data sets they are drawn from. Imports nothing else of this project."""

import os
from collections.abc import Callable

from tasks import glyphs, omniglot
from tasks.augmentation import AUGMENTATIONS, Augmentation, augment
from tasks.episodes import (
    Dataset,
    OpenTask,
    Splits,
    Task,
    TaskIndices,
    check_task_size,
    flat_images,
    make_dataset,
    sample_indices,
    sample_task,
    take_images,
)
from tasks.files import DataError

DATASETS: dict[str, Callable[[str | os.PathLike | None], Splits]] = {
    "glyphs": glyphs.load,
    "omniglot": omniglot.load,
    "omniglot-emnist": omniglot.load_with_emnist,
}
PLANNED = ("flowers102", "tinyimagenet", "cub", "mini-imagenet", "folder:PATH", "embeddings:PATH")


def load(name: str, data_root: str | os.PathLike | None = None) -> Splits:
    """Load a data set in three class-disjoint splits.

    Files are read from `data_root`, else from the folder `$FEWSHOT_DATA`, else from the user's cache folder.

    Raises:
        DataError: an unknown name, one that is not built yet, or files that are missing or damaged.
    """
    if name in DATASETS:
        return DATASETS[name](data_root)
    known = ", ".join(DATASETS)
    if name.split(":")[0] in {planned.split(":")[0] for planned in PLANNED}:
        raise DataError(
            f"expected a data set that can be loaded, got {name!r}, which is not built yet; try one of {known}"
        )
    raise DataError(f"expected the name of a data set, got {name!r}; try one of {known}")


__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "Augmentation",
    "DataError",
    "Dataset",
    "OpenTask",
    "Splits",
    "Task",
    "TaskIndices",
    "augment",
    "check_task_size",
    "flat_images",
    "load",
    "make_dataset",
    "sample_indices",
    "sample_task",
    "take_images",
]
