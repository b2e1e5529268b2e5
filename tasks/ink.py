"""Photographs of ink on paper, made into what networks for characters are trained on.

Light ink on a black ground, a character in the middle, of the size and the stroke width of the training images. Whether
a picture needs that is decided from the picture: one whose ground is flat and black or white, as that of scans, stays
as `whole` makes it.

A photograph is read as B - d m + noise: B is the light on the paper, a quadratic surface, which is fitted by least
squares to what is not ink, again and again; m is the ink, 0 to 1; d by how much it is darker, or lighter, than paper.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy  # not its parts, which are loaded at their first use: programs start sooner
from jaxtyping import Bool, Float, Shaped, UInt8

from fewshot.tasks.images import Shape, whole

if TYPE_CHECKING:
    from PIL.Image import Image

FLAT = 16  # levels of grey by which the ground of a scan departs from black or white
FLAT_BORDER = 0.7  # of the border at least: strokes touch it, but 0.76 is left in each of 89,288 images of characters
WORKING_SIDE = 256  # pixels of the longer side while a photograph is read
ROUNDS = 8  # fits of the light
FAR = 2.5  # standard deviations of the noise from which a pixel is no paper
SPECK = 0.02  # of the largest stroke: what is smaller is dirt
FAINT = 5.0  # standard deviations that ink differs from paper by at least


class Style(NamedTuple):
    """How characters lie in training images of 28 x 28 pixels: their longer side and the width of their strokes."""

    side: float
    stroke: float


# Medians over every 40th image of Omniglot and every 30th training image of the glyphs; of EMNIST the networks see none
# in training. Strokes were measured at four times the size.
STYLES = {"omniglot": Style(18, 1.5), "omniglot-emnist": Style(18, 1.5), "glyphs": Style(20, 2.8)}
STYLE_SIDE = 28
# Shares of pixels above half of the light: all but one in 1,000 images of Omniglot, EMNIST and glyphs lie between.
COVERED = (0.003, 0.49)


class InkPreparation:
    """How pictures become images for networks that were trained on the characters of a name in STYLES.

    photographs: how many of the pictures so far were taken for photographs of ink, and read as such.
    """

    def __init__(self, name: str):
        self.style, self.photographs = STYLES[name], 0

    def __call__(self, picture: "Image", shape: Shape) -> UInt8[np.ndarray, "H W Ch"]:
        """The image of a picture; that of `whole` where it is a scan, or where no ink is found."""
        found = character(picture, shape, self.style) if is_photograph(picture) else None
        self.photographs += found is not None
        return whole(picture, shape) if found is None else found


def unlike_characters(dataset: str, names: Sequence[str], images: Shaped[np.ndarray, "N H W Ch"]) -> list[str]:
    """A line for each image that does not look like the characters of a data set, where its name is in STYLES."""
    messages = []
    for name, image in zip(names, images, strict=True) if dataset in STYLES else ():
        covered = float((image > 127).mean())
        if not COVERED[0] <= covered <= COVERED[1]:
            messages.append(
                f"{name} does not look like the characters of {dataset}: strokes cover {covered:.1%} of it, in "
                f"training {COVERED[0]:.1%} to {COVERED[1]:.0%}; look at it, or leave it out"
            )
    return messages


def is_photograph(picture: "Image") -> bool:
    """Whether the ground at the border is neither flat black nor flat white."""
    pixels = np.asarray(picture.convert("L")).astype(int)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return bool(max((border <= FLAT).mean(), (border >= 255 - FLAT).mean()) < FLAT_BORDER)


def character(picture: "Image", shape: Shape, style: Style) -> UInt8[np.ndarray, "H W Ch"] | None:
    """The ink of a photograph, light on black, as large and as thick as in training; None where there is no ink."""
    from PIL.Image import Resampling

    grey = picture.convert("L")
    grey.thumbnail((WORKING_SIDE, WORKING_SIDE), Resampling.BOX)
    strength = ink_of(np.asarray(grey, np.float64))
    if strength is None:
        return None
    rows, columns = (np.flatnonzero((strength > 0).any(axis)) for axis in (1, 0))
    cut = strength[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    side, stroke = (min(shape[:2]) / STYLE_SIDE * one for one in style)
    thick = thickened(cut, wanted_width(max(cut.shape), stroke_width(cut > 0.5), side, stroke))
    return centred(thick, side / max(thick.shape), shape)


def ink_of(grey: Float[np.ndarray, "H W"]) -> Float[np.ndarray, "H W"] | None:
    """m [H, W], 0 for paper; None where nothing differs from it by more than the noise."""
    light, noise = paper(grey)
    difference = scipy.ndimage.gaussian_filter(light - grey, 0.7)  # positive where darker than the paper
    lower, upper = np.quantile(difference, [0.005, 0.995])
    difference = difference if upper >= -lower else -difference
    threshold = otsu(np.maximum(difference, 0))
    mask = without_specks(difference > threshold)
    if not mask.any() or np.median(difference[mask]) < FAINT * noise:
        return None
    level = np.median(difference[mask])
    near = scipy.ndimage.binary_dilation(mask, iterations=2)
    return np.where(near, np.clip((difference - threshold / 2) / (level - threshold / 2), 0, 1), 0)


def paper(grey: Float[np.ndarray, "H W"]) -> tuple[Float[np.ndarray, "H W"], float]:
    """The light on the paper [H, W], quadratic in both coordinates, and the standard deviation of the paper about it.

    Pixels that are FAR from the last fit, on the side of the ink or beyond it, take no part in the next.
    """
    y, x = (np.linspace(-1, 1, size) for size in grey.shape)
    v, u = (one.ravel() for one in np.meshgrid(y, x, indexing="ij"))
    terms = np.stack([np.ones_like(u), u, v, u * u, u * v, v * v], axis=1)
    values = grey.ravel()
    kept, fitted, noise = np.ones(len(values), bool), values, 1.0
    for _ in range(ROUNDS):
        fitted = terms @ np.linalg.lstsq(terms[kept], values[kept], rcond=None)[0]
        rest = values - fitted
        noise = max(1.0, 1.4826 * float(np.median(np.abs(rest[kept]))))
        kept = np.abs(rest) < FAR * noise
        if kept.sum() < 10 * terms.shape[1]:
            break
    return fitted.reshape(grey.shape), noise


def otsu(values: Float[np.ndarray, "*shape"]) -> float:
    """The threshold of largest variance between two classes, in the middle where several have it."""
    counts, edges = np.histogram(values, bins=128)
    centres = (edges[1:] + edges[:-1]) / 2
    below, above = np.cumsum(counts)[:-1], counts.sum() - np.cumsum(counts)[:-1]
    sums = np.cumsum(counts * centres)
    gap = sums[:-1] / np.maximum(below, 1) - (sums[-1] - sums[:-1]) / np.maximum(above, 1)
    between = below * above * gap**2
    return float(edges[1:-1][np.isclose(between, between.max(), rtol=1e-6)].mean())


def without_specks(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """The strokes: parts that are large, and that do not touch the border unless the largest one does."""
    parts, count = scipy.ndimage.label(mask, np.ones((3, 3)))
    if count == 0:
        return mask
    sizes = scipy.ndimage.sum_labels(mask, parts, np.arange(1, count + 1))
    outside = np.union1d(np.union1d(parts[0], parts[-1]), np.union1d(parts[:, 0], parts[:, -1]))
    inside = np.setdiff1d(np.arange(1, count + 1), outside)
    candidates = inside if len(inside) and sizes[inside - 1].max() > SPECK * sizes.max() else np.arange(1, count + 1)
    kept = candidates[sizes[candidates - 1] >= SPECK * sizes[candidates - 1].max()]
    return np.isin(parts, kept)


def stroke_width(mask: Bool[np.ndarray, "H W"]) -> float:
    """4 times the mean distance to the ground, less 2: of a bar, in which distances are 1, 2, ..., w / 2, ..., 2, 1."""
    return 4 * float(scipy.ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1][mask].mean()) - 2


def wanted_width(length: float, width: float, side: float, stroke: float) -> float:
    """The width w* of strokes for which a character of that length is `side` long and its strokes `stroke` wide.

    Thickened to w* it is length + w* - width long, so w* / (length + w* - width) = stroke / side.
    """
    return stroke * (length - width) / (side - stroke)


def thickened(ink: Float[np.ndarray, "H W"], wanted: float) -> Float[np.ndarray, "h w"]:
    """Strokes as wide as wanted, where they are thinner: made smaller as they are, they would fade."""
    missing = wanted - stroke_width(ink > 0.5)
    radius = round(missing / 2)
    if radius < 1:
        return ink
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return scipy.ndimage.grey_dilation(np.pad(ink, radius), footprint=x * x + y * y <= radius * radius + 0.5)


def centred(ink: Float[np.ndarray, "h w"], scale: float, shape: Shape) -> UInt8[np.ndarray, "H W Ch"]:
    """Ink at that scale in the middle of a black image, its strongest pixels white."""
    from PIL import Image
    from PIL.Image import Resampling

    size = [min(most, max(1, round(scale * side))) for side, most in zip(ink.shape, shape[:2], strict=True)]
    source = Image.fromarray(ink.astype(np.float32))
    small = np.asarray(source.resize((size[1], size[0]), Resampling.BOX if scale < 1 else Resampling.BILINEAR))
    small = small / max(float(np.quantile(small, 0.95)), 0.1)
    canvas = np.zeros(shape, np.uint8)
    top, left = (shape[0] - size[0]) // 2, (shape[1] - size[1]) // 2
    canvas[top : top + size[0], left : left + size[1]] = np.round(255 * np.clip(small, 0, 1))[..., None]
    return canvas
