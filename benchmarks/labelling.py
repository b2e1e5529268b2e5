"""Labels until 90% accuracy: those that `FewShotClassifier.suggest` asks for against labels of random examples.

    python benchmarks/labelling.py --test-classes groceries [--tasks 30] [--weights photographs]
    python benchmarks/labelling.py --training-classes groceries ...
    python benchmarks/labelling.py --features FILE.npz ...

FILE has `features` [N, D] and `labels` [N]; classes are those of heads.py, 30 pictures each. A task has 5 classes
with 10 examples in the pool and 10 to test on each, and begins with one label of every class; both ways begin with the
same ones, and get one label at a time.
"""

import argparse

import numpy as np
from head_setting import IMAGES, NAMES, TEST, TRAIN, load

from fewshot import FewShotClassifier
from fewshot.heads import GaussianProcessHead, Head, PretrainedHead
from fewshot.pretrained import PRETRAINED
from fewshot.runners.cli import compilation_cache

CLASSES, POOL, TESTS, WANTED, MOST = 5, 10, 10, 0.9, 30


class Examples:
    """A pool and a test set of one task, the pool's first CLASSES positions one of each class."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, rng: np.random.Generator):
        chosen = rng.choice(np.unique(labels), CLASSES, replace=False)
        drawn = [rng.permutation(np.flatnonzero(labels == one))[: POOL + TESTS] for one in chosen]
        pool = np.array(drawn)[:, :POOL].T.ravel()  # one of each class, then the others
        tests = np.array(drawn)[:, POOL:].ravel()
        self.pool, self.labels = features[pool], labels[pool]
        self.tests, self.truth = features[tests], labels[tests]


def labels_needed(head: Head, task: Examples, rng: np.random.Generator, suggests: bool) -> int:
    """How many labels, of MOST at most, until WANTED of the test examples are right."""
    known, rest = list(range(CLASSES)), list(range(CLASSES, len(task.pool)))
    # Accuracy and suggestions do not depend on the temperature.
    classifier = FewShotClassifier(head, temperature=1.0, draws=256)
    classifier.fit(task.pool[known], task.labels[known])
    while classifier.score(task.tests, task.truth) < WANTED and len(known) < MOST:
        place = classifier.suggest(task.pool[rest], 1).positions[0] if suggests else rng.integers(len(rest))
        known.append(rest.pop(int(place)))
        classifier.add(task.pool[known[-1:]], task.labels[known[-1:]])
    return len(known)


def examples_of(given: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Features [N, D] and labels [N] of a file, or of classes of a data set."""
    if given.features:
        with np.load(given.features) as arrays:
            return arrays["features"], arrays["labels"]
    source = load(given.test_classes or given.training_classes, given.data_root)
    rows = source.rows(source.classes(TEST if given.test_classes else TRAIN), IMAGES)
    return source.features[rows], source.labels[rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    examples = parser.add_mutually_exclusive_group(required=True)
    examples.add_argument("--features", metavar="FILE.npz")
    examples.add_argument("--test-classes", choices=NAMES)
    examples.add_argument("--training-classes", choices=NAMES)
    parser.add_argument("--data-root")
    parser.add_argument("--tasks", type=int, default=30)
    parser.add_argument(
        "--weights", choices=PRETRAINED, help="the head of these; else one that nothing was learned for"
    )
    given = parser.parse_args()
    compilation_cache.keep_programs()
    head = PretrainedHead(given.weights) if given.weights else GaussianProcessHead(inference="laplace")
    features, labels = examples_of(given)
    found = []
    for seed in range(given.tasks):
        task = Examples(features, labels, np.random.default_rng(seed))
        found.append([labels_needed(head, task, np.random.default_rng(seed), suggests) for suggests in (True, False)])
    counts = np.array(found)
    less = counts[:, 1] - counts[:, 0]
    draws = np.random.default_rng(0).choice(less, (10_000, len(less))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    print(f"labels to {WANTED:.0%}, mean of {given.tasks} tasks: suggested {counts[:, 0].mean():.1f}, random", end=" ")
    print(
        f"{counts[:, 1].mean():.1f}; {less.mean():.1f} fewer, 95% interval over tasks {low:.1f} to {high:.1f};", end=" "
    )
    print(f"not reached with {MOST}: {(counts == MOST).sum(0).tolist()}")


if __name__ == "__main__":
    main()
