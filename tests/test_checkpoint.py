"""Checkpoints: exact round trips, and every kind of damage found before anything is restored."""

import json
import os
import shutil
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fewshot.training import checkpoint


class Statistics(NamedTuple):
    mean: jax.Array
    count: jax.Array


def example_state(seed=0):
    key = jax.random.key(seed)
    parameters = {"conv": [{"kernel": jax.random.normal(key, (3, 3, 1, 8))}], "log_scale": jnp.float32(2.3)}
    return {
        "parameters": parameters,
        "optimiser": optax.adam(1e-3).init(parameters),
        "statistics": Statistics(jnp.arange(4.0), jnp.int32(7)),
        "half": jnp.ones(3, jnp.bfloat16),
        "flag": jnp.array(True),
        "empty": jnp.zeros((0, 2)),
        "host": np.arange(3, dtype=np.int64),
        "key": key,
        "keys": jax.random.split(key, 2),
        "nothing": None,
    }


def raw(leaf):
    return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


def assert_identical(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and isinstance(a, jax.Array) == isinstance(b, jax.Array)
        assert raw(a).tobytes() == raw(b).tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (100, 200):
        checkpoint.save(folder, step, example_state(step))
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def test_round_trip_is_bit_identical(saved):
    assert checkpoint.steps(saved) == [100, 200]
    for step in (100, 200):
        assert_identical(checkpoint.restore(saved, step, example_state()), example_state(step))


def test_round_trip_in_float64(tmp_path):
    with jax.enable_x64(True):
        state = {"w": jnp.linspace(0, 1, 5) / 3, "n": jnp.arange(3)}
        assert state["w"].dtype == jnp.float64
        checkpoint.save(tmp_path, 1, state)
        assert_identical(checkpoint.restore(tmp_path, 1, state), state)


def test_only_the_newest_two_are_kept(copy):
    checkpoint.save(copy, 1000, example_state())
    assert checkpoint.steps(copy) == [200, 1000]
    assert sorted(path.name for path in copy.iterdir()) == ["1000", "200"]


def test_leftovers_of_a_killed_save_are_no_checkpoints_and_go_away(copy):
    (copy / ".staging-300" / "state").mkdir(parents=True)
    assert checkpoint.steps(copy) == [100, 200]
    checkpoint.save(copy, 300, example_state())
    assert not (copy / ".staging-300").exists() and checkpoint.steps(copy) == [200, 300]


def test_no_folder_means_no_checkpoints(tmp_path):
    assert checkpoint.steps(tmp_path / "none") == []


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 0)


def delete(path):
    path.unlink()


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [delete, truncate, flip])
def test_damage_to_any_file_is_named_in_one_line(copy, damage, capfd):
    for path in files_of(copy / "200"):
        intact = path.read_bytes()
        damage(path)
        with pytest.raises(checkpoint.CheckpointError) as error:
            checkpoint.restore(copy, 200, example_state())
        path.write_bytes(intact)
        message = str(error.value)
        assert "\n" not in message
        if path.name != "manifest.json" or damage is not flip:  # the manifest's own flips show as some mismatch
            assert str(path) in message
            assert message.endswith(f"remove {copy / '200'} to continue from step 100")
    assert capfd.readouterr() == ("", "")
    assert_identical(checkpoint.restore(copy, 100, example_state()), example_state(100))


def test_advice_without_an_earlier_checkpoint(copy):
    shutil.rmtree(copy / "200")
    delete(copy / "100" / "manifest.json")
    with pytest.raises(checkpoint.CheckpointError, match=r"to start over$"):
        checkpoint.restore(copy, 100, example_state())


def test_unknown_format_is_refused(copy):
    manifest = copy / "200" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(checkpoint.CheckpointError, match="has format 2, this version reads 1"):
        checkpoint.restore(copy, 200, example_state())


def other_settings():
    shape, dtype, missing, extra = (example_state() for _ in range(4))
    shape["parameters"]["conv"][0]["kernel"] = jnp.zeros((3, 3, 3, 8))
    dtype["statistics"] = dtype["statistics"]._replace(mean=jnp.arange(4.0, dtype=jnp.float16))
    del missing["flag"]
    extra["more"] = jnp.zeros(2)
    return {
        "parameters.conv.0.kernel as float32[3,3,1,8], this run has float32[3,3,3,8]": shape,
        "statistics.mean as float32[4], this run has float16[4]": dtype,
        "flag as bool[], this run has nothing": missing,
        "more as nothing, this run has float32[2]": extra,
    }


@pytest.mark.parametrize("message", other_settings())
def test_a_checkpoint_of_other_settings_is_refused(saved, message):
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(saved, 200, other_settings()[message])
    assert message in str(error.value) and "\n" not in str(error.value)


