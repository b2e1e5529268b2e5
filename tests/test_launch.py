"""How command lines end."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fewshot.runners import meta_train, predict
from fewshot.runners.cli import compilation_cache, main, processor
from fewshot.runners.cli import launch as launch_module
from fewshot.runners.cli.launch import launch
from fewshot.training import processes
from fewshot.training.interruption import Stopped


def test_a_reader_that_has_had_enough_ends_the_program_quietly(monkeypatch):
    for module, name in ((compilation_cache, "keep_programs"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert launch(lambda _: "a table", print, []) == 128 + signal.SIGPIPE
        monkeypatch.undo()


def test_a_disk_that_cannot_be_written_to_is_one_line(monkeypatch, capsys):
    for module, name in ((compilation_cache, "keep_programs"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)

    def write(_):
        raise PermissionError(13, "Permission denied", "table.md")

    with pytest.raises(SystemExit) as exit_info:
        launch(lambda _: "a table", write, [])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 13] Permission denied: 'table.md'\n"


def test_training_for_a_reader_that_has_had_enough_ends_quietly(monkeypatch):
    for module, name in ((compilation_cache, "keep_programs"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)
    monkeypatch.setattr(meta_train, "main", lambda _: print("a line", flush=True))
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert meta_train.command_line(["--episodes", "1"]) == 128 + signal.SIGPIPE
        monkeypatch.undo()


def test_what_goes_well_ends_with_0(monkeypatch, capsys):
    for module, name in ((compilation_cache, "keep_programs"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)
    assert launch(lambda _: "a table", print, []) == 0
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.long
@pytest.mark.parametrize(("code", "printed"), [(0, "a line, cleaned up"), (2, "a line, cleaned up"), (143, "a line")])
def test_after_a_signal_a_program_waits_for_nothing(code, printed):
    """Python's own exit waits for compiled code that still runs: for the compiler after Ctrl-C."""
    program = f"""
import atexit, sys
from fewshot.runners.cli.launch import leave
atexit.register(print, ", cleaned up", end="")
print("a line", end="")
leave({code})
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run([sys.executable, "-c", program], env=buffered, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, printed, "")


@pytest.mark.parametrize("name", main.PROGRAMS.values())
def test_every_program_leaves_with_its_code(name, monkeypatch):
    def interrupted(*_):
        raise Stopped(signal.SIGTERM)

    left = []
    monkeypatch.setattr(launch_module, "launch", lambda *_: 143)
    monkeypatch.setattr(processes, "connect", interrupted)  # of meta_train.py, which launches itself
    monkeypatch.setattr(launch_module, "leave", left.append)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(Path(meta_train.__file__).with_name(f"{name}.py")), run_name="__main__")
    assert left == [143]


def test_the_console_command_leaves_with_the_code_of_its_program(monkeypatch):
    left = []
    monkeypatch.setattr(predict, "command_line", lambda words: 143 if words == ["new/"] else 2)
    monkeypatch.setattr(launch_module, "leave", left.append)
    assert main.main(["predict", "new/"]) == 143 and left == []
    monkeypatch.setattr(sys, "argv", ["fewshot", "predict", "new/"])
    main.main()
    assert left == [143]
