"""Files of test predictions: small enough to publish, exact enough that every metric can be computed again.

What is kept of each query is log p_c - max_c log p_c in 16 bits. The most probable class has 0 and stays the most
probable one, where 16 bits of p itself could not tell 0.3001 from 0.3. A ratio of probabilities is kept to
0.05% where it is within a factor of 7, to 0.8% where it is 1e-6; p = 0 stays 0.
"""

import io
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from fewshot.evaluation.predictions import Labels, Probabilities, checked
from fewshot.tasks.arrays import array_names, read_members
from fewshot.tasks.files import DAMAGE

NAMES = ("log_ratios", "labels", "classes")
MOST_LETTERS = 100  # of the text of an origin


class Origin(NamedTuple):
    """Of which images the episodes are, and how the probabilities were made.

    images_crc32: `episode_lists.checksum` of the data set. shot: labelled images of each class. corruption: of all
    images, as evaluate.py is told, "" for none. None is not known, as of files of earlier versions.
    """

    images_crc32: int | None = None
    temperature: float | None = None
    shot: int | None = None
    corruption: str | None = None


KINDS = {"images_crc32": "iu", "temperature": "f", "shot": "iu", "corruption": "U"}  # of an origin's arrays


class KeptPredictions(NamedTuple):
    """Probabilities and labels of every episode's queries; classes: which class of the test split each label is."""

    probabilities: Float[np.ndarray, "E Q C"]
    labels: Int[np.ndarray, "E Q"]
    classes: Int[np.ndarray, "E C"]


def to_bytes(
    probabilities: Probabilities,
    labels: Labels,
    classes: Int[np.ndarray | Array, "E C"],
    origin: Origin | None = None,
) -> bytes:
    """The content of `predictions.npz`. Raises: ValueError on malformed predictions."""
    p, y = checked(probabilities, labels)
    with np.errstate(divide="ignore"):  # the logarithm of 0 is kept as it is
        ratios = np.log(p) - np.log(p.max(-1, keepdims=True))
    file = io.BytesIO()
    arrays = dict(zip(NAMES, (ratios.astype(np.float16), _smallest(y), _smallest(np.asarray(classes))), strict=True))
    told = origin._asdict() if origin else {}
    known = {name: np.asarray(value) for name, value in told.items() if value is not None}
    np.savez_compressed(file, allow_pickle=False, **arrays, **known)
    return file.getvalue()


def read(path: str | PathLike[str]) -> KeptPredictions:
    """The predictions of a file, in float32. Raises: ValueError, in one line, for one that is missing or another's."""
    try:
        arrays = read_members(Path(path), NAMES)
        kept = _of(*(arrays[name] for name in NAMES))
        checked(kept.probabilities, kept.labels)
        return kept
    except DAMAGE as error:
        raise _refused(path, error) from error


def read_origin(path: str | PathLike[str]) -> Origin:
    """Where the predictions of a file are from. Raises: ValueError, in one line, for a file that `read` refuses."""
    try:
        held = array_names(Path(path))
        arrays = read_members(Path(path), tuple(name for name in KINDS if name in held))
        for name, array in arrays.items():
            if array.shape or array.dtype.kind not in KINDS[name] or not _is_plain(array.item()):
                raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected one number or short text")
        return Origin(**{name: array.item() for name, array in arrays.items()})
    except DAMAGE as error:
        raise _refused(path, error) from error


def _is_plain(value: object) -> bool:
    """A finite number that is not negative, or a short text of one line."""
    if isinstance(value, str):
        return len(value) <= MOST_LETTERS and value.isprintable()
    return isinstance(value, int | float) and bool(np.isfinite(value)) and value >= 0


def _refused(path: str | PathLike[str], error: Exception) -> ValueError:
    reason = " ".join(str(error).split())
    return ValueError(f"expected predictions of test episodes, got {path} ({reason}); write the file again")


def _of(ratios: np.ndarray, labels: np.ndarray, classes: np.ndarray) -> KeptPredictions:
    integers = labels.dtype.kind + classes.dtype.kind in {a + b for a in "iu" for b in "iu"}
    if ratios.dtype != np.float16 or not integers or ratios.ndim != 3 or classes.shape != ratios.shape[::2]:
        raise ValueError(f"its arrays are {ratios.dtype}{ratios.shape}, {labels.dtype}, {classes.dtype}{classes.shape}")
    if (ratios.max(-1) != 0).any():
        raise ValueError("a query has no most probable class")
    odds = np.exp(ratios.astype(np.float64))
    return KeptPredictions(
        (odds / odds.sum(-1, keepdims=True)).astype(np.float32), labels.astype(np.int32), classes.astype(np.int32)
    )


def _smallest(values: np.ndarray) -> np.ndarray:
    """The same integers in as few bytes as they fit in."""
    return values.astype(np.result_type(np.min_scalar_type(values.min()), np.min_scalar_type(values.max())))
