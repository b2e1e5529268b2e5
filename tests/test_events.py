"""TensorBoard events: the numbers of metrics.jsonl, read back from the files."""

import errno
import json
import os
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
from tiny_omniglot import FLAGS

from fewshot.runners import meta_train
from fewshot.training import events
from fewshot.training.configuration import RunConfig
from fewshot.training.events import EventFile
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import RunError

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def written(folder):
    """The events of all files of a run, in the order of writing; a record is its length, a sum, its bytes, a sum."""
    found = []
    for path in sorted((folder / events.FOLDER).iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            found.append(event_pb2.Event.FromString(content[at + 12 : at + 12 + length]))
            at += 16 + length
    return found


def scalars(folder):
    """{(step, name): value}"""
    return {(event.step, value.tag): value.simple_value for event in written(folder) for value in event.summary.value}


def test_rows_are_scalars_on_disk_at_once(tmp_path):
    with EventFile(tmp_path, resumed=False) as row:
        row(5, {"loss": 1.5, "failures": 2})
        assert scalars(tmp_path) == {(5, "loss"): 1.5, (5, "failures"): 2}
        row(10, {"loss": float("nan")})
        assert np.isnan(scalars(tmp_path)[10, "loss"])


def test_a_resumed_run_hides_what_was_written_after_its_first_row(tmp_path):
    for resumed in (False, True):
        with EventFile(tmp_path, resumed) as row:
            row(5 + resumed, {"loss": 1.0})
    starts = [event for event in written(tmp_path) if event.session_log.status == event_pb2.SessionLog.START]
    assert [event.step for event in starts] == [6]


def test_a_link_or_a_file_in_the_place_of_the_folder_is_one_line(tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    (run / events.FOLDER).symlink_to(elsewhere)
    with EventFile(run, resumed=True) as row, pytest.raises(RunError, match="expected a folder for events, got the li"):
        row(5, {"loss": 1.0})
    assert not list(elsewhere.iterdir())
    (run / events.FOLDER).unlink()
    (run / events.FOLDER).write_text("")
    with EventFile(run, resumed=True) as row, pytest.raises(RunError, match=r"expected to write .*File exists"):
        row(5, {"loss": 1.0})


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    with EventFile(tmp_path, resumed=False) as row:
        row(5, {"loss": 1.0})

        def full():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(row.opened, "flush", full)
        with pytest.raises(RunError, match=r"expected to write .*No space left.*, make room$"):
            row(6, {"loss": 1.0})
        monkeypatch.undo()


def test_a_missing_package_is_one_line_and_nothing_is_made(tmp_path, monkeypatch):
    for name in [one for one in sys.modules if one.partition(".")[0] == "tensorboardX"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"expected tensorboardX.*try pip install"):
        meta_train.main(RunConfig(run_dir=str(tmp_path / "run"), tensorboard=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_run_writes_all_its_metrics(tmp_path, tiny_data):
    run = tmp_path / "run"
    config = RunConfig(**FLAGS, run_dir=str(run), data_root=str(tiny_data))
    meta_train.main(replace(config, tensorboard=True))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = scalars(run)
    expected = {(row["step"], name): value for row in rows for name, value in row.items() if name != "step"}
    assert found.keys() == expected.keys() and len(found) > 30
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    assert "tensorboard" not in json.loads((run / "config.json").read_text())
