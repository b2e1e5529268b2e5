"""Prints what the suite measured as ratios, and then the times behind them.

python benchmarks/summary.py .benchmarks/latest.json
"""

import argparse
import json
from pathlib import Path

from timing import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    benchmarks = json.loads(parser.parse_args().file.read_text())["benchmarks"]
    names = {entry["name"]: entry for entry in benchmarks}
    print(markdown(HEADER, [row(entry) for entry in benchmarks]))
    for name in dict.fromkeys(entry["params"]["peer"] for entry in benchmarks if "peer" in (entry["params"] or {})):
        pair = [names.get(f"test_peer[{name}-{side}]") for side in ("theirs", "ours")]
        if all(pair):
            print(f"{name}: {pair[0]['extra_info']['ratio'] / pair[1]['extra_info']['ratio']:.2f} times our time")


HEADER = ["", "of Conv4's forward and backward", "median, ms", "minimum, ms", "first call, s"]


def row(entry: dict) -> list[str]:
    name = entry["name"].removeprefix("test_").replace("_", " ")
    extra, stats = entry["extra_info"], entry["stats"]
    return [
        name,
        f"{extra['ratio']:.3f}",
        f"{1e3 * stats['median']:.2f}",
        f"{1e3 * stats['min']:.2f}",
        f"{extra['first_call_s']:.1f}",
    ]


if __name__ == "__main__":
    main()
