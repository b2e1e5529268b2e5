"""A run folder of somebody else is checked before it is used: one line for whatever is wrong, never a traceback."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import foreign_runs
import numpy as np
import pytest

from fewshot.tasks import DataError
from fewshot.training import run as runs
from fewshot.training import run_directory
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import RunError

ONE_LINE = (RunError, ConfigError, DataError)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return foreign_runs.make(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def run(whole, tmp_path):
    """A copy to damage."""
    folder = tmp_path / "run"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def refused(call):
    with pytest.raises(ONE_LINE) as error:
        call()
    assert len(str(error.value).splitlines()) == 1 and str(error.value).isprintable()
    return str(error.value)


def test_a_whole_folder_is_read(run):
    model = runs.load_run(run)
    assert model.temperature == 1.0 and model.config.way == 3
    assert run_directory.load(run).read_metrics()[0]["episodes"] == 0


def tracebacks(run, chosen):
    """What altered configurations raise beside one-line errors."""
    file = run / "config.json"
    text, found = file.read_text(), []
    for at, raw in chosen:
        file.write_text(foreign_runs.altered(text, at, raw))
        try:
            runs.load_run(run)
        except ONE_LINE as error:
            if len(str(error).splitlines()) > 1 or len(str(error)) > 2000 or not str(error).isprintable():
                found.append((at, raw[:40], "not in one line"))
        except Exception as error:
            found.append((at, raw[:40], repr(error)[:200]))
    return found


def test_no_altered_configuration_is_a_traceback(run):
    """A sample of all of them; the slow test has the rest."""
    every = foreign_runs.alterations((run / "config.json").read_text())
    picked = np.random.default_rng(0).choice(len(every), 150, replace=False)
    assert tracebacks(run, [every[i] for i in picked]) == []


@pytest.mark.slow
def test_none_of_all_altered_configurations_is_a_traceback(run):
    every = foreign_runs.alterations((run / "config.json").read_text())
    assert len(every) > 700
    assert tracebacks(run, every) == []


@pytest.mark.parametrize(
    "at, raw, message",
    [
        (("way",), "null", "config.json: expected a whole number from 1 to 10000 as way, got None"),
        (("shot",), "true", "expected a whole number from 1 to 100000 as shot, got True"),
        (("seed",), str(2**32), "expected a whole number from 0 to 4294967295 as seed, got 4294967296"),
        (("kernel",), '"foo"', "expected one of cosine, .* as kernel, got 'foo'"),
        (("likelihood",), "[1]", "expected one of softmax, .* as likelihood"),
        (("dataset",), '"a\\u0000"', "expected a name as dataset"),
        (("image_shape", 0), "1e3", "expected height, width and channels as image_shape"),
        (("image_shape", 0), "1000000000", "expected height, width and channels as image_shape"),
        (("settings", "backbone.width"), "0", r"settings: backbone.width: expected a number between 1 and 1024, got 0"),
        (("settings", "trainer.log_every"), "null", "settings: trainer.log_every: expected a whole number, got None"),
        (("settings", "trainer.schedule"), "3", "settings: trainer.schedule: expected a word, got 3"),
        (("settings", "kernel.prior_scale"), "1e30", "settings: kernel.prior_scale: expected a number between"),
        (("settings",), '{"a.b.c": 1}', "expected values of --set by their names as settings"),
        (("settings",), '{"trainer.foo": 1}', "settings: trainer.foo: no such setting"),
        (("chosen",), '["foo"]', "expected a list of fields as chosen"),
        (("classes",), '{"train": [1]}', "expected lists of names .* as classes"),
        (("schema_version",), "true", "has schema version True"),
        (("way",), "NaN", "damaged configuration"),
        (("way",), "[" * 100_000, "damaged configuration"),
    ],
)
def test_what_is_wrong_in_a_configuration_is_named(run, at, raw, message):
    file = run / "config.json"
    file.write_text(foreign_runs.altered(file.read_text(), at, raw))
    found = refused(lambda: runs.load_run(run))
    assert str(file) in found
    with pytest.raises(ONE_LINE, match=message):
        runs.load_run(run)


WEIGHTS = {
    "a temperature that is NaN": (lambda a: a.update(temperature=np.float64(np.nan)), "in temperature, got nan"),
    "a temperature of 0": (lambda a: a.update(temperature=np.float64(0)), "in temperature, got 0"),
    "a temperature of -1": (lambda a: a.update(temperature=np.float64(-1)), "in temperature, got -1"),
    "a temperature that is infinite": (lambda a: a.update(temperature=np.float64(np.inf)), "in temperature, got inf"),
    "a temperature that is a vector": (lambda a: a.update(temperature=np.ones(2)), r"\(at temperature\)"),
    "a temperature that is whole": (lambda a: a.update(temperature=np.int64(1)), "expected numbers as temperature"),
    "no temperature": (lambda a: a.pop("temperature"), r"\(at temperature\)"),
    "a step before 0": (lambda a: a.update(step=np.int64(-1)), "in step, got -1"),
    "an array too many": (lambda a: a.update(other=np.ones(2)), r"\(at other\)"),
    "an array too many, numbered": (lambda a: a.update({"0": np.ones(2)}), r"\(at 0\)"),
    "a place that is an array": (lambda a: a.update(learner=np.ones(2)), "which is no name of a weight"),
    "a name without parts": (lambda a: a.update({"a//b": np.ones(2)}), "which is no name of a weight"),
    "a name without end": (lambda a: a.update({"a/" * 5000 + "b": np.ones(2)}), "which is no name of a weight"),
    "weights that are NaN": (
        lambda a: a.update({"learner/deep_kernel/backbone/hidden/kernel": np.full((16, 4), np.float32(np.nan))}),
        "hidden.kernel, got nan",
    ),
    "weights that are words of bits": (
        lambda a: a.update({"learner/deep_kernel/backbone/hidden/kernel": np.zeros((16, 4), np.uint8)}),
        "expected numbers as learner.deep_kernel.backbone.hidden.kernel, got uint8",
    ),
    "weights of another shape": (
        lambda a: a.update({"learner/deep_kernel/backbone/hidden/kernel": np.zeros((4, 16), np.float32)}),
        r"\(at learner.deep_kernel.backbone.hidden.kernel\)",
    ),
    "weights that single precision has not": (
        lambda a: a.update({"learner/deep_kernel/backbone/hidden/kernel": np.full((16, 4), 1e300)}),
        "hidden.kernel, got inf",
    ),
    "a scale that overflows": (
        lambda a: a.update({"learner/deep_kernel/hyper/log_scale": np.float32(1e6)}),
        "numbers from -40 to 40 in learner.deep_kernel.hyper.log_scale, got 1000000",
    ),
    "a noise that overflows": (
        lambda a: a.update({"learner/likelihood_parameters/log_noise": np.float32(-1e6)}),
        "numbers from -40 to 40 in learner.likelihood_parameters.log_noise",
    ),
}


@pytest.mark.parametrize("change, message", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_no_model_has_are_refused(run, change, message):
    foreign_runs.with_weights(run, change)
    found = refused(lambda: runs.load_run(run))
    assert str(run / "weights.safetensors") in found
    with pytest.raises(RunError, match=message):
        runs.load_run(run)


def test_variances_below_0_are_refused():
    expected = {"learner": {"norm": {"variance": np.ones(2, np.float32)}}}
    found = {"learner": {"norm": {"variance": np.array([1, -1], np.float32)}}}
    with pytest.raises(RunError, match=r"expected numbers from 0 to inf in learner\.norm\.variance, got -1\.0"):
        runs._check_numbers(found, expected, Path("file"))


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3"])
def test_types_that_numpy_does_not_have_are_refused(run, kind):
    header = json.dumps({"temperature": {"dtype": kind, "shape": [2], "data_offsets": [0, 4 if kind == "BF16" else 2]}})
    content = struct.pack("<Q", len(header)) + header.encode() + bytes(4 if kind == "BF16" else 2)
    (run / "weights.safetensors").write_bytes(content)
    assert f"holds 'temperature' as {kind}" in refused(lambda: runs.load_run(run))


@pytest.mark.parametrize("seed", range(3))
def test_damage_in_a_file_of_weights_is_one_line_or_harmless(run, seed):
    file, rng = run / "weights.safetensors", np.random.default_rng(seed)
    intact, found = file.read_bytes(), 0
    for _ in range(40):
        content = bytearray(intact)
        end = min(700, len(content)) if rng.random() < 0.7 else len(content)
        for place in rng.integers(0, end, rng.integers(1, 4)):
            content[place] = rng.integers(256)
        file.write_bytes(content)
        try:
            runs.load_run(run)
        except ONE_LINE as error:
            found += 1
            assert len(str(error).splitlines()) == 1
    assert found > 15


METRICS = [
    '{"step": "1"}',
    '{"step": true}',
    '{"step": 1.5}',
    '{"step": -1}',
    '{"step": 9007199254740993}',
    "NaN",
    "[" * 100_000,
    '{"step": 1, "seconds": null}',
    '{"step": 1, "validation_accuracy": null}',
    '{"step": 1, "episodes": "x"}',
    '{"step": 1, "loss": NaN}',
    '{"step": 1, "loss": []}',
    '{"step": 1, "loss": true}',
    '{"step": 1, "loss": {"a": {}}}',
]


@pytest.mark.parametrize("line", METRICS)
def test_rows_of_metrics_that_are_none_are_named(run, line):
    file = run / "metrics.jsonl"
    file.write_text(file.read_text() + line + "\n")
    directory = run_directory.load(run)
    for call in (directory.read_metrics, lambda: directory.cut_metrics(5)):
        assert f"{file} line 2: expected a" in refused(call)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "weights.safetensors"])
def test_pipes_and_files_without_end_are_not_read(run, name, monkeypatch):
    file = run / name
    file.unlink()
    os.mkfifo(file)
    refused(lambda: (runs.load_run(run), run_directory.load(run).read_metrics()))
    file.unlink()
    if name != "weights.safetensors":
        file.write_bytes(b" " * 2000)
        monkeypatch.setattr(run_directory, "MOST_BYTES", 1000)
        assert "expected at most" in refused(lambda: run_directory.load(run).read_metrics())


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "weights.safetensors"])
def test_nothing_is_written_through_a_link_in_a_run_folder(run, tmp_path, name):
    kept = tmp_path / "kept"
    kept.write_bytes((run / name).read_bytes())
    before = kept.read_bytes()
    (run / name).unlink()
    (run / name).symlink_to(kept)
    directory = run_directory.load(run)
    if name == "metrics.jsonl":
        assert "expected to write" in refused(lambda: directory.append_metrics(1, {"loss": 1.0}))
    directory.cut_metrics(0)
    directory.save_weights({"a": np.ones(2)})
    assert kept.read_bytes() == before
    assert (run / name).is_symlink() == (name == "config.json")  # which is not written again


def test_a_disk_that_is_full_loses_no_row_and_is_told_in_one_line(run):
    import resource

    directory = run_directory.load(run)
    before = directory.metrics.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        message = refused(lambda: directory.append_metrics(1, {"loss": 1.0}))
        refused(lambda: directory.save_weights({"a": np.ones(1000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in message and str(directory.metrics) in message
    assert directory.metrics.read_bytes() == before
    directory.append_metrics(1, {"loss": 1.0})
    assert [row["step"] for row in directory.read_metrics()] == [0, 1]
    runs.load_run(run)


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("taken")
print("held", flush=True)
time.sleep(600)
"""


def holder(path):
    """Another process that holds the lock of a run folder."""
    command = [sys.executable, "-c", HOLDER, str(path / ".lock")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_do_not_train_in_one_folder(run):
    """And one that was killed does not keep the next out."""
    with holder(run) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match="got another process that does; wait for it"), run_directory.lock(run):
            pytest.fail("two hold the lock")
        other.kill()
    with run_directory.lock(run), holder(run) as other:
        assert other.wait(60) and other.stderr.read() == "taken\n"
    with run_directory.lock(run):  # one that ended well does not keep the next out either
        pass


def test_a_lock_is_no_way_to_write_elsewhere(run, tmp_path):
    (run / ".lock").symlink_to(tmp_path / "made")
    with pytest.raises(RunError, match="expected to write"), run_directory.lock(run):
        pytest.fail("the link was followed")
    assert not (tmp_path / "made").exists()
