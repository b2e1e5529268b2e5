"""Classification with thousands of labels a class, through inducing points, beside logistic regression.

    python benchmarks/many_labels.py [--labels 2000] [--inducing 128 256] [--out FILE.md]

Five classes of three normal clusters each in 20 inputs: no line between two classes is good, and the best possible
answers are known. Seconds are of the processor, compilation included.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.base import ClassifierMixin
from sklearn.linear_model import LogisticRegression

from fewshot import FewShotClassifier
from fewshot.evaluation import metrics
from fewshot.evaluation.text import format_markdown
from fewshot.heads import GaussianProcessHead
from fewshot.runners.cli import processor

CLASSES, CLUSTERS, INPUTS, QUERIES = 5, 3, 20, 2000
SPREAD = 0.7  # standard deviation of a cluster's centre, of inputs with deviation 1 about it


class Rows(NamedTuple):
    """Inputs [N, D], labels [N], and log p(y | x) [N, C] of those that made them."""

    x: np.ndarray
    y: np.ndarray
    log_probabilities: np.ndarray


def rows(rng: np.random.Generator, centres: np.ndarray, count: int) -> Rows:
    """As many rows of every class, about centres [C, K, D]."""
    y = np.repeat(np.arange(len(centres)), count)
    chosen = rng.integers(centres.shape[1], size=len(y))
    x = centres[y, chosen] + rng.normal(size=(len(y), centres.shape[2]))
    each = np.array([[multivariate_normal(centre).logpdf(x) for centre in one] for one in centres])
    logs = logsumexp(each, axis=1)
    return Rows(x, y, (logs - logsumexp(logs, axis=0)).T)


def methods(inducing: list[int]) -> Iterator[tuple[str, ClassifierMixin]]:
    """What is compared."""
    for points in inducing:
        head = GaussianProcessHead(kernel="rbf", scale=5.0, lengthscale=1.0, inducing=points)
        yield f"Gaussian process, {points} inducing points", FewShotClassifier(head, temperature=1.0)
    yield "logistic regression", LogisticRegression(max_iter=1000)


def judged(probabilities: np.ndarray, y: np.ndarray) -> list[str]:
    """Accuracy in percent, NLL."""
    one = probabilities[None], y[None]
    return [f"{100 * metrics.accuracy(*one):.1f}", f"{metrics.nll(*one):.3f}"]


def main() -> None:
    arguments = parse()
    processor.tune()
    rng = np.random.default_rng(arguments.seed)
    centres = SPREAD * rng.normal(size=(CLASSES, CLUSTERS, INPUTS))
    train, new = rows(rng, centres, arguments.labels), rows(rng, centres, QUERIES // CLASSES)
    found = [["best possible", *judged(np.exp(new.log_probabilities), new.y), ""]]
    for name, method in methods(arguments.inducing):
        start = time.process_time()
        probabilities = method.fit(train.x, train.y).predict_proba(new.x)
        seconds = time.process_time() - start
        found.append([name, *judged(probabilities, new.y), f"{seconds:.0f}"])
        print(found[-1], flush=True)
    page = (
        f"# {CLASSES} classes of {arguments.labels} labels each\n\n`python benchmarks/many_labels.py --labels "
        f"{arguments.labels} --inducing {' '.join(map(str, arguments.inducing))} --seed {arguments.seed}`: accuracy in "
        f"percent and NLL of {QUERIES} others; processor seconds of fitting and predicting, compilation included.\n\n"
        + format_markdown(["method", "accuracy", "NLL", "seconds"], found)
    )
    print(page)
    if arguments.out:
        Path(arguments.out).write_text(page)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--labels", type=int, default=2000, help="of each class")
    parser.add_argument("--inducing", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
