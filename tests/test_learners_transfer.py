"""Feature transfer and baseline++: the fit of a head against a plain loop and against scikit-learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double
from sklearn.linear_model import LogisticRegression

from fewshot.inference.inner.base import Mask
from fewshot.learners import BaselinePlusPlus, FeatureTransfer
from fewshot.learners.feature_transfer import descend, shuffled
from fewshot.models.backbones import Identity
from fewshot.tasks import LabelledImages

FEATURES, CLASSES, TRAINING_CLASSES = 4, 3, 6
PIXELS = Identity((1, 1, FEATURES))
KEY = jax.random.key(0)


def points(seed=0, counts=(1, 2, 4)):
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return rng.normal(size=(len(counts), FEATURES))[y] + rng.normal(size=(len(y), FEATURES)), y


def transfer(**settings):
    return FeatureTransfer(PIXELS, classes=TRAINING_CLASSES, rngs=nnx.Rngs(0), **settings)


@pytest.mark.long
@double
def test_a_head_that_has_converged_is_logistic_regression():
    """All points in one batch: the mean of -log p + decay/2 |w|^2, bias included, has C = 1 / (N decay)."""
    x, y = points()
    learner = transfer(rate=1.0, decay=0.05, batch=len(y), passes=3000)
    state, _ = learner.fit(KEY, jnp.asarray(x), jnp.asarray(y), CLASSES)
    ones = np.ones((len(y), 1))
    solver = LogisticRegression(C=1 / (0.05 * len(y)), fit_intercept=False, tol=1e-10, max_iter=1000)
    solver.fit(np.concatenate([x, ones], axis=1), y)
    np.testing.assert_allclose(state.head["weights"], solver.coef_[:, :-1], atol=1e-5)
    np.testing.assert_allclose(state.head["bias"], solver.coef_[:, -1], atol=1e-5)
    assert np.abs(solver.coef_).max() > 0.3


@double
def test_descent_is_that_of_a_plain_loop():
    """v = .9 v + .1 g from v = g, as published, over batches of which some are short or empty."""
    target = np.array([1.0, -2.0])
    batches = np.array([[0, 1], [1, 0], [0, 0], [1, 1]]), np.array([[1, 1], [1, 0], [0, 0], [0, 1]], bool)

    def gradient(head, rows, real):
        return {"w": jnp.sum(jnp.where(real[:, None], head["w"] - target[0] * rows[:, None] - target[1], 0.0), axis=0)}

    start = {"w": jnp.asarray([3.0, 5.0])}
    found = descend(gradient, start, tuple(map(jnp.asarray, batches)), 0.1, 0.2)["w"]
    w, velocity = np.array([3.0, 5.0]), None
    for rows, real in zip(*batches, strict=True):
        if real.any():
            slope = sum(w - target[0] * row - target[1] for row, there in zip(rows, real, strict=True) if there)
            slope = slope + 0.2 * w
            velocity = slope if velocity is None else 0.9 * velocity + 0.1 * slope
            w = w - 0.1 * velocity
    np.testing.assert_allclose(found, w, rtol=1e-12)


def test_every_pass_shows_each_real_point_once():
    real = jnp.asarray([True, False, True, True, True, False, True])
    rows, exists = map(np.asarray, shuffled(KEY, real, 2, 50))
    assert rows.shape == exists.shape == (200, 2)
    passes = [row[there].tolist() for row, there in zip(rows.reshape(50, 8), exists.reshape(50, 8), strict=True)]
    assert all(sorted(one) == [0, 2, 3, 4, 6] for one in passes) and len({tuple(one) for one in passes}) > 30
    assert exists.reshape(50, 8)[:, :5].all() and not exists.reshape(50, 8)[:, 5:].any()
    first = [one[0] for one in passes]
    assert max(first.count(point) for point in (0, 2, 3, 4, 6)) < 25


@pytest.mark.long
@pytest.mark.parametrize("make", [FeatureTransfer, pytest.param(BaselinePlusPlus, marks=pytest.mark.slow)])
def test_masked_points_and_classes_change_no_head(make):
    x, y = points()
    learner = make(PIXELS, classes=TRAINING_CLASSES, rngs=nnx.Rngs(0), passes=5, rate=0.5)
    whole, _ = learner.fit(KEY, jnp.asarray(x, jnp.float32), jnp.asarray(y), CLASSES)
    wider = jnp.asarray(np.concatenate([x, 100 * x[:6]]), jnp.float32)
    labels = jnp.asarray(np.concatenate([y, np.full(6, CLASSES)]), jnp.int32)
    mask = Mask(jnp.arange(len(y) + 6) < len(y), jnp.arange(CLASSES + 1) < CLASSES)
    found, _ = learner.fit(KEY, wider, labels, CLASSES + 1, mask)
    for name, value in whole.head.items():
        np.testing.assert_allclose(found.head[name][:CLASSES], value, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@double
def test_cosine_heads_see_directions_alone():
    x, _ = points()
    learner = BaselinePlusPlus(PIXELS, classes=TRAINING_CLASSES, rngs=nnx.Rngs(0))
    head = learner.start(KEY, CLASSES) | {"norms": jnp.asarray([1.0, 2.0, 0.5])}
    directions = np.asarray(head["directions"])
    cosines = (x / np.linalg.norm(x, axis=1)[:, None]) @ (directions / np.linalg.norm(directions, axis=1)[:, None]).T
    np.testing.assert_allclose(learner.logits(head, jnp.asarray(x)), 2 * cosines * [1.0, 2.0, 0.5], rtol=1e-9)
    longer = head | {"directions": 3 * head["directions"]}
    np.testing.assert_allclose(learner.logits(longer, jnp.asarray(5 * x)), learner.logits(head, jnp.asarray(x)))
    norm = np.linalg.norm(np.asarray(learner.start(KEY, 4000)["directions"]), axis=1)
    assert np.mean(norm**2) == pytest.approx(1, abs=0.05)


def test_the_usual_scale_depends_on_the_number_of_training_classes():
    scales = {classes: BaselinePlusPlus(PIXELS, classes=classes, rngs=nnx.Rngs(0)).scale for classes in (200, 201)}
    assert scales == {200: 2.0, 201: 10.0}
    assert BaselinePlusPlus(PIXELS, classes=201, rngs=nnx.Rngs(0), scale=3.0).scale == 3.0


@pytest.mark.long
@double
@pytest.mark.parametrize("make", [FeatureTransfer, BaselinePlusPlus])
def test_the_loss_is_the_cross_entropy_over_all_training_classes(make):
    learner = make(PIXELS, classes=TRAINING_CLASSES, rngs=nnx.Rngs(0))
    for number, parameter in enumerate(jax.tree.leaves(nnx.state(learner, nnx.Param))):
        assert parameter.shape[0] == TRAINING_CLASSES, number
    for name, value in learner.head.items():
        value[...] = jax.random.normal(jax.random.fold_in(KEY, len(name)), value[...].shape)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, 1, 1, FEATURES)), rng.integers(0, TRAINING_CLASSES, (2, 5)).astype(np.int32)
    outcome = learner.loss(jax.random.split(KEY, 2), LabelledImages(jnp.asarray(x), jnp.asarray(y)), jax.vmap)
    head = {name: value[...] for name, value in learner.head.items()}
    logits = np.asarray(learner.logits(head, jnp.asarray(x.reshape(10, FEATURES))))
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert float(outcome.objective) == pytest.approx(log_p[np.arange(10), y.ravel()].sum() / 2, rel=1e-9)
    assert outcome.points == 5


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"classes": 0}, "expected the number of training classes, at least 2, got 0"),
        ({"classes": 6, "passes": 0}, "expected a positive rate, batch and passes, and decay >= 0, got"),
        ({"classes": 6, "rate": 0.0}, "expected a positive rate, batch and passes, and decay >= 0, got"),
        ({"classes": 6, "scale": -1.0}, "expected a positive scale of the cosines, or 0 for the usual one, got -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BaselinePlusPlus(PIXELS, rngs=nnx.Rngs(0), **settings)
