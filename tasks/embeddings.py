"""`embeddings:PATH`: features that a network of the user computed, for the Gaussian process alone.

PATH is an `.npz` file with six arrays: train_features [I, D] and train_labels [I], the same for validation and test.
Labels are numbers, which name the classes of their own split, or words that no two splits have in common. The features
stand in for images of shape (1, 1, D), any finite numbers: train with the backbones `identity`, which leaves them as
they are, or `mlp`.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fewshot.tasks.arrays import Arrays, array_names
from fewshot.tasks.episodes import Dataset, Splits, make_dataset, make_splits
from fewshot.tasks.files import DataError
from fewshot.tasks.images import Images, labels_of, read_arrays
from fewshot.tasks.photographs import SPLITS


def load(path: str, size: int | None = None) -> Splits:
    """The features as images [I, 1, 1, D] in float32; class names are the labels.

    Raises:
        DataError: no such file, an array that is missing or has the wrong shape, or numbers that are not finite.
    """
    file = Path(path).expanduser()
    if size is not None or not file.is_file():
        raise DataError(f"expected an .npz file of features after embeddings:, got {path}, which is none")
    names = tuple(f"{part}_{kind}" for part in SPLITS for kind in ("features", "labels"))
    arrays = read_arrays(file, names)
    widths = {part: np.shape(arrays[f"{part}_features"])[-1:] for part in SPLITS}
    if len(set(widths.values())) > 1:
        raise DataError(f"expected features of one size in {path}, got {widths}; use one network for all splits")
    _check_words(path, {part: np.unique(arrays[f"{part}_labels"]) for part in SPLITS})
    return make_splits(f"embeddings:{path}", {part: _split(arrays, part, path) for part in SPLITS})


def _check_words(path: str, labels: dict[str, np.ndarray]) -> None:
    """Raises DataError for a word that names classes of two splits: one that was trained on is no new class."""
    for one, other in itertools.combinations(SPLITS, 2):
        if labels[one].dtype.kind in "US" and labels[one].dtype.kind == labels[other].dtype.kind:
            both = np.intersect1d(labels[one], labels[other])
            if len(both):
                raise DataError(
                    f"expected classes of their own in every split of {path}, got {str(both[0])[:40]!r} in {one} and "
                    f"{other}; give unlike classes unlike words, or numbers"
                )


def load_features(path: str | Path, width: int, labelled: bool) -> Images:
    """A user's `features` [N, D], and `labels` [N] if asked for, of an .npz file; D is the width that a run expects.

    Raises DataError.
    """
    file, names = Path(path), ("features", "labels") if labelled else ("features",)
    if file.suffix != ".npz" or not file.is_file():
        raise DataError(f"expected an .npz file with features [N, {width}], as the run was trained on, got {path}")
    arrays = read_arrays(file, names)
    features = arrays["features"]
    labels = arrays.get("labels", np.full(features.shape[:1] if features.ndim else (0,), ""))
    if features.ndim != 2 or features.shape[1] != width or labels.shape != features.shape[:1] or not len(labels):
        wanted = f"features [N, {width}]" + (" and labels [N]" if labelled else "")
        raise DataError(f"expected {wanted} in {path}, got {features.shape} and {labels.shape}; use the run's network")
    features = _finite(features, f"features of {path}")
    return Images(features[:, None, None], _entries(file, len(features)), labels_of(file, labels))


def _entries(file: Path, number: int) -> list[str]:
    """What the rows of a file are called: its `names` [N], as `encode.py` writes them, else by their places.

    Each begins with the file, so that none is taken for a picture on this machine.
    """
    names: Sequence[object] = range(number)
    if "names" in array_names(file):
        held = read_arrays(file, ("names",))["names"]
        if held.shape != (number,) or held.dtype.kind != "U":
            raise DataError(
                f"expected as names in {file} a word for each of {number} rows, got {held.dtype} {held.shape}; "
                "leave that array out"
            )
        names = held.tolist()
    return [f"{file}:{name}" for name in names]


def _finite(features: np.ndarray, what: str) -> np.ndarray:
    if features.dtype.kind not in "biuf":
        raise DataError(f"expected numbers in {what}, got {features.dtype}; convert them")
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
        features = features.astype(np.float32)
    if not np.isfinite(features).all():
        raise DataError(f"expected finite numbers in {what}, got NaN or infinity; remove them")
    return features


def _split(arrays: Arrays, part: str, path: str) -> tuple[Dataset, tuple[str, ...]]:
    features, labels = arrays[f"{part}_features"], arrays[f"{part}_labels"]
    if features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
        shapes = f"{features.shape} and {labels.shape}"
        raise DataError(f"expected {part}_features [I, D] and {part}_labels [I] in {path}, got {shapes}; reshape them")
    features = _finite(features, f"{part}_features of {path}")
    labels = np.array(labels_of(Path(path), labels)) if labels.dtype.kind in "fS" else labels
    classes, number = np.unique(labels, return_inverse=True)
    return make_dataset(features[:, None, None], number), tuple(str(label) for label in classes)
