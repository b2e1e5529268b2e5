"""Damaged files of every kind and altered values: one line for each that cannot be read, and never a traceback."""

import fuzz
import fuzz_files
import fuzz_folders
import numpy as np
import pytest

# Orbax leaves coroutines behind where files whose sums are right cannot be read, and Python says so after the error.
left_behind = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@left_behind
def test_damaged_files_are_refused_in_one_line():
    found, refused, done = fuzz_files.run_all(120, 0)
    assert found == [] and sum(refused.values()) > 80
    assert set(done) >= {"config.json", "checkpoint with its sums", "predictions.npz", "PNG picture", "embeddings"}


def test_altered_weights_metrics_and_manifests_are_refused_in_one_line():
    assert fuzz_folders.altered(45, 0) == ([], 45)


def test_faults_are_counted(tmp_path):
    """Readers that fail in each way."""

    def reader(result):
        def read(path):
            if isinstance(result, Exception):
                raise result
            return result

        return fuzz_files.Kind("kind", tmp_path / "file", b"whole", read)

    ways = {
        "traceback": KeyError("x"),
        "NaN": np.array([1.0, np.nan]),
        "not one line": fuzz_files.DataError("file\nx"),
        "names no file": fuzz_files.DataError("x"),
    }
    for name, result in ways.items():
        (kind, _), _ = fuzz_files.fault(reader(result), b"damaged")
        assert kind == name and (tmp_path / "file").read_bytes() == b"whole"
    assert fuzz_files.fault(reader(fuzz_files.DataError("file is bad")), b"") == (None, True)
    rows = fuzz.table([("files", 4, [(name, "") for name in ways], 1.0)]).splitlines()[1].split()
    assert rows == ["files", "4", "1", "1", "0", "2", "1"]


@pytest.mark.long
@pytest.mark.parametrize("seconds, kinds", [(1, []), (30, ["hang"])])
def test_a_command_that_waits_is_no_hang_unless_it_never_ends(seconds, kinds, tmp_path, monkeypatch):
    (tmp_path / "evaluate.py").write_text(f"import time\ntime.sleep({seconds})\n")
    monkeypatch.setattr(fuzz_folders, "RUNNERS", tmp_path)
    monkeypatch.setattr(fuzz_folders, "HANG", 0.3)
    assert [kind for kind, _ in fuzz_folders._outcome("evaluate", tmp_path, "data", "a file")] == kinds


def test_pieces_of_a_part_are_added_up(monkeypatch, capsys):
    pieces = [("tasks", lambda number: ([("NaN", f"piece {number}")] * number, 5), (number,)) for number in (0, 1)]
    monkeypatch.setattr(fuzz, "pieces", lambda arguments: [*pieces, ("files", lambda: ([], 7), ())])
    assert fuzz.main(["--processes", "1"]) == 1
    shown = capsys.readouterr().out
    rows = [line.split()[:6] for line in shown.splitlines()[-2:]]
    assert rows == [["tasks", "10", "0", "1", "0", "0"], ["files", "7", "0", "0", "0", "0"]] and "NaN: piece 1" in shown
    monkeypatch.setattr(fuzz, "pieces", lambda arguments: pieces[:1])
    assert fuzz.main(["--processes", "1"]) == 0


def test_every_task_is_tried_and_none_is_left_to_rounding():
    words = ["--tasks", "20000", "--folders", "0", "--files", "3"]
    asked = fuzz.pieces(fuzz.parse(words))
    assert [name for name, _, _ in asked][:3] == ["files", "configurations", "weights, metrics, manifests"]
    assert sum(name == "tasks" for name, _, _ in asked) == len(fuzz.fuzz_tasks.programs())
    assert sum(fuzz.fuzz_tasks.tasks_of(number, 20_000) for number in range(len(fuzz.fuzz_tasks.programs()))) >= 20_000


@left_behind
@pytest.mark.slow
def test_a_short_form_of_all_the_fuzzing_finds_nothing():
    """`make fuzz` is the long one."""
    words = "--tasks 0 --files 1500 --configurations 200 --altered 90 --folders 4 --seed 1 --processes 1"
    assert fuzz.main(words.split()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("cell", [("cvi", "softmax"), ("cavi", "logistic-softmax"), ("exact", "gaussian")])
def test_tasks_that_no_data_set_has_are_answered_or_refused(cell, monkeypatch):
    monkeypatch.setattr(fuzz.fuzz_tasks, "programs", lambda: [(fuzz.fuzz_tasks.Program(*cell, (5, 10), False), 1.0)])
    found, codes, done, told = fuzz.fuzz_tasks.run_program(0, 192, 0)
    assert found == [] and done == 192 and codes[0] > 20 and "3 batches" in told
