"""benchmarks/labelling.py: its tasks, what a curve counts where labels are asked for at once, and its columns."""

import numpy as np
import pytest
from conftest import REPOSITORY, load_benchmark

SIZES = (6, 4, 2)


@pytest.fixture
def labelling(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return load_benchmark("labelling")


@pytest.fixture
def task(labelling):
    """Of five classes with 30 pictures each, whose features are their positions."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 30))
    source = labelling.Source("numbers", np.arange(150.0)[:, None], labels, np.zeros(5, int))
    return labelling.examples(source, np.array([0, 2, 4]), SIZES, np.random.default_rng(0))


def test_a_pool_begins_with_one_picture_of_each_class_and_holds_no_test_picture(labelling, task):
    assert len(set(task.labels[:3])) == 3 and set(task.labels) == {0, 2, 4}
    assert [np.sum(task.labels == label) for label in task.labels[:3]] == list(SIZES)
    assert [np.sum(task.truth == label) for label in (0, 2, 4)] == [labelling.TESTS] * 3
    pictures = np.concatenate([task.pool, task.tests])[:, 0]
    assert len(set(pictures)) == sum(SIZES) + 3 * labelling.TESTS


class Counts:
    """A classifier whose score is the number of labels that it was given."""

    def __init__(self, head, draws):
        self.known = {}

    def fit(self, x, y):
        return self.add(x, y)

    def add(self, x, y):
        assert not self.known.keys() & set(x[:, 0])
        self.known.update(zip(x[:, 0], y, strict=True))
        return self

    def score(self, x, y):
        assert not self.known.keys() & set(x[:, 0])
        return len(self.known)


@pytest.mark.parametrize(
    ("at_once", "expected"), [(1, [3, 4, 5, 6, 7, 8]), (2, [3, 3, 5, 5, 7, 7]), (5, [3, 3, 3, 3, 3, 8])]
)
def test_labels_at_once_count_when_all_of_them_are_known(labelling, task, monkeypatch, at_once, expected):
    asked = []

    def last(classifier, pool, random):
        asked.extend(pool[-at_once:, 0])
        return list(range(len(pool)))[-at_once:]

    monkeypatch.setattr(labelling, "FewShotClassifier", Counts)
    monkeypatch.setattr(labelling, "LABELS", 5)
    found = labelling.curve(None, task, 3, last, np.random.default_rng(0))
    assert found.tolist() == expected
    assert sorted(asked) == sorted(set(asked))
    assert set(asked) <= set(task.pool[3:, 0])


def test_columns_of_a_way_are_those_of_the_page(labelling, monkeypatch):
    monkeypatch.setattr(labelling, "LABELS", 3)
    monkeypatch.setattr(labelling, "SHOWN", (1, 3))
    monkeypatch.setattr(labelling, "COMPARED", (2, 3))
    random = np.array([[0.2, 0.4, 0.5, 0.6], [0.2, 0.6, 0.7, 0.8], [0.2, 0.2, 0.2, 0.2]])
    own = np.array([[0.2, 0.5, 0.9, 0.8], [0.2, 0.9, 0.9, 0.9], [0.2, 0.3, 0.4, 0.6]])
    more = np.array([30.0, 15.0, 30.0])  # (85 - 55), (90 - 75), (50 - 20)
    spread = 1.96 * np.sqrt(((more - 25) ** 2).sum() / 2 / 3)
    # 90% after 2 labels, after 1, and never, which counts as 4.
    assert labelling.row(own, random) == ["56.7", "76.7", "75.0", f"+25.0 +- {spread:.1f}", "2.3"]
    assert labelling.row(random, random)[3] == ""


def test_single_margins_take_the_pictures_with_the_smallest_of_them(labelling):
    class Certain:
        def predict_proba(self, pool):
            return np.stack([pool, 1 - pool], axis=1)

    pool = np.array([0.9, 0.5, 0.2, 0.45, 1.0, 0.6, 0.65, 0.1])
    assert labelling.largest_margins(Certain(), pool, None) == [1, 3, 5, 6, 2]
