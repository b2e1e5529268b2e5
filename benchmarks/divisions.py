"""How much of a calibrated ECE is which classes validate: validation and test classes, divided anew at random.

    python benchmarks/divisions.py RUN_DIR ... [--divisions 20] [--out docs/results/divisions.md]

A temperature is fitted by NLL on episodes of as many classes as validate, and its ECE found on those of the rest. The
network was trained on none of them; its weights were chosen on those of the published division, a run's first row.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fewshot.evaluation import metrics, scoring
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import EVALUATION_SEED, Shape, draw_episodes, queries
from fewshot.evaluation.text import format_markdown
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset, make_dataset
from fewshot.training.run import Run, load_run

HEADER = ["run", "data set", "shot", "division", "accuracy", "other accuracy", "temperature", "ECE", "least", "own"]
LEGEND = """
*Accuracy* and the ECEs are of one side, *other accuracy* of the one that the *temperature* is fitted on. *ECE* is at
that temperature, *least* at the one of least NLL on the side itself, *own* at the run's, which is all that a user has
who has no classes to validate on: quote both."""


class Division(NamedTuple):
    """What one division of the classes gives; ECEs at the temperature fitted on the others, the best, the run's own."""

    accuracy: float
    other_accuracy: float
    temperature: float
    ece: float
    least_ece: float
    own_ece: float


def main() -> None:
    """Print the table, and write it as Markdown."""
    arguments = parse()
    compilation_cache.keep_programs()
    rows = [row for path in arguments.runs for row in rows_of(path, arguments)]
    asked = (
        f"`python benchmarks/divisions.py {' '.join(arguments.runs)}`: {arguments.episodes:,} episodes of each side."
    )
    page = "\n\n".join(["# Classes that validate, divided anew", asked, format_markdown(HEADER, rows) + LEGEND])
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page + "\n")


def rows_of(path: str, arguments: argparse.Namespace) -> list[list[str]]:
    """The published division, and mean and standard deviation over random ones."""
    run = load_run(path)
    config, splits = run.config, run.splits(arguments.data_root)
    joined, validating = join(splits.validation, splits.test), splits.validation.classes
    features = scoring.embed(run.learner, joined)
    orders = [np.random.default_rng(seed).permutation(joined.classes) for seed in range(arguments.divisions)]
    published, *others = [
        divide(run, features, joined, np.split(order, [validating]), arguments.episodes)
        for order in [np.arange(joined.classes), *orders]
    ]
    drawn = np.array(others)
    met = (drawn[:, Division._fields.index("ece")] <= 0.01).sum()
    name = [f"{config.likelihood}, {config.inference}, {config.episodes:,} episodes", config.dataset, str(config.shot)]
    return [
        [*name, "published", *(f"{number:.3f}" for number in published)],
        [*name, f"{len(others)} random, ECE of {met} at most 0.01"]
        + [f"{mean:.3f} +- {sd:.3f}" for mean, sd in zip(drawn.mean(0), drawn.std(0, ddof=1), strict=True)],
    ]


def divide(run: Run, features: np.ndarray, joined: Dataset, sides: list[np.ndarray], episodes: int) -> Division:
    """Fit a temperature on the first side's classes and judge it on the second's."""
    first, second = (scored(run, features, classes_of(joined, side), episodes) for side in sides)
    fitted, best = (fit_temperature(one.probabilities, one.labels) for one in (first, second))
    return Division(
        metrics.accuracy(second.probabilities, second.labels),
        metrics.accuracy(first.probabilities, first.labels),
        fitted,
        *(ece(second.tempered(temperature)) for temperature in (fitted, best, run.temperature)),
    )


def scored(run: Run, features: np.ndarray, dataset: Dataset, episodes: int) -> scoring.Scores:
    """Episodes of the run's own way and shot, at temperature 1."""
    shape = Shape(run.config.way, run.config.shot, queries(dataset, run.config.shot))
    return scoring.score(run.learner, features, draw_episodes(EVALUATION_SEED, "test", dataset, shape, episodes))


def join(one: Dataset, other: Dataset) -> Dataset:
    """The classes of both, those of the second last; neither has turned images."""
    labels = [np.zeros(len(dataset.images), int) for dataset in (one, other)]
    for dataset, of in zip((one, other), labels, strict=True):
        for label, (row, count) in enumerate(zip(np.asarray(dataset.index), dataset.counts, strict=True)):
            of[row[:count]] = label
    images = np.concatenate([np.asarray(one.images), np.asarray(other.images)])
    return make_dataset(images, np.concatenate([labels[0], labels[1] + one.classes]))


def classes_of(dataset: Dataset, classes: np.ndarray) -> Dataset:
    """Some classes of a data set, among all of its images."""
    counts = dataset.counts[classes]
    return dataset._replace(index=dataset.index[classes], counts=counts, smallest=int(counts.min()))


def ece(scores: scoring.Scores) -> float:
    """15 bins of equal width."""
    return metrics.calibration_errors(scores.probabilities, scores.labels)["ece"]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR")
    parser.add_argument("--divisions", type=int, default=20, metavar="N", help="at random (default 20)")
    parser.add_argument("--episodes", type=int, default=1000, metavar="N", help="of each side (default 1000)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--out", metavar="FILE", help="also write the page to a Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
