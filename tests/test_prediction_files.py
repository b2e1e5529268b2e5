"""Kept predictions: what comes back, to how many digits, and what is refused."""

import io
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from predicted import random_predictions

from fewshot.evaluation import calibration_error, metrics, prediction_files
from fewshot.evaluation.prediction_files import Origin

DOCUMENTED = Path(__file__).parent.parent / "docs" / "evaluation.md"


def confident_predictions(seed, episodes=40, queries=30, classes=5):
    """Softmax of wide logits, as float32: probabilities from 1e-12 to within 1e-7 of 1, and labels mostly theirs."""
    rng = np.random.default_rng(seed)
    logits = 6 * rng.normal(size=(episodes, queries, classes))
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = (p / p.sum(-1, keepdims=True)).astype(np.float32)
    labels = np.where(rng.uniform(size=p.shape[:2]) < 0.8, p.argmax(-1), rng.integers(0, classes, size=p.shape[:2]))
    return p, labels, np.argsort(rng.uniform(size=(episodes, 31)), axis=1)[:, :classes]


def kept(tmp_path, *arrays):
    path = tmp_path / "predictions.npz"
    path.write_bytes(prediction_files.to_bytes(*arrays))
    return path


def test_labels_classes_and_the_most_probable_class_come_back_exactly(tmp_path):
    p, labels, classes = confident_predictions(0)
    p[0, 0] = [0.30001, 0.3, 0.2, 0.1, 0.09999]
    found = prediction_files.read(kept(tmp_path, p, labels, classes))
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_array_equal(found.classes, classes)
    np.testing.assert_array_equal(found.probabilities.argmax(-1), p.argmax(-1))
    assert found.probabilities.dtype == np.float32
    # The nearest number of 11 binary digits to a logarithm up to 32, for the class itself and for the largest.
    error = np.abs(np.log(found.probabilities) - np.log(p))
    assert (error <= 2.0**-11 * np.maximum(np.abs(np.log(p / p.max(-1, keepdims=True))), 2) + 1e-6).all()


def test_every_metric_comes_back(tmp_path):
    p, labels, classes = confident_predictions(1, episodes=200)
    found = prediction_files.read(kept(tmp_path, p, labels, classes))
    before, after = (metrics.summarise(np.random.default_rng(0), q, labels) for q in (p, found.probabilities))
    assert before.keys() == after.keys() and before["accuracy"] == after["accuracy"]
    for name, value in before.items():  # labels are redrawn for the floors: one that is drawn anew is a jump
        assert after[name] == pytest.approx(value, abs=2e-3 if "_floor" in name else 2e-4), name
    assert before["nll"] > 1  # which 16 bits of the probabilities would have cut off at 6e-5 and 0


def test_a_probability_of_0_stays_0_and_its_nll_what_it_was(tmp_path):
    p = np.array([[[1, 0], [0.25, 0.75]]], np.float32)
    found = prediction_files.read(kept(tmp_path, p, np.array([[1, 1]]), np.array([[7, 300]])))
    np.testing.assert_allclose(found.probabilities, p, rtol=3e-4)
    assert metrics.nll(found.probabilities, found.labels) == pytest.approx(metrics.nll(p, found.labels), rel=1e-6)
    assert found.classes.tolist() == [[7, 300]]


def test_writing_what_was_read_changes_nothing(tmp_path):
    path = kept(tmp_path, *confident_predictions(2))
    once = prediction_files.read(path)
    again = prediction_files.read(kept(tmp_path, *once))
    for array, other in zip(once, again, strict=True):
        np.testing.assert_array_equal(array, other)


def test_a_file_takes_two_bytes_a_probability(tmp_path):
    p, labels, classes = confident_predictions(3, episodes=200)
    assert kept(tmp_path, p, labels, classes).stat().st_size < 2.1 * p.size


def test_the_lines_of_the_documentation_compute_metrics_again(tmp_path, monkeypatch, capsys):
    p, labels, classes = confident_predictions(4, episodes=60)
    kept(tmp_path, p, labels, classes)
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n([^`]*read\(.predictions\.npz.[^`]*)```", DOCUMENTED.read_text())
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 5
    exec(compile(code, "docs/evaluation.md", "exec"), {})
    assert f"{metrics.accuracy(p, labels):.4f} {calibration_error.ece(p, labels):.4f}" in capsys.readouterr().out


def test_where_predictions_are_from_comes_back(tmp_path):
    arrays = confident_predictions(5)
    path = kept(tmp_path, *arrays)
    assert prediction_files.read_origin(path) == Origin()
    for origin in (Origin(2**32 - 1, 0.25, 5, "noise:2"), Origin(0), Origin(temperature=3.5), Origin(corruption="")):
        assert prediction_files.read_origin(kept(tmp_path, *arrays, origin)) == origin
        np.testing.assert_array_equal(prediction_files.read(path).labels, arrays[1])


@pytest.mark.parametrize(
    "other",
    [
        *({"images_crc32": one} for one in (-1, 0.5)),
        *({"temperature": one} for one in ([1.0], np.nan)),
        *({"shot": one} for one in (1.0, "5", [5])),
        *({"corruption": one} for one in (5, "two\nlines", "long" * 30, ["noise:2"])),
    ],
)
def test_an_origin_that_is_none_is_refused(other, tmp_path):
    path = tmp_path / "predictions.npz"
    path.write_bytes(archive(**other))
    with pytest.raises(ValueError, match=f"expected predictions of test episodes, got .*{next(iter(other))} is"):
        prediction_files.read_origin(path)


def archive(**arrays):
    """An archive of two episodes of three queries and four classes, but for some of its arrays."""
    file, labels = io.BytesIO(), np.zeros((2, 3), int)
    right = {"log_ratios": np.zeros((2, 3, 4), np.float16), "labels": labels, "classes": np.zeros((2, 4), int)}
    np.savez(file, **{name: array for name, array in (right | arrays).items() if array is not None})
    return file.getvalue()


def claiming():
    """An array whose header claims 10^12 entries that nobody has."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive())) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"(2, 3), }        ", b"(99999999999,), }"))
    return file.getvalue()


OTHERS = {
    "claims": (claiming(), "labels claims the shape"),
    "text": (b"no archive", "not a zip file"),
    "names": (archive(log_ratios=None), "log_ratios"),
    "dtype": (archive(log_ratios=np.zeros((2, 3, 4))), "float64"),
    "real labels": (archive(labels=np.zeros((2, 3))), "float64"),
    "classes": (archive(classes=np.zeros((2, 3), int)), r"\(2, 3\)"),
    "nan": (archive(log_ratios=np.full((2, 3, 4), np.nan, np.float16)), "no most probable class"),
    "labels": (archive(labels=np.full((2, 3), 4)), "labels must lie in 0..3, got 4..4"),
}


@pytest.mark.parametrize("content, reason", OTHERS.values(), ids=OTHERS)
def test_other_files_are_refused_in_one_line(content, reason, tmp_path):
    path = tmp_path / "predictions.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"expected predictions of test episodes, got .*{reason}") as error:
        prediction_files.read(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_malformed_predictions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"expected predictions of test episodes, got .*no such file"):
        prediction_files.read(tmp_path / "none.npz")
    p, labels = random_predictions(0)
    with pytest.raises(ValueError, match="sum to 1"):
        prediction_files.to_bytes(2 * p, labels, np.tile(np.arange(4), (7, 1)))
