"""Omniglot and EMNIST: splits, and the conversion of the public archives, rebuilt here from the stored originals."""

import gzip
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import data_file
from PIL import Image

from fewshot.tasks import DataError, check_task_size, emnist, load, omniglot
from fewshot.tasks.files import check_digest


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(data_file("omniglot.npz")) as file:
        return dict(file)


@pytest.fixture(scope="module")
def splits():
    data_file("omniglot.npz")
    return load("omniglot")


def test_omniglot_has_the_splits_of_the_design(splits, stored):
    assert splits.image_shape == (28, 28, 1)
    sizes = [dataset.classes for dataset in (splits.train, splits.validation, splits.test)]
    assert sizes == [853 * 4, 111, 659]
    assert [dataset.rotations for dataset in (splits.train, splits.validation, splits.test)] == [4, 1, 1]
    alphabets = {split: {name.split("/")[0] for name in names} for split, names in splits.class_names.items()}
    assert [len(alphabets[split]) for split in ("train", "validation", "test")] == [25, 5, 20]
    assert alphabets["validation"] == set(omniglot.VALIDATION_ALPHABETS)
    assert not alphabets["train"] & alphabets["validation"] and not alphabets["test"] & alphabets["train"]
    assert alphabets["test"] == set(stored["alphabet_names"][30:])


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_class_holds_the_20_drawings_of_its_character(splits, stored, split):
    dataset, names = getattr(splits, split), splits.class_names[split]
    assert len(names) == dataset.classes and dataset.smallest == 20
    upright = np.asarray(dataset.images)
    character = {name: number for number, name in enumerate(stored["character_names"])}
    for k in range(0, dataset.classes, 37):
        name, *turn = names[k].split(" turned ")
        assert turn == ([str(90 * (k % 4))] if dataset.rotations == 4 and k % 4 else [])
        rows = np.asarray(dataset.index[k]) % len(upright)
        drawings = stored["images"][stored["character"] == character[name]]
        np.testing.assert_array_equal(upright[rows][..., 0], drawings)


def test_omniglot_to_emnist_trains_without_latin_and_splits_by_parity(stored):
    path = data_file("emnist.npz")
    splits = load("omniglot-emnist")
    assert [dataset.classes for dataset in (splits.train, splits.validation, splits.test)] == [1597, 31, 31]
    assert splits.train.rotations == 1
    assert not any(name.startswith("Latin/") for name in splits.class_names["train"])
    assert "".join(splits.class_names["validation"]) == "02468ACEGIKMOQSUWYacegikmoqsuwy"
    assert "".join(splits.class_names["test"]) == "13579BDFHJLNPRTVXZbdfhjlnprtvxz"
    with np.load(path) as file:
        images, labels = file["images"], file["labels"]
        assert [str(name) for name in file["characters"]] == list(emnist.CHARACTERS)
    for dataset, names in ((splits.validation, splits.class_names["validation"]), (splits.test, "13579B")):
        for k in (0, 5):
            rows = np.asarray(dataset.index[k])[: int(dataset.counts[k])]
            expected = images[labels == emnist.CHARACTERS.index(names[k])]
            np.testing.assert_array_equal(np.asarray(dataset.images)[rows][..., 0], expected)
    assert splits.test.smallest == 317
    with pytest.raises(DataError, match="got 20 in the smallest"):
        check_task_size(splits.train, 5, 5, 16)


def test_the_stored_files_are_the_reference(stored):
    check_digest("Omniglot", stored["images"], omniglot.IMAGES_SHA256)
    with np.load(data_file("emnist.npz")) as file:
        check_digest("EMNIST", file["images"], emnist.IMAGES_SHA256)


