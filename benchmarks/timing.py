"""Timing by turns: every contestant is compiled first, then all run one after the other, again and again.

So they meet the same load of the machine, and ratios mean something on a busy one. A process that is held on one core
(`taskset -c 0`) is timed in processor time, which other programs add little to; else it is wall time.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fewshot.runners.cli import processor

Run = Callable[[], Any]


class Timed(NamedTuple):
    """Milliseconds [repeats] of one contestant, and the seconds of its first call, compilation included."""

    milliseconds: np.ndarray
    first: float

    @property
    def median(self) -> float:
        return float(np.median(self.milliseconds))

    @property
    def minimum(self) -> float:
        return float(self.milliseconds.min())

    def ratio(self, other: "Timed") -> float:
        """Ratio of the fastest rounds: what else the machine does only ever adds, and adds more to a long run."""
        return self.minimum / other.minimum


HELD_ON_ONE_CORE = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1  # as the process began


def seconds() -> float:
    """Processor time of all threads where they share one core, else wall time."""
    return time.process_time() if HELD_ON_ONE_CORE and jax.default_backend() == "cpu" else time.perf_counter()


def clock(run: Run) -> float:
    """Seconds until the result is there."""
    start = seconds()
    jax.block_until_ready(run())
    return seconds() - start


def by_turns(contestants: Mapping[str, Run], repeats: int) -> dict[str, Timed]:
    """First calls, then `repeats` rounds in which each runs once; the process is tuned as a training run's is."""
    processor.tune()
    first = {name: clock(run) for name, run in contestants.items()}
    rounds = np.array([[clock(run) for run in contestants.values()] for _ in range(repeats)])
    return {name: Timed(1e3 * column, first[name]) for name, column in zip(contestants, rounds.T, strict=True)}


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table as it goes into the notes."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
