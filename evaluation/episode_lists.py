"""Files of episodes, so that a published table can be computed again on the same images.

An .npz file with the positions of the images in the data set's test split (`flat_images`), their labels, a checksum of
those images, and the accuracy, NLL and Brier score of every episode.
"""

import io
import zlib
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.scoring import Scores
from fewshot.tasks import DataError, Dataset
from fewshot.tasks.arrays import read_members
from fewshot.tasks.files import DAMAGE
from fewshot.tasks.replacing import replace_bytes

POSITIONS = ("x_support", "y_support", "x_query", "y_query")


class EpisodeList(NamedTuple):
    """Positions and labels by name, each [E, ...], and the checksum of the images that they point to."""

    arrays: dict[str, np.ndarray]
    checksum: int


def save(path: Path, dataset: Dataset, episodes: Episodes, scores: Scores) -> None:
    """Write the episodes on an uncorrupted data set, with what the scores say of each, in one move."""
    arrays = {name: np.asarray(getattr(episodes.indices, name)) for name in POSITIONS}
    found = {name: of(scores.probabilities, scores.labels) for name, of in metrics.EPISODE_SCORES.items()}
    own = {"code": scores.codes, "images_crc32": np.asarray(checksum(dataset))}
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays, **found, **own)
    replace_bytes(path, file.getvalue())


def read(path: Path) -> EpisodeList:
    """The episodes of a file. Raises DataError for a file that is missing, damaged or holds something else."""
    try:
        arrays = read_members(path, (*POSITIONS, "images_crc32"))
        checksum_of = arrays.pop("images_crc32")
        _check(arrays, checksum_of)
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise DataError(f"expected a file of episodes written by --episodes-file, got {path} ({reason})") from error
    return EpisodeList(arrays, int(checksum_of))


def _check(arrays: dict[str, np.ndarray], checksum_of: np.ndarray) -> None:
    """Raises ValueError for what no file of episodes holds."""
    if checksum_of.shape or checksum_of.dtype.kind not in "iu":
        raise ValueError(f"images_crc32 is {checksum_of.dtype} of shape {checksum_of.shape}, expected a whole number")
    for name, array in arrays.items():
        if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(f"{name} is {array.dtype} of shape {array.shape}, expected whole numbers [E, N]")
        if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
            raise ValueError(f"{name} holds numbers from {array.min()} to {array.max()}, expected positions or labels")
    for part in ("support", "query"):
        x, y = arrays[f"x_{part}"].shape, arrays[f"y_{part}"].shape
        if x != y:
            raise ValueError(f"x_{part} has the shape {x} and y_{part} {y}, expected the same")
    if len({len(array) for array in arrays.values()}) > 1:
        raise ValueError("support and query have other numbers of episodes")


def shape_of(listed: EpisodeList) -> Shape:
    """Way, shot and queries a class. Raises DataError unless all episodes and classes have as many."""
    labels = [np.sort(listed.arrays[name], axis=1) for name in ("y_support", "y_query")]
    way = int(labels[0].max()) + 1
    shot, query = (one.shape[1] // way for one in labels)
    counts = list(zip(labels, (shot, query), strict=True))
    fits = all(one.shape[1] == way * count > 0 for one, count in counts)  # before anything is made of that size
    if not fits or any((one != np.repeat(np.arange(way), count)).any() for one, count in counts):
        raise DataError("expected episodes with as many images of every class, got others; write them again")
    return Shape(way, shot, query)


def episodes_of(listed: EpisodeList, seed: int, dataset: Dataset) -> Episodes:
    """The episodes with the inference keys of a seed. Raises DataError unless the images are those of the file."""
    if listed.checksum != checksum(dataset):
        raise DataError(
            "expected the images that the file of episodes was written for, got others; choose its data set"
        )
    stored = dataset.rotations * len(dataset.images)
    for name in ("x_support", "x_query"):
        last = int(listed.arrays[name].max())
        if last >= stored:
            raise DataError(f"expected positions below {stored}, as many images as there are, got {last} in {name}")
    shape, count = shape_of(listed), len(listed.arrays["x_support"])
    drawn = draw_episodes(seed, "test", dataset, shape, count)
    arrays = {name: jnp.asarray(array, jnp.int32) for name, array in listed.arrays.items()}
    return Episodes(shape, drawn.indices._replace(**arrays), drawn.keys)


def checksum(dataset: Dataset) -> int:
    """CRC-32 of the bytes of all images."""
    return zlib.crc32(np.asarray(dataset.images).tobytes())
