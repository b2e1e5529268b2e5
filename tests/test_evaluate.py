"""evaluate.py and `load_run`: a trained run scored again, on other tasks, and from a notebook."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_omniglot
from test_meta_train import contents

import tasks
from runners import build, evaluate, run_directory
from runners.build import load_run
from runners.data import check_images, load_splits
from runners.run_directory import RunError
from tasks import sample_task

KEYS = {
    "accuracy",
    "accuracy_ci95",
    "accuracy_std_batches",
    "nll",
    "brier",
    "ece",
    "mce",
    "ece_floor",
    "episodes",
    "seconds",
    "failures",
    "config",
}


@pytest.fixture
def flags(tiny_run, tiny_data):
    return [str(tiny_run.path), "--data-root", tiny_data, "--episodes", "12"]


def error_line(capfd, *words):
    with pytest.raises(SystemExit) as exit_info:
        evaluate.command_line([str(word) for word in words])
    printed = capfd.readouterr()
    assert exit_info.value.code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").removesuffix("\n")


def test_a_run_scores_as_at_the_end_of_its_training(flags, tiny_run, tmp_path, capfd):
    before = contents(tiny_run.path)
    assert evaluate.command_line([*flags, "--json", str(tmp_path / "metrics.json")]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics.keys() >= KEYS and metrics["failures"] == {}
    trained, raw = list(tiny_run.result["test"].values())[:2]
    assert {name: metrics[name] for name in trained} == trained
    assert metrics["raw"] == raw
    assert metrics["temperature"] == tiny_run.result["temperature"]
    assert metrics["config"]["kernel"] == "rbf" and metrics["config"]["evaluation"]["episodes"] == 12
    printed = capfd.readouterr().out
    assert "Test on 4 classes of omniglot never seen in training: 12 3-way 1-shot episodes with 15 queries" in printed
    assert "\nraw (temperature 1)  " in printed and "fitting" not in printed
    assert contents(tiny_run.path) == before


def test_another_way_and_shot_get_their_own_temperature(flags, tiny_run, capfd):
    before = contents(tiny_run.path)
    assert evaluate.command_line([*flags, "--way", "4", "--shot", "2", "--batches", "2", "--seed", "5"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("fitting the temperature for 4-way 2-shot on training classes of the run\n")
    assert "12 4-way 2-shot episodes with 15 queries a class" in printed
    assert contents(tiny_run.path) == before


@pytest.mark.parametrize(
    "flag", ["--calibrate", "--corruption=gaussian-noise:5", "--out-of-episode", "--report=x.html"]
)
def test_what_is_not_built_says_so(flag, flags, capfd):
    assert error_line(capfd, *flags, flag) == f"{flag.split('=')[0]} is not built yet; leave it out"


@pytest.mark.parametrize(
    "more, message",
    [
        (["--dataset", "foo"], "expected the name of a data set, got 'foo'"),
        (["--way", "5"], "expected at least 5 classes for 5-way tasks, got 4"),
        (["--query", "20"], "expected at least 21 images in every class"),
        (["--shot", "20"], "expected at least 21 images in every class"),
        (["--batches", "13"], "--batches must lie between 1 and --episodes 12, got 13"),
        (["--data-root", "/no/such/folder"], "expected the data root to be a folder"),
        (["--json", "/no/such/folder/metrics.json"], "expected --json in a folder that exists, got /no/such/folder"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(more, message, flags, capfd):
    assert error_line(capfd, *flags, *more).startswith(message)


def test_a_data_set_of_other_images_is_refused(flags, tmp_path, capfd):
    tiny_omniglot.write(tmp_path, size=12)
    message = error_line(capfd, flags[0], "--data-root", tmp_path)
    assert message.startswith("expected images of shape (16, 16, 1), as ")
    assert "got (12, 12, 1)" in message


def test_missing_and_damaged_runs_are_named(tiny_run, tmp_path, capfd):
    assert error_line(capfd, tmp_path / "none").startswith(f"no run in {tmp_path / 'none'}")
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    weights = copy / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert error_line(capfd, copy).startswith(f"damaged weights: {weights}")
    weights.unlink()
    assert error_line(capfd, copy).startswith(f"no exported weights in {copy}")


def test_weights_of_another_configuration_are_refused(tiny_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    config = json.loads((copy / "config.json").read_text())
    config["settings"]["backbone.width"] = 5
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"does not fit its config\.json \(at deep_kernel\.backbone"):
        load_run(copy)


def test_a_loaded_run_takes_bytes_and_numbers(tiny_run, tiny_data):
    task = sample_task(jax.random.key(0), load_splits("omniglot", tiny_data).test, way=4, shot=1, query=5)
    model = load_run(tiny_run.path)
    prior = model.prior(task.x_support, classes=4)
    assert prior.mean.shape == (4, 4) and model.prior(task.x_support).mean.shape == (3, 4)
    as_numbers = np.asarray(task.x_support) / np.float32(255)
    np.testing.assert_allclose(model.prior(as_numbers).covariance, prior.covariance, rtol=1e-5)
    assert model.query(task.x_support, task.x_query, classes=4).cross.shape == (20, 4)


def test_a_loaded_run_refuses_nan_pixels(tiny_run):
    model = load_run(tiny_run.path)
    images = np.full((2, 16, 16, 1), 0.5, np.float32)
    images[1, 3, 3] = np.nan
    for refused in (lambda: model.prior(images), lambda: model.query(images[:1], images)):
        with pytest.raises(tasks.DataError, match=r"images within \[0, 1\], got values from nan to nan"):
            refused()
    with pytest.raises(tasks.DataError, match="got int64; convert them to uint8"):
        check_images(np.zeros((2, 16, 16, 1), np.int64), "the images")


def test_loading_finds_what_was_exported(tiny_run, tmp_path):
    model = load_run(tiny_run.path)
    before = run_directory.load(tiny_run.path).load_weights()
    directory = run_directory.create(tmp_path / "again", run_directory.load(tiny_run.path).config)
    build.export(directory, model, int(before["step"]))
    after = directory.load_weights()
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))


def test_help_works_from_any_folder(tmp_path):
    script = Path(__file__).resolve().parents[1] / "runners" / "evaluate.py"
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--calibrate" in done.stdout and done.stderr == ""
