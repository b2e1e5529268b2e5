"""All of the fuzzing with one table: what others may hand to this program, and what it makes of it.

    python tests/fuzz.py [--tasks 20000] [--files 3000] [--configurations 700] [--altered 150] [--folders 60] [--seed 0]

Counted are tracebacks, NaN without an error, hangs (over 60 s), and bad codes or messages. Wanted: 0 everywhere; the
exit code is 1 where anything was found. Kills are part of the slow tests (tests/test_resume.py).
"""

import argparse
import collections
import sys
import time

import fuzz_files
import fuzz_folders
import fuzz_tasks

from fewshot.runners.cli import compilation_cache
from fewshot.runners.cli.processor import tune

SORTS = ("traceback", "NaN", "hang")
SHOWN = 20


def parts(arguments):
    """Each part by name: a function of nothing that gives its faults and how many things it tried."""
    seed = arguments.seed

    def files():
        found, _, done = fuzz_files.run_all(arguments.files, seed)
        return found, sum(done.values())

    def tasks():
        found, codes, done = fuzz_tasks.run(arguments.tasks, seed)
        print("result codes:", {fuzz_tasks.Code(code).name: count for code, count in sorted(codes.items())})
        return found, done

    return {
        "files": files,
        "configurations": lambda: fuzz_folders.configurations(arguments.configurations, seed),
        "weights, metrics, manifests": lambda: fuzz_folders.altered(arguments.altered, seed),
        "folders through commands": lambda: fuzz_folders.through_commands(arguments.folders, seed),
        "tasks": tasks,
    }


def table(rows):
    """Counts by part: what was tried, tracebacks, NaN, hangs, and other faults."""
    header = ["", "tried", "tracebacks", "NaN without an error", "hangs", "bad codes, messages", "seconds"]
    lines = [header]
    for name, tried, found, seconds in rows:
        counts = collections.Counter(kind for kind, _ in found)
        others = sum(counts.values()) - sum(counts[sort] for sort in SORTS)
        lines.append([name, f"{tried:,}", *(str(counts[sort]) for sort in SORTS), str(others), f"{seconds:.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, count in (
        ("tasks", 20_000),
        ("files", 3_000),
        ("configurations", 700),
        ("altered", 150),
        ("folders", 60),
    ):
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"(default {count})")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    compilation_cache.enable()
    tune()
    rows = []
    for name, part in parts(arguments).items():
        begun = time.perf_counter()
        found, tried = part()
        rows.append((name, tried, found, time.perf_counter() - begun))
        for kind, described in found[:SHOWN]:
            print(f"{kind}: {described}")
        print(f"{name}: {tried:,} tried, {len(found)} faults", flush=True)
    print(table(rows))
    return int(any(found for _, _, found, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
