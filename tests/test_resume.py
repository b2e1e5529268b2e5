"""A run that is killed or interrupted and then resumed ends as the run that never was, bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_omniglot

from fewshot.runners import meta_train
from fewshot.runners.cli.flags import parse
from fewshot.training import checkpoint, run_directory
from fewshot.training.interruption import Interrupted
from fewshot.training.loop import WALL_CLOCK, Training, dispatch_size
from fewshot.training.run_directory import RunError

RUNNER = Path(__file__).resolve().parents[1] / "runners" / "meta_train.py"
LAST = tiny_omniglot.FLAGS["episodes"]


@pytest.fixture(autouse=True)
def interruptible():
    """A shell starts background jobs, and this suite may be one, with Ctrl-C ignored, which processes inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def start(tiny_data, tmp_path):
    """Start a run, or resume it, in a process of its own and from a foreign folder."""

    def process(path, *flags):
        command = [sys.executable, RUNNER, *flags, "--run-dir", path, "--data-root", tiny_data]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return process


def last_step(path):
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else -1


def stop_after(process, path, step, number, delay=0.0):
    """Send a signal once the metrics have reached a step; exit code and output."""
    deadline = time.monotonic() + 300
    while last_step(path) < step and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=100)
    return process.returncode, printed


def stored_arrays(folder):
    """Arrays of a checkpoint, read without our own code."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return {name: np.asarray(array) for name, array in checkpointer.restore((folder / "state").resolve()).items()}


def rows(path):
    """All metrics but the clock's."""
    records = run_directory.load(path).read_metrics()
    return [{name: value for name, value in record.items() if name not in WALL_CLOCK} for record in records]


