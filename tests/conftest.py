"""Run-time shape checks, the data root, quick compilation and a cache of it for all tests."""

import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

REPOSITORY = Path(__file__).resolve().parents[1]
MAPS = 20_000
WITHOUT_SLOW = ("not slow and not long", "not slow", "long and not slow")  # choices of tests
# Most programs of the default tests run once: unoptimised, XLA compiles them in a fifth of the time.
QUICKLY_COMPILED = "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"

# Before SciPy is loaded: threads of the processes that share the tests would wait for one another (fewshot/threads.py).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What is traced and what is imported lives on: looking at all of it every 700 objects takes 7% of the tests' time.
gc.set_threshold(50_000)

# Before any of the packages is imported: every annotated function checks its shapes while the tests run.
install_import_hook(["fewshot"], "typecheck.checked")

shared_data = REPOSITORY.parent / "shared" / "data"
if shared_data.is_dir():
    os.environ.setdefault("FEWSHOT_DATA", str(shared_data))

os.environ.setdefault("FEWSHOT_DOWNLOAD", "0")  # a test that misses a file says which, and fetches nothing
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share a GPU

from tiny_omniglot import tiny_data, tiny_run  # noqa: E402, F401 - fixtures; the hook must be in place first

from fewshot.runners.cli import compilation_cache  # noqa: E402
from fewshot.tasks.files import resolve_root  # noqa: E402

compilation_cache.keep_programs()


def pytest_addoption(parser):
    """For continuous integration, where nothing is compiled yet and little is run twice."""
    parser.addoption("--quickly-compiled", action="store_true", help="compile slow tests unoptimised too")


def pytest_configure(config):
    """Where slow tests are among them, all are compiled as for users; so too where XLA would end at an unknown flag."""
    quickly = config.option.quickly_compiled or config.option.markexpr in WITHOUT_SLOW
    if "XLA_FLAGS" in os.environ or not quickly:
        return
    variables = os.environ | {"XLA_FLAGS": QUICKLY_COMPILED}
    known = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=variables, capture_output=True)
    if known.returncode == 0:
        os.environ["XLA_FLAGS"] = QUICKLY_COMPILED


@pytest.fixture
def compiled(caplog):
    """A function: what was compiled since it was called last."""

    def since():
        found = [record.message for record in caplog.records if record.message.startswith("Compiling ")]
        caplog.clear()
        return found

    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        yield since


@pytest.fixture
def no_waiting():
    """A test that waits for a pipe fails after 20 s instead of waiting for ever."""

    def too_long(*_):
        pytest.fail("waited for 20 s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="module")
def within_the_memory_maps_of_a_process():
    """Forget compiled programs between modules once there are many: each holds some fifteen memory maps.

    Linux allows a process 65,530 of them, and a program that is loaded beyond that ends it with a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAPS:
        jax.clear_caches()


def load_benchmark(name):
    """The module benchmarks/NAME.py, which no package holds."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data_file(name):
    """The path of a data file, or a skipped test that says how to get it."""
    path = resolve_root() / name
    if not path.exists():
        pytest.skip(f"needs {name}: put it into a folder and set FEWSHOT_DATA to that folder")
    return path
