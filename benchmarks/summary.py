"""Prints what the suite measured as ratios of the fastest rounds, and then the times behind them.

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
    print(markdown(HEADER, [row(entry) for entry in benchmarks]))
    ratios = {entry["name"]: entry["extra_info"]["ratio"] for entry in benchmarks}
    peers = dict.fromkeys(entry["params"]["peer"] for entry in benchmarks if "peer" in (entry["params"] or {}))
    pairs = {
        f"{peer} takes {{:.2f}} times our time": (f"test_peer[{peer}-theirs]", f"test_peer[{peer}-ours]")
        for peer in peers
    }
    for sentence, (upper, lower) in (PAIRS | pairs).items():
        if upper in ratios and lower in ratios:
            print(sentence.format(ratios[upper] / ratios[lower]))
    if "test_torch_backbone" not in ratios:
        print("PyTorch is not installed, so its Conv4 was not timed: pip install -e '.[peers]'")


HEADER = ["", "of Conv4's forward and backward", "median, ms", "minimum, ms", "first call, s"]
# Sentences about the ratio of two benchmarks.
PAIRS = {
    "A test episode of 50 inner steps takes {:.2f} times its forward pass": (
        "test_test_episode[whole]",
        "test_test_episode[forward]",
    )
}


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
