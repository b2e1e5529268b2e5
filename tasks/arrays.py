"""Arrays of `.npz` files that nobody vouches for: numbers and words alone, and never more memory than a file can fill.

NumPy evaluates the header of an array as an expression, and makes room for as many entries as it claims. Here a header
is matched against what NumPy writes, and its shape against the bytes that there are, before anything is made of it.
"""

import math
import re
import struct
import zipfile
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
MAGIC = b"\x93NUMPY"
LONGEST_HEADER, MOST_EMPTY = 10_000, 1 << 20
# Deflated images take a tenth of their size, blank ones a thousandth. Beyond FREE bytes a file may be EXPANSION times
# its size, so that a small file cannot fill the memory.
FREE, EXPANSION = 1 << 28, 100
_ITEM = r"'(?:descr|fortran_order|shape)'\s*:\s*(?:'[^']*'|True|False|\((?:\d{1,18}L?[\s,]*)*\))[\s,]*"
_HEADER = re.compile(r"\s*\{\s*(?:" + _ITEM + r"){3}\}\s*")
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|[SU][1-9]\d{0,5})")


def array_names(path: Path) -> list[str]:
    """The arrays that an `.npz` file says it holds. Raises ValueError, or what DAMAGE lists, for one that is none."""
    if not path.is_file():
        raise ValueError("no such file" if not path.exists() else "no plain file")
    with zipfile.ZipFile(path) as file:
        return [name.removesuffix(".npy") for name in file.namelist()]


def read_members(path: Path, names: tuple[str, ...]) -> Arrays:
    """The named arrays of an `.npz` file, each checked against the zip file's own check sum before it is parsed.

    Raises ValueError with the reason, or what `tasks.files.DAMAGE` lists.
    """
    held = array_names(path)
    missing = [name for name in names if name not in held]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    most = max(FREE, EXPANSION * path.stat().st_size)
    arrays = {}
    with zipfile.ZipFile(path) as file:
        for name in names:
            member = file.getinfo(f"{name}.npy")
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{name} is packed in a way that NumPy does not use")
            if member.file_size > most:
                raise ValueError(f"{name} unpacks to {member.file_size:,} bytes, {most:,} at most are read")
            arrays[name] = parse_array(file.read(member), name)
    return arrays


def parse_array(content: bytes, name: str) -> np.ndarray:
    """The array of an `.npy` file, in this machine's byte order. Raises ValueError."""
    dtype, shape, fortran, start = _parse_header(content, name)
    wanted, found = math.prod(shape) * dtype.itemsize, len(content) - start
    if wanted != found:
        raise ValueError(f"{name} claims the shape {_short(shape)} of {dtype}, {wanted:,} bytes, and has {found:,}")
    flat = np.frombuffer(content, dtype, offset=start)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    return np.array(array, dtype.newbyteorder("="), order="K")


def _parse_header(content: bytes, name: str) -> tuple[np.dtype, tuple[int, ...], bool, int]:
    """dtype, shape, whether columns come first, and where the numbers begin."""
    if content[:6] != MAGIC or content[6:7] not in (b"\1", b"\2", b"\3"):
        raise ValueError(f"{name} is no array as NumPy writes it")
    size = "<H" if content[6] == 1 else "<I"
    begin = 8 + struct.calcsize(size)
    length = struct.unpack(size, content[8:begin].ljust(struct.calcsize(size), b"\0"))[0]
    text = content[begin : begin + min(length, LONGEST_HEADER)].decode("latin-1")
    if length > LONGEST_HEADER or not _HEADER.fullmatch(text):
        raise ValueError(f"{name} has a header that is none: {text[:40]!r}")
    values = dict(re.findall(r"'(\w+)'\s*:\s*('[^']*'|True|False|\([^)]*\))", text))
    described, ordered, shaped = (values.get(key, "") for key in ("descr", "fortran_order", "shape"))
    if not _DTYPE.fullmatch(described.strip("'")):
        raise ValueError(f"{name} holds entries of type {described[:40]}, expected numbers or words")
    if ordered not in ("True", "False") or not shaped.startswith("("):
        raise ValueError(f"{name} has a header that is none: {text[:40]!r}")
    shape = tuple(int(size) for size in re.findall(r"\d+", shaped))
    if len(shape) > 8 or (0 in shape and max(shape) > MOST_EMPTY):
        raise ValueError(f"{name} claims the shape {_short(shape)}")
    return np.dtype(described.strip("'")), shape, ordered == "True", begin + length


def _short(shape: tuple[int, ...]) -> str:
    return str(shape)[:60]


def label_names(labels: np.ndarray) -> list[str]:
    """Labels [N] as text. Raises ValueError for others, and for NaN, which is no label: it is not equal to itself."""
    if labels.ndim != 1:
        raise ValueError(f"labels of shape {labels.shape}")
    if labels.dtype.kind == "f" and not np.isfinite(labels).all():
        raise ValueError("labels that are NaN or infinite")
    return [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in labels.tolist()]
