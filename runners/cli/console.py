"""What command lines print when something is wrong."""

import contextlib
import sys
from collections.abc import Iterator

from fewshot.evaluation.text import plain


@contextlib.contextmanager
def one_line_errors(*expected: type[Exception]) -> Iterator[None]:
    """Turn errors of the expected types into one line on stderr and exit code 2, without a traceback."""
    try:
        yield
    except expected as error:
        print("error:", plain(" ".join(str(error).split())), file=sys.stderr)
        raise SystemExit(2) from None
