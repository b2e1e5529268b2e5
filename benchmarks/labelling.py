"""Which pictures to label next: the ways of `FewShotClassifier.suggest` beside random ones and the largest entropy.

    python benchmarks/labelling.py [--tasks 50] [--out docs/results/labelling.md]

A task has five classes; ten pictures of each test. In an *even* pool every class has 20 others, in an *uneven* one the
classes have 20, 14, 8, 4 and 2. One picture of each class is labelled first, then LABELS more: one at a time, or
AT_ONCE where a way says so. All ways see the same tasks.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from head_setting import NAMES, TEST, TRAIN, Source, load
from scipy.special import entr

from fewshot import FewShotClassifier
from fewshot.evaluation.text import format_markdown
from fewshot.heads import GaussianProcessHead, Head, PretrainedHead
from fewshot.runners.cli import compilation_cache, processor
from fewshot.suggestion import indecision

TESTS, LABELS, AT_ONCE, WANTED = 10, 15, 5, 0.9
POOLS = {"even": (20, 20, 20, 20, 20), "uneven": (20, 14, 8, 4, 2)}
SHOWN = (1, 2, 5, 10, 15)  # labels after which the accuracy is printed
COMPARED = (5, 10, 15)  # those after which ways are compared, also where AT_ONCE are asked for
HEADER = [
    "head",
    "pictures",
    "pool",
    "way",
    *(f"after {count}" for count in SHOWN),
    "mean",
    "more than random",
    "to 90%",
]
Way = Callable[[FewShotClassifier, np.ndarray, np.random.Generator], Sequence[int]]


class Examples(NamedTuple):
    """A pool whose first positions are one of each class, and a test set."""

    pool: np.ndarray
    labels: np.ndarray
    tests: np.ndarray
    truth: np.ndarray


def examples(source: Source, classes: np.ndarray, sizes: Sequence[int], rng: np.random.Generator) -> Examples:
    """A task of some of the classes, with so many pictures of each in its pool."""
    chosen = rng.choice(classes, len(sizes), replace=False)
    drawn = [rng.permutation(np.flatnonzero(source.labels == one)) for one in chosen]
    pool = np.concatenate(
        [[rows[0] for rows in drawn], *(rows[1:size] for rows, size in zip(drawn, sizes, strict=True))]
    )
    tests = np.concatenate([rows[-TESTS:] for rows in drawn])
    return Examples(source.features[pool], source.labels[pool], source.features[tests], source.labels[tests])


def by(utility: str, count: int = 1) -> Way:
    """What `suggest` says."""
    return lambda classifier, pool, _: classifier.suggest(pool, count, by=utility).positions.tolist()


def at_random(_: FewShotClassifier, pool: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Any picture of the pool."""
    return [int(rng.integers(len(pool)))]


def by_entropy(classifier: FewShotClassifier, pool: np.ndarray, _: np.random.Generator) -> list[int]:
    """The largest entropy of the class probabilities."""
    return [int(entr(classifier.predict_proba(pool)).sum(axis=1).argmax())]


def largest_margins(classifier: FewShotClassifier, pool: np.ndarray, _: np.random.Generator) -> list[int]:
    """AT_ONCE of the smallest margins, each as if it were the only one."""
    return np.argsort(-indecision(classifier.predict_proba(pool)), kind="stable")[:AT_ONCE].tolist()


WAYS: Mapping[str, Way] = {
    "random": at_random,
    "margin": by("margin"),
    "information": by("information"),
    "entropy": by_entropy,
    f"margin, {AT_ONCE} at once": by("margin", AT_ONCE),
    f"margin, {AT_ONCE} at once, each as if alone": largest_margins,
}
TESTED = [name for name in WAYS if name not in ("entropy", f"margin, {AT_ONCE} at once, each as if alone")]


