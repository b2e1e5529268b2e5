"""Intervals over classes: sums over pairs by hand, a complete design, and repeated experiments."""

import itertools

import numpy as np
import pytest
from predicted import random_predictions
from scipy.special import expit, logit
from scipy.stats import norm
from scipy.stats import t as student

from fewshot.evaluation import class_interval, metrics
from fewshot.evaluation.class_interval import components, interval_over_classes, intervals_over_classes

WAY = 5


def drawn(rng, classes, episodes, way=WAY):
    """Classes [E, C] of episodes, without repetition."""
    return np.argsort(rng.uniform(size=(episodes, classes)), axis=1)[:, :way]


def experiment(rng, classes, episodes, spread):
    """Accuracies [E] of 15 queries a class, and the classes; log odds of each class are its own."""
    level = 1.8 + spread * rng.normal(size=classes)
    chosen = drawn(rng, classes, episodes)
    shares = expit(level[chosen] + 0.7 * rng.normal(size=chosen.shape))
    return rng.binomial(15, shares).mean(1) / 15, chosen


def population_accuracy(spread):
    """E expit(1.8 + sqrt(spread^2 + 0.7^2) z), by quadrature."""
    z, weights = np.polynomial.hermite_e.hermegauss(60)
    return weights @ expit(1.8 + np.hypot(spread, 0.7) * z) / weights.sum()


def covered(classes, episodes, spread, experiments):
    rng, truth = np.random.default_rng(0), population_accuracy(spread)
    intervals = [interval_over_classes(*experiment(rng, classes, episodes, spread), (0, 1)) for _ in range(experiments)]
    return np.mean([low <= truth <= high for low, high in intervals])


@pytest.mark.slow
@pytest.mark.parametrize(
    "classes, episodes, least", [(62, 600, 0.93), (31, 600, 0.925), (12, 300, 0.91), (200, 150, 0.925)]
)
def test_intervals_hold_the_accuracy_of_the_population_of_classes(classes, episodes, least):
    """2,000 samples of classes; more classes than episodes as well. On the scale of accuracies 12 cover 90 to 91%."""
    assert least <= covered(classes, episodes, 1.0, 2000) <= 0.975


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_few_experiments_hold_it_and_those_over_episodes_do_not(spread):
    assert covered(31, 200, spread, 100) >= 0.88
    rng, truth, hits = np.random.default_rng(0), population_accuracy(spread), []
    for _ in range(100):
        accuracy, _ = experiment(rng, 31, 200, spread)
        hits.append(abs(accuracy.mean() - truth) <= 1.96 * accuracy.std(ddof=1) / np.sqrt(200))
    assert (np.mean(hits) < 0.6) == (spread > 0)


def test_the_variance_by_classes_is_a_regression_over_pairs_of_episodes():
    rng = np.random.default_rng(1)
    accuracy, chosen = experiment(rng, 7, 12, 1.0)
    share = np.array([(chosen == k).any(1).mean() for k in range(7)])
    shown = np.array([[k in row for k in range(7)] for row in chosen]) - share
    residual = accuracy - accuracy.mean()
    products = weights = 0.0
    for a, b in itertools.permutations(range(12), 2):
        alike = sum(shown[a, k] * shown[b, k] for k in range(7))
        products += residual[a] * residual[b] * alike
        weights += alike**2
    found = components(accuracy, chosen)
    assert products > 0
    assert found.by_classes == pytest.approx(products / weights * (share**2).sum())
    own = np.mean([sum(shown[e, k] ** 2 for k in range(7)) for e in range(12)])
    assert found.by_episodes == pytest.approx((accuracy.var(ddof=1) - products / weights * own) / 12)
    assert found.mean == accuracy.mean() and found.classes == 7


def test_without_noise_all_subsets_give_the_variance_of_a_mean_of_classes():
    """Every set of 3 of 8 classes, each class adding its own: C^2 S^2 / K, which is the jackknife over classes too."""
    effect = np.random.default_rng(0).normal(size=8)
    chosen = np.array(list(itertools.combinations(range(8), 3)))
    values = effect[chosen].sum(1)
    found = components(values, chosen)
    assert found.by_classes == pytest.approx(9 * effect.var(ddof=1) / 8)
    assert found.by_episodes < 0.02 * found.by_classes
    without = [values[(chosen != k).all(1)].mean() for k in range(8)]
    assert found.by_classes == pytest.approx(7 * np.var(without))
    half = student.ppf(0.975, 7) * 3 * effect.std(ddof=1) / np.sqrt(8)
    low, high = interval_over_classes(values, chosen)
    assert (high - low) / 2 == pytest.approx(half, rel=0.02)


