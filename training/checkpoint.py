"""Checkpoints of the outer loop: any tree of arrays, saved atomically with Orbax and verified before it is read.

A folder of checkpoints holds one folder a step: `<step>/state` (Orbax) and `<step>/manifest.json` with the name, dtype
and shape of every array and the SHA-256 of every file. Orbax alone reads a flipped byte as another number, and casts to
whatever dtype it is asked for; here both are errors. Nothing in it depends on how many devices held the state.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewshot.inference.outer.devices import own, place

_MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that is damaged or belongs to another kind of run; the message is one line."""


def save(folder: Path, step: int, state: Any, keep: int = 2) -> Path:
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
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def restore(folder: Path, step: int, example: Any) -> Any:
    """The state saved as `folder/<step>`, with the tree structure of `example`, a state of the same run.

    Arrays lie where those of `example` do, on one device or on many.

    Raises: CheckpointError if a file is missing or altered, or if arrays differ in name, dtype or shape.
    """
    checkpoint = folder / str(step)
    manifest = _read_manifest(checkpoint)
    _verify_files(checkpoint, manifest["sha256"])
    names, leaves = _flatten(example)
    _verify_arrays(checkpoint, manifest["arrays"], dict(zip(names, map(_describe, leaves), strict=True)))
    wanted = {name: _blank(leaf) for name, leaf in zip(names, leaves, strict=True)}
    stored = {name: blank for name, blank in wanted.items() if blank.size}  # Orbax refuses empty arrays
    with _orbax() as checkpointer:
        arrays = wanted | checkpointer.restore(checkpoint.resolve() / "state", stored)
    restored = [_from_numpy(arrays[name], leaf) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(example), restored)


def _orbax() -> Any:
    """Orbax for this process alone: by itself it waits for all processes, and here one of them may save."""
    import orbax.checkpoint as ocp  # half a second: only runs that save or resume pay for it

    if jax.process_count() == 1:
        return ocp.StandardCheckpointer()
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    return ocp.StandardCheckpointer(multiprocessing_options=alone)


def _flatten(tree: Any) -> tuple[list[str], list[Any]]:
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"two arrays of the state share the name {max(names, key=names.count)!r}; rename one")
    for name, leaf in zip(names, leaves, strict=True):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"the state must hold arrays, got {type(leaf).__name__} at {name}; wrap it in jnp.asarray")
    return names, list(leaves)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_numpy(leaf: Any) -> np.ndarray:
    leaf = own(leaf) if isinstance(leaf, jax.Array) else leaf
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _from_numpy(array: np.ndarray, example: Any) -> Any:
    if isinstance(example, np.generic):
        return array[()]
    if isinstance(example, np.ndarray):
        return array
    placed = place(array, example.sharding)
    return jax.random.wrap_key_data(placed, impl=jax.random.key_impl(example)) if _is_key(example) else placed


def _blank(leaf: Any) -> np.ndarray:
    shaped = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    return np.zeros(shaped.shape, shaped.dtype)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, np.shape(leaf)))}]"


def _digests(state: Path) -> dict[str, str]:
    files = sorted(path for path in state.rglob("*") if path.is_file())
    return {path.relative_to(state).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_text())
        known = manifest["format"] == _FORMAT and isinstance(manifest["sha256"], dict) and manifest["arrays"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, path, "cannot be read") from error
    if not known:
        raise CheckpointError(f"{path} has format {manifest['format']!r}, this version reads {_FORMAT}; train again")
    return dict(manifest)


def _verify_files(checkpoint: Path, expected: dict[str, str]) -> None:
    found = _digests(checkpoint / "state")
    for name, digest in expected.items():
        if found.get(name) != digest:
            what = "is missing" if name not in found else "differs from what was saved"
            raise _damaged(checkpoint, checkpoint / "state" / name, what)


def _verify_arrays(checkpoint: Path, found: dict[str, str], expected: dict[str, str]) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{checkpoint} holds {name} as {found.get(name, 'nothing')}, this run has "
                f"{expected.get(name, 'nothing')}: it was trained with other settings; use those of its config.json"
            )


def _damaged(checkpoint: Path, path: Path, what: str) -> CheckpointError:
    earlier = [step for step in steps(checkpoint.parent) if step < int(checkpoint.name)]
    advice = f"continue from step {earlier[-1]}" if earlier else "start over"
    return CheckpointError(f"damaged checkpoint: {path} {what}; remove {checkpoint} to {advice}")
