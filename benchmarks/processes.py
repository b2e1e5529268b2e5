"""Training by two processes, one on each of two cores, against one process on one core: episodes a second.

    python benchmarks/processes.py [--steps 120] [--dataset glyphs] [--rounds 1]

The real command line, Conv4 and all: one process takes one task a step, two processes share two. Each is held on its
core, so the ratio is what the second core adds, less what averaging gradients costs. The median over rows of 20 steps
leaves compilation, validation and the first row out. Two cores of a virtual machine may be halves of one, and they
share its memory: what two loops of Conv4 reach that know nothing of each other is printed beside it, as a bound.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

START_UP, LOOP = 40.0, 10.0  # seconds until a loop is compiled, and that it is counted for
RUNNER = Path(__file__).resolve().parents[1] / "runners" / "meta_train.py"
ROW = 20
SMALL = ["validation_episodes=5", "temperature_episodes=5", "temperature_classes=5", "test_episodes=5"]


def main() -> None:
    arguments = parse()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 and not arguments.loop:
        raise SystemExit("expected two cores, got one; scaling over processes cannot be measured here")
    if arguments.loop:
        print(loop(*arguments.loop))
        return
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one = rate(cores[:1], Path(folder) / "one", arguments)
            two = rate(cores, Path(folder) / "two", arguments)
        alone, beside = loops(cores[:1]), loops(cores)
        print(
            f"round {number + 1}: one process {one:.2f} episodes a second, two {two:.2f}, ratio {two / one:.2f}; "
            f"loops of Conv4 {alone:.2f} and {beside:.2f} steps a second, ratio {beside / alone:.2f}",
            flush=True,
        )


def loops(cores: Sequence[int]) -> float:
    """Steps a second of independent loops of Conv4, forward and backward, one on each core, all at the same time."""
    command = [sys.executable, __file__, "--loop", str(time.time() + START_UP), str(LOOP)]
    started = [
        subprocess.Popen(command, preexec_fn=partial(os.sched_setaffinity, 0, {core}), stdout=subprocess.PIPE)
        for core in cores
    ]
    return sum(float(process.communicate()[0]) for process in started)


def loop(start: float, seconds: float) -> float:
    """Steps a second between two times of the clock."""
    import backbone
    import jax

    step = backbone.gradient(backbone.ours())
    jax.block_until_ready(step())
    if time.time() > start:
        raise SystemExit("the loop was not compiled in time; try again on a quieter machine")
    time.sleep(start - time.time())
    count = 0
    while time.time() < start + seconds:
        jax.block_until_ready(step())
        count += 1
    return count / seconds


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
            preexec_fn=partial(os.sched_setaffinity, 0, {core}),
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--loop", type=float, nargs=2, help=argparse.SUPPRESS)  # what this file starts itself with
    return parser.parse_args()


if __name__ == "__main__":
    main()
