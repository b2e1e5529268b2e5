"""compare.py: tables of differences between run folders and files, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from predicted import random_predictions
from test_paired import drawn_classes

from fewshot.evaluation import metrics, prediction_files
from fewshot.evaluation.paired import paired_differences
from fewshot.evaluation.prediction_files import Origin
from fewshot.runners import compare
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.overrides import ConfigError

_, LABELS = random_predictions(0)
CLASSES = drawn_classes(np.random.default_rng(0), len(LABELS))


def file_of(path, seed, labels=LABELS, classes=CLASSES, origin=None):
    content = prediction_files.to_bytes(random_predictions(seed)[0], labels, classes, origin)
    path.write_bytes(content)
    return str(path)


def run_of(path, seed, **settings):
    config = resolve(RunConfig(seed=seed, **settings)).to_json()
    run_directory.create(path, {**config, "environment": {"jax": f"0.{seed}"}})
    file_of(path / "predictions.npz", seed)
    return str(path)


RUNS = [("a", 0, 3000), ("b", 1, 5000), ("a1", 2, 3000)]


def test_runs_of_other_seeds_are_one_method(tmp_path, capsys):
    paths = [run_of(tmp_path / name, seed, episodes=count) for name, seed, count in RUNS]
    paths.append(run_of(tmp_path / "b1", 3, episodes=5000, inference="cvi"))  # asked for, and what it is anyway
    paths.append(file_of(tmp_path / "c.npz", 4))
    assert compare.command_line([*paths, "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["first"] == paths[0] and [row["path"] for row in written["methods"]] == [*paths[:2], paths[4]]
    assert [len(row["runs"]["nll"]) for row in written["methods"]] == [2, 2, 1]
    first, second, third = ([prediction_files.read(compare._file(path)) for path in paths[k::2]] for k in range(3))
    for row, runs in zip(written["methods"][1:], (second, third[1:]), strict=True):
        expected = paired_differences(runs, first[:2])
        for name, (mean, over_episodes, over_classes, over_seeds) in expected.items():
            found = row["differences"][name]
            assert found["mean"] == mean and found["over_episodes"] == list(over_episodes)
            assert found["over_classes"] == list(over_classes)
            assert found["over_seeds"] == (None if len(runs) == 1 else list(over_seeds))
    assert written["methods"][0]["runs"]["accuracy"] == [metrics.accuracy(*kept[:2]) for kept in first[:2]]
    lines = printed.splitlines()
    assert lines[0] == f"7 test tasks of 4 out of 11 classes, {LABELS.shape[1]} queries each"
    (row,) = [line.split() for line in lines if line.startswith(paths[1])][:1]
    own, other = (100 * np.mean([metrics.accuracy(*kept[:2]) for kept in runs]) for runs in (first[:2], second))
    assert row[1:4] == ["2", f"{other:.1f}", f"{other - own:+.1f}"]
    assert "not trained alike: for 3,000, 5,000 tasks, in this order" in printed
    assert compare.command_line([*paths, "--json", str(tmp_path / "found.json")]) == 0  # written anew


def test_unlike_tests_are_told_and_are_no_seeds_of_one_method(tmp_path, capsys):
    paths = [run_of(tmp_path / name, seed) for seed, name in enumerate("abcd")]
    for path, (shot, corruption) in zip(paths, [(1, ""), (5, "noise:2"), (1, ""), (None, None)], strict=True):
        file_of(Path(path) / "predictions.npz", 0, origin=Origin(shot=shot, corruption=corruption))
    written = compare.main(compare.parse(paths))
    printed = capsys.readouterr().out
    assert [row["path"] for row in written["methods"]] == paths[:2]
    assert len(written["methods"][0]["runs"]["accuracy"]) == 3  # what a file does not tell may be anything
    assert "not tested alike: with 1, 5 labelled images of each class, in this order." in printed
    assert "not tested alike: on images corrupted by nothing, noise:2, in this order." in printed
    compare.main(compare.parse([paths[0], paths[3], file_of(tmp_path / "file", 1, origin=Origin(shot=1))]))
    assert "not tested alike" not in capsys.readouterr().out


def test_unlike_budgets_are_told_of_run_folders_alone(tmp_path, capsys):
    paths = [run_of(tmp_path / "a", 0), run_of(tmp_path / "b", 1, learner="prototypical"), file_of(tmp_path / "c", 2)]
    assert compare.command_line(paths) == 0
    assert "not trained alike" not in capsys.readouterr().out


def test_copies_of_a_run_are_no_other_seeds(tmp_path, capsys):
    """Nor are two runs of equal settings and one seed, which loops of one's own may leave."""
    paths = [run_of(tmp_path / name, seed) for name, seed in (("a", 0), ("copy", 0), ("b", 1))]
    assert compare.command_line(paths) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))][:2]
    assert [(row[0], row[1]) for row in rows] == [(paths[0], "2"), (paths[1], "1")]