def test_a_trained_run_without_checkpoints_is_not_begun_again(tiny_run, tiny_data, tmp_path):
    path = tmp_path / "copy"
    shutil.copytree(tiny_run.path, path)
    shutil.rmtree(path / "checkpoints")
    before = {file: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(RunError, match=r"was trained and has no checkpoints to go on from; test it with evaluate.py"):
        meta_train.main(parse(["--resume", "--run-dir", str(path), "--data-root", tiny_data]))
    assert {file: file.read_bytes() for file in path.iterdir()} == before


def test_a_run_whose_best_weights_are_lost_does_not_go_on(tiny_run, tiny_data, tmp_path):
    """They are kept nowhere else. It is said at once, and not after the last step."""
    path = tmp_path / "copy"
    shutil.copytree(tiny_run.path, path)
    *_, before, last = checkpoint.steps(path / "checkpoints")
    shutil.rmtree(path / "checkpoints" / str(last))  # steps are left to take
    again = ["--resume", "--run-dir", str(path), "--data-root", tiny_data]
    for size, reason in ((1000, "damaged weights: .*"), (None, "no exported weights in .*; ")):
        os.truncate(path / "weights.safetensors", size) if size else (path / "weights.safetensors").unlink()
        with pytest.raises(RunError, match=rf"{reason}train it anew with meta_train.py --config {path} --run-dir NEW$"):
            meta_train.main(parse(again))
        assert max(row["step"] for row in rows(path)) <= before < last


def assert_identical(path, whole):
    assert rows(path) == rows(whole)
    assert (path / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    assert checkpoint.steps(path / "checkpoints")[-1] == LAST
    arrays, expected = (stored_arrays(run / "checkpoints" / str(LAST)) for run in (path, whole))
    assert arrays.keys() == expected.keys()
    for part in ("block0.kernel", "hyper.log_scale", "norm.variance", "mu", "nu", "count", "window"):
        assert any(part in name for name in arrays), f"{part}: not compared"
    for name, array in expected.items():
        assert array.dtype == arrays[name].dtype and array.tobytes() == arrays[name].tobytes(), name


def interrupt_after(monkeypatch, step):
    """Ctrl-C comes while the given step runs."""
    advance = Training._advance

    def advance_and_interrupt(training, count):
        advance(training, count)
        if training.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Training, "_advance", advance_and_interrupt)


def interrupt_in_validation(monkeypatch, step):
    """Ctrl-C comes in the validation of the given step, which does not end."""
    validate = Training._validate

    def validate_or_interrupt(training, run):
        if training.step == step:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        return validate(training, run)

    monkeypatch.setattr(Training, "_validate", validate_or_interrupt)


def best_after_restoring(monkeypatch):
    """Filled with the step of the last row, and the best validation accuracy, that each resumed run takes over."""
    best, restore = [], Training._restore

    def restore_and_note(training):
        restore(training)
        if training.step:
            best.append((training.written, training.best))

    monkeypatch.setattr(Training, "_restore", restore_and_note)
    return best


@pytest.mark.long
def test_an_interrupted_and_a_killed_run_end_as_if_they_had_not_been(
    start, tiny_run, tiny_data, tmp_path, capfd, monkeypatch
):
    path = tmp_path / "stopped"
    where = ["--run-dir", str(path), "--data-root", tiny_data]
    best = best_after_restoring(monkeypatch)
    interrupt_after(monkeypatch, 5)  # between two rows of the metrics
    assert meta_train.command_line([*tiny_omniglot.arguments(), *where]) == 128 + signal.SIGINT
    printed = capfd.readouterr().out
    assert printed.endswith(f"stopped by SIGINT after step 5; go on with --resume --run-dir {path}\n")
    assert checkpoint.steps(path / "checkpoints") == [0, 5]
    with monkeypatch.context() as patch:
        interrupt_in_validation(patch, 12)
        assert meta_train.command_line(["--resume", *where]) == 128 + signal.SIGINT
    assert checkpoint.steps(path / "checkpoints") == [6, 12] and last_step(path) == 10  # its row waits
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    code, printed = stop_after(start(path, "--resume"), path, 14, signal.SIGKILL)
    assert code == -signal.SIGKILL, printed
    assert 14 <= last_step(path) < LAST

    assert meta_train.command_line(["--resume", *where]) == 0
    assert capfd.readouterr().err == ""
    assert_identical(path, tiny_run.path)
    for step, restored in best:
        before = [row for row in rows(path) if row["step"] <= step and "validation_accuracy" in row]
        assert restored == max((row["validation_accuracy"], -row["validation_nll"]) for row in before)
    assert len(best) == 2


@pytest.mark.long
def test_tasks_that_failed_before_a_resume_are_counted(tiny_run, tiny_data, tmp_path):
    path = shutil.copytree(tiny_run.path, tmp_path / "copy")
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    failed = [record | {"failures": 2} if "failures" in record else record for record in records]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in failed))
    result = meta_train.main(meta_train.parse(["--resume", "--run-dir", str(path), "--data-root", str(tiny_data)]))
    assert result["training_failures"] == 2 * sum("failures" in record for record in records) > 0


def dispatches(start=0, together=3):
    """Sizes of the dispatches of a run of 20 steps with rows every 6 and every 8, resumed after `start`."""
    sizes = []
    while start + sum(sizes) < 20:
        sizes.append(dispatch_size(start + sum(sizes), together, (6, 8), 20))
    return sizes


def test_no_dispatch_runs_past_a_row_or_depends_on_where_a_run_was_resumed():
    whole = dispatches()
    assert whole == [3, 3, 1, 1, 3, 1, 3, 1, 1, 1, 1, 1]  # rows at 6, 8, 12, 16, 18 and 20
    for number in range(len(whole)):
        assert dispatches(sum(whole[:number])) == whole[number:]
    assert dispatches(together=1) == [1] * 20


