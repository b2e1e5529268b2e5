"""Settings of the process: freed memory, threads of factorisations and of XLA, and the user's word counts."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

from fewshot import threads

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


@pytest.mark.parametrize("cores, wanted", [(1, None), (2, "4"), (3, "4"), (4, None), (64, None)])
def test_few_cores_have_more_of_the_threads_that_wait_for_one_another(cores, wanted, monkeypatch):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda process: range(cores), raising=False)
    for name in ("PJRT_NPROC", "NPROC"):
        monkeypatch.setenv(name, "1")  # so that what is set below is forgotten
        monkeypatch.delenv(name)
    assert threads.enough_threads() is (wanted is not None) and os.environ.get("PJRT_NPROC") == wanted
    monkeypatch.setenv("PJRT_NPROC", "2")
    assert threads.enough_threads() is False and os.environ["PJRT_NPROC"] == "2"


INDEPENDENT = """
import faulthandler, sys, time
faulthandler.dump_traceback_later(150, exit=True)
if sys.argv[1] == "imported":
    import fewshot
import jax, jax.numpy as jnp
a = jax.random.normal(jax.random.key(0), (32, 60, 60))
a = a @ a.transpose(0, 2, 1) + 60 * jnp.eye(60)

@jax.jit
def batches(a, t):
    by = a + t * jnp.eye(60)
    solved = jax.scipy.linalg.solve_triangular(jnp.tril(a), by, lower=True)
    return jnp.linalg.eigh(by)[0].sum() + solved.sum() + jnp.linalg.cholesky(by + jnp.eye(60)).sum()

begun = time.monotonic()
while time.monotonic() - begun < 60:
    for t in range(20):
        batches(a, jnp.float32(t)).block_until_ready()
print("ended")
"""


@pytest.mark.slow
def test_independent_factorisations_do_not_wait_for_one_another_for_ever():
    """Without the import it hung within a minute in three of three runs (jaxlib 0.10.2, two cores)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC")}
    done = subprocess.run(
        [sys.executable, "-c", INDEPENDENT, "imported"], cwd=REPOSITORY, env=kept, capture_output=True
    )
    assert done.stdout.split() == [b"ended"], done.stderr.decode()[-2000:]
