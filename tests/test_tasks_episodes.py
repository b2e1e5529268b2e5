"""Tasks as pure functions of a key: shapes, sampling without replacement, quarter turns, transformations, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewshot.tasks import (
    DataError,
    OpenTask,
    Task,
    check_task_size,
    flat_images,
    make_dataset,
    make_splits,
    sample_indices,
    sample_task,
    take_images,
)
from fewshot.tasks import episodes as episodes

CLASSES, SIZE = 9, 6


def counting_images(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Images that tell their label (first pixel) and their number (second pixel), in a shuffled order."""
    labels = np.repeat(np.arange(len(counts)), counts)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), SIZE, SIZE, 1), np.uint8)
    images[:, 0, 0, 0] = labels
    images[:, 0, 1, 0] = np.arange(len(labels))
    order = np.random.default_rng(1).permutation(len(labels))
    return images[order], labels[order]


@pytest.fixture(scope="module")
def equal():
    return make_dataset(*counting_images(np.full(CLASSES, 8)))


@pytest.fixture(scope="module")
def unequal():
    return make_dataset(*counting_images(np.array([4, 11, 5, 4, 7, 20, 4])))


@pytest.fixture(scope="module")
def turned():
    return make_dataset(*counting_images(np.full(CLASSES, 8)), rotations=4)


@pytest.mark.long
def test_a_task_is_class_major_with_the_fields_dtypes_and_shapes_of_the_design(equal):
    task = sample_task(jax.random.key(0), equal, way=5, shot=2, query=3)
    assert type(task) is Task
    assert Task._fields == ("x_support", "y_support", "x_query", "y_query")
    assert task.x_support.shape == (10, SIZE, SIZE, 1) and task.x_support.dtype == jnp.uint8
    assert task.x_query.shape == (15, SIZE, SIZE, 1) and task.x_query.dtype == jnp.uint8
    np.testing.assert_array_equal(task.y_support, np.repeat(np.arange(5), 2))
    np.testing.assert_array_equal(task.y_query, np.repeat(np.arange(5), 3))
    assert task.y_support.dtype == task.y_query.dtype == jnp.int32


@pytest.mark.parametrize("seed", range(20))
def test_classes_differ_and_no_image_is_drawn_twice(unequal, seed):
    task = sample_task(jax.random.key(seed), unequal, way=5, shot=1, query=3)
    images = np.concatenate([task.x_support, task.x_query])
    of_label = np.concatenate([task.y_support, task.y_query])
    classes = [set(images[of_label == label, 0, 0, 0]) for label in range(5)]
    assert all(len(found) == 1 for found in classes)
    assert len(set.union(*classes)) == 5
    assert len(np.unique(images[:, 0, 1, 0])) == len(images)


def test_every_class_label_and_image_is_equally_likely(unequal):
    """Counts over 20,000 tasks; the padding of short classes is never drawn, and long ones are drawn to their end."""
    draws, way, taken = 20_000, 3, 4
    sampler = jax.jit(jax.vmap(lambda key: sample_indices(key, unequal, way, 1, taken - 1)))
    drawn = sampler(jax.random.split(jax.random.key(7), draws))
    by_class = np.concatenate([np.asarray(drawn.x_support), np.asarray(drawn.x_query)], axis=1)
    label = np.asarray(unequal.images)[:, 0, 0, 0]
    first = label[np.asarray(drawn.x_support)]  # [draws, way]
    for place in range(way):
        seen = np.bincount(first[:, place], minlength=unequal.classes)
        assert ((seen - draws / 7) ** 2 / (draws / 7)).sum() < 27.9  # 6 degrees of freedom, p = 1e-4
    times = np.bincount(by_class.ravel(), minlength=len(label))
    for number, count in enumerate(np.asarray(unequal.counts)):
        seen, expected = times[label == number], draws * way / 7 * taken / count
        assert seen.sum() == pytest.approx(draws * way / 7 * taken, rel=0.05)
        assert (np.abs(seen - expected) < 5 * np.sqrt(expected)).all()


def test_the_same_key_gives_the_same_task_and_another_key_another(equal):
    one, same, other = (sample_indices(jax.random.key(seed), equal, 5, 1, 5) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.x_query, same.x_query)
    assert (one.x_query != other.x_query).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["equal", "unequal", "turned"])
def test_positions_index_the_flat_images(name, request):
    dataset = request.getfixturevalue(name)
    flat = flat_images(dataset)
    assert flat.shape == (dataset.rotations * len(dataset.images), *dataset.image_shape)
    for seed in range(5):
        task = sample_task(jax.random.key(seed), dataset, 4, 1, 3)
        drawn = sample_indices(jax.random.key(seed), dataset, 4, 1, 3)
        np.testing.assert_array_equal(flat[drawn.x_support], task.x_support)
        np.testing.assert_array_equal(flat[drawn.x_query], task.x_query)
        np.testing.assert_array_equal(drawn.y_query, task.y_query)
    np.testing.assert_array_equal(take_images(dataset, jnp.arange(len(flat), dtype=jnp.int32)), flat)