@pytest.mark.slow
def test_a_run_of_several_steps_a_dispatch_resumes_bit_for_bit(tiny_data, tmp_path, monkeypatch):
    """Also, its numbers are those of single steps to rounding."""
    sizes = {"log_every": 4, "validate_every": 8}
    settings = tiny_omniglot.SETTINGS | {f"trainer.{name}": value for name, value in sizes.items()}
    settings |= {"trainer.learning_rate": 1e-3}
    where = ["--data-root", tiny_data, "--run-dir"]

    def train(name, together, *flags):
        changed = settings | {"trainer.steps_per_dispatch": together}
        flags = flags or tiny_omniglot.arguments(backbone="mlp", settings=changed)
        return meta_train.command_line([*flags, *where, str(tmp_path / name)])

    assert train("whole", 2) == 0 and train("single", 1) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 10)
        assert train("stopped", 2) == 128 + signal.SIGINT
    assert train("stopped", 2, "--resume") == 0
    assert rows(tmp_path / "stopped") == rows(tmp_path / "whole")
    one, two = ((tmp_path / name / "weights.safetensors").read_bytes() for name in ("stopped", "whole"))
    assert one == two
    for row, other in zip(rows(tmp_path / "whole"), rows(tmp_path / "single"), strict=True):
        assert row["step"] == other["step"]
        if row["step"]:
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_second_interrupt_stops_at_once():
    with pytest.raises(KeyboardInterrupt), Interrupted() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


ENDLESS = """
import signal, sys
import jax
from fewshot.runners import meta_train
from fewshot.training import class_problem, loop

signal.signal(signal.SIGINT, signal.default_int_handler)
phase, compiled = sys.argv[1], sys.argv[2] == "compiled"
owner, name = {
    "start": (class_problem, "load_splits"),
    "compilation": (loop.Training, "_estimate"),
    "step": (loop.Training, "_advance"),
    "validation": (loop.Training, "_validate"),
    "temperature": (class_problem, "fitted_temperature"),
    "test": (class_problem, "with_statistics"),
}[phase]
before = getattr(owner, name)
loops = lambda i, total: jax.lax.fori_loop(0, 2**30, lambda j, total: (total * 3 + j) % 1001, total)
forever = jax.jit(lambda total: jax.lax.fori_loop(0, 2**30, loops, total)).lower(0).compile()

def instead(*given):
    if phase in ("step", "validation") and given[0].step < 6:
        return before(*given)
    print("here", flush=True)
    while True:
        forever(0).block_until_ready() if compiled else None

setattr(owner, name, instead)
sys.exit(meta_train.command_line(sys.argv[3:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how, number", [("compiled", signal.SIGINT), ("python", signal.SIGTERM)])
@pytest.mark.parametrize("phase", ["start", "compilation", "step", "validation", "temperature", "test"])
def test_a_signal_ends_a_run_within_five_seconds_whatever_it_does(phase, how, number, tiny_data, tmp_path):
    """Compiled code that never ends, to which Python's handlers do not come, and Python that never ends."""
    words = [*tiny_omniglot.arguments(), "--run-dir", str(tmp_path / "run"), "--data-root", tiny_data]
    command = [sys.executable, "-c", ENDLESS, phase, how, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        before = iter(process.stdout.readline, "")
        assert any(line == "here\n" for line in before)
        time.sleep(0.5)
        begun = time.monotonic()
        process.send_signal(number)
        printed = process.stdout.readline()
        assert "stopped" in printed and time.monotonic() - begun < 5, printed
        assert process.stdout.read() == ""
        assert process.wait(30) == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [range(4), range(4, 20)], ids=["first_four", "sixteen_more"])
def test_random_kills(start, tiny_run, tmp_path, repeats):
    rng = random.Random(0)
    kills = [(rng.randrange(LAST - 1), rng.uniform(0, 0.1)) for _ in range(20)]
    for repeat in repeats:
        path, (step, delay) = tmp_path / str(repeat), kills[repeat]
        code, printed = stop_after(start(path, *tiny_omniglot.arguments()), path, step, signal.SIGKILL, delay)
        assert code == -signal.SIGKILL, printed
        resumed = start(path, "--resume")
        printed, _ = resumed.communicate(timeout=300)
        assert resumed.returncode == 0, f"repeat {repeat}, killed after step {step} and {delay:.3f} s: {printed}"
        assert_identical(path, tiny_run.path)
