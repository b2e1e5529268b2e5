"""benchmarks/regression.py on generated rows: the processes beat least squares on a curve."""

import json

import numpy as np
import pytest
from conftest import REPOSITORY, load_benchmark
from drawn import is_drawn

from fewshot.tasks import uci


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_processes_beat_least_squares_on_a_curve(monkeypatch, tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(300, 2))
    rows = np.column_stack([x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=300)])
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    benchmark = load_benchmark("regression")
    given = ["--data", "energy", "--folds", "0", "--rows", "150", "--learn", "80", "--inducing", "30"]
    given += ["--batch", "64", "--out", str(tmp_path / "out")]
    arguments = benchmark.parse(given)
    monkeypatch.setattr(benchmark, "parse", lambda: arguments)
    monkeypatch.setattr(benchmark, "installed", lambda peer: peer == "scikit-learn")
    monkeypatch.setattr(uci, "load_fold", lambda name, number: uci.standardised(rows, np.arange(300) < 60))
    benchmark.main()
    found = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    linear, *processes = found
    names = ["least squares", "exact", "titsias", "stochastic", "scikit-learn, exact"]
    assert [row["method"] for row in found] == names
    assert [row["rows"] for row in found] == [240, 150, 240, 240, 150]
    assert max(row["rmse"] for row in processes) < 0.5 * linear["rmse"]
    assert max(row["nll"] for row in processes) < linear["nll"] - 0.5
    page = (tmp_path / "out" / "table.md").read_text().strip()
    assert capsys.readouterr().out.strip().endswith(page)
    benchmark.main()  # all rows are there: nothing is run again
    assert json.loads((tmp_path / "out" / "results.json").read_text())["rows"] == found


@pytest.mark.slow
def test_costs_are_measured_and_drawn(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    benchmark = load_benchmark("regression_cost")
    out = tmp_path / "out"
    given = ["--rows", "60", "200", "--most-exact", "100", "--inducing", "40", "--out", str(out)]
    arguments = benchmark.parse(given)
    monkeypatch.setattr(benchmark, "parse", lambda: arguments)
    benchmark.main()
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [(row["method"], row["rows"]) for row in rows if row["method"] == "exact"] == [("exact", 60)]
    error = {(row["method"], row["rows"]): row["error"] for row in rows}
    assert abs(error["titsias", 60] - error["exact", 60]) < 0.05 and error["grid", 200] < error["grid", 60]
    assert is_drawn(out / "cost.png")
