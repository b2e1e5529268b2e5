"""Photographs, folders and features of a user: sizes, splits, the cache, the public archives, and what is refused."""

import errno
import io
import os
import tarfile
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import data_file
from PIL import Image
from scipy.io import savemat

from fewshot.tasks import (
    CROPS,
    PHOTOGRAPHS,
    DataError,
    birds,
    flowers102,
    load,
    mini_imagenet,
    photographs,
    preparation,
    sample_task,
    tinyimagenet,
)
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.files import read_npz, write_npz
from fewshot.tasks.images import load_labelled, load_unlabelled, picture_of, whole
from fewshot.tasks.photographs import SPLITS, alternate, centre_square, split_name, stretched_centre


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "bayesian-few-shot"


def picture(number: int, size=(24, 18), mode: str = "RGB") -> Image.Image:
    """A flat image in a colour of its own."""
    return Image.new("RGB", size, (number % 251, 255 - number % 251, 7 * number % 251)).convert(mode)


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


def save(path: Path, number: int, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(number, **options).save(path)


def textured(size) -> Image.Image:
    """A picture that shows how it was cropped and resized."""
    columns, rows = np.meshgrid(*map(np.arange, size))
    return Image.fromarray(np.stack([3 * columns, 2 * rows, columns * rows // 40], -1).astype(np.uint8))


def as_predicted(path: Path, name: str, side: int) -> np.ndarray:
    """The image that predict.py makes of a file for a run of a data set."""
    return load_unlabelled(path, (side, side, 3), preparation(name)).pixels[0]


def sizes(splits) -> list[int]:
    return [getattr(splits, split).classes for split in SPLITS]


def refused(name: str, root: Path | None, *words: str) -> None:
    with pytest.raises(DataError) as error:
        load(name, root)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


# Sizes and crops


def test_a_name_may_end_in_a_size():
    assert split_name("flowers102-32") == ("flowers102", 32)
    assert split_name("mini-imagenet") == ("mini-imagenet", None)
    with pytest.raises(DataError, match="16 to 224"):
        split_name("flowers102-4")


def test_the_middle_square_is_cut_out_and_resized():
    wide = np.zeros((10, 20, 3), np.uint8)
    wide[:] = np.arange(20)[:, None] * 10
    np.testing.assert_array_equal(centre_square(Image.fromarray(wide), 10), wide[:, 5:15])
    tall = Image.fromarray(wide.transpose(1, 0, 2))
    np.testing.assert_array_equal(centre_square(tall, 10), wide[:, 5:15].transpose(1, 0, 2))
    halved = centre_square(Image.fromarray(wide), 5)[0, :, 0].astype(float)
    np.testing.assert_allclose(np.diff(halved[1:-1]), 20, atol=1)  # a ramp stays a ramp
    assert centre_square(Image.new("L", (9, 7), 80), 16).tolist() == [[[80] * 3] * 16] * 16


def test_the_papers_images_are_stretched_to_1_15_and_cut():
    ramp = np.zeros((50, 200, 3), np.uint8)
    ramp[:] = np.arange(200)[:, None]
    cut = stretched_centre(Image.fromarray(ramp), 84)
    assert cut.shape == (84, 84, 3)
    # 96 columns cover 200 old ones; column j of the 84 is column j + 6, whose centre is at (j + 6.5) 200 / 96 - 0.5
    np.testing.assert_allclose(cut[3, :, 0], (np.arange(84) + 6.5) * 200 / 96 - 0.5, atol=1.5)


def test_new_pictures_are_treated_as_those_of_the_data_set(tmp_path):
    """Those of flowers by the archive's way; of the others where their folders are read, below."""
    assert CROPS.keys() == PHOTOGRAPHS.keys()
    for name in ("glyphs", "omniglot", "omniglot-emnist", "folder:a", "folder-32:a", "embeddings:a"):
        assert preparation(name, find_ink=False) is whole
    content, path = encoded(textured((80, 50))), tmp_path / "photograph.jpg"
    path.write_bytes(content)
    with tarfile.open(tmp_path / "102flowers.tgz", "w:gz") as archive:
        for number in range(1, 5):
            member = tarfile.TarInfo(f"jpg/image_{number:05d}.jpg")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[1, 2, 3, 4]])})
    savemat(tmp_path / "setid.mat", {"trnid": [[1]], "valid": [[2]], "tstid": [[3, 4]]})
    arrays = flowers102.convert(*(tmp_path / archive.name for archive in flowers102.ARCHIVES))
    write_npz(tmp_path / flowers102.FILE, {**arrays, "class_names": arrays["class_names"][:4]})
    for name, side in (("flowers102", 84), ("flowers102-32", 32)):
        np.testing.assert_array_equal(load(name, tmp_path).test.images[0], as_predicted(path, name, side))
    small = as_predicted(path, "flowers102-32", 32)
    assert np.abs(small - whole(picture_of(np.asarray(Image.open(path))), (32, 32, 3)).astype(float)).max() > 50
    np.savez(tmp_path / "prepared.npz", images=small[None])
    np.testing.assert_array_equal(as_predicted(tmp_path / "prepared.npz", "flowers102-32", 32), small)


