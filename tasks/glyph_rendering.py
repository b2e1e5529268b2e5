"""Drawing letters from the font files that ship with matplotlib: canonical renderings and random variations.

Every letter is scaled so that the longer side of its ink is SIDE pixels and centred on a CANVAS x CANVAS image, so the
two cases of o, c or x look alike and are found to be one class. Pillow draws at FACTOR times the final resolution.
"""

import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

CANVAS, SIDE, FACTOR = 28, 20, 4
EM = 96  # font size: letters are drawn once at about the size of the enlarged canvas
KEPT_INK = 0.6  # of a letter's ink that thinning leaves at least
FACES = tuple(
    f"DejaVu{family}{style}"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
)


class Variation(NamedTuple):
    """Random changes of n images: degrees, factors, slants, shifts and changes of the stroke width in pixels."""

    rotation: Float[np.ndarray, " n"]
    scale: Float[np.ndarray, " n"]
    shear: Float[np.ndarray, " n"]
    shift: Float[np.ndarray, "n 2"]
    stroke: Float[np.ndarray, " n"]


def random_variation(rng: np.random.Generator, n: int) -> Variation:
    """Rotation +-15 degrees, scale 0.8 to 1.2, shear +-0.2, shift +-2 pixels, stroke +-1 pixel, all uniform."""
    return Variation(
        rotation=rng.uniform(-15, 15, n),
        scale=rng.uniform(0.8, 1.2, n),
        shear=rng.uniform(-0.2, 0.2, n),
        shift=rng.uniform(-2, 2, (n, 2)),
        stroke=rng.uniform(-1, 1, n),
    )


