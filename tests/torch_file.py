"""Writes weights as PyTorch did before version 1.6, operation by operation, so that tests need no PyTorch.

`OPERATIONS` hold all that a pickle is made of; a test that wants a damaged or a malicious file puts in others.
"""

import struct

MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
VERSION = b"\x80\x02M\xe9\x03."
STORAGES = {"float32": "torch\nFloatStorage", "int64": "torch\nLongStorage"}


def word(text):
    content = text.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def number(value):
    return b"J" + struct.pack("<i", value)


def name(text):
    return b"c" + text.encode() + b"\n"


def group(*parts):
    return b"(" + b"".join(parts) + b"t"


def pickled(*parts):
    return b"\x80\x02" + b"".join(parts) + b"."


def facts(little=True):
    return pickled(b"}", word("little_endian"), b"\x88" if little else b"\x89", b"s")


def storage(key, dtype, count, view=b"N"):
    return group(word("storage"), name(STORAGES[dtype]), word(key), word("cpu"), number(count), view) + b"Q"


def tensor(key, array, *, offset=0, shape=None, strides=None, count=None):
    """The call that makes a tensor; what is not given is the array's own."""
    shape = array.shape if shape is None else shape
    steps = [step // array.itemsize for step in array.strides] if strides is None else strides
    empty = name("collections\nOrderedDict") + b")R"
    arguments = group(
        storage(key, array.dtype.name, array.size if count is None else count),
        number(offset),
        group(*map(number, shape)),
        group(*map(number, steps)),
        b"\x89",
        empty,
    )
    return name("torch._utils\n_rebuild_tensor_v2") + arguments + b"R"


def dictionary(entries):
    """An ordered dictionary with the version numbers that PyTorch hangs on it."""
    items = b"".join(word(key) + value for key, value in entries.items())
    versions = b"}" + word("_metadata") + b"}s"
    return name("collections\nOrderedDict") + b")R(" + items + b"u" + versions + b"b"


def keys(names):
    return pickled(b"](", *map(word, names), b"e")


def numbers(array):
    """A storage: its length and what the array's memory holds."""
    return struct.pack("<q", array.size) + array.tobytes(order="A")


def torch_file(arrays, calls=None):
    """The file of arrays by name; `calls` replaces what makes some of them."""
    entries = {key: tensor(key, array) for key, array in arrays.items()} | (calls or {})
    parts = [MAGIC, VERSION, facts(), pickled(dictionary(entries)), keys(arrays), *map(numbers, arrays.values())]
    return b"".join(parts)
