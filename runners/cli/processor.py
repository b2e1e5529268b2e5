"""Two settings of a process that computes on a processor; they change its speed and none of its results.

1. Memory that was freed is kept. A training step allocates tens of megabytes at once; by default the C library returns
   them to the system after every step and is given pages of zeros for the next one, which takes a quarter of the step.
2. The linear algebra library that XLA calls for small factorisations works on one thread. XLA itself spreads a batch
   over the cores; a second layer of threads waits busily for work that is done before they wake.
"""

import ctypes
import os
import sys
from pathlib import Path

# Of <malloc.h>: how much free memory is kept at the top, how many blocks are mapped on their own, and the arenas.
_TRIM_THRESHOLD, _MAPPED_BLOCKS, _ARENAS = -1, -4, -8
_KEPT = 2**31 - 1
_THREADS = "openblas_set_num_threads"


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
    """OpenBLAS as SciPy brings it, unless OPENBLAS_NUM_THREADS is set."""
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return False
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for processes that this one starts
    import scipy.linalg.lapack  # noqa: F401 - it loads the library that XLA calls

    found = False
    for path in _loaded("openblas"):
        library = ctypes.CDLL(path)
        for name in (f"scipy_{_THREADS}", f"scipy_{_THREADS}64_", _THREADS):
            if hasattr(library, name):
                getattr(library, name)(1)
                found = True
    return found


def _loaded(part: str) -> set[str]:
    """Paths of the shared libraries of this process whose names hold `part`; none where the system does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return set()
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if "/" in line}
    return {path for path in paths if part in Path(path).name}
