"""Images of a user: a folder, with a subfolder for every class where they are labelled, or an `.npz` file.

They are brought to the shape that a model was trained on, as the images of its data set were: a `Prepare` does that.
Colour images in an .npz file that have this very shape are taken to be prepared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.files import DAMAGE, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
Shape = tuple[int, int, int]
Prepare = Callable[["Image", Shape], np.ndarray]  # a picture as bytes [H, W, Ch] of that shape


class Images(NamedTuple):
    """Bytes [N, H, W, Ch], where each came from, and its label, "" where there is none."""

    pixels: np.ndarray
    names: list[str]
    labels: list[str]


def load_labelled(path: str | Path, shape: Shape, prepare: Prepare) -> Images:
    """Images of the subfolders of a folder, each named like its class, or arrays `images` and `labels` of an .npz file.

    Raises DataError.
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays = _read(path, ("images", "labels"))
        if len(arrays["labels"]) != len(arrays["images"]):
            counts = f"{len(arrays['images'])} images and {len(arrays['labels'])} labels"
            raise DataError(f"expected one label for every image in {path}, got {counts}")
        return _from_array(path, arrays["images"], [str(label) for label in arrays["labels"]], shape, prepare)
    folders = sorted(entry for entry in _entries(path) if entry.is_dir())
    files = [(file, folder.name) for folder in folders for file in image_files(folder)]
    if len({label for _, label in files}) < 2:
        raise DataError(f"expected a folder with a subfolder of images for each of two classes or more, got {path}")
    return prepared_files(files, shape, prepare)


def load_unlabelled(path: str | Path, shape: Shape, prepare: Prepare) -> Images:
    """Images of a folder and all folders in it, one image file, or the array `images` of an .npz file.

    Raises DataError.
    """
    path = Path(path)
    if path.suffix == ".npz":
        images = _read(path, ("images",))["images"]
        return _from_array(path, images, [""] * len(images), shape, prepare)
    files = [path] if path.is_file() else image_files(path)
    if not files:
        raise DataError(f"expected images ({', '.join(SUFFIXES)}) in {path}, got none")
    return prepared_files([(file, "") for file in files], shape, prepare)


def whole(picture: "Image", shape: Shape) -> np.ndarray:
    """A picture resized so that all of it fits, with the rest filled up in the colour of its border.

    Characters are trained as light ink on a dark ground, so a grey picture with a light border is inverted.
    """
    from PIL.Image import Resampling

    height, width, channels = shape
    picture = picture.convert("L" if channels == 1 else "RGB")
    pixels = np.asarray(picture)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    ground = np.median(border, axis=0).astype(np.uint8)
    scale = min(height / picture.height, width / picture.width)
    size = max(1, round(scale * picture.width)), max(1, round(scale * picture.height))
    small = np.asarray(picture.resize(size, Resampling.BOX if scale < 1 else Resampling.BILINEAR))
    canvas = np.empty(shape, np.uint8)
    canvas[:] = ground
    top, left = (height - small.shape[0]) // 2, (width - small.shape[1]) // 2
    canvas[top : top + small.shape[0], left : left + small.shape[1]] = small.reshape(*small.shape[:2], channels)
    return 255 - canvas if channels == 1 and ground > 127 else canvas


def prepared_files(files: list[tuple[Path, str]], shape: Shape, prepare: Prepare) -> Images:
    """Images of files with their labels. Raises DataError for one that cannot be read."""
    pixels = np.stack([prepare(_read_picture(file), shape) for file, _ in files])
    return Images(pixels, [str(file) for file, _ in files], [label for _, label in files])


def _from_array(path: Path, images: np.ndarray, labels: list[str], shape: Shape, prepare: Prepare) -> Images:
    if images.ndim not in (3, 4) or not len(images):
        raise DataError(f"expected images [N, H, W] or [N, H, W, Ch] in {path}, got shape {images.shape}")
    if np.issubdtype(images.dtype, np.floating):
        low, high = float(np.min(images)), float(np.max(images))
        if not (low >= 0 and high <= 1):  # written so that nan is refused
            raise DataError(f"expected numbers within [0, 1] in {path}, got {low} to {high}; remove NaN and rescale")
        images = np.round(255 * images).astype(np.uint8)
    if images.dtype != np.uint8:
        raise DataError(f"expected images as bytes or numbers in [0, 1] in {path}, got {images.dtype}")
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4):
        raise DataError(f"expected 1, 3 or 4 channels last in {path}, got shape {images.shape}; move the axis there")
    prepared = images.shape[1:] == shape and shape[2] == 3
    pixels = images if prepared else np.stack([prepare(picture_of(image), shape) for image in images])
    return Images(pixels, [f"{path}:{number}" for number in range(len(images))], labels)


def picture_of(image: np.ndarray) -> "Image":
    """Bytes [H, W] or [H, W, 1, 3 or 4] as a picture."""
    from PIL import Image

    return _on_paper(Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[-1] == 1 else image))


def _read_picture(file: Path) -> "Image":
    """A picture the way up that a camera says it was taken."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            picture = ImageOps.exif_transpose(opened)
            mode = "L" if picture.mode in ("1", "I", "F", "I;16") else "RGBA"
            return _on_paper(picture.convert(picture.mode if picture.mode in ("L", "RGB", "RGBA") else mode))
    except DAMAGE as error:
        raise DataError(f"expected an image in {file}, got one that cannot be read ({error})") from error


def _on_paper(picture: "Image") -> "Image":
    """A transparent ground is white."""
    from PIL import Image

    if picture.mode != "RGBA":
        return picture
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def _read(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in names if name not in file]
            if missing:
                raise DataError(f"expected the arrays {', '.join(names)} in {path}, got {', '.join(file) or 'none'}")
            return {name: file[name] for name in names}
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(f"expected an .npz file at {path}, got one that cannot be read ({error})") from error


def _entries(path: Path) -> list[Path]:
    if not path.is_dir():
        raise DataError(f"expected a folder of images or an .npz file, got {path}, which is neither")
    return sorted(path.iterdir())


def image_files(path: Path) -> list[Path]:
    """The image files in a folder and in all folders in it, by name; hidden ones left out."""
    _entries(path)
    return sorted(f for f in path.rglob("*") if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
