"""constraints.txt: every dependency has the version that CI tests, and it is one that pyproject.toml accepts."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("test", "bench", "dev", "docs")  # what CI installs


def number(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


def pinned():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_every_dependency_is_pinned_within_its_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [one for extra in EXTRAS for one in project["optional-dependencies"][extra]]
    held = pinned()
    for requirement in wanted:
        name, least = re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement).groups()
        assert number(held[name.lower()]) >= number(least), requirement


def test_nothing_that_installed_packages_need_is_left_out():
    held = pinned()
    for requirement in metadata.requires("jax") + metadata.requires("numpyro") + metadata.requires("flax"):
        if "extra ==" not in requirement:
            name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
            assert name in held, requirement
