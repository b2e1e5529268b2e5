"""Scores depend on the model and the episodes alone: not on chunks, blocks, or the number of episodes drawn."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot
from flax import nnx

import tasks
from evaluation.calibration import NEW_CLASSES, fit_temperature
from inference.inner.base import Code, run
from inference.predictive import predict
from models.gaussian import Marginals
from runners import baselines, scoring
from runners.build import build_model
from runners.configuration import RunConfig, resolve
from runners.data import Shape, calibration_episodes, draw_episodes, load_splits, subset_of_classes, with_queries
from runners.scoring import Scores, embed, embed_images, score


@pytest.fixture(scope="module")
def splits(tiny_data):
    return load_splits("omniglot", tiny_data)


@pytest.fixture(scope="module")
def model(splits):
    return build_model(with_queries(resolve(RunConfig(**tiny_omniglot.FLAGS)), splits), splits.image_shape)


@pytest.fixture(scope="module")
def episodes(splits):
    return draw_episodes(0, "test", splits.test, Shape(3, 2, 4), 7)


def test_features_do_not_depend_on_the_chunk(model, splits):
    images = tasks.flat_images(splits.test)
    whole = embed_images(model.deep_kernel, images, chunk=len(images))
    assert whole.shape == (80, model.deep_kernel.backbone.features)
    np.testing.assert_allclose(embed_images(model.deep_kernel, images, chunk=33), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.deep_kernel.features(images), whole, rtol=1e-5, atol=1e-6)


def test_scores_do_not_depend_on_the_block_nor_on_later_episodes(model, splits, episodes):
    features = embed(model.deep_kernel, splits.test)
    whole = score(model, features, episodes, block=7)
    assert whole.probabilities.shape == (7, 12, 3) and not whole.codes.any()
    np.testing.assert_allclose(score(model, features, episodes, block=3).probabilities, whole.probabilities, atol=2e-5)
    fewer = draw_episodes(0, "test", splits.test, episodes.shape, 2)
    np.testing.assert_allclose(score(model, features, fewer, block=3).probabilities, whole.probabilities[:2], atol=2e-5)


def test_a_score_is_inference_and_prediction_on_the_episode(model, splits, episodes):
    scores = score(model, embed(model.deep_kernel, splits.test), episodes, block=3)
    images = tasks.flat_images(splits.test)
    indices = jax.tree.map(lambda leaf: leaf[4], episodes.indices)
    fit_key, predict_key = jax.random.split(episodes.keys[4])
    support, query = images[indices.x_support], images[indices.x_query]

    @jax.jit
    def answer(prior, new):
        posterior = run(fit_key, model.inference, prior, indices.y_support, steps=30)
        return predict(predict_key, model.likelihood, posterior, new)

    expected = answer(model.prior(support), model.query(support, query))
    np.testing.assert_allclose(scores.probabilities[4], expected, atol=2e-3)  # it stops at a residual of 1e-3
    assert (scores.labels[4] == indices.y_query).all()


def test_a_latent_temperature_divides_the_latents(model, splits, episodes):
    features = embed(model.deep_kernel, splits.test)
    whole = score(model, features, episodes, block=3)
    halved = score(model, features, episodes, block=3, latent_temperature=2.0)
    images = tasks.flat_images(splits.test)
    indices = jax.tree.map(lambda leaf: leaf[4], episodes.indices)
    fit_key, predict_key = jax.random.split(episodes.keys[4])

    @jax.jit
    def answer(prior, new):
        mean, variance = run(fit_key, model.inference, prior, indices.y_support, steps=30).predict(new)
        return model.likelihood.predict(predict_key, Marginals(mean / 2, variance / 4))

    expected = answer(
        model.prior(images[indices.x_support]), model.query(images[indices.x_support], images[indices.x_query])
    )
    np.testing.assert_allclose(halved.probabilities[4], expected, atol=2e-3)
    assert (halved.probabilities.max(-1) < whole.probabilities.max(-1) + 1e-3).all()
    assert (halved.codes == whole.codes).all()


def test_other_parameters_need_no_new_program(model, splits, episodes):
    features = embed(model.deep_kernel, splits.test)
    before = score(model, features, episodes, block=3)
    programs = scoring._embed._cache_size(), scoring._solve._cache_size()
    other = build_model(replace(model.config, seed=1), splits.image_shape)
    after = score(other, embed(other.deep_kernel, splits.test), episodes, block=3)
    assert (scoring._embed._cache_size(), scoring._solve._cache_size()) == programs
    assert np.abs(after.probabilities - before.probabilities).max() > 0.01


def test_an_episode_without_finite_probabilities_counts_as_failed_chance(model, splits, episodes):
    features = embed(model.deep_kernel, splits.test)
    broken = int(episodes.indices.x_query[2, 0])
    scores = score(model, features.at[broken].set(jnp.nan), episodes, block=3)
    touched = (np.concatenate([episodes.indices.x_support, episodes.indices.x_query], axis=1) == broken).any(axis=1)
    assert ((scores.codes == Code.NON_FINITE) == touched).all() and touched[2]
    assert (scores.probabilities[touched] == np.float32(1 / 3)).all()
    assert scores.failures() == {"non_finite": int(touched.sum())}
    assert scores.summary(batches=1)["accuracy"] > 0


def test_nearest_neighbour_agrees_with_a_search(splits, episodes):
    answers = baselines.nearest_neighbour(splits.test, episodes)
    pixels = np.asarray(tasks.flat_images(splits.test), float).reshape(80, -1)
    for episode in range(7):
        support, y, query, labels, _ = (
            np.asarray(leaf[episode]) for leaf in (episodes.indices[i] for i in (0, 1, 2, 3, 4))
        )
        distances = np.square(pixels[query][:, None] - pixels[support][None]).sum(-1)
        assert (answers.probabilities[episode].argmax(-1) == y[distances.argmin(1)]).all()
        assert (answers.labels[episode] == labels).all()


def test_the_untrained_baseline_has_batch_statistics_and_nothing_learned(model, splits):
    baseline = baselines.with_statistics(model, splits.train)
    before, after = (nnx.split(m.deep_kernel, nnx.Param, ...) for m in (model, baseline))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before[1], after[1]))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a != b).all(), before[2], after[2]))
    pooled = embed(baseline.deep_kernel, splits.train).std(axis=0)
    assert 0.05 < float(pooled.mean()) < 5  # of the order of normalised features
    again = nnx.split(baselines.with_statistics(baseline, splits.train).deep_kernel, nnx.Param, ...)

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


def test_the_temperature_is_fitted_on_training_classes_only(model, splits):
    known, episodes = calibration_episodes(model.config, splits.train, 3, 1)
    train = {image.tobytes() for image in np.asarray(tasks.flat_images(splits.train))}
    assert {image.tobytes() for image in np.asarray(known.images)} <= train
    assert episodes.shape == (3, 1, 15) and len(episodes.keys) == 12


def test_the_temperature_of_training_classes_is_raised_for_new_ones(model, splits):
    """Not where the classes that it is fitted on were held out of training: those are new."""
    known, episodes = calibration_episodes(model.config, splits.train, 3, 1)
    scores = score(model, embed(model.deep_kernel, known), episodes)
    fitted = fit_temperature(scores.probabilities, scores.labels)
    assert scoring.temperature_of(model, known, episodes) == pytest.approx(fitted * math.exp(NEW_CLASSES))
    held_out = {**model.config.settings, "trainer.temperature_from": "held-out"}
    model = replace(model, config=replace(model.config, settings=held_out))
    assert scoring.temperature_of(model, known, episodes) == pytest.approx(fitted)


def test_failures_name_the_codes():
    codes = np.array([Code.OK, Code.NOT_CONVERGED, Code.NOT_CONVERGED])
    scores = Scores(np.full((3, 1, 2), 0.5), np.zeros((3, 1), int), codes, 0.0)
    assert scores.failures() == {"not_converged": 2}
