"""What to label next: expected utilities by brute force, against sums over labels and draws of the true posterior."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import entr
from sklearn.base import clone

from fewshot import suggestion
from fewshot.classifier import FewShotClassifier
from fewshot.conditioning import FittedTask
from fewshot.groups import means_of
from fewshot.heads import GaussianProcessHead
from fewshot.learners import NearestMean
from fewshot.learners.base import Traits
from fewshot.learners.task_temperature import single
from fewshot.models import Identity
from fewshot.suggestion import indecision

RNG = np.random.default_rng(3)
X, LABELS = RNG.normal(size=(4, 3)), list("abab")
POOL = np.concatenate([2 * RNG.normal(size=(3, 3)), X[:3] + 0.05])  # half of it is known already


@pytest.fixture(scope="module")
def fitted():
    head = GaussianProcessHead(kernel="rbf", inference="laplace", scale=4.0)
    return FewShotClassifier(head, temperature=0.3, draws=4096).fit(X, LABELS)


@pytest.mark.long
def test_terms_are_sums_over_the_labels_that_may_come(fitted):
    """The second from fits to either label, each with its probability at temperature 1, by the estimator alone."""
    pool = POOL[3:]  # near labelled examples: one label is more probable than the other
    found = fitted.suggest(pool, 3, by="information")
    first = fitted.task_.information(pool)
    assert found.positions[0] == np.argmax(first) and found.utility[0] == pytest.approx(first.max(), rel=1e-5)
    task = replace(fitted.task_, temperatures=single(1.0))
    p = task.probabilities(fitted._inputs(pool[found.positions[:1]]))[0]
    assert abs(p[0] - 0.5) > 0.2
    later = [
        FewShotClassifier(fitted.learner, draws=4096).fit([*X, pool[found.positions[0]]], [*LABELS, label])
        for label in "ab"
    ]
    second = sum(weight * one.task_.information(pool) for weight, one in zip(p, later, strict=True))
    second[found.positions[0]] = -np.inf
    assert found.positions[1] == np.argmax(second)
    assert found.utility[1] == pytest.approx(second.max(), rel=1e-4)
    assert len(set(found.positions)) == 3 and (np.diff(found.utility) < 0).all()


def true_information(draws=400_000):
    """I(y_a, y_b; f) of all pairs of the pool, H[E p] - E H[p], by draws of the prior weighted with the likelihood."""
    points = np.concatenate([X, POOL]) / np.sqrt(3)
    squares = ((points[:, None] - points) ** 2).sum(-1) / np.exp(2 * -0.25)
    root = np.linalg.cholesky(4.0 * np.exp(-squares / 2) + 1e-9 * np.eye(len(points)))
    # Of two classes the difference of the logits alone matters: twice the variance.
    d = np.sqrt(2) * np.random.default_rng(0).normal(size=(draws, len(points))) @ root.T
    p = 1 / (1 + np.exp(-d))
    right = np.where(np.array(LABELS) == "a", p[:, :4], 1 - p[:, :4]).prod(1)
    weights, p = right / right.sum(), p[:, 4:]
    each = weights @ (entr(p) + entr(1 - p))

    def joint(a, b):
        outcomes = itertools.product([p[:, a], 1 - p[:, a]], [p[:, b], 1 - p[:, b]])
        return sum(entr(weights @ (one * other)) for one, other in outcomes) - each[a] - each[b]

    return {pair: joint(*pair) for pair in itertools.combinations(range(len(POOL)), 2)}


@pytest.mark.long
def test_two_suggestions_are_the_best_pair_of_the_true_posterior(fitted):
    found, truth = fitted.suggest(POOL, 2, by="information"), true_information()
    pair = tuple(sorted(found.positions.tolist()))
    assert truth[pair] > 0.97 * max(truth.values()) > 1.2 * np.median(list(truth.values()))
    assert found.utility.sum() == pytest.approx(truth[pair], rel=0.1)  # Laplace's posterior is not the true one


class Known:
    """A task whose probabilities and utilities are given, and which counts how often it is asked."""

    def __init__(self, p, terms=None, labels=()):
        self.p, self.terms, self.labels, self.asked = p, terms, labels, 0
        self.learner = SimpleNamespace(traits=Traits())

    def probabilities(self, x):
        assert len(x) == 1
        return self.p[None]

    def with_labels(self, x, y, groups):
        assert x.shape == (1, 1) and groups is None
        return Known(self.p, self.terms, (*self.labels, int(y[0])))

    def looked_up(self, x):
        self.asked += len(x)
        return self.terms[x[:, 0].astype(int)]


LOOKED_UP = suggestion.Utility(Known.looked_up, only_falls=True, of_model=True)


def test_outcomes_are_drawn_as_often_as_they_are_probable(monkeypatch):
    monkeypatch.setattr(suggestion, "PATHS", 4)
    p, random = np.array([0.5, 0.3, 0.15, 0.05]), np.random.default_rng(0)
    start = [suggestion.Path(1.0, Known(p))]
    pool = np.zeros((3, 1))
    all_of_them = suggestion.extended(start, pool, 1, random)
    assert [path.weight for path in all_of_them] == pytest.approx(p)
    assert [path.task.labels for path in all_of_them] == [(0,), (1,), (2,), (3,)]
    found = np.zeros((4, 4))
    for _ in range(2000):
        paths = suggestion.extended(all_of_them, pool, 2, random)
        assert len(paths) <= 4 and sum(path.weight for path in paths) == pytest.approx(1.0)
        for path in paths:
            found[path.task.labels] += path.weight / 2000
    np.testing.assert_allclose(found, np.outer(p, p), atol=0.015)


def test_examples_that_cannot_be_the_best_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(suggestion, "CHUNK", 4)
    terms = np.random.default_rng(0).permutation(40.0 + np.arange(100))
    task, pool = Known(None, terms), np.arange(100.0)[:, None]
    bounds = terms + 2.5
    bounds[np.argsort(terms)[60:64]] = 1000.0  # they told much before others were chosen
    assert suggestion._best(LOOKED_UP, [suggestion.Path(1.0, task)], pool, bounds) == np.argmax(terms)
    assert task.asked == 8 and bounds.max() == terms.max()  # these four, and four within 2.5 of the best term
    unknown = np.full(100, np.inf)
    unknown[terms.argmax()] = -np.inf  # chosen already
    assert suggestion._best(LOOKED_UP, [suggestion.Path(1.0, task)], pool, unknown) == np.argsort(terms)[-2]
    assert task.asked == 8 + 99
    rises = suggestion.Utility(Known.looked_up, only_falls=False, of_model=True)
    stale = np.zeros(100)
    assert suggestion._best(rises, [suggestion.Path(1.0, task)], pool, stale) == np.argmax(terms)


def test_a_label_can_raise_the_indecision_about_another_but_not_its_information():
    """Two classes are level after either outcome; before them, on average over both, one of three leads."""
    outcomes = np.array([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]])
    assert indecision(outcomes).mean() == pytest.approx(1.0)
    assert indecision(outcomes.mean(0, keepdims=True)) == pytest.approx(0.75)
    assert {name: utility.only_falls for name, utility in suggestion.UTILITIES.items()} == {
        "margin": False,
        "information": True,
    }


@pytest.mark.long
@pytest.mark.parametrize("balanced", [False, True])
def test_margins_are_means_over_the_labels_that_may_come(balanced):
    """The second from fits to either label, each with its probability: shown anew where classes are balanced."""
    head = GaussianProcessHead(kernel="cosine", inference="laplace", scale=4.0)
    given = {"temperature": 0.3, "draws": 4096, "balanced": balanced}
    fitted = FewShotClassifier(head, **given).fit(X, LABELS)
    found = fitted.suggest(POOL, 3)
    first = indecision(fitted.predict_proba(POOL))
    assert found.positions[0] == np.argmax(first) and found.utility[0] == pytest.approx(first.max(), rel=1e-5)
    asked = POOL[found.positions[0]]
    later = [FewShotClassifier(head, **given).fit([*X, asked], [*LABELS, label]) for label in "ab"]
    p = fitted.predict_proba(asked[None])[0]
    second = sum(weight * indecision(one.predict_proba(POOL)) for weight, one in zip(p, later, strict=True))
    second[found.positions[0]] = -np.inf
    assert found.positions[1] == np.argmax(second)
    assert found.utility[1] == pytest.approx(second.max(), rel=1e-3)
    assert len(set(found.positions)) == 3


@pytest.mark.long
@pytest.mark.parametrize("by", ["margin", "information"])
def test_labels_that_may_come_are_shown_alike_for_margins_alone(monkeypatch, by):
    """As they would be if they were added. The information is a sum over labels, each of which stands alone."""
    shown, with_labels = [], FittedTask.with_labels

    def recorded(task, inputs, y, groups):
        found = with_labels(task, inputs, y, groups)
        shown.append((found, groups))
        return found

    monkeypatch.setattr(FittedTask, "with_labels", recorded)
    head = GaussianProcessHead(kernel="cosine", inference="laplace", scale=4.0, power=1.0)
    classifier = FewShotClassifier(head, temperature=0.3, draws=64, balanced=True)
    classifier.fit(X, LABELS).suggest(POOL, 2, by)
    assert len(shown) == 2
    for task, groups in shown:
        if by == "information":
            assert groups is None
            continue
        added = clone(classifier).fit(task.inputs, task.y).task_
        assert np.bincount(groups).max() == 2
        means = [means_of(one.inputs, one.groups).reshape(4, 3) for one in (task, added)]
        np.testing.assert_array_equal(*means)


class BesideOthers(NearestMean):
    """Its answers depend on the other queries, of which it takes the mean off."""

    traits = Traits(transductive=True)

    def predict(self, key, state, query):
        return super().predict(key, state, query - query.mean(0))


def test_a_learner_whose_answers_depend_on_the_pool_sees_all_of_it():
    pool = np.random.default_rng(4).normal(size=(70, 3)) + 1
    once = {"temperature": 1.0, "balanced": False}
    learner = BesideOthers(Identity((1, 1, 3)))
    fitted = FewShotClassifier(learner, **once).fit(X, LABELS)
    found, first = fitted.suggest(pool, 2), indecision(fitted.predict_proba(pool))
    assert found.positions[0] == np.argmax(first) and found.utility[0] == pytest.approx(first.max(), rel=1e-5)
    p = fitted.predict_proba(pool)[found.positions[0]]
    later = [FewShotClassifier(learner, **once).fit([*X, pool[found.positions[0]]], [*LABELS, label]) for label in "ab"]
    second = sum(weight * indecision(one.predict_proba(pool)) for weight, one in zip(p, later, strict=True))
    second[found.positions[0]] = -np.inf
    assert found.positions[1] == np.argmax(second) and found.utility[1] == pytest.approx(second.max(), rel=1e-4)


def test_of_two_that_are_alike_one_is_asked_for():
    """Whatever label the first gets decides the second; others that were less open then are more open now."""
    x = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    pool = np.array([[0.7, 0.71, 0.0], [0.7, 0.71, 0.0], [0.1, 0.2, 1.0], [0.9, 0.1, 0.0]])
    head = GaussianProcessHead(kernel="rbf", inference="laplace", scale=4.0, lengthscale=0.5)
    fitted = FewShotClassifier(head, temperature=0.3, draws=4096).fit(x, ["a", "b"])
    one_by_one = np.argsort(-indecision(fitted.predict_proba(pool)))
    assert set(one_by_one[:2]) == {0, 1}
    assert fitted.suggest(pool, 2).positions.tolist() == [0, 2]


def test_another_name_of_a_utility_is_refused(fitted):
    with pytest.raises(ValueError, match="expected by to be one of margin, information, got 'entropy'"):
        fitted.suggest(POOL, 1, by="entropy")


def test_numbers_of_suggestions_that_make_no_sense_are_refused(fitted):
    for k in (0, 7, -1):
        with pytest.raises(ValueError, match=f"expected k from 1 to the 6 examples of the pool, got {k}"):
            fitted.suggest(POOL, k)


@pytest.mark.long
def test_labels_that_may_come_leave_the_prior_as_it_is():
    """Where a kernel follows the labelled examples, that of the labels that are there: the chain rule has one prior."""
    powers = {"kernel.constant": 0.5, "kernel.scale_power": 2.0, "kernel.constant_power": -1.0}
    once = {"temperature": 1.0, "balanced": False}
    follows = FewShotClassifier(GaussianProcessHead(inference="laplace", scale=1.0, settings=powers), **once)
    fixed = FewShotClassifier(
        GaussianProcessHead(inference="laplace", scale=4.0, settings={"kernel.constant": 0.25}), **once
    )  # what two examples a class make of it
    new, label = follows.fit(X, LABELS)._inputs(POOL[:1]), np.array([1], np.int32)
    queries = follows._inputs(POOL)
    may_come = follows.task_.with_labels(new, label).latents(queries)
    wanted = fixed.fit(X, LABELS).add(POOL[:1], ["b"]).predict_latent(POOL)
    for got, expected in zip(may_come, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
    came = follows.add(POOL[:1], ["b"]).predict_latent(POOL)
    assert np.abs(came.mean - wanted.mean).max() > 0.01
