"""Tiny ImageNet (Stanford CS231n; ImageNet's terms of use): 64 x 64 pixels, RGB, the first 120 images of each class.

Of its 200 classes those take part that tieredImageNet (Ren et al. 2018) has too, with its splits, which differ in the
upper levels of WordNet: 61 train, 17 validate, 45 test. About 2% of the images are grey; they become RGB.
"""

import os
import zipfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from fewshot.tasks.arrays import Arrays
from fewshot.tasks.episodes import Splits
from fewshot.tasks.files import DAMAGE, Archive, DataError, check_digest, find_or_convert, read_npz, resolve_root
from fewshot.tasks.photographs import cached, centre_square, decode_all, divide, named, packed_jpegs

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE, IMAGES_PER_CLASS = 64, 120
FILE = "tinyimagenet64.npz"
ARCHIVES = (
    Archive(
        "tiny-imagenet-200.zip",
        "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
        248,
    ),
)
JPEG_SHA256 = "29caeca7ac6ad53892f29d61b7c67f15dab35290f0721b55033494911a9ecd0e"
# WordNet numbers, without their "n", of the classes in each split of tieredImageNet.
TIERED = {
    "train": """01742172 01855672 02002724 02056570 02058221 02094433 02123045 02123394 02124075 02125311 02129165
        02395406 02403003 02410509 02415577 02423022 02437312 02480495 02481823 02486410 02791270 02793495 02802426
        02837789 02841315 02843684 02883205 02927161 02950826 02963159 02988304 03085013 03089624 03404251 03424325
        03447447 03544143 03584254 03617480 03637318 03649909 03662601 03706229 03770439 03804744 03838899 03854065
        03891332 03902125 03970156 03980874 04008634 04023962 04118538 04328186 04356056 04371430 04376876 04417672
        04507155 04540053""",
    "validation": """02099601 02099712 02666196 02814533 02977058 03100240 03179701 03201208 03444034 03670208 03796401
        03977966 03992509 04067472 04070727 04099969 04285008""",
    "test": """01443537 02106662 02165456 02190166 02206856 02226429 02231487 02233338 02236044 02268443 02279972
        02281406 02788148 02795169 02808440 02815834 02823428 02909870 03160309 03930313 03937543 03983396 04398044
        04501370 04560804 04562935 07579787 07583066 07614500 07615774 07715103 07720875 07734744 07747607 07749582
        07753592 07768694 07873807 07875152 07920052 09193705 09246464 09256479 09332890 09428293""",
}


def crop(picture: "Image", side: int) -> UInt8[np.ndarray, "side side 3"]:
    """What makes an image of a photograph: its middle square at the size of the published images, then at `side`."""
    from PIL import Image

    return centre_square(Image.fromarray(centre_square(picture, SIZE)), side)


def load(data_root: str | os.PathLike | None = None, size: int | None = None) -> Splits:
    """61 training, 17 validation and 45 test classes, at 64 pixels or at `size`.

    Raises:
        DataError: `tinyimagenet64.npz` is damaged, or missing and cannot be made.
    """
    root = resolve_root(data_root)
    name, side = named("tinyimagenet", size, SIZE)
    arrays = find_or_convert(root, FILE, ARCHIVES, _convert_checked, ("offsets", "labels", "wnids", "class_names"))
    split = splits_of(arrays["wnids"])
    used = np.flatnonzero((split < len(TIERED))[arrays["labels"]])

    def make() -> np.ndarray:
        jpegs = list(packed_jpegs(read_npz(root / FILE, ("jpeg",))["jpeg"], arrays["offsets"]))
        return decode_all((jpegs[i] for i in used), len(used), side, crop, "tinyimagenet")

    images = cached("tinyimagenet", side, [root / FILE], make)
    return divide(name, images, arrays["labels"][used], arrays["class_names"], split)


def splits_of(wnids: np.ndarray) -> np.ndarray:
    """Position in TIERED of each class [K], 3 for classes that are in no split."""
    position = {f"n{wnid}": number for number, wnids in enumerate(TIERED.values()) for wnid in wnids.split()}
    return np.array([position.get(str(wnid), len(TIERED)) for wnid in wnids], np.uint8)


def _convert_checked(archive: Path) -> Arrays:
    arrays = convert(archive)
    check_digest("Tiny ImageNet", arrays["jpeg"], JPEG_SHA256)
    return arrays


def convert(path: Path) -> Arrays:
    """Turn the public zip file into the arrays of `tinyimagenet64.npz`; JPEG files are kept as they are.

    Raises:
        DataError: the file is no zip file of such images.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = dict(line.split("\t", 1) for line in _read(archive, "words.txt").decode().splitlines() if line)
            members = sorted(member for member in map(_numbered, archive.namelist()) if member)
            kept = [member for member in members if member[1] < IMAGES_PER_CLASS]
            jpegs = [archive.read(member) for _, _, member in kept]
    except DAMAGE as error:
        raise DataError(f"expected a zip file of Tiny ImageNet in {path}, got {error}; fetch it again") from error
    wnids, labels = np.unique([wnid for wnid, _, _ in kept], return_inverse=True)
    return {
        "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
        "offsets": np.cumsum([0, *map(len, jpegs)]),
        "labels": labels.astype(np.uint8),
        "index_in_class": np.array([number for _, number, _ in kept], np.int16),
        "wnids": wnids,
        "class_names": np.array([names[wnid].strip() for wnid in wnids]),
    }


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    found = [member for member in archive.namelist() if PurePosixPath(member).name == name]
    if not found:
        raise ValueError(f"no {name} inside")
    return archive.read(found[0])


def _numbered(member: str) -> tuple[str, int, str] | None:
    """(WordNet number, number in its class, member) of `*/train/WNID/images/WNID_NUMBER.JPEG`, else None."""
    path = PurePosixPath(member)
    if path.suffix != ".JPEG" or len(path.parts) < 4 or path.parts[-4] != "train":
        return None
    wnid, number = path.stem.split("_")
    return wnid, int(number), member
