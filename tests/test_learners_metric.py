"""Prototypical, matching and relation networks, nearest mean, logistic regression: closed forms and plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import LogisticRegression, Matching, NearestMean, Prototypical, Relation, logistic_regression
from fewshot.models.backbones import Conv4, Conv4Maps, Identity
from fewshot.models.networks.context import READS
from fewshot.tasks import Task

FEATURES, CLASSES = 5, 3
PIXELS = Identity((1, 1, FEATURES))
KEY = jax.random.key(0)


def points(seed=0, counts=(1, 2, 4)):
    """Features [N, D], labels with such counts, and four queries."""
    rng = np.random.default_rng(seed)
    y = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    centres = rng.normal(size=(len(counts), FEATURES))
    return centres[y] + rng.normal(size=(len(y), FEATURES)), y, rng.normal(size=(4, FEATURES))


def probabilities(learner, x, y, query, classes=CLASSES):
    state, code = learner.fit(KEY, jnp.asarray(x), jnp.asarray(y), classes)
    assert code == Code.OK
    return np.asarray(learner.predict(KEY, state, jnp.asarray(query)).probabilities)


def softmax(logits):
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@double
def test_prototypes_are_a_linear_classifier():
    """Weights 2 mu_k and bias -|mu_k|^2: |x|^2 is the same for all classes."""
    x, y, query = points()
    means = np.stack([x[y == k].mean(0) for k in range(CLASSES)])
    expected = softmax(query @ (2 * means).T - (means**2).sum(1))
    np.testing.assert_allclose(probabilities(Prototypical(PIXELS, way=CLASSES), x, y, query), expected, rtol=1e-9)


@pytest.mark.long
@double
def test_the_loss_of_prototypes_is_the_cross_entropy_of_the_queries():
    (x, y, query), labels = points(), np.array([0, 2, 1, 1], np.int32)
    learner = Prototypical(PIXELS, way=CLASSES)
    images, queries = x[:, None, None], query[:, None, None]
    tasks = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], Task(images, y, queries, labels))
    outcome = learner.loss(jax.random.split(KEY, 1), tasks, jax.vmap)
    expected = np.log(probabilities(learner, x, y, query)[np.arange(4), labels]).sum()
    assert float(outcome.objective) == pytest.approx(expected, rel=1e-9) and outcome.points == 4


@pytest.mark.long
@double
def test_nearest_mean_is_a_softmax_of_cosines():
    x, y, query = points()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    means = np.stack([unit[y == k].mean(0) for k in range(CLASSES)])
    cosines = (query / np.linalg.norm(query, axis=1)[:, None]) @ (means / np.linalg.norm(means, axis=1)[:, None]).T
    found = probabilities(NearestMean(PIXELS, scale=7.0), x, y, query)
    np.testing.assert_allclose(found, softmax(7 * cosines), rtol=1e-9)


@pytest.mark.long
@double
def test_matching_attends_to_every_labelled_image(monkeypatch):
    monkeypatch.setattr(Matching, "sharpness", 3.0)  # at 100 one image takes nearly all
    x, y, query = points()
    expected = np.zeros((len(query), CLASSES))
    for q, new in enumerate(query):
        cosines = [max(0, new @ old / np.linalg.norm(new) / np.linalg.norm(old)) for old in x]
        for attention, label in zip(softmax(3.0 * np.array(cosines)), y, strict=True):
            expected[q, label] += attention
    learner = Matching(PIXELS, way=CLASSES, context=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(probabilities(learner, x, y, query), expected, rtol=1e-9)


def matching(seed=0):
    return Matching(PIXELS, way=CLASSES, rngs=nnx.Rngs(seed))


@pytest.mark.long
@double
def test_matching_with_context_attends_in_the_embedding_of_its_task(monkeypatch):
    """Loops over images and reads, with flax's LSTM cells."""
    monkeypatch.setattr(Matching, "sharpness", 3.0)
    (x, y, query), learner = points(), matching()
    known, asked = embedded_by_loops(learner.context, x, query)
    unit, new = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (known, asked))
    attention = softmax(3.0 * np.maximum(0, new @ unit.T))
    found = probabilities(learner, x, y, query)
    np.testing.assert_allclose(found, attention @ np.eye(CLASSES)[y], rtol=1e-9)
    plain = probabilities(Matching(PIXELS, way=CLASSES, context=False, rngs=nnx.Rngs(0)), x, y, query)
    assert np.abs(found - plain).max() > 1e-3


