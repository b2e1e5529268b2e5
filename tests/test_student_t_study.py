"""The study of sparse Student-t processes: its clock, its choices, its resuming, and the whole of it once."""

import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import is_drawn

from fewshot.runners.studies import student_t, student_t_report
from fewshot.runners.studies.reporting import StudyError
from fewshot.runners.studies.student_t import QUICK, Contestant, Plan, Settings
from fewshot.tasks import uci


def fold(rows=100):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3))
    return uci.standardised(np.column_stack([x, np.sin(x[:, 0]) + 0.1 * rng.normal(size=rows)]), np.arange(rows) < 10)


def curve(method, rate, losses, seed=0, outliers=False, data="energy"):
    looks = [
        {"seconds": float(i), "steps": 10 * i, "loss": loss, "mse": 0.25, "nll": 0.5 if outliers else 0.125}
        for i, loss in enumerate(losses)
    ]
    return dict(data=data, method=method, rate=rate, seed=seed, outliers=outliers, looks=looks)


CURVES = [
    curve("natural", 0.3, [9.0, 5.0, 3.0, 2.0, 1.0]),
    curve("natural", 0.1, [9.0, 4.0, 3.0, 1.0, 0.5]),
    curve("natural", 0.03, [9.0, None]),
    curve("adam", 0.1, [9.0, 8.0, 7.0, 6.0, 4.5]),
    curve("adam", 0.01, [9.0, 8.0, 7.0, 6.0, 6.0]),
    curve("natural", 0.1, [9.0, 4.0, 3.0, 1.0, 1.5], seed=1),
    curve("adam", 0.1, [9.0, 8.0, 7.0, 6.0, 3.5], seed=1),
    curve("gaussian process", 0.1, [9.0, 1.0]),
    curve("gaussian process", 0.1, [9.0, 1.0], outliers=True),
    curve("natural", 0.1, [9.0, 2.0], outliers=True),
]


def test_the_table_takes_the_best_rate_and_pairs_the_seeds():
    for look in CURVES[6]["looks"]:
        look["seconds"] *= 2  # others kept the machine busy: a step is still 0.1 s
    table = student_t_report.comparison(CURVES)
    lines = {line[1]: dict(zip(table[0], line, strict=True)) for line in table[1:]}
    natural, adam = lines["natural"], lines["adam"]
    assert (natural["rate"], natural["diverged"], natural["seconds"]) == ("0.1", "1 of 3", "4.00")
    assert natural["-bound/N at 1/4"] == "4.000 +- 0.000" and natural["at 1/2"] == "3.000 +- 0.000"
    assert natural["at the end"] == "1.000 +- 0.500" and natural["less natural"] == ""
    assert (adam["rate"], adam["diverged"], adam["less natural"]) == ("0.1*", "0 of 2", "3.000 +- 1.000")
    assert adam["ms a step"] == "100.00" and adam["at 1/2"] == "7.000 +- 0.000"
    assert lines["gaussian process"]["less natural"] == "" and lines["gaussian process"]["test MSE"] == "0.2500"
    outliers = student_t_report.outliers(CURVES)
    assert outliers[1] == ["energy", "student-t", "0.2500 +- 0.0000", "0.2500", "0.125 +- 0.000", "0.500"]
    assert [line[1] for line in outliers] == ["model", "student-t", "gaussian process"]


def test_rates_are_compared_after_equal_steps_and_all_methods_after_equal_time():
    fast = curve("adam", 0.3, [9.0, 8.0, 7.0, 6.5, 5.0, 3.0, 2.0])  # ahead at its end, behind after the 40 steps of 0.1
    assert student_t_report.best_rate([CURVES[3], fast]) == 0.1 and student_t_report.best_rate([fast]) == 0.3
    broken = curve("adam", 1.0, [9.0, 0.0, None])
    assert student_t_report.best_rate([broken, CURVES[3], fast]) == 0.1
    short = curve("sgd", 1.0, [9.0, 8.5, 8.0])
    assert student_t_report.horizon(list(student_t_report.best_of([*CURVES, short])), "energy") == pytest.approx(2.0)
    np.testing.assert_allclose(student_t_report.between(short, "loss", np.array([5.0, 15.0])), [8.75, 8.25])


