"""Random changes of training images: geometry against NumPy and SciPy, strokes and colours by their definitions."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from fewshot.tasks import DataError
from fewshot.tasks.augmentation import (
    AUGMENTATIONS,
    KEPT_INK,
    Augmentation,
    augment,
    change_stroke,
    draw_changes,
    inverse_affine,
    recolour,
    warp,
)

HANDWRITING, PHOTOGRAPHS = AUGMENTATIONS["handwriting"], AUGMENTATIONS["photographs"]
EVERYTHING = replace(PHOTOGRAPHS, rotation=20.0, scale=0.2, stretch=0.1, shear=0.2, shift=0.1, stroke=(-1.0, 2.0))
STILL = np.eye(2, dtype=np.float32)

warped = jax.jit(warp, static_argnums=3)
augmented = jax.jit(augment, static_argnums=2)
stroked = jax.jit(change_stroke, static_argnames="most")
coloured = jax.jit(recolour)
drawn = jax.jit(draw_changes, static_argnums=(1, 2, 3))


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Six noise images, neither square nor grey: every mistake of an axis shows."""
    return np.random.default_rng(0).integers(0, 256, (6, 9, 12, 3), dtype=np.uint8)


def maps(n: int, matrix=STILL, offset=(0.0, 0.0)) -> tuple[np.ndarray, np.ndarray]:
    return np.tile(np.asarray(matrix, np.float32), (n, 1, 1)), np.tile(np.asarray(offset, np.float32), (n, 1))


def test_no_change_returns_the_image_exactly(images):
    for border in (False, True):
        np.testing.assert_array_equal(warped(images, *maps(6), border), images)
    np.testing.assert_array_equal(augmented(jax.random.key(0), images, Augmentation()), images)
    tiny = Augmentation(rotation=1e-9, stroke=(0.0, 1e-9), contrast=1e-9, crop=1 - 1e-9)
    np.testing.assert_array_equal(augmented(jax.random.key(0), images, tiny), images)
    one = jnp.ones(1)
    np.testing.assert_array_equal(inverse_affine(0 * one, one, one, 0 * one)[0], STILL)


def test_shifts_of_whole_pixels_are_rolls_and_bring_in_the_ground_or_the_border(images):
    moved = np.asarray(warped(images, *maps(6, offset=(-2.0, 1.0)), False))  # content goes 2 to the right and 1 up
    rolled = np.roll(images, (-1, 2), axis=(1, 2)).astype(float)
    np.testing.assert_array_equal(moved[:, :-1, 2:], rolled[:, :-1, 2:])
    assert (moved[:, -1] == 0).all() and (moved[:, :, :2] == 0).all()
    repeated = np.asarray(warped(images, *maps(6, offset=(-2.0, 1.0)), True))
    expected = np.pad(images, ((0, 0), (0, 1), (2, 0), (0, 0)), mode="edge")[:, 1:, :-2]
    np.testing.assert_array_equal(repeated, expected)
    assert (np.asarray(warped(images, *maps(6, offset=(99.0, 0.0)), False)) == 0).all()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_are_rot90(images, turns):
    square = images[:, :, :9]
    angle, one = jnp.full(6, turns * np.pi / 2), jnp.ones(6)
    turned = warped(square, inverse_affine(angle, one, one, 0 * one), maps(6)[1], False)
    np.testing.assert_array_equal(np.round(turned), np.rot90(square, turns, axes=(1, 2)))


def test_mirrors_and_shears_do_what_their_names_say(images):
    one = jnp.ones(6)
    mirrored = warped(images, inverse_affine(0 * one, -one, one, 0 * one), maps(6)[1], False)
    np.testing.assert_array_equal(mirrored, images[:, :, ::-1])
    slanted = np.asarray(warped(images, inverse_affine(0 * one, one, one, one), maps(6)[1], False))
    for row in range(9):  # the centre row stays, each row below it goes one further to the right
        np.testing.assert_array_equal(slanted[:, row, 4:-4], np.roll(images[:, row], row - 4, axis=1)[:, 4:-4])


