"""The temperature of a Gaussian process on features that nothing was trained on, and the power of these features.

    python benchmarks/untrained_temperature.py groceries flowers102 [--episodes 40] [--powers 1 0.7 0.5]

Of scikit-learn's digits as pixels, standardised ones, and of EfficientNet-Lite0's features of the training classes of a
data set, which no result is reported on. For `GaussianProcessHead()`: log T of least NLL, and the NLL at temperature 1,
at what `heads.untrained` expects, at what each task then learns from its labels, and at the best; the least-squares fit
of log T. With powers, for each of them: the NLL at each task's own temperature, with one example a class at the
expected one, and at the best.
"""

import argparse

import numpy as np
from head_setting import NAMES, TRAIN, load
from sklearn.datasets import load_digits

from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, score, task_temperatures
from fewshot.evaluation.text import format_table
from fewshot.heads import GaussianProcessHead, untrained
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset, make_dataset

SHAPES = ((5, 1), (5, 2), (5, 5), (2, 2), (10, 2))
QUERIES, SEED = 10, 0


def sources(names: list[str], data_root: str | None) -> dict[str, Dataset]:
    digits = load_digits()
    pixels = digits.data.astype(np.float32)
    spread = np.where(pixels.std(0) > 0, pixels.std(0), 1)
    tables = {"digits": pixels, "standardised digits": (pixels - pixels.mean(0)) / spread}
    found = {name: make_dataset(x[:, None, None], digits.target) for name, x in tables.items()}
    for name in names:
        source = load(name, data_root)
        found[name] = source.dataset(source.classes(TRAIN))
    return found


def losses(data: Dataset, shape: Shape, count: int, power: float | None) -> tuple[float, list[float]]:
    """log T of least NLL, and the NLL at 1, at the expected T, at each task's own where it learns one, at the best."""
    learner = GaussianProcessHead(power=power).build(data.images.shape[-1]).learner
    features, episodes = embed(learner, data), draw_episodes(SEED, "test", data, shape, count)
    scores, prior = score(learner, features, episodes), untrained([shape.shot] * shape.way)
    best = fit_temperature(scores.probabilities, scores.labels)
    tempered = [scores, scores.tempered(prior.own)]
    if prior.fewer is not None and shape.shot > 1:
        own = task_temperatures(learner, features, episodes, prior.own, prior.fewer, spread=prior.spread)
        tempered.append(scores.tempered(own))
    return float(np.log(best)), [nll(one) for one in [*tempered, scores.tempered(best)]]


def nll(scores: Scores) -> float:
    return metrics.nll(scores.probabilities, scores.labels)


def words(shape: Shape) -> str:
    return f"{shape.way}-way {shape.shot}-shot"


def temperature_table(every: dict[str, Dataset], shapes: list[Shape], count: int) -> str:
    header = ["features", "tasks", "log T", "expected", "NLL at 1", "at the expected", "at its own", "at the best"]
    rows, logs, causes = [], [], []
    for name, data in every.items():
        for shape in shapes:
            log, found = losses(data, shape, count, None)
            expected = np.log(untrained([shape.shot] * shape.way).own)
            each = [f"{value:.3f}" for value in found]
            learned = each[2] if len(each) == 4 else ""
            rows.append([name, words(shape), f"{log:.2f}", f"{expected:.2f}", *each[:2], learned, each[-1]])
            logs.append(log)
            causes.append([1.0, np.log(shape.way), np.log(shape.shot)])
    level, by_classes, by_examples = np.linalg.lstsq(np.array(causes), np.array(logs))[0]
    fit = f"least squares: log T = {level:.2f} + {by_classes:.2f} log C + {by_examples:.2f} log n"
    return f"{format_table(header, rows)}\n\n{fit}"


def power_table(every: dict[str, Dataset], shapes: list[Shape], count: int, powers: list[float]) -> str:
    header = ["features", "tasks", *(f"{power:g}{at}" for at in ("", ", best T") for power in powers)]
    rows = []
    for name, data in every.items():
        for shape in shapes:
            found = [losses(data, shape, count, power)[1] for power in powers]
            at_own, at_best = ([f"{one[place]:.3f}" for one in found] for place in (-2, -1))
            rows.append([name, words(shape), *at_own, *at_best])
    return format_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data-root")
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--powers", nargs="*", type=float, default=[])
    given = parser.parse_args()
    compilation_cache.keep_programs()
    every, shapes = sources(given.names, given.data_root), [Shape(*sizes, QUERIES) for sizes in SHAPES]
    if given.powers:
        print(power_table(every, shapes, given.episodes, given.powers))
    else:
        print(temperature_table(every, shapes, given.episodes))


if __name__ == "__main__":
    main()
