"""`trainer.augment`: training images are changed as asked, test images never, and the temperature follows training."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_omniglot

from fewshot import tasks
from fewshot.tasks.augmentation import AUGMENTATIONS, augment
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.data import calibration_episodes, load_splits, subset_of_classes, with_queries
from fewshot.training.optimisation import sampler
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run, keys


@pytest.fixture(scope="module")
def splits(tiny_data):
    return load_splits("omniglot", tiny_data)


def configuration(splits, **settings):
    config = RunConfig(**{**tiny_omniglot.FLAGS, "settings": {**tiny_omniglot.SETTINGS, **settings}})
    return with_queries(resolve(config), splits)


def test_every_data_set_has_a_choice():
    assert resolve(RunConfig(dataset="omniglot")).trainer.augment == "none"
    assert resolve(RunConfig(dataset="omniglot-emnist")).trainer.augment == "handwriting"
    plain = RunConfig(dataset="omniglot-emnist", settings={"trainer.augment": "none"})
    assert resolve(plain).trainer.augment == "none"


def test_unknown_changes_are_refused():
    with pytest.raises(ConfigError, match=r"trainer\.augment must be one of none, .*handwriting, photographs, got 'x'"):
        resolve(RunConfig(settings={"trainer.augment": "x"}))


@pytest.mark.long
def test_without_changes_the_sampler_draws_the_plain_task(splits):
    config, key = configuration(splits), keys(3)[0]
    drawn = sampler(build_run(config, splits.image_shape))(splits.train, key)
    plain = tasks.sample_task(key, splits.train, config.way, config.shot, config.query)
    jax.tree.map(np.testing.assert_array_equal, drawn, plain)


@pytest.mark.long
def test_the_sampler_changes_support_and_query_but_not_the_labels(splits):
    config, key = configuration(splits, **{"trainer.augment": "handwriting"}), keys(3)[0]
    draw = jax.jit(sampler(build_run(config, splits.image_shape)))
    drawn = draw(splits.train, key)
    plain = tasks.sample_task(key, splits.train, config.way, config.shot, config.query)
    for name in ("y_support", "y_query"):
        np.testing.assert_array_equal(getattr(drawn, name), getattr(plain, name))
    for name in ("x_support", "x_query"):
        same = (np.asarray(getattr(drawn, name)) == np.asarray(getattr(plain, name))).all(axis=(1, 2, 3))
        assert not same.any()
    jax.tree.map(np.testing.assert_array_equal, drawn, draw(splits.train, key))


def test_the_temperature_is_fitted_on_images_as_in_training(splits):
    config = configuration(splits, **{"trainer.augment": "handwriting"})
    known = subset_of_classes(config.seed, splits.train, config.trainer.temperature_classes)
    images = calibration_episodes(config, splits.train, 3, 1)[0].images
    changed = jax.jit(augment, static_argnums=2)
    expected = changed(jax.random.key(config.seed), known.images, AUGMENTATIONS["handwriting"])
    np.testing.assert_array_equal(images, expected)
    plain = replace(config, settings={**config.settings, "trainer.augment": "none"})
    np.testing.assert_array_equal(calibration_episodes(plain, splits.train, 3, 1)[0].images, known.images)
