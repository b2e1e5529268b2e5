"""benchmarks/augmentation.py on tiny data: what it writes, and that it sees no test class."""

import json

import numpy as np
import pytest
from conftest import load_benchmark
from tiny_omniglot import SETTINGS

from fewshot.evaluation import metrics, scoring
from fewshot.evaluation.episodes import Shape
from fewshot.tasks import flat_images
from fewshot.training.data import load_splits
from fewshot.training.run import load_run


@pytest.fixture(scope="module")
def augmentation():
    return load_benchmark("augmentation")


def test_no_split_holds_a_test_class(augmentation, tiny_data):
    splits = load_splits("omniglot", tiny_data)
    seen = augmentation.without_test(splits)
    for name in ("train", "validation", "test"):
        own = splits.validation if name == "test" else getattr(splits, name)
        np.testing.assert_array_equal(flat_images(getattr(seen, name)), flat_images(own))
    shown = {label for names in seen.class_names.values() for label in names}
    assert shown.isdisjoint(splits.class_names["test"])


def test_a_row_is_compared_with_the_first_on_the_same_episodes(augmentation):
    """Classes that do not differ, a gain of 0.1 in every episode: no doubt about it."""
    rng = np.random.default_rng(0)
    classes = np.argsort(rng.uniform(size=(30, 9)), axis=1)[:, :3]
    accuracy = rng.uniform(0.3, 0.8, size=30)
    common = {"classes": classes, "accuracy_ci95": 0.0, "nll": 1.0, "ece": 0.1, "failures": 0}
    first = [{"episodes": accuracy, "accuracy": accuracy.mean(), **common}]
    own = [{"episodes": accuracy + 0.1, "accuracy": accuracy.mean() + 0.1, **common}]
    row = augmentation.row_of("handwriting", own, first)
    assert row["gain"] == pytest.approx(0.1) and row["accuracy"] == pytest.approx(accuracy.mean() + 0.1)
    np.testing.assert_allclose(row["gain_over_classes"], [0.1, 0.1])
    assert augmentation.cells(row)[2:4] == ["+10.0", "+10.0 to +10.0"]


@pytest.mark.slow
def test_the_record_says_what_validation_episodes_say(augmentation, tiny_data, tmp_path, monkeypatch, capsys):
    words = ["augmentation.py", "--dataset", "omniglot", "--way", "3", "--episodes", "8", "--test-episodes", "15"]
    words += ["--seeds", "1", "--data-root", tiny_data, "--out", str(tmp_path / "out")]
    words += ["--set", *(f"{name}={value}" for name, value in SETTINGS.items())]
    monkeypatch.setattr("sys.argv", words)
    augmentation.main()
    record = json.loads((tmp_path / "out" / "record.json").read_text())
    assert [row["augmentation"] for row in record["rows"]] == ["none", "handwriting"]
    assert (
        record["rows"][0]["gain"] == 0
        and record["chosen"] == max(record["rows"], key=lambda row: row["accuracy"])["augmentation"]
    )
    validation = load_splits("omniglot", tiny_data).validation
    for row in record["rows"]:
        model = load_run(tmp_path / "out" / f"{row['augmentation']}-0")
        assert model.config.trainer.augment == row["augmentation"]
        episodes = augmentation.validation_episodes(validation, Shape(3, 1, 15), 15)
        scores = scoring.score(model.learner, scoring.embed(model.learner, validation), episodes)
        assert row["accuracy"] == pytest.approx(metrics.accuracy(scores.probabilities, scores.labels))
    page = (tmp_path / "out" / "record.md").read_text()
    assert f"Chosen: `{record['chosen']}`" in page and page.strip() in capsys.readouterr().out
    augmentation.main()  # nothing is trained again
    assert json.loads((tmp_path / "out" / "record.json").read_text()) == record
