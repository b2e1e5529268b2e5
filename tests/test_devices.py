"""Tasks shared between devices and between processes: the numbers of one device, and one writer."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_omniglot

from fewshot.inference.outer.devices import task_mesh
from fewshot.learners import GaussianProcess
from fewshot.runners.cli.flags import parse
from fewshot.training import optimisation, processes
from fewshot.training.configuration import RunConfig
from fewshot.training.log import columns
from fewshot.training.loop import WALL_CLOCK
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import load

TESTS = Path(__file__).resolve().parent
RUNNER = TESTS.parent / "runners" / "meta_train.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What sharing.py printed, compiled as for users; JAX counts devices once, so eight need a process of their own."""
    variables = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "32"}
    command = [sys.executable, TESTS / "sharing.py", tmp_path_factory.mktemp("shared")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_same_course(rows, expected, steps):
    """Every field of every step's log; counts are equal, the rest to rounding."""
    names = columns(GaussianProcess.diagnostics)
    rows, expected = (dict(zip(names, np.array(table)[:steps].T, strict=True)) for table in (rows, expected))
    for name, tolerance in {"loss": 1e-5, "objective": 1e-5, "log_prior": 1e-6}.items():
        np.testing.assert_allclose(rows[name], expected[name], atol=tolerance)
    np.testing.assert_allclose(rows["residual"], expected["residual"], rtol=1e-2, atol=1e-4)
    for name in ("failures", "clipped"):
        np.testing.assert_array_equal(rows[name], expected[name])


@pytest.mark.long
def test_eight_devices_give_the_numbers_of_one(shared):
    """Fifty steps of eight tasks: losses, diagnostics, and at the end every parameter and running statistic."""
    assert shared["devices"] == 8
    rows = shared["rows"]
    assert len(rows["8"]) == 50 and rows["1"][0][0] - rows["1"][-1][0] > 0.1  # it learns
    assert_same_course(rows["8"], rows["1"], 50)
    np.testing.assert_allclose(shared["learned"]["8"], shared["learned"]["1"], rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_several_tasks_on_each_of_several_devices(shared):
    assert_same_course(shared["rows"]["4"], shared["rows"]["1"], 10)


@pytest.mark.long
def test_devices_exchange_numbers_once_a_step(shared):
    """Every exchange between processes costs milliseconds."""
    assert shared["exchanges"] == 1


@pytest.mark.long
@pytest.mark.parametrize("course", ["8 then 1", "1 then 8"])
def test_a_checkpoint_of_some_devices_resumes_on_another_number(shared, course):
    assert_same_course(shared["rows"][course], shared["rows"]["1"], 10)


def test_devices_must_divide_the_tasks_of_a_step(monkeypatch):
    assert task_mesh(3) is None  # one device takes any number
    monkeypatch.setattr(jax, "devices", lambda: [object()] * 4)
    with pytest.raises(ConfigError) as error:
        optimisation.mesh(RunConfig(tasks_per_step=6))
    assert str(error.value) == (
        "--tasks-per-step: expected tasks per step to be a multiple of the 4 devices, got 6; "
        "try 8, or make only 1 or 2 or 3 visible (CUDA_VISIBLE_DEVICES)"
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--processes", "2", "--process-id", "0"],
        ["--coordinator", "127.0.0.1:9", "--processes", "2", "--process-id", "2"],
        ["--coordinator", "127.0.0.1", "--processes", "2", "--process-id", "0"],
        ["--coordinator", "127.0.0.1:9"],
    ],
)
def test_processes_that_do_not_fit_together_are_refused(flags, monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("must not be called"))
    with pytest.raises(ConfigError, match="--coordinator HOST:PORT"):
        processes.connect(parse(flags))


def test_processes_are_found_in_the_environment(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **_: calls.append(given))
    processes.connect(RunConfig())
    assert calls == []
    for name, value in {"COORDINATOR_ADDRESS": "host:1", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    processes.connect(RunConfig())
    processes.connect(RunConfig(process_id=1))
    processes.connect(RunConfig(coordinator="auto"))
    assert calls == [("host:1", 4, 3), ("host:1", 4, 1), ()]


def test_where_a_run_computes_is_not_stored():
    assert not {"coordinator", "processes", "process_id"} & RunConfig(processes=2).to_json().keys()


# Two processes


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def train(path, data, count, *flags):
    """meta_train.py in `count` processes; what each printed."""
    shared = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)] if count > 1 else []
    started = []
    for number in range(count):
        own = ["--process-id", str(number)] if count > 1 else []
        command = [sys.executable, RUNNER, *flags, *shared, *own, "--run-dir", path, "--data-root", data]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    printed = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0] * count, printed
    return [out for out, _ in printed]


def rows(path):
    records = load(path).read_metrics()
    return [{name: value for name, value in record.items() if name not in WALL_CLOCK} for record in records]


def assert_same_run(path, expected):
    for row, other in zip(rows(path), rows(expected), strict=True):
        assert row.keys() - {"temperature"} == other.keys() - {"temperature"}
        for name in row.keys() & other.keys() - {"validation_accuracy", "temperature"}:
            assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_of_them_writes(tiny_data, tmp_path):
    settings = tiny_omniglot.SETTINGS | {"trainer.learning_rate": 1e-3}
    flags = tiny_omniglot.arguments(backbone="mlp", tasks_per_step=2, episodes=20, settings=settings)
    train(tmp_path / "one", tiny_data, 1, *flags)
    first, second = train(tmp_path / "two", tiny_data, 2, *flags)
    assert all(line.startswith("[Gloo]") for line in second.splitlines())  # printed by the library that connects them
    assert "1-nearest neighbour on pixels" in first
    assert_same_run(tmp_path / "two", tmp_path / "one")
    for path in (tmp_path / "one", tmp_path / "two"):  # go on from the middle with the other number of processes
        shutil.rmtree(path / "checkpoints" / "10")
    train(tmp_path / "one", tiny_data, 2, "--resume")
    train(tmp_path / "two", tiny_data, 1, "--resume")
    assert_same_run(tmp_path / "two", tmp_path / "one")
    assert [row["step"] for row in rows(tmp_path / "one")] == [0, 2, 4, 6, 8, 10]
