"""Random changes of training images that leave their class as it is: pure functions of a key, cheap enough for a CPU.

All geometry is one bilinear resampling. Every image has its own key, folded from its position, so what happens to an
image depends neither on the other images nor on how many there are. Pixel arithmetic is float32 in any precision mode.

Letters: N images, H x W pixels, Ch channels.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt8

from fewshot.tasks.episodes import Images
from fewshot.tasks.files import DataError

KEPT_INK = 0.6  # share of a character's ink that thinning leaves at least
_DRAWS = 12  # uniform numbers an image: fixed, so that switching one change on leaves the others as they were


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random changes, uniform and to both sides; 0 (False) leaves that property alone.

    rotation: degrees. scale: of both sides, as a share (0.2: factors 0.8 to 1.2). stretch: of the width alone.
    shear: columns a row. shift: share of the side. stroke: smallest and largest change of a stroke's width in pixels.
    crop: smallest side of a random window, as a share (1: no crop). flip: mirror every other image on average.
    brightness, contrast, saturation: factors about 1. repeat_border: what lies outside an image is its border instead
    of 0, the ground of characters.
    """

    rotation: float = 0.0
    scale: float = 0.0
    stretch: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    stroke: tuple[float, float] = (0.0, 0.0)
    crop: float = 1.0
    flip: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    repeat_border: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for ranges that would turn an image inside out."""
        shares = (self.scale, self.stretch, self.brightness, self.contrast, self.saturation)
        if not all(0 <= share < 1 for share in shares) or not 0 < self.crop <= 1 or self.stroke[0] > self.stroke[1]:
            raise ValueError(f"expected shares in [0, 1), crop in (0, 1] and stroke as (low, high), got {self}")

    @property
    def moves(self) -> bool:
        """Whether pixels change their place."""
        return any((self.rotation, self.scale, self.stretch, self.shear, self.shift, self.flip, self.crop < 1))


_GEOMETRY = Augmentation(rotation=15.0, scale=0.25, stretch=0.15, shear=0.4, shift=0.07)
_STROKES = Augmentation(stroke=(0.0, 3.0), brightness=0.3)
AUGMENTATIONS = {
    "none": Augmentation(),
    "geometry": _GEOMETRY,  # the two parts of handwriting
    "strokes": _STROKES,
    "handwriting": replace(_GEOMETRY, stroke=_STROKES.stroke, brightness=_STROKES.brightness),
    "photographs": Augmentation(crop=0.7, flip=True, brightness=0.4, contrast=0.4, saturation=0.4, repeat_border=True),
}


class Changes(NamedTuple):
    """What happens to each image: the map of `warp`, the change of its strokes in pixels, the factors of `recolour`."""

    matrix: Float[Array, "N 2 2"]
    offset: Float[Array, "N 2"]
    stroke: Float[Array, " N"]
    factors: Float[Array, "N 3"]


def augment(key: PRNGKeyArray, images: Images, augmentation: Augmentation) -> Images:
    """Change every image at random; jit-able with a static `augmentation`. Image i depends on fold_in(key, i) alone.

    Raises:
        DataError: features in place of images, and changes of them asked for.
    """
    if augmentation == Augmentation(repeat_border=augmentation.repeat_border):
        return images
    if images.dtype != jnp.uint8:
        raise DataError(f"expected images of bytes to change at random, got {images.dtype}; try the augmentation none")
    n, height, width, _ = images.shape
    changes = draw_changes(key, n, (height, width), augmentation)
    moved = images.astype(jnp.float32)
    if augmentation.moves:
        moved = warp(images, changes.matrix, changes.offset, augmentation.repeat_border)
    if augmentation.stroke != (0.0, 0.0):
        moved = change_stroke(moved, changes.stroke, most=max(map(abs, augmentation.stroke)))
    if augmentation.brightness or augmentation.contrast or augmentation.saturation:
        moved = recolour(moved, changes.factors)
    return jnp.round(jnp.clip(moved, 0, 255)).astype(jnp.uint8)


def draw_changes(key: PRNGKeyArray, n: int, size: tuple[int, int], augmentation: Augmentation) -> Changes:
    """Random changes of n images of H x W pixels within the ranges of `augmentation`."""

    def draw(number: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(key, number), (_DRAWS,), jnp.float32, -1.0, 1.0)

    u = jax.vmap(draw)(jnp.arange(n))
    a, sides = augmentation, jnp.asarray(size[::-1], jnp.float32)
    window = 1 - (1 - a.crop) * 0.5 * (1 + u[:, 0])
    mirror = jnp.where(u[:, 1] < 0, -1.0, 1.0) if a.flip else jnp.ones(n, jnp.float32)
    scale = (1 + a.scale * u[:, 2]) / window
    width = scale * (1 + a.stretch * u[:, 3]) * mirror
    matrix = inverse_affine(jnp.deg2rad(a.rotation * u[:, 4]), width, scale, a.shear * u[:, 5])
    # Both are moves of the window over the original: anywhere inside for a crop, up to `shift` beyond it otherwise.
    reach = a.shift + 0.5 * (1 - window[:, None])
    low, high = a.stroke
    factors = 1 + jnp.asarray([a.brightness, a.contrast, a.saturation], jnp.float32) * u[:, 8:11]
    return Changes(matrix, reach * u[:, 6:8] * sides, low + (high - low) * 0.5 * (1 + u[:, 11]), factors)


def inverse_affine(
    angle: Float[Array, " N"], width: Float[Array, " N"], height: Float[Array, " N"], shear: Float[Array, " N"]
) -> Float[Array, "N 2 2"]:
    """New coordinates (x, y) to old ones, for: scale by (width, height), x += shear y, turn counter-clockwise.

    Written out, entry by entry: exact where nothing changes, and not rounded as an accelerator rounds matrix products.
    """
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    top = [(cos - shear * sin) / width, (-sin - shear * cos) / width]
    return jnp.stack([jnp.stack(top, axis=-1), jnp.stack([sin / height, cos / height], axis=-1)], axis=-2)


def warp(
    images: UInt8[Array, "N H W Ch"],
    matrix: Float[Array, "N 2 2"],
    offset: Float[Array, "N 2"],
    repeat_border: bool = False,
) -> Float[Array, "N H W Ch"]:
    """Bilinear resampling: the new pixel at p is the old image at A (p - c) + c + offset, c its centre; p = (x, y).

    Outside an image is 0, or its border repeated. The four neighbours are gathered at once, as the bytes of one word:
    gathers are what a CPU is slow at.
    """
    n, height, width, channels = images.shape
    x, y = _old_coordinates(matrix, offset, height, width)
    inside = 1.0 if repeat_border else 0.0  # coordinates count from the frame of one pixel that is added below
    x, y = (jnp.clip(at + 1, inside, side + 1 - inside) for at, side in ((x, width), (y, height)))
    column, row = (jnp.minimum(jnp.floor(at), side) for at, side in ((x, width), (y, height)))
    words = _neighbours(images).reshape(n, (height + 1) * (width + 1), channels)
    place = (row * (width + 1) + column).astype(jnp.int32).reshape(n, -1)
    right, below = ((at - first).reshape(n, -1, 1) for at, first in ((x, column), (y, row)))
    # Barriers: fused into one loop, all of this would be computed anew for every word and every byte that is read.
    words, place, right, below = jax.lax.optimization_barrier((words, place, right, below))
    word = jax.vmap(lambda image, at: image.at[at].get(mode="promise_in_bounds"))(words, place)
    word = jax.lax.optimization_barrier(word)
    pixel = [((word >> shift) & 0xFF).astype(jnp.float32) for shift in (0, 8, 16, 24)]
    upper = pixel[0] + right * (pixel[1] - pixel[0])
    lower = pixel[2] + right * (pixel[3] - pixel[2])
    return (upper + below * (lower - upper)).reshape(images.shape)


def _old_coordinates(matrix: Array, offset: Array, height: int, width: int) -> tuple[Array, Array]:
    """x and y [N, H, W] in the old image of every pixel of the new one."""
    centre_x, centre_y = (width - 1) / 2, (height - 1) / 2
    across = jnp.arange(width, dtype=jnp.float32) - centre_x
    down = (jnp.arange(height, dtype=jnp.float32) - centre_y)[:, None]
    entry = matrix[:, :, :, None, None]
    x = entry[:, 0, 0] * across + entry[:, 0, 1] * down + (offset[:, 0, None, None] + centre_x)
    y = entry[:, 1, 0] * across + entry[:, 1, 1] * down + (offset[:, 1, None, None] + centre_y)
    return x, y


def _neighbours(images: Array) -> Array:
    """Every pixel of the images framed by 0, with those right, below and below right of it, as the bytes of a word."""
    framed = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0))).astype(jnp.uint32)
    left, right = framed[:, :, :-1], framed[:, :, 1:]
    pair = left | (right << 8)
    return pair[:, :-1] | (pair[:, 1:] << 16)


def change_stroke(
    images: Float[Array, "N H W Ch"], pixels: Float[Array, " N"], most: float = 2.0
) -> Float[Array, "N H W Ch"]:
    """Widen (pixels > 0) or thin bright strokes by about `pixels` in all, `most` at most (static).

    A step of two pixels is the maximum, or minimum, over each pixel's neighbours; part of a step is a mixture. Thinning
    stops where less than KEPT_INK of the ink would be left, so that hairlines stay visible.
    """
    sign = jnp.where(pixels < 0, -1.0, 1.0).astype(jnp.float32)[:, None, None, None]
    least = KEPT_INK * _total(images)
    images = sign * images  # thinning is widening the ground
    for step in range(math.ceil(most / 2)):
        change = _spread(images, diagonal=step % 2 == 1) - images
        amount = jnp.clip(jnp.abs(pixels) / 2 - step, 0.0, 1.0)[:, None, None, None]
        lost, spare = _total(change), -_total(images) - least
        too_thin = (sign < 0) & (amount * lost > spare)
        images = images + jnp.where(too_thin, spare / jnp.maximum(lost, 1.0), amount) * change
    return sign * images


def _total(images: Array) -> Array:
    return jnp.sum(images, axis=(1, 2, 3), keepdims=True)


def _spread(images: Array, diagonal: bool) -> Array:
    """The largest value among each pixel's 4 (or with the diagonal ones 8) neighbours and itself."""
    framed = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    middle = framed[:, :, 1:-1]
    across = jnp.maximum(jnp.maximum(framed[:, :, :-2], framed[:, :, 2:]), middle)
    source = across if diagonal else middle
    return jnp.maximum(jnp.maximum(source[:, :-2], source[:, 2:]), across[:, 1:-1])


def recolour(images: Float[Array, "N H W Ch"], factors: Float[Array, "N 3"]) -> Float[Array, "N H W Ch"]:
    """Multiply brightness, contrast (about the image's mean), saturation (about the pixel's mean), in that order."""
    brightness, contrast, saturation = (factors[:, i, None, None, None] for i in range(3))
    mean = jnp.mean(images, axis=(1, 2, 3), keepdims=True)
    channels = images.shape[3]
    grey = sum(images[..., i : i + 1] for i in range(channels)) / channels  # a mean over so short an axis is slow
    return brightness * (mean + contrast * (grey + saturation * (images - grey) - mean))
