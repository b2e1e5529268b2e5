"""A run that is killed or interrupted and then resumed ends as the run that never was, bit for bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_omniglot

from inference.outer import checkpoint
from runners import meta_train, run_directory
from runners.training import WALL_CLOCK

RUNNER = Path(__file__).resolve().parents[1] / "runners" / "meta_train.py"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A network with batch norm, so that running statistics are part of the state."""
    root = tiny_omniglot.write(tmp_path_factory.mktemp("data"))
    settings = tiny_omniglot.SETTINGS | {"backbone.width": 4, "trainer.log_every": 2}
    return tiny_omniglot.arguments(backbone="conv4", episodes=24, settings=settings, data_root=root)


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """The run that is never stopped."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert meta_train.command_line([*flags, "--run-dir", str(path)]) == 0
    return path


def start(flags, path, *more):
    return subprocess.Popen([sys.executable, RUNNER, *flags, "--run-dir", path, *more], cwd=path.parent)


def last_step(path):
    lines = (path / "metrics.jsonl").read_text().splitlines() if (path / "metrics.jsonl").exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1


def stop_after(process, path, step, number, delay=0.0):
    """Send a signal once the metrics have reached a step."""
    deadline = time.monotonic() + 200
    while last_step(path) < step and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(number)
    return process.wait(timeout=100)


def everything(path):
    """Arrays of the last checkpoint as saved, exported weights, and all metrics but the clock's."""
    run = run_directory.load(path)
    last = checkpoint.steps(run.checkpoints)[-1]
    records = [{k: v for k, v in record.items() if k not in WALL_CLOCK} for record in run.read_metrics()]
    return last, stored_arrays(run.checkpoints / str(last)), run.weights.read_bytes(), records


def stored_arrays(folder):
    import orbax.checkpoint as ocp

    names = json.loads((folder / "manifest.json").read_text())["arrays"]
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore((folder / "state").resolve())
    assert arrays.keys() <= names.keys()
    return {name: np.asarray(array) for name, array in arrays.items()}


def assert_identical(path, whole):
    step, arrays, weights, records = everything(path)
    expected_step, expected, expected_weights, expected_records = everything(whole)
    assert step == expected_step and arrays.keys() == expected.keys()
    parts = ("backbone.block0.kernel", "hyper.log_scale", "norm.variance", "mu", "nu", "count")
    for part in parts:  # the comparison does cover parameters, running statistics and the optimiser's state
        assert any(part in name for name in arrays), (part, sorted(arrays))
    for name, array in expected.items():
        assert array.dtype == arrays[name].dtype and array.tobytes() == arrays[name].tobytes(), name
    assert weights == expected_weights
    assert records == expected_records


@pytest.mark.parametrize("step", [8])
def test_a_killed_run_ends_as_if_it_had_not_been(step, flags, whole, tmp_path):
    path = tmp_path / "killed"
    assert stop_after(start(flags, path), path, step, signal.SIGKILL) == -signal.SIGKILL
    assert 0 <= last_step(path) < 24
    assert meta_train.command_line(["--resume", "--run-dir", str(path), *data_root(flags)]) == 0
    assert_identical(path, whole)


def data_root(flags):
    return ["--data-root", str(flags[flags.index("--data-root") + 1])]


def test_an_interrupted_run_ends_with_a_checkpoint_and_goes_on(flags, whole, tmp_path, capfd):
    path = tmp_path / "interrupted"
    assert stop_after(start(flags, path), path, 2, signal.SIGINT) == 128 + signal.SIGINT
    stopped_at = checkpoint.steps(path / "checkpoints")[-1]
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out.endswith(f"stopped by SIGINT after step {stopped_at}; go on with --resume --run-dir {path}\n")
    assert meta_train.command_line(["--resume", "--run-dir", str(path), *data_root(flags)]) == 0
    assert f"resumed after step {stopped_at} of 24" in capfd.readouterr().out
    assert_identical(path, whole)


@pytest.mark.slow
def test_twenty_random_kills(flags, whole, tmp_path):
    rng = random.Random(0)
    for repeat in range(20):
        path = tmp_path / str(repeat)
        step, delay = rng.randrange(-1, 22), rng.uniform(0, 0.1)
        stop_after(start(flags, path), path, step, signal.SIGKILL, delay)
        again = start([], path, "--resume", *data_root(flags))
        assert again.wait(timeout=200) == 0, f"repeat {repeat}: killed after step {step} and {delay:.3f} s"
        assert_identical(path, whole)
    assert os.listdir(tmp_path)
