"""benchmarks/regression.py on generated rows: both processes beat least squares on a curve."""

import json

import numpy as np
import pytest
from conftest import load_benchmark

from fewshot.tasks import uci


@pytest.mark.slow
def test_processes_beat_least_squares_on_a_curve(monkeypatch, tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, size=(300, 2))
    rows = np.column_stack([x, np.sin(2 * x[:, 0]) + 0.1 * rng.normal(size=300)])
    benchmark = load_benchmark("regression")
    given = ["--data", "energy", "--folds", "0", "--rows", "150", "--learn", "80", "--exact-steps", "60"]
    given += ["--inducing", "30", "--batch", "64", "--sparse-steps", "300", "--out", str(tmp_path / "out")]
    arguments = benchmark.parse(given)
    monkeypatch.setattr(benchmark, "parse", lambda: arguments)
    monkeypatch.setattr(uci, "load_fold", lambda name, number: uci.standardised(rows, np.arange(300) < 60))
    benchmark.main()
    linear, exact, sparse = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["rows"] for row in (linear, exact, sparse)] == [240, 150, 240]
    assert max(exact["rmse"], sparse["rmse"]) < 0.5 * linear["rmse"]
    assert max(exact["nll"], sparse["nll"]) < linear["nll"] - 0.5
    assert (tmp_path / "out" / "table.md").read_text().strip() == capsys.readouterr().out.strip()
