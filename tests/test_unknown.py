"""p-values of queries that may show none of the classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fewshot.evaluation.out_of_episode import scores_of
from fewshot.evaluation.unknown import p_values, unknown_p_values
from fewshot.inference.inner import exact
from fewshot.learners import GaussianProcess
from fewshot.models import Identity, LabelRegression
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


def test_what_lies_far_from_all_classes_is_found_and_left_out_inputs_are_scored_without_themselves(learner):
    generator = np.random.default_rng(1)
    centres = np.array([[4.0, 0.0], [-4.0, 0.0], [0.0, 4.0]])
    y = np.repeat(np.arange(3), 4)
    x = jnp.asarray(centres[y] + 0.3 * generator.normal(size=(12, 2)), jnp.float32)
    query = jnp.asarray([[4.0, 0.1], [0.0, -30.0]], jnp.float32)
    key = jax.random.key(0)
    found = unknown_p_values(key, learner, x, y, query)
    assert found[1] == 1 / 13 and found[0] > 0.3
    # By hand: the scores of the first fold, with the first image of every class deleted.
    fit_key, score_key = jax.random.split(key)
    left = np.arange(12) % 4 > 0
    state, _ = learner.fit(fit_key, x[left], jnp.asarray(y[left]), 3)
    hand = np.asarray(scores_of(score_key, learner, state, jnp.concatenate([x, query])).mutual_information)
    from fewshot.evaluation import unknown

    _, others, held = unknown._scores(learner, 3, 4, key, x, jnp.asarray(y), query)
    np.testing.assert_allclose(np.asarray(others)[0][np.asarray(held)[0]], hand[:12][~left], rtol=2e-3, atol=1e-5)


def test_single_images_tell_nothing(learner):
    x = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
    assert unknown_p_values(jax.random.key(0), learner, x, np.array([0, 1]), x) is None