def letters_of(scripts: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """The faces that really hold each letter (code point) whose Unicode name begins with one of `scripts`.

    Cased letters and letters without case count; modifier letters, marks, digits and signs do not.
    """
    faces_of: dict[int, tuple[str, ...]] = {}
    for face in FACES:
        for code in sorted(_codes(face)):
            letter = chr(code)
            is_letter = unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Lo")
            if is_letter and script_of(code) in scripts:
                faces_of[code] = (*faces_of.get(code, ()), face)
    return faces_of


def script_of(code: int) -> str:
    """The first word of the letter's Unicode name, such as LATIN."""
    return unicodedata.name(chr(code), "").split(" ")[0]


def _codes(face: str) -> set[int]:
    """Code points with a glyph of their own; the box that stands for missing glyphs is not one."""
    from fontTools.ttLib import TTFont  # type: ignore[import-untyped]

    with TTFont(_font_path(face), lazy=True) as font:
        return {code for code, glyph in font.getBestCmap().items() if glyph != ".notdef"}


def _font_path(face: str) -> Path:
    from matplotlib import get_data_path

    return Path(get_data_path(), "fonts", "ttf", f"{face}.ttf")


@lru_cache(maxsize=len(FACES))
def _font(face: str) -> Any:
    from PIL import ImageFont

    # The basic layout maps one code point to one glyph, whichever shaping library is installed.
    return ImageFont.truetype(_font_path(face), EM, layout_engine=ImageFont.Layout.BASIC)


def draw_letter(face: str, code: int) -> UInt8[np.ndarray, "h w"]:
    """The ink of a letter with one empty pixel around it.

    Raises:
        ValueError: the glyph is blank.
    """
    from PIL import Image, ImageDraw

    font, letter = _font(face), chr(code)
    left, top, right, bottom = font.getbbox(letter)
    # Two pixels of margin: anti-aliased edges may lie outside the box that the font reports.
    image = Image.new("L", (int(right - left) + 4, int(bottom - top) + 4))
    ImageDraw.Draw(image).text((2 - left, 2 - top), letter, fill=255, font=font)
    ink = image.getbbox()
    if ink is None:
        raise ValueError(f"expected ink in {face} for U+{code:04X}, got a blank glyph")
    return np.asarray(image.crop((ink[0] - 1, ink[1] - 1, ink[2] + 1, ink[3] + 1)))


def canonical(letter: UInt8[np.ndarray, "h w"]) -> UInt8[np.ndarray, "28 28"]:
    """The letter without any random change: the area average of its drawing, centred."""
    from PIL import Image

    height, width = letter.shape
    side = (max(height, width) - 2) * CANVAS / SIDE
    ground = Image.new("L", (int(side) + 4, int(side) + 4))
    left, top = (ground.width - width) // 2, (ground.height - height) // 2
    ground.paste(Image.fromarray(letter), (left, top))
    centre = np.array([left + width / 2, top + height / 2])
    box = (*(centre - side / 2), *(centre + side / 2))
    return np.asarray(ground.resize((CANVAS, CANVAS), Image.Resampling.BOX, box))


def vary(letters: list[UInt8[np.ndarray, "_ _"]], change: Variation) -> UInt8[np.ndarray, "n 28 28"]:
    """One changed image of each drawn letter."""
    angle = np.deg2rad(change.rotation)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    slant = np.tile(np.eye(2), (len(letters), 1, 1))
    slant[:, 0, 1] = change.shear
    back = np.linalg.inv(change.scale[:, None, None] * turn @ slant)
    wide = np.stack([_place(*parts) for parts in zip(letters, back, change.shift, strict=True)])
    wide = change_stroke(wide, change.stroke)
    rows = wide.reshape(-1, FACTOR, CANVAS * FACTOR).sum(1, dtype=np.uint16)
    total = rows.reshape(-1, CANVAS, CANVAS, FACTOR).sum(3, dtype=np.uint16)
    return ((total + FACTOR**2 // 2) // FACTOR**2).astype(np.uint8)


def _place(letter: np.ndarray, back: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The letter on the enlarged canvas: centred, changed by the inverse of `back`, moved by `shift` pixels."""
    from PIL import Image

    size = np.array(letter.shape[::-1])
    # Pillow asks for the map from the new image's coordinates to the old one's.
    back = back * ((size.max() - 2) / (SIDE * FACTOR))
    offset = size / 2 - back @ (CANVAS * FACTOR / 2 + shift * FACTOR)
    coefficients = (*back[0], offset[0], *back[1], offset[1])
    canvas = (CANVAS * FACTOR, CANVAS * FACTOR)
    placed = Image.fromarray(letter).transform(canvas, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return np.asarray(placed)


def change_stroke(
    images: UInt8[np.ndarray, "n size size"], pixels: Float[np.ndarray, " n"]
) -> UInt8[np.ndarray, "n size size"]:
    """Widen or thin the strokes of enlarged images by about `pixels` final pixels in all.

    Thinning stops where less than KEPT_INK of the ink would be left, so that hairlines stay visible.
    """
    steps = np.round(pixels * FACTOR / 2).astype(int)  # both sides move
    least = KEPT_INK * images.sum(axis=(1, 2), dtype=np.int64)
    changed = images.copy()
    for done in range(abs(steps).max(initial=0)):
        diagonal = done % 2 == 1  # a plus and a square in turn make an octagon, nearly a disc
        wider, thinner = np.flatnonzero(steps > done), np.flatnonzero(steps < -done)
        changed[wider] = _spread(changed[wider], np.maximum, diagonal)
        thinned = _spread(changed[thinner], np.minimum, diagonal)
        visible = thinned.sum(axis=(1, 2), dtype=np.int64) >= least[thinner]
        changed[thinner[visible]] = thinned[visible]
    return changed


def _spread(
    images: UInt8[np.ndarray, "n size size"], extreme: np.ufunc, diagonal: bool
) -> UInt8[np.ndarray, "n size size"]:
    """The largest or smallest value among each pixel's 4 (or with the diagonal ones 8) neighbours and itself."""
    down = images.copy()
    extreme(down[:, 1:], images[:, :-1], out=down[:, 1:])
    extreme(down[:, :-1], images[:, 1:], out=down[:, :-1])
    source = down.copy() if diagonal else images
    extreme(down[:, :, 1:], source[:, :, :-1], out=down[:, :, 1:])
    extreme(down[:, :, :-1], source[:, :, 1:], out=down[:, :, :-1])
    return down
