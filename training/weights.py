"""Nested dicts of arrays as safetensors files: {"a": {"b": x}} is stored under the name "a/b".

Integer keys, which Flax gives to the members of a list, are stored as their digits and read back as integers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, PyTree

from fewshot.tasks.replacing import replace_bytes

WeightTree: TypeAlias = dict[int | str, PyTree]  # nested: names and numbers of members, down to arrays
DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64")
DEEPEST, LONGEST_NAME = 20, 200
DIGEST = "sha256"  # its name in the metadata


def save(path: Path, tree: WeightTree, metadata: Mapping[str, str]) -> None:
    """Write the arrays of `tree`, replacing `path` in one move. Raises: ValueError on keys that cannot be read back."""
    from safetensors import numpy as safetensors

    arrays = {name: np.asarray(array, order="C") for name, array in _flatten(tree)}
    # Not by save_file, whose files are for their owner alone: run folders are shared.
    content = safetensors.save(arrays, {**metadata, DIGEST: _digest(arrays)})
    replace_bytes(path, _in_order(content), follow=False)


def load(path: Path) -> tuple[WeightTree, dict[str, str]]:
    """The nested dict of NumPy arrays and the metadata.

    Raises: ValueError if the file is damaged, or holds names or types that `save` does not write.
    """
    from safetensors import SafetensorError, safe_open

    tree: WeightTree = {}
    arrays: dict[str, np.ndarray] = {}
    if not path.is_file():
        raise ValueError(f"damaged weights: {path} is no plain file")
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind = file.get_slice(name).get_dtype()
                if kind not in DTYPES:
                    raise ValueError(f"damaged weights: {path} holds {name[:80]!r} as {kind}, expected numbers")
                arrays[name] = file.get_tensor(name)
                if not _insert(tree, name, arrays[name]):
                    raise ValueError(f"damaged weights: {path} holds {name[:80]!r}, which is no name of a weight")
            metadata = dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"damaged weights: {path} is no complete safetensors file ({error})") from error
    if metadata.pop(DIGEST, None) not in (None, _digest(arrays)):  # older files have none
        raise ValueError(f"damaged weights: {path} does not hold the numbers that were written")
    return tree, metadata


def _in_order(content: bytes) -> bytes:
    """A file with its metadata sorted, whose order safetensors draws anew: equal weights are equal files."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + content[end:]


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names, types, shapes and numbers."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _flatten(tree: dict, prefix: str = "") -> Iterator[tuple[str, Array | np.ndarray]]:
    for key, value in tree.items():
        if not isinstance(key, int | str) or (isinstance(key, str) and (key.isdecimal() or "/" in key or not key)):
            raise ValueError(f"names of weights must be integers or words without '/', got {key!r}; rename it")
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _insert(tree: WeightTree, name: str, array: np.ndarray) -> bool:
    """Whether there was a place for the array: names have parts, and none is part of another."""
    parts = name.split("/")
    if len(parts) > DEEPEST or not all(part and len(part) <= LONGEST_NAME for part in parts):
        return False
    *parents, last = [int(part) if part.isascii() and part.isdecimal() else part for part in parts]
    branch: PyTree = tree
    for parent in parents:
        branch = branch.setdefault(parent, {})
        if not isinstance(branch, dict):
            return False
    if last in branch:
        return False
    branch[last] = array
    return True