def build_omniglot_zips(folder: Path, alphabets: list[int]) -> list[Path]:
    """The two public zip files, for some alphabets: 105x105 one-bit PNGs, ink dark, in a shuffled order."""
    with np.load(data_file("omniglot105.npz")) as file:
        originals = dict(file)
    paths = [folder / "images_background.zip", folder / "images_evaluation.zip"]
    rows = np.flatnonzero(np.isin(originals["alphabet"], alphabets))
    rows = np.random.default_rng(0).permutation(rows)
    for subset, path in enumerate(paths):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"images_{subset}/", b"")
            archive.writestr(f"__MACOSX/images_{subset}/._x.png", b"no image")
            for row in rows[originals["subset"][rows] == subset]:
                ink = np.unpackbits(originals["bits"][row])[: 105 * 105].reshape(105, 105).astype(bool)
                content = io.BytesIO()
                Image.fromarray(~ink).save(content, "png")
                character, drawer = originals["character"][row], originals["drawer"][row]
                name = f"{originals['character_names'][character]}/{character + 1:04d}_{drawer:02d}.png"
                archive.writestr(f"images_{('background', 'evaluation')[subset]}/{name}", content.getvalue())
    return paths


@pytest.mark.long
def test_converted_archives_equal_the_stored_file(stored, tmp_path):
    alphabets = [0, 21, 25, 32, 49]
    converted = omniglot.convert(*build_omniglot_zips(tmp_path, alphabets))
    rows = np.isin(stored["alphabet"], alphabets)
    np.testing.assert_array_equal(converted["images"], stored["images"][rows])
    for name in ("drawer", "subset"):
        np.testing.assert_array_equal(converted[name], stored[name][rows])
    for number, names in (("alphabet", "alphabet_names"), ("character", "character_names")):
        found, expected = converted[names][converted[number]], stored[names][stored[number][rows]]
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        converted["alphabet_names"][converted["character_alphabet"]][converted["character"]],
        converted["alphabet_names"][converted["alphabet"]],
    )


@pytest.mark.slow
def test_the_whole_conversion_is_the_stored_file(stored, tmp_path, monkeypatch):
    paths = build_omniglot_zips(tmp_path, list(range(50)))
    converted = omniglot._convert_checked(*paths)
    assert set(converted) == set(stored)
    for name, array in stored.items():
        np.testing.assert_array_equal(converted[name], array, err_msg=name)
        assert converted[name].dtype == array.dtype


def build_emnist_zip(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """NIST's archive: gzipped IDX files with transposed images."""
    path = folder / "gzip.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("gzip/emnist-byclass-mapping.txt", b"0 48")
        for kind, array in (("images-idx3", images.transpose(0, 2, 1)), ("labels-idx1", labels)):
            sizes = np.array(array.shape, ">i4").tobytes()
            content = b"\0\0\x08" + bytes([array.ndim]) + sizes + array.tobytes()
            archive.writestr(f"gzip/emnist-byclass-test-{kind}-ubyte.gz", gzip.compress(content, 1))
            archive.writestr(f"gzip/emnist-byclass-train-{kind}-ubyte.gz", b"not read")
    return path


def test_converted_emnist_equals_the_stored_file(tmp_path):
    with np.load(data_file("emnist.npz")) as file:
        stored = dict(file)
    # Images beyond the first 400 of a full class follow, and must be left out.
    images = np.concatenate([stored["images"], np.full((50, 28, 28), 7, np.uint8)])
    labels = np.concatenate([stored["labels"], np.zeros(50, np.uint8)])
    converted = emnist.convert(build_emnist_zip(tmp_path, images, labels))
    assert set(converted) == set(stored)
    for name in ("images", "labels", "characters", "class_split_dkt"):
        np.testing.assert_array_equal(converted[name], stored[name])
        assert converted[name].dtype == stored[name].dtype
    np.testing.assert_array_equal(converted["byclass_test_index"], np.arange(len(stored["images"])))


def test_foreign_archives_are_named(tmp_path):
    path = tmp_path / "foreign.zip"
    path.write_bytes(b"no zip")
    for convert in (lambda: omniglot.convert(path, path), lambda: emnist.convert(path)):
        with pytest.raises(DataError, match=r"foreign\.zip, got File is not a zip file; fetch it again"):
            convert()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"")
    with pytest.raises(DataError, match="no image folders"):
        omniglot.convert(path, path)
    with pytest.raises(DataError, match="no emnist-byclass-test-images"):
        emnist.convert(path)


def test_a_missing_file_names_what_to_fetch(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWSHOT_DOWNLOAD", "0")
    for name in ("omniglot", "omniglot-emnist"):
        with pytest.raises(DataError, match=r"omniglot\.npz.*images_background\.zip") as error:
            load(name, tmp_path)
        assert "\n" not in str(error.value)
