"""All of the fuzzing with one table: what others may hand to this program, and what it makes of it.

    python tests/fuzz.py [--tasks 20000] [--files 3000] [--configurations 700] [--altered 150] [--folders 60] [--seed 0]
        [--processes 2]

Counted are tracebacks, NaN without an error, hangs (over 60 s), and bad codes or messages. Wanted: 0 everywhere; the
exit code is 1 where anything was found. Kills are part of the slow tests (tests/test_resume.py).
"""

import argparse
import collections
import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import fuzz_files
import fuzz_folders
import fuzz_tasks

from fewshot.runners.cli import compilation_cache
from fewshot.runners.cli.processor import tune

SORTS = ("traceback", "NaN", "hang")
SHOWN = 20


def pieces(arguments):
    """What is tried, in pieces that know nothing of one another: (part, function, arguments), the longest first."""
    parts = {
        "folders through commands": (fuzz_folders.through_commands, arguments.folders),
        "files": (files, arguments.files),
        "configurations": (fuzz_folders.configurations, arguments.configurations),
        "weights, metrics, manifests": (fuzz_folders.altered, arguments.altered),
    }
    found = [(name, function, (count, arguments.seed)) for name, (function, count) in parts.items() if count]
    programs = range(len(fuzz_tasks.programs()) if arguments.tasks else 0)
    return found + [("tasks", tasks, (arguments.tasks, arguments.seed, number)) for number in programs]


def files(count, seed):
    """Faults of damaged files, and how many there were."""
    found, _, done = fuzz_files.run_all(count, seed)
    return found, sum(done.values())


def tasks(count, seed, number):
    """Faults of the tasks of one program, and how many there were."""
    found, codes, done, told = fuzz_tasks.run_program(number, count, seed)
    named = {fuzz_tasks.Code(code).name: count for code, count in sorted(codes.items()) if code in set(fuzz_tasks.Code)}
    print(f"{told}; {named}", flush=True)
    return found, done


def timed(part, function, words):
    """A piece: its part, faults, how many things it tried, and its seconds."""
    begun = time.perf_counter()
    return part, *function(*words), time.perf_counter() - begun


def prepare():
    """A process as the command lines have it; what is compiled is kept for the next time."""
    compilation_cache.keep_programs()
    tune()


def outcomes(arguments):
    """Every piece as it ends, by as many processes as were asked for."""
    if arguments.processes == 1:
        prepare()
        yield from itertools.starmap(timed, pieces(arguments))
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, fresh, initializer=prepare) as pool:
        for ended in as_completed([pool.submit(timed, *piece) for piece in pieces(arguments)]):
            yield ended.result()


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


def parse(words=None):
    """The command line."""
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
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="that share the work (default 2)")
    return parser.parse_args(words)


def main(words=None):
    """Try everything, print the table; 1 where anything was found."""
    arguments, rows = parse(words), {}
    for name, found, tried, seconds in outcomes(arguments):
        for kind, described in found[:SHOWN]:
            print(f"{kind}: {described}", flush=True)
        before = rows.get(name, (name, 0, [], 0.0))
        rows[name] = (name, before[1] + tried, before[2] + found, before[3] + seconds)
    print(table(rows.values()))
    return int(any(found for _, _, found, _ in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
