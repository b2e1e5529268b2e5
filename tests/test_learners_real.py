"""What holds for every registered learner of real labels, on tiny tasks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.evaluation.learner_conformance import TASKS, loss_and_gradient
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import LEARNERS
from fewshot.learners.base import apply, traced
from fewshot.models import NOISE_MODELS
from fewshot.models.conformance import weakly_typed
from fewshot.tasks.curves import Sinusoids
from fewshot.training.configuration import configured, resolve
from fewshot.training.run import build_run

SHOT, QUERIES, ROUNDING = 5, 4, 2e-4
REAL = [name for name, make in LEARNERS.items() if make.traits.real_labels]
SMALL = {
    "np": {"learner.width": 8, "learner.latent": 3, "learner.prediction_draws": 3},
    "anp": {"learner.width": 8, "learner.heads": 2, "learner.latent": 2, "learner.prediction_draws": 3},
    "maml": {"learner.inner_steps": 2},
}


@functools.cache
def make(name, seed=0):
    settings = {"backbone.width": 8, **SMALL.get(name, {})}
    config = resolve(configured(dataset="sinusoids", learner=name, seed=seed, query=QUERIES, settings=settings))
    return build_run(config, (1, 1, 1)).learner


def make_task(seed):
    return jax.tree.map(np.asarray, jax.jit(lambda key: Sinusoids().sample(key, SHOT, QUERIES))(jax.random.key(seed)))


def _answer(learner, key, x, y, query, mask):
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, learner.embed(x), y, 1, mask)
    found = learner.predict(predict_key, state, learner.embed(query))
    return found.distribution.mean, found.distribution.log_prob(jnp.ones(())), jnp.maximum(code, found.code)


def answer(learner, x, y, query, mask=None):
    """Means, and log densities of a label, of every query [2, Q]."""
    mean, density, code = apply(_answer, learner, (), jax.random.key(0), x, y, query, mask)
    assert code == Code.OK
    return np.stack([mean, density])


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_order_padding_and_other_queries_change_nothing(name):
    """But by rounding; and another task needs no new program."""
    learner, (x, y, query, _), order = make(name), make_task(0), np.array([3, 0, 4, 2, 1])
    whole = answer(learner, x, y, query)
    assert whole.shape == (2, QUERIES) and whole.dtype == np.float32
    programs = traced._cache_size()
    np.testing.assert_allclose(answer(learner, x[order], y[order], query), whole, atol=ROUNDING)
    other = query.copy()
    other[1:] = make_task(1).x_query[1:]
    np.testing.assert_allclose(answer(learner, x, y, other)[:, 0], whole[:, 0], atol=ROUNDING)
    changed = answer(make(name, seed=1), x, y[order], query)
    assert np.abs(changed - whole).max() > 10 * ROUNDING and traced._cache_size() == programs
    padded = np.concatenate([make_task(2).x_support[:2], x]), np.concatenate([np.float32([90.0, -7.0]), y])
    mask = Mask(jnp.arange(SHOT + 2) >= 2, jnp.ones(1, bool))
    np.testing.assert_allclose(answer(learner, *padded, query, mask), whole, atol=ROUNDING)


@pytest.mark.parametrize("name", REAL)
def test_a_trained_learner_needs_no_program_of_its_own(name):
    assert weakly_typed(make(name)) == []


@pytest.mark.parametrize("likelihood", NOISE_MODELS)
def test_a_trained_noise_model_needs_no_program_of_its_own(likelihood):
    config = resolve(configured(dataset="sinusoids", likelihood=likelihood))
    assert weakly_typed(build_run(config, (1, 1, 1)).learner) == []


@pytest.mark.long
@pytest.mark.parametrize("name", REAL)
def test_the_loss_and_its_gradient_are_finite(name):
    data = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(make_task(seed) for seed in range(TASKS)))
    value, gradient = loss_and_gradient(make(name), data)
    leaves = jax.tree.leaves(gradient)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in leaves)
    assert max(float(jnp.abs(leaf).max()) for leaf in leaves) > 1e-4


def test_the_first_steps_of_maml_fit_numbers_at_the_default_rate():
    """At that of images, 0.01, they overflow; a rate that was asked for is taken."""
    config = resolve(configured(dataset="sinusoids", learner="maml"))
    learner = build_run(config, (1, 1, 1)).learner
    for seed in range(8):
        x, y, _, _ = make_task(seed)
        mean, _ = answer(learner, x, y, x)
        assert np.mean((mean - y) ** 2) < np.mean(y**2)
    given = configured(dataset="sinusoids", learner="maml", settings={"learner.inner_rate": 0.02})
    assert resolve(given).settings["learner.inner_rate"] == 0.02
    assert "learner.inner_rate" not in resolve(configured(dataset="omniglot", learner="maml")).settings
