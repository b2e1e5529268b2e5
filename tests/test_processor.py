"""Settings of the process: freed memory is kept, small factorisations use one thread, and the user's word counts."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

CODE = """
import ctypes, json, resource
from fewshot.runners.cli import processor

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"x" * 40_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def threads():
    counts = []
    for path in processor._loaded("openblas"):
        library = ctypes.CDLL(path)
        names = ("scipy_openblas_get_num_threads", "scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
        counts += [getattr(library, name)() for name in names if hasattr(library, name)]
    return counts

before = faults()
tuned = processor.tune()
b"x" * 40_000_000
print(json.dumps([tuned, before, faults(), threads()]))
"""


def outcome(**environment):
    """What tune says it did, page faults before and after it, and the threads of every OpenBLAS."""
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=REPOSITORY, env=kept | environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are those of Linux; run it there")
def test_freed_memory_is_kept_and_factorisations_use_one_thread():
    tuned, before, after, threads = outcome()
    assert before > 5 * 1000  # without huge pages it is 5 x 9,766
    assert tuned["memory"] is True and after < before / 20
    assert tuned["threads"] is bool(threads) and set(threads) <= {1}


def test_what_the_user_has_set_stays():
    tuned, before, after, _ = outcome(MALLOC_TOP_PAD_="0", OPENBLAS_NUM_THREADS="2")
    assert tuned == {"memory": False, "threads": False}
    assert after > before / 2
