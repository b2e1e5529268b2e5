"""Images of a user: a folder, with a subfolder for every class where they are labelled, or an `.npz` file.

Hidden files and folders are left out; of others that are no images the user is told. Images are brought to the shape
that a model was trained on, as the images of its data set were: a `Prepare` does that.
Colour images in an .npz file that have this very shape are taken to be prepared.
"""

import io
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from fewshot.tasks.arrays import array_names, label_names, read_members
from fewshot.tasks.files import DAMAGE, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
# What Pillow may take a file for, whatever its suffix: a PostScript file would be handed to Ghostscript, a program.
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM")
SYSTEM = ("Thumbs.db", "desktop.ini", "__MACOSX")  # files and folders of systems that do not begin with a dot
DAMAGED_PICTURE = (struct.error, TypeError, OverflowError)  # what Pillow also raises for numbers of a wrong type
HEIC = (".heic", ".heif")
HEIC_HINT = "HEIC is not read: save as JPEG (iPhone: Settings, Camera, Formats, Most Compatible; or heif-convert)"
ORIENTATION = 0x0112  # the Exif tag
MOST_NAMED = 3  # files left out that are named
Shape = tuple[int, int, int]
Prepare = Callable[["Image", Shape], np.ndarray]  # a picture as bytes [H, W, Ch] of that shape


class Images(NamedTuple):
    """Bytes [N, H, W, Ch], or features [N, 1, 1, D], where each came from, and its label, "" where there is none."""

    pixels: np.ndarray
    names: list[str]
    labels: list[str]


def load_labelled(path: str | Path, shape: Shape, prepare: Prepare, strict: bool = True, fewest: int = 2) -> Images:
    """Images of the subfolders of a folder, each named like its class, or arrays `images` and `labels` of an .npz file.

    Files that cannot be read are left out unless `strict`. Raises DataError, also for a folder of fewer classes than
    `fewest`.
    """
    path = Path(path)
    if path.suffix == ".npz":
        arrays = read_arrays(path, ("images", "labels"))
        if arrays["labels"].shape != arrays["images"].shape[:1]:
            shapes = f"images of shape {arrays['images'].shape} and labels of {arrays['labels'].shape}"
            raise DataError(f"expected one label for every image in {path}, got {shapes}")
        return _from_array(path, arrays["images"], labels_of(path, arrays["labels"]), shape, prepare)
    return prepared_files(labelled_files(path, fewest), shape, prepare, strict)


def labelled_files(path: Path, fewest: int = 2) -> list[tuple[Path, str]]:
    """The images in the subfolders of a folder, each with the name of its class. Raises DataError."""
    files = [(file, folder.name) for folder in subfolders(path) for file in _images_of_a_class(folder)]
    classes = sorted({label for _, label in files})
    if len(classes) < fewest:
        got = f"only {classes[0]}" if classes else "no subfolder"
        wanted = "each of two classes or more" if fewest == 2 else "every class"
        raise DataError(f"expected a subfolder of images for {wanted} in {path}, got {got}")
    tell_left_out(path, (file for file, _ in files))
    return files


def load_unlabelled(path: str | Path, shape: Shape, prepare: Prepare, strict: bool = True) -> Images:
    """Images of a folder and all folders in it, one image file, or the array `images` of an .npz file.

    Files that cannot be read are left out unless `strict`. Raises DataError.
    """
    path = Path(path)
    if path.suffix == ".npz":
        images = read_arrays(path, ("images",))["images"]
        return _from_array(path, images, [""] * int(images.size and len(np.atleast_1d(images))), shape, prepare)
    return prepared_files(unlabelled_files(path), shape, prepare, strict)


def unlabelled_files(path: Path) -> list[tuple[Path, str]]:
    """One image file, or those of a folder and all folders in it, each without a label. Raises DataError."""
    files = [path] if path.is_file() else image_files(path)
    if not files:
        raise DataError(f"expected images ({', '.join(SUFFIXES)}) in {path}, got none")
    if path.is_dir():
        tell_left_out(path, files)
    return [(file, "") for file in files]


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


def prepared_files(files: list[tuple[Path, str]], shape: Shape, prepare: Prepare, strict: bool = True) -> Images:
    """Images of files with their labels. Raises DataError for one that cannot be read, or as `readable`."""
    pixels: list[np.ndarray] = []
    files = readable(files, lambda picture: pixels.append(prepare(picture, shape)), strict)
    return Images(np.stack(pixels), [str(file) for file, _ in files], [label for _, label in files])


