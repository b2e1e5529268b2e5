"""benchmarks/gpu.py, rehearsed on a processor: it must be right before a GPU is at hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_the_rehearsal_agrees_with_the_processor_and_ends_with_its_table(tmp_path):
    file = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--seconds", "1000", "--json", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())
    assert [row["agrees"] for row in results["correct"]] == [True, True]
    assert 0 < results["correct"][1]["relative error of losses"] < 5e-2  # bfloat16 rounds on a processor too
    assert results["training"] and all(row["episodes a second"] > 0 for row in results["training"])
    assert results["between"] and results["polya-gamma"][0]["million draws a second"] > 0 and results["omniglot"] == []
    table = done.stdout.strip().rsplit("\n\n", 1)[-1]
    assert table.startswith("|") and "losses as on the CPU, bfloat16" in table and "Polya-Gamma" in table
