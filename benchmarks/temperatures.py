"""How much harder new classes are than those of training, in temperatures: what NEW_CLASSES and SPREAD rest on.

    python benchmarks/temperatures.py RUN_DIR[:SHOT] ... [--out docs/results/temperatures.md]

The temperature of least NLL is fitted on episodes of training classes, as for every run, and on those of validation
classes; the first table has the NLL of these at temperatures in between. The second has, for two labelled images a
class or more, that of the temperatures which tasks learn from their own labelled images. No test class is looked at.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fewshot.evaluation import metrics, scoring
from fewshot.evaluation.calibration import NEW_CLASSES, fit_temperature, for_new_classes
from fewshot.evaluation.episodes import EVALUATION_SEED, Episodes, Shape, draw_episodes, queries
from fewshot.evaluation.text import format_markdown
from fewshot.learners.task_temperature import SPREAD
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset
from fewshot.training.data import calibration_episodes
from fewshot.training.run import Run, load_run

RISES = (0.0, 0.1, NEW_CLASSES, 0.3, 0.4)
SPREADS = (0.1, SPREAD, 0.3, 0.5, 0.8)
RUN = ["run", "data set", "shot"]


class Measured(NamedTuple):
    """Of one run: log T of training classes, the rise to that of validation classes, and NLLs there."""

    name: tuple[str, str, str]
    log_temperature: float
    rise: float
    at_rises: list[float]
    at_spreads: list[float]


def main() -> None:
    """Print both tables, and write them as Markdown."""
    arguments = parse()
    compilation_cache.keep_programs()
    found = [measure(named, arguments) for named in arguments.runs]
    asked = (
        f"`python benchmarks/temperatures.py {' '.join(arguments.runs)}`, {arguments.episodes} episodes of each split."
    )
    page = "\n\n".join(["# Temperatures of new classes", asked, tables(found)])
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page + "\n")


def measure(named: str, arguments: argparse.Namespace) -> Measured:
    """All numbers of one run, at its own number of labelled images or another."""
    path, _, given = named.partition(":")
    run = load_run(path)
    config, splits = run.config, run.splits(arguments.data_root)
    shot = int(given or config.shot)
    fitted = fitted_on_training(run, splits.train, shot)
    validation = splits.validation
    shape = Shape(config.way, shot, queries(validation, shot))
    episodes = draw_episodes(EVALUATION_SEED, "validation", validation, shape, arguments.episodes)
    features = scoring.embed(run.learner, validation)
    raw = scoring.score(run.learner, features, episodes)
    rise = math.log(fit_temperature(raw.probabilities, raw.labels) / fitted)
    at_rises = [nll(raw.tempered(fitted * math.exp(by))) for by in RISES]
    at_spreads = adapted(run, features, episodes, raw, fitted, splits.train) if shot > 1 else []
    name = f"{config.likelihood}, {config.inference}, {config.episodes:,} episodes", config.dataset, str(shot)
    print(*name, f"{rise:+.3f}", flush=True)
    return Measured(name, math.log(fitted), rise, at_rises, at_spreads)


def fitted_on_training(run: Run, train: Dataset, shot: int) -> float:
    """The temperature of least NLL on training classes."""
    known, episodes = calibration_episodes(run.config, train, run.config.way, shot)
    scores = scoring.score(run.learner, scoring.embed(run.learner, known), episodes)
    return fit_temperature(scores.probabilities, scores.labels)


def adapted(
    run: Run, features: np.ndarray, episodes: Episodes, raw: scoring.Scores, fitted: float, train: Dataset
) -> list[float]:
    """NLL at the temperatures that tasks learn, for every standard deviation about the risen one."""
    risen = for_new_classes(fitted)
    fewer = for_new_classes(fitted_on_training(run, train, episodes.shape.shot - 1))
    learned = (
        scoring.task_temperatures(run.learner, features, episodes, risen, fewer, spread=spread) for spread in SPREADS
    )
    return [nll(raw.tempered(each)) for each in learned]


def nll(scores: scoring.Scores) -> float:
    """Mean over the queries."""
    return metrics.nll(scores.probabilities, scores.labels)


def tables(found: list[Measured]) -> str:
    """Both, with the means of their columns last."""
    header = [*RUN, "log T of training classes", "rise to validation classes", *(f"NLL, risen by {by}" for by in RISES)]
    rows = [[*one.name, f"{one.log_temperature:.3f}", f"{one.rise:+.3f}", *cells(one.at_rises)] for one in found]
    rise, at_rises = np.mean([one.rise for one in found]), np.mean([one.at_rises for one in found], axis=0)
    parts = [format_markdown(header, [*rows, ["mean", "", "", "", f"{rise:+.3f}", *cells(at_rises)]])]
    several = [one for one in found if one.at_spreads]
    if several:
        header = [*RUN, *(f"NLL, spread {spread}" for spread in SPREADS)]
        means = cells(np.mean([one.at_spreads for one in several], axis=0))
        parts.append(
            f"Learned by every task from its own labelled images, about a temperature risen by {NEW_CLASSES}:\n\n"
            + format_markdown(
                header, [*([*one.name, *cells(one.at_spreads)] for one in several), ["mean", "", "", *means]]
            )
        )
    return "\n\n".join(part.strip() for part in parts)


def cells(numbers: list[float] | np.ndarray) -> list[str]:
    """Four digits each."""
    return [f"{number:.4f}" for number in numbers]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR[:SHOT]")
    parser.add_argument("--episodes", type=int, default=600, metavar="N", help="of validation classes (default 600)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--out", metavar="FILE", help="also write the page to a Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
