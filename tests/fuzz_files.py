"""Damaged files of every kind that is read: what their readers raise beside errors in one line that name the file."""

import collections
import io
import json
import signal
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import foreign_runs
import jax
import numpy as np
import tiny_omniglot
import torch_file
from PIL import Image

from fewshot.evaluation import episode_lists, prediction_files
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores
from fewshot.models.networks.torch_weights import WeightsError, read_torch_weights
from fewshot.tasks import DataError, embeddings, make_dataset, omniglot
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.files import read_npz
from fewshot.tasks.images import FORMATS, load_labelled, load_unlabelled, whole
from fewshot.training import checkpoint, run, run_directory
from fewshot.training.checkpoint import CheckpointError
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import RunError

SHAPE, HANG, LONGEST = (8, 8, 3), 60, 2000
ONE_LINE = (DataError, RunError, ConfigError, CheckpointError, WeightsError)


class Kind(NamedTuple):
    """A file with its whole content, and what reads it; where `refused` says so ValueError is its error in one line."""

    name: str
    path: Path
    content: bytes
    read: Callable[[Path], Any]
    refused: tuple[type[Exception], ...] = ONE_LINE
    named: bool = True  # whether every error names the file


def damaged(rng, content):
    """Bytes changed, cut off, repeated or put in: mostly near the beginning, where headers are."""
    content = bytearray(content)
    for _ in range(rng.integers(1, 6)):
        if not content:
            break
        place = int(rng.integers(min(len(content), 200) if rng.random() < 0.7 else len(content)))
        kind = rng.integers(5)
        if kind == 0:
            del content[place + 1 :]
        elif kind == 1:
            content[place:place] = content[place : place + int(rng.integers(1, 40))]
        elif kind == 2:
            content[place:place] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 3:
            content[place : place + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff", b"((((", b"-1e9"])
        else:
            content[place] = rng.integers(256)
    return bytes(content)


def repacked(rng, content):
    """An .npz file whose arrays are damaged and whose check sums are right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, damaged(rng, old.read(name)) if rng.random() < 0.7 else old.read(name))
    return file.getvalue()


def pictures():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 11, 3)).astype(np.uint8)
    for name in FORMATS:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name)
        yield name, file.getvalue()


def packed(**arrays):
    """Stored without compression or check of what is inside, so that damage reaches the arrays themselves."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def of_data(folder):
    """Pictures, arrays, features and data files of a user."""
    yield from (
        Kind(f"{name} picture", folder / f"{name}.png", content, lambda path: load_unlabelled(path, SHAPE, whole))
        for name, content in pictures()
    )
    images = packed(images=np.zeros((3, 4, 4), np.uint8), labels=np.array(["a", "b", "a"]))
    readers = (
        lambda path: load_labelled(path, SHAPE, whole),
        lambda path: load_unlabelled(path, SHAPE, whole),
        lambda path: read_npz(path, ("images", "labels")),
    )
    yield from (Kind("images.npz", folder / "images.npz", images, read) for read in readers)
    features = packed(features=np.ones((3, 5), np.float32), labels=np.array([1, 2, 1]))
    for labelled in (True, False):
        read = lambda path, labelled=labelled: load_features(path, 5, labelled=labelled)  # noqa: E731
        yield Kind("features.npz", folder / "features.npz", features, read)
    splits = {f"{split}_features": np.ones((4, 5), np.float32) for split in ("train", "validation", "test")}
    splits |= {f"{split}_labels": np.array([0, 1, 0, 1]) for split in ("train", "validation", "test")}
    yield Kind("embeddings", folder / "embeddings.npz", packed(**splits), lambda path: embeddings.load(str(path)))
    tiny_omniglot.write(folder, size=4, images=2)
    data = folder / omniglot.FILE
    yield Kind("data set", data, data.read_bytes(), lambda path: omniglot.load(path.parent))
    tensors = torch_file.torch_file({"a": np.arange(6, dtype=np.float32), "b": np.array(7, np.int64)})
    yield Kind("weights.pth", folder / "weights.pth", tensors, lambda path: read_torch_weights(path.read_bytes()),
               named=False)  # fmt: skip


def of_evaluation(folder):
    """Lists of episodes and files of predictions."""
    rng = np.random.default_rng(0)
    dataset = make_dataset(rng.uniform(size=(24, 2, 2, 1)).astype(np.float32), np.repeat(np.arange(4), 6))
    episodes = draw_episodes(0, "test", dataset, Shape(3, 1, 2), 5)
    scores = Scores(np.full((5, 6, 3), 1 / 3), np.asarray(episodes.indices.y_query), np.zeros(5, int), 0.0)
    listed, kept = folder / "episodes.npz", folder / "predictions.npz"
    episode_lists.save(listed, dataset, episodes, scores)

    def read(path):
        return episode_lists.episodes_of(episode_lists.read(path), 0, dataset)

    yield Kind("episodes.npz", listed, listed.read_bytes(), read, named=False)
    origin = prediction_files.Origin(7, 0.5)
    content = prediction_files.to_bytes(scores.probabilities, scores.labels, np.tile(np.arange(3), (5, 1)), origin)

    def whole(path):
        return prediction_files.read(path), prediction_files.read_origin(path)

    yield Kind("predictions.npz", kept, content, whole, refused=(ValueError,))


def _rows(file):
    return run_directory.load(file.parent).read_metrics()


def of_runs(folder):
    """Every file of a run folder."""
    path = foreign_runs.make(folder / "run")
    for name in ("config.json", "weights.safetensors"):
        yield Kind(name, path / name, (path / name).read_bytes(), lambda file: run.load_run(file.parent))
    metrics = path / "metrics.jsonl"
    yield Kind(
        "metrics.jsonl", metrics, metrics.read_bytes(), lambda file: run_directory.load(file.parent).read_metrics()
    )
    state = {"w": np.ones((3, 2), np.float32), "n": np.arange(4), "key": jax.random.key(1)}
    saved = checkpoint.save(path / "checkpoints", 3, state)
    files = [file for file in sorted(saved.rglob("*")) if file.is_file()]

    def restored(file):
        return checkpoint.restore(path / "checkpoints", 3, state)

    def with_sums(file):
        """As somebody leaves it who knows how the manifest is made."""
        sums, path = {"sha256": checkpoint._digests(saved / "state")}, saved / "manifest.json"
        before = path.read_bytes()
        path.write_text(json.dumps(json.loads(before) | sums))
        try:
            return restored(file)
        finally:
            path.write_bytes(before)

    for file in files:
        kind = "manifest.json" if file.name == "manifest.json" else "checkpoint"
        yield Kind(kind, file, file.read_bytes(), restored, named=False)  # it names the checkpoint
        if kind == "checkpoint":
            yield Kind("checkpoint with its sums", file, file.read_bytes(), with_sums, named=False)


def kinds(folder):
    return [*of_data(folder), *of_evaluation(folder), *of_runs(folder)]


class Hang(BaseException):
    """More seconds than a file may take."""


def _too_long(number, frame):
    raise Hang


def fault(kind, content):
    """What is wrong with how a content is read: None, or a kind of fault and its description; and whether refused."""
    kind.path.write_bytes(content)
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(HANG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow about damage that it reads over
            read = kind.read(kind.path)
        return ("NaN", f"{kind.name}: {content!r}") if _holds_nan(read) else None, False
    except kind.refused as error:
        return _fault_of(kind, str(error)), True
    except Hang:
        return ("hang", f"{kind.name}: {content!r}"), False
    except Exception:
        return ("traceback", f"{kind.name}: {traceback.format_exc()}"), False
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        kind.path.write_bytes(kind.content)


def _fault_of(kind, message):
    if len(message.splitlines()) != 1 or len(message) > LONGEST:
        return "not one line", f"{kind.name}: {message!r}"
    if kind.named and kind.path.name not in message:
        return "names no file", f"{kind.name}: {message!r}"
    return None


def _holds_nan(value):
    leaves = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, np.ndarray)]
    return any(leaf.dtype.kind == "f" and not np.isfinite(leaf).all() for leaf in leaves)


def run_all(count, seed, chosen=None):
    """Some `count` damaged files, as many of each kind: faults, how many were refused, how many there were."""
    rng, found, refused, done = np.random.default_rng(seed), [], collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        every = [kind for kind in kinds(Path(folder)) if chosen is None or kind.name in chosen]
        for number in range(count):
            kind = every[number % len(every)]
            packs = kind.path.suffix == ".npz" and rng.random() < 0.6
            wrong, was_refused = fault(kind, (repacked if packs else damaged)(rng, kind.content))
            found += [wrong] if wrong else []
            refused[kind.name] += was_refused
            done[kind.name] += 1
    return found, refused, done