def test_the_clock_counts_the_steps_alone_and_stops_at_its_limit_or_at_what_is_not_finite(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(student_t.time, "process_time", lambda: 0.5 * next(clock))
    rows = student_t.prepare(fold(), QUICK, 0, 0.0)
    keys = []

    def advance(key, state):
        keys.append(key)
        return state + 1

    def look(state):
        return jnp.log(limit - state), rows.y_test, -jnp.ones(len(rows.y_test))

    settings, plan = Settings(seconds=3.0, chunk=10), Plan("energy", "adam", 0.1, 4)
    limit = 100
    looks = student_t.race(Contestant(rows, 0, advance, look), settings, plan)
    assert [(one["seconds"], one["steps"]) for one in looks] == [(0.5 * i, 10 * i) for i in range(7)]
    np.testing.assert_allclose([one["loss"] for one in looks], -np.log(100 - np.arange(7)) / 90, rtol=1e-6)
    assert looks[0]["mse"] == 0.0 and looks[0]["nll"] == 1.0
    assert (
        len(keys) == 7 and len({str(key) for key in keys[1:]}) == 6
    )  # one to compile, then fresh draws for each chunk
    limit = 2
    looks = student_t.race(Contestant(rows, 0, advance, look), settings, plan)
    assert [one["loss"] is None for one in looks] == [False, False, True] and looks[-1]["mse"] is None


def test_a_run_that_is_kept_is_not_run_again_and_other_settings_are_refused(monkeypatch, tmp_path):
    (tmp_path / "curves").mkdir()
    monkeypatch.setattr(student_t, "contestant", lambda plan, settings: None)
    monkeypatch.setattr(student_t, "race", lambda *_: curve("adam", 0.1, [1.0, 0.5])["looks"])
    plan = Plan("energy", "gaussian process", 0.1, 3, True)
    first = student_t.kept_or_run(tmp_path, QUICK, plan)
    monkeypatch.setattr(student_t, "race", lambda *_: pytest.fail("it ran again"))
    assert student_t.kept_or_run(tmp_path, QUICK, plan) == first and first["seed"] == 3 and first["outliers"]
    with pytest.raises(StudyError, match="other settings; choose another --out"):
        student_t.kept_or_run(tmp_path, Settings(), plan)
    file = tmp_path / "curves" / "energy-gaussian-process-0.1-seed3-outliers.json"
    file.write_text(file.read_text()[:40])
    with pytest.raises(StudyError, match="expected a curve of this study"):
        student_t.kept_or_run(tmp_path, QUICK, plan)


def test_outliers_are_planted_in_training_targets_alone():
    clean, dirty = (student_t.prepare(fold(), QUICK, 1, share) for share in (0.0, 0.2))
    moved = np.abs(np.asarray(dirty.y - clean.y))
    assert 8 < np.sum(moved > 0) < 30
    np.testing.assert_allclose(moved[moved > 0], student_t.OUTLIER, rtol=1e-5)
    np.testing.assert_array_equal(dirty.y_test, clean.y_test)
    np.testing.assert_array_equal(dirty.inputs, clean.inputs)
    assert len(np.unique(clean.watched)) == len(clean.y) == 90  # fewer than are asked for


@pytest.mark.slow
def test_the_study(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(uci, "load_fold", lambda name, number: fold())
    rows = student_t.main(quick=True, out=str(tmp_path), seed=0)
    expected = 5 * (QUICK.rates + QUICK.seeds - 1) + 3 * QUICK.seeds
    assert len(rows) == expected == len(list((tmp_path / "curves").iterdir()))
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    for name in ("student-t.png", "outliers.png"):
        assert is_drawn(tmp_path / name)
    for best in student_t_report.best_of(rows):
        for one in best.curves:
            assert one["looks"][-1]["loss"] < one["looks"][0]["loss"] - 0.1
    assert "| energy | natural |" in (tmp_path / "table.md").read_text()
    monkeypatch.setattr(student_t, "race", lambda *_: pytest.fail("it ran again"))
    assert student_t.main(quick=True, out=str(tmp_path), seed=0) == rows
