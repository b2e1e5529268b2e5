"""Two settings of a process that computes on a processor; they change its speed and none of its results.

1. Memory that was freed is kept. A training step allocates tens of megabytes at once; by default the C library returns
   them to the system after every step and is given pages of zeros for the next one, which takes a quarter of the step.
2. The linear algebra library that XLA calls for small factorisations works on one thread, where threadpoolctl is
   installed (`fewshot/threads.py`).
"""

import ctypes
import os
import sys

from fewshot.threads import BLAS_THREADS, blas

# Of <malloc.h>: how much free memory is kept at the top, how many blocks are mapped on their own, and the arenas.
_TRIM_THRESHOLD, _MAPPED_BLOCKS, _ARENAS = -1, -4, -8
_KEPT = 2**31 - 1


def tune() -> dict[str, bool]:
    """Apply both, where the system has them and the user has not set them; which were applied, by name."""
    return {"memory": _keep_memory(), "threads": _one_thread()}


def _keep_memory() -> bool:
    """Linux with the GNU C library, unless MALLOC_* or GLIBC_TUNABLES say otherwise."""
    chosen = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    if chosen or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    settings = ((_TRIM_THRESHOLD, _KEPT), (_MAPPED_BLOCKS, 0), (_ARENAS, 1))
    return all(library.mallopt(name, value) == 1 for name, value in settings)


def _one_thread() -> bool:
    """Of every such library, unless OPENBLAS_NUM_THREADS is set."""
    if BLAS_THREADS in os.environ:
        return False
    os.environ[BLAS_THREADS] = "1"  # for processes that this one starts
    libraries = blas()
    if libraries is None or not libraries.lib_controllers:
        return False
    libraries.limit(limits=1)
    return True
