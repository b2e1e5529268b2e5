"""Benchmarks run: one round of each at its smallest size. None of them is a test of speed."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY

SCRIPTS = {
    "inference_cost.py": ["--repeats", "1"],
    "training_step.py": ["--repeats", "1"],
    "backbone.py": ["--repeats", "1", "--steps", "1"],
    "roofline.py": ["--repeats", "1", "--images", "2"],
    "scaling.py": ["--repeats", "1", "--quick"],
    "peers.py": ["--repeats", "1"],
    "shared_rows.py": ["--rows", "600", "--devices", "2"],
    "class_probabilities.py": ["--classes", "3", "--queries", "4", "--repeats", "1"],
    "few_point_intervals.py": ["--data", "gp", "--points", "4", "--tasks", "2"],
    "many_labels.py": ["--labels", "60", "--inducing", "40"],
    "blas_threads.py": ["--repeats", "1", "--cases", "regressor, 30 rows", "--beside", "1"],
    "slices.py": ["--repeats", "1", "--temperatures", "1", "--slices", "1", "--sweeps", "8"],
}


def run(*command):
    # pytest-benchmark measures nothing in what it takes for one of several workers.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_its_table(script):
    printed = run(f"benchmarks/{script}", *SCRIPTS[script])
    assert "nan" not in printed
    assert printed.strip()


@pytest.mark.slow
def test_a_training_step_of_another_learner_is_timed():
    printed = run("benchmarks/training_step.py", "--repeats", "1", "--learner", "matching with context")
    assert "ratio of the fastest rounds" in printed


@pytest.mark.slow
def test_the_suite_keeps_ratios_and_the_summary_prints_them(tmp_path):
    pytest.importorskip("pytest_benchmark", reason="install pytest-benchmark (pip install -e '.[bench]') to run it")
    kept = tmp_path / "kept.json"
    run("-m", "pytest", "benchmarks/suite.py", "-q", "-k", "exact or cavi", f"--benchmark-json={kept}")
    entries = json.loads(kept.read_text())["benchmarks"]
    assert len(entries) == 2 and all(entry["extra_info"]["ratio"] > 0 for entry in entries)
    assert "what inference adds[exact]" in run("benchmarks/summary.py", str(kept))
