"""Run-time shape checks, the data root and a compilation cache for all tests."""

import os
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

PACKAGES = ["models", "inference", "tasks", "evaluation", "runners"]
REPOSITORY = Path(__file__).resolve().parents[1]
MAPS = 20_000

# Before any of the packages is imported: every annotated function checks its shapes while the tests run.
install_import_hook(PACKAGES, "typecheck.checked")

shared_data = REPOSITORY.parent / "shared" / "data"
if shared_data.is_dir():
    os.environ.setdefault("FEWSHOT_DATA", str(shared_data))

os.environ.setdefault("FEWSHOT_DOWNLOAD", "0")  # a test that misses a file says which, and fetches nothing

from tiny_omniglot import tiny_data, tiny_run  # noqa: E402, F401 - fixtures; the hook must be in place first

from runners import compilation_cache  # noqa: E402

compilation_cache.enable()


@pytest.fixture(autouse=True, scope="module")
def within_the_memory_maps_of_a_process():
    """Forget compiled programs between modules once there are many: each holds some fifteen memory maps.

    Linux allows a process 65,530 of them, and a program that is loaded beyond that ends it with a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAPS:
        jax.clear_caches()