def test_classes_are_divided_by_their_number():
    assert alternate(9).tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0]
    assert np.bincount(alternate(200)).tolist() == [100, 50, 50]


# Flowers 102


@pytest.fixture
def flowers(tmp_path) -> Path:
    """Eight classes of three flat images, one of them grey."""
    jpegs = [encoded(picture(10 * i, (84, 84), "L" if i == 4 else "RGB")) for i in range(24)]
    arrays = {
        "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
        "offsets": np.cumsum([0, *map(len, jpegs)]),
        "labels": np.repeat(np.arange(8, dtype=np.uint8), 3)[::-1].copy(),
        "class_names": np.array([f"flower {k}" for k in range(8)]),
    }
    write_npz(tmp_path / flowers102.FILE, arrays)
    return tmp_path


def test_flowers_come_at_any_size_in_three_splits(flowers):
    splits = load("flowers102-16", flowers)
    assert splits.name == "flowers102-16" and splits.image_shape == (16, 16, 3) and sizes(splits) == [4, 2, 2]
    assert splits.class_names["train"] == ("flower 0", "flower 2", "flower 4", "flower 6")
    assert splits.class_names["validation"] == ("flower 1", "flower 5")
    own = np.asarray(splits.test.images)[np.asarray(splits.test.index[0])]  # class 3: images 12, 13, 14
    for image, number in zip(own, (12, 13, 14), strict=True):
        np.testing.assert_allclose(image.mean((0, 1)), np.asarray(picture(10 * number))[0, 0], atol=3)
    assert load("flowers102", flowers).image_shape == (84, 84, 3)


