"""Arrows between packages point one way, and the training path stays light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ALLOWED = {
    "models": {"models"},
    "inference": {"models", "inference"},
    "evaluation": {"models", "inference", "evaluation"},
    "runners": {"models", "inference", "evaluation", "tasks", "runners"},
    "tasks": {"tasks"},
}
# May factorise a matrix: everything else asks them, so how that is done (precision, order, thresholds) is decided once.
ALGEBRA = {
    f"models/{name}.py" for name in ("gaussian", "block_gaussian", "dense_sites", "star_reduction", "simplex_sites")
}
# May import arviz, and matplotlib.
DIAGNOSTICS = {
    "inference/diagnostics.py",
    *(f"runners/{name}.py" for name in ("diagnose", "diagnosis", "diagnosis_plots")),
}


def imported_modules(source):
    """Modules that a file imports at any level, relative imports left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def wrong_arrows(package, source):
    roots = {module.split(".")[0] for module in imported_modules(source)}
    return roots & ALLOWED.keys() - ALLOWED[package]


def files(package):
    return sorted((REPOSITORY / package).rglob("*.py"))


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package):
    assert files(package)
    wrong = {str(path.relative_to(REPOSITORY)): wrong_arrows(package, path.read_text()) for path in files(package)}
    assert {path: roots for path, roots in wrong.items() if roots} == {}


@pytest.mark.parametrize(
    "package, source",
    [
        ("models", "from inference.inner import cvi"),
        ("tasks", "import models.kernels as kernels"),
        ("inference", "def f():\n    from tasks import Task"),
        ("evaluation", "import runners"),
    ],
)
def test_a_wrong_arrow_would_be_seen(package, source):
    assert wrong_arrows(package, source)


def test_only_the_diagnostics_import_arviz():
    importers = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ALLOWED
        for path in files(package)
        if "arviz" in {module.split(".")[0] for module in imported_modules(path.read_text())}
    }
    assert importers <= {"inference/diagnostics.py"}


def linear_algebra(source):
    """What a file takes from a module called linalg; sparse ones iterate with products and factorise nothing."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            module, names = ast.unparse(node.value), [node.attr]
        else:
            continue
        if module.endswith("linalg") and "sparse" not in module:
            yield from names


def test_only_the_gaussian_algebra_factorises_a_matrix():
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ALLOWED.keys() - {"tasks"}  # which change pixels, in NumPy
        for path in files(package)
        if list(linear_algebra(path.read_text()))
    }
    assert found == ALGEBRA


def test_every_package_is_listed_for_installation():
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    present = {
        path.parent.relative_to(REPOSITORY).as_posix().replace("/", ".")
        for package in ALLOWED
        for path in files(package)
    }
    assert set(listed) == present


def test_training_imports_neither_arviz_nor_orbax_nor_matplotlib():
    # Together they cost seconds; Orbax comes in with the first checkpoint, matplotlib with the first glyph rendered.
    paths = [
        path.relative_to(REPOSITORY)
        for package in ("models", "inference", "tasks", "runners")
        for path in files(package)
    ]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.as_posix() not in DIAGNOSTICS]
    modules = ", ".join(name.removesuffix(".__init__") for name in names)
    code = f"import sys, {modules}; print([name for name in ('arviz', 'orbax', 'matplotlib') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
