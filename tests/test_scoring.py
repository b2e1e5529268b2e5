"""Scores depend on the model and the episodes alone: not on chunks, blocks, or the number of episodes drawn."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot
from flax import nnx

from fewshot import tasks
from fewshot.evaluation.calibration import NEW_CLASSES, fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, embed_images, score
from fewshot.inference import inner
from fewshot.inference.inner.base import Code
from fewshot.inference.predictive import predict
from fewshot.learners import NearestNeighbour
from fewshot.learners.base import traced
from fewshot.models.backbones import Identity
from fewshot.models.gaussian import Marginals
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.data import calibration_episodes, load_splits, subset_of_classes, with_queries
from fewshot.training.run import build_run
from fewshot.training.shape_temperature import fitted_temperature
from fewshot.training.untrained import with_statistics


@pytest.fixture(scope="module")
def splits(tiny_data):
    return load_splits("omniglot", tiny_data)


@pytest.fixture(scope="module")
def run(splits):
    return build_run(with_queries(resolve(RunConfig(**tiny_omniglot.FLAGS)), splits), splits.image_shape)


@pytest.fixture(scope="module")
def model(run):
    return run.learner


@pytest.fixture(scope="module")
def episodes(splits):
    return draw_episodes(0, "test", splits.test, Shape(3, 2, 4), 7)


def test_features_do_not_depend_on_the_chunk(model, splits):
    images = tasks.flat_images(splits.test)
    whole = embed_images(model, images, chunk=len(images))
    assert whole.shape == (80, model.deep_kernel.backbone.features)
    np.testing.assert_allclose(embed_images(model, images, chunk=33), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.deep_kernel.features(images), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_scores_do_not_depend_on_the_block_nor_on_later_episodes(model, splits, episodes):
    features = embed(model, splits.test)
    whole = score(model, features, episodes, block=7)
    assert whole.probabilities.shape == (7, 12, 3) and not whole.codes.any()
    np.testing.assert_allclose(score(model, features, episodes, block=3).probabilities, whole.probabilities, atol=2e-5)
    fewer = draw_episodes(0, "test", splits.test, episodes.shape, 2)
    np.testing.assert_allclose(score(model, features, fewer, block=3).probabilities, whole.probabilities[:2], atol=2e-5)


@pytest.mark.long
def test_a_score_is_inference_and_prediction_on_the_episode(model, splits, episodes):
    scores = score(model, embed(model, splits.test), episodes, block=3)
    images = tasks.flat_images(splits.test)
    indices = jax.tree.map(lambda leaf: leaf[4], episodes.indices)
    fit_key, predict_key = jax.random.split(episodes.keys[4])
    support, query = images[indices.x_support], images[indices.x_query]

    @jax.jit
    def answer(prior, new):
        posterior = inner.run(fit_key, model.inference, prior, indices.y_support, steps=30)
        return predict(predict_key, model.likelihood, posterior, new)

    expected = answer(model.prior(support), model.query(support, query))
    np.testing.assert_allclose(scores.probabilities[4], expected, atol=2e-3)  # it stops at a residual of 1e-3
    assert (scores.labels[4] == indices.y_query).all()


@pytest.mark.long
def test_a_latent_temperature_divides_the_latents(model, splits, episodes):
    features = embed(model, splits.test)
    whole = score(model, features, episodes, block=3)
    halved = score(model, features, episodes, block=3, latent_temperature=2.0)
    images = tasks.flat_images(splits.test)
    indices = jax.tree.map(lambda leaf: leaf[4], episodes.indices)
    fit_key, predict_key = jax.random.split(episodes.keys[4])

    @jax.jit
    def answer(prior, new):
        mean, variance = inner.run(fit_key, model.inference, prior, indices.y_support, steps=30).predict(new)
        return model.likelihood.predict(predict_key, Marginals(mean / 2, variance / 4))

    expected = answer(
        model.prior(images[indices.x_support]), model.query(images[indices.x_support], images[indices.x_query])
    )
    np.testing.assert_allclose(halved.probabilities[4], expected, atol=2e-3)
    assert (halved.probabilities.max(-1) < whole.probabilities.max(-1) + 1e-3).all()
    assert (halved.codes == whole.codes).all()


@pytest.mark.long
def test_other_parameters_need_no_new_program(run, model, splits, episodes):
    features = embed(model, splits.test)
    before = score(model, features, episodes, block=3)
    programs = traced._cache_size()
    other = build_run(replace(run.config, seed=1), splits.image_shape).learner
    after = score(other, embed(other, splits.test), episodes, block=3)
    assert traced._cache_size() == programs
    assert np.abs(after.probabilities - before.probabilities).max() > 0.01


def test_an_episode_without_finite_probabilities_counts_as_failed_chance(model, splits, episodes):
    features = embed(model, splits.test)
    broken = int(episodes.indices.x_query[2, 0])
    scores = score(model, features.at[broken].set(jnp.nan), episodes, block=3)
    touched = (np.concatenate([episodes.indices.x_support, episodes.indices.x_query], axis=1) == broken).any(axis=1)
    assert ((scores.codes == Code.NON_FINITE) == touched).all() and touched[2]
    assert (scores.probabilities[touched] == np.float32(1 / 3)).all()
    assert scores.failures() == {"non_finite": int(touched.sum())}
    assert scores.summary(batches=1)["accuracy"] > 0


def test_nearest_neighbour_agrees_with_a_search(splits, episodes):
    learner = NearestNeighbour(Identity(splits.image_shape))
    answers = score(learner, embed(learner, splits.test), episodes)
    pixels = np.asarray(tasks.flat_images(splits.test), float).reshape(80, -1)
    for episode in range(7):
        support, y, query, labels, _ = (
            np.asarray(leaf[episode]) for leaf in (episodes.indices[i] for i in (0, 1, 2, 3, 4))
        )
        distances = np.square(pixels[query][:, None] - pixels[support][None]).sum(-1)
        assert (answers.probabilities[episode].argmax(-1) == y[distances.argmin(1)]).all()
        assert (answers.labels[episode] == labels).all()


def test_the_untrained_baseline_has_batch_statistics_and_nothing_learned(run, splits):
    baseline = with_statistics(run, splits.train)
    before, after = (nnx.split(one, nnx.Param, ...) for one in (run.learner, baseline))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before[1], after[1]))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a != b).all(), before[2], after[2]))
    pooled = embed(baseline, splits.train).std(axis=0)
    assert 0.05 < float(pooled.mean()) < 5  # of the order of normalised features
    again = nnx.split(with_statistics(replace(run, learner=baseline), splits.train), nnx.Param, ...)

    def moved(one, other):
        return sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))

    assert moved(again[2], after[2]) < 0.1 * moved(after[2], before[2])  # enough tasks to forget where they began


def test_episodes_differ_between_splits_and_seeds(splits, episodes):
    for seed, split in ((1, "test"), (0, "train"), (0, "validation")):
        other = draw_episodes(seed, split, splits.test, episodes.shape, 7)
        assert (other.indices.x_query != episodes.indices.x_query).any()


def test_inference_draws_by_other_keys_than_the_tasks(splits, episodes):
    for key, queries in zip(episodes.keys, episodes.indices.x_query, strict=True):
        assert (tasks.sample_indices(key, splits.test, *episodes.shape, 0).x_query != queries).any()


def test_a_subset_of_classes_keeps_their_images_whole(splits):
    subset = subset_of_classes(3, splits.train, 9)
    assert (subset.classes, subset.smallest, subset.rotations) == (9, 20, 1)
    pool = {image.tobytes() for image in np.asarray(tasks.flat_images(splits.train))}
    assert {image.tobytes() for image in np.asarray(subset.images)} <= pool
    everything = subset_of_classes(3, splits.train, 10_000)
    assert everything.classes == splits.train.classes


def test_the_temperature_is_fitted_on_training_classes_only(run, splits):
    known, episodes = calibration_episodes(run.config, splits.train, 3, 1)
    train = {image.tobytes() for image in np.asarray(tasks.flat_images(splits.train))}
    assert {image.tobytes() for image in np.asarray(known.images)} <= train
    assert episodes.shape == (3, 1, 15) and len(episodes.keys) == 12


@pytest.mark.long
def test_the_temperature_of_training_classes_is_raised_for_new_ones(run, model, splits):
    """Not where the classes that it is fitted on were held out of training: those are new."""
    known, episodes = calibration_episodes(run.config, splits.train, 3, 1)
    scores = score(model, embed(model, known), episodes)
    fitted = fit_temperature(scores.probabilities, scores.labels)
    raised = fitted_temperature(model, run.config, known, episodes)
    assert raised == pytest.approx(fitted * math.exp(NEW_CLASSES))
    held_out = {**run.config.settings, "trainer.temperature_from": "held-out"}
    config = replace(run.config, settings=held_out)
    assert fitted_temperature(model, config, known, episodes) == pytest.approx(fitted)


def test_failures_name_the_codes():
    codes = np.array([Code.OK, Code.NOT_CONVERGED, Code.NOT_CONVERGED])
    scores = Scores(np.full((3, 1, 2), 0.5), np.zeros((3, 1), int), codes, 0.0)
    assert scores.failures() == {"not_converged": 2}
