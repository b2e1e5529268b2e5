"""Image completion of glyphs: every number of docs/neural_processes.md, and its figure.

    taskset -c 0 python benchmarks/image_completion.py [--only cnp anp ...] [--runs DIR] [--out DIR]

Each row is a run of meta_train.py, seed 0, tested on 600 test images at every number of labelled pixels, beside
predictions that know the labelled pixels alone. A run that is there is not trained again. Writes results.json, table.md
and completion.png: mean and standard deviation of every pixel of one test image.
"""

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from fewshot.evaluation.episodes import EVALUATION_SEED
from fewshot.evaluation.figures import Axes
from fewshot.evaluation.real_scores import RealSummary, draw_real_episodes, score_reals
from fewshot.evaluation.text import format_markdown
from fewshot.learners import Learner
from fewshot.learners.base import apply, solve
from fewshot.runners import meta_train
from fewshot.runners.cli import compilation_cache, processor
from fewshot.tasks.curves import Pixels, RealTask, load_curves
from fewshot.training.curve_problem import compared
from fewshot.training.run import load_run

DATA = "glyph-completion"
COUNTS = (10, 30, 100, 300)  # labelled pixels of a test task
QUERIES, EPISODES = 50, 600
NEURAL = "--shot 200 --query 100 --tasks-per-step 16 --episodes 80000"
SETTINGS = "learner.fewest=5 trainer.steps_per_dispatch=50 trainer.validate_every=1000"
ATTENTIVE = "--shot 100 --query 50 --tasks-per-step 16 --episodes 24000"  # a step takes several times as long
PROCESS = "--shot 100 --query 16 --tasks-per-step 4 --episodes 2000 --backbone identity"
ROWS = {
    "cnp": f"--learner cnp {NEURAL} --set {SETTINGS} learner.width=128",
    "np": f"--learner np {NEURAL} --set {SETTINGS} learner.width=128",
    "anp": f"--learner anp {ATTENTIVE} --set {SETTINGS}",
    "RBF on x": f"{PROCESS} --kernel rbf --set kernel.prior_scale=0.1",
    "Matern-5/2 on x": f"{PROCESS} --kernel matern52 --set kernel.prior_scale=0.1",
}
DRAWN = ("cnp", "anp", "RBF on x")
HEADER = ["pixels", "", "NLL", "95% interval", "RMSE", "CRPS", "in 50%", "in 90%"]
PICTURE = 7  # of the test episodes, which image is drawn


class Trained(TypedDict):
    """A row of results.json; seconds are those of the processor, None of a run that was there."""

    command: str
    seconds: float | None


class Picture(NamedTuple):
    """What one learner says of an image: mean and standard deviation [H, W]."""

    mean: np.ndarray
    deviation: np.ndarray


def main() -> None:
    """Train what is missing, test all, print the table and write the files."""
    arguments = parse()
    compilation_cache.keep_programs()
    processor.tune()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    kept = json.loads(results.read_text()) if results.exists() else {"runs": {}, "tests": {}}
    learners = {}
    for name in arguments.only or ROWS:
        learners[name] = trained(name, Path(arguments.runs), kept["runs"])
        results.write_text(json.dumps(kept, indent=1) + "\n")
    curves = load_curves(DATA).test
    assert isinstance(curves, Pixels)
    for count in COUNTS:
        found = kept["tests"].get(str(count), {}) | tested(learners, curves, count)
        order = [name for name in ROWS if name in found] + [name for name in found if name not in ROWS]
        kept["tests"][str(count)] = {name: found[name] for name in order}
    results.write_text(json.dumps(kept, indent=1) + "\n")
    page = table(kept["tests"])
    (out / "table.md").write_text(page + "\n")
    print(page)
    drawn = {name: learners[name] for name in DRAWN if name in learners}
    if drawn:
        draw(drawn, curves, out / "completion.png")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", choices=ROWS)
    parser.add_argument("--runs", default="runs/image-completion")
    parser.add_argument("--out", default="docs/results/completion")
    return parser.parse_args(given)


def trained(name: str, runs: Path, kept: dict[str, Trained]) -> Learner:
    """The learner of a run, which is trained, or gone on with, unless it is whole."""
    words, folder = ROWS[name].split(), runs / "".join(letter if letter.isalnum() else "-" for letter in name)
    there, begun = folder.exists(), time.process_time()
    if not (there and name in kept):
        place = ["--run-dir", str(folder)]
        asked = ["--resume", *place] if there else ["--dataset", DATA, *words, *place]
        if "interrupted" in meta_train.main(meta_train.parse(asked)):
            raise SystemExit(f"stopped; the same command goes on with {folder}")
        kept[name] = Trained(
            command=f"--dataset {DATA} {ROWS[name]}", seconds=None if there else time.process_time() - begun
        )
    return load_run(folder).learner


