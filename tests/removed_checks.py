"""Checks of what others hand to this program, taken out one at a time: does the suite notice?

    python tests/removed_checks.py [--only TEXT] [--limit SECONDS]

Works in a copy of the checkout, so nothing here changes. A check is noticed where a test of the files that are named
beside it fails; *hangs* where they do not end within the limit. Half an hour on a core.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # the exit code of pytest where none was chosen
LEFT_BEHIND = shutil.ignore_patterns(".*", "runs", "site", "*.egg-info", "__pycache__")


class Check(NamedTuple):
    """A condition, by its only place in a file, the test files that should notice, and what takes its place."""

    file: str
    condition: str
    tests: str
    without: str = "if False:"


CHECKS = [
    Check("training/weights.py", "if kind not in DTYPES:", "foreign_runs saved_classifiers"),
    Check("tasks/arrays.py", "if member.file_size > most:", "tasks_files"),
    Check("tasks/arrays.py", "if length > LONGEST_HEADER or not _HEADER.fullmatch(text):", "tasks_files fuzz_files"),
    Check(
        "tasks/arrays.py",
        'if labels.dtype.kind == "f" and not np.isfinite(labels).all():',
        "tasks_photographs tasks_files",
    ),
    Check("tasks/files.py", "if count > (archive.megabytes + 1) * MEGABYTE:", "tasks_files"),
    Check("tasks/files.py", 'if not url.lower().startswith("https://"):', "tasks_files"),
    Check("tasks/files.py", "if found != archive.sha256:", "tasks_files"),
    Check(
        "tasks/images.py", "if not (low >= 0 and high <= 1):", "tasks_photographs predict", "if low < 0 or high > 1:"
    ),
    Check(
        "tasks/images.py",
        "if isinstance(content, Path) and content.exists() and not content.is_file():",
        "tasks_photographs tasks_files",
    ),
    Check("tasks/embeddings.py", "if not np.isfinite(features).all():", "tasks_photographs"),
    Check("evaluation/episode_lists.py", "if last >= stored:", "episode_lists fuzz_files"),
    Check("evaluation/episode_lists.py", "if listed.checksum != checksum(dataset):", "episode_lists"),
    Check("evaluation/prediction_files.py", "if (ratios.max(-1) != 0).any():", "prediction_files fuzz_files"),
    Check("training/run.py", "if array.dtype.kind != kinds[name]:", "foreign_runs run_directory"),
    Check(
        "training/run_directory.py",
        "if not isinstance(record, dict) or type(step) is not int or not 0 <= step < LARGEST_STEP:",
        "foreign_runs run_directory",
        "if not isinstance(record, dict) or step is None:",
    ),
    Check("training/run_directory.py", "if size > MOST_BYTES:", "foreign_runs run_directory"),
    Check(
        "training/checkpoint.py",
        "if finite and jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(np.asarray(array)).all():",
        "checkpoint foreign_runs",
    ),
    Check(
        "training/checkpoint.py",
        "if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):",
        "checkpoint foreign_runs",
    ),
    Check(
        "training/overrides.py",
        "if not (least <= value <= largest and -1e308 < value < 1e308):",
        "refusals configuration",
    ),
    Check(
        "training/configuration.py",
        "good = type(value) is int and least <= value <= largest",
        "foreign_runs configuration",
        "good = isinstance(value, int)",
    ),
    Check(
        "evaluation/text.py",
        'return f"\'{cell}" if cell.startswith(FORMULA) and not _is_number(cell) else cell',
        "predictions predict",
        "return cell",
    ),
]


def main() -> int:
    """Print a line for each check; 1 where one was not noticed."""
    arguments = parse()
    asked = [check for check in CHECKS if arguments.only in f"{check.file} {check.condition}"]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_BEHIND)
        outcomes = [taken_out(copy, check, arguments.limit) for check in asked]
    noticed = sum(outcome != "missed" for outcome in outcomes)
    print(f"{noticed} of {len(outcomes)} noticed")
    return int(noticed < len(outcomes))


def taken_out(copy: Path, check: Check, limit: float) -> str:
    """Whether the tests of a check notice that it is gone, with a line that says so."""
    path = copy / check.file
    whole = path.read_text()
    if whole.count(check.condition) != 1:
        raise SystemExit(f"expected once in {check.file}: {check.condition}")
    begun = time.perf_counter()
    path.write_text(whole.replace(check.condition, check.without))
    try:
        outcome, shown = tested(copy, [f"tests/test_{name}.py" for name in check.tests.split()], limit)
    finally:
        path.write_text(whole)
    print(f"{outcome:9} {time.perf_counter() - begun:4.0f} s  {check.file}: {check.condition}  {shown}", flush=True)
    return outcome


def tested(copy: Path, files: list[str], limit: float) -> tuple[str, str]:
    """noticed, hangs or missed, with the first test that failed: default tests first, then those that take seconds."""
    for marked in ("not slow and not long", "long and not slow"):
        outcome = tested_by(copy, ["-m", marked, *files], limit)
        if outcome[0] != "missed":
            break
    return outcome


def tested_by(copy: Path, arguments: list[str], limit: float) -> tuple[str, str]:
    """The same of one choice of tests."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs", ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1, NO_TESTS):
        raise SystemExit(
            f"expected tests to run, got code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return ("noticed", failed[0][:150]) if done.returncode == 1 else ("missed", "")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose file or condition has it")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of the tests of one (600)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
