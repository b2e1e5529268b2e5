"""benchmarks/heads.py: which answers are kept over many tasks, and that nothing is judged by a metric made of it."""

import importlib
import itertools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import REPOSITORY, load_benchmark
from scipy.special import softmax

from fewshot.conditioning import TemperaturePrior
from fewshot.evaluation.scoring import Scores
from fewshot.learners import NearestMean
from fewshot.models import Identity
from fewshot.models.networks.metric import unit


@pytest.fixture(scope="module")
def kept():
    return load_benchmark("head_kept")


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("head_setting")


def scores(seed, episodes=6, queries=5, classes=3):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes), (episodes, queries)).astype(np.float32)
    labels = np.array([[rng.choice(classes, p=one / one.sum()) for one in task] for task in p.astype(float)])
    return Scores(p, labels, np.zeros(episodes, int), 0.0)


@pytest.mark.parametrize("accuracy", [0.5, 0.7, 0.9])
def test_a_threshold_is_the_least_that_is_right_often_enough(kept, accuracy):
    """By trying every probability as the threshold."""
    some = scores(0, episodes=40)
    probability, right = some.probabilities.max(-1), some.probabilities.argmax(-1) == some.labels
    enough = [t for t in probability.ravel() if right[probability >= t].mean() >= accuracy]
    assert kept.threshold_at(some, accuracy) == pytest.approx(min(enough))


def test_no_threshold_keeps_what_is_never_right(kept):
    some = scores(1)
    wrong = some._replace(labels=(some.probabilities.argmax(-1) + 1) % 3)
    assert kept.threshold_at(wrong, 0.95) == np.inf
    row = kept.threshold_row(["a", "b"], some, wrong)
    assert row == ["a", "b", "inf", "0.0", "-"]


def test_tasks_that_keep_all_are_told_apart(kept):
    """One task is sure of everything, one of half of its queries, one of nothing; a single task has no interval."""
    sure, doubtful = [0.99, 0.01], [0.6, 0.4]
    p = np.array([[sure, sure], [sure, doubtful], [doubtful, doubtful]], np.float32)
    labels = np.array([[0, 0], [1, 0], [0, 0]])
    (row,) = kept.kept_rows(["a", "b"], {"one": Scores(p, labels, np.zeros(3, int), 0.0)})
    assert row[2:4] == ["one (3)", "50.0"]
    assert row[4].startswith("66.7 [") and row[4].endswith("(99.0)")
    assert row[5:9] == ["33", "100.0 (99.0)", "25.0", "0.0 (99.0)"]


@pytest.mark.long
def test_what_is_unseen_made_no_metric(setting):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 12)
    split = np.array([setting.TRAIN] * 6 + [setting.VALIDATION] * 3 + [setting.TEST] * 3)
    sources = [
        setting.Source(name, rng.normal(size=(len(labels), 8)).astype(np.float32), labels, split) for name in "ab"
    ]
    found = setting.Setting(sources)
    for way, folds in ((2, 4), (4, 2)):
        unseen = found.unseen(setting.Head(rank=2), way)
        assert len(unseen) == 2 * folds and setting.shares(unseen, 900 * folds) == [
            100 * len(p.classes) * folds // 2 for p in unseen
        ]
        for part in unseen:
            made_of = part.made_of[part.source.name]
            assert len(part.classes) >= way
            assert sorted([*part.classes, *made_of]) == list(range(9))
            wanted = setting.metric_of(sources, part.made_of).mean
            np.testing.assert_allclose(part.learner.deep_kernel.backbone.mean[...], wanted, atol=1e-6)
        for name in "ab":
            learned = itertools.chain.from_iterable(part.classes for part in unseen if part.source.name == name)
            assert sorted(learned) == list(range(9))
    wanted = setting.metric_of(sources, found.learned).mean
    np.testing.assert_array_equal(found.metric(setting.Head()).mean, wanted)
    with pytest.raises(ValueError, match="expected at least 10 classes"):
        found.unseen(setting.Head(rank=2), 5)