@pytest.mark.parametrize("border", [False, True])
def test_any_map_agrees_with_scipy(images, border):
    rng = np.random.default_rng(1)
    matrix = (np.eye(2) + rng.normal(0, 0.3, (6, 2, 2))).astype(np.float32)
    offset = rng.normal(0, 2, (6, 2)).astype(np.float32)
    moved = np.asarray(warped(images, matrix, offset, border))
    centre = np.array([4.0, 5.5])  # SciPy counts (row, column)
    for number in range(6):
        old = matrix[number, ::-1, ::-1].astype(float)
        start = centre + offset[number, ::-1] - old @ centre
        for channel in range(3):
            expected = ndimage.affine_transform(
                images[number, :, :, channel].astype(float),
                old,
                start,
                order=1,
                mode="nearest" if border else "grid-constant",
            )
            np.testing.assert_allclose(moved[number, :, :, channel], expected, atol=2e-3)


def test_the_inverse_is_the_inverse():
    angle, width, height, shear = jnp.array([0.3]), jnp.array([-1.2]), jnp.array([0.8]), jnp.array([0.4])
    turn = np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])  # counter-clockwise with y downwards
    forward = turn @ np.array([[1, 0.4], [0, 1]]) @ np.diag([-1.2, 0.8])
    np.testing.assert_allclose(inverse_affine(angle, width, height, shear)[0] @ forward, np.eye(2), atol=1e-6)


def test_strokes_widen_by_whole_steps_as_in_scipy_and_mix_between(images):
    grey = images[..., :1].astype(np.float32)
    plus, square = ndimage.generate_binary_structure(2, 1), np.ones((3, 3), bool)
    expected = grey[..., 0]
    for pixels, footprint in ((2.0, plus), (4.0, square)):
        expected = np.stack([ndimage.grey_dilation(one, footprint=footprint, mode="nearest") for one in expected])
        np.testing.assert_array_equal(stroked(grey, jnp.full(6, pixels), most=4)[..., 0], expected)
    half = np.asarray(stroked(grey, jnp.full(6, 1.0)))
    whole = np.asarray(stroked(grey, jnp.full(6, 2.0)))
    np.testing.assert_allclose(half, (grey + whole) / 2, atol=1e-4)


def test_strokes_thin_but_stay_visible():
    bars = np.zeros((3, 20, 20, 1), np.float32)
    bars[0, :, 4:14], bars[1, :, 9] = 255, 255  # ten pixels wide, one, and nothing
    thin = np.asarray(stroked(bars, jnp.full(3, -2.0)))
    np.testing.assert_array_equal(thin[0, :, 5:13], bars[0, :, 5:13])
    assert thin[0].sum() == bars[0].sum() * 0.8
    np.testing.assert_allclose(thin[1].sum(), KEPT_INK * bars[1].sum(), rtol=1e-5)
    assert (thin[2] == 0).all()


def test_colours_change_by_their_factors(images):
    pixels = images.astype(np.float32)
    n = np.ones(6, np.float32)
    np.testing.assert_allclose(coloured(pixels, np.stack([0.5 * n, n, n], 1)), 0.5 * pixels, rtol=1e-5)
    mean = pixels.mean((1, 2, 3), keepdims=True)
    np.testing.assert_allclose(coloured(pixels, np.stack([n, 0 * n, n], 1)), np.tile(mean, (1, 9, 12, 3)), rtol=1e-5)
    grey = np.asarray(coloured(pixels, np.stack([n, n, 0 * n], 1)))
    np.testing.assert_allclose(grey, np.tile(pixels.mean(3, keepdims=True), 3), rtol=1e-4)


@pytest.mark.parametrize("name", ["geometry", "strokes", "handwriting", "photographs"])
def test_an_image_depends_on_its_position_alone(images, name):
    key = jax.random.key(3)
    together = np.asarray(augmented(key, images, AUGMENTATIONS[name]))
    others = images.copy()
    others[[0, 1, 3, 4, 5]] = 7
    np.testing.assert_array_equal(augmented(key, others, AUGMENTATIONS[name])[2], together[2])
    if name == "handwriting":
        np.testing.assert_array_equal(augmented(key, images[:3], HANDWRITING), together[:3])
    twice = np.asarray(augmented(key, images[[0, 0, 0, 0, 0, 0]], AUGMENTATIONS[name]))
    assert len({image.tobytes() for image in twice}) == 6
    assert (np.asarray(augmented(jax.random.key(4), images, AUGMENTATIONS[name])) != together).any()


