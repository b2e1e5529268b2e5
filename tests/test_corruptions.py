"""Corruptions against the published constants, and against what SciPy, Pillow and colorsys compute."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from fewshot.tasks import DataError, make_dataset
from fewshot.tasks import corruptions as corruptions
from fewshot.tasks.corruptions import CORRUPTIONS, constants_set, corrupt, corrupt_dataset, parse_corruption
from fewshot.tasks.filters import box_matrix, disc_kernel

# Severities 1 and 5 as printed in the authors' programs for images of 224, 64 and 32 pixels.
PUBLISHED = {
    "gaussian-noise": ((0.08, 0.38), (0.04, 0.18), (0.04, 0.10)),
    "shot-noise": ((60, 3), (250, 15), (500, 50)),
    "impulse-noise": ((0.03, 0.27), (0.01, 0.14), (0.01, 0.07)),
    "speckle-noise": ((0.15, 0.6), (0.15, 0.35), (0.06, 0.2)),
    "defocus-blur": (((3, 0.1), (10, 0.5)), ((0.5, 0.6), (3, 0.1)), ((0.3, 0.4), (1.5, 0.1))),
    "gaussian-blur": ((1, 6), (0.5, 1.5), (0.4, 1)),
    "zoom-blur": (((1.11, 0.01), (1.31, 0.03)), ((1.06, 0.01), (1.26, 0.01)), ((1.06, 0.01), (1.26, 0.01))),
    "brightness": ((0.1, 0.5), (0.1, 0.5), (0.05, 0.3)),
    "contrast": ((0.4, 0.05), (0.4, 0.05), (0.75, 0.15)),
    "pixelate": ((0.6, 0.25), (0.9, 0.5), (0.95, 0.65)),
}
KEY = jax.random.key(0)
corrupted = jax.jit(corrupt, static_argnames=("name", "severity"))


@pytest.fixture(scope="module")
def photographs() -> np.ndarray:
    """Two smooth coloured images, larger than 64 pixels and not square: severities of ImageNet-C."""
    noise = np.random.default_rng(0).normal(size=(2, 66, 70, 3))
    smooth = ndimage.gaussian_filter(noise, (0, 3, 3, 0)) * 8 + 0.4 * noise
    return np.clip(128 + 60 * smooth, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """Forty small images of one brightness in each channel: 51, 102, 204 of 255."""
    return np.tile(np.array([51, 102, 204], np.uint8), (40, 20, 24, 1))


def test_every_corruption_has_the_published_constants():
    assert set(PUBLISHED) == set(CORRUPTIONS)
    for name, published in PUBLISHED.items():
        for size, (weakest, strongest) in zip(("imagenet", "tiny", "cifar"), published, strict=True):
            constants = CORRUPTIONS[name].constants[size]
            assert (len(constants), constants[0], constants[-1]) == (5, weakest, strongest), (name, size)
            rising = [np.ravel(value)[0] for value in constants]
            assert rising in (sorted(rising), sorted(rising, reverse=True)), (name, size)
    assert [constants_set(side, 300) for side in (28, 32, 33, 64, 65, 84)] == ["cifar"] * 2 + ["tiny"] * 2 + [
        "imagenet"
    ] * 2


def channels(name: str, images: np.ndarray) -> np.ndarray:
    """All numbers of the three channels after corruption, in [0, 1]: [3, many]."""
    return np.asarray(corrupted(KEY, images, name, 5), float).reshape(-1, 3).T / 255


def test_noise_has_the_moments_of_its_definition(plain):
    level, n = np.array([0.2, 0.4, 0.8]), 40 * 20 * 24
    rounding = 1 / 255**2 / 12
    for name, variance in (
        ("gaussian-noise", np.full(3, 0.1**2)),
        ("shot-noise", level / 50),
        ("speckle-noise", (0.2 * level) ** 2),
    ):
        values = channels(name, plain)
        kept = slice(0, 2)  # the brightest channel is cut off at 1
        error = np.sqrt(variance / n)
        np.testing.assert_array_less(np.abs(values.mean(1) - level)[kept], 5 * error[kept])
        np.testing.assert_allclose(values.var(1)[kept], (variance + rounding)[kept], rtol=0.06)
        assert values.max() <= 1 and values.min() >= 0
    assert (np.asarray(corrupted(KEY, 0 * plain, "speckle-noise", 5)) == 0).all()
    assert (np.asarray(corrupted(KEY, 0 * plain, "shot-noise", 5)) == 0).all()


def test_impulses_are_black_or_white_in_equal_shares_and_fall_on_each_channel_alone(plain):
    values = channels("impulse-noise", plain)
    black, white = values == 0, values == 1
    standard_error = np.sqrt(0.035 / values.shape[1])
    np.testing.assert_allclose(black.mean(1), 0.035, atol=5 * standard_error)
    np.testing.assert_allclose(white.mean(1), 0.035, atol=5 * standard_error)
    untouched = ~(black | white)
    for level, row, kept in zip((51, 102, 204), values, untouched, strict=True):
        assert (np.round(255 * row[kept]) == level).all()
    hit = ~untouched
    np.testing.assert_allclose((hit[0] & hit[1]).mean(), 0.07**2, atol=5 * 0.07 / np.sqrt(values.shape[1]))


@pytest.mark.parametrize(("radius", "blur"), [(10, 0.5), (8, 0.5), (3, 0.1), (2.5, 0.01), (1.5, 0.1), (0.3, 0.4)])
def test_the_disc_is_its_definition_softened_by_scipy(radius, blur):
    reach, taps = (8, 1) if radius <= 8 else (10, 2)
    disc = np.array(
        [[x * x + y * y <= radius * radius for x in range(-reach, reach + 1)] for y in range(-reach, reach + 1)], float
    )
    expected = ndimage.gaussian_filter(disc / disc.sum(), blur, mode="mirror", radius=taps)
    np.testing.assert_allclose(disc_kernel(radius, blur), expected, atol=1e-7)
    assert disc_kernel(radius, blur).sum() == pytest.approx(1, abs=0.015)
    assert disc.sum() == {10: 317, 8: 197, 3: 29, 2.5: 21, 1.5: 9, 0.3: 1}[radius]  # points of the lattice in a circle


def each_channel(images: np.ndarray, change) -> np.ndarray:
    """`change` of every channel [H, W] in [0, 1] by itself, back as numbers in [0, 255]."""
    planes = images.transpose(0, 3, 1, 2) / 255
    changed = np.array([[change(plane) for plane in image] for image in planes])
    return 255 * np.clip(changed, 0, 1).transpose(0, 2, 3, 1)


def zoomed(plane: np.ndarray, factor: float) -> np.ndarray:
    """The middle of a plane enlarged by SciPy, sides one after the other because the window of each is rounded up."""
    for axis, side in enumerate(plane.shape):
        window = int(np.ceil(side / factor))
        cut = np.take(plane, np.arange((side - window) // 2, (side - window) // 2 + window), axis)
        size = [1.0, 1.0]
        size[axis] = factor
        large = ndimage.zoom(cut, size, order=1, mode="nearest")
        start = (large.shape[axis] - side) // 2
        plane = np.take(large, np.arange(start, start + side), axis)
    return plane


def test_blurs_agree_with_scipy(photographs):
    def defocus(plane):
        return ndimage.correlate(plane, disc_kernel(10, 0.5).astype(float), mode="mirror")

    def gaussian(plane):
        return ndimage.gaussian_filter(plane, 6, mode="nearest", truncate=4)

    def zoom(plane):
        factors = np.arange(1, 1.31, 0.03)
        return (plane + sum(zoomed(plane, factor) for factor in factors)) / (len(factors) + 1)

    for name, change in (("defocus-blur", defocus), ("gaussian-blur", gaussian), ("zoom-blur", zoom)):
        found = np.asarray(corrupted(KEY, photographs, name, 5), float)
        np.testing.assert_allclose(found, each_channel(photographs, change), atol=0.51, err_msg=name)


def test_pixelate_agrees_with_pillow(photographs):
    found = np.asarray(corrupted(KEY, photographs, "pixelate", 5), int)
    for image, result in zip(photographs, found, strict=True):
        small = Image.fromarray(image).resize((int(70 * 0.25), int(66 * 0.25)), Image.Resampling.BOX)
        expected = np.asarray(small.resize((70, 66), Image.Resampling.BOX), int)
        assert np.abs(result - expected).max() <= 1  # Pillow rounds three times
    one = Image.fromarray(np.eye(20, dtype=np.float32))
    for size in (13, 7, 19):
        np.testing.assert_allclose(
            box_matrix(20, size), np.asarray(one.resize((20, size), Image.Resampling.BOX)), atol=1e-6
        )


def test_brightness_raises_the_value_of_hsv(photographs):
    small = photographs[:1, :20, :24].copy()
    small[0, 0, 0] = 0
    found = np.asarray(corrupted(KEY, small, "brightness", 5), float)
    for pixel, result in zip(small.reshape(-1, 3), found.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
        expected = 255 * np.array(colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.3)))
        np.testing.assert_allclose(result, expected, atol=0.51)


def test_contrast_shrinks_the_distance_to_the_mean_of_each_channel(photographs):
    found = np.asarray(corrupted(KEY, photographs, "contrast", 5), float)
    mean = photographs.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(found, mean + 0.05 * (photographs - mean), atol=0.51)


def test_an_image_depends_on_its_position_alone(plain):
    images = plain.copy()
    images[:, 5:9, 3:12] = 90
    together = np.asarray(corrupted(KEY, images, "gaussian-noise", 5))
    others = images.copy()
    others[:3], others[4:] = 7, 200
    np.testing.assert_array_equal(corrupted(KEY, others, "gaussian-noise", 5)[3], together[3])
    np.testing.assert_array_equal(corrupted(KEY, images[3:5], "gaussian-noise", 5, 3), together[3:5])
    assert len({image.tobytes() for image in together}) == 40
    assert (np.asarray(corrupted(jax.random.key(1), images, "gaussian-noise", 5)) != together).any()


def test_a_data_set_is_corrupted_in_chunks_as_in_one_piece(monkeypatch, plain):
    dataset = make_dataset(plain, np.repeat(np.arange(2), 20))
    monkeypatch.setattr(corruptions, "PIXELS_A_CHUNK", 7 * 20 * 24 * 3)
    changed = corrupt_dataset(KEY, dataset, "gaussian-noise", 5)
    np.testing.assert_array_equal(changed.images, corrupted(KEY, plain, "gaussian-noise", 5))
    assert changed.smallest == 20 and (changed.index == dataset.index).all()
    with pytest.raises(DataError, match="expected images to corrupt, got features"):
        corrupt_dataset(KEY, dataset._replace(images=dataset.images / 255), "gaussian-noise", 5)


@pytest.mark.parametrize("name", ["gaussian-noise", *(name for name in CORRUPTIONS if "noise" not in name)])
def test_grey_images_keep_their_shape_and_change(name):
    grey = np.random.default_rng(1).integers(0, 256, (2, 9, 11, 1), dtype=np.uint8)
    changed = np.asarray(corrupted(KEY, grey, name, 5))
    assert changed.shape == grey.shape and changed.dtype == np.uint8 and (changed != grey).any()
    if name in ("gaussian-noise", "gaussian-blur"):
        with jax.enable_x64(True):
            np.testing.assert_array_equal(corrupted(KEY, grey, name, 5), changed)


def test_names_and_severities_are_parsed_or_refused_in_one_line(plain):
    assert parse_corruption("gaussian-noise:5") == ("gaussian-noise", 5)
    for text, expected in (
        ("gaussian-noise", "NAME:SEVERITY"),
        ("gaussian-noise:high", "NAME:SEVERITY"),
        ("gaussian-noise:-1", "NAME:SEVERITY"),
        ("gaussian-noise:6", "severity from 1 to 5"),
        ("gaussian-noise:0", "severity from 1 to 5"),
        ("rain:3", "defocus-blur"),
    ):
        with pytest.raises(DataError, match=expected) as error:
            parse_corruption(text)
        assert "\n" not in str(error.value) and "try" in str(error.value)
    with pytest.raises(DataError, match="rain"):
        corrupt(KEY, jnp.asarray(plain[:1]), "rain", 1)
