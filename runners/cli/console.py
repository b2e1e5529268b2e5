"""What command lines print when something is wrong."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from fewshot.evaluation.text import plain

QUIET = "--quiet"


@contextlib.contextmanager
def silent_where_asked(arguments: Sequence[str] | None) -> Iterator[None]:
    """Print nothing on the output where the command line says QUIET; files, warnings and errors are as ever."""
    if QUIET not in (sys.argv[1:] if arguments is None else arguments):
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


@contextlib.contextmanager
def one_line_errors(*expected: type[Exception]) -> Iterator[None]:
    """Turn errors of the expected types into one line on stderr and exit code 2, without a traceback."""
    try:
        yield
    except expected as error:
        print("error:", plain(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(2) from None