@pytest.mark.long
@double
@pytest.mark.parametrize("context", [False, True])
def test_with_one_image_a_class_matching_answers_its_attention(context):
    """At the sharpness that it has by default, the 100 of Chen et al. 2019."""
    (x, _, query), y = points(2, counts=(1, 1, 1)), np.array([2, 0, 1], np.int32)
    learner = Matching(PIXELS, way=CLASSES, context=context, rngs=nnx.Rngs(0))
    known, asked = embedded_by_loops(learner.context, x, query) if context else (x, query)
    unit, new = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (known, asked))
    attention = softmax(100 * np.maximum(0, new @ unit.T))
    assert ((attention > 0.01) & (attention < 0.9)).any()  # not all of it on one image
    np.testing.assert_allclose(probabilities(learner, x, y, query)[:, y], attention, rtol=1e-9)


@pytest.mark.long
@double
def test_matching_with_context_knows_no_order_of_its_images():
    (x, y, query), order = points(), np.array([3, 0, 6, 2, 5, 1, 4])
    found = probabilities(matching(), x, y, query)
    np.testing.assert_allclose(probabilities(matching(), x[order], y[order], query), found, rtol=1e-12)
    x[3] += 1  # of one class: every class notices
    assert np.abs(probabilities(matching(), x, y, query) - found).max() > 1e-3


def flax_cell(lstm, inputs):
    """flax's cell with the weights of one of ours: its gates are named, its order is that of their letters."""
    cell = nnx.LSTMCell(inputs, lstm.size, param_dtype=np.float64, rngs=nnx.Rngs(0))
    kernels = np.split(np.asarray(lstm.gates.kernel[...]), 4, axis=1)
    biases = np.split(np.asarray(lstm.gates.bias[...]), 4)
    for gate, kernel, bias in zip("ifog", kernels, biases, strict=True):
        getattr(cell, "if_" if gate == "f" else f"i{gate}").kernel[...] = kernel[:inputs]
        getattr(cell, f"h{gate}").kernel[...] = kernel[inputs:]
        getattr(cell, f"h{gate}").bias[...] = bias
    return cell


def embedded_by_loops(context, x, query):
    """(F1) of labelled features and (F2) of queries."""
    ways = {name: flax_cell(getattr(context, name), FEATURES) for name in ("forward", "backward")}
    known, blank = x.copy(), jnp.zeros(FEATURES)
    for name, sign in (("forward", 1), ("backward", -1)):
        carry = blank, blank
        for n in np.argsort(x.sum(1))[::sign]:
            carry, hidden = ways[name](carry, jnp.asarray(x[n]))
            known[n] += hidden
    attending, asked = flax_cell(context.attending, 2 * FEATURES), query.copy()
    for q, new in enumerate(query):
        cell, hidden = blank, new
        for _ in range(READS):
            read = softmax(known @ hidden) @ known
            (cell, _), out = attending((cell, jnp.asarray(hidden)), jnp.asarray(np.concatenate([new, read])))
            hidden = new + np.asarray(out)
        asked[q] = hidden
    return known, asked


@double
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("counts", [(1, 2, 4), (3, 2)])
def test_logistic_regression_is_at_its_minimum(unit, counts):
    """The gradient of C sum_n -log p + 1/2 |w|^2 vanishes; with two classes the penalty is on w_1 - w_0."""
    x, y, _ = points(counts=counts)
    learner = LogisticRegression(PIXELS, C=2.0, unit_norm=unit)
    state, code = learner.fit(KEY, jnp.asarray(x), jnp.asarray(y), len(counts))
    inputs = x / np.linalg.norm(x, axis=1, keepdims=True) if unit else x
    wrong = softmax(inputs @ np.asarray(state.weights).T + np.asarray(state.bias)) - np.eye(len(counts))[y]
    penalty = np.asarray(state.weights) * (2 if len(counts) == 2 else 1)
    assert code == Code.OK
    np.testing.assert_allclose(2.0 * wrong.T @ inputs + penalty, 0, atol=1e-4)
    np.testing.assert_allclose(wrong.sum(0), 0, atol=1e-4)
    assert np.abs(penalty).max() > 0.1


def test_logistic_regression_says_that_it_did_not_converge(monkeypatch):
    monkeypatch.setattr(logistic_regression, "MAX_ITERATIONS", 2)
    x, y, _ = points()
    _, code = LogisticRegression(PIXELS).fit(KEY, jnp.asarray(100 * x, jnp.float32), jnp.asarray(y), CLASSES)
    assert code == Code.NOT_CONVERGED