def test_decoded_images_are_kept_until_their_file_changes(flowers, cache, monkeypatch, capsys):
    before = np.asarray(load("flowers102-16", flowers).train.images)
    assert "decoding 24 images" in capsys.readouterr().err
    kept = cache / f"flowers102-16-{photographs.VERSION}.npz"
    assert kept.exists()
    np.testing.assert_array_equal(load("flowers102-16", flowers).train.images, before)
    assert capsys.readouterr().err == ""
    kept.write_bytes(kept.read_bytes()[:500])
    np.testing.assert_array_equal(load("flowers102-16", flowers).train.images, before)
    assert "decoding" in capsys.readouterr().err
    arrays = read_npz(flowers / flowers102.FILE, ("jpeg", "offsets", "labels", "class_names"))
    black = np.frombuffer(24 * encoded(Image.new("RGB", (84, 84))), np.uint8)
    write_npz(flowers / flowers102.FILE, {**arrays, "jpeg": black, "offsets": np.arange(25) * (len(black) // 24)})
    assert (np.asarray(load("flowers102-16", flowers).train.images) == 0).all()
    cache.rename(cache.with_name("elsewhere"))
    cache.write_bytes(b"a file where the folder should be")
    load("flowers102-16", flowers)
    assert "decoded again next time" in capsys.readouterr().err


def test_the_archives_of_flowers_are_converted(tmp_path):
    with tarfile.open(tmp_path / "102flowers.tgz", "w:gz") as archive:
        for number in (3, 1, 2):  # not in order
            content = encoded(picture(40 * number, (200, 120)))
            member = tarfile.TarInfo(f"jpg/image_{number:05d}.jpg")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.array([[2, 1, 2]])})
    savemat(tmp_path / "setid.mat", {"trnid": [[3]], "valid": [[1]], "tstid": [[2]]})
    paths = [tmp_path / archive.name for archive in flowers102.ARCHIVES]
    arrays = flowers102.convert(*paths)
    assert arrays["labels"].tolist() == [1, 0, 1] and arrays["official_split"].tolist() == [1, 2, 0]
    for number, content in enumerate(photographs.packed_jpegs(arrays["jpeg"], arrays["offsets"]), 1):
        with Image.open(io.BytesIO(content)) as image:
            assert image.size == (84, 84)
            np.testing.assert_allclose(np.asarray(image).mean((0, 1)), np.asarray(picture(40 * number))[0, 0], atol=3)
    paths[0].write_bytes(b"no archive")
    with pytest.raises(DataError, match="expected the archives of Flowers 102"):
        flowers102.convert(*paths)


def test_missing_files_name_their_source(tmp_path):
    refused("flowers102", tmp_path, "flowers102_84.npz", "FEWSHOT_DOWNLOAD=0", flowers102.ARCHIVES[0].url)
    refused("tinyimagenet", tmp_path, "tinyimagenet64.npz", tinyimagenet.ARCHIVES[0].url)


def test_the_real_flowers_have_102_classes_in_three_splits():
    arrays = read_npz(data_file(flowers102.FILE), ("labels", "class_names", "offsets"))
    assert tuple(arrays["class_names"]) == flowers102.CLASS_NAMES
    counts = np.bincount(arrays["labels"])
    assert (len(counts), counts.sum(), counts.min(), counts.max()) == (102, 8189, 40, 258)
    assert len(arrays["offsets"]) == 8190
    assert np.bincount(alternate(102)).tolist() == [51, 26, 25]


# Tiny ImageNet


def test_the_splits_of_tiny_imagenet_are_those_of_its_file():
    arrays = read_npz(data_file(tinyimagenet.FILE), ("wnids", "class_split_tiered", "labels"))
    position = {"train": 0, "val": 1, "test": 2, "": 3}
    assert tinyimagenet.splits_of(arrays["wnids"]).tolist() == [position[str(s)] for s in arrays["class_split_tiered"]]
    assert (np.bincount(arrays["labels"]) == 120).all()
    listed = [set(wnids.split()) for wnids in tinyimagenet.TIERED.values()]
    assert [len(wnids) for wnids in listed] == [61, 17, 45] and len(set.union(*listed)) == 123


def test_the_archive_of_tiny_imagenet_is_converted(tmp_path, monkeypatch):
    wnids = [f"n{tinyimagenet.TIERED[split].split()[0]}" for split in SPLITS]
    classes = [*wnids, "n99999999"]
    path = tmp_path / "tiny.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("t/words.txt", "".join(f"{wnid}\tname of {wnid}\n" for wnid in classes))
        for k, wnid in enumerate(classes):
            for number in (10, 2, 0, 1):
                mode = "L" if number == 1 else "RGB"
                own = textured((64, 64)) if (k, number) == (2, 2) else picture(50 * k + number, (64, 64), mode)
                content = encoded(own)
                archive.writestr(f"t/train/{wnid}/images/{wnid}_{number}.JPEG", content)
        archive.writestr("t/val/images/val_0.JPEG", b"")
    monkeypatch.setattr(tinyimagenet, "IMAGES_PER_CLASS", 3)
    arrays = tinyimagenet.convert(path)
    assert arrays["index_in_class"].tolist() == [0, 1, 2] * 4 and arrays["wnids"].tolist() == sorted(classes)
    write_npz(tmp_path / tinyimagenet.FILE, arrays)
    splits = load("tinyimagenet", tmp_path)
    assert splits.image_shape == (64, 64, 3) and sizes(splits) == [1, 1, 1]
    assert [splits.class_names[split] for split in SPLITS] == [(f"name of {wnid}",) for wnid in wnids]
    for k, split in enumerate(SPLITS):
        dataset = getattr(splits, split)
        first = np.asarray(dataset.images)[np.asarray(dataset.index[0, 0])]
        np.testing.assert_allclose(first.mean((0, 1)), np.asarray(picture(50 * k))[0, 0], atol=3)
    (tmp_path / "64.jpg").write_bytes(encoded(textured((64, 64))))
    for name, side in (("tinyimagenet", 64), ("tinyimagenet-32", 32), ("tinyimagenet-84", 84)):
        expected = load(name, tmp_path).test.images[2]
        np.testing.assert_array_equal(as_predicted(tmp_path / "64.jpg", name, side), expected)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="expected a zip file of Tiny ImageNet"):
        tinyimagenet.convert(path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected"), [("flowers102-16", [51, 26, 25]), ("tinyimagenet-16", [61, 17, 45])])
def test_the_real_photographs_are_decoded_and_in_one_split_each(name, expected):
    data_file(flowers102.FILE if "flowers" in name else tinyimagenet.FILE)
    splits = load(name)
    assert sizes(splits) == expected and splits.image_shape == (16, 16, 3)
    seen = [{image.tobytes() for image in np.asarray(getattr(splits, split).images)} for split in SPLITS]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])
    assert len({name for names in splits.class_names.values() for name in names}) == sum(expected)


