"""p-values of queries that may show none of the classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fewshot.conditioning import TemperaturePrior, fit_task
from fewshot.evaluation.out_of_episode import Labelled, scores_of
from fewshot.evaluation.unknown import each_left_out, p_values
from fewshot.inference.inner import exact, laplace
from fewshot.learners import GaussianProcess
from fewshot.models import Identity, LabelRegression, Softmax
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import RBF


def test_p_values_are_ranks_among_known_scores():
    known = np.array([3.0, 1.0, 2.0])
    np.testing.assert_array_equal(p_values(np.array([0.0, 2.0, 2.5, 9.0]), known), [1.0, 0.75, 0.5, 0.25])
    np.testing.assert_array_equal(p_values(np.array([0.0, 5.0]), np.empty(0)), 1.0)


def test_p_values_of_equals_are_uniform_at_their_levels():
    generator = np.random.default_rng(0)
    found = np.concatenate([p_values(generator.normal(size=1), generator.normal(size=19)) for _ in range(4000)])
    for level in (0.05, 0.2, 0.5):
        assert (found <= level).mean() == pytest.approx(level, abs=4 * np.sqrt(level / 4000))


@pytest.fixture
def learner():
    kernel = DeepKernel(Identity((1, 1, 2)), RBF(), rngs=nnx.Rngs(0))
    return GaussianProcess(kernel, LabelRegression(0.3), exact)


@pytest.mark.long
def test_what_lies_far_from_all_classes_is_found_and_left_out_inputs_are_scored_without_themselves(learner):
    generator = np.random.default_rng(1)
    centres = np.array([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0]])
    y = np.repeat(np.arange(3), 4)
    y = y.astype(np.int32)
    x = (centres[y] + 0.3 * generator.normal(size=(12, 2))).astype(np.float32)
    query = np.array([[4.0, 0.1], [0.0, -30.0]], np.float32)
    key = jax.random.key(0)
    found = fit_task(learner, key, x, y, 3, TemperaturePrior(1.0)).unknown_p_values(query)
    assert found is not None and found[1] == 1 / 13 and found[0] > 0.3
    # By hand: the scores of the first fold, with the first image of every class deleted.
    fit_key, score_key = jax.random.split(key)
    left = np.arange(12) % 4 > 0
    state, _ = learner.fit(fit_key, jnp.asarray(x[left]), jnp.asarray(y[left]), 3)
    labelled = Labelled(jnp.asarray(x[left]), jnp.asarray(y[left]))
    scores = scores_of(score_key, learner, state, labelled, 3, jnp.asarray(x))
    hand = np.asarray(scores.distance + scores.entropy)[~left]
    known = each_left_out(key, learner, x, y)
    assert known is not None and known.scores.shape == known.right.shape == (12,) and known.right.all()
    np.testing.assert_allclose(known.scores[:3], hand, rtol=2e-3, atol=1e-5)
    more = np.concatenate([x, x[-1:] + 9]), np.concatenate([y, y[-1:]])
    padded = each_left_out(key, learner, *more, np.arange(13) < 12)  # what is not real changes nothing
    assert padded is not None
    # But the draws, which go over all inputs.
    np.testing.assert_allclose(padded.scores, known.scores, rtol=0.1, atol=1e-3)


@pytest.mark.long
def test_queries_are_ranked_by_distance_and_entropy_and_no_temperature_touches_it():
    """(U2) by hand, of queries and of left-out inputs: the entropy is that of softmax(m), whatever the temperature."""
    deep_kernel = DeepKernel(Identity((1, 1, 2)), RBF(), rngs=nnx.Rngs(0))
    for name in ("log_scale", "log_lengthscale"):
        deep_kernel.hyper[name][...] = jnp.asarray(0.0)
    at_mean = GaussianProcess(deep_kernel, Softmax(plug_in=True), laplace)
    x = np.array([[2.0, 0.0], [2.1, 0.1], [-2.0, 0.0], [-2.2, 0.1]], np.float32)
    y, key = np.array([0, 0, 1, 1], np.int32), jax.random.key(0)
    query = np.array([[2.0, 0.1], [0.1, 0.5], [-2.0, 0.5]], np.float32)

    def by_hand(p, examples, new):
        def k(a, b):
            return np.exp(-0.5 * ((a[:, None] - b) ** 2).sum(2) / 2)  # length-scale 1 of features over sqrt(D)

        count = len(examples) // 2
        squares = [1 - 2 * k(new, m).mean(1) + k(m, m).mean() for m in (examples[:count], examples[count:])]
        return np.log(np.minimum(*squares) / (1 + 1 / count)) - (p * np.log(p)).sum(1)

    tasks = [fit_task(at_mean, key, x, y, 2, TemperaturePrior(temperature)) for temperature in (1.0, 0.1)]
    p = np.asarray(jax.nn.softmax(tasks[0].latents(query).mean, axis=1))
    for task in tasks:
        np.testing.assert_allclose(task.unknown(query), by_hand(p, x, query), rtol=1e-4, atol=1e-4)
    found, known = tasks[0].unknown(query), each_left_out(key, at_mean, x, y)
    assert found[1] > found[0] and known is not None
    state, _ = at_mean.fit(key, jnp.asarray(x[[1, 3]]), jnp.asarray(y[[1, 3]]), 2)
    p = np.asarray(at_mean.predict(key, state, jnp.asarray(x[[0, 2]])).probabilities)
    np.testing.assert_allclose(known.scores[:2], by_hand(p, x[[1, 3]], x[[0, 2]]), rtol=1e-4, atol=1e-4)


def test_single_images_tell_nothing(learner):
    x = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    assert each_left_out(jax.random.key(0), learner, x, np.array([0, 1])) is None


@pytest.mark.long
def test_a_labelled_image_that_lies_among_another_class_is_answered_wrong_by_the_others(learner):
    """And by a fold that leaves it out alone: in the others it is shown, and would be right."""
    y = np.array([0, 0, 0, 1, 1, 1], np.int32)
    x = np.array([[4, 0], [4.1, 0], [-4, 0.1], [-4, 0], [-4.1, 0], [-4, -0.1]], np.float32)
    found = each_left_out(jax.random.key(0), learner, x, y)
    assert found is not None and found.right.tolist() == [True, True, True, True, False, True]  # by folds, then classes
    task = fit_task(learner, jax.random.key(0), x, y, 2, TemperaturePrior(1.0))
    assert task.left_out is not None and task.left_out.right.sum() == 5 and task.left_out is task.left_out
