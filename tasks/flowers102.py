"""Oxford Flowers 102 (Nilsback & Zisserman 2008): 8,189 photographs of 102 kinds of flowers, 40 to 258 each, RGB.

The file holds the middle square of every photograph as a JPEG of 84 x 84 pixels. No few-shot split is published, so
classes are divided by their number as the papers divide CUB: classes 0, 2, 4, ... train (51), 1, 5, 9, ... validate
(26), 3, 7, 11, ... test (25), in the order of the published labels.
"""

import io
import os
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from fewshot.tasks.arrays import Arrays
from fewshot.tasks.episodes import Splits
from fewshot.tasks.files import DAMAGE, Archive, DataError, find_or_convert, read_npz, resolve_root
from fewshot.tasks.photographs import alternate, cached, centre_square, decode, decode_all, divide, named, packed_jpegs

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE, QUALITY = 84, 85
FILE = "flowers102_84.npz"
_URL = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
ARCHIVES = (
    Archive(
        "102flowers.tgz",
        _URL + "102flowers.tgz",
        "2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
        345,
    ),
    Archive(
        "imagelabels.mat",
        _URL + "imagelabels.mat",
        "4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
        1,
    ),
    Archive("setid.mat", _URL + "setid.mat", "46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd", 1),
)
_NAMES = """pink primrose, hard-leaved pocket orchid, canterbury bells, sweet pea, english marigold, tiger lily, moon
orchid, bird of paradise, monkshood, globe thistle, snapdragon, colt's foot, king protea, spear thistle, yellow
iris, globe-flower, purple coneflower, peruvian lily, balloon flower, giant white arum lily, fire lily,
pincushion flower, fritillary, red ginger, grape hyacinth, corn poppy, prince of wales feathers, stemless
gentian, artichoke, sweet william, carnation, garden phlox, love in the mist, mexican aster, alpine sea holly,
ruby-lipped cattleya, cape flower, great masterwort, siam tulip, lenten rose, barbeton daisy, daffodil, sword
lily, poinsettia, bolero deep blue, wallflower, marigold, buttercup, oxeye daisy, common dandelion, petunia,
wild pansy, primula, sunflower, pelargonium, bishop of llandaff, gaura, geranium, orange dahlia, pink-yellow
dahlia, cautleya spicata, japanese anemone, black-eyed susan, silverbush, californian poppy, osteospermum,
spring crocus, bearded iris, windflower, tree poppy, gazania, azalea, water lily, rose, thorn apple, morning
glory, passion flower, lotus lotus, toad lily, anthurium, frangipani, clematis, hibiscus, columbine,
desert-rose, tree mallow, magnolia, cyclamen, watercress, canna lily, hippeastrum, bee balm, ball moss,
foxglove, bougainvillea, camellia, mallow, mexican petunia, bromelia, blanket flower, trumpet creeper,
blackberry lily"""
CLASS_NAMES = tuple(" ".join(name.split()) for name in _NAMES.split(","))


def crop(picture: "Image", side: int) -> UInt8[np.ndarray, "side side 3"]:
    """What makes an image of a photograph: its middle square as the file keeps it, then at `side`."""
    return decode(_kept(centre_square(picture, SIZE)), side, centre_square, "a photograph")


def load(data_root: str | os.PathLike | None = None, size: int | None = None) -> Splits:
    """51 training, 26 validation and 25 test classes, at 84 pixels or at `size`.

    Raises:
        DataError: `flowers102_84.npz` is damaged, or missing and cannot be made.
    """
    root = resolve_root(data_root)
    name, side = named("flowers102", size, SIZE)
    arrays = find_or_convert(root, FILE, ARCHIVES, convert, ("offsets", "labels", "class_names"))

    def make() -> np.ndarray:
        jpegs = packed_jpegs(read_npz(root / FILE, ("jpeg",))["jpeg"], arrays["offsets"])
        return decode_all(jpegs, len(arrays["labels"]), side, centre_square, "flowers102")

    images = cached("flowers102", side, [root / FILE], make)
    return divide(name, images, arrays["labels"], arrays["class_names"], alternate(len(arrays["class_names"])))


def convert(photographs: Path, labels: Path, splits: Path) -> Arrays:
    """Turn the public archives into the arrays of `flowers102_84.npz`.

    The JPEG files that come out depend on the version of the JPEG library, by a grey level or two.

    Raises:
        DataError: a file is not what it is named.
    """
    from scipy.io import loadmat

    try:
        label = loadmat(labels)["labels"].ravel().astype(np.uint8) - 1
        numbers = loadmat(splits)
        split = np.zeros(len(label), np.uint8)
        for position, part in enumerate(("trnid", "valid", "tstid")):
            split[numbers[part].ravel() - 1] = position
        with tarfile.open(photographs) as archive:
            # Members are read in the order of the archive, and kept in that of their numbers.
            jpegs = dict(_jpeg(archive, member) for member in archive if member.name.endswith(".jpg"))
    except (*DAMAGE, tarfile.TarError) as error:
        raise DataError(f"expected the archives of Flowers 102 in {photographs.parent}, got {error}") from error
    if len(jpegs) != len(label):
        raise DataError(f"expected {len(label)} images in {photographs}, got {len(jpegs)}; fetch it again")
    ordered = [jpegs[number] for number in sorted(jpegs)]
    return {
        "jpeg": np.frombuffer(b"".join(ordered), np.uint8),
        "offsets": np.cumsum([0, *map(len, ordered)]),
        "labels": label,
        "class_names": np.array(CLASS_NAMES),
        "official_split": split,
        "split_names": np.array(["trn", "val", "tst"]),
    }


def _jpeg(archive: tarfile.TarFile, member: tarfile.TarInfo) -> tuple[int, bytes]:
    """Number of `jpg/image_NUMBER.jpg`, and its middle square as a JPEG file."""
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name}, which is no file")
    square = decode(file.read(), SIZE, centre_square, member.name)
    return int(Path(member.name).stem.split("_")[1]), _kept(square)


def _kept(square: np.ndarray) -> bytes:
    """The JPEG file that stands for a square."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(square).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
