"""Arrows between packages point one way, and the training path stays light."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fewshot

REPOSITORY = Path(__file__).resolve().parents[1]
ORDER = ("models", "inference", "learners", "evaluation", "training", "fewshot", "runners")  # each may use those before
ALLOWED = {package: {*ORDER[: number + 1]} for number, package in enumerate(ORDER)} | {"tasks": {"tasks"}}
for above in ORDER[ORDER.index("evaluation") :]:
    ALLOWED[above].add("tasks")
# May factorise a matrix: everything else asks them, so how that is done (precision, order, thresholds) is decided once.
ALGEBRA = {
    f"models/gaussian/{name}.py"
    for name in ("factors", "prior", "blocks", "dense", "marginals", "observed", "star_reduction", "simplex")
}
# May import arviz, and matplotlib.
DIAGNOSTICS = {
    "inference/diagnostics.py",
    "evaluation/diagnosis.py",
    "evaluation/diagnosis_plots.py",
    "evaluation/diagnosis_tables.py",
    "runners/diagnose.py",
}


def imported_modules(source):
    """Modules that a file imports at any level, relative imports left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inside = node.module == "fewshot"
            yield from (f"fewshot.{alias.name}" for alias in node.names) if inside else [node.module]


def package_of(module):
    """The package of an imported module of this project; fewshot for the public names and the estimators."""
    root, _, rest = module.partition(".")
    if root != "fewshot":
        return None
    package = rest.split(".")[0]
    return package if package in ALLOWED else "fewshot"


def wrong_arrows(package, source):
    return {package_of(module) for module in imported_modules(source)} - {None} - ALLOWED[package]


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
        ("models", "from fewshot.inference.inner import cvi"),
        ("tasks", "import fewshot.models.kernels as kernels"),
        ("inference", "def f():\n    from fewshot.tasks import Task"),
        ("inference", "from fewshot.learners import solve"),
        ("evaluation", "from fewshot import training"),
        ("training", "from fewshot import FewShotClassifier"),
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
    assert found == ALGEBRA | {"evaluation/calibration_interval.py"}  # whose matrix is of statistics, in NumPy


def clocks_that_jump(source):
    """What a file reads of the clock that people and time servers set, by which no duration may be measured."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "localtime", "now", "utcnow", "today"):
            yield node.attr
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            yield from (alias.name for alias in node.names)


def test_no_duration_is_measured_by_a_clock_that_jumps():
    found = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ALLOWED
        for path in files(package)
        if list(clocks_that_jump(path.read_text()))
    }
    assert found == {"training/events.py"}  # TensorBoard shows when a number was written


def test_every_package_is_listed_for_installation():
    listed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    present = {
        "fewshot." + path.parent.relative_to(REPOSITORY).as_posix().replace("/", ".")
        for package in ALLOWED.keys() - {"fewshot"}
        for path in files(package)
    }
    assert set(listed) == present | {"fewshot"}


@pytest.mark.long
def test_training_imports_neither_arviz_nor_orbax_nor_matplotlib():
    # Together they cost seconds; Orbax comes in with the first checkpoint, matplotlib with the first glyph rendered.
    paths = [path.relative_to(REPOSITORY) for package in ALLOWED.keys() - {"fewshot"} for path in files(package)]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.as_posix() not in DIAGNOSTICS]
    modules = ", ".join("fewshot." + name.removesuffix(".__init__") for name in names)
    code = f"import sys, {modules}; print([name for name in ('arviz', 'orbax', 'matplotlib') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
@pytest.mark.parametrize("program", ["meta_train", "evaluate"])  # predict needs scikit-learn
def test_programs_start_without_the_parts_of_scipy_that_load_slowly(program):
    code = f"import sys, fewshot.runners.{program}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not {"scipy.ndimage", "scipy.optimize", "scipy.stats"} & set(done.stdout.split())


def test_nothing_imports_a_folder_of_the_checkout_by_its_own_name():
    """`models.kernels` beside `fewshot.models.kernels` would be a second module with other classes."""
    folders = ALLOWED.keys() - {"fewshot"}
    found = {
        path.relative_to(REPOSITORY).as_posix(): wrong
        for folder in (*ALLOWED, "tests", "benchmarks", "notebooks")
        for path in files(folder)
        if (wrong := {module for module in imported_modules(path.read_text()) if module.split(".")[0] in folders})
    }
    assert found == {}


@pytest.mark.long
def test_no_module_is_loaded_under_two_names():
    """After a training command and every module of the project, no file stands behind two names."""
    modules = [
        "fewshot." + ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for package in ALLOWED.keys() - {"fewshot"}
        for path in files(package)
    ]
    code = f"""
import collections, importlib, pathlib, runpy, sys, warnings
warnings.simplefilter("ignore")
for name in {modules}:
    importlib.import_module(name)
files = collections.defaultdict(set)
for name, module in list(sys.modules.items()):
    path = pathlib.Path(getattr(module, "__file__", None) or "/").resolve()
    if path.is_relative_to({str(REPOSITORY)!r}) and "site-packages" not in path.parts and name != "__main__":
        files[path].add(name)
print([names for names in files.values() if len(names) > 1])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.long
def test_a_users_own_folders_do_no_harm(tmp_path):
    """In a folder that has `models`, `tasks` and `inference` of its own, as the installation and as a bare checkout."""
    for name in ("models", "tasks", "inference"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user's own')".replace("'s", ""))
    code = "from fewshot import FewShotClassifier, load_run, cvi, Softmax, load; print(FewShotClassifier.__name__)"
    for variables in ({}, {"PYTHONPATH": str(REPOSITORY)}):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )
        assert done.stdout == "FewShotClassifier\n", done.stderr[-2000:]


def test_every_public_name_is_there():
    for name in fewshot.__all__:
        assert getattr(fewshot, name) is not None and name in dir(fewshot)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fewshot.nothing
