"""Run folders as somebody else may have left them: a whole one made without training, and ways to damage it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import numpy as safetensors

from fewshot.training import run as runs
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig, resolve

VALUES = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**30, 0.5, -0.5, 1e30, 1e300, "", "x", "auto", "none", "exact",
    "\x1b[2J", "\0", "a" * 10_000, [], [1], [[]], ["x"], {}, {"a": 1}, {"a": {}},
]  # fmt: skip
RAW = ["NaN", "Infinity", "-Infinity", "1e999", "[" * 100_000, "9" * 5000]  # as they stand in the file


def make(path: Path) -> Path:
    """The folder of a run that was begun and exported."""
    asked = RunConfig(
        dataset="folder:/somewhere", likelihood="gaussian", backbone="mlp", way=3, settings={"backbone.width": 4}
    )
    config = replace(resolve(asked), query=2)
    classes = {split: ["a", "b"] for split in ("train", "validation", "test")}
    stored = {**config.to_json(), "image_shape": [4, 4, 1], "environment": {"jax": "1"}, "classes": classes}
    directory = run_directory.create(path, stored)
    runs.export(directory, runs.build_run(config, (4, 4, 1)), 5)
    directory.append_metrics(0, {"loss": 1.0, "seconds": 0.5, "episodes": 0, "validation_accuracy": 0.2})
    return path


def leaves(value: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where every value of a JSON text stands, those that hold others among them."""
    if at:
        yield at
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from leaves(one, (*at, key))


def altered(text: str, at: tuple, raw: str) -> str:
    """The JSON text with another one in a place."""
    whole = json.loads(text)
    holder = whole
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = "@@@"
    return json.dumps(whole).replace('"@@@"', raw)


def alterations(text: str) -> list[tuple[tuple, str]]:
    """Every place of a JSON text with every value."""
    raws = [json.dumps(value) for value in VALUES] + RAW
    return [(at, raw) for at in leaves(json.loads(text)) for raw in raws]


def with_weights(path: Path, change: Any) -> None:
    """Write the exported weights again as `change` leaves their arrays, by name."""
    file = path / "weights.safetensors"
    arrays = safetensors.load(file.read_bytes())
    change(arrays)
    file.write_bytes(safetensors.save({name: np.asarray(array) for name, array in arrays.items()}))
