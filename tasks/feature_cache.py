"""Features of pictures that a frozen network computed once, kept by what they depend on.

An entry is a file `ENCODER/PICTURE.npz`: the SHA-256 sums of the encoder's identity (its name, weights, preparation and
version) and of the picture as the network sees it. So a file that was renamed is found again, one that was changed is
not, and no entry ever has to be dropped for being old.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, UInt8

from fewshot.tasks.files import DataError, cache_folder, read_npz, write_npz
from fewshot.tasks.images import Images, readable

BLOCK = 256  # pictures that are held in memory, and whose features are kept, at a time


@runtime_checkable
class PictureEncoder(Protocol):
    """What the cache asks of an encoder: `models.networks.Encoder` has it."""

    name: str
    features: int
    identity: str

    def prepare(self, pictures: Any) -> UInt8[np.ndarray, "N side side 3"]:
        """Pictures as the network sees them."""
        ...

    def encode(self, pictures: Any) -> Float32[np.ndarray, "N D"]:
        """Features of prepared pictures."""
        ...


class FeatureCache:
    """Features by picture in a folder, by default the user's cache folder; several processes may share it.

    say: told before pictures pass the encoder, a block at a time, what may take some seconds.
    """

    def __init__(self, folder: Path | None = None, say: Callable[[str], None] | None = None):
        self.folder = cache_folder() / "features" if folder is None else folder
        self._say, self._told = say, False

    def encode(self, encoder: PictureEncoder, pictures: Sequence[Any] | np.ndarray) -> Float32[np.ndarray, "N D"]:
        """Features [N, D] of pictures, of which those that were never seen go through the encoder.

        Raises what the encoder raises. Where nothing can be written it says so once, and everything is computed.
        """
        blocks = [
            self._block(encoder, encoder.prepare(pictures[start : start + BLOCK]))
            for start in range(0, len(pictures), BLOCK)
        ]
        return np.concatenate(blocks) if blocks else np.empty((0, encoder.features), np.float32)

    def encode_files(self, encoder: PictureEncoder, files: list[tuple[Path, str]], strict: bool = True) -> Images:
        """Features [N, 1, 1, D] of image files with their labels, in the place of images.

        Files that cannot be read are left out unless `strict`. Raises DataError as `tasks.images.readable` does.
        """
        parts = [np.empty((0, encoder.features), np.float32)]
        waiting: list[np.ndarray] = []

        def encode_waiting() -> None:
            if waiting:
                parts.append(self._block(encoder, np.concatenate(waiting)))
                waiting.clear()

        def take(picture: Any) -> None:
            waiting.append(encoder.prepare([picture]))
            if len(waiting) == BLOCK:
                encode_waiting()

        kept = readable(files, take, strict)
        encode_waiting()
        return Images(np.concatenate(parts)[:, None, None], [str(file) for file, _ in kept], [one for _, one in kept])

    def _block(self, encoder: PictureEncoder, pixels: np.ndarray) -> np.ndarray:
        paths = [self.path(encoder, one) for one in pixels]
        first = {path: number for number, path in reversed(list(enumerate(paths)))}  # equal pictures once
        found = {path: _read(path, encoder.features) for path in first}
        known = {path: features for path, features in found.items() if features is not None}
        missing = [path for path in first if path not in known]
        if missing:
            if self._say:
                self._say(f"new pictures to encode: {len(missing)}")
            computed = encoder.encode(pixels[[first[path] for path in missing]])
            for path, features in zip(missing, computed, strict=True):
                known[path] = features
                self._write(path, features)
        return np.stack([known[path] for path in paths])

    def path(self, encoder: PictureEncoder, pixels: UInt8[np.ndarray, "side side 3"]) -> Path:
        """Where the features of one prepared picture are kept."""
        identity = hashlib.sha256(encoder.identity.encode()).hexdigest()
        picture = hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()
        return self.folder / identity / f"{picture}.npz"

    def _write(self, path: Path, features: np.ndarray) -> None:
        try:
            write_npz(path, {"features": features}, compress=False)
        except DataError as error:
            if not self._told:
                print(f"features will be computed again next time: {error}", file=sys.stderr)
            self._told = True


def _read(path: Path, width: int) -> np.ndarray | None:
    """The features of an entry; None where there is none, or one that is damaged."""
    if not path.exists():
        return None
    try:
        features = read_npz(path, ("features",))["features"]
    except DataError:
        return None  # it is computed and written again
    valid = features.shape == (width,) and features.dtype == np.float32 and np.isfinite(features).all()
    return features if valid else None
