"""The temperature of a Gaussian process on features that nothing was trained on, by classes and examples of each.

    python benchmarks/untrained_temperature.py [--features FILE.npz ...] [--episodes 40]

Of scikit-learn's digits as pixels, standardised ones, and of any file with `features` [N, D] and `labels` [N], whose
classes should be none that results are reported on. Prints, for `GaussianProcessHead()`, log T of least NLL, and the
NLL at temperature 1, at what `heads.untrained` expects, at what each task then learns from its labels, and at the best.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import embed, score, task_temperatures
from fewshot.evaluation.text import format_table
from fewshot.heads import GaussianProcessHead, untrained
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import Dataset, make_dataset

SHAPES = ((5, 1), (5, 2), (5, 5), (2, 2), (10, 2))
QUERIES, SEED = 10, 0


def sources(files: list[str]) -> dict[str, Dataset]:
    digits = load_digits()
    pixels = digits.data.astype(np.float32)
    spread = np.where(pixels.std(0) > 0, pixels.std(0), 1)
    found = {
        "digits": (pixels, digits.target),
        "standardised digits": ((pixels - pixels.mean(0)) / spread, digits.target),
    }
    for file in files:
        arrays = np.load(file)
        found[Path(file).stem] = arrays["features"], np.unique(arrays["labels"], return_inverse=True)[1]
    return {name: make_dataset(x[:, None, None], y) for name, (x, y) in found.items()}


def row(name: str, data: Dataset, way: int, shot: int, count: int) -> list[str]:
    learner = GaussianProcessHead().build(data.images.shape[-1]).learner
    features, episodes = embed(learner, data), draw_episodes(SEED, "test", data, Shape(way, shot, QUERIES), count)
    scores, prior = score(learner, features, episodes), untrained([shot] * way)
    best = fit_temperature(scores.probabilities, scores.labels)
    at = [1.0, prior.own]
    if prior.fewer is not None and shot > 1:
        at.append(task_temperatures(learner, features, episodes, prior.own, prior.fewer, spread=prior.spread))
    tempered = [scores.tempered(one) for one in [*at, best]]
    each = [f"{metrics.nll(one.probabilities, one.labels):.3f}" for one in tempered]
    learned = each[2] if len(each) == 4 else ""
    return [
        name,
        f"{way}-way {shot}-shot",
        f"{np.log(best):.2f}",
        f"{np.log(prior.own):.2f}",
        *each[:2],
        learned,
        each[-1],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", nargs="*", default=[], metavar="FILE.npz")
    parser.add_argument("--episodes", type=int, default=40)
    given = parser.parse_args()
    compilation_cache.enable()
    header = ["features", "tasks", "log T", "expected", "NLL at 1", "at the expected", "at its own", "at the best"]
    every = sources(given.features)
    rows = [row(name, data, *shape, given.episodes) for name, data in every.items() for shape in SHAPES]
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
