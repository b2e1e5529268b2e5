"""UCI regression: the published folds, standardised by training rows, and files that are missing or damaged."""

import numpy as np
import pytest
from conftest import data_file

from fewshot.tasks import uci
from fewshot.tasks.files import DataError


@pytest.mark.parametrize("name, floor", [("energy", 0.252), ("elevators", 0.468), ("protein", 0.848)])
def test_least_squares_on_fold_0_is_as_published(name, floor):
    data_file(f"uci/{name}.csv.gz")
    fold = uci.load_fold(name, 0)
    source = uci.SOURCES[name]
    assert len(fold.y) + len(fold.y_test) == source.rows and fold.x.shape[1] == source.columns - 1
    weights = np.linalg.lstsq(np.column_stack([fold.x, np.ones(len(fold.x))]), fold.y, rcond=None)[0]
    error = fold.x_test @ weights[:-1] + weights[-1] - fold.y_test
    assert np.sqrt(np.mean(error**2)) == pytest.approx(floor, abs=5e-4)


def test_folds_hold_out_a_tenth_each_and_every_row_once():
    data_file("uci/energy.csv.gz")
    rows, masks = uci.read("energy")
    np.testing.assert_array_equal(masks.sum(1), 1)
    assert masks.sum(0).min() >= len(rows) // 10
    first, second = uci.load_fold("energy", 0), uci.load_fold("energy", 1)
    assert not np.array_equal(first.y_test, second.y_test)


def test_training_rows_alone_set_the_scale():
    rng = np.random.default_rng(0)
    rows = rng.normal(3.0, 2.0, (50, 4))
    rows[:, 1] = 0.1  # whose mean is not 0.1 in floating point
    test = np.arange(50) < 10
    fold = uci.standardised(rows, test)
    np.testing.assert_allclose(fold.x.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(fold.x.std(0), [1, 0, 1], atol=1e-12)
    np.testing.assert_allclose(fold.y_test * fold.y_scale + fold.y_mean, rows[:10, -1])
    rows[:10] += 100.0
    np.testing.assert_array_equal(uci.standardised(rows, test).x, fold.x)


def test_unknown_names_and_folds_are_refused():
    for name, fold in (("boston", 0), ("energy", 10), ("energy", -1)):
        with pytest.raises(DataError, match="energy, elevators, protein"):
            uci.load_fold(name, fold)


def test_a_missing_file_says_where_it_comes_from(tmp_path):
    with pytest.raises(DataError, match="treforevans") as error:
        uci.load_fold("energy", 0, tmp_path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_another_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / "uci"
    folder.mkdir()
    whole = data_file("uci/energy.csv.gz").read_bytes()
    (folder / "energy.csv.gz").write_bytes(whole[:-1])
    with pytest.raises(DataError, match="SHA-256"):
        uci.load_fold("energy", 0, tmp_path)
    (folder / "energy.csv.gz").write_bytes(whole)
    (folder / "energy.test_mask10.csv.gz").write_bytes(data_file("uci/energy.test_mask10.csv.gz").read_bytes())
    source = uci.SOURCES["energy"]
    monkeypatch.setitem(uci.SOURCES, "energy", source._replace(mask="0" * 64))
    with pytest.raises(DataError, match="SHA-256"):
        uci.load_fold("energy", 0, tmp_path)
    monkeypatch.setitem(uci.SOURCES, "energy", source._replace(rows=700))
    with pytest.raises(DataError, match="700"):
        uci.load_fold("energy", 0, tmp_path)
