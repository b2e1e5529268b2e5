"""Nested dicts of arrays as safetensors files: {"a": {"b": x}} is stored under the name "a/b".

Integer keys, which Flax gives to the members of a list, are stored as their digits and read back as integers.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fewshot.tasks.replacing import replace_bytes


def save(path: Path, tree: Mapping[Any, Any], metadata: Mapping[str, str]) -> None:
    """Write the arrays of `tree`, replacing `path` in one move. Raises: ValueError on keys that cannot be read back."""
    from safetensors import numpy as safetensors

    arrays = {name: np.asarray(array, order="C") for name, array in _flatten(tree)}
    # Not by save_file, whose files are for their owner alone: run folders are shared.
    replace_bytes(path, safetensors.save(arrays, dict(metadata)))


def load(path: Path) -> tuple[dict[Any, Any], dict[str, str]]:
    """The nested dict of NumPy arrays and the metadata. Raises: ValueError if the file is damaged."""
    from safetensors import SafetensorError, safe_open

    tree: dict[Any, Any] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                _insert(tree, name, file.get_tensor(name))
            return tree, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"damaged weights: {path} is no complete safetensors file ({error})") from error


def _flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if not isinstance(key, int | str) or (isinstance(key, str) and (key.isdecimal() or "/" in key or not key)):
            raise ValueError(f"names of weights must be integers or words without '/', got {key!r}; rename it")
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _insert(tree: dict[Any, Any], name: str, array: np.ndarray) -> None:
    *parents, last = [int(part) if part.isdecimal() else part for part in name.split("/")]
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = array
