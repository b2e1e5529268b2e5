"""Checkpoints of the outer loop: any tree of arrays, saved atomically with Orbax and verified before it is read.

A folder of checkpoints holds one folder a step: `<step>/state` (Orbax) and `<step>/manifest.json` with the name, dtype
and shape of every array and the SHA-256 of every file. Orbax alone reads a flipped byte as another number, and casts to
whatever dtype it is asked for; here both are errors. Nothing in it depends on how many devices held the state.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from fewshot.evaluation.text import plain
from fewshot.inference.outer.devices import own, place

_MANIFEST = "manifest.json"
_FORMAT = 1
_STEP = re.compile(r"0|[1-9][0-9]{0,15}")  # the name of a checkpoint, and no other spelling of it
_MOST_MANIFEST = 1 << 24
_BESIDE = 1 << 24  # bytes that Orbax may write beside the arrays themselves


Leaf: TypeAlias = jax.Array | np.ndarray | np.generic
Checkpointer: TypeAlias = Any  # Orbax's, which is imported where it is used


class _Manifest(NamedTuple):
    """What a checkpoint says that it holds: dtype and shape by the name of an array, SHA-256 by that of a file."""

    arrays: dict[str, str]
    sha256: dict[str, str]


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to another kind of run; the message is one line."""


def save(folder: Path, step: int, state: PyTree, keep: int = 2) -> Path:
    """Write `state` as `folder/<step>`, then remove all but the newest `keep` checkpoints.

    The checkpoint appears under its name only when it is complete: a process killed at any time leaves the earlier
    ones intact. Random keys are stored as their data.
    """
    staging = folder / f".staging-{step}"
    for left_over in folder.glob(".staging-*"):
        shutil.rmtree(left_over)
    staging.mkdir(parents=True)
    names, leaves = _flatten(state)
    with _orbax() as checkpointer:
        arrays = {name: _to_numpy(leaf) for name, leaf in zip(names, leaves, strict=True) if leaf.size}
        checkpointer.save(staging.resolve() / "state", arrays)
    manifest = {
        "format": _FORMAT,
        "arrays": {name: _describe(leaf) for name, leaf in zip(names, leaves, strict=True)},
        "sha256": _digests(staging / "state"),
    }
    (staging / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    target = folder / str(step)
    if target.exists():
        shutil.rmtree(target)
    os.replace(staging, target)
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / str(old))
    return target


def steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in `folder`, oldest first; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if _STEP.fullmatch(path.name))


