"""How command lines end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fewshot.runners import meta_train
from fewshot.runners.cli import compilation_cache, main, processor
from fewshot.runners.cli import launch as launch_module
from fewshot.runners.cli.launch import launch


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
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, printed, "")


@pytest.mark.parametrize("name", [*main.PROGRAMS.values(), "cli/main"])
def test_every_program_leaves_so(name):
    assert "leave(" in (Path(launch_module.__file__).parents[1] / f"{name}.py").read_text()
