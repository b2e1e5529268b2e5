"""Weights that PyTorch wrote before version 1.6, read as data: no name in the file is imported and nothing is called.

Such a file holds four pickles (a magic number, the version, facts about the machine, the dictionary of tensors), then
the keys of the storages as a fifth, then every storage as its length (8 bytes) and its numbers. A pickle is a program
for a small stack machine. Python's own `pickle` carries out whatever it says; the machine here knows the few operations
that such files are made of and four names, for which it has its own meaning. Everything else is an error.
"""

import io
import pickletools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
DTYPES: dict[str, np.dtype] = {"torch FloatStorage": np.dtype("<f4"), "torch LongStorage": np.dtype("<i8")}
DICTIONARY, TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
ADVICE = "fetch the file again from its source"
MOST_AXES = 8  # of a tensor
NAMES = (DICTIONARY, TENSOR, *DTYPES)
# What a machine does on a file that is none: too little on the stack, something of another type, an end too early.
DAMAGE = (LookupError, TypeError, ValueError, struct.error)


class WeightsError(ValueError):
    """A file of weights that cannot be used; the message is one line."""


class _Name(NamedTuple):
    """A name that the pickle wanted to import, "module attribute"."""

    text: str


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    length: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Wanted = TypeVar("Wanted")


class _Machine:
    """Stack and memory of one pickle; an operation is a method with the pickle's name of it."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memory: dict[int, object] = {}

    def run(self, stream: io.BytesIO) -> object:
        """The value of the pickle that begins here, after which it leaves the stream. Raises WeightsError, DAMAGE."""
        for operation, argument, _ in pickletools.genops(stream):
            if operation.name == "STOP":
                return self.stack.pop()
            method: Callable[[object], None] | None = getattr(self, f"do_{operation.name}", None)
            if method is None:
                raise WeightsError(
                    f"expected tensors in a file of weights, got the operation {operation.name}; {ADVICE}"
                )
            method(argument)
        raise ValueError("a pickle without an end")

    def push(self, value: object) -> None:
        """A constant."""
        self.stack.append(value)

    do_BININT = do_BININT1 = do_BININT2 = do_LONG1 = do_BINUNICODE = push

    def since_mark(self) -> list[object]:
        """Takes all operands after the last mark off the stack."""
        place = self.marks.pop()
        values = self.stack[place:]
        del self.stack[place:]
        return values

    def do_PROTO(self, version: int) -> None:
        if version != 2:
            raise WeightsError(f"expected pickles of protocol 2 in a file of weights, got {version}; {ADVICE}")

    def do_MARK(self, _: None) -> None:
        self.marks.append(len(self.stack))

    def do_NONE(self, _: None) -> None:
        self.push(None)

    def do_NEWTRUE(self, _: None) -> None:
        self.push(True)

    def do_NEWFALSE(self, _: None) -> None:
        self.push(False)

    def do_EMPTY_DICT(self, _: None) -> None:
        self.push({})

    def do_EMPTY_LIST(self, _: None) -> None:
        self.push([])

    def do_EMPTY_TUPLE(self, _: None) -> None:
        self.push(())

    def do_TUPLE(self, _: None) -> None:
        self.push(tuple(self.since_mark()))

    def do_TUPLE1(self, _: None) -> None:
        self.push((self.stack.pop(),))

    def do_TUPLE2(self, _: None) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self.push((first, second))

    def do_APPENDS(self, _: None) -> None:
        values = self.since_mark()
        _of_type(self.stack[-1], list).extend(values)

    def do_SETITEM(self, _: None) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def do_SETITEMS(self, _: None) -> None:
        values = self.since_mark()
        for key, value in zip(values[::2], values[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: object, value: object) -> None:
        # Words only: Python takes the hash of a deep tuple by recursion in C, without a limit.
        _of_type(self.stack[-1], dict)[_of_type(key, str)] = value

    def do_BINPUT(self, place: int) -> None:
        self.memory[place] = self.stack[-1]

    do_LONG_BINPUT = do_BINPUT

    def do_BINGET(self, place: int) -> None:
        self.push(self.memory[place])

    do_LONG_BINGET = do_BINGET

    def do_GLOBAL(self, text: str) -> None:
        if text not in NAMES:
            raise WeightsError(f"expected tensors in a file of weights, got the name {text[:80]!r}; {ADVICE}")
        self.push(_Name(text))

    def do_REDUCE(self, _: None) -> None:
        arguments, name = _of_type(self.stack.pop(), tuple), _of_type(self.stack.pop(), _Name)
        if name.text == DICTIONARY and not arguments:
            self.push({})
        elif name.text == TENSOR:
            self.push(_tensor(*arguments))
        else:
            raise WeightsError(f"expected tensors in a file of weights, got a call of {name.text!r}; {ADVICE}")

    def do_BUILD(self, _: None) -> None:
        """The version numbers that PyTorch hangs on its dictionary: left out."""
        _of_type(self.stack.pop(), dict)
        _of_type(self.stack[-1], dict)

    def do_BINPERSID(self, _: None) -> None:
        kind, name, key, _, count, view = _of_type(self.stack.pop(), tuple)
        if kind != "storage" or view is not None:
            raise ValueError("a storage of another kind")
        dtype = DTYPES[_of_type(name, _Name).text]
        self.push(_Storage(dtype, _of_type(key, str), _size(count)))


def _of_type(value: object, wanted: type[Wanted]) -> Wanted:
    """Its argument. Raises TypeError for another type."""
    if type(value) is not wanted:
        raise TypeError(f"a {type(value).__name__} in place of a {wanted.__name__}")
    return value


def _size(value: object) -> int:
    size = _of_type(value, int)
    if size < 0:
        raise ValueError("a negative size")
    return size


def _tensor(
    storage: object, offset: object, shape: object, strides: object, _gradient: object, _hooks: object
) -> _Tensor:
    """A tensor that lies within its storage and has no more numbers than it. Raises ValueError or TypeError."""
    axes, held, first = _of_type(shape, tuple), _of_type(storage, _Storage), _size(offset)
    if len(axes) > MOST_AXES:
        raise ValueError(f"a tensor of {len(axes)} axes")
    count, last, steps = 1, first, []
    for size, step in zip(map(_size, axes), map(_size, _of_type(strides, tuple)), strict=True):
        steps.append(step if size > 1 else 0)  # along an axis of length 1 a stride means nothing
        count, last = count * size, last + (size - 1) * steps[-1]
    if not 0 < count <= held.length or last >= held.length:
        raise ValueError("a tensor that is empty or larger than its storage")
    return _Tensor(held, first, axes, tuple(steps))


def read_torch_weights(content: bytes) -> dict[str, np.ndarray]:
    """The tensors of a file by name: read-only views of `content`, float32 or int64.

    Raises:
        WeightsError: the file is no such file, is damaged, or names anything but tensors in a dictionary.
    """
    stream = io.BytesIO(content)
    try:
        if content[:4] == b"PK\x03\x04":
            raise ValueError("a zip file, which later versions write")
        magic, version, machine = (_Machine().run(stream) for _ in range(3))
        if magic != MAGIC or version != PROTOCOL or _of_type(machine, dict).get("little_endian") is not True:
            raise ValueError("another format")
        tensors, keys = _of_type(_Machine().run(stream), dict), _of_type(_Machine().run(stream), list)
        numbers = _storages(content, stream.tell(), tensors, keys)
        return {name: _view(numbers[tensor.storage.key], tensor) for name, tensor in tensors.items()}
    except WeightsError:
        raise
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:80]
        raise WeightsError(f"expected weights as PyTorch wrote them before 1.6, got {reason}; {ADVICE}") from error


def _storages(
    content: bytes, start: int, tensors: Mapping[str, object], keys: Sequence[object]
) -> dict[str, np.ndarray]:
    """The numbers of every storage, whose lengths must fill the file to its last byte."""
    storages = [_of_type(tensor, _Tensor).storage for tensor in tensors.values()]
    declared = {storage.key: storage for storage in storages}
    numbers: dict[str, np.ndarray] = {}
    for key in (_of_type(one, str) for one in keys):
        storage = declared[key]
        (count,) = struct.unpack_from("<q", content, start)
        if count != storage.length or key in numbers:
            raise ValueError(f"a storage of {count} numbers where {storage.length} were announced")
        numbers[key] = np.frombuffer(content, storage.dtype, count, start + 8)
        start += 8 + numbers[key].nbytes
    if start != len(content):
        raise ValueError(f"{len(content)} bytes where the tensors take {start}")
    return numbers


def _view(numbers: np.ndarray, tensor: _Tensor) -> np.ndarray:
    if tensor.storage.length != numbers.size or tensor.storage.dtype != numbers.dtype:
        raise ValueError("two storages of one name")
    strides = tuple(step * numbers.itemsize for step in tensor.strides)
    return np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides, writeable=False)
