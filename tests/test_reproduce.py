"""reproduce.py: a tiny comparison from start to table, stopped and continued, and what it refuses."""

import json

import pytest
import tiny_omniglot

from runners import reproduce
from runners.configuration import RunConfig, resolve
from runners.reproduce import COMPARISONS, Comparison, Method, ReproductionConfig

CHANGES = {"backbone": "conv4", "query": 3}
SETTINGS = tiny_omniglot.SETTINGS
TINY = Comparison(
    "omniglot",
    (
        Method("softmax-cvi", "softmax", "cvi", CHANGES, SETTINGS),
        Method("gaussian-exact", "gaussian", "exact", CHANGES, SETTINGS),
    ),
    way=3,
    quick_episodes=6,
    test_episodes=12,
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(COMPARISONS, "tiny", TINY)


def test_a_comparison_ends_with_its_table_and_is_the_same_when_run_again(tiny, tiny_data, tmp_path, capsys):
    config = ReproductionConfig("tiny", quick=True, out=str(tmp_path / "out"), data_root=tiny_data)
    rows = reproduce.main(config)
    assert [row["method"] for row in rows] == ["softmax-cvi", "gaussian-exact"]
    assert all(row["failures"] == row["training_failures"] == 0 and 0 < row["accuracy"] <= 1 for row in rows)
    assert capsys.readouterr().out.count("softmax-cvi  ") == 1
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["rows"] == rows
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.splitlines()[0].startswith("| method | shot |") and len(table.splitlines()) == 4
    again = reproduce.main(config)  # nothing is trained twice
    for row, other in zip(rows, again, strict=True):
        assert {**row, "seconds": 0} == {**other, "seconds": 0}


def test_a_folder_of_other_runs_is_refused(tiny, tiny_data, tiny_run, tmp_path, capsys):
    (tmp_path / "softmax-cvi-1shot").symlink_to(tiny_run.path)
    flags = ["tiny", "--quick", "--seed", "1", "--out", str(tmp_path), "--data-root", tiny_data]
    with pytest.raises(SystemExit) as exit_info:
        reproduce.command_line(flags)
    assert exit_info.value.code == 2
    assert "was trained with episodes 20, got 6; choose another --out" in capsys.readouterr().err


def test_unknown_comparisons_are_refused(capsys):
    with pytest.raises(SystemExit):
        reproduce.command_line(["nothing"])
    message = "expected a known comparison, got 'nothing'; known: omniglot-kernels, omniglot-pairs"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_method_of_a_comparison_can_be_configured(name):
    methods = COMPARISONS[name].methods
    assert len({method.name for method in methods}) == len(methods)
    for method in methods:
        config = RunConfig(likelihood=method.likelihood, inference=method.inference, settings=method.settings)
        resolve(config)
