"""Learners on tasks with real labels: every number of docs/regression.md.

    python benchmarks/few_shot_regression.py [--only gp-curves:rbf sinusoids ...] [--runs DIR] [--out DIR]

Each row is a run of meta_train.py, seed 0, tested on 600 tasks of 50 queries; where tasks are draws of a known process,
the gap is to the best possible NLL of the same tasks. A run that was stopped goes on, a row that is in results.json
stays. `--only` takes data sets, learners (a word of the row's name) or both. Writes results.json and table.md.
"""

import argparse
import json
import re
import time
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

from fewshot.evaluation.real_scores import RealSummary
from fewshot.evaluation.text import format_markdown
from fewshot.runners import meta_train
from fewshot.runners.cli import compilation_cache

KNOWN = "the process they are drawn from"
VALIDATE = "trainer.validate_every=1000"
TOGETHER = f"{VALIDATE} trainer.steps_per_dispatch=50"
PROCESS = "--query 10 --tasks-per-step 4"
NEURAL = f"--tasks-per-step 16 --episodes 160000 --set {TOGETHER}"
CLASSIC = (  # Finn et al.
    "backbone.width=40 backbone.rectified=true "
    "learner.inner_steps=1 learner.inner_rate=0.01 trainer.learning_rate=0.001"
)
HEADER = ["data", "points", "learner", "tasks", "NLL", "95% interval", "gap", "RMSE", "CRPS", "in 90%", "minutes"]


class Row(NamedTuple):
    """A training: data set, labelled points of a task, what the table calls it, and the words of its command."""

    data: str
    shot: int
    name: str
    words: str

    @property
    def command(self) -> list[str]:
        """The command without its run folder."""
        return ["--dataset", self.data, "--shot", str(self.shot), *self.words.split()]

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return re.sub(r"[^a-zA-Z0-9.-]+", "-", f"{self.data}-{self.shot}-{self.name}")


class Measured(TypedDict):
    """A row of results.json: the trained learner, and the best possible where it is known."""

    data: str
    shot: int
    name: str
    command: str
    seconds: float | None
    trained: RealSummary
    best: RealSummary | None
    failures: dict[str, int]


SINUSOIDS = {
    "RBF on x": f"{PROCESS} --backbone identity --episodes 8000 --set kernel.prior_scale=8",
    "RBF on mlp": f"{PROCESS} --episodes 8000 --set kernel.prior_scale=8",
    "linear on mlp": f"{PROCESS} --kernel linear --episodes 40000 --set kernel.prior_scale=8 {VALIDATE}",
    "maml": f"--learner maml --tasks-per-step 25 --episodes 250000 --set {CLASSIC} {TOGETHER}",
    "first-order-maml": f"--learner first-order-maml --tasks-per-step 25 --episodes 250000 --set {CLASSIC} {TOGETHER}",
    "cnp": f"--learner cnp {NEURAL}",
    "anp": f"--learner anp {NEURAL}",
}
PROCESSES = {
    "gp-curves:rbf": {"RBF on x": ("rbf", "identity", 4000)},
    "gp-curves:matern52": {
        "Matern-5/2 on x": ("matern52", "identity", 4000),
        "RBF on x": ("rbf", "identity", 4000),
    },
    "gp-curves:periodic": {"RBF on x": ("rbf", "identity", 4000), "RBF on mlp": ("rbf", "mlp", 20_000)},
    "gp-curves": {"RBF on x": ("rbf", "identity", 4000), "RBF on mlp": ("rbf", "mlp", 20_000)},
}


def rows() -> list[Row]:
    """All rows, in the order of the table."""
    found = [Row("sinusoids", shot, name, words) for shot in (5, 10) for name, words in SINUSOIDS.items()]
    for data, processes in PROCESSES.items():
        for name, (kernel, backbone, tasks) in processes.items():
            often = f" --set {VALIDATE}" if tasks > 4000 else ""
            words = f"{PROCESS} --kernel {kernel} --backbone {backbone} --episodes {tasks}{often}"
            found.append(Row(data, 10, name, words))
        found += [Row(data, 10, name, f"--learner {name} {NEURAL}") for name in ("cnp", "np", "anp")]
    return found


def main() -> None:
    """Train what is not in results.json, write both files after every row, and print the table."""
    arguments = parse()
    compilation_cache.keep_programs()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    kept: list[Measured] = json.loads(results.read_text()) if results.exists() else []
    for row in rows():
        done = {(one["data"], one["shot"], one["name"]) for one in kept}
        if row[:3] in done or (arguments.only and not chosen(row, arguments.only)):
            continue
        kept = in_order([*kept, measure(row, Path(arguments.runs) / row.folder)])
        results.write_text(json.dumps(kept, indent=1) + "\n")
        (out / "table.md").write_text(table(kept))
    print(table(kept))


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--runs", default="runs/few-shot-regression")
    parser.add_argument("--out", default="docs/results/regression")
    return parser.parse_args(given)


def chosen(row: Row, words: list[str]) -> bool:
    """Whether the data set is named, or none is; and the same of the learner."""
    data, names = {one.data for one in rows()} & {*words}, {*words} - {one.data for one in rows()}
    return (not data or row.data in data) and (not names or row.name in names)


def measure(row: Row, folder: Path) -> Measured:
    """Train and test; seconds are those of the processor, None of a run that was there."""
    begun, there = time.process_time(), folder.exists()
    place = ["--run-dir", str(folder)]
    config = meta_train.parse(["--resume", *place] if there else [*row.command, *place])
    found = meta_train.main(config)
    if "interrupted" in found:
        raise SystemExit(f"stopped; the same command goes on with {folder}")
    tested = cast(dict[str, RealSummary], found["test"])
    return Measured(
        data=row.data,
        shot=row.shot,
        name=row.name,
        command=" ".join(row.command),
        seconds=None if there else time.process_time() - begun,
        trained=tested["trained"],
        best=tested.get(KNOWN),
        failures=found["failures"],
    )


def in_order(kept: list[Measured]) -> list[Measured]:
    """Sorted as `rows` are."""
    order = [row[:3] for row in rows()]
    return sorted(kept, key=lambda one: order.index((one["data"], one["shot"], one["name"])))


def table(kept: list[Measured]) -> str:
    """A line a row."""
    return format_markdown(HEADER, [line(one) for one in kept])


def line(one: Measured) -> list[str]:
    """The cells of a row."""
    found, words = one["trained"], one["command"].split()
    interval = found["intervals"]["nll"]
    return [
        one["data"],
        str(one["shot"]),
        one["name"],
        f"{int(words[words.index('--episodes') + 1]):,}",
        f"{found['nll']:.3f}",
        "" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
        "" if one["best"] is None else f"{found['nll'] - one['best']['nll']:.3f}",
        f"{found['rmse']:.3f}",
        f"{found['crps']:.3f}",
        f"{100 * found['coverage90']:.1f}%",
        "" if one["seconds"] is None else f"{one['seconds'] / 60:.1f}",
    ]


if __name__ == "__main__":
    main()