# CUB and mini-ImageNet


def test_cub_is_read_from_the_folders_of_its_archive(tmp_path):
    refused("cub", tmp_path, "CUB_200_2011/images", birds.ARCHIVE.url, birds.ARCHIVE.sha256, "tar -xzf")
    images = tmp_path / "CUB_200_2011" / "images"
    for k in range(200):
        save(images / f"{k + 1:03d}.Bird_{k}" / f"Bird_{k}_0001.jpg", k)
    textured((50, 40)).save(images / "004.Bird_3" / "Bird_3_0001.jpg")
    (images / "001.Bird_0" / "._Bird_0_0001.jpg").write_bytes(b"what some systems leave behind")
    splits = load("cub-16", tmp_path)
    assert splits.name == "cub-16" and sizes(splits) == [100, 50, 50] and splits.image_shape == (16, 16, 3)
    assert splits.class_names["test"][:2] == ("004.Bird_3", "008.Bird_7")
    assert splits.class_names["validation"][0] == "002.Bird_1"
    np.testing.assert_allclose(np.asarray(splits.train.images)[1].mean((0, 1)), [2, 253, 14], atol=4)
    predicted = as_predicted(images / "004.Bird_3" / "Bird_3_0001.jpg", "cub-16", 16)
    np.testing.assert_array_equal(splits.test.images[0], predicted)
    (images / "201.Bird_200").mkdir()
    refused("cub", tmp_path, "expected 200 class folders", "got 201")


def test_mini_imagenet_is_read_from_split_folders_or_from_lists(tmp_path):
    refused("mini-imagenet", tmp_path, "train.csv", "train/CLASS/*.jpg")
    root = tmp_path / "mini-imagenet"
    numbers = iter(range(100))
    rows = [(part, next(numbers)) for part, count in mini_imagenet.CLASSES.items() for _ in range(count)]
    for part, k in rows:
        save(root / part / f"n{k:08d}" / "0.jpg", k)
    first = root / "test" / "n00000080" / "0.jpg"
    textured((50, 40)).save(first)
    folders = load("mini-imagenet-16", tmp_path)
    assert sizes(folders) == [64, 16, 20] and folders.class_names["test"][0] == "n00000080"
    for _, k in rows:
        save(root / "images" / f"n{k:08d}00000001.jpg", k)
    (root / "images" / "n0000008000000001.jpg").write_bytes(first.read_bytes())
    for part in mini_imagenet.CLASSES:
        lines = [f"n{k:08d}00000001.jpg,n{k:08d}" for which, k in rows if which == part]
        (root / f"{part}.csv").write_text("\n".join(["filename,label", *lines]) + "\n")
    lists = load("mini-imagenet-16", tmp_path)
    assert sizes(lists) == [64, 16, 20] and lists.class_names == folders.class_names
    for split in SPLITS:
        np.testing.assert_array_equal(getattr(lists, split).images, getattr(folders, split).images)
    np.testing.assert_array_equal(folders.test.images[0], as_predicted(first, "mini-imagenet-16", 16))
    (root / "images" / "n0000000500000001.jpg").unlink()
    refused("mini-imagenet", tmp_path, "n0000000500000001.jpg", "1 missing")
    (root / "val.csv").write_text("file;class\n")
    refused("mini-imagenet", tmp_path, "filename and label", "val.csv")
    (root / "val.csv").write_text("filename,label\n")
    refused("mini-imagenet", tmp_path, "expected 64 train, 16 val, 20 test classes", "got 64, 0, 20")


