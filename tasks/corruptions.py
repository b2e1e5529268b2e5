"""Corruptions of Hendrycks & Dietterich (2019) at five severities, for images of any size, grey or RGB, in pure JAX.

Those are here that are defined by a formula. The authors published three sets of severities, one for each size of image
that they made: `cifar` (32 pixels), `tiny` (64) and `imagenet` (224). An image takes the set of the next larger size,
so the papers' 84-pixel images take `imagenet`, as they did there. Where the authors cut numbers off to bytes these are
rounded. Arithmetic is float32 in any precision mode.

Letters: N images, H x W pixels, Ch channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from fewshot.tasks.episodes import Dataset
from fewshot.tasks.files import DataError
from fewshot.tasks.filters import box_matrix, disc_kernel, gaussian_matrix, zoom_matrix

Image = Float[Array, "H W Ch"]
PIXELS_A_CHUNK = 1_000_000  # of a data set that are corrupted at once

_highest = jax.default_matmul_precision("highest")


class Corruption(NamedTuple):
    """One image in [0, 1] and a constant to an image, and the constants of the five severities for each set."""

    apply: Callable[[PRNGKeyArray, Image, Any], Image]
    constants: dict[str, tuple]


def gaussian_noise(key: PRNGKeyArray, image: Image, deviation: float) -> Image:
    """Add N(0, deviation^2) to every number."""
    return image + deviation * jax.random.normal(key, image.shape, jnp.float32)


def shot_noise(key: PRNGKeyArray, image: Image, photons: float) -> Image:
    """Poisson counts whose mean is `photons` at full brightness, divided by `photons`."""
    return jax.random.poisson(key, image * photons).astype(jnp.float32) / photons


def impulse_noise(key: PRNGKeyArray, image: Image, share: float) -> Image:
    """A share of all numbers becomes 0 or 1, half of them each."""
    u = jax.random.uniform(key, image.shape, jnp.float32)
    return jnp.where(u < share, (u < share / 2).astype(jnp.float32), image)


def speckle_noise(key: PRNGKeyArray, image: Image, deviation: float) -> Image:
    """Multiply every number by N(1, deviation^2)."""
    return image * (1 + deviation * jax.random.normal(key, image.shape, jnp.float32))


def defocus_blur(key: PRNGKeyArray, image: Image, disc: tuple[float, float]) -> Image:
    """Correlate with a disc (`disc_kernel`); the image is mirrored at its border, which is not repeated."""
    del key
    kernel = jnp.asarray(disc_kernel(*disc))
    reach = len(kernel) // 2
    planes = jnp.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="reflect").transpose(2, 0, 1)[:, None]
    return jax.lax.conv(planes, kernel[None, None], (1, 1), "VALID")[:, 0].transpose(1, 2, 0)


def gaussian_blur(key: PRNGKeyArray, image: Image, sigma: float) -> Image:
    """Gaussian blur (`gaussian_matrix`)."""
    del key
    rows, columns = (gaussian_matrix(side, sigma) for side in image.shape[:2])
    return jnp.einsum("ih,hwc,jw->ijc", rows, image, columns)


def zoom_blur(key: PRNGKeyArray, image: Image, largest: tuple[float, float]) -> Image:
    """Mean of the image and of its enlargements (`zoom_matrix`) by factors up to `largest` = (limit, step)."""
    del key
    factors = np.arange(1, *largest)
    rows, columns = (np.stack([zoom_matrix(side, factor) for factor in factors]) for side in image.shape[:2])
    return (image + jnp.einsum("zih,hwc,zjw->ijc", rows, image, columns)) / (len(factors) + 1)


def brightness(key: PRNGKeyArray, image: Image, added: float) -> Image:
    """Raise the largest channel of each pixel (V of HSV), and the others in proportion (H and S stay)."""
    del key
    largest = jnp.max(image, axis=2, keepdims=True)
    raised = jnp.clip(largest + added, 0.0, 1.0)
    return jnp.where(largest > 0, image * (raised / jnp.where(largest > 0, largest, 1.0)), raised)


def contrast(key: PRNGKeyArray, image: Image, factor: float) -> Image:
    """Shrink the distance to the mean of the image's channel."""
    del key
    mean = jnp.mean(image, axis=(0, 1), keepdims=True)
    return mean + factor * (image - mean)


def pixelate(key: PRNGKeyArray, image: Image, share: float) -> Image:
    """Shrink both sides to a share of them by box averages, and enlarge again (`box_matrix`)."""
    del key
    small = [max(1, int(side * share)) for side in image.shape[:2]]
    rows, columns = (box_matrix(side, fewer) for side, fewer in zip(image.shape[:2], small, strict=True))
    coarse = jnp.einsum("ih,hwc,jw->ijc", rows, image, columns)
    rows, columns = (box_matrix(fewer, side) for side, fewer in zip(image.shape[:2], small, strict=True))
    return jnp.einsum("ih,hwc,jw->ijc", rows, coarse, columns)


def _constants(imagenet: tuple, tiny: tuple, cifar: tuple) -> dict[str, tuple]:
    return {"imagenet": imagenet, "tiny": tiny, "cifar": cifar}


