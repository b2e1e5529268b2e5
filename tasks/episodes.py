"""Few-shot tasks: pure functions of a random key and of a data set whose images stay on the device.

Letters: C classes of a task (way), S labelled images a class (shot), Q queries a class, O classes outside the task,
K classes of a data set, M images of its largest class, I stored images, R quarter turns, H x W pixels, Ch channels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Integer, PRNGKeyArray, UInt8

from fewshot.tasks.files import DataError

# Bytes, or numbers where features that a network has computed stand in for images.
Images = UInt8[Array, "N H W Ch"] | Float[Array, "N H W Ch"]


class Task(NamedTuple):
    """One few-shot task; a batch of tasks is the same tree with a leading axis. Rows are class-major."""

    x_support: UInt8[Array, "*T CS H W Ch"]
    y_support: Int32[Array, "*T CS"]
    x_query: UInt8[Array, "*T CQ H W Ch"]
    y_query: Int32[Array, "*T CQ"]


class OpenTask(NamedTuple):
    """A task with further queries of classes that are not in its support set."""

    x_support: UInt8[Array, "*T CS H W Ch"]
    y_support: Int32[Array, "*T CS"]
    x_query: UInt8[Array, "*T CQ H W Ch"]
    y_query: Int32[Array, "*T CQ"]
    x_other: UInt8[Array, "*T OQ H W Ch"]


class LabelledImages(NamedTuple):
    """Images with the labels of all classes of a data set; several batches are the same tree with a leading axis."""

    x: UInt8[Array, "*T N H W Ch"]
    y: Int32[Array, "*T N"]


class TaskIndices(NamedTuple):
    """A task as positions into `flat_images(dataset)`: with features [R I, D] of those, `features[x_query]`."""

    x_support: Int32[Array, "*T CS"]
    y_support: Int32[Array, "*T CS"]
    x_query: Int32[Array, "*T CQ"]
    y_query: Int32[Array, "*T CQ"]
    x_other: Int32[Array, "*T OQ"]


class Dataset(NamedTuple):
    """The images of one split, as a tree of device arrays; the last two fields are static under `jit`.

    `index[k, :counts[k]]` are the images of class k as positions r I + i: image i turned by r quarter turns. With
    `rotations` = 4 class k is class k // 4 of the images turned by k % 4 quarter turns; nothing is stored four times.
    """

    images: UInt8[Array, "I H W Ch"] | Float[Array, "I H W Ch"]
    index: Int32[Array, "K M"]  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    counts: Int32[Array, " K"]
    rotations: int
    smallest: int  # images of the smallest class

    @property
    def classes(self) -> int:
        """K, turned classes included."""
        return self.index.shape[0]

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, Ch)."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels


# Registered by hand, because the fields of a plain NamedTuple would all be traced, the two integers too.
jax.tree_util.register_pytree_node(
    Dataset, lambda data: (data[:3], data[3:]), lambda static, arrays: Dataset(*arrays, *static)
)


class Splits(NamedTuple):
    """A data set in three splits without common classes; `class_names` has a tuple of K names per split."""

    name: str
    train: Dataset
    validation: Dataset
    test: Dataset
    class_names: dict[str, tuple[str, ...]]
    image_shape: tuple[int, int, int]


def make_dataset(
    images: UInt8[np.ndarray, "I H W Ch"] | Float[np.ndarray, "I H W Ch"],
    labels: Integer[np.ndarray, " I"],
    rotations: int = 1,
) -> Dataset:
    """Put images with labels 0..K-1 on the device; `rotations` = 4 adds the quarter turns of a class as classes.

    Images are bytes; numbers [I, 1, 1, D] are features that stand in for them.

    Raises:
        DataError: a label without images, or images that cannot be turned.
    """
    counts = np.bincount(labels) if len(labels) else np.zeros(1, int)
    if counts.min() == 0:
        raise DataError(f"expected images for every label up to {len(counts) - 1}, got none for {counts.argmin()}")
    if rotations not in (1, 4) or (rotations == 4 and images.shape[1] != images.shape[2]):
        raise DataError(
            f"expected rotations 1, or 4 with square images, got {rotations} with {images.shape[1]}x{images.shape[2]};"
            f" try rotations=1"
        )
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    # Padding repeats the class's own images. It is never drawn: `sample_indices` masks it.
    index = np.stack([np.resize(member, counts.max()) for member in members])
    turns = np.arange(rotations)[:, None] * len(images)
    index = (index[:, None] + turns).reshape(-1, counts.max())
    return Dataset(
        images=jnp.asarray(images),
        index=jnp.asarray(index, jnp.int32),
        counts=jnp.asarray(np.repeat(counts, rotations), jnp.int32),
        rotations=rotations,
        smallest=int(counts.min()),
    )


def make_splits(name: str, parts: Mapping[str, tuple[Dataset, tuple[str, ...]]]) -> Splits:
    """Splits from a data set and its class names for each of train, validation and test, which share no class.

    Raises:
        DataError: another number of names than of classes, or images of another shape than the training images'.
    """
    datasets = {split: dataset for split, (dataset, _) in parts.items()}
    names = {split: names for split, (_, names) in parts.items()}
    shape = datasets["train"].image_shape
    for split, dataset in datasets.items():
        if len(names[split]) != dataset.classes:
            raise DataError(f"expected {dataset.classes} names of {split} classes of {name}, got {len(names[split])}")
        if dataset.image_shape != shape:
            raise DataError(f"expected {split} images of {name} of shape {shape}, got {dataset.image_shape}")
    return Splits(name=name, **datasets, class_names=names, image_shape=shape)


def check_task_size(dataset: Dataset, way: int, shot: int, query: int, other_classes: int = 0) -> None:
    """Refuse tasks that the data set is too small for; static sizes only, so it also works under `jit`.

    Raises:
        DataError: too few classes for `way` (+ `other_classes`), or too few images for `shot` + `query`.
    """
    if way < 2 or shot < 1 or query < 0 or other_classes < 0:
        raise DataError(
            f"expected way >= 2, shot >= 1, query >= 0 and other classes >= 0,"
            f" got way {way}, shot {shot}, query {query}, other classes {other_classes}; try --way 5 --shot 1"
        )
    if way + other_classes > dataset.classes:
        others = f" and {other_classes} other classes" if other_classes else ""
        raise DataError(
            f"expected at least {way + other_classes} classes for {way}-way tasks{others}, got {dataset.classes};"
            f" try --way {max(2, dataset.classes - other_classes)} or fewer"
        )
    if shot + query > dataset.smallest:
        fits = max(dataset.smallest - shot, 0)
        advice = f"--query {fits} or fewer" if fits else f"--shot {max(1, dataset.smallest - 1)} --query 1, or fewer"
        raise DataError(
            f"expected at least {shot + query} images in every class (shot {shot} + query {query}),"
            f" got {dataset.smallest} in the smallest; try {advice}"
        )


def sample_batch(key: PRNGKeyArray, dataset: Dataset, size: int) -> LabelledImages:
    """`size` images, each of a class drawn with replacement, and the classes 0..K-1 as labels."""
    class_key, image_key = jax.random.split(key)
    y = jax.random.randint(class_key, (size,), 0, dataset.classes)
    chosen = jnp.floor(jax.random.uniform(image_key, (size,)) * dataset.counts[y]).astype(jnp.int32)
    positions = dataset.index[y, jnp.minimum(chosen, dataset.counts[y] - 1)]
    return LabelledImages(take_images(dataset, positions), y.astype(jnp.int32))


def sample_indices(
    key: PRNGKeyArray, dataset: Dataset, way: int, shot: int, query: int, other_classes: int = 0
) -> TaskIndices:
    """Draw a task as positions into `flat_images(dataset)`: x_support [C S], x_query [C Q], x_other [O Q].

    Classes are drawn without replacement and labelled 0..C-1 in the order drawn, then images without replacement inside
    each class. Pure; jit-able with static sizes; maps over keys. Same key, same classes and images in float32 and 64.

    Raises:
        DataError: the data set is too small (`check_task_size`).
    """
    check_task_size(dataset, way, shot, query, other_classes)
    class_key, image_key = jax.random.split(key)
    # The largest n of independent uniforms are a draw without replacement, and far cheaper than a sorted permutation.
    classes = _largest(jax.random.uniform(class_key, (dataset.classes,), jnp.float32), way + other_classes)
    scores = jax.random.uniform(image_key, (way + other_classes, dataset.index.shape[1]), jnp.float32)
    real = jnp.arange(dataset.index.shape[1]) < dataset.counts[classes, None]
    chosen = _largest(jnp.where(real, scores, -1.0), shot + query)
    positions = jnp.take_along_axis(dataset.index[classes], chosen, axis=1)
    labels = jnp.arange(way, dtype=jnp.int32)
    return TaskIndices(
        x_support=positions[:way, :shot].reshape(-1),
        y_support=jnp.repeat(labels, shot),
        x_query=positions[:way, shot:].reshape(-1),
        y_query=jnp.repeat(labels, query),
        x_other=positions[way:, shot:].reshape(-1),
    )


def sample_task(
    key: PRNGKeyArray, dataset: Dataset, way: int, shot: int, query: int, other_classes: int = 0
) -> Task | OpenTask:
    """Draw a task with its images: a `Task`, or with `other_classes` > 0 an `OpenTask` with x_other [O Q, H, W, Ch].

    The same key gives the same task as `sample_indices`.

    Raises:
        DataError: the data set is too small (`check_task_size`).
    """
    drawn = sample_indices(key, dataset, way, shot, query, other_classes)
    task = Task(
        x_support=take_images(dataset, drawn.x_support),
        y_support=drawn.y_support,
        x_query=take_images(dataset, drawn.x_query),
        y_query=drawn.y_query,
    )
    return OpenTask(*task, x_other=take_images(dataset, drawn.x_other)) if other_classes else task


def take_images(dataset: Dataset, positions: Int32[Array, " n"]) -> Images:
    """The images [n, H, W, Ch] at positions r I + i, turned by r quarter turns counter-clockwise."""
    if dataset.rotations == 1:
        return dataset.images[positions]
    turns, image = jnp.divmod(positions, len(dataset.images))
    upright = dataset.images[image]
    turned = [jnp.rot90(upright, r, axes=(1, 2)) for r in range(dataset.rotations)]
    return jax.lax.select_n(jnp.broadcast_to(turns[:, None, None, None], upright.shape), *turned)


def flat_images(dataset: Dataset) -> Images:
    """All images [R I, H, W, Ch] in the order of their positions: embed them once, then index the features."""
    return jnp.concatenate([jnp.rot90(dataset.images, r, axes=(1, 2)) for r in range(dataset.rotations)])


def _largest(scores: Array, n: int) -> Int32[Array, "..."]:
    """Positions of the n largest scores along the last axis, largest first."""
    return jax.lax.top_k(scores, n)[1]