def manifest_of(folder, **changes):
    """Write the manifest of a checkpoint again, with the sums of the files that are there."""
    path = folder / "manifest.json"
    sums = {"sha256": checkpoint._digests(folder / "state")}
    path.write_text(json.dumps(json.loads(path.read_text()) | sums | changes))


def refused(folder, step, example, **given):
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.restore(folder, step, example, **given)
    assert len(str(error.value).splitlines()) == 1 and str(error.value).isprintable()
    return str(error.value)


MANIFESTS = {
    "[1]": "manifest.json names no format",
    "[" * 100_000: "manifest.json cannot be read",
    '{"format": true}': "has format True, this version reads 1",
    '{"format": 1, "arrays": [], "sha256": {"a": "b"}}': "holds no words by their names as arrays",
    '{"format": 1, "arrays": {"a": 1}, "sha256": {"a": "b"}}': "holds no words by their names as arrays",
    '{"format": 1, "arrays": {"a": "b"}, "sha256": {"a": null}}': "holds no words by their names as sha256",
    '{"format": 1, "arrays": {"\\u001b[2J": "\\u001b[2J"}, "sha256": {"a": "b"}}': r"holds \x1b[2J as \x1b[2J",
}


@pytest.mark.parametrize("content", MANIFESTS)
def test_manifests_that_are_none_are_named(copy, content):
    (copy / "200" / "manifest.json").write_text(content)
    assert MANIFESTS[content] in refused(copy, 200, example_state())


@pytest.mark.usefixtures("no_waiting")
def test_files_that_are_too_many_or_no_plain_files_are_refused(copy, monkeypatch):
    state = copy / "200" / "state"
    (state / "more").write_bytes(b"")
    assert f"{state / 'more'} is not of it" in refused(copy, 200, example_state())
    (state / "more").unlink()
    os.mkfifo(state / "more")
    assert f"{state / 'more'} is no plain file" in refused(copy, 200, example_state())
    (state / "more").unlink()
    (state / "more").symlink_to(state / "_METADATA")
    assert f"{state / 'more'} is no plain file" in refused(copy, 200, example_state())
    (state / "more").unlink()
    with (state / "more").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert "bytes, at most" in refused(copy, 200, example_state())


def test_arrays_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    """The sums are right, so that only the arrays themselves tell."""
    example = {"w": np.zeros((2, 3), np.float32), "n": np.zeros(4, np.int32)}
    states = {
        "holds w as float32[6]": {**example, "w": np.zeros(6, np.float32)},
        "holds w as float32[2,4]": {**example, "w": np.zeros((2, 4), np.float32)},
        "holds numbers that are not finite as w": {**example, "w": np.full((2, 3), np.nan, np.float32)},
    }
    arrays = {"w": "float32[2,3]", "n": "int32[4]"}
    for step, (message, state) in enumerate(states.items()):
        manifest_of(checkpoint.save(tmp_path, step, state), arrays=arrays)
        found = refused(tmp_path, step, example)
        assert message in found or ("cannot be read" in found and "finite" not in message)
    found = checkpoint.restore(tmp_path, 2, example, any_number=("w",))
    assert np.isnan(found["w"]).all()


def test_files_that_orbax_cannot_read_are_damage_though_their_sums_are_right(copy):
    (copy / "200" / "state" / "_METADATA").write_bytes(b"{")
    manifest_of(copy / "200")
    assert "cannot be read; remove" in refused(copy, 200, example_state())


def test_names_that_are_no_step_are_no_checkpoints(copy):
    for name in ("0300", "\u0663", "9" * 200, "4x"):
        (copy / name).mkdir()
    assert checkpoint.steps(copy) == [100, 200]


def test_only_arrays_are_saved(tmp_path):
    with pytest.raises(TypeError, match=r"got int at step; wrap it in jnp\.asarray"):
        checkpoint.save(tmp_path, 1, {"step": 1})


def test_names_must_be_unique(tmp_path):
    with pytest.raises(ValueError, match=r"share the name 'a\.b'"):
        checkpoint.save(tmp_path, 1, {"a": {"b": jnp.zeros(1)}, "a.b": jnp.zeros(1)})


SAVE_FOREVER = """
import sys
from pathlib import Path
import numpy as np
from fewshot.training import checkpoint
for step in range(1, 10_000):
    checkpoint.save(Path(sys.argv[1]), step, {"w": np.full((256, 256), step, np.float32)})
    print(step, flush=True)
"""


@pytest.mark.long
def test_kill_during_a_save_leaves_whole_checkpoints(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        for _ in range(4):  # the kill comes while the fifth is being written
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
    for step in checkpoint.steps(tmp_path):
        state = checkpoint.restore(tmp_path, step, {"w": np.zeros((256, 256), np.float32)})
        assert (state["w"] == step).all()
    assert checkpoint.steps(tmp_path)[-1] >= 4
