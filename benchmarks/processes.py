"""Training by two processes, one on each of two cores, against one process on one core: episodes a second.

    python benchmarks/processes.py [--steps 120] [--dataset glyphs]

The real command line, Conv4 and all: one process takes one task a step, two processes share two. Each is held on its
core, so the ratio is what the second core adds, less what averaging gradients costs; 2 would be perfect. The median
over rows of 20 steps leaves compilation, validation and the first row out.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RUNNER = Path(__file__).resolve().parents[1] / "runners" / "meta_train.py"
ROW = 20
SMALL = ["validation_episodes=5", "temperature_episodes=5", "temperature_classes=5", "test_episodes=5"]


def main() -> None:
    arguments = parse()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("expected two cores, got one; scaling over processes cannot be measured here")
    with tempfile.TemporaryDirectory() as folder:
        one = rate(cores[:1], Path(folder) / "one", arguments)
        two = rate(cores, Path(folder) / "two", arguments)
    print(f"one process {one:.2f} episodes a second, two processes {two:.2f}, ratio {two / one:.2f}")


def rate(cores: Sequence[int], run: Path, arguments: argparse.Namespace) -> float:
    """Median episodes a second of a run with one process a core."""
    count = len(cores)
    settings = [f"trainer.{name}" for name in (f"log_every={ROW}", f"validate_every={arguments.steps}", *SMALL)]
    command = [sys.executable, str(RUNNER), "--dataset", arguments.dataset, "--run-dir", str(run)]
    command += ["--tasks-per-step", str(count), "--episodes", str(count * arguments.steps), "--set", *settings]
    if count > 1:
        command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count), "--process-id"]
    started = [
        subprocess.Popen(
            [*command, *([str(number)] if count > 1 else [])],
            preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}),
            stdout=subprocess.DEVNULL,
        )
        for number, core in enumerate(cores)
    ]
    if any([process.wait() for process in started]):
        raise SystemExit("a process failed; see above")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(np.median([row["episodes_per_second"] for row in rows[2:]]))


def free_port() -> int:
    """A port that nothing listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dataset", default="glyphs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
