"""Files are replaced whole; links, devices and pipes stay what they are."""

import os
import resource
import stat
import threading

import pytest

from fewshot.tasks import files
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


def test_nothing_is_written_through_a_link_in_a_folder_of_somebody_else(tmp_path, monkeypatch):
    kept, link = tmp_path / "kept", tmp_path / "config.json"
    kept.write_text("precious")
    link.symlink_to(kept)
    replace_text(link, "new", follow=False)
    assert kept.read_text() == "precious" and link.read_text() == "new" and not link.is_symlink()
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".config.json.guessed.part").symlink_to(kept)
    with pytest.raises(FileExistsError):
        replace_text(link, "newer")
    assert kept.read_text() == "precious" and link.read_text() == "new"


def test_a_file_left_by_another_program_does_not_stop_the_next(tmp_path):
    (tmp_path / ".a.staging").mkdir()  # once the name of every new file
    replace_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_new_files_are_under_the_users_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        replace_text(tmp_path / "a", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


def test_a_disk_that_is_full_leaves_the_old_file(tmp_path):
    """A limit on the size of files stands for the disk: a write then ends in the same way, with an OSError."""
    path = tmp_path / "a"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError):
            replace_bytes(path, bytes(3_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
