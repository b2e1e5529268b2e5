"""Files are written in one move: a process that is killed at any time leaves the old one or the new one."""

from pathlib import Path

from fewshot.tasks.files import replacing


def replace_text(path: Path, text: str, follow: bool = True) -> None:
    """As `replace_bytes`, in UTF-8; a file name that is none, which may be part of the text, stays as it was."""
    replace_bytes(path, text.encode("utf-8", "surrogateescape"), follow)


def replace_bytes(path: Path, content: bytes, follow: bool = True) -> None:
    """Write a file. A link stays one, and a device or a pipe is written to. Raises OSError, and then nothing is lost.

    follow=False is for folders that somebody else may have filled: whatever is at the path is replaced, not written to.
    """
    if follow and path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(path.resolve() if follow else path) as file:
        file.write(content)
