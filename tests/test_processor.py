"""Settings of the process: freed memory, threads of factorisations and of XLA, and the user's word counts."""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager, nullcontext

import jax
import numpy as np
import pytest
from conftest import REPOSITORY
from flax import nnx
from test_real_labels import gaussian_process

from fewshot import (
    FewShotClassifier,
    FewShotRegressor,
    GaussianProcess,
    SparseRegressor,
    conditioning,
    regressor,
    sparse_regressor,
    threads,
)
from fewshot.inference import INFERENCE
from fewshot.learners.base import apply
from fewshot.models import Softmax
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import RBF
from fewshot.threads import BLAS_THREADS, blas, one_blas_thread

CODE = """
import json, resource
import scipy.linalg.lapack  # as JAX does: its threads are there before anybody asks for one
from fewshot.runners.cli import processor
from fewshot.threads import blas

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        b"x" * 40_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
tuned = processor.tune()
b"x" * 40_000_000
print(json.dumps([tuned, before, faults(), [library.num_threads for library in blas().lib_controllers]]))
"""


def outcome(**environment):
    """What tune says it did, page faults before and after it, and the threads of every library for linear algebra."""
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


FEW = 8  # rows of a matrix


def blas_threads():
    return max(library.num_threads for library in blas().lib_controllers)


def set_threads(number):
    """By a thread that ends, for threadpoolctl heeds no other while the one that set a number lives."""
    setting = threading.Thread(target=blas().limit, kwargs={"limits": number})
    setting.start()
    setting.join()


@pytest.fixture
def two_threads(monkeypatch):
    """As for users who set nothing, on a machine with cores enough."""
    monkeypatch.delenv(BLAS_THREADS, raising=False)
    if not blas().lib_controllers:
        pytest.skip("needs a library for linear algebra that can use threads, as SciPy brings it")
    before = blas_threads()
    set_threads(2)
    assert blas_threads() == 2
    yield
    set_threads(before)


SEEN = []


def classifier(kernel, draws):
    network = DeepKernel(Identity((1, 1, 2)), kernel, rngs=nnx.Rngs(0), classes=2)
    return FewShotClassifier(GaussianProcess(network, Softmax(), INFERENCE["cvi"]), draws=draws)


class Recording(RBF):
    """Notes, whenever it is computed, how many threads linear algebra has."""

    def profile(self, squares):
        jax.debug.callback(lambda: SEEN.append(blas_threads()))
        return super().profile(squares)


@pytest.mark.parametrize(
    "make, questions",
    [
        (lambda: classifier(Recording(), draws=256), ("predict_proba", "unknown_p_value")),
        (lambda: FewShotRegressor(kernel=Recording()), ("predict",)),
        (lambda: FewShotRegressor(kernel=Recording(), average=False), ("predict",)),
        (lambda: SparseRegressor(kernel=Recording(), steps=2), ("predict",)),
    ],
    ids=["classifier", "average", "largest evidence", "sparse"],
)
def test_an_estimator_computes_on_one_thread_and_gives_the_others_back(make, questions, two_threads):
    x = np.random.default_rng(0).normal(size=(8, 2))
    estimator = make()
    SEEN.clear()
    estimator.fit(x, np.arange(8) % 2)
    jax.effects_barrier()
    assert set(SEEN) == {1} and blas_threads() == 2
    for question in questions:
        SEEN.clear()
        getattr(estimator, question)(x)
        jax.effects_barrier()
        assert set(SEEN) == {1} and blas_threads() == 2, question


@pytest.fixture
def noted(monkeypatch):
    """A function of a module: for each of its contexts, whether all that was applied until its end had ended."""

    def of(module):
        given, ended = [], []

        def noting(*arguments):
            given.append(apply(*arguments))
            return given[-1]

        @contextmanager
        def one_thread(rows):
            yield
            ended.append(all(leaf.is_ready() for leaf in jax.tree.leaves(given)))

        monkeypatch.setattr(module, "apply", noting)
        monkeypatch.setattr(module, "one_blas_thread", one_thread)
        return ended

    return of


@pytest.mark.long
def test_what_a_classifier_computes_has_ended_when_the_threads_come_back(noted):
    """JAX returns before a program has ended, unless that has callbacks as above."""
    ended = noted(conditioning)
    x = np.random.default_rng(0).normal(size=(8, 2))
    classifier(RBF(), draws=2**13).fit(x, np.arange(8) % 2).predict_proba(x)
    assert ended == [True, True, True]


def test_what_a_regressor_computes_has_ended_when_the_threads_come_back(noted):
    ended = noted(regressor)
    x = np.random.default_rng(0).normal(size=(900, 2))
    FewShotRegressor(gaussian_process()).fit(x, x[:, 0]).predict(x[:8])
    assert ended == [True, True]


def test_matrices_of_many_rows_keep_their_threads(two_threads):
    for rows in (threads.MANY_ROWS - 1, threads.MANY_ROWS):
        with one_blas_thread(rows):
            assert blas_threads() == 1 + (rows == threads.MANY_ROWS)


@pytest.mark.parametrize("method, rows", [("exact", [20, 20]), ("titsias", [3, 3])])
def test_a_sparse_regressor_tells_its_largest_matrix(method, rows, monkeypatch):
    told = []
    monkeypatch.setattr(sparse_regressor, "one_blas_thread", lambda rows: nullcontext(told.append(rows)))
    x = np.random.default_rng(0).normal(size=(20, 1))
    SparseRegressor(method=method, inducing=3, steps=1).fit(x, x[:, 0]).predict(x)
    assert told == rows


def test_threads_come_back_whatever_the_order_in_which_python_threads_leave(two_threads, monkeypatch):
    """Where each looked before another had limited them."""
    monkeypatch.setattr(threads, "_several", lambda libraries: True)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with one_blas_thread(FEW):
            entered.set()
            leave.wait(20)

    with one_blas_thread(FEW):
        with one_blas_thread(FEW):
            pass
        assert blas_threads() == 1
        beside = threading.Thread(target=other)
        beside.start()
        assert entered.wait(20) and blas_threads() == 1
    leave.set()
    beside.join()
    assert blas_threads() == 2
    with one_blas_thread(FEW):
        assert blas_threads() == 1


def test_the_limit_of_somebody_else_is_not_given_back_later(two_threads):
    entered, leave = threading.Event(), threading.Event()

    def other():
        with blas().limit(limits=1):
            entered.set()
            leave.wait(20)

    beside = threading.Thread(target=other)
    beside.start()
    assert entered.wait(20)
    with one_blas_thread(FEW):
        leave.set()
        beside.join()
    assert blas_threads() == 2


def test_without_threadpoolctl_threads_stay_as_they_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.delenv(BLAS_THREADS, raising=False)
    monkeypatch.setattr(threads, "blas", blas.__wrapped__)
    assert threads.blas() is None
    with one_blas_thread(FEW):
        pass


def test_the_number_that_a_user_has_set_stays(two_threads, monkeypatch):
    monkeypatch.setenv(BLAS_THREADS, "2")
    with one_blas_thread(FEW):
        assert blas_threads() == 2
    assert blas_threads() == 2


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