def curve(head: Head, task: Examples, classes: int, way: Way, rng: np.random.Generator) -> np.ndarray:
    """Accuracy [LABELS + 1] with one label of each class and after every further label.

    Of labels that are asked for at once it is that of the last full number of them.
    """
    known, rest = list(range(classes)), list(range(classes, len(task.pool)))
    classifier = FewShotClassifier(head, draws=256).fit(task.pool[known], task.labels[known])
    found = [classifier.score(task.tests, task.truth)]
    while len(found) <= LABELS:
        asked = [rest[place] for place in way(classifier, task.pool[rest], rng)]
        rest = [place for place in rest if place not in asked]
        classifier.add(task.pool[asked], task.labels[asked])
        found += [found[-1]] * (len(asked) - 1) + [classifier.score(task.tests, task.truth)]
    return np.array(found[: LABELS + 1])


def curves(head: Head, source: Source, split: int, sizes: Sequence[int], way: Way, tasks: int) -> np.ndarray:
    """Those [T, LABELS + 1] of as many tasks of the classes of a split."""
    found = []
    for seed in range(tasks):
        task = examples(source, source.classes(split), sizes, np.random.default_rng(seed))
        found.append(curve(head, task, len(sizes), way, np.random.default_rng(seed)))
    return np.array(found)


def row(found: np.ndarray, random: np.ndarray) -> list[str]:
    """Accuracies in percent, the mean of those that are COMPARED, its difference to random, labels until WANTED."""
    means = 100 * found[:, COMPARED].mean(axis=1)
    more = means - 100 * random[:, COMPARED].mean(axis=1)
    spread = 1.96 * more.std(ddof=1) / np.sqrt(len(more))
    reached = found >= WANTED
    first = np.where(reached.any(axis=1), reached.argmax(axis=1), LABELS + 1)
    return [
        *(f"{100 * found[:, count].mean():.1f}" for count in SHOWN),
        f"{means.mean():.1f}",
        f"{more.mean():+.1f} +- {spread:.1f}" if spread else "",
        f"{first.mean():.1f}",
    ]


def rows(
    name: str, head: Head, sources: Sequence[Source], split: int, ways: Sequence[str], tasks: int
) -> list[list[str]]:
    """Of every data set, pool and way."""
    found = []
    for source in sources:
        for pool, sizes in POOLS.items():
            random = curves(head, source, split, sizes, WAYS["random"], tasks)
            for way in ways:
                own = random if way == "random" else curves(head, source, split, sizes, WAYS[way], tasks)
                found.append([name, source.name, pool, way, *row(own, random)])
                print(" | ".join(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--data-root")
    parser.add_argument("--out", metavar="FILE.md")
    given = parser.parse_args()
    compilation_cache.keep_programs()
    processor.tune()
    sources = [load(name, given.data_root) for name in NAMES]
    chosen = rows("cosine", GaussianProcessHead(inference="laplace"), sources, TRAIN, list(WAYS), given.tasks)
    tested = rows("photographs", PretrainedHead("photographs"), sources, TEST, TESTED, given.tasks)
    page = (
        "# Which pictures to label next\n\n"
        f"`python benchmarks/labelling.py --tasks {given.tasks}`: accuracy in percent after so many labels more than "
        f"one of each of five classes, on {TESTS} other pictures of each class; means over {given.tasks} tasks. "
        f"*Mean*: of the accuracies after {', '.join(map(str, COMPARED))}. *More than random*: the difference of that, "
        "with a 95% interval over tasks. *To 90%*: labels until at least 90% of a task's test pictures are right, "
        f"{LABELS + 1} where they never are. Of {AT_ONCE} labels at once every column has the accuracy after the last "
        f"full {AT_ONCE}. *Even*: 20 pictures of each class in the pool; *uneven*: 20, 14, 8, 4 "
        "and 2.\n\n## Choice, on training classes\n\nBy a Gaussian process on the features as they are, which nothing "
        f"was learned for.\n\n{format_markdown(HEADER, chosen)}\n## Test classes\n\nBy the shipped head.\n\n"
        f"{format_markdown(HEADER, tested)}"
    )
    if given.out:
        Path(given.out).write_text(page)


if __name__ == "__main__":
    main()
