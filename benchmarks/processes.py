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

LOOP = 10.0  # seconds that a loop is counted for
RUNNER = Path(__file__).resolve().parents[1] / "runners" / "meta_train.py"
ROW = 20
SMALL = ["validation_episodes=5", "temperature_episodes=5", "temperature_classes=5", "test_episodes=5"]


def main() -> None:
    arguments = parse()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2 and not arguments.loop:
        raise SystemExit("expected two cores, got one; scaling over processes cannot be measured here")
    if arguments.loop:
        loop()
        return
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            one = rate(cores[:1], Path(folder) / "one", arguments)
            two = rate(cores, Path(folder) / "two", arguments)
        print(f"round {number + 1}: one process {one:.2f} episodes a second, two {two:.2f}, ratio {two / one:.2f}")
        print(f"  loops of Conv4: {compared(loops(cores[:1]), loops(cores))}", flush=True)


def compared(alone: np.ndarray, beside: np.ndarray) -> str:
    """Steps a second of one loop and of two; and a second of their own processor time, which others take less from."""
    return (
        f"one {alone[0]:.2f} steps a second, two {beside[0]:.2f}, ratio {beside[0] / alone[0]:.2f}; "
        f"in processor time {beside[1] / alone[1]:.2f}"
    )


def loops(cores: Sequence[int]) -> np.ndarray:
    """Steps a second, by the clock and of processor time, of a loop of Conv4 on each core at the same time, summed."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--loop"],
            preexec_fn=partial(os.sched_setaffinity, 0, {core}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in cores
    ]
    for process in started:
        process.stdout.readline()  # compiled
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    return sum(np.array(process.communicate()[0].split(), float) for process in started)


def loop() -> None:
    """Say when Conv4, forward and backward, is compiled; wait for a line; count steps; print the two rates."""
    import backbone
    import jax

    from fewshot.runners.cli import processor

    processor.tune()
    step = backbone.gradient(backbone.ours())
    jax.block_until_ready(step())
    print("compiled", flush=True)
    sys.stdin.readline()
    count, start, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() < start + LOOP:
        jax.block_until_ready(step())
        count += 1
    print(count / (time.perf_counter() - start), count / (time.process_time() - used))


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
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)  # what this file starts itself with
    return parser.parse_args()


if __name__ == "__main__":
    main()
