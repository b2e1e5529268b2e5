"""Where data files live: the data root, checked downloads, and reading and writing `.npz` files.

Every data set reads one `.npz` file from the data root. Where it is missing it is made from the public archives, which
are taken from the data root too, or downloaded into it and checked against a published SHA-256 sum.
"""

import hashlib
import os
import secrets
import struct
import sys
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tasks.arrays import Arrays as Arrays
from tasks.arrays import read_members

ROOT_VARIABLE = "FEWSHOT_DATA"
DOWNLOAD_VARIABLE = "FEWSHOT_DOWNLOAD"
MEGABYTE = 1_000_000
# All that reading a damaged zip file raises; a damaged method or flag looks like a kind of zip file not supported.
# Pillow calls a damaged PNG file bad syntax, and looks things up by numbers that it finds in others.
DAMAGED_ZIP = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, struct.error, OverflowError)
DAMAGE = (OSError, ValueError, LookupError, EOFError, SyntaxError, *DAMAGED_ZIP)


class DataError(ValueError):
    """Data that cannot be used; the message is one line: what was expected, what came and what to try."""


class Archive(NamedTuple):
    """A public archive: file name, address, SHA-256 sum, and size in megabytes, which a download may not exceed."""

    name: str
    url: str
    sha256: str
    megabytes: int


def cache_folder() -> Path:
    """The user's cache folder of this project (`$XDG_CACHE_HOME`, else `~/.cache`); it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bayesian-few-shot"


def resolve_root(data_root: str | os.PathLike | None = None) -> Path:
    """The data root: the argument, else `$FEWSHOT_DATA`, else the cache folder.

    Raises:
        DataError: a folder was named and does not exist.
    """
    named = data_root or os.environ.get(ROOT_VARIABLE)
    if not named:
        return cache_folder()
    root = Path(named).expanduser()
    if not root.is_dir():
        raise DataError(
            f"expected the data root to be a folder, got {str(root)!r}; try --data-root DIR or {ROOT_VARIABLE}=DIR"
        )
    return root


@contextmanager
def downloads_forbidden() -> Iterator[None]:
    """Files that are missing are a DataError, as with `$FEWSHOT_DOWNLOAD` = 0."""
    before = os.environ.get(DOWNLOAD_VARIABLE)
    os.environ[DOWNLOAD_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DOWNLOAD_VARIABLE]
        else:
            os.environ[DOWNLOAD_VARIABLE] = before


def find_or_convert(
    root: Path, file_name: str, archives: tuple[Archive, ...], convert: Callable[..., Arrays], arrays: tuple[str, ...]
) -> Arrays:
    """Read `arrays` of `root/file_name`; where it is missing, fetch the archives and convert them first.

    `convert` takes the archives' paths and returns all arrays of the file. Archives that lie in the root already are
    kept, those downloaded here are removed once they are converted.

    Raises:
        DataError: an archive can neither be found nor downloaded, or a file is damaged.
    """
    path = root / file_name
    if not path.exists():
        here = {archive.name for archive in archives if (root / archive.name).exists()}
        paths = [fetch(archive, root, wanted_for=file_name) for archive in archives]
        write_npz(path, convert(*paths))
        for archive in archives:
            if archive.name not in here:
                (root / archive.name).unlink(missing_ok=True)
    return read_npz(path, arrays)


def fetch(archive: Archive, root: Path, wanted_for: str) -> Path:
    """The path of a checked archive in the data root, downloaded if it is not there.

    Raises:
        DataError: the download failed or is switched off, or the file's SHA-256 sum is not the published one.
    """
    path = root / archive.name
    if path.exists():
        if not path.is_file():
            raise DataError(f"expected the archive {archive.name} in {root}, got no plain file; remove it")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        _check_sum(archive, digest.hexdigest(), str(path))
        return path
    by_hand = f"fetch {archive.url} by hand into {root}"
    if os.environ.get(DOWNLOAD_VARIABLE) == "0":
        raise DataError(
            f"expected {wanted_for} in {root}, got no such file, and {DOWNLOAD_VARIABLE}=0 forbids downloads;"
            f" {by_hand}, or point --data-root or {ROOT_VARIABLE} at the folder that has it"
        )
    print(f"{wanted_for} is not in {root}: downloading {archive.url} ({archive.megabytes} MB)", file=sys.stderr)
    try:
        _download(archive, path)
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise DataError(f"expected to download {archive.name} for {wanted_for}, got {reason}; {by_hand}") from error
    return path


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows no redirection to another kind of address."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_https(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_address(url: str) -> Any:
    """The answer of an https address, to be read. Raises OSError, also for one of another kind."""
    _check_https(url)
    return urllib.request.build_opener(_HttpsOnly).open(url, timeout=20)


def _check_https(url: str) -> None:
    if not url.lower().startswith("https://"):
        raise OSError(f"an address that is not https, {url}")


def _download(archive: Archive, path: Path) -> None:
    digest, count = hashlib.sha256(), 0
    with replacing(path) as part, open_address(archive.url) as response:
        while block := response.read(1 << 20):
            count += len(block)
            if count > (archive.megabytes + 1) * MEGABYTE:
                raise OSError(f"more than the {archive.megabytes} MB that it has")
            digest.update(block)
            part.write(block)
        _check_sum(archive, digest.hexdigest(), archive.url)


def _check_sum(archive: Archive, found: str, source: str) -> None:
    if found != archive.sha256:
        raise DataError(
            f"expected SHA-256 {archive.sha256} for {archive.name}, got {found} from {source};"
            f" delete the file if it is there and fetch {archive.url} again"
        )


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` that becomes `path` when the block ends well: nobody ever sees half a file.

    Its name cannot be guessed and must be new, so that nothing is written through a link that somebody put there; who
    may read it is for the user's umask to say. A link at `path` itself is replaced. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    handle = os.open(staging, flags, 0o666)
    try:
        with os.fdopen(handle, "wb") as part:
            yield part
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def write_npz(path: Path, arrays: Mapping[str, np.ndarray], compress: bool = True) -> None:
    """Write arrays, compressed where space counts more than time; others see either no file or a whole one.

    Raises:
        DataError: the folder cannot be written to.
    """
    try:
        with replacing(path) as part:
            (np.savez_compressed if compress else np.savez)(part, allow_pickle=False, **arrays)
    except OSError as error:
        raise DataError(f"expected to write {path}, got {error}; try another --data-root or XDG_CACHE_HOME") from error


def read_npz(path: Path, names: tuple[str, ...]) -> Arrays:
    """Read the named arrays. Each is checked against the zip file's own check sum before it is parsed.

    Raises:
        DataError: the file is damaged, or an array is missing.
    """
    try:
        return read_members(path, names)
    except DAMAGE as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"expected the arrays {', '.join(names)} in {path}, got a damaged or foreign file ({reason});"
            f" delete it and load again"
        ) from error


def check_digest(name: str, images: np.ndarray, sha256: str) -> None:
    """Refuse converted images that differ from the reference copy, so that results stay comparable.

    Raises:
        DataError: the SHA-256 sum of the image bytes is another.
    """
    found = hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest()
    if found != sha256:
        raise DataError(
            f"expected the images of {name} to have SHA-256 {sha256[:12]}..., got {found[:12]}...;"
            f" the archives changed or Pillow resamples differently: try another Pillow version"
        )