@pytest.mark.long
def test_metrics_are_of_all_pictures_and_episodes_of_the_first(setting):
    """Of three pictures a class, five of one; a metric may be asked for of the first two, and of roots of the features.

    Every class has the same weight in its mean.
    """
    x = np.random.default_rng(0).uniform(0.1, 1.0, (14, 5)).astype(np.float32)
    source = setting.Source("a", x, np.append(np.tile(np.arange(4), 3), [0, 0]), np.full(4, setting.TRAIN))
    some = np.array([1, 3])
    assert np.flatnonzero(source.rows(some, 1)).tolist() == [1, 3]
    assert np.flatnonzero(source.rows(some, None)).tolist() == [1, 3, 5, 7, 9, 11]
    np.testing.assert_array_equal(source.dataset(some, 1).images[:, 0, 0], x[[1, 3]])

    def mean(features):
        z, classes = features / np.sqrt((features**2).sum(1, keepdims=True)), source.labels[: len(features)]
        return np.mean([z[classes == one].mean(0) for one in np.unique(classes)], axis=0)

    everything, first = setting.Setting([source]), setting.Setting([source], images=2)
    head = setting.Head(power=0.5)
    np.testing.assert_allclose(everything.metric(setting.Head()).mean, mean(x), rtol=1e-5)
    np.testing.assert_allclose(everything.metric(head).mean, mean(np.sqrt(x)), rtol=1e-5)
    np.testing.assert_allclose(first.metric(head).mean, mean(np.sqrt(x[:8])), rtol=1e-5)
    (fold,) = (one for one in everything.unseen(head._replace(rank=2), 2) if 0 not in one.classes)
    backbone = fold.learner.deep_kernel.backbone
    z = np.sqrt(x) / np.sqrt(x.sum(1, keepdims=True))
    wanted = np.mean([z[source.labels == one].mean(0) for one in fold.made_of["a"]], axis=0)
    np.testing.assert_allclose(backbone.mean[...], wanted, rtol=1e-5)
    backbone.gains[...] = jnp.zeros(2)
    found = backbone(jnp.asarray(x)[None, :, None, None], train=False)[0]
    np.testing.assert_allclose(found, z - wanted, rtol=1e-4, atol=1e-5)


