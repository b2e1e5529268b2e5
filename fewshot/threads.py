"""XLA's threads on a processor of few cores: enough of them, so that no program waits for ever.

A batch of factorisations (Cholesky, triangular solves, eigenvalues) that runs on one of XLA's threads hands parts to
the others and waits: where as many batches run at once as there are threads, all wait for ever. With jaxlib 0.10.2 on
two cores three independent batches do so within a minute (tests/test_processor.py). One core has no such parts, and
four have threads enough. XLA makes its threads before its first computation, so the package asks for them when it is
imported.
"""

import os

_THREADS, _ENOUGH = "PJRT_NPROC", 4


def enough_threads() -> bool:
    """Four threads where there are two or three cores and the user has not set their number; whether that was done."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not 1 < cores < _ENOUGH or _THREADS in os.environ or "NPROC" in os.environ:
        return False
    os.environ[_THREADS] = str(_ENOUGH)
    return True