def test_from_mini_imagenet_to_cub_only_the_first_trains(tmp_path):
    refused("mini-imagenet-cub", tmp_path, "CUB_200_2011/images", "tar -xzf")
    for k in range(200):
        save(tmp_path / "CUB_200_2011" / "images" / f"{k + 1:03d}.Bird_{k}" / "0001.jpg", k)
    refused("mini-imagenet-cub", tmp_path, "train.csv", "train/CLASS/*.jpg")
    numbers = iter(range(100))
    for part, count in mini_imagenet.CLASSES.items():
        for _ in range(count):
            save(tmp_path / "mini-imagenet" / part / f"n{next(numbers):08d}" / "0.jpg", 7)
    splits, birds_alone, known = (
        load(f"{name}-16", tmp_path) for name in ("mini-imagenet-cub", "cub", "mini-imagenet")
    )
    assert splits.name == "mini-imagenet-cub-16" and sizes(splits) == [64, 50, 50]
    assert splits.image_shape == (16, 16, 3) and splits.class_names["train"] == known.class_names["train"]
    for part, alone in (("train", known), ("validation", birds_alone), ("test", birds_alone)):
        np.testing.assert_array_equal(getattr(splits, part).images, getattr(alone, part).images)
        assert splits.class_names[part] == alone.class_names[part]


# Folders and features of a user


def test_a_folder_of_class_folders_is_divided_60_20_20(tmp_path):
    for k in range(10):
        for number in range(2):
            save(tmp_path / f"class {k}" / f"{number}.png", 20 * k + number)
    (tmp_path / ".hidden").mkdir()
    splits = load(f"folder-16:{tmp_path}")
    assert sizes(splits) == [6, 2, 2] and splits.image_shape == (16, 16, 3)
    assert splits.class_names["validation"] == ("class 3", "class 8")
    assert splits.class_names["test"] == ("class 4", "class 9")
    np.testing.assert_array_equal(splits.test.images[0, 0, 0], np.asarray(picture(80))[0, 0])
    assert load(f"folder:{tmp_path}").image_shape == (84, 84, 3)


def test_a_folder_may_hold_its_own_splits_and_grey_images(tmp_path):
    for split, classes in zip(SPLITS, ("abc", "de", "fg"), strict=True):
        for name in classes:
            save(tmp_path / split / name / "0.png", ord(name), mode="L")
    splits = load(f"folder-16:{tmp_path}")
    assert sizes(splits) == [3, 2, 2] and splits.image_shape == (16, 16, 1)
    assert splits.class_names == {"train": ("a", "b", "c"), "validation": ("d", "e"), "test": ("f", "g")}
    save(tmp_path / "train" / "a" / "1.png", 3)  # one in colour, and all are RGB
    assert load(f"folder-16:{tmp_path}").image_shape == (16, 16, 3)


