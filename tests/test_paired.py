"""Differences of methods on the same episodes: by hand, against SciPy, and in repeated experiments."""

import numpy as np
import pytest
from predicted import random_predictions
from scipy import stats

from fewshot.evaluation import metrics
from fewshot.evaluation.class_interval import interval_over_classes
from fewshot.evaluation.paired import check_same, paired_difference, paired_differences
from fewshot.evaluation.prediction_files import KeptPredictions


def drawn_classes(rng, episodes, classes=12, way=4):
    return np.argsort(rng.uniform(size=(episodes, classes)), axis=1)[:, :way]


def kept(seed, labels, classes):
    return KeptPredictions(random_predictions(seed)[0], labels, classes)


def test_differences_are_those_of_each_episode():
    _, labels = random_predictions(0)
    classes = drawn_classes(np.random.default_rng(0), len(labels))
    runs, others = [kept(seed, labels, classes) for seed in (1, 2)], [kept(seed, labels, classes) for seed in (3, 4, 5)]
    found = paired_differences(runs, others)
    assert found.keys() == {"accuracy", "nll", "brier"}
    for name, score in (("accuracy", metrics.episode_accuracy), ("nll", metrics.episode_nll)):
        one, other = (np.array([score(run.probabilities, labels) for run in both]) for both in (runs, others))
        by_episode = one.mean(0) - other.mean(0)
        mean, over_episodes, over_classes, over_seeds = found[name]
        assert mean == pytest.approx(one.mean() - other.mean())
        low, high = stats.norm.interval(0.95, mean, stats.sem(by_episode))
        assert over_episodes == pytest.approx((low, high))
        assert over_classes == interval_over_classes(by_episode, classes)
        welch = stats.ttest_ind(one.mean(1), other.mean(1), equal_var=False).confidence_interval(0.95)
        assert over_seeds == pytest.approx(tuple(welch))


def test_common_episodes_tell_more_than_the_scores_themselves():
    """Episodes differ by 10 points, two methods by 1 point and 2 of chance on each."""
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        level, classes = 0.8 + 0.1 * rng.normal(size=300), drawn_classes(rng, 300)
        one, other = (level + shift + 0.02 * rng.normal(size=300) for shift in (0.01, 0.0))
        found = paired_difference(one[None], other[None], classes)
        low, high = found.over_episodes
        inside += low <= 0.01 <= high
        assert high - low < 0.4 * 2 * 1.96 * np.hypot(stats.sem(one), stats.sem(other))
        assert found.over_classes.high - found.over_classes.low > 0.9 * (high - low)
    assert 0.91 <= inside / 200 <= 0.99


def test_what_cannot_be_told_is_nan():
    classes = drawn_classes(np.random.default_rng(2), 5)
    alone = paired_difference(np.ones((1, 5)), np.zeros((3, 5)), classes)
    assert alone.mean == 1 and np.isnan(alone.over_seeds).all() and alone.over_episodes == (1, 1)
    one_episode = paired_difference(np.ones((1, 1)), np.zeros((1, 1)), classes[:1])
    assert np.isnan(one_episode.over_episodes).all() and np.isnan(one_episode.over_classes).all()
    alike = paired_difference(np.ones((2, 5)), np.zeros((2, 5)), classes)
    assert alike.over_seeds == (1, 1)  # no spread at all
    assert np.isnan(
        paired_difference(np.ones((2, 5)), np.zeros((2, 5)), np.tile(np.arange(4), (5, 1))).over_classes
    ).all()


@pytest.mark.parametrize("one, other", [((0, 3), (1, 3)), ((1, 3), (0, 3))])
def test_scores_that_do_not_fit_are_refused(one, other):
    with pytest.raises(ValueError, match=r"expected scores \[S, E\] and others \[R, E\], got"):
        paired_difference(np.ones(one), np.ones(other), drawn_classes(np.random.default_rng(0), 3))


def test_other_episodes_are_refused():
    _, labels = random_predictions(0)
    classes = drawn_classes(np.random.default_rng(0), len(labels))
    one, more = kept(0, labels, classes), labels.copy()
    more[2, 1] = (more[2, 1] + 1) % 4
    check_same(one, one)
    for other, reason in (
        (one._replace(labels=more), "other labels in episode 2"),
        (one._replace(classes=classes[::-1]), "other classes in episode 0"),
        (one._replace(labels=labels[:-1], classes=classes[:-1]), r"labels \(6, \d+\) beside \(7, \d+\)"),
    ):
        with pytest.raises(ValueError, match=f"expected predictions of the same episodes, got {reason}"):
            paired_differences([one], [other])
        with pytest.raises(ValueError, match="expected predictions of the same episodes"):
            paired_differences([one, other], [one])
