"""UCI regression data (energy, elevators, protein) with the ten published folds.

Each fold holds out a tenth of the rows. Inputs and targets are standardised by the training rows alone.
Source: the collection of T. Evans (github.com/treforevans/uci_datasets, MIT), after Yang et al. 2016. Of protein's
45,730 rows 1,712 are copies of others, so that some test rows occur among the training rows.
"""

import gzip
import io
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fewshot.tasks.files import DAMAGE, Archive, DataError, fetch, resolve_root

FOLDS = 10
FOLDER = "uci"
_URL = "https://raw.githubusercontent.com/treforevans/uci_datasets/master/uci_datasets"


class Source(NamedTuple):
    """One data set: its rows and columns (target included), and the SHA-256 sums of its two files."""

    rows: int
    columns: int
    data: str
    mask: str


SOURCES = {
    "energy": Source(
        768,
        9,
        "431b6df04243db782bbcd45e408373a654334496ebe5d9c9985ab2e826a39f51",
        "217df2cd4cabf818390e26a65384ea113c95b75bd687787a37ed2f87f28c9bb8",
    ),
    "elevators": Source(
        16599,
        19,
        "e39bc18a80ec3611e4fd76d0f86ee377e96ba21b568b9997576d538dafe56b7b",
        "9fe662eacca95ae2c9301cbc4c4134e55d58e903cb0cfb683771ffdd2d248eb5",
    ),
    "protein": Source(
        45730,
        10,
        "f709d0107c3ee90ab019b9e5d77fc2ae182158958cb70b1903236a51334fd01b",
        "22afe05e8d17c428558d78a77efeecc08d58004b6c95741d1c533c3207c69fe9",
    ),
}


class Fold(NamedTuple):
    """One division of a data set, standardised: x [N, D] and y [N] to learn from, x_test [Q, D] and y_test [Q].

    y_mean and y_scale lead back to the target's own unit: y * y_scale + y_mean.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    y_mean: float
    y_scale: float


def load_fold(name: str, fold: int, data_root: str | os.PathLike | None = None) -> Fold:
    """One fold (0 to 9) of a data set, in float64.

    Raises:
        DataError: an unknown name or fold, or a file that is damaged, or missing and cannot be downloaded.
    """
    if name not in SOURCES or not 0 <= fold < FOLDS:
        raise DataError(
            f"expected one of {', '.join(SOURCES)} and a fold from 0 to {FOLDS - 1}, got {name!r} and {fold}"
        )
    rows, masks = read(name, data_root)
    return standardised(rows, masks[:, fold])


def read(name: str, data_root: str | os.PathLike | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows [N, D + 1], the target last, and which are test rows [N, 10] (bool). Raises DataError."""
    source, root = SOURCES[name], resolve_root(data_root)
    rows = _table(root, f"{name}.csv.gz", f"{name}/data.csv.gz", source.data)
    masks = _table(root, f"{name}.test_mask10.csv.gz", f"{name}/test_mask.csv.gz", source.mask)
    expected = (source.rows, source.columns), (source.rows, FOLDS)
    if (rows.shape, masks.shape) != expected or not np.isfinite(rows).all() or not np.isin(masks, (0, 1)).all():
        raise DataError(
            f"expected finite rows {expected[0]} and 0 or 1 {expected[1]} in the files of {name}, got {rows.shape} and"
            f" {masks.shape}; delete them and load again"
        )
    return rows, masks == 1


def standardised(rows: np.ndarray, test: np.ndarray) -> Fold:
    """A fold from rows [N, D + 1] and the mask [N] of its test rows; a column that never changes is only centred."""
    training = rows[~test]
    mean, varies = training.mean(axis=0), np.ptp(training, axis=0) > 0
    scale = np.where(varies, training.std(axis=0), 1.0)
    scaled = (rows - mean) / scale
    x, y = scaled[:, :-1], scaled[:, -1]
    return Fold(x[~test], y[~test], x[test], y[test], float(mean[-1]), float(scale[-1]))


def _table(root: Path, name: str, source: str, sha256: str) -> np.ndarray:
    """The numbers of one file in the data root, downloaded where it is missing."""
    archive = Archive(f"{FOLDER}/{name}", f"{_URL}/{source}", sha256, 2)
    content = fetch(archive, root, wanted_for=archive.name).read_bytes()
    try:
        return np.loadtxt(io.BytesIO(gzip.decompress(content)), delimiter=",", ndmin=2)
    except DAMAGE as error:
        raise DataError(f"expected numbers in {archive.name}, got {error}; fetch it again") from error