def test_classes_that_do_not_differ_leave_the_interval_over_episodes():
    rng = np.random.default_rng(2)
    values, chosen = rng.normal(size=3000), drawn(rng, 400, 3000)
    low, high = interval_over_classes(values, chosen)
    assert (high - low) / 2 == pytest.approx(norm.ppf(0.975) * values.std(ddof=1) / np.sqrt(3000), rel=0.1)


def test_an_interval_between_bounds_is_one_of_log_odds_and_above_one_of_logarithms():
    rng = np.random.default_rng(4)
    accuracy, chosen = experiment(rng, 9, 60, 1.0)
    low, high = interval_over_classes(accuracy, chosen)
    mean, half = (low + high) / 2, (high - low) / 2
    odds = logit(np.array(interval_over_classes(accuracy, chosen, (0, 1))))
    np.testing.assert_allclose(odds, logit(mean) + np.array([-1, 1]) * half / (mean * (1 - mean)))
    above = np.log(interval_over_classes(accuracy, chosen, (0, np.inf)))
    np.testing.assert_allclose(above, np.log(mean) + np.array([-1, 1]) * half / mean)
    twice = np.array(interval_over_classes(2 * accuracy - 1, chosen, (-1, 1)))
    np.testing.assert_allclose(twice, 2 * expit(odds) - 1)  # whatever the numbers are
    assert interval_over_classes(np.ones(60), chosen, (0, 1)) == (1, 1)


def test_names_of_classes_and_their_order_do_not_matter():
    rng = np.random.default_rng(3)
    accuracy, chosen = experiment(rng, 9, 40, 1.0)
    renamed = 100 + 7 * np.random.default_rng(0).permutation(9)[chosen]
    expected = interval_over_classes(accuracy, chosen)
    np.testing.assert_allclose(interval_over_classes(accuracy, renamed[:, ::-1]), expected, rtol=1e-10)


def test_intervals_of_scores_stay_where_scores_can_be():
    probabilities, labels = random_predictions(0, episodes=30)
    chosen = drawn(np.random.default_rng(1), 10, 30, way=4)
    found = intervals_over_classes(probabilities, labels, chosen)
    assert list(found) == ["accuracy", "nll", "brier"]

    def accuracy_of(p):
        return metrics.episode_accuracy(p, labels)

    for name, (low, high) in found.items():
        assert low < getattr(metrics, name)(probabilities, labels) < high
    right = np.eye(4)[labels]
    almost = np.where(np.arange(30)[:, None, None] < 2, 1 - right, 3 * right) / 3
    low, high = intervals_over_classes(almost, labels, chosen)["accuracy"]
    assert (
        0 < low < metrics.accuracy(almost, labels) < high < 1 < interval_over_classes(accuracy_of(almost), chosen).high
    )


def test_one_set_of_classes_says_nothing_of_others():
    assert np.isnan(interval_over_classes(np.arange(6.0), np.tile([0, 1, 2], (6, 1)))).all()
    assert np.isnan(interval_over_classes(np.arange(2.0), np.array([[0, 1], [1, 2]]))).all()


def test_classes_of_episodes_are_found_by_their_labelled_images():
    """Class 1 has one image, its row is padded with it; labels come in any order."""
    index, counts = np.array([[0, 3], [2, 2], [4, 1]]), np.array([2, 1, 2])
    x, y = np.array([[3, 0, 2, 4], [4, 1, 2, 0]]), np.array([[1, 1, 0, 2], [0, 0, 1, 2]])
    assert class_interval.classes_of_episodes(index, counts, x, y).tolist() == [[1, 0, 2], [2, 1, 0]]


def test_what_is_no_list_of_classes_is_refused():
    with pytest.raises(ValueError, match=r"expected values \[E\] and classes \[E, C\], got \(3,\) and \(2, 2\)"):
        class_interval._checked(np.ones(3), np.array([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match="show a class once, got one twice"):
        interval_over_classes(np.ones(2), np.array([[0, 1], [2, 2]]))
