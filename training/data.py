"""The data of a run: loaded, checked, and divided into classes for training and for the temperature."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fewshot import tasks
from fewshot.evaluation.episodes import SPLITS, Episodes, Shape, draw_episodes, queries
from fewshot.models import deep_kernel
from fewshot.tasks import DataError, Dataset, Splits
from fewshot.tasks.augmentation import AUGMENTATIONS, augment
from fewshot.training import defaults
from fewshot.training.configuration import HELD_OUT, RunConfig


def load_splits(name: str, data_root: str | None) -> Splits:
    """`tasks.load`, with its images checked. Raises DataError."""
    splits = tasks.load(name, data_root)
    for split in SPLITS:
        check_images(getattr(splits, split).images, f"the {split} images of {name}")
    return splits


def own_classes(splits: Splits) -> dict[str, list[str]] | None:
    """The class names of every split of a user's own files, which may change; None for a published data set."""
    return {split: list(splits.class_names[split]) for split in SPLITS} if ":" in splits.name else None


def check_own_classes(splits: Splits, trained_with: Mapping[str, Sequence[str]] | None) -> None:
    """Raises DataError unless a user's own classes are in the splits that a run was trained with, if that is known."""
    now = own_classes(splits)
    if trained_with is None or now is None or now == trained_with:
        return
    names = sorted({name for held in (trained_with, now) for split in SPLITS for name in held[split]})
    places = {name: [_places(name, held) for held in (trained_with, now)] for name in names}
    moves = [f"{name} ({then} then, {today} now)" for name, (then, today) in places.items() if then != today]
    if not moves:
        raise DataError(
            f"expected the classes of {splits.name} in the order that the run was trained with, got another; put new "
            "classes into another folder"
        )
    raise DataError(
        f"expected the classes of {splits.name} as the run was trained with them, got {len(moves)} in other places: "
        f"{', '.join(moves[:3])}{', ...' if len(moves) > 3 else ''}; put new classes into another folder"
    )


def _places(name: str, held: Mapping[str, Sequence[str]]) -> str:
    """The splits that have a class, which may be several."""
    return " and ".join(split for split in SPLITS if name in held[split]) or "absent"


def check_images(images: Array | np.ndarray, what: str) -> None:
    """Raises DataError for images that `models.deep_kernel.check_images` refuses."""
    try:
        deep_kernel.check_images(images, what)
    except ValueError as error:
        raise DataError(str(error)) from error


def with_queries(config: RunConfig, splits: Splits) -> RunConfig:
    """Decide `query` where it was left open, and refuse tasks that a split is too small for. Raises DataError."""
    if config.query == 0:
        query = queries(splits.train, config.shot, defaults.TRAINING_QUERIES)
        config = replace(config, query=query, chosen=(*config.chosen, "query"))
    tasks.check_task_size(training_classes(config, splits.train), config.way, config.shot, config.query)
    for dataset in (splits.validation, splits.test):
        tasks.check_task_size(dataset, *test_shape(config, dataset))
    return config


def test_shape(config: RunConfig, dataset: Dataset) -> Shape:
    """Size of the episodes that a run is validated and tested on."""
    return Shape(config.way, config.shot, queries(dataset, config.shot))


def calibration_episodes(config: RunConfig, train: Dataset, way: int, shot: int) -> tuple[Dataset, Episodes]:
    """What the temperature is fitted on: episodes of some training classes, and the data set of those classes.

    Its images are changed at random as those of training are, once each.
    """
    settings = config.trainer
    known = subset_of_classes(config.seed, temperature_classes(config, train), max(way, settings.temperature_classes))
    change = jax.jit(augment, static_argnums=2)
    changed = change(jax.random.key(config.seed), known.images, AUGMENTATIONS[settings.augment])
    known = known._replace(images=changed)
    shape = Shape(way, shot, queries(known, shot))
    return known, draw_episodes(config.seed, "train", known, shape, settings.temperature_episodes)


def training_classes(config: RunConfig, train: Dataset) -> Dataset:
    """The classes of a training split that optimiser steps are taken on."""
    return _parted(config, train)[0] if config.trainer.temperature_from == HELD_OUT else train


def temperature_classes(config: RunConfig, train: Dataset) -> Dataset:
    """The classes of a training split that the temperature is fitted on: all of them, or those held out for it."""
    return _parted(config, train)[1] if config.trainer.temperature_from == HELD_OUT else train


def _parted(config: RunConfig, train: Dataset) -> tuple[Dataset, Dataset]:
    """The classes to train on, and a fifth, at least those of a task, drawn at random to be held out of that.

    Both share the stored images. The quarter turns of a class stay together.
    """
    order = np.random.default_rng(config.seed).permutation(train.classes // train.rotations)
    held = order[: max(config.way, len(order) // 5)]
    chosen = np.isin(np.arange(train.classes) // train.rotations, held)
    index, counts = np.asarray(train.index), np.asarray(train.counts)

    def part(of: np.ndarray) -> Dataset:
        smallest = int(counts[of].min()) if of.any() else 0
        return train._replace(index=jnp.asarray(index[of]), counts=jnp.asarray(counts[of]), smallest=smallest)

    return part(~chosen), part(chosen)


def subset_of_classes(seed: int, dataset: Dataset, count: int) -> Dataset:
    """A data set of at most `count` classes drawn at random, with only their images."""
    chosen = np.random.default_rng(seed).permutation(dataset.classes)[:count]
    index, counts = np.asarray(dataset.index)[chosen], np.asarray(dataset.counts)[chosen]
    labels = np.repeat(np.arange(len(chosen)), counts)
    positions = np.concatenate([row[:n] for row, n in zip(index, counts, strict=True)])
    return tasks.make_dataset(np.asarray(tasks.take_images(dataset, jnp.asarray(positions))), labels)