def test_the_changes_have_the_documented_ranges_and_are_independent():
    colours = {"brightness": 0.1, "contrast": 0.2, "saturation": 0.3}
    ranges = Augmentation(rotation=15.0, scale=0.2, shear=0.2, shift=0.07, stroke=(-0.5, 2.0), **colours)
    changes = drawn(jax.random.key(0), 4000, (9, 12), ranges)
    forward = np.linalg.inv(np.asarray(changes.matrix, float))
    angle = np.rad2deg(np.arctan2(-forward[:, 1, 0], forward[:, 0, 0]))
    scale = np.hypot(forward[:, 0, 0], forward[:, 1, 0])
    shift, factors = np.asarray(changes.offset) / [12, 9], np.asarray(changes.factors)
    properties = (
        (angle, -15, 15),
        (scale, 0.8, 1.2),
        (shift[:, 0], -0.07, 0.07),
        (shift[:, 1], -0.07, 0.07),
        (np.asarray(changes.stroke), -0.5, 2.0),
        *((factors[:, i], 1 - reach, 1 + reach) for i, reach in enumerate(colours.values())),
    )
    for values, low, high in properties:
        span = high - low
        assert low - 1e-4 * span <= values.min() < low + 0.01 * span
        assert high - 0.01 * span < values.max() <= high + 1e-4 * span
        assert values.mean() == pytest.approx((low + high) / 2, abs=0.02 * span)
    correlation = np.corrcoef([values for values, _, _ in properties])
    assert np.abs(correlation - np.eye(len(properties))).max() < 5 / np.sqrt(4000)


def test_a_crop_shows_a_window_inside_the_image():
    changes = drawn(jax.random.key(0), 4000, (64, 64), PHOTOGRAPHS)
    side = np.asarray(changes.matrix)[:, 1, 1]
    assert side.min() == pytest.approx(0.7, abs=0.01) and side.max() == pytest.approx(1, abs=0.01)
    edge = np.abs(np.asarray(changes.offset)) + 0.5 * side[:, None] * 64
    assert 31.9 < edge.max() <= 32.0001
    flipped = np.asarray(changes.matrix)[:, 0, 0] < 0
    assert 0.46 < flipped.mean() < 0.54


def test_switching_one_change_on_leaves_the_others_as_they_were():
    with_stroke = drawn(jax.random.key(0), 5, (28, 28), HANDWRITING)
    without = drawn(jax.random.key(0), 5, (28, 28), replace(HANDWRITING, stroke=(0.0, 0.0)))
    np.testing.assert_array_equal(with_stroke.matrix, without.matrix)
    assert (without.stroke == 0).all() and (with_stroke.stroke != 0).all()


def test_double_precision_changes_nothing(images):
    key = jax.random.key(5)
    single = np.asarray(augmented(key, images, EVERYTHING))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(augmented(key, images, EVERYTHING), single)


def test_ranges_that_turn_an_image_inside_out_are_refused():
    for wrong in ({"scale": 1.0}, {"crop": 0.0}, {"stroke": (1.0, -1.0)}, {"contrast": -0.1}):
        with pytest.raises(ValueError, match="expected shares"):
            Augmentation(**wrong)


def test_features_in_place_of_images_are_refused():
    features = jnp.zeros((3, 1, 1, 5))
    assert augment(jax.random.key(0), features, Augmentation()) is features
    with pytest.raises(DataError, match="expected images of bytes"):
        augment(jax.random.key(0), features, PHOTOGRAPHS)


def test_it_compiles_once_for_all_keys(images):
    run = jax.jit(partial(augment, augmentation=EVERYTHING))
    for seed in range(2):
        assert run(jax.random.key(seed), images).dtype == jnp.uint8
    assert run._cache_size() == 1
