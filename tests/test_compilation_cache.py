"""The persistent compilation cache: on by default, quiet, and rid of half-written entries."""

import os
import subprocess
import sys
import zlib

import jax
import pytest

from fewshot.runners.cli import compilation_cache

PROGRAM = """
import jax, jax.numpy as jnp
from fewshot.runners.cli import compilation_cache
print(compilation_cache.keep_programs())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
f = jax.jit(lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(9)).sum())
print(float(f(jax.random.normal(jax.random.key(0), (9, 9)))))
"""


def run_program(cache_home):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(
        command, env=kept | {"XDG_CACHE_HOME": str(cache_home)}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_damaged_entry_is_replaced_quietly_and_results_are_the_same(tmp_path):
    folder, first = run_program(tmp_path)
    assert folder.startswith(str(tmp_path / "bayesian-few-shot" / "xla-"))
    entries = {path: path.read_bytes() for path in tmp_path.rglob("*-cache")}
    assert entries
    for path, intact in entries.items():
        path.write_bytes(intact[: len(intact) // 2])
    assert run_program(tmp_path) == [folder, first]
    assert {path for path in entries if compilation_cache._is_complete(path.read_bytes())} == set(entries)
    assert run_program(tmp_path) == [folder, first]  # read from the cache


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """JAX's settings as in a fresh process whose user cache folder is empty; put back afterwards."""
    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in names[1:]:
        monkeypatch.delenv(name.upper(), raising=False)
    yield
    for name in names[1:]:
        os.environ.pop(name.upper(), None)
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("own", [False, True])
def test_processes_that_start_from_here_keep_theirs_too(settings, tmp_path, monkeypatch, own):
    """As joblib's do; where a user named a folder, there."""
    if own:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "own"))
    folder = compilation_cache.keep_programs()
    code = (
        "import jax; values = jax.config.values; "
        "print(values['jax_compilation_cache_dir'], values['jax_persistent_cache_min_compile_time_secs'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(folder), "0.2"]
    assert (folder == tmp_path / "own") is own


def test_the_folder_is_in_the_user_cache(settings, tmp_path):
    folder = compilation_cache.keep_programs()
    assert folder.is_dir() and folder.parent == tmp_path / "user" / "bayesian-few-shot"
    assert jax.config.values["jax_compilation_cache_dir"] == str(folder)


def test_the_settings_of_jax_decide(settings, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert compilation_cache.keep_programs() == tmp_path / "mine"
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "off"))
    assert compilation_cache.keep_programs() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_a_folder_that_cannot_be_made_turns_the_cache_off(settings, tmp_path):
    (tmp_path / "user").touch()
    assert compilation_cache.keep_programs() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_only_entries_newer_than_the_last_check_are_read(tmp_path):
    whole, broken = zlib.compress(b"x" * 1000), zlib.compress(os.urandom(1000))[:-10]
    (tmp_path / "a-cache").write_bytes(whole)
    (tmp_path / "b-cache").write_bytes(broken)
    (tmp_path / "c-cache").write_bytes(b"\x28\xb5\x2f\xfd other format")
    assert compilation_cache.remove_damaged(tmp_path) == [tmp_path / "b-cache"]
    (tmp_path / "d-cache").write_bytes(broken)
    (tmp_path / "e-cache").write_bytes(broken)
    os.utime(tmp_path / "e-cache", (1, 1))
    assert compilation_cache.remove_damaged(tmp_path) == [tmp_path / "d-cache"]
    assert sorted(path.name[0] for path in tmp_path.glob("*-cache")) == ["a", "c", "e"]
    os.utime(tmp_path / ".checked", (2**33, 2**33))  # the clock was set back since
    assert compilation_cache.remove_damaged(tmp_path) == [tmp_path / "e-cache"]


@pytest.mark.parametrize("entry", [b"", b"\x78", b"\x78\x9cgarbage"])
def test_incomplete_entries(entry):
    assert not compilation_cache._is_complete(entry)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_not_used(settings, tmp_path, capsys, mode, named):
    """Who can write there could have any program of his run: entries are machine code."""
    folder = compilation_cache.keep_programs()
    if named:
        folder = tmp_path / "mine"
        folder.mkdir()
        jax.config.update("jax_compilation_cache_dir", str(folder))
    folder.chmod(mode)
    assert compilation_cache.keep_programs() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
    assert f"others may write to {folder}" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_not_used(settings, monkeypatch, capsys):
    folder = compilation_cache.keep_programs()
    assert compilation_cache.is_private(folder)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert compilation_cache.keep_programs() is None and "no compilation cache" in capsys.readouterr().err


def test_a_new_folder_is_private_whatever_the_umask(settings):
    before = os.umask(0)
    try:
        folder = compilation_cache.keep_programs()
    finally:
        os.umask(before)
    assert folder is not None and compilation_cache.is_private(folder)
