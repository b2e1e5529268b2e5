"""Damaged pictures and arrays of a user: one line for each that cannot be read, and never a traceback."""

import io
import warnings

import numpy as np
import pytest
from PIL import Image

from fewshot.tasks import DataError
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.files import read_npz
from fewshot.tasks.images import FORMATS, load_labelled, load_unlabelled, whole

SHAPE = (8, 8, 3)


def damaged(rng, content):
    """Bytes changed, cut off, repeated or put in: mostly near the beginning, where headers are."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        place = int(rng.integers(min(len(content), 200) if rng.random() < 0.7 else len(content)))
        kind = rng.integers(5)
        if kind == 0:
            del content[place + 1 :]
        elif kind == 1:
            content[place:place] = content[place : place + int(rng.integers(1, 40))]
        elif kind == 2:
            content[place:place] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            content[place : place + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"((((", b"-1e9"])
        else:
            content[place] = rng.integers(256)
    return bytes(content)


def pictures():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    for name in FORMATS:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name)
        yield name, file.getvalue()


def packed(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def arrays():
    """Stored without compression or check of what is inside, so that damage reaches the arrays themselves."""
    yield "images.npz", packed(images=np.zeros((3, 4, 4), np.uint8), labels=np.array(["a", "b", "a"]))
    yield "features.npz", packed(features=np.ones((3, 5), np.float32), labels=np.array([1, 2, 1]))


READERS = (
    lambda path: load_labelled(path, SHAPE, whole),
    lambda path: load_unlabelled(path, SHAPE, whole),
    lambda path: load_features(path, 5, labelled=True),
    lambda path: read_npz(path, ("images", "labels")),
)


def tracebacks(path, content, readers):
    """What reading it raises beside one-line errors, and how many of those there were."""
    path.write_bytes(content)
    found, refused = [], 0
    for read in readers:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow about damage that it reads over
                read(path)
        except DataError as error:
            refused += 1
            if len(str(error).splitlines()) > 1:
                found.append((path.name, content, str(error)))
        except Exception as error:
            found.append((path.name, content, repr(error)))
    return found, refused


def counted(tmp_path, rounds, seed):
    rng, found, refused = np.random.default_rng(seed), [], 0
    for _ in range(rounds):
        for name, content in pictures():
            more, count = tracebacks(tmp_path / f"{name}.png", damaged(rng, content), READERS[1:2])
            found, refused = found + more, refused + count
        for name, content in arrays():
            more, count = tracebacks(tmp_path / name, damaged(rng, content), READERS)
            found, refused = found + more, refused + count
    return found, refused


def repacked(rng, content):
    """An .npz file whose arrays are damaged and whose check sums are right."""
    import zipfile

    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, damaged(rng, old.read(name)) if rng.random() < 0.7 else old.read(name))
    return file.getvalue()


def repacked_counted(tmp_path, rounds, seed):
    rng, found, refused = np.random.default_rng(seed), [], 0
    for _ in range(rounds):
        for name, content in arrays():
            more, count = tracebacks(tmp_path / name, repacked(rng, content), READERS)
            found, refused = found + more, refused + count
    return found, refused


def test_damaged_files_are_refused_in_one_line(tmp_path):
    found, refused = counted(tmp_path, 30, 0)
    assert found == [] and refused > 200


def test_damaged_arrays_with_the_right_check_sums_are_refused_in_one_line(tmp_path):
    found, refused = repacked_counted(tmp_path, 60, 1)
    assert found == [] and refused > 200


@pytest.mark.slow
def test_many_damaged_files_are_refused_in_one_line(tmp_path):
    assert counted(tmp_path, 3000, 2)[0] == []
    assert repacked_counted(tmp_path, 5000, 3)[0] == []