def test_quarter_turns_are_classes_of_their_own(turned, equal):
    assert turned.classes == 4 * equal.classes and len(turned.images) == len(equal.images)
    flat = np.asarray(flat_images(turned))
    for k in range(turned.classes):
        upright = np.asarray(equal.images)[np.asarray(equal.index)[k // 4]]
        np.testing.assert_array_equal(flat[np.asarray(turned.index)[k]], np.rot90(upright, k % 4, axes=(1, 2)))
    lopsided = make_dataset(np.zeros((5, SIZE, SIZE, 1), np.uint8), np.array([0, 0, 0, 1, 1]), rotations=4)
    assert lopsided.counts.tolist() == [3] * 4 + [2] * 4


def test_other_classes_are_not_in_the_task(unequal):
    for seed in range(10):
        task = sample_task(jax.random.key(seed), unequal, way=3, shot=1, query=2, other_classes=4)
        assert type(task) is OpenTask
        assert task.x_other.shape == (8, SIZE, SIZE, 1)
        others = np.asarray(task.x_other)[:, 0, 0, 0]
        inside = set(np.asarray(task.x_support)[:, 0, 0, 0])
        assert not inside & set(others) and len(set(others)) == 4
        np.testing.assert_array_equal(others[::2], others[1::2])


@pytest.mark.long
def test_jit_and_vmap_change_nothing(turned):
    keys = jax.random.split(jax.random.key(0), 3)
    compiled = jax.jit(sample_task, static_argnames=("way", "shot", "query", "other_classes"))
    batch = jax.vmap(lambda key: sample_task(key, turned, 5, 1, 2))(keys)
    for key, *mapped in zip(keys, *batch, strict=True):
        expected = sample_task(key, turned, 5, 1, 2)
        jax.tree.map(np.testing.assert_array_equal, compiled(key, turned, way=5, shot=1, query=2), expected)
        jax.tree.map(np.testing.assert_array_equal, Task(*mapped), expected)
    assert compiled._cache_size() == 1


def test_the_static_fields_stay_integers_in_a_tree(turned):
    assert len(jax.tree.leaves(turned)) == 3
    mapped = jax.tree.map(lambda leaf: leaf, turned)
    assert (mapped.rotations, mapped.smallest) == (4, 8)
    assert jax.jit(lambda dataset: jnp.zeros(dataset.rotations))(turned).shape == (4,)


def test_double_precision_draws_the_same_tasks(unequal):
    single = sample_indices(jax.random.key(5), unequal, 4, 1, 3)
    with jax.enable_x64(True):
        double = sample_indices(jax.random.key(5), unequal, 4, 1, 3)
    jax.tree.map(np.testing.assert_array_equal, single, double)
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(double))


def test_the_whole_data_set_fits_in_one_task(equal):
    drawn = sample_indices(jax.random.key(0), equal, way=CLASSES, shot=1, query=7)
    everything = np.concatenate([drawn.x_support, drawn.x_query])
    np.testing.assert_array_equal(np.sort(everything), np.arange(len(equal.images)))
    assert sample_task(jax.random.key(0), equal, 5, 8, 0).x_query.shape == (0, SIZE, SIZE, 1)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((10, 1, 1, 0), ["10 classes", "got 9", "--way 9"]),
        ((5, 1, 1, 5), ["10 classes", "5 other", "got 9", "--way 4"]),
        ((5, 3, 6, 0), ["9 images", "shot 3 + query 6", "got 8", "--query 5"]),
        ((5, 8, 1, 0), ["9 images", "got 8", "--shot 7"]),
        ((1, 1, 1, 0), ["way >= 2", "got way 1"]),
        ((5, 0, 1, 0), ["shot >= 1", "shot 0"]),
        ((5, 1, -1, 0), ["query >= 0", "query -1"]),
    ],
)
def test_too_small_data_is_refused_in_one_line(equal, sizes, words):
    for check in (check_task_size, lambda *arguments: sample_task(jax.random.key(0), *arguments)):
        with pytest.raises(DataError) as error:
            check(equal, *sizes)
        assert "\n" not in str(error.value)
        assert all(word in str(error.value) for word in words), str(error.value)


def test_the_smallest_class_counts_under_jit_too(unequal):
    with pytest.raises(DataError, match="got 4 in the smallest"):
        jax.jit(lambda key, dataset: sample_task(key, dataset, 2, 1, 4))(jax.random.key(0), unequal)


@pytest.mark.parametrize(
    ("labels", "shape", "rotations", "words"),
    [
        ([0, 0, 2], (3, 4, 4, 1), 1, "got none for 1"),
        ([], (0, 4, 4, 1), 1, "got none for 0"),
        ([0, 1, 1], (3, 4, 5, 1), 4, "got 4 with 4x5"),
        ([0, 1, 1], (3, 4, 4, 1), 2, "got 2 with 4x4"),
    ],
)
def test_data_sets_that_make_no_sense_are_refused(labels, shape, rotations, words):
    with pytest.raises(DataError, match=words):
        make_dataset(np.zeros(shape, np.uint8), np.array(labels, int), rotations)


def test_splits_of_unlike_shapes_or_with_a_name_too_few_are_refused():
    small, large = (make_dataset(np.zeros((4, size, size, 1), np.uint8), np.array([0, 0, 1, 1])) for size in (3, 5))
    parts = {"train": (small, ("a", "b")), "validation": (small, ("c", "d")), "test": (small, ("e", "f"))}
    assert make_splits("mine", parts).class_names["test"] == ("e", "f")
    with pytest.raises(DataError, match="expected 2 names of test classes of mine, got 1"):
        make_splits("mine", {**parts, "test": (small, ("e",))})
    with pytest.raises(DataError, match=r"expected validation images of mine of shape \(3, 3, 1\), got \(5, 5, 1\)"):
        make_splits("mine", {**parts, "validation": (large, ("c", "d"))})


def test_sampling_sorts_no_permutation_of_all_classes():
    """A permutation by sorting costs 20 times more than all the rest on thousands of classes."""
    dataset = make_dataset(np.zeros((6000, 1, 1, 1), np.uint8), np.repeat(np.arange(3000), 2))
    text = str(jax.make_jaxpr(lambda key: episodes.sample_indices(key, dataset, 5, 1, 1))(jax.random.key(0)))
    assert "top_k" in text and " sort" not in text