def readable(
    files: list[tuple[Path, str]], take: Callable[["Image"], None], strict: bool = True
) -> list[tuple[Path, str]]:
    """Those of the files that are pictures, each handed to `take`; of the others one line on the error stream says why.

    Raises DataError where none of them, or none of a class, can be read; where one cannot, if strict.
    """
    kept = []
    for file, label in files:
        try:
            take(read_picture(file))
        except DataError as error:
            if strict or len(files) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        kept.append((file, label))
    empty = sorted({label for _, label in files} - {label for _, label in kept})
    if empty:
        of, count = f"of {empty[0]} " if empty[0] else "", sum(label == empty[0] for _, label in files)
        raise DataError(f"expected pictures {of}that can be read, got {count} files and none of them; replace them")
    return kept


def _from_array(path: Path, images: np.ndarray, labels: list[str], shape: Shape, prepare: Prepare) -> Images:
    if images.ndim not in (3, 4) or not images.size:
        raise DataError(f"expected images [N, H, W] or [N, H, W, Ch] in {path}, got shape {images.shape}")
    images = _bytes(images, path)
    if images.ndim == 4 and images.shape[-1] not in (1, 3, 4):
        raise DataError(f"expected 1, 3 or 4 channels last in {path}, got shape {images.shape}; move the axis there")
    prepared = images.shape[1:] == shape and shape[2] == 3
    pixels = images if prepared else np.stack([prepare(picture_of(image), shape) for image in images])
    return Images(pixels, [f"{path}:{number}" for number in range(len(images))], labels)


def _bytes(images: np.ndarray, path: str | Path) -> np.ndarray:
    """Bytes of bytes or of numbers in [0, 1]. Raises DataError for others."""
    if np.issubdtype(images.dtype, np.floating):
        low, high = float(np.min(images)), float(np.max(images))
        if not (low >= 0 and high <= 1):  # written so that nan is refused
            raise DataError(f"expected numbers within [0, 1] in {path}, got {low} to {high}; remove NaN and rescale")
        images = np.round(255 * images).astype(np.uint8)
    if images.dtype != np.uint8:
        raise DataError(f"expected images as bytes or numbers in [0, 1] in {path}, got {images.dtype}; convert them")
    return images


def picture_of(image: np.ndarray) -> "Image":
    """Bytes [H, W] or [H, W, 1, 3 or 4] as a picture."""
    from PIL import Image

    return _on_paper(Image.fromarray(image.squeeze(-1) if image.ndim == 3 and image.shape[-1] == 1 else image))


@contextmanager
def opened(content: Path | io.BytesIO, name: str | Path) -> Iterator["Image"]:
    """A picture to work with. Raises DataError, which says its name, for one that cannot be read or is too large."""
    from PIL import Image

    try:
        if isinstance(content, Path) and content.exists() and not content.is_file():
            raise OSError("it is no plain file")  # a pipe would be waited for
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # phones take pictures of 108 megapixels
            opening = Image.open(content, formats=FORMATS)
        with opening as picture:
            yield picture
    except DataError:
        raise
    except (*DAMAGE, *DAMAGED_PICTURE, Image.DecompressionBombError) as error:
        reason = HEIC_HINT if Path(name).suffix.lower() in HEIC else error
        raise unreadable(name, reason) from error


def unreadable(name: str | Path, reason: object) -> DataError:
    """The error for a picture that cannot be read."""
    return DataError(f"expected an image in {name}, got one that cannot be read ({reason})")


def read_picture(file: Path) -> "Image":
    """A picture the way up that a camera says it was taken."""
    with opened(file, file) as picture:
        return as_read(picture, file)


def as_read(picture: "Image", name: str | Path) -> "Image":
    """A picture of Pillow's as one of a file is read: upright, grey or RGB of 8 bits, on white paper."""
    return _on_paper(_eight_bits(_upright(picture), name))


