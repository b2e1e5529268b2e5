"""What people hand to an estimator: tables of features, images, paths of pictures; labels of any one kind."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, cast

import numpy as np
from jaxtyping import Shaped
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from fewshot.models.networks.encoders import Encoder, load_encoder
from fewshot.tasks.feature_cache import BLOCK, FeatureCache
from fewshot.tasks.files import DAMAGE
from fewshot.tasks.images import DAMAGED_PICTURE, Prepare, as_read, prepared_files, unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

    Pictures: TypeAlias = list[Path] | list[Image] | np.ndarray  # by their paths, Pillow's, or as arrays

Encode = Callable[[object], np.ndarray]


def given_pictures(given: object) -> "Pictures | None":
    """The pictures that were given, None for a table of features.

    Raises ValueError for one alone and for kinds that are mixed, DataError for one that cannot be read.
    """
    found: "Pictures | None" = paths_of(given)
    if found is None:
        found = pictures_of(given)
    return images_of(given) if found is None else found


def paths_of(given: object) -> list[Path] | None:
    """The paths that were given, None for anything else. Raises ValueError for one alone, and among other things."""
    if isinstance(given, str | PathLike):
        raise ValueError(f"expected a list of paths, got {str(given)[:80]!r}; put it into a list")
    if not isinstance(given, list | tuple):
        shape = getattr(given, "shape", ())
        if len(shape) != 1 and shape[1:] != (1,):  # nor a table of one column
            return None
        given = np.asarray(given).ravel().tolist()
    entries: list[object] = list(given)
    words = [entry for entry in entries if isinstance(entry, str | PathLike)]
    if not words:
        return None
    _check_alike("the path of a picture", entries, (str, PathLike))
    return [Path(word) for word in words]


def pictures_of(given: object) -> "list[Image] | None":
    """Pillow's pictures, or bytes [H, W] or [H, W, 3] of unlike sizes, as those of files are read; None for others.

    Raises DataError for one that cannot be read, ValueError for one alone, and among other things.
    """
    from PIL import Image

    if isinstance(given, Image.Image):
        raise ValueError("expected a list of pictures, got one; put it into a list")
    if not isinstance(given, list | tuple) or not given:
        return None
    if any(isinstance(one, Image.Image) for one in given):
        _check_alike("a picture of Pillow's", given, Image.Image)
    elif not _are_unlike_pictures(given):
        return None
    pictures = []
    for number, one in enumerate(given):
        name = getattr(one, "filename", "") or f"picture {number}"
        try:
            pictures.append(as_read(one if isinstance(one, Image.Image) else Image.fromarray(one), name))
        except (*DAMAGE, *DAMAGED_PICTURE) as error:  # Pillow reads a file when its pixels are asked for
            raise unreadable(name, error) from error
    return pictures


def _check_alike(wanted: str, entries: Sequence[object], kind: type | tuple[type, ...]) -> None:
    """Raises ValueError, in one line, for the first entry of another kind."""
    for number, one in enumerate(entries):
        if not isinstance(one, kind):
            raise ValueError(f"expected {wanted} for every example, got {type(one).__name__} as number {number}")


def _are_unlike_pictures(entries: Sequence[object]) -> bool:
    shapes = {one.shape if isinstance(one, np.ndarray) and one.dtype == np.uint8 else () for one in entries}
    return len(shapes) > 1 and all(len(shape) in (2, 3) for shape in shapes)


def images_of(given: object) -> Shaped[np.ndarray, "N H W Ch"] | None:
    """The images [N, H, W, Ch] that were given, grey ones [N, H, W] too; None for anything else."""
    if axes_of(given) not in (3, 4):
        return None
    images = np.asarray(given)
    return images if images.ndim == 4 else images[..., None]


def axes_of(given: object) -> int:
    """How many axes the given values have; asked of themselves where they know, as tables do."""
    if hasattr(given, "ndim"):
        return int(given.ndim)
    try:
        return np.asarray(given).ndim
    except ValueError as error:  # NumPy's tells of dimensions
        raise ValueError("expected examples of one shape, got a list of unlike ones; make them alike") from error


def read_pictures(
    given: "list[Path] | list[Image]", shape: tuple[int, int, int], prepare: Prepare
) -> Shaped[np.ndarray, "N H W Ch"]:
    """Bytes [N, H, W, Ch] of picture files, or of Pillow's pictures. Raises DataError for a file that is damaged."""
    if _are_paths(given):
        return prepared_files([(path, "") for path in given], shape, prepare).pixels
    return np.stack([prepare(picture, shape) for picture in cast("list[Image]", given)])


