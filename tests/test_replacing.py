"""Files are replaced whole; links, devices and pipes stay what they are."""

import os
import threading

import pytest

from fewshot.tasks.replacing import replace_bytes, replace_text


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path):
    path = tmp_path / "a"
    for text in ("old", "new"):
        replace_text(path, text)
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    replace_text(link, "new")
    assert link.is_symlink() and target.read_text() == "new"


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    replace_bytes(pipe, b"through")
    reader.join(timeout=10)
    assert read == [b"through"] and pipe.is_fifo()


def test_a_file_name_that_is_no_text_can_be_written(tmp_path):
    replace_text(tmp_path / "a", os.fsdecode(b"caf\xe9.png"))
    assert (tmp_path / "a").read_bytes() == b"caf\xe9.png"


def test_what_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        replace_text(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
