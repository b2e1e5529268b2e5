"""How command lines end."""

import os
import signal
import sys

from runners import compilation_cache, processor
from runners.launch import launch


def test_a_reader_that_has_had_enough_ends_the_program_quietly(monkeypatch):
    for module, name in ((compilation_cache, "enable"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert launch(lambda _: "a table", print, []) == 128 + signal.SIGPIPE
        monkeypatch.undo()


def test_what_goes_well_ends_with_0(monkeypatch, capsys):
    for module, name in ((compilation_cache, "enable"), (processor, "tune")):
        monkeypatch.setattr(module, name, lambda: None)
    assert launch(lambda _: "a table", print, []) == 0
    assert capsys.readouterr().out == "a table\n"
