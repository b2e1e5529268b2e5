"""Which training classes the temperature is fitted on, and that no step is taken on those held out for it."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_omniglot

from fewshot.inference.outer.svi import Trainer
from fewshot.tasks import DataError, take_images
from fewshot.training import optimisation
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.data import calibration_episodes, load_splits, temperature_classes, training_classes, with_queries
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run

HELD_OUT = {"trainer.temperature_from": "held-out"}


@pytest.fixture(scope="module")
def splits(tiny_data):
    return load_splits("omniglot", tiny_data)


def config(**settings):
    return resolve(RunConfig(**tiny_omniglot.FLAGS | {"settings": tiny_omniglot.SETTINGS | settings}))


def images_of(dataset):
    positions = np.concatenate([row[:n] for row, n in zip(dataset.index, dataset.counts, strict=True)])
    return {image.tobytes() for image in np.asarray(take_images(dataset, jax.numpy.asarray(positions)))}


def test_held_out_classes_share_no_image_with_the_others_turned_or_not(splits):
    train = splits.train
    chosen = config(**HELD_OUT)
    kept, held = training_classes(chosen, train), temperature_classes(chosen, train)
    assert train.rotations == 4 and held.classes % 4 == kept.classes % 4 == 0
    assert kept.classes + held.classes == train.classes
    assert held.classes // 4 == max(chosen.way, train.classes // 4 // 5)
    stored = len(train.images)
    assert not set(np.ravel(kept.index) % stored) & set(np.ravel(held.index) % stored)
    assert kept.images is held.images is train.images  # nothing is copied
    again = temperature_classes(replace(chosen, episodes=3), train)
    np.testing.assert_array_equal(again.index, held.index)


@pytest.mark.long
def test_steps_are_taken_on_one_part_and_the_temperature_is_fitted_on_the_other(splits, monkeypatch):
    chosen = with_queries(config(**HELD_OUT), splits)
    samplers = []

    def make_trainer(key, learner, sampler, *_, **__):
        samplers.append(sampler)
        return Trainer(None, None, None)

    monkeypatch.setattr(optimisation, "make_trainer", make_trainer)
    optimisation.build_trainer(build_run(chosen, splits.image_shape), splits.train)
    (drawn_from,) = samplers[0].args
    assert images_of(drawn_from) == images_of(training_classes(chosen, splits.train))
    known, episodes = calibration_episodes(chosen, splits.train, chosen.way, chosen.shot)
    assert images_of(known) <= images_of(temperature_classes(chosen, splits.train))
    assert int(jax.numpy.max(episodes.indices.x_query)) < len(known.images)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none", "handwriting"])
def test_the_temperature_is_fitted_on_images_changed_as_those_of_training_are(splits, name):
    chosen = with_queries(config(**{"trainer.augment": name}), splits)
    known, _ = calibration_episodes(chosen, splits.train, chosen.way, chosen.shot)
    assert (images_of(known) <= images_of(splits.train)) == (name == "none")


def test_all_classes_serve_both_unless_asked_and_some_must_be_left(splits):
    chosen = with_queries(config(), splits)
    assert training_classes(chosen, splits.train) is temperature_classes(chosen, splits.train) is splits.train
    few = splits._replace(train=splits.train._replace(index=splits.train.index[:8], counts=splits.train.counts[:8]))
    assert with_queries(config(), few)
    with pytest.raises(DataError, match="classes"):
        with_queries(config(**HELD_OUT), few)


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match="training or held-out, got 'test'"):
        config(**{"trainer.temperature_from": "test"})