def tested(learners: dict[str, Learner], curves: Pixels, count: int) -> dict[str, RealSummary]:
    """Every learner at a number of labelled pixels, and what it is compared with."""
    episodes = draw_real_episodes(EVALUATION_SEED, "test", curves, count, QUERIES, EPISODES)
    return {name: score_reals(learner, episodes).summary() for name, learner in learners.items()} | compared(
        curves, episodes
    )


def table(tests: dict[str, dict[str, RealSummary]]) -> str:
    """A line for every learner at every number of pixels."""
    return format_markdown(HEADER, [line(count, name, row) for count in tests for name, row in tests[count].items()])


def line(count: str, name: str, row: RealSummary) -> list[str]:
    """The cells."""
    interval = row["intervals"]["nll"]
    assert interval is not None
    shares = [f"{100 * row['coverage50']:.1f}%", f"{100 * row['coverage90']:.1f}%"]
    ends = f"{interval[0]:.3f} to {interval[1]:.3f}"
    return [count, name, f"{row['nll']:.3f}", ends, f"{row['rmse']:.3f}", f"{row['crps']:.3f}", *shares]


def seen(curves: Pixels, count: int) -> RealTask:
    """One test image: the labelled pixels are the first of one order, and all others are asked for."""
    key = jax.random.fold_in(jax.random.key(EVALUATION_SEED), PICTURE)
    task = curves.sample(key, curves.largest or 0, 0)
    return RealTask(task.x_support[:count], task.y_support[:count], task.x_support, task.y_support)


def picture(learner: Learner, task: RealTask, shape: tuple[int, int]) -> Picture:
    """Every pixel, predicted from the labelled ones."""

    def answer(learner: Learner, task: RealTask) -> Picture:
        inputs = learner.embed(task.x_support), task.y_support, learner.embed(task.x_query)
        found = solve(learner, jax.random.key(0), *inputs, 1).distribution
        return Picture(found.mean, jnp.sqrt(found.variance))

    return Picture(*(image(task.x_query, values, shape) for values in apply(answer, learner, (), task)))


def image(x: jax.Array, values: jax.Array, shape: tuple[int, int]) -> np.ndarray:
    """The picture of values at pixels, NaN elsewhere."""
    row, column = np.rint((np.asarray(x)[:, 0, 0].T + 1) / 2 * (np.array(shape)[:, None] - 1)).astype(int)
    found = np.full(shape, np.nan)
    found[row, column] = np.asarray(values)
    return found


def draw(learners: dict[str, Learner], curves: Pixels, path: Path) -> None:
    """A row for the labelled pixels and two for every learner, a column for every number of them, the truth beside."""
    from matplotlib.figure import Figure

    shape = (curves.images.shape[1], curves.images.shape[2])
    figure = Figure(figsize=(1.25 * (len(COUNTS) + 1), 1.3 * (1 + 2 * len(learners))), layout="constrained")
    axes = figure.subplots(1 + 2 * len(learners), len(COUNTS) + 1, squeeze=False)
    for axis in axes.ravel():
        axis.set(xticks=[], yticks=[])
    for column, count in enumerate(COUNTS):
        task = seen(curves, count)
        axes[0, column].set_title(f"{count} pixels", fontsize=9)
        show(axes[0, column], image(task.x_support, task.y_support, shape))
        for number, learner in enumerate(learners.values()):
            found = picture(learner, task, shape)
            show(axes[1 + 2 * number, column], found.mean)
            show(axes[2 + 2 * number, column], found.deviation, 0.5)
    axes[0, 0].set_ylabel("labelled", fontsize=9)
    for number, name in enumerate(learners):
        axes[1 + 2 * number, 0].set_ylabel(f"{name}\nmean", fontsize=9)
        axes[2 + 2 * number, 0].set_ylabel("deviation", fontsize=9)
    axes[0, -1].set_title("the image", fontsize=9)
    task = seen(curves, 1)
    show(axes[0, -1], image(task.x_query, task.y_query, shape))
    for axis in axes[1:, -1]:
        axis.set_axis_off()
    figure.savefig(path, dpi=100)


def show(axis: Axes, values: np.ndarray, most: float = 1.0) -> None:
    """Grey from 0 to the most; what is not known is blue."""
    axis.set_facecolor("#31508c")
    axis.imshow(values, cmap="gray", vmin=0, vmax=most)


if __name__ == "__main__":
    main()