def names_of(given: "list[Path] | list[Image]") -> list[str]:
    """Their paths, or numbers."""
    return [str(one) if isinstance(one, Path) else f"picture {number}" for number, one in enumerate(given)]


def _are_paths(given: "Pictures") -> "TypeGuard[list[Path]]":
    return not isinstance(given, np.ndarray) and isinstance(given[0], Path)


def encoded(encoder: Encoder, given: "Pictures") -> Shaped[np.ndarray, "N D"]:
    """Features [N, D] of pictures, by their paths, Pillow's, or bytes [N, H, W, 3]; kept in the user's cache.

    Raises DataError for a file that cannot be read, EncoderError for arrays that are no pictures.
    """
    features = FeatureCache()
    if not _are_paths(given):
        return features.encode(encoder, given)
    paths, side = given, encoder.image_size

    def read(start: int) -> np.ndarray:
        return read_pictures(paths[start : start + BLOCK], (side, side, 3), lambda one, _: encoder.prepare([one])[0])

    return np.concatenate([features.encode(encoder, read(start)) for start in range(0, len(given), BLOCK)])


def name_of(encoder: str | Encoder | None) -> str | None:
    """The name of an encoder that may be given by its name."""
    return encoder if encoder is None or isinstance(encoder, str) else encoder.name


@cache
def named_encoder(name: str) -> Encoder:
    """The encoder of a name, loaded once. Raises EncoderError."""
    return load_encoder(name)


def checked_labels(labels: object) -> Shaped[np.ndarray, " N"]:
    """Labels [N]: words, whole numbers, or true and false.

    Raises ValueError where one is missing (None, NaN), for kinds that are mixed, and for numbers that are not whole.
    """
    if labels is None:
        raise ValueError("FewShotClassifier requires y to be passed, but the target y is None")
    plain = isinstance(labels, list | tuple) and not all(isinstance(one, list | tuple | np.ndarray) for one in labels)
    # As an array of text NaN would be a word, and so would a number among words.
    y = column_or_1d(np.array(labels, object) if plain else labels, warn=True)
    entries = y.tolist()
    if missing := [one for one in entries if is_missing(one)]:
        raise ValueError(f"expected a label for every example, got {missing[0]}; leave those without a label out")
    kinds = {kind_of(one): one for one in reversed(entries)}  # an example of each
    if len(kinds) > 1:
        (second, other), (first, one), *_ = sorted(kinds.items(), reverse=True)
        raise ValueError(f"expected labels of one kind, got {first} ({one!r}) and {second} ({other!r}); convert them")
    if plain and entries:
        y = np.array(entries)
    if len(y):
        with warnings.catch_warnings():  # few examples of many classes are what this is for
            warnings.filterwarnings("ignore", "The number of unique classes is greater than 50%", UserWarning)
            check_classification_targets(y)
    return y


def is_missing(label: object) -> bool:
    """None, an infinite number, or something that is not equal to itself: NaN, NaT, pandas' NA."""
    if label is None or (isinstance(label, float) and math.isinf(label)):
        return True
    different = label != label
    return (different is label and not isinstance(label, bool)) or bool(different)


def kind_of(label: object) -> str:
    """Words, truth values or numbers; of anything else its type."""
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (str, "words"),
        ((bool, np.bool_), "truth values"),
        ((int, float, np.number), "numbers"),
    )
    return next((name for types, name in kinds if isinstance(label, types)), type(label).__name__)
