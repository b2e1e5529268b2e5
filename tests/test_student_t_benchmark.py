"""benchmarks/student_t.py on a few generated rows: every method gets a row with finite numbers, and both files."""

import json

import numpy as np
import pytest
from conftest import load_benchmark

from fewshot.tasks import uci


@pytest.fixture(scope="module")
def study():
    return load_benchmark("student_t")


def fold(rows=60):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    return uci.standardised(np.column_stack([x, np.sin(x[:, 0]) + 0.1 * rng.normal(size=rows)]), np.arange(rows) < 12)


@pytest.mark.slow
def test_all_methods_run_and_are_written(study, monkeypatch, tmp_path, capsys):
    given = ["--data", "energy", "--seconds", "0", "--chunk", "60", "--inducing", "6", "--batch", "16"]
    given += ["--rates", "0.05", "0.0005", "--out", str(tmp_path / "out")]
    arguments = study.parse(given)
    monkeypatch.setattr(study, "parse", lambda: arguments)
    monkeypatch.setattr(uci, "load_fold", lambda name, number: fold())
    study.main()
    kept = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["method"] for row in kept] == [*study.METHODS, "gaussian process"]
    for row in kept:
        numbers = [value for point in row["curve"] for value in point.values()]
        assert np.isfinite(numbers).all() and row["curve"][-1]["loss"] < row["curve"][0]["loss"]
    page = (tmp_path / "out" / "table.md").read_text()
    assert page.strip() == capsys.readouterr().out.strip() and page.count("\n") == len(kept) + 2


def test_the_table_looks_up_the_curve_at_shares_of_the_time(study):
    curve = [{"seconds": s, "steps": 10 * s, "loss": 9.0 - s, "mse": 0.5, "nll": 0.25} for s in range(9)]
    page = study.table([{"data": "energy", "method": "adam", "rate": 0.1, "curve": curve}])
    assert page.splitlines()[-1] == "| energy | adam | 0.1 | 80 | 7.000 | 5.000 | 1.000 | 0.5000 | 0.250 |"


def test_outliers_are_planted_in_training_targets_alone(study):
    clean, dirty = (study.prepare(fold(), study.parse(["--outliers", share, "--seed", "1"])) for share in ("0", "0.2"))
    moved = np.abs(np.asarray(dirty.y - clean.y))
    assert 0 < np.sum(moved > 0) < 20
    np.testing.assert_allclose(moved[moved > 0], study.OUTLIER, rtol=1e-5)
    np.testing.assert_array_equal(dirty.y_test, clean.y_test)
