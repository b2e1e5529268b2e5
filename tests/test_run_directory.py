"""Run folders and weight files: what is written comes back, and damage is named in one line."""

import errno
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.training import run_directory, weights
from fewshot.training.checkpoint import CheckpointError
from fewshot.training.run_directory import RunError

CONFIG = {"dataset": "glyphs", "way": 5, "settings": {"inference.rho": 0.5}}
STATE = {"w": np.arange(3.0, dtype=np.float32)}
TREE = {"conv": {0: {"kernel": np.ones((2, 3), np.float32)}, 1: {"bias": np.float32(0.5)}}, "log_scale": np.array(2.0)}


@pytest.fixture
def run(tmp_path):
    return run_directory.create(tmp_path / "runs" / "first", CONFIG)


def one_line(error):
    message = str(error.value)
    assert "\n" not in message and ";" in message  # what came; what to try
    return message


def test_create_then_load(run):
    assert run_directory.load(run.path) == run
    assert run.config == CONFIG
    assert json.loads((run.path / "config.json").read_text())["schema_version"] == run_directory.SCHEMA_VERSION
    assert [path.name for path in run.path.iterdir()] == ["config.json"]


def test_an_existing_run_is_refused_and_untouched(run):
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(RunError) as error:
        run_directory.create(run.path, {"way": 20})
    assert "already exists; continue it with --resume or choose another --run-dir" in one_line(error)
    assert (run.path / "config.json").read_bytes() == before


def test_an_empty_folder_is_used_and_a_file_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    assert run_directory.create(tmp_path / "empty", CONFIG).config == CONFIG
    (tmp_path / "file").touch()
    with pytest.raises(RunError) as error:
        run_directory.create(tmp_path / "file", CONFIG)
    assert "expected a folder for the run, got the file" in one_line(error)


def test_a_missing_run_is_named(tmp_path):
    with pytest.raises(RunError) as error:
        run_directory.load(tmp_path / "none")
    assert f"expected {tmp_path / 'none' / 'config.json'}" in one_line(error)


@pytest.mark.parametrize("version", [0, 3, "1"])
def test_another_schema_version_is_refused_by_name(run, version):
    (run.path / "config.json").write_text(json.dumps(CONFIG | {"schema_version": version}))
    with pytest.raises(RunError) as error:
        run_directory.load(run.path)
    assert f"has schema version {version!r}, this program reads 1 and 2" in one_line(error)


@pytest.mark.parametrize("text", ["", '{"schema_version": 1', "[1]", "{}"])
def test_a_damaged_configuration_is_refused(run, text):
    (run.path / "config.json").write_text(text)
    with pytest.raises(RunError) as error:
        run_directory.load(run.path)
    assert "damaged configuration" in one_line(error)


def test_metrics_are_appended_and_cut_back(run):
    assert run.read_metrics() == []
    for step in (0, 100, 200, 300):
        run.append_metrics(step, {"loss": jnp.float32(1 / 3), "accuracy": np.float64(0.1), "name": "x"})
    records = run.read_metrics()
    assert records[1] == {"step": 100, "loss": float(np.float32(1 / 3)), "accuracy": 0.1, "name": "x"}
    before = run.metrics.read_text()
    run.cut_metrics(200)
    assert run.read_metrics() == records[:3]
    assert run.metrics.read_text() == "".join(before.splitlines(keepends=True)[:3])


def test_a_record_that_was_cut_off_is_written_again(run):
    run.append_metrics(1, {"loss": 2.0})
    run.append_metrics(2, {"loss": 1.0})
    run.metrics.write_text(run.metrics.read_text()[:-5])
    assert [record["step"] for record in run.read_metrics()] == [1]
    run.cut_metrics(1)
    run.append_metrics(2, {"loss": 1.0})
    assert [record["step"] for record in run.read_metrics()] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "{}", "[]", '{"step": null}'])
def test_a_damaged_record_in_the_middle_is_named(run, line):
    run.metrics.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(RunError) as error:
        run.cut_metrics(3)
    assert f"{run.metrics} line 2" in one_line(error) and line in str(error.value)


def test_numbers_that_are_not_finite_become_null(run):
    run.append_metrics(1, {"nll": float("inf"), "loss": jnp.float32(jnp.nan), "failures": {"not_converged": 3}})
    assert run.read_metrics() == [{"step": 1, "nll": None, "loss": None, "failures": {"not_converged": 3}}]


