"""Classes with unlike numbers of labelled examples: as many means of each, and what is left out of them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double
from test_classifier import LAPLACE, REGRESSION, clusters
from test_saved_classifiers import rewrite

from fewshot import conditioning
from fewshot.classifier import FewShotClassifier
from fewshot.conditioning import TemperaturePrior, fit_task
from fewshot.evaluation.out_of_episode import Labelled, strangeness
from fewshot.evaluation.unknown import LeftOut, each_left_out
from fewshot.groups import groups_of, labels_of, means_of, order_of, shown, without_each
from fewshot.heads import GaussianProcessHead, PretrainedHead, has_features, untrained
from fewshot.inference.inner import exact
from fewshot.learners import LEARNERS, GaussianProcess
from fewshot.learners.task_temperature import posterior_of, task_temperature
from fewshot.models import Identity, LabelRegression
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import RBF
from fewshot.saving import SavedError

KEY = jax.random.key(0)
BALANCED = FewShotClassifier(REGRESSION, balanced=True)


def labels_with(*counts):
    return np.repeat(np.arange(len(counts)), counts).astype(np.int32)


def regression():
    return GaussianProcess(DeepKernel(Identity((1, 1, 2)), RBF(), rngs=nnx.Rngs(0)), LabelRegression(0.3), exact)


@pytest.mark.parametrize(
    "counts, most, expected",
    [
        ((2, 2), None, [0, 1, 2, 3]),
        ((5, 2), None, [0, 0, 0, 1, 1, 2, 3]),
        ((1, 3, 2), None, [0, 1, 1, 1, 2, 2]),
        ((4, 1), 2, [0, 0, 1, 1, 2]),
        ((3, 1), 3, [0, 1, 2, 3]),
    ],
)
def test_every_class_has_as_many_groups(counts, most, expected):
    assert groups_of(labels_with(*counts), most).tolist() == expected


def test_groups_are_of_one_class_and_of_sizes_that_differ_by_one():
    rng = np.random.default_rng(0)
    for _ in range(100):
        counts = rng.integers(1, 30, rng.integers(2, 8))
        y = rng.permutation(labels_with(*counts))
        groups = groups_of(y)
        assert np.bincount(labels_of(y, groups)).tolist() in ([counts.min()] * len(counts), counts.tolist())
        for k in range(len(counts)):
            sizes = np.bincount(groups[y == k])
            assert np.ptp(sizes[sizes > 0]) <= 1
        x = rng.normal(size=(len(y), 3))
        by_hand = [x[groups == g].mean(0) for g in range(groups.max() + 1)]
        np.testing.assert_allclose(means_of(x, groups), by_hand, rtol=1e-12)


def test_classes_that_are_alike_are_shown_as_they_are():
    rng, y = np.random.default_rng(0), np.array([1, 0, 1, 0], np.int32)
    x = rng.normal(size=(4, 2, 3)).astype(np.float32)
    for one, other in zip(shown(x, y, groups_of(y)), (x, y), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_a_learner_is_shown_the_means():
    """The latent functions and the temperature are those of a task of the means, with as many of each class."""
    rng, y = np.random.default_rng(0), labels_with(6, 2, 3)
    x, new = rng.normal(size=(11, 4)) + y[:, None], rng.normal(size=(3, 4))
    once = FewShotClassifier(REGRESSION).fit(x, y)
    fitted = BALANCED.fit(x, y)
    order = order_of(x.astype(np.float32), y)
    means, labels = shown(x[order], y[order], groups_of(y))
    by_hand = FewShotClassifier(REGRESSION).fit(means, labels)
    for one, other in zip(fitted.predict_latent(new), by_hand.predict_latent(new), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4)
    assert fitted.task_.examples == 2
    assert np.abs(fitted.predict_latent(new).mean - once.predict_latent(new).mean).max() > 0.02
    assert list(fitted.class_count_) == [6, 2, 3]


@pytest.mark.parametrize("head, lean", [(REGRESSION, 2e-3), (LAPLACE, 0.1)])
def test_halfway_between_two_pictures_no_class_is_likelier(head, lean):
    """Six pictures that are the same tell what one tells; shown six times, they make their class likelier."""
    x, y = np.array([[1.0, 0.2]] * 6 + [[0.2, 1.0]]), np.array(["six"] * 6 + ["one"])
    middle = np.array([[0.6, 0.6]])
    alike = FewShotClassifier(head, temperature=1.0, draws=1024, balanced=True).fit(x, y)
    np.testing.assert_allclose(alike.predict_proba(middle), 0.5, atol=0.2 * lean)
    as_given = FewShotClassifier(head, temperature=1.0, draws=1024, balanced=False).fit(x, y)
    assert as_given.predict_proba(middle)[0, 1] > 0.5 + lean
    if head is LAPLACE:  # the temperature is expected to be that of what is shown
        assert alike.set_params(temperature="auto").prior_temperature_ == untrained([1, 1])
        assert as_given.set_params(temperature="auto").prior_temperature_ == untrained([6, 1])


@pytest.mark.long
@double
def test_a_temperature_is_learned_from_tasks_that_are_made_alike_without_each_fold():
    """(T3) by hand: the left-out inputs themselves, by means of the others."""
    rng, y = np.random.default_rng(1), labels_with(5, 2)
    x = rng.normal(size=(7, 2)) + 2 * y[:, None]
    learner, known = regression(), (0.7, 0.6)
    without = without_each(x, y, 8, 7)
    assert [np.flatnonzero(fold).tolist() for fold in np.asarray(without.held)] == [[0, 5], [1, 6], [2], [3], [4]]
    found = task_temperature(KEY, learner, jnp.asarray(x), jnp.asarray(y), 2, *known, without=without)
    predicted, (fit_key, predict_key) = [], jax.random.split(KEY)
    for fold in np.asarray(without.held):
        rest, labels = x[~fold], y[~fold]
        number = np.bincount(labels).min()
        parts = [np.array_split(rest[labels == k], number) for k in range(2)]
        means = np.array([part.mean(0) for own in parts for part in own])
        state, _ = learner.fit(fit_key, jnp.asarray(means), jnp.asarray(np.repeat(np.arange(2), number)), 2)
        predicted.append(learner.predict(predict_key, state, jnp.asarray(x)).probabilities)
    expected = posterior_of(jnp.stack(predicted), jnp.asarray(y), without.held, *known)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-6)
    masked = task_temperature(KEY, learner, jnp.asarray(x), jnp.asarray(y), 2, *known)
    assert np.abs(masked.weights / expected.weights - 1).max() > 0.05


@pytest.mark.long
def test_scores_of_unknown_classes_compare_with_the_examples_themselves(monkeypatch):
    """What the learner says is of the means; distances are to the means of all, and ranks among the examples."""
    rng, y = np.random.default_rng(2), labels_with(4, 2)
    x = (rng.normal(size=(6, 2)) + 3 * y[:, None]).astype(np.float32)
    query, learner, groups = x + 0.5, regression(), groups_of(y)
    task = fit_task(learner, KEY, x, y, 2, TemperaturePrior(1.0), groups)
    state, _ = learner.fit(KEY, *map(jnp.asarray, shown(x, y, groups)), 2)
    expected = strangeness(KEY, learner, state, Labelled(jnp.asarray(x), jnp.asarray(y)), 2, jnp.asarray(query))
    np.testing.assert_allclose(task.unknown(query), expected, rtol=1e-2, atol=1e-2)
    known = each_left_out(KEY, learner, x, y, without=without_each(x, y, 4, 6)).scores
    assert known.shape == (6,)
    state, _ = learner.fit(KEY, jnp.asarray([x[1:4].mean(0), x[5]]), jnp.arange(2), 2)
    others = Labelled(jnp.asarray(x[[1, 2, 3, 5]]), jnp.asarray(y[[1, 2, 3, 5]]))
    expected = strangeness(KEY, learner, state, others, 2, jnp.asarray(x[[0, 4]]))
    np.testing.assert_allclose(known[:2], expected, rtol=1e-2, atol=1e-2)
    p_values = task.unknown_p_values(query)
    np.testing.assert_allclose(p_values * 7, np.round(p_values * 7), atol=1e-6)
    asked = []
    nothing = LeftOut(np.zeros(6), np.ones(6, bool))
    monkeypatch.setattr(conditioning, "each_left_out", lambda *given: asked.append(given) or nothing)
    replace(task).unknown_p_values(query)  # a copy, which has not asked yet
    real = np.asarray(asked[0][-1].real)  # of what is left without [0, 4], [1, 5], [2] and [3]
    assert real.sum(1).tolist() == [2, 2, 4, 4]


def test_labels_that_are_thought_of_stand_alone_and_what_is_added_makes_new_groups(tmp_path):
    features, names = clusters(4)
    some = np.r_[0:4, 4:6, 8]
    fitted = BALANCED.fit(features[some], names[some])
    assert fitted.task_.groups.tolist() == [0, 0, 0, 0, 1, 1, 2]
    thought = fitted.task_.with_labels(fitted.task_.inputs[:2], np.array([2, 0]))
    assert thought.groups.tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 4] and thought.examples == fitted.task_.examples
    fitted.add(features[9:11], names[9:11])
    assert fitted.task_.groups.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5]
    fitted.save(tmp_path / "a")
    again = FewShotClassifier.load(tmp_path / "a")
    np.testing.assert_array_equal(again.predict_proba(features), fitted.predict_proba(features))
    assert again.balanced is True and again.task_.groups.tolist() == fitted.task_.groups.tolist()


def test_a_file_of_before_groups_shows_each_example(tmp_path):
    def third(arrays, metadata):
        del arrays["groups"]
        about = json.loads(metadata["about"])
        del about["balanced"]
        metadata["about"] = json.dumps(about | {"schema_version": 3})

    features, names = clusters(4)
    fitted = FewShotClassifier(GaussianProcessHead(likelihood="gaussian"), balanced=False).fit(features[:9], names[:9])
    fitted.save(tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", change_all=third)
    again = FewShotClassifier.load(tmp_path / "b")
    assert again.balanced is False
    np.testing.assert_array_equal(again.predict_proba(features), fitted.predict_proba(features))


@pytest.mark.parametrize("groups", [[0, 0, 1, 1, 2], [0, 1, 1, 2, 3], [0, 0, 1, 3, 3], [-1, 0, 1, 1, 1], [0, 1, 2]])
def test_groups_that_were_never_saved_are_refused(groups, tmp_path):
    features, names = clusters(4)
    BALANCED.fit(features[[0, 1, 4, 5, 6]], names[[0, 1, 4, 5, 6]]).save(tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", change_arrays=lambda arrays: arrays.update(groups=np.array(groups)))
    if groups == [0, 0, 1, 1, 2]:
        assert FewShotClassifier.load(tmp_path / "b").task_.groups.tolist() == groups
        return
    with pytest.raises(SavedError, match="expected numbers from 0, those of one class in a group as groups"):
        FewShotClassifier.load(tmp_path / "b")


@pytest.mark.long
def test_who_is_balanced_unless_it_is_told_otherwise(tiny_run):
    features, names = clusters(4)
    some = np.r_[0:4, 4, 8]

    def groups(learner, **parameters):
        return len(set(FewShotClassifier(learner, **parameters).fit(features[some], names[some]).task_.groups))

    cosine = GaussianProcessHead(likelihood="gaussian")
    assert (groups(cosine), groups(REGRESSION)) == (3, 6)
    assert (groups(cosine, balanced=False), groups(REGRESSION, balanced=True)) == (6, 3)
    assert FewShotClassifier.from_run(tiny_run.path).built().balanced
    assert PretrainedHead("photographs").build(None).balanced
    with pytest.raises(ValueError, match="expected True, False or None as balanced, got 'yes'"):
        BALANCED.set_params(balanced="yes").fit(features, names)
    BALANCED.set_params(balanced=True)


def test_learners_that_adapt_to_images_have_no_features():
    adapt = {name for name, one in LEARNERS.items() if not has_features(one.__new__(one))}
    assert adapt == {"maml", "first-order-maml", "inductive-maml", "bayesian-maml", "chaser", "abml"}


@pytest.mark.parametrize("width", [1, 5, 300])
def test_the_order_of_examples_is_their_own(width):
    """By class, whatever rows and rounding were given; within a class no number of theirs grows along it."""
    rng = np.random.default_rng(width)
    y = labels_with(40, 11, 1)
    x = rng.normal(size=(len(y), width))
    expected = x[order_of(x, y)]
    np.testing.assert_array_equal(y[order_of(x, y)], y)
    for _ in range(3):
        given = rng.permutation(len(y))
        rounded = x[given].astype(np.float32) * (1 + 1e-7 * rng.normal(size=x.shape))
        np.testing.assert_array_equal(x[given][order_of(rounded, y[given])], expected)
    first = expected[:40, 0]
    assert abs(np.corrcoef(first, np.arange(40))[0, 1]) < 0.5
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.5