REFUSED = {
    "one": (["a"], "expected two runs or more, each named once, got "),
    "twice": (["a", "b", "./b"], "expected two runs or more, each named once, got "),
    "a run and its file": (["a", "a/predictions.npz"], "expected two runs or more, each named once, got "),
    "seeds of one": (["a", "a1"], "expected runs of two methods, got 2 whose settings differ in the seed alone"),
    "nothing kept": (["a", "empty"], r"holds predictions.npz, got .*empty; write it by evaluate.py .*empty --pred"),
    "missing": (["a", "none"], "none: expected predictions of test episodes, got .*no such file"),
    "other labels": (["a", "labels.npz"], "labels.npz: expected predictions of the same episodes, got other labels in"),
    "other images": (["images.npz", "a", "more.npz"], "expected tests on the same images, got others in .*more"),
    "a class twice": (["a", "twice.npz"], "the same episodes, got other classes in episode 0"),
    "twice in both": (["twice.npz", "again.npz"], "got others .*show a class once, got one twice"),
    "home of nobody": (["~nobody-here/run", "a"], "no such file"),
    "no run": (["a", "folder"], "config.json"),
}


@pytest.mark.parametrize("names, reason", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused_in_one_line(names, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "a", 0), run_of(tmp_path / "a1", 1), run_of(tmp_path / "b", 2, shot=5)
    (run_of(tmp_path / "empty", 3), (tmp_path / "empty" / "predictions.npz").unlink())
    (tmp_path / "folder").mkdir()
    file_of(tmp_path / "folder" / "predictions.npz", 4)
    file_of(tmp_path / "labels.npz", 5, labels=(LABELS + 1) % 4)
    twice = CLASSES.copy()
    twice[:, 1] = twice[:, 0]
    file_of(tmp_path / "twice.npz", 8, classes=twice), file_of(tmp_path / "again.npz", 9, classes=twice)
    for number, name in enumerate(("images", "more")):
        file_of(tmp_path / f"{name}.npz", 6 + number, origin=Origin(images_crc32=number))
    with pytest.raises(SystemExit) as left:
        compare.command_line([*names, "--json", "found.json"])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1
    assert not (tmp_path / "found.json").exists()
    with pytest.raises((ConfigError, run_directory.RunError), match=reason):
        compare.main(compare.parse(names))


def test_no_file_that_is_read_is_written_over(tmp_path):
    paths = [run_of(tmp_path / "a", 0), file_of(tmp_path / "c.npz", 1)]
    run_of(tmp_path / "other", 2)
    own = "expected --json to be no file of a run, got .*config.json, which is kept; name another"
    for path, reason in (
        (paths[1], "is read; name another"),
        (str(tmp_path / "a" / "predictions.npz"), "is read; name another"),
        (str(tmp_path / "a" / "config.json"), own),
        (str(tmp_path / "other" / "config.json"), own),
    ):
        before = (tmp_path / path).read_bytes()
        with pytest.raises(ConfigError, match=reason):
            compare.main(compare.ComparingConfig(tuple(paths), json=path))
        assert (tmp_path / path).read_bytes() == before
