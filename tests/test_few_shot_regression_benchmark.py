"""benchmarks/few_shot_regression.py: its commands are ones of today, a row is trained, kept and not trained again."""

import json

import pytest
from conftest import load_benchmark

from fewshot.runners import meta_train
from fewshot.training.configuration import resolve


@pytest.fixture(scope="module")
def study():
    return load_benchmark("few_shot_regression")


def test_every_command_is_accepted_and_every_row_has_a_folder_of_its_own(study):
    rows = study.rows()
    assert len({row.folder for row in rows}) == len({row[:3] for row in rows}) == len(rows)
    for row in rows:
        assert row.folder.count("/") == 0
        config = resolve(meta_train.parse(row.command))
        assert (config.dataset, config.shot, config.seed) == (row.data, row.shot, 0)
        assert config.trainer.test_episodes == 600
    assert [row.shot for row in rows if study.chosen(row, ["sinusoids", "maml"])] == [5, 10]


@pytest.mark.slow
def test_a_row_is_trained_once_and_written(study, monkeypatch, tmp_path, capsys):
    words = "--learner cnp --episodes 4 --set backbone.width=8 learner.width=8 trainer.validation_episodes=3"
    row = study.Row("gp-curves:rbf", 3, "cnp", f"{words} trainer.test_episodes=4 trainer.validate_every=2")
    monkeypatch.setattr(study, "rows", lambda: [row])
    arguments = study.parse(["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    monkeypatch.setattr(study, "parse", lambda: arguments)
    study.main()
    (kept,) = json.loads((tmp_path / "out" / "results.json").read_text())
    gap = kept["trained"]["nll"] - kept["best"]["nll"]
    page = (tmp_path / "out" / "table.md").read_text()
    assert gap > 0 and f"| {gap:.3f} |" in page and page in capsys.readouterr().out
    study.main()
    assert "Test on" not in capsys.readouterr().out