def _upright(picture: "Image") -> "Image":
    """Turned as its Exif orientation says; Pillow's own way writes all other tags again, which may be damaged."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    picture.load()  # of a TIFF this turns it, and takes the orientation away
    turn = turns.get(picture.getexif().get(ORIENTATION, 1))
    return picture.copy() if turn is None else picture.transpose(turn)


def _eight_bits(picture: "Image", name: str | Path) -> "Image":
    """Grey, RGB or RGBA of 8 bits. Pillow's own conversion cuts grey numbers of more bits off at 255."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        pixels = np.asarray(picture)
        if 0 < pixels.max(initial=0) < 4096:
            print(f"warning: {name} has 16 bits, of which it uses 12 at most: it is read as dark", file=sys.stderr)
        return Image.fromarray(np.round(pixels / 257).astype(np.uint8))
    if picture.mode in ("I", "F"):
        return Image.fromarray(_bytes(np.asarray(picture), name))
    if picture.mode in ("L", "RGB", "RGBA"):
        return picture
    return picture.convert("L" if picture.mode == "1" else "RGBA")


def _on_paper(picture: "Image") -> "Image":
    """A transparent ground is white."""
    from PIL import Image

    if picture.mode != "RGBA":
        return picture
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Arrays of an .npz file of a user. Raises DataError for one that is damaged or has others."""
    try:
        held = array_names(path)
        if missing := [name for name in names if name not in held]:
            wanted = f"expected the arrays {', '.join(names)} in {path}"
            raise DataError(f"{wanted}, got {', '.join(held[:20]) or 'none'}; it lacks {', '.join(missing)}")
        return read_members(path, names)
    except DataError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise DataError(f"expected an .npz file at {path}, got one that cannot be read ({reason})") from error


def labels_of(path: Path, labels: np.ndarray) -> list[str]:
    """Labels of an .npz file as text. Raises DataError for those that are none."""
    try:
        return label_names(labels)
    except ValueError as error:
        raise DataError(f"expected a label for every entry in {path}, got {error}; leave those out") from error


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        what = "which is neither" if path.exists() else "which does not exist"
        raise DataError(f"expected a folder of images or an .npz file, got {path}, {what}")


def subfolders(path: Path) -> list[Path]:
    """Folders in a folder, by name; those that are hidden or a system's own left out. Raises DataError."""
    _check_folder(path)
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def _images_of_a_class(folder: Path) -> list[Path]:
    files = image_files(folder)
    if not files:
        raise DataError(f"expected images ({', '.join(SUFFIXES)}) in every class, got none in {folder}; remove it")
    return files


def image_files(path: Path) -> list[Path]:
    """The image files in a folder and in all folders in it, by name; hidden ones left out. Raises DataError."""
    return [file for file in _visible_files(path) if file.suffix.lower() in SUFFIXES]


def _visible_files(path: Path) -> list[Path]:
    _check_folder(path)
    found: list[Path] = []
    seen = {os.path.realpath(path)}  # a folder is read once, however many links lead to it, and around
    for name, folders, files in os.walk(path, onerror=_refuse, followlinks=True):
        folder = Path(name)
        kept = []
        for one in sorted(folders, key=lambda one: ((folder / one).is_symlink(), one)):
            real = os.path.realpath(folder / one)
            if not _is_hidden(one) and real not in seen and not _leads_back(folder / one):
                kept.append(one)
                seen.add(real)
        folders[:] = kept
        found += [folder / one for one in files if not _is_hidden(one)]
    # Pipes and devices are no files, nor are links to them; a link that leads nowhere is left to whoever opens it.
    return sorted(file for file in found if file.is_file() or not file.exists())


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"expected a folder that can be read, got {error.filename} ({error.strerror}); change its permissions"
    ) from error


def _leads_back(folder: Path) -> bool:
    """Of a link to a folder that it is in."""
    return folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve())


def _is_hidden(name: str) -> bool:
    """Of a file or a folder that its user did not make."""
    return name.startswith(".") or name in SYSTEM


def tell_left_out(path: Path, used: Iterable[Path]) -> None:
    """Say on the error stream which files of a folder are not read: a photograph in another format would be missed."""
    kept = set(used)
    others = [str(file.relative_to(path)) for file in _visible_files(path) if file not in kept]
    if others:
        more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
        hint = f"; {HEIC_HINT}" if any(Path(other).suffix.lower() in HEIC for other in others) else ""
        print(f"left out of {path}: {', '.join(others[:MOST_NAMED])}{more}{hint}", file=sys.stderr)