def test_folders_that_cannot_be_used_are_refused(tmp_path):
    refused(f"folder:{tmp_path / 'nowhere'}", None, "nowhere", "subfolder of images for each class")
    for split in SPLITS:
        for name in ("a", split):
            save(tmp_path / ".same" / split / name / "0.png", 0)
    refused(
        f"folder:{tmp_path / '.same'}", None, "expected other classes in each of train, validation, test", "got a in"
    )
    for k in range(10):
        refused(f"folder:{tmp_path}", None, "expected 10 class folders or more", f"got {k}", "train, validation, test")
        save(tmp_path / f"{k}" / "0.png", k)
    (tmp_path / "empty").mkdir()
    refused(f"folder:{tmp_path}", None, "expected images in every class", "empty")
    (tmp_path / "empty" / "0.png").write_bytes(b"no image")
    refused(f"folder:{tmp_path}", None, "expected an image in", "empty")


def test_features_stand_in_for_images(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"{part}_features": rng.normal(size=(12, 5)) for part in SPLITS}
    trees = {part: [f"{tree} {part}" for tree in ("oak", "ash", "elm")] for part in SPLITS}
    arrays |= {f"{part}_labels": np.repeat(trees[part], 4) for part in SPLITS}
    path = tmp_path / "features.npz"
    np.savez(path, **arrays)
    splits = load(f"embeddings:{path}")
    assert splits.image_shape == (1, 1, 5) and sizes(splits) == [3, 3, 3]
    assert splits.class_names["test"] == ("ash test", "elm test", "oak test")
    task = jax.jit(lambda key: sample_task(key, splits.test, way=2, shot=1, query=2))(jax.random.key(0))
    assert task.x_query.shape == (4, 1, 1, 5) and task.x_query.dtype == np.float32
    own = np.asarray(splits.train.images)[np.asarray(splits.train.index[0])][:, 0, 0]
    np.testing.assert_allclose(own, arrays["train_features"][4:8], rtol=1e-6)
    np.savez(tmp_path / "own.npz", features=arrays["test_features"][:3], labels=[7, 7, 8])
    given, unlabelled = (load_features(tmp_path / "own.npz", 5, labelled) for labelled in (True, False))
    np.testing.assert_allclose(given.pixels[:, 0, 0], arrays["test_features"][:3], rtol=1e-6)
    assert given.labels == ["7", "7", "8"] and unlabelled.labels == [""] * 3
    for file, width, message in (
        ("own.npz", 6, r"expected features \[N, 6\] and labels \[N\] in .*, got \(3, 5\)"),
        (".", 5, r"expected an .npz file with features \[N, 5\], as the run was trained on"),
        ("features.npz", 5, "expected the arrays features, labels in .*, got train_features"),
    ):
        with pytest.raises(DataError, match=message):
            load_features(tmp_path / file, width, labelled=True)
    for changed, *words in (
        ({"test_features": arrays["test_features"][:, :4]}, "features of one size"),
        ({"test_labels": arrays["test_labels"][:3]}, "(12, 5) and (3,)"),
        ({"train_features": np.full((12, 5), np.nan)}, "finite numbers in train_features"),
        ({"test_labels": np.array(trees["test"] * 3 + trees["train"])}, "got 'ash train' in train and test"),
    ):
        np.savez(path, **{**arrays, **changed})
        refused(f"embeddings:{path}", None, *words)
    np.savez(path, **arrays | {f"{part}_labels": np.repeat([0, 1, 2], 4) for part in SPLITS})
    assert load(f"embeddings:{path}").class_names["test"] == ("0", "1", "2")  # numbers are those of their split
    np.savez(path, train_features=arrays["train_features"])
    refused(f"embeddings:{path}", None, "train_labels")
    refused(f"embeddings:{tmp_path / 'none.npz'}", None, "expected an .npz file of features")


@pytest.mark.parametrize("name", ["glyphs-28", "folder", "folder:", "cub:x", "flowers"])
def test_other_names_are_refused_with_those_that_there_are(name):
    refused(name, None, f"got {name!r}", "glyphs", "flowers102", "folder:PATH", "embeddings:PATH")


def test_programs_are_not_started_for_what_is_named_a_picture(tmp_path, monkeypatch):
    """A PostScript file is run by Ghostscript where Pillow may choose the format."""
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    (tmp_path / "a.png").write_bytes(script)
    for read in (
        lambda: load_unlabelled(tmp_path / "a.png", (8, 8, 1), whole),
        lambda: photographs.decode(script, 8, centre_square, "a.png"),
    ):
        with pytest.raises(DataError, match=r"expected an image in .*a.png, got one that cannot be read"):
            read()
    assert not started


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_safe_formats_are_read_whatever_their_suffix(name, tmp_path):
    picture(7, (9, 9)).save(tmp_path / "a.png", name)
    assert load_unlabelled(tmp_path / "a.png", (9, 9, 3), whole).pixels.shape == (1, 9, 9, 3)


