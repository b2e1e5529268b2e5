"""Run folders as others may have changed them: one value at a time in process, and whole folders through commands."""

import contextlib
import io
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import foreign_runs
import numpy as np
import tiny_omniglot
from fuzz_files import HANG, LONGEST, ONE_LINE, damaged
from safetensors import numpy as safetensors

from fewshot.runners import meta_train
from fewshot.training import checkpoint, run, run_directory

ROOT = Path(__file__).resolve().parents[1]
RUNNERS = ROOT / "runners"
NUMBERS = (np.nan, np.inf, -np.inf, -1.0, 0.0, 1e30, 1e300)


def fault(what, call):
    """What is wrong with how something is refused or taken, None where nothing is."""
    try:
        call()
    except ONE_LINE as error:
        message = str(error)
        if len(message.splitlines()) != 1 or len(message) > LONGEST or not message.isprintable():
            return "not one line", f"{what}: {message!r}"
    except Exception:
        return "traceback", f"{what}: {traceback.format_exc()}"
    return None


def configurations(count, seed):
    """Values of config.json, each replaced by another one."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = foreign_runs.make(Path(folder) / "run")
        file, text = path / "config.json", (path / "config.json").read_text()
        every, found = foreign_runs.alterations(text), []
        for number in rng.permutation(len(every))[:count]:
            at, raw = every[number]
            file.write_text(foreign_runs.altered(text, at, raw))
            found.append(fault(f"{at} = {raw[:40]}", lambda: run.load_run(path)))
        return [one for one in found if one], min(count, len(every))


def altered_array(rng, arrays):
    """One array of another value, shape, type or name, or one more, or one less."""
    name = list(arrays)[rng.integers(len(arrays))]
    array = arrays[name]
    kind = rng.integers(6)
    if kind == 0:
        changed = array.astype(np.float64)
        changed.reshape(-1)[rng.integers(array.size)] = rng.choice(NUMBERS)
        arrays[name] = changed.astype(array.dtype) if array.dtype.kind == "f" else changed
    elif kind == 1:
        arrays[name] = array.reshape(-1)[None]
    elif kind == 2:
        arrays[name] = array.astype(rng.choice([np.float16, np.int64, np.uint8, np.bool_]))
    elif kind == 3:
        arrays[rng.choice(["", "a/", "/", "0", "learner", "a/b" * 100])] = array
    elif kind == 4:
        del arrays[name]
    else:
        arrays[name + "/more"] = array


def altered(count, seed):
    """Weights, rows of metrics and manifests of checkpoints, of which one value is another."""
    rng, found = np.random.default_rng(seed), []
    with tempfile.TemporaryDirectory() as folder:
        path = foreign_runs.make(Path(folder) / "run")
        state = {"w": np.ones((3, 2), np.float32), "n": np.arange(4)}
        saved = checkpoint.save(path / "checkpoints", 3, state) / "manifest.json"
        metrics, weights = path / "metrics.jsonl", path / "weights.safetensors"
        intact = {file: file.read_bytes() for file in (saved, metrics, weights)}
        reads = {
            saved: lambda: checkpoint.restore(path / "checkpoints", 3, state),
            metrics: lambda: run_directory.load(path).read_metrics(),
            weights: lambda: run.load_run(path),
        }
        for number in range(count):
            file = list(reads)[number % 3]
            with np.errstate(all="ignore"), contextlib.suppress(_NotPossible):
                file.write_bytes(_another(rng, file, intact[file]))
                found.append(fault(f"{file.name}: {file.read_bytes()[:300]!r}", reads[file]))
            file.write_bytes(intact[file])
    return [one for one in found if one], count


class _NotPossible(Exception):
    """An alteration that cannot be written down."""


def _another(rng, file, content):
    if file.suffix == ".safetensors":
        arrays = dict(safetensors.load(content))
        altered_array(rng, arrays)
        return safetensors.save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    every = foreign_runs.alterations(content.decode())
    return (foreign_runs.altered(content.decode(), *every[rng.integers(len(every))]) + "\n").encode()


COMMANDS = {
    "evaluate": ["--episodes", "6", "--batches", "2"],
    "predict": [],
    "diagnose": ["--draws", "400", "--compare", "none"],
    "meta_train": ["--resume"],
}


def through_commands(count, seed):
    """Folders of a trained run, one file of each damaged, through the real commands in processes of their own."""
    rng, found = np.random.default_rng(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = str(tiny_omniglot.write(folder))
        with contextlib.redirect_stdout(io.StringIO()):
            words = [*tiny_omniglot.arguments(), "--run-dir", str(folder / "whole"), "--data-root", data]
            assert meta_train.command_line(words) == 0
        files = [path for path in sorted((folder / "whole").rglob("*")) if path.is_file() and path.stat().st_size]
        for number in range(count):
            path = shutil.copytree(folder / "whole", folder / "altered", dirs_exist_ok=False)
            file = path / files[rng.integers(len(files))].relative_to(folder / "whole")
            file.write_bytes(damaged(rng, file.read_bytes()))
            command = list(COMMANDS)[number % len(COMMANDS)]
            found += _outcome(command, path, data, file.relative_to(path))
            shutil.rmtree(path)
    return found, count


def _outcome(command, path, data, file):
    """The faults of one command on one folder."""
    where = ["--run-dir", str(path)] if command == "meta_train" else [str(path)]
    more = ["--data-root", data, *COMMANDS[command]]
    if command == "predict":
        more = ["--support", data, "--query", data]
    before = _seconds_of_children()
    try:
        done = subprocess.run(
            [sys.executable, RUNNERS / f"{command}.py", *where, *more],
            capture_output=True,
            text=True,
            timeout=10 * HANG,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    except subprocess.TimeoutExpired:
        return [("hang", f"{command} with {file} damaged: had not ended after {10 * HANG:.0f} s")]
    described = f"{command} with {file} damaged: exit code {done.returncode}\n{done.stderr[-1500:]}"
    wrong = []
    if "Traceback" in done.stderr:
        wrong.append("traceback")
    if done.returncode not in (0, 2):
        wrong.append("bad code")
    if done.returncode == 2 and len(done.stderr.strip().splitlines()) != 1:
        wrong.append("not one line")
    if _seconds_of_children() - before > 3 * HANG:
        wrong.append("hang")
    return [(kind, described) for kind in wrong]


def _seconds_of_children():
    """Processor time of the commands so far: a busy machine makes no hang of one that ends."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
