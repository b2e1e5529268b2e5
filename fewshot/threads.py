"""Threads on a processor: enough of XLA's, and one of the linear algebra library that XLA calls.

1. A batch of factorisations (Cholesky, triangular solves, eigenvalues) that runs on one of XLA's threads hands parts to
   the others and waits: where as many batches run at once as there are threads, all wait for ever. With jaxlib 0.10.2
   on two cores three independent batches do so within a minute (tests/test_processor.py). One core has no such parts,
   and four have threads enough. XLA makes its threads before its first computation, so the package asks for them when
   it is imported.
2. Each of these factorisations is SciPy's, which spreads even small ones over all cores by threads that wait busily for
   one another. With one thread estimators fit up to three times as fast on two cores with nothing else to do, and up to
   ten beside two busy programs; matrices of thousands of rows want them all (docs/performance.md). Others in this
   process may want theirs, so it is one while an estimator computes with small matrices; the command line, whose
   process is its own, sets it for good.
"""

import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
MANY_ROWS = 1_000  # of a matrix whose factorisation is worth more than one thread
_XLA_THREADS, _ENOUGH = "PJRT_NPROC", 4
_LIMITED = threading.Lock()  # held by the Python thread that has limited the others' linear algebra


def cores() -> int:
    """How many of them this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def enough_threads() -> bool:
    """Four threads where there are two or three cores and the user has not set their number; whether that was done."""
    if not 1 < cores() < _ENOUGH or _XLA_THREADS in os.environ or "NPROC" in os.environ:
        return False
    os.environ[_XLA_THREADS] = str(_ENOUGH)
    return True


@cache
def blas() -> "ThreadpoolController | None":
    """What sets the threads of the libraries for linear algebra; None where threadpoolctl is not installed."""
    import scipy.linalg.lapack  # noqa: F401 - it loads the library that XLA calls

    if importlib.util.find_spec("threadpoolctl") is None:
        return None
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_blas_thread(rows: int) -> Iterator[None]:
    """Linear algebra of this process has one thread meanwhile, unless OPENBLAS_NUM_THREADS is set.

    rows: of the largest matrix that is factorised; from MANY_ROWS on nothing is changed. What is computed in it must
    have ended before it is left. Where others have limited the threads already, as another Python thread in here, these
    decide for how long: else the one thread that was found would be given back after they have given back all.
    """
    libraries = None if BLAS_THREADS in os.environ or rows >= MANY_ROWS else blas()
    if libraries is None or not _several(libraries) or not _LIMITED.acquire(blocking=False):
        yield
        return
    try:
        with libraries.limit(limits=1):
            yield
    finally:
        _LIMITED.release()


def _several(libraries: "ThreadpoolController") -> bool:
    return any(library.num_threads > 1 for library in libraries.lib_controllers)
