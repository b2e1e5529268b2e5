"""EMNIST ByClass (Cohen et al. 2017): the test half of `omniglot-emnist`, 62 classes 0-9 A-Z a-z, 28x28, ink bright.

The first 400 images of each class of the official test split are used, in the official order (fewer for K, j, p, y).
Some classes look alike (0 O o, 1 I l, c C): no method reaches 100%.
"""

import gzip
import string
import zipfile
from pathlib import Path

import numpy as np

from fewshot.tasks.arrays import Arrays
from fewshot.tasks.episodes import Dataset, make_dataset
from fewshot.tasks.files import DAMAGE, Archive, DataError, check_digest, find_or_convert

FILE = "emnist.npz"
CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
IMAGES_PER_CLASS = 400
ARCHIVES = (
    Archive(
        "gzip.zip",
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        562,
    ),
)
IMAGES_SHA256 = "919c5ef71bf083370a5655fd1e8e94b9d25c90d35c62c4aa8570793dc768a6c3"
_MEMBER = "emnist-byclass-test-{}.gz"


def load_halves(root: Path) -> tuple[tuple[Dataset, tuple[str, ...]], tuple[Dataset, tuple[str, ...]]]:
    """The classes at even positions (validation) and at odd positions (test), each with its class names.

    Raises:
        DataError: `emnist.npz` is damaged, or missing and cannot be made.
    """
    arrays = find_or_convert(root, FILE, ARCHIVES, _convert_checked, ("images", "labels"))
    return _half(arrays, 0), _half(arrays, 1)


def _half(arrays: Arrays, parity: int) -> tuple[Dataset, tuple[str, ...]]:
    rows = arrays["labels"] % 2 == parity
    return make_dataset(arrays["images"][rows][..., None], arrays["labels"][rows] // 2), tuple(CHARACTERS[parity::2])


def _convert_checked(archive: Path) -> Arrays:
    arrays = convert(archive)
    check_digest("EMNIST", arrays["images"], IMAGES_SHA256)
    return arrays


def convert(path: Path) -> Arrays:
    """Turn NIST's `gzip.zip` into the arrays of `emnist.npz`; the official images are stored transposed.

    Raises:
        DataError: the file is no zip file with the ByClass test split.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            images = _read_idx(archive, "images-idx3-ubyte")
            labels = _read_idx(archive, "labels-idx1-ubyte")
    except DAMAGE as error:
        raise DataError(f"expected NIST's EMNIST archive in {path}, got {error}; fetch it again") from error
    first = [np.flatnonzero(labels == label)[:IMAGES_PER_CLASS] for label in range(len(CHARACTERS))]
    kept = np.sort(np.concatenate(first))
    return {
        "images": np.ascontiguousarray(images[kept].transpose(0, 2, 1)),
        "labels": labels[kept],
        "characters": np.array(list(CHARACTERS)),
        "byclass_test_index": kept.astype(np.int32),
        "class_split_dkt": np.where(np.arange(len(CHARACTERS)) % 2 == 0, "val", "novel"),
    }


def _read_idx(archive: zipfile.ZipFile, kind: str) -> np.ndarray:
    """An array in the IDX format: two zero bytes, type 8 (bytes), rank, the big-endian sizes, the data."""
    wanted = _MEMBER.format(kind)
    members = [name for name in archive.namelist() if name.endswith(wanted)]
    if not members:
        raise ValueError(f"no {wanted} inside")
    with archive.open(members[0]) as file:
        content = gzip.decompress(file.read())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"a {wanted} that is not in the IDX format")
    rank = content[3]
    shape = np.frombuffer(content, ">i4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