def restore(folder: Path, step: int, example: PyTree, *, any_number: Collection[str] = ()) -> PyTree:
    """The state saved as `folder/<step>`, with the tree structure of `example`, a state of the same run.

    Arrays lie where those of `example` do, on one device or on many. any_number: first parts of the names of arrays
    that may hold numbers that are not finite.

    Raises: CheckpointError if a file is missing, altered or too many, if arrays differ in name, dtype or shape, or hold
    numbers that are not finite.
    """
    checkpoint = folder / str(step)
    manifest = _read_manifest(checkpoint)
    names, leaves = _flatten(example)
    described = dict(zip(names, map(_describe, leaves), strict=True))
    _verify_arrays(checkpoint, manifest.arrays, described)
    wanted = {name: _blank(leaf) for name, leaf in zip(names, leaves, strict=True)}
    _verify_files(checkpoint, manifest.sha256, _BESIDE + 2 * sum(blank.nbytes for blank in wanted.values()))
    arrays = wanted | _read_arrays(checkpoint, {name: blank for name, blank in wanted.items() if blank.size})
    for name, blank in wanted.items():
        _verify_numbers(checkpoint, name, arrays[name], blank, finite=name.split(".")[0] not in any_number)
    restored = [_from_numpy(arrays[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(example), restored)


def _read_arrays(checkpoint: Path, wanted: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What Orbax reads, which refuses empty arrays. Raises CheckpointError for files that are none of its own."""
    with _orbax() as checkpointer:
        try:
            return dict(checkpointer.restore(checkpoint.resolve() / "state", wanted))
        except (OSError, ValueError, TypeError, LookupError) as error:  # by whatever its files say
            raise _damaged(checkpoint, checkpoint / "state", "cannot be read") from error


def _orbax() -> Checkpointer:
    """Orbax for this process alone: by itself it waits for all processes, and here one of them may save."""
    import orbax.checkpoint as ocp  # half a second: only runs that save or resume pay for it

    if jax.process_count() == 1:
        return ocp.StandardCheckpointer()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _flatten(tree: PyTree) -> tuple[list[str], list[Leaf]]:
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"two arrays of the state share the name {max(names, key=names.count)!r}; rename one")
    for name, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"the state must hold arrays, got {type(leaf).__name__} at {name}; wrap it in jnp.asarray")
    return names, list(leaves)


def _is_key(leaf: Leaf) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_numpy(leaf: Leaf) -> np.ndarray:
    leaf = own(leaf) if isinstance(leaf, jax.Array) else leaf
    return np.asarray(jax.random.key_data(jnp.asarray(leaf)) if _is_key(leaf) else leaf)


def _from_numpy(array: np.ndarray, example: Leaf) -> Leaf:
    if isinstance(example, np.generic):
        return array[()]
    if isinstance(example, np.ndarray):
        return array
    placed = place(array, example.sharding)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(example)) if _is_key(example) else placed


def _blank(leaf: Leaf) -> np.ndarray:
    shaped = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.zeros(shaped.shape, shaped.dtype)


def _describe(leaf: Leaf) -> str:
    return f"{leaf.dtype}[{','.join(map(str, np.shape(leaf)))}]"


def _digests(state: Path) -> dict[str, str]:
    files = sorted(path for path in state.rglob("*") if not path.is_dir())
    return {path.relative_to(state).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _read_manifest(checkpoint: Path) -> _Manifest:
    path = checkpoint / _MANIFEST
    if not path.is_file() or path.stat().st_size > _MOST_MANIFEST:
        raise _damaged(checkpoint, path, "cannot be read")
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(checkpoint, path, "cannot be read") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise _damaged(checkpoint, path, "names no format")
    if type(manifest["format"]) is not int or manifest["format"] != _FORMAT:
        shown = repr(manifest["format"])[:40]
        raise CheckpointError(f"{path} has format {shown}, this version reads {_FORMAT}; train again")
    for name in _Manifest._fields:
        found = manifest.get(name)
        if not isinstance(found, dict) or not found or not all(isinstance(one, str) for one in found.values()):
            raise _damaged(checkpoint, path, f"holds no words by their names as {name}")
    return _Manifest(manifest["arrays"], manifest["sha256"])


def _verify_files(checkpoint: Path, expected: dict[str, str], most: int) -> None:
    """Raises CheckpointError unless the files are plain ones, those of the manifest, and of at most so many bytes."""
    state, size = checkpoint / "state", 0
    for path in sorted(state.rglob("*")):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise _damaged(checkpoint, path, "is no plain file")
        size += found.st_size if stat.S_ISREG(found.st_mode) else 0
    if size > most:
        raise _damaged(checkpoint, state, f"has {size:,} bytes, at most {most:,} are expected")
    digests = _digests(state)
    for name in sorted(expected.keys() | digests.keys()):
        if digests.get(name) != expected.get(name):
            missing = "is missing" if name not in digests else "differs from what was saved"
            raise _damaged(checkpoint, state / name, "is not of it" if name not in expected else missing)


def _verify_numbers(checkpoint: Path, name: str, array: np.ndarray, blank: np.ndarray, *, finite: bool) -> None:
    """Raises CheckpointError for an array that is not as the manifest says, or that no run has."""
    if array.dtype != blank.dtype or array.shape != blank.shape:
        raise _damaged(checkpoint, checkpoint / "state", f"holds {name} as {_describe(array)}, not {_describe(blank)}")
    if finite and jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(np.asarray(array)).all():
        raise _damaged(checkpoint, checkpoint / "state", f"holds numbers that are not finite as {name}")


def _verify_arrays(checkpoint: Path, found: dict[str, str], expected: dict[str, str]) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{checkpoint} holds {plain(name)[:80]} as {plain(found.get(name, 'nothing'))[:80]}, this run has "
                f"{expected.get(name, 'nothing')}: it was trained with other settings; use those of its config.json"
            )


def _damaged(checkpoint: Path, path: Path, what: str) -> CheckpointError:
    earlier = [step for step in steps(checkpoint.parent) if step < int(checkpoint.name)]
    advice = f"continue from step {earlier[-1]}" if earlier else "start over"
    return CheckpointError(f"damaged checkpoint: {plain(path)} {what}; remove {checkpoint} to {advice}")
