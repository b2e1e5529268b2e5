"""A run on a user's own files remembers its classes, and is not tested on those it was trained with."""

import json

import numpy as np
import pytest
from PIL import Image

from fewshot.runners import evaluate, meta_train
from fewshot.tasks import DataError
from fewshot.tasks.episodes import Splits, make_dataset
from fewshot.training.data import check_own_classes, load_splits, own_classes

PARTS = ("train", "validation", "test")


def write_features(file, names):
    """Twelve features of every class named in each split, around a place of its own."""
    rng, arrays = np.random.default_rng(0), {}
    for part in PARTS:
        labels = np.repeat(names[part], 12)
        arrays[f"{part}_labels"] = labels
        arrays[f"{part}_features"] = rng.normal(size=(len(labels), 4)) + np.repeat(np.arange(3), 12)[:, None]
    np.savez(file, **arrays)


def test_a_class_that_several_splits_have_is_named_with_all_of_them():
    """One word for two classes; and what is said where places are the same, but not the order."""
    held = {"train": ("a", "b"), "validation": ("a", "c"), "test": ("d",)}
    one = make_dataset(np.zeros((1, 1, 1, 2), np.float32), np.zeros(1, int))
    splits = Splits("embeddings:x", one, one, one, {**held, "train": ("b",)}, (1, 1, 2))
    with pytest.raises(DataError, match=r"got 1 in other places: a \(train and validation then, validation now\); put"):
        check_own_classes(splits, held)
    with pytest.raises(DataError, match="in the order that the run was trained with, got another; put new"):
        check_own_classes(splits._replace(class_names={**held, "train": ("b", "a")}), held)
    check_own_classes(splits._replace(class_names=held), {name: [*names] for name, names in held.items()})


@pytest.mark.long
def test_a_run_is_refused_when_its_classes_have_moved(tmp_path, capsys):
    names = {"train": ["a", "b", "c"], "validation": ["d", "e", "f"], "test": ["g", "h", "i"]}
    file, run = tmp_path / "features.npz", tmp_path / "run"
    write_features(file, names)
    train = ["--dataset", f"embeddings:{file}", "--backbone", "identity", "--way", "3", "--query", "2"]
    train += ["--episodes", "2", "--inner-steps", "2", "--run-dir", str(run)]
    train += ["--set", *(f"trainer.{kind}_episodes=2" for kind in ("validation", "temperature", "test"))]
    assert meta_train.command_line(train) == 0
    assert json.loads((run / "config.json").read_text())["classes"] == names
    test = [str(run), "--episodes", "2", "--json", str(tmp_path / "metrics.json")]
    assert evaluate.command_line(test) == 0
    (tmp_path / "metrics.json").unlink()
    write_features(file, {**names, "train": ["a", "b", "g"], "test": ["c", "h", "j"]})
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        evaluate.command_line(test)
    message = capsys.readouterr().err
    assert f"classes of embeddings:{file} as the run was trained with them, got 4 in other places: " in message
    assert "c (train then, test now), g (test then, train now), i (test then, absent now), ...; put new" in message
    assert not (tmp_path / "metrics.json").exists()
    with pytest.raises(SystemExit, match="2"):
        meta_train.command_line(["--resume", "--run-dir", str(run)])
    assert "got 4 in other places" in capsys.readouterr().err


def test_a_new_class_in_a_folder_moves_others(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    for k in range(10):
        (tmp_path / f"class {k}").mkdir()
        Image.new("RGB", (8, 8), (20 * k, 0, 0)).save(tmp_path / f"class {k}" / "one.png")
    name = f"folder-16:{tmp_path}"
    before = own_classes(load_splits(name, None))
    check_own_classes(load_splits(name, None), before)
    (tmp_path / "class 00").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "class 00" / "one.png")
    with pytest.raises(DataError, match=r"class 00 \(absent then, train now\), class 2 \(train then, validation now\)"):
        check_own_classes(load_splits(name, None), before)
    check_own_classes(load_splits(name, None), None)  # runs from before classes were stored


def test_published_data_sets_store_no_classes():
    assert own_classes(load_splits("glyphs", None)) is None