_SMALL_ZOOMS = ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))
CORRUPTIONS = {
    "gaussian-noise": Corruption(
        gaussian_noise,
        _constants((0.08, 0.12, 0.18, 0.26, 0.38), (0.04, 0.08, 0.12, 0.15, 0.18), (0.04, 0.06, 0.08, 0.09, 0.10)),
    ),
    "shot-noise": Corruption(
        shot_noise, _constants((60, 25, 12, 5, 3), (250, 100, 50, 30, 15), (500, 250, 100, 75, 50))
    ),
    "impulse-noise": Corruption(
        impulse_noise,
        _constants((0.03, 0.06, 0.09, 0.17, 0.27), (0.01, 0.02, 0.05, 0.08, 0.14), (0.01, 0.02, 0.03, 0.05, 0.07)),
    ),
    "speckle-noise": Corruption(
        speckle_noise,
        _constants((0.15, 0.2, 0.35, 0.45, 0.6), (0.15, 0.2, 0.25, 0.3, 0.35), (0.06, 0.1, 0.12, 0.16, 0.2)),
    ),
    "defocus-blur": Corruption(
        defocus_blur,
        _constants(
            ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
            ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
            ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        ),
    ),
    "gaussian-blur": Corruption(
        gaussian_blur, _constants((1, 2, 3, 4, 6), (0.5, 0.75, 1, 1.25, 1.5), (0.4, 0.6, 0.7, 0.8, 1))
    ),
    "zoom-blur": Corruption(
        zoom_blur,
        _constants(((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)), _SMALL_ZOOMS, _SMALL_ZOOMS),
    ),
    "brightness": Corruption(
        brightness, _constants((0.1, 0.2, 0.3, 0.4, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5), (0.05, 0.1, 0.15, 0.2, 0.3))
    ),
    "contrast": Corruption(
        contrast, _constants((0.4, 0.3, 0.2, 0.1, 0.05), (0.4, 0.3, 0.2, 0.1, 0.05), (0.75, 0.5, 0.4, 0.3, 0.15))
    ),
    "pixelate": Corruption(
        pixelate, _constants((0.6, 0.5, 0.4, 0.3, 0.25), (0.9, 0.8, 0.7, 0.6, 0.5), (0.95, 0.9, 0.85, 0.75, 0.65))
    ),
}


def constants_set(height: int, width: int) -> str:
    """Which set of severities images of this size take: that of the next larger published size of the shorter side."""
    side = min(height, width)
    return "cifar" if side <= 32 else "tiny" if side <= 64 else "imagenet"


@_highest
def corrupt(
    key: PRNGKeyArray, images: UInt8[Array, "N H W Ch"], name: str, severity: int, first: int | Int[Array, ""] = 0
) -> UInt8[Array, "N H W Ch"]:
    """Corrupt images; jit-able with static `name` and `severity`.

    Image i depends on fold_in(key, first + i) and on nothing else: neither on the other images nor on their number.

    Raises:
        DataError: an unknown corruption or a severity outside 1 to 5.
    """
    effect = _checked(name, severity)
    constant = effect.constants[constants_set(*images.shape[1:3])][severity - 1]

    def one(number: Array, image: Array) -> Array:
        changed = effect.apply(jax.random.fold_in(key, number), image.astype(jnp.float32) / 255, constant)
        return jnp.round(255 * jnp.clip(changed, 0.0, 1.0)).astype(jnp.uint8)

    return jax.vmap(one)(first + jnp.arange(len(images)), images)


_corrupt = partial(jax.jit, static_argnames=("name", "severity"))(corrupt)


def corrupt_dataset(key: PRNGKeyArray, dataset: Dataset, name: str, severity: int) -> Dataset:
    """The same classes and indices, with every stored image corrupted once: support and query see the same one.

    Raises:
        DataError: as `corrupt`, or features in place of images.
    """
    if dataset.images.dtype != jnp.uint8:
        raise DataError(f"expected images to corrupt, got features {dataset.image_shape}; try a data set of images")
    images, size = dataset.images, max(1, PIXELS_A_CHUNK // int(np.prod(dataset.images.shape[1:])))
    parts = []
    for start in range(0, len(images), size):
        chunk = images[jnp.clip(jnp.arange(start, start + size), 0, len(images) - 1)]  # one size, compiled once
        parts.append(_corrupt(key, chunk, name, severity, start))
    return dataset._replace(images=jnp.concatenate(parts)[: len(images)])


def parse_corruption(text: str) -> tuple[str, int]:
    """("gaussian-noise", 5) from "gaussian-noise:5".

    Raises:
        DataError: anything else than a known name, a colon and a severity from 1 to 5.
    """
    name, colon, severity = text.partition(":")
    if not colon or not severity.strip().isdecimal():
        raise DataError(f"expected a corruption as NAME:SEVERITY, got {text!r}; try gaussian-noise:5")
    _checked(name, int(severity))
    return name, int(severity)


def _checked(name: str, severity: int) -> Corruption:
    if name not in CORRUPTIONS:
        raise DataError(f"expected the name of a corruption, got {name!r}; try one of {', '.join(CORRUPTIONS)}")
    if severity not in range(1, 6):
        raise DataError(f"expected a severity from 1 to 5, got {severity}; try {name}:5")
    return CORRUPTIONS[name]
