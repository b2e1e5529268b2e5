"""Classes with unlike numbers of labelled examples: copies of those of rare classes, and what counts them once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double
from test_classifier import LAPLACE, clusters
from test_saved_classifiers import rewrite

from fewshot.classifier import FewShotClassifier
from fewshot.conditioning import MOST_SHOWN, TemperaturePrior, copies_of, fit_task, with_copies
from fewshot.evaluation.out_of_episode import Labelled, strangeness
from fewshot.evaluation.unknown import left_out_scores
from fewshot.heads import GaussianProcessHead
from fewshot.inference.inner import exact
from fewshot.learners import GaussianProcess
from fewshot.learners.task_temperature import left_out, posterior_of, task_temperature
from fewshot.models import Identity, LabelRegression
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import RBF

KEY = jax.random.key(0)
REGRESSION = GaussianProcessHead(likelihood="gaussian", kernel="rbf")


def labels_of(*counts):
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


def regression(width=2):
    return GaussianProcess(DeepKernel(Identity((1, 1, width)), RBF(), rngs=nnx.Rngs(0)), LabelRegression(0.3), exact)


def repeated(x, y, copies):
    """Every example as often as it is shown, as its own row."""
    return np.repeat(x, copies, axis=0), np.repeat(y, copies)


@pytest.mark.parametrize(
    "counts, expected",
    [
        ((5, 5, 5), (1, 1, 1)),
        ((5, 4), (1, 1)),  # nearly alike
        ((5, 1), (1, 5)),
        ((10, 1, 3), (1, 10, 3)),
        ((3, 2), (1, 2)),
        ((5000, 10), (1, 50)),  # no more than 500 of the rare class
        ((5000, 700), (1, 1)),
    ],
)
def test_examples_of_rare_classes_are_shown_as_often_as_makes_classes_alike(counts, expected):
    y = labels_of(*counts)
    np.testing.assert_array_equal(copies_of(y, len(counts)), np.array(expected)[y])


def test_shown_numbers_are_alike_and_no_order_matters():
    rng = np.random.default_rng(0)
    for _ in range(200):
        counts = rng.integers(1, 40, rng.integers(2, 12))
        y = rng.permutation(labels_of(*counts))
        copies = copies_of(y, len(counts))
        shown = np.bincount(y, copies)
        assert shown.max() < 2 * shown.min() and copies.min() == 1
        assert all(len(set(copies[y == k])) == 1 for k in range(len(counts)))
        assert copies.sum() <= len(y) + 2 * MOST_SHOWN


def test_a_temperature_with_copies_is_that_of_what_is_shown_and_warmer():
    def of(counts):
        return TemperaturePrior(float(np.prod(counts)), float(sum(counts)), 0.3)

    y = labels_of(8, 1, 2)
    found = with_copies(of, y, copies_of(y, 3), power=0.5)
    warmer = (1 * 8 * 4) ** (0.5 / 3)  # the geometric mean of the numbers of copies
    np.testing.assert_allclose(found, (8 * 8 * 8 * warmer, 24 * warmer, 0.3), rtol=1e-12)
    assert with_copies(of, y, np.ones(11, int)) == (16.0, 11.0, 0.3)
    assert with_copies(lambda counts: TemperaturePrior(2.0), y, copies_of(y, 3), 0.0) == TemperaturePrior(2.0)


def test_a_learner_is_shown_the_copies():
    """The latent functions are those of a task that has each example so often."""
    rng, y = np.random.default_rng(0), labels_of(6, 1, 3)
    x, new = rng.normal(size=(10, 4)), rng.normal(size=(3, 4))
    balanced = FewShotClassifier(REGRESSION).fit(x, y)
    by_hand = FewShotClassifier(REGRESSION, balanced=False).fit(*repeated(x, y, copies_of(y, 3)))
    once = FewShotClassifier(REGRESSION, balanced=False).fit(x, y)
    for one, other in zip(balanced.predict_latent(new), by_hand.predict_latent(new), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)
    assert np.abs(balanced.predict_latent(new).mean - once.predict_latent(new).mean).max() > 0.05
    assert list(balanced.class_count_) == [6, 1, 3]
    order = rng.permutation(10)
    again = FewShotClassifier(REGRESSION, temperature=1.0).fit(x[order], y[order])
    expected = balanced.set_params(temperature=1.0).fit(x, y).predict_proba(new)
    np.testing.assert_allclose(again.predict_proba(new), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("head, lean", [(REGRESSION, 2e-3), (LAPLACE, 0.1)])
def test_halfway_between_two_pictures_no_class_is_likelier(head, lean):
    """Six pictures that are the same tell what one tells: without copies the class of six is likelier everywhere."""
    x, y = np.array([[1.0, 0.2]] * 6 + [[0.2, 1.0]]), np.array(["six"] * 6 + ["one"])
    middle = np.array([[0.6, 0.6]])
    p = FewShotClassifier(head, temperature=1.0, draws=1024).fit(x, y).predict_proba(middle)
    np.testing.assert_allclose(p, 0.5, atol=0.2 * lean)
    p = FewShotClassifier(head, temperature=1.0, draws=1024, balanced=False).fit(x, y).predict_proba(middle)
    assert p[0, 1] > 0.5 + lean


def test_an_example_is_left_out_with_its_copies():
    y, origin = jnp.array([0, 0, 0, 1, 1, 1, 1, 2, 2, 2]), jnp.array([0, 1, 2, 3, 4, 3, 4, 7, 7, 7])
    real = jnp.arange(10) != 9
    held = np.asarray(left_out(y, real, 4, origin))
    assert [list(np.flatnonzero(fold)) for fold in held] == [[0, 3, 5], [1, 4, 6], [2], []]  # class 2 has one example


@double
def test_a_temperature_is_learned_from_each_example_once():
    """(T3) by hand: each example is predicted by the others and their copies."""
    rng, y = np.random.default_rng(1), labels_of(3, 2)
    x = jnp.asarray(rng.normal(size=(5, 2)) + 2 * y[:, None])
    rows = np.array([0, 1, 2, 3, 4, 3, 4])
    learner, known = regression(), (0.7, 0.6)
    found = task_temperature(KEY, learner, x[rows], jnp.asarray(y[rows]), 2, *known, origin=jnp.asarray(rows))
    predicted, held = [], []
    for fold in ([0, 3], [1, 4], [2]):
        kept = ~np.isin(rows, fold)
        state, _ = learner.fit(KEY, x[rows][kept], jnp.asarray(y[rows][kept]), 2)
        predicted.append(learner.predict(KEY, state, x).probabilities)
        held.append(np.isin(np.arange(5), fold))
    expected = posterior_of(jnp.stack(predicted), jnp.asarray(y), jnp.asarray(held), *known)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-3)
    twice = posterior_of(jnp.stack(predicted)[:, rows], jnp.asarray(y[rows]), jnp.asarray(held)[:, rows], *known)
    assert np.abs(twice.weights - expected.weights).max() > 1e-2 * np.max(expected.weights)


def test_each_example_is_compared_with_the_others_once():
    """Copies change what the learner says, and no mean of a class; p-values rank among the examples alone."""
    rng, y = np.random.default_rng(2), labels_of(4, 2)
    x = (rng.normal(size=(6, 2)) + 3 * y[:, None]).astype(np.float32)
    query, learner, copies = x + 0.5, regression(), copies_of(y, 2)
    task = fit_task(learner, KEY, x, y, 2, TemperaturePrior(1.0), copies)
    state, _ = learner.fit(KEY, *map(jnp.asarray, repeated(x, y, copies)), 2)
    expected = strangeness(KEY, learner, state, Labelled(jnp.asarray(x), jnp.asarray(y)), 2, jnp.asarray(query))
    np.testing.assert_allclose(task.unknown(query), expected, rtol=1e-2, atol=1e-2)
    rows = np.array([0, 1, 2, 3, 4, 5, 4, 5])
    known = left_out_scores(KEY, learner, x[rows], y[rows], origin=rows)
    assert known.shape == (6,)
    left = np.isin(rows, [1, 2, 3, 5])  # of the first fold
    state, _ = learner.fit(KEY, jnp.asarray(x[rows][left]), jnp.asarray(y[rows][left]), 2)
    others = Labelled(jnp.asarray(x[[1, 2, 3, 5]]), jnp.asarray(y[[1, 2, 3, 5]]))
    expected = strangeness(KEY, learner, state, others, 2, jnp.asarray(x[[0, 4]]))
    np.testing.assert_allclose(known[:2], expected, rtol=1e-2, atol=1e-2)
    p_values = task.unknown_p_values(query)
    np.testing.assert_allclose(p_values * 7, np.round(p_values * 7), atol=1e-6)


def test_labels_that_are_thought_of_are_shown_once_and_those_that_are_added_as_others(tmp_path):
    features, names = clusters(4)
    rare = np.r_[0:4, 4:6, 8]
    fitted = FewShotClassifier(REGRESSION).fit(features[rare], names[rare])
    assert list(fitted.task_.copies) == [1] * 4 + [2] * 2 + [4]
    thought = fitted.task_.with_labels(fitted.task_.inputs[:1], np.array([2]))
    assert list(thought.copies) == [1] * 4 + [2] * 2 + [4, 1] and thought.examples == fitted.task_.examples
    fitted.add(features[9:11], names[9:11])
    assert list(fitted.task_.copies) == [1] * 4 + [2] * 2 + [1] * 3
    fitted.save(tmp_path / "a")
    again = FewShotClassifier.load(tmp_path / "a")
    np.testing.assert_array_equal(again.predict_proba(features), fitted.predict_proba(features))
    assert again.balanced and list(again.task_.copies) == list(fitted.task_.copies)


def test_a_file_of_before_copies_shows_each_example_once(tmp_path):
    def third(arrays, metadata):
        del arrays["copies"]
        about = json.loads(metadata["about"])
        del about["balanced"]
        metadata["about"] = json.dumps(about | {"schema_version": 3})

    features, names = clusters(4)
    fitted = FewShotClassifier(REGRESSION, balanced=False).fit(features[:9], names[:9])
    fitted.save(tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", change_all=third)
    again = FewShotClassifier.load(tmp_path / "b")
    assert again.balanced is False
    np.testing.assert_array_equal(again.predict_proba(features), fitted.predict_proba(features))


def test_balanced_is_true_or_false():
    with pytest.raises(ValueError, match="expected True or False as balanced, got 'yes'"):
        FewShotClassifier(REGRESSION).set_params(balanced="yes").fit(*clusters())