def test_the_newest_checkpoint_is_restored(run):
    assert run.restore_checkpoint(STATE) is None
    for step in (1, 2, 3):
        run.save_checkpoint(step, {"w": STATE["w"] + step})
    step, state = run.restore_checkpoint(STATE)
    assert step == 3 and (state["w"] == STATE["w"] + 3).all()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["2", "3"]


def test_a_truncated_checkpoint_names_the_file_and_the_step_to_fall_back_to(run):
    for step in (1, 2):
        run.save_checkpoint(step, STATE)
    largest = max(
        (path for path in (run.checkpoints / "2").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:10])
    with pytest.raises(CheckpointError) as error:
        run.restore_checkpoint(STATE)
    assert str(largest) in one_line(error) and str(error.value).endswith("to continue from step 1")


def test_weights_come_back_with_their_configuration(run):
    run.save_weights(jax.tree.map(jnp.asarray, TREE))
    loaded = run.load_weights()
    assert jax.tree.structure(loaded) == jax.tree.structure(TREE)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(TREE), strict=True):
        assert a.shape == b.shape and (a == b).all()
    _, metadata = weights.load(run.weights)
    assert json.loads(metadata["config"]) == CONFIG | {"schema_version": run_directory.SCHEMA_VERSION}


def test_weights_keep_their_dtype_and_order(tmp_path):
    tree = {"double": np.linspace(0, 1, 6).reshape(2, 3).T / 3, "int": np.array([1, 2]), "flag": np.array(True)}
    weights.save(tmp_path / "w.safetensors", tree, {})
    loaded, metadata = weights.load(tmp_path / "w.safetensors")
    assert metadata == {}
    for name, array in tree.items():
        assert loaded[name].dtype == array.dtype and (loaded[name] == array).all()


@pytest.mark.parametrize("key", ["a/b", "3", "", 2.5])
def test_weight_names_that_could_not_be_read_back_are_refused(tmp_path, key):
    with pytest.raises(ValueError, match="rename it"):
        weights.save(tmp_path / "w.safetensors", {"layer": {key: np.zeros(1)}}, {})
    assert not (tmp_path / "w.safetensors").exists()


def test_weights_can_be_read_by_whoever_can_read_the_folder(run):
    run.save_weights(TREE)
    assert run.weights.stat().st_mode == (run.path / "config.json").stat().st_mode


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_damaged_weights_are_named(run, size):
    run.save_weights(TREE)
    run.weights.write_bytes(run.weights.read_bytes()[:size])
    with pytest.raises(RunError) as error:
        run.load_weights()
    assert f"damaged weights: {run.weights}" in one_line(error)
    assert one_line(error).endswith(f"train it anew with meta_train.py --config {run.path} --run-dir NEW")


def test_equal_weights_are_equal_files(tmp_path):
    """safetensors writes metadata in another order each time."""
    files = [tmp_path / str(number) for number in range(20)]
    for file in files:
        weights.save(file, TREE, {name: name for name in "abcdef"})
    assert len({file.read_bytes() for file in files}) == 1
    assert weights.load(files[0])[1] == {name: name for name in "abcdef"}


def test_a_byte_that_was_changed_is_found(run):
    """And a file without a sum, as of an earlier version, is taken."""
    run.save_weights(TREE)
    content = run.weights.read_bytes()
    run.weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError) as error:
        run.load_weights()
    assert f"damaged weights: {run.weights} does not hold the numbers that were written" in one_line(error)
    run.weights.write_bytes(content.replace(b'"sha256"', b'"sha000"'))
    run.load_weights()


def test_missing_weights_are_named(run):
    with pytest.raises(RunError) as error:
        run.load_weights()
    assert one_line(error).endswith(f"expected {run.weights}; train it with --resume first")
    run.metrics.write_text('{"step": 0}\n')  # which is written after the weights
    with pytest.raises(RunError) as error:
        run.load_weights()
    assert one_line(error).endswith(f"; train it anew with meta_train.py --config {run.path} --run-dir NEW")


def test_only_a_full_disk_is_told_to_make_room():
    with pytest.raises(RunError, match="Permission denied") as error, run_directory.told(Path("run")):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert one_line(error).endswith("; what was there before is kept, choose another folder")
