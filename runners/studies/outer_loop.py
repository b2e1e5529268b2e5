"""Convergence of the outer loop: what stopping at the sites buys over unrolling, at 1, 3, 10 and 50 inner steps.

python runners/studies/outer_loop.py [--quick] [--out DIR] [--seed n]

Softmax with cvi on the built-in characters, 5-way 1-shot: validation loss against episodes and seconds, test accuracy,
milliseconds of a training step, and the memory that XLA reserves for it. Runs are kept in DIR and not trained again;
one that was stopped goes on. Steps are timed anew each time: let nothing else run then.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import jax
import numpy as np

from fewshot.evaluation.metrics import Metric
from fewshot.evaluation.text import format_percent
from fewshot.inference.outer.svi import Trainer
from fewshot.runners import meta_train
from fewshot.runners.studies.reporting import Row, folder, new_figure, run_as_script, save, write
from fewshot.training import optimisation, run_directory
from fewshot.training.configuration import RunConfig, begun, resolve
from fewshot.training.data import load_splits, with_queries
from fewshot.training.run import build_run

NAME, DATASET = "outer-loop", "glyphs"
MODES, STEPS = ("sites", "unroll"), (1, 3, 10, 50)
EPISODES, QUICK_EPISODES = 1000, 40  # of training
TIMED = 10  # training steps


class Point(TypedDict):
    """The validation NLL after so many training episodes."""

    episodes: int
    validation_nll: float


class Trained(TypedDict):
    """Test scores of a run, its failed tasks and its validation curve."""

    accuracy: Metric
    accuracy_ci95: Metric
    nll: Metric
    training_failures: int
    curve: list[Point]


class Cost(TypedDict):
    """Milliseconds of a training step, and megabytes of XLA's temporaries."""

    step_ms: float
    step_MB: float


class OuterLoopRow(Trained, Cost):
    """A mode of hyper-gradients with a number of inner steps."""

    hypergradient: str
    inner_steps: int


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """One row for each mode and number of inner steps; table.md, results.json and outer-loop.png in the folder."""
    path = folder(NAME, quick, out)
    cells = [(mode, steps) for steps in ((1, 10) if quick else STEPS) for mode in MODES]
    rows: list[OuterLoopRow] = []
    for mode, steps in cells:
        config = configuration(path, mode, steps, QUICK_EPISODES if quick else EPISODES, seed)
        row = trained(config)
        rows.append({"hypergradient": mode, "inner_steps": steps, **row, **cost(config)})
        write(path, rows, {"Hyper-gradients of the outer loop": _table(rows)}, quick=quick, seed=seed)
    _plot(rows, path / "outer-loop.png")
    return rows


def configuration(path: Path, mode: str, steps: int, episodes: int, seed: int) -> RunConfig:
    """One run: twelve validations of a long one, four of a quick one, which has few episodes to score as well."""
    scored, validations = (600, 12) if episodes >= 1000 else (100, 4)
    settings = {
        "trainer.validate_every": max(1, episodes // validations),
        "trainer.validation_episodes": scored,
        "trainer.test_episodes": scored,
        "trainer.temperature_episodes": scored,
    }
    return RunConfig(
        dataset=DATASET,
        inference="cvi",
        objective="elbo",
        hypergradient=mode,
        inner_steps=steps,
        episodes=episodes,
        seed=seed,
        settings=settings,
        run_dir=str(path / f"{mode}-{steps}"),
    )


def trained(config: RunConfig) -> Trained:
    """Test scores and the validation curve of one run. Raises KeyboardInterrupt if it was stopped."""
    path = Path(config.run_dir or "")
    result = meta_train.main(begun(resolve(config), path) if path.exists() else config)
    if "interrupted" in result:
        raise KeyboardInterrupt
    test = result["test"]["trained"]
    records = [record for record in run_directory.load(path).read_metrics() if "validation_nll" in record]
    return {
        "accuracy": test["accuracy"],
        "accuracy_ci95": test["accuracy_ci95"],
        "nll": test["nll"],
        "training_failures": result["training_failures"],
        "curve": [{"episodes": row["episodes"], "validation_nll": row["validation_nll"]} for row in records],
    }


def cost(config: RunConfig) -> Cost:
    """Milliseconds of a training step (the fastest of TIMED) and megabytes of XLA's temporaries."""
    splits = load_splits(config.dataset, config.data_root)
    config = with_queries(resolve(config), splits)
    trainer: Trainer = optimisation.build_trainer(build_run(config, splits.image_shape), splits.train)
    state, step = trainer.init(), trainer.step
    compiled = step.lower(state, 0).compile()
    seconds = []
    for index in range(TIMED):
        start = time.perf_counter()
        state, log = compiled(state, index, step.sampler)
        jax.block_until_ready((state.optim_state, log))
        seconds.append(time.perf_counter() - start)
    return {"step_ms": 1e3 * min(seconds), "step_MB": compiled.memory_analysis().temp_size_in_bytes / 1e6}


def _table(rows: list[OuterLoopRow]) -> list[list[str]]:
    header = ["hyper-gradient", "inner steps", "accuracy", "NLL", "training failures", "step, ms", "step, MB"]
    return [header, *map(_cells, rows)]


def _cells(row: OuterLoopRow) -> list[str]:
    return [
        row["hypergradient"],
        str(row["inner_steps"]),
        format_percent(row["accuracy"], row["accuracy_ci95"]),
        f"{row['nll']:.3f}",
        str(row["training_failures"]),
        f"{row['step_ms']:.0f}",
        f"{row['step_MB']:.1f}",
    ]


def _plot(rows: list[OuterLoopRow], path: Path) -> None:
    """Validation loss against episodes and against their seconds; a colour for each number of inner steps.

    Seconds are those of the measured step: those of the runs' clocks depend on what else the machine did meanwhile.
    """
    figure, axes = new_figure(1, 2, (4.5, 3.4), sharey=True)
    colours = {steps: f"C{i}" for i, steps in enumerate(dict.fromkeys(row["inner_steps"] for row in rows))}
    for axis, against in zip(axes[0], ("episodes", "seconds"), strict=True):
        for row in rows:
            x, loss = np.array([[point["episodes"], point["validation_nll"]] for point in row["curve"]]).T
            x = x if against == "episodes" else x * row["step_ms"] / 1e3
            style = "-" if row["hypergradient"] == "sites" else "--"
            label = f"{row['hypergradient']}, {row['inner_steps']}"
            axis.plot(x, loss, style, color=colours[row["inner_steps"]], label=label)
        axis.set(xlabel=f"{against} of training steps")
    axes[0, 0].set_ylabel("validation NLL at temperature 1, nats")
    axes[0, 0].legend(fontsize=7)
    save(figure, path)


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