@pytest.mark.usefixtures("no_waiting")
def test_links_to_each_other_are_followed_once_and_pipes_never(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        picture(1).save(folder / f"{folder.name}.png")
    (one / "a").symlink_to(two)
    (two / "b").symlink_to(one)
    (one / "c").symlink_to(two)  # another way to the same
    os.mkfifo(one / "pipe.png")
    (one / "device.png").symlink_to("/dev/zero")
    (one / "to a pipe.png").symlink_to(one / "pipe.png")
    names = load_unlabelled(one, (8, 8, 3), whole).names
    assert names == [str(one / "a" / "two.png"), str(one / "one.png")]
    for name in ("pipe.png", "device.png", "pipe.npz"):
        (tmp_path / "pipe.npz").exists() or os.mkfifo(tmp_path / "pipe.npz")
        with pytest.raises(DataError):
            load_unlabelled((tmp_path if name.endswith("npz") else one) / name, (8, 8, 3), whole)
    with pytest.raises(DataError, match="no plain file"):
        photographs.decode(one / "pipe.png", 8, centre_square, "a.png")


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"images": np.zeros((2, 4, 4), np.complex64), "labels": ["a", "b"]}, "type '<c8', expected numbers or words"),
        ({"images": np.zeros((2, 4, 4), "M8[D]"), "labels": ["a", "b"]}, r"type '<M8\[D\]'"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": [1.0, np.nan]}, "got labels that are NaN or infinite"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros((2, 1))}, r"labels of \(2, 1\)"),
        ({"images": np.uint8(3), "labels": np.uint8(3)}, r"got shape \(\)|labels of"),
        ({"images": np.zeros((2, 0, 4), np.float32), "labels": ["a", "b"]}, r"got shape \(2, 0, 4\)"),
        ({"images": np.zeros((2, 4, 4), np.int64), "labels": ["a", "b"]}, "got int64"),
        ({"images": np.array([["a", "b"]] * 2)[None], "labels": ["a"]}, "got <U1"),
    ],
)
def test_arrays_that_are_no_images_are_refused_in_one_line(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        load_labelled(tmp_path / "a.npz", (4, 4, 1), whole)
    assert "a.npz" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"features": np.full((2, 3), 1e300), "labels": ["a", "b"]}, "expected finite numbers"),
        ({"features": np.array([["x"] * 3] * 2), "labels": ["a", "b"]}, "expected numbers in features"),
        ({"features": np.zeros((2, 3)), "labels": [np.nan, 1.0]}, "got labels that are NaN"),
        ({"features": np.float32(1.0), "labels": np.float32(1.0)}, r"got \(\) and \(\)"),
    ],
)
def test_features_that_are_none_are_refused_in_one_line(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        load_features(tmp_path / "a.npz", 3, labelled=True)
    assert "a.npz" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"filename,label\na.jpg\n", "in row 2 .*, got 'a.jpg', None"),
        (b"filename,label\n../../a.jpg,a\n", "in row 2 .*, got '../../a.jpg'"),
        (b"filename,label\na.jpg,\xff\n", "got one that cannot be read"),
        (b"filename,label\n" + b"a" * 200_000 + b",b\n", "got one that cannot be read .*field larger"),
        (b"", "expected the columns filename and label"),
    ],
)
def test_lists_that_are_none_are_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        mini_imagenet._read_list(tmp_path / "train.csv")
    assert "train.csv" in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir()
    picture(1).save(tmp_path / "a.png")
    scandir = os.scandir

    def locked(path):
        if os.fspath(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(DataError, match=r"expected a folder that can be read, got .*locked \(Permission denied\)"):
        load_unlabelled(tmp_path, (8, 8, 3), whole)