@pytest.mark.long
@double
def test_relation_compares_every_pair():
    """Logits of a pair on its own, in evaluation mode, and scores divided by their sum."""
    x, y, query = points()
    learner = Relation(PIXELS, way=CLASSES, rngs=nnx.Rngs(0))
    found = probabilities(learner, x[:, None, None], y, query[:, None, None])
    means = np.stack([x[y == k].mean(0) for k in range(CLASSES)])
    for q, new in enumerate(query):
        pairs = [
            learner.comparison(
                jnp.asarray(mean)[None, None, None, None], jnp.asarray(new)[None, None, None, None], False
            )
            for mean in means
        ]
        scores = jax.nn.sigmoid(jnp.concatenate(pairs).ravel())
        np.testing.assert_allclose(found[q], scores / scores.sum(), rtol=1e-9)


@pytest.mark.long
@double
def test_the_loss_of_relations_is_the_squared_error_of_their_scores():
    """Each task has its own batch statistics, and the running ones move."""
    (x, y, query), labels = points(), np.array([0, 2, 1, 1], np.int32)
    learner = Relation(PIXELS, way=CLASSES, rngs=nnx.Rngs(0))
    one = Task(x[:, None, None], y, query[:, None, None], labels)
    other = one._replace(x_query=one.x_query + 1, x_support=one.x_support * 2)
    before = np.asarray(learner.comparison.first.norm.mean[...]).copy()

    def loss(*tasks):
        batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
        return float(learner.loss(jax.random.split(KEY, len(tasks)), batch, jax.vmap).objective)

    assert loss(one, other) == pytest.approx((loss(one) + loss(other)) / 2, rel=1e-9)
    assert loss(one) != pytest.approx(loss(other), rel=1e-3)
    assert np.abs(np.asarray(learner.comparison.first.norm.mean[...]) - before).max() > 1e-3
    means = jnp.stack([jnp.asarray(x[y == k].mean(0)) for k in range(CLASSES)])
    shape = (1, -1, 1, 1, FEATURES)
    alike = jax.nn.sigmoid(learner.comparison(means.reshape(shape), jnp.asarray(query).reshape(shape), train=True))[0]
    expected = -sum((float(alike[q, k]) - (labels[q] == k)) ** 2 for q in range(4) for k in range(CLASSES))
    assert loss(one) == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
def test_relation_sees_the_maps_of_a_network_that_has_them():
    learner = Relation(Conv4((32, 48, 1), rngs=nnx.Rngs(0), width=2), way=2, rngs=nnx.Rngs(0))
    images = np.random.default_rng(0).uniform(size=(3, 32, 48, 1)).astype(np.float32)
    maps = learner.embed(jnp.asarray(images))
    assert maps.shape == (3, 2, 3, 2)
    np.testing.assert_allclose(maps.reshape(3, -1), learner.backbone(jnp.asarray(images)[None], train=False)[0])
    assert learner.comparison.hidden.kernel[...].shape == (2, 8)  # pooled once to one pixel, two channels


@pytest.mark.long
def test_relation_on_characters_compares_maps_of_five_by_five():
    learner = Relation(Conv4Maps((28, 28, 1), rngs=nnx.Rngs(0), width=2), way=2, rngs=nnx.Rngs(0))
    assert learner.embed(jnp.zeros((3, 28, 28, 1))).shape == (3, 5, 5, 2)
    assert learner.comparison.hidden.kernel[...].shape == (2, 8)  # pooled twice to one pixel, two channels


@pytest.mark.long
@pytest.mark.parametrize("make", [lambda: Prototypical(PIXELS, way=CLASSES), matching])
def test_masked_points_and_classes_count_for_nothing(make):
    """Whatever a padded point holds: here an image a thousand times as large."""
    x, y, query = (np.asarray(part, np.float32) if part.dtype == float else part for part in points())
    learner = make()
    whole = probabilities(learner, x, y, query)
    mask = Mask(jnp.arange(len(y) + 2) < len(y), jnp.arange(CLASSES + 1) < CLASSES)
    wider, labels = np.concatenate([x, 1000 * x[:2]]), np.concatenate([y, [1, 3]]).astype(np.int32)
    state, _ = learner.fit(KEY, jnp.asarray(wider), jnp.asarray(labels), CLASSES + 1, mask)
    found = np.asarray(learner.predict(KEY, state, jnp.asarray(query)).probabilities)
    np.testing.assert_allclose(found[:, :CLASSES], whole, atol=1e-5)
    assert (found[:, CLASSES] == 0).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NearestMean(PIXELS, scale=0.0), "expected a positive scale of the cosines, got 0.0"),
        (lambda: LogisticRegression(PIXELS, C=-1.0), "expected a positive weight C of the labelled images, got -1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
