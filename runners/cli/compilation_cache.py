"""JAX's persistent compilation cache, on by default in the programs: a second run of one starts in seconds.

In a script or notebook `fewshot.keep_programs()` turns it on, before anything is fitted.
The folder is `xla-<processor>` in the user's cache folder. JAX's own variables still decide: JAX_COMPILATION_CACHE_DIR
names another folder and JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.
"""

import hashlib
import os
import platform
import stat
import sys
import warnings
import zlib
from pathlib import Path

import jax

from fewshot.tasks.files import cache_folder

_CHECKED = ".checked"


def keep_programs() -> Path | None:
    """Keep compiled programs in the user's cache folder, and return the folder of this processor.

    Processes that are started from this one, as joblib's are, keep theirs there too. None, without a word, where the
    cache is off or cannot be written. None too, in one line on the error stream, where others could put programs into
    it, which would be run.
    """
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    folder = Path(settings["jax_compilation_cache_dir"] or cache_folder() / f"xla-{processor()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            print(f"no compilation cache: others may write to {folder}; remove that folder", file=sys.stderr)
            jax.config.update("jax_compilation_cache_dir", None)
            return None
        remove_damaged(folder)
    except OSError:  # a read-only home folder: nothing is cached, nothing else changes
        return None
    # Another process may be writing the entry that this one reads, or the disk is full: it is compiled all the same.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry", UserWarning)
    for name, value in (("compilation_cache_dir", str(folder)), ("persistent_cache_min_compile_time_secs", 0.2)):
        jax.config.update(f"jax_{name}", value)
        os.environ.setdefault(f"JAX_{name}".upper(), str(value))  # of processes that start from here
    return folder


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to this user, and nobody else can write to it. Raises OSError."""
    if not hasattr(os, "geteuid"):  # Windows
        return True
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def remove_damaged(folder: Path) -> list[Path]:
    """Delete entries that a killed process left half-written, among those newer than the last check; return them.

    JAX never rewrites an entry that it cannot read, and warns of it in every later run. Where the last check lies in
    the future, because somebody set the clock back, all entries are looked at.
    """
    stamp = folder / _CHECKED
    checked = stamp.stat().st_mtime_ns if stamp.exists() else 0
    stamp.touch()
    if checked > stamp.stat().st_mtime_ns:
        checked = 0
    new = [path for path in folder.glob("*-cache") if path.stat().st_mtime_ns >= checked]
    damaged = [path for path in new if not _is_complete(path.read_bytes())]
    for path in damaged:
        path.unlink(missing_ok=True)
    return damaged


def _is_complete(entry: bytes) -> bool:
    if entry[:1] != b"\x78":  # not zlib: JAX uses zstandard where it is installed
        return len(entry) > 0
    stream = zlib.decompressobj()
    try:
        stream.decompress(entry)
    except zlib.error:
        return False
    return stream.eof


def processor() -> str:
    """A short name for this processor and its cores in use, which compiled programs are made for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    description = f"{platform.machine()} {platform.processor()} {cores}"
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        description += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:  # not Linux
        pass
    return hashlib.sha256(description.encode()).hexdigest()[:8]
