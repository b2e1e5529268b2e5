"""Pictures as a pretrained network wants them, RGB bytes of one size, and the network on chunks of them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8

if TYPE_CHECKING:
    from PIL.Image import Image

# Of Pillow's images, or an array [N, H, W, 3] of bytes or of numbers in [0, 1]; others are an EncoderError.
Pictures = Sequence[Any] | np.ndarray


class EncoderError(ValueError):
    """An encoder that cannot be had, or pictures that it cannot read; the message is one line."""


def missing_extra(what: str, extra: str) -> EncoderError:
    """The error of a package that is not installed."""
    return EncoderError(f'expected {what}, got no such package; try pip install "bayesian-few-shot[{extra}]"')


class Preparation(NamedTuple):
    """How pictures become [side, side, 3] bytes, and bytes numbers: (bytes - mean) / deviation, each [R, G, B].

    The short side of a picture becomes `short` pixels by bicubic interpolation, of which the middle square is kept.
    """

    side: int
    short: int
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]

    def describe(self) -> str:
        """All that features depend on, with a version of the code: raise it when a change of it changes a byte."""
        return f"1-{self.side}-{self.short}-{self.mean}-{self.deviation}"

    def one(self, picture: "Image") -> UInt8[np.ndarray, "side side 3"]:
        """A picture, the way up that it is seen. Raises EncoderError for one of another kind of pixels."""
        from PIL.Image import Resampling

        rgb = _rgb(picture)
        scale = min(rgb.size) / self.short  # pixels of the picture for one of the result
        left, top = (max(0.0, (length - scale * self.side) / 2) for length in rgb.size)
        # Cut out and resized in one: a long thin picture never becomes large, and nothing is rounded to whole pixels.
        box = (left, top, rgb.width - left, rgb.height - top)
        return np.asarray(rgb.resize((self.side, self.side), Resampling.BICUBIC, box))

    def all(self, pictures: Pictures) -> UInt8[np.ndarray, "N side side 3"]:
        """Pictures, or an array of them; an array of this very size is taken to be prepared. Raises EncoderError."""
        if isinstance(pictures, np.ndarray):
            pictures = self._of_array(pictures)
        if isinstance(pictures, np.ndarray):
            return pictures
        prepared = [self.one(picture) for picture in pictures]
        return np.stack(prepared) if prepared else np.empty((0, self.side, self.side, 3), np.uint8)

    def _of_array(self, array: np.ndarray) -> "np.ndarray | list[Image]":
        from PIL import Image

        if array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1:
            array = np.round(255 * array).astype(np.uint8)
        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape[1:]:
            wanted = "pictures [N, H, W, 3] as bytes or numbers in [0, 1]"
            raise EncoderError(f"expected {wanted}, got {array.dtype} {array.shape}; convert them")
        prepared = array.shape[1:3] == (self.side, self.side)
        return array if prepared else [Image.fromarray(one) for one in array]


def _rgb(picture: "Image") -> "Image":
    """Three colours of 8 bits; what is transparent is white. Raises EncoderError for other numbers."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        picture = Image.fromarray(np.round(np.asarray(picture) / 257).astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise EncoderError(f"expected a picture of 8 or 16 bits, got mode {picture.mode!r}; convert it to RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


class FrozenEncoder:
    """An `Encoder` around `apply`, which turns prepared pictures [chunk, side, side, 3] into features [chunk, D].

    The last chunk is filled up with its last picture, so that `apply` sees one shape only.
    """

    def __init__(
        self,
        name: str,
        preparation: Preparation,
        features: int,
        identity: str,
        apply: Callable[[np.ndarray], Any],
        chunk: int,
    ):
        if chunk < 1:
            raise ValueError(f"chunk must be 1 or more, got {chunk}")
        self.name, self.features, self.identity = name, features, identity
        self.preparation, self.image_size = preparation, preparation.side
        self._apply, self._chunk = apply, chunk

    def prepare(self, pictures: Pictures) -> UInt8[np.ndarray, "N side side 3"]:
        """Pictures as the squares that the network sees. Raises EncoderError for what are none."""
        return self.preparation.all(pictures)

    def encode(self, pictures: Pictures) -> Float32[np.ndarray, "N D"]:
        """Features [N, D] of pictures, or of squares that `prepare` made.

        Raises:
            EncoderError: something is no picture, or the network returns another shape or numbers that are not finite.
        """
        parts = [self._encode(pictures[start : start + self._chunk]) for start in range(0, len(pictures), self._chunk)]
        kept = [np.asarray(part)[:count] for part, count in parts]  # after all were begun: work and preparation overlap
        features = np.concatenate(kept).astype(np.float32) if kept else np.empty((0, self.features), np.float32)
        if features.shape != (len(pictures), self.features) or not np.isfinite(features).all():
            wanted = f"finite features {(len(pictures), self.features)}"
            raise EncoderError(f"expected {wanted} of {self.name}, got {features.shape} or NaN; try another encoder")
        return features

    def _encode(self, pictures: Pictures) -> tuple[Any, int]:
        pixels = self.prepare(pictures)
        count = len(pixels)
        return self._apply(np.concatenate([pixels, np.repeat(pixels[-1:], self._chunk - count, axis=0)])), count
