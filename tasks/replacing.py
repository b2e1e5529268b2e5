"""Files are written in one move: a process that is killed at any time leaves the old one or the new one."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """As `replace_bytes`, in UTF-8; a file name that is none, which may be part of the text, stays as it was."""
    replace_bytes(path, text.encode("utf-8", "surrogateescape"))


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file. A link stays one, and a device or a pipe is written to. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    path = path.resolve()
    staging = path.with_name(f".{path.name}.staging")
    try:
        staging.write_bytes(content)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