def test_a_temperature_may_be_as_small_as_a_small_scale_needs(setting):
    """Logits of a calibrated predictor, made a hundred times smaller: its temperature is .01."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 50, 3))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    labels = (p.cumsum(-1) < rng.random((200, 50, 1))).sum(-1)
    flat = np.exp(logits / 100) / np.exp(logits / 100).sum(-1, keepdims=True)
    assert setting.temperature_of([Scores(flat, labels, np.zeros(200, int), 0.0)]) == pytest.approx(0.01, rel=0.05)


def test_every_episode_is_answered_by_the_head_that_its_pictures_choose(setting):
    comparison = importlib.import_module("head_comparison")
    heads = {name: SimpleNamespace(name=name) for name in ("low", "high")}
    pretrained = SimpleNamespace(for_task=lambda x: heads["high" if x.mean() > 0.5 else "low"])
    images = np.arange(8.0)[:, None, None, None] > 3
    case = comparison.Case("a", SimpleNamespace(images=images.astype(np.float32)), None)
    support = np.array([[0, 1, 7], [7, 6, 0], [4, 5, 6], [7, 5, 4]])
    episodes = SimpleNamespace(indices=SimpleNamespace(x_support=support))
    found, which = comparison.answering(pretrained, case, episodes)
    assert [one.name for one in found] == ["high", "low"] and which.tolist() == [1, 0, 0, 0]
    high, low = scores(3, episodes=4), scores(4, episodes=4)
    picked = comparison.picked(which, [high, low])
    np.testing.assert_array_equal(picked.probabilities[0], low.probabilities[0])
    np.testing.assert_array_equal(picked.probabilities[1:], high.probabilities[1:])


@pytest.fixture
def counts(monkeypatch, setting):
    found = importlib.import_module("head_counts")
    monkeypatch.setattr(found, "COUNTS", ((4, 1), (3, 1, 1)))
    return found


def pictures_of(setting, name="a", classes=12, each=16):
    """A data set of clusters, nine classes of which may be learned from."""
    rng, labels = np.random.default_rng(3), np.repeat(np.arange(classes), each)
    features = rng.normal(size=(classes, 5))[labels] + 0.3 * rng.normal(size=(len(labels), 5))
    split = np.array([setting.TRAIN] * 6 + [setting.VALIDATION] * 3 + [setting.TEST] * 3)
    return setting.Source(name, features.astype(np.float32), labels, split)


def test_tasks_have_the_numbers_of_pictures_that_are_asked_for(setting, counts):
    source = pictures_of(setting)
    classes = source.classes(setting.TEST)
    for task in counts.tasks(source.dataset(classes), (4, 1, 2), 5):
        assert np.bincount(task.y).tolist() == [4, 1, 2] and np.bincount(task.y_query).tolist() == [counts.QUERIES] * 3
        rows = [tuple(one) for one in np.concatenate([task.x, task.query])]
        assert len(set(rows)) == len(rows)
        of = {tuple(x): label for x, label in zip(source.features, source.labels, strict=True)}
        named = {(of[tuple(x)], y) for x, y in zip([*task.x, *task.query], [*task.y, *task.y_query], strict=True)}
        assert len(named) == 3 and {label for label, _ in named} == set(classes)


def test_what_is_shown_is_limited_and_the_temperature_is_of_that(setting, counts):
    """Class means are alike however the pictures are grouped; the temperature says what was shown."""
    (task,) = counts.tasks(pictures_of(setting).dataset(np.arange(9)), (4, 1), 1)
    task = task._replace(x=unit(task.x))
    asked = []

    def by_counts(shown):
        asked.append(shown)
        return TemperaturePrior(2.0)

    learner = NearestMean(Identity((1, 1, 5)))
    each, average, few, one = (counts.answered(learner, by_counts, task, way) for way in counts.WAYS)
    assert asked == [[4, 1], [2, 1], [1, 1], [1, 1]]
    np.testing.assert_allclose(each, softmax(counts.class_means(task) / 2, axis=1), rtol=1e-4)
    np.testing.assert_allclose(few, each, rtol=1e-4)
    np.testing.assert_allclose(one, few, rtol=1e-6)
    assert np.abs(average - each).max() < 0.1


def test_ways_are_judged_on_classes_to_learn_from_and_methods_on_others(setting, counts, monkeypatch):
    source, asked = pictures_of(setting), []

    def answered(learner, by_counts, task, way):
        asked.append(way)
        sharp = 1.0 + list(counts.WAYS).index(way)
        return softmax(sharp * np.eye(task.y.max() + 1)[task.y_query], axis=1).astype(np.float32)

    monkeypatch.setattr(counts, "answered", answered)
    shipped = SimpleNamespace(name="photographs", build=lambda width: SimpleNamespace(temperature=None, learner=None))
    monkeypatch.setattr(counts, "PretrainedHead", lambda name: shipped)
    rows = counts.choice_rows("photographs", setting.Head(rank=2), setting.Setting([source]), 4)
    assert [row[:3] for row in rows] == [["photographs", "a", "4, 1"], ["photographs", "a", "3, 1, 1"]]
    assert asked[: len(counts.WAYS)] == list(counts.WAYS)
    nlls = [f"{np.log(1 + np.exp(-sharp)):.4f}" for sharp in range(1, 5)]
    assert rows[0][3:] == nlls and len(rows[0]) == len(counts.CHOICE_HEADER)
    parts = [source.dataset(classes) for classes in (source.classes(setting.TEST), np.arange(9))]
    found = counts.test_rows(SimpleNamespace(for_task=lambda x: shipped), *parts, "a", 4)
    assert [row[2] for row in found] == [counts.OURS, "shipped head, shown each picture", "class means"] * 2
    assert all(len(row) == len(counts.TEST_HEADER) and 0 <= float(row[3].split()[0]) <= 100 for row in found)
    assert found[0][3].startswith("100.0 ") and float(found[0][4]) < float(found[1][4])
