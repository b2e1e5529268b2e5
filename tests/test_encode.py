"""encode.py: pictures in, features out; what it reads back, leaves out and refuses."""

import numpy as np
import pytest
from PIL import Image

from fewshot.models.networks import encoders
from fewshot.models.networks.pictures import FrozenEncoder, Preparation
from fewshot.runners import encode
from fewshot.runners.cli import main as console
from fewshot.tasks import DataError, load
from fewshot.tasks.embeddings import load_features
from fewshot.training.overrides import ConfigError

SMALL = Preparation(side=8, short=8, mean=(0.0,) * 3, deviation=(1.0,) * 3)


def mean_colours():
    return FrozenEncoder("colours", SMALL, 3, "colours-1", lambda pixels: pixels.mean((1, 2)) / 255, 2)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(encoders.ENCODERS, "colours", mean_colours)


def picture(path, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), colour).save(path)


@pytest.fixture
def classes(tmp_path):
    for name, colour in {"apple": (255, 0, 0), "leek": (0, 255, 0)}.items():
        for number in range(3):
            picture(tmp_path / "shop" / name / f"{number}.png", colour)
    return tmp_path / "shop"


def run(*words):
    """The exit code."""
    try:
        return encode.command_line(["--encoder", "colours", *map(str, words)])
    except SystemExit as stopped:
        return stopped.code


def test_class_folders_become_features_that_a_run_reads(classes, tmp_path):
    assert run(classes, "--out", tmp_path / "f.npz") == 0
    found = load_features(tmp_path / "f.npz", 3, labelled=True)
    assert found.labels == ["apple"] * 3 + ["leek"] * 3
    np.testing.assert_allclose(found.pixels[:, 0, 0], np.repeat(np.eye(3)[:2], 3, axis=0))
    names = np.load(tmp_path / "f.npz")["names"]
    assert [name.split("shop/")[1] for name in names[2:4]] == ["apple/2.png", "leek/0.png"]


def test_three_folders_become_an_embeddings_data_set(classes, tmp_path):
    for number, split in enumerate(("train", "validation", "test")):
        for name in "ab":
            picture(tmp_path / "all" / split / f"{name}{number}" / "0.png", (number, 0, 0))
    assert run(tmp_path / "all", "--out", tmp_path / "f.npz") == 0
    splits = load(f"embeddings:{tmp_path / 'f.npz'}")
    assert splits.class_names["validation"] == ("a1", "b1")
    np.testing.assert_allclose(np.asarray(splits.test.images).ravel(), [2 / 255, 0, 0] * 2, rtol=1e-6)


def test_a_quiet_call_prints_what_is_wrong_alone(classes, tmp_path, capsys):
    (classes / "leek" / "1.png").write_bytes(b"\x89PNG no picture")
    for words, shown in (((), True), (("--quiet",), False)):
        assert run(classes, "--out", tmp_path / "f.npz", *words) == 0
        out, err = capsys.readouterr()
        assert bool(out) == shown and "left out" in err and (tmp_path / "f.npz").exists()
        (tmp_path / "f.npz").unlink()
    assert run(classes / "none", "--out", tmp_path / "f.npz", "--quiet") == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_damaged_picture_is_one_line_and_left_out_unless_strict(classes, tmp_path, capsys):
    (classes / "leek" / "1.png").write_bytes(b"\x89PNG no picture")
    assert run(classes, "--out", tmp_path / "f.npz") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(lines) == 1 and "leek/1.png" in lines[0]
    assert list(np.load(tmp_path / "f.npz")["labels"]) == ["apple"] * 3 + ["leek"] * 2
    assert run(classes, "--out", tmp_path / "g.npz", "--strict") == 2
    assert "leek/1.png" in capsys.readouterr().err and not (tmp_path / "g.npz").exists()
    for number in (0, 2):
        (classes / "leek" / f"{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="pictures of leek that can be read"):
        encode.main(encode.EncodingConfig((str(classes),), str(tmp_path / "g.npz"), "colours"))


def test_pictures_without_labels_and_a_second_call_without_a_pass(classes, tmp_path, monkeypatch):
    given = [classes / "apple", classes / "leek" / "0.png"]
    assert run(*given, "--out", tmp_path / "f.npz") == 0
    assert "labels" not in np.load(tmp_path / "f.npz")
    before = load_features(tmp_path / "f.npz", 3, labelled=False).pixels

    def never(self, pictures):
        raise AssertionError("a pass of the network")

    monkeypatch.setattr(FrozenEncoder, "encode", never)
    assert run(*given, "--out", tmp_path / "g.npz") == 0
    np.testing.assert_array_equal(load_features(tmp_path / "g.npz", 3, labelled=False).pixels, before)


def test_what_is_refused(classes, tmp_path, capsys):
    assert run(classes, classes / "leek", "--out", tmp_path / "f.npz") == 2
    assert "got both" in capsys.readouterr().err
    assert run(tmp_path / "none", "--out", tmp_path / "f.npz") == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(classes, "--out", tmp_path / "f.npz", "--encoder", "nothing") == 2
    assert "expected an encoder named" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"end in \.npz"):
        encode.main(encode.EncodingConfig((str(classes),), str(tmp_path / "f.txt"), "colours"))
    assert not list(tmp_path.glob("f.*"))


def test_the_console_knows_it(capsys):
    with pytest.raises(SystemExit) as found:
        console.main(["encode", "--help"])
    assert found.value.code == 0 and "--encoder" in capsys.readouterr().out
