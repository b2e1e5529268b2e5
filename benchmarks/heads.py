"""The head of a frozen encoder: chosen on validation classes, fitted on training classes, compared on test classes.

    python benchmarks/heads.py choose --out docs/results/heads/choice.md      which metric, kernel and inference
    python benchmarks/heads.py fit --out fewshot/weights/photographs.safetensors
    python benchmarks/heads.py test --out docs/results/heads/comparison.md    beside other methods, paired differences
    python benchmarks/heads.py unknown --out docs/results/heads/unknown.md    classes that a task does not show

Data sets are Flowers 102 and the groceries, 30 pictures a class. A metric that was learned from a class flatters it, so
temperatures are fitted on episodes of one half of the training classes with the metric of the other half, and the other
way round. `--also FILE.npz` adds a data set (features, labels) to the tests, of which nothing was learned, `--seen`
Tiny ImageNet, whose classes the encoder itself was trained on.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from encoders import class_split, pictures
from head_comparison import (
    HEADER,
    KEEP,
    KEPT_HEADER,
    UNKNOWN_HEADER,
    Case,
    Chosens,
    chosen,
    features_of,
    kept_rows,
    rows_of,
    solved,
    training_parts,
    unknown_rows,
)
from PIL.Image import Image

from fewshot.evaluation import metrics
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, score
from fewshot.evaluation.text import format_markdown
from fewshot.learners import GaussianProcess
from fewshot.models.networks import load_encoder
from fewshot.models.networks.metric import gains, unit, within_class_covariance
from fewshot.pretrained import TemperatureTable, load_pretrained, store
from fewshot.runners.cli import compilation_cache, processor
from fewshot.tasks import Dataset, make_dataset
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import Run, build_run

ENCODER, NAMES, IMAGES = "efficientnet-lite0", ("flowers102", "groceries"), 30
SEEN = "tinyimagenet"
TRAIN, VALIDATION, TEST = range(3)
WAYS, SHOTS = (2, 5, 10, 20), (1, 2, 5, 10)
TESTED = ((5, 1), (5, 2), (5, 5), (5, 10), (20, 5))
CHOICE = ((5, 1), (5, 5))
QUERIES, SEED = 10, 0


class Source(NamedTuple):
    """Features [N, D] of a data set, labels [N] in 0..K-1, and the split of every class [K]."""

    name: str
    features: np.ndarray
    labels: np.ndarray
    split: np.ndarray

    def classes(self, split: int) -> np.ndarray:
        return np.flatnonzero(self.split == split)

    def dataset(self, classes: np.ndarray) -> Dataset:
        """The pictures of some classes, features in the place of images."""
        rows = np.isin(self.labels, classes)
        return make_dataset(self.features[rows][:, None, None], np.searchsorted(classes, self.labels[rows]))


def load(name: str, data_root: str | None) -> Source:
    """The features of a data set, from the cache where they are kept."""
    some, labels = pictures(name, IMAGES, data_root)
    return Source(name, encoded(some), labels, class_split(name, labels.max() + 1, data_root))


def encoded(some: list[Image]) -> np.ndarray:
    """Features [N, D]."""
    return FeatureCache().encode(load_encoder(ENCODER), some)


class Head(NamedTuple):
    """What is chosen: the metric's shrinkage and rank, the process, the inference."""

    shrinkage: float = 0.2
    rank: int = 32
    scale: float = 5.0
    kernel: str = "cosine"
    likelihood: str = "softmax"
    inference: str = "cvi"


SHIPPED = Head()
CANDIDATES = {
    "unit features, cosine, scale 30": Head(shrinkage=0.0, scale=30.0),
    "metric .2, rank 128": Head(rank=128),
    "metric .2, rank 64": Head(rank=64),
    "metric .2, rank 32": SHIPPED,
    "metric .2, rank 16": Head(rank=16),
    "metric .1, rank 32": Head(shrinkage=0.1),
    "metric .4, rank 32": Head(shrinkage=0.4),
    "metric .4, rank 16": Head(shrinkage=0.4, rank=16),
    "metric .2, rank 32, scale 1": Head(scale=1.0),
    "metric .2, rank 32, scale 10": Head(scale=10.0),
    "metric .2, rank 32, scale 30": Head(scale=30.0),
    "metric .2, rank 32, rbf of unit features": Head(kernel="rbf-norm"),
    "metric .2, rank 32, one-vs-each": Head(likelihood="one-vs-each"),
    "metric .2, rank 32, label regression": Head(likelihood="gaussian", inference="exact", scale=1.0),
    "metric .2, rank 32, laplace": Head(inference="laplace"),
}


class Metric(NamedTuple):
    """m [D], and the eigenvalues [D] and eigenvectors [D, D] of S, the largest first."""

    mean: np.ndarray
    values: np.ndarray
    vectors: np.ndarray


def metric_of(sources: Sequence[Source], classes: Mapping[str, np.ndarray]) -> Metric:
    """Of some classes of each source: averages over the sources, so that a larger one does not decide alone."""
    means, spreads = [], []
    for source in sources:
        rows = np.isin(source.labels, classes[source.name])
        means.append(unit(source.features[rows]).mean(0))
        spreads.append(within_class_covariance(source.features[rows], source.labels[rows]))
    values, vectors = np.linalg.eigh(np.mean(spreads, axis=0))
    return Metric(np.mean(means, axis=0), np.maximum(values[::-1], 0.0), vectors[:, ::-1])


class Setting:
    """The data sets, and the metrics of all training classes and of either half."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sources
        everything = {one.name: one.classes(TRAIN) for one in sources}
        orders = {name: np.random.default_rng(SEED).permutation(classes) for name, classes in everything.items()}
        self.halves = [{name: np.sort(order[k::2]) for name, order in orders.items()} for k in (0, 1)]
        self.metric = metric_of(sources, everything)
        self.metrics_of_halves = [metric_of(sources, half) for half in self.halves]

    def temperature(self, head: Head, way: int, shot: int, count: int) -> float:
        """The temperature of least NLL on episodes of one half of the training classes by the metric of the other."""
        found = []
        for half, metric in zip(self.halves, reversed(self.metrics_of_halves), strict=True):
            learner = learner_of(head, metric)
            for source in self.sources:
                found.append(answers(learner, source.dataset(half[source.name]), way, shot, max(1, count // 4)))
        return fit_temperature(
            np.concatenate([one.probabilities for one in found]), np.concatenate([one.labels for one in found])
        )


def run_of(head: Head, metric: Metric, name: str = "photographs") -> Run:
    """The run of a head, as `load_run` would have it: a Gaussian process on the metric, nothing of it trained."""
    settings: dict[str, object] = {"backbone.rank": head.rank}
    config = resolve(
        RunConfig(
            dataset=f"embeddings:{name}",
            likelihood=head.likelihood,
            inference=head.inference,
            kernel=head.kernel,
            backbone="metric",
            shot=5,
            query=QUERIES,
            episodes=1,
            settings=settings,
        )
    )
    run = build_run(config, (1, 1, len(metric.mean)))
    assert isinstance(run.learner, GaussianProcess)
    deep_kernel = run.learner.deep_kernel
    values = {
        "mean": metric.mean,
        "directions": metric.vectors[:, : head.rank],
        "gains": gains(metric.values, head.rank, head.shrinkage),
    }
    for field, value in values.items():
        getattr(deep_kernel.backbone, field)[...] = jnp.asarray(value, jnp.result_type(float))
    deep_kernel.hyper["log_scale"][...] = jnp.log(jnp.asarray(head.scale, jnp.result_type(float)))
    return run


def learner_of(head: Head, metric: Metric) -> GaussianProcess:
    learner = run_of(head, metric).learner
    assert isinstance(learner, GaussianProcess)
    return learner


def answers(learner: GaussianProcess, dataset: Dataset, way: int, shot: int, count: int) -> Scores:
    """Probabilities of `count` episodes at temperature 1."""
    episodes = draw_episodes(SEED, "test", dataset, Shape(way, shot, QUERIES), count)
    return score(learner, embed(learner, dataset), episodes)


def choice(setting: Setting, count: int) -> str:
    """Every candidate on validation classes, at the temperature of training classes and at the best one."""
    rows = []
    for name, head in CANDIDATES.items():
        learner = learner_of(head, setting.metric)
        cells, total = [], 0.0
        for way, shot in CHOICE:
            temperature = setting.temperature(head, way, shot, count)
            for source in setting.sources:
                found = answers(learner, source.dataset(source.classes(VALIDATION)), way, shot, count // 2)
                at = found.tempered(temperature)
                best = fit_temperature(found.probabilities, found.labels)
                nll = metrics.nll(at.probabilities, at.labels)
                total += float(np.log(nll))
                least = metrics.nll(found.tempered(best).probabilities, found.labels)
                accuracy = 100 * metrics.accuracy(at.probabilities, at.labels)
                cells.append(f"{accuracy:.1f} / {nll:.4f} / {least:.4f}")
        rows.append([name, *cells, f"{np.exp(total / len(cells)):.4f}"])
        print(rows[-1], flush=True)
    columns = [f"{source.name}, {way}-way {shot}-shot" for way, shot in CHOICE for source in setting.sources]
    table = format_markdown(["head", *columns, "geometric mean of the NLLs"], rows)
    return (
        "# Heads on validation classes\n\n"
        f"`python benchmarks/heads.py choose --episodes {count}`: accuracy in percent / NLL at the temperature of "
        f"training classes / NLL at the best temperature; {count // 2} episodes of each data set.\n\n{table}"
    )


def table_of_temperatures(setting: Setting, head: Head, count: int) -> np.ndarray:
    """log T [WAYS, SHOTS]; larger tasks are of fewer episodes, which have more queries each."""
    logs = np.empty((len(WAYS), len(SHOTS)))
    for i, way in enumerate(WAYS):
        for j, shot in enumerate(SHOTS):
            fewer = max(20, round(count * min(1.0, 25 / (way * shot))))
            logs[i, j] = np.log(setting.temperature(head, way, shot, fewer))
            print(f"{way}-way {shot}-shot: temperature {np.exp(logs[i, j]):.3f} ({fewer} episodes)", flush=True)
    return logs


def fitted(setting: Setting, head: Head, count: int) -> tuple[Run, TemperatureTable]:
    """The run of a head, the metric of all training classes, and its temperatures."""
    logs = table_of_temperatures(setting, head, count) + rise(setting, head, count)
    return run_of(head, setting.metric), TemperatureTable(WAYS, SHOTS, logs)


def rise(setting: Setting, head: Head, count: int) -> float:
    """By how much log T is higher on validation classes, on average over CHOICE and the data sets together."""
    learner, rises = learner_of(head, setting.metric), []
    for way, shot in CHOICE:
        found = [answers(learner, one.dataset(one.classes(VALIDATION)), way, shot, count) for one in setting.sources]
        pooled = (np.concatenate([getattr(one, name) for one in found]) for name in ("probabilities", "labels"))
        rises.append(np.log(fit_temperature(*pooled) / setting.temperature(head, way, shot, 2 * count)))
        print(
            f"{way}-way {shot}-shot: validation classes ask for a log temperature {rises[-1]:+.3f} higher", flush=True
        )
    return float(np.mean(rises))


def tested(setting: Setting, arguments: argparse.Namespace) -> list[Source]:
    """The data sets, and others of whose classes the head learned nothing."""
    found = list(setting.sources)
    if arguments.seen:
        classes = np.flatnonzero(class_split(SEEN, 0, arguments.data_root) == TEST)
        some, labels = pictures(SEEN, IMAGES, arguments.data_root, classes)
        found.append(unlearned(f"{SEEN} (seen by the encoder)", encoded(some), labels))
    if arguments.also:
        with np.load(arguments.also) as arrays:
            found.append(unlearned(Path(arguments.also).stem, arrays["features"], arrays["labels"]))
    return found


def unlearned(name: str, features: np.ndarray, labels: np.ndarray) -> Source:
    """A data set all of whose classes are test classes."""
    numbers = np.unique(labels, return_inverse=True)[1]
    return Source(name, features, numbers, np.full(numbers.max() + 1, TEST))


def others_at(setting: Setting, head: Head, way: int, shot: int) -> Chosens:
    """The other methods, chosen on training classes; in the metric of the other half where they use one."""
    count = max(10, 100 * 5 // way)
    whole = [one.dataset(one.classes(TRAIN)) for one in setting.sources]
    plain = training_parts([(unit(features_of(one)), one) for one in whole], way, shot, count)
    seen = []
    for half, metric in zip(setting.halves, reversed(setting.metrics_of_halves), strict=True):
        learner, parts = learner_of(head, metric), [one.dataset(half[one.name]) for one in setting.sources]
        seen += [(unit(np.asarray(embed(learner, one))), one) for one in parts]
    return chosen(plain, training_parts(seen, way, shot, count // 2), way)


def test(setting: Setting, arguments: argparse.Namespace) -> str:
    """All methods on test classes, and what each keeps."""
    pretrained, rows, kept = load_pretrained("photographs"), [], []
    for way, shot in arguments.tasks or TESTED:
        others = others_at(setting, SHIPPED, way, shot)
        for source in tested(setting, arguments):
            case = Case(source.name, source.dataset(source.classes(TEST)), Shape(way, shot, QUERIES))
            found = solved(pretrained, others, case, arguments.episodes)
            rows += rows_of(case, found)
            kept += kept_rows(case, found)
            print(
                format_markdown(HEADER, rows[-len(found) :]),
                format_markdown(KEPT_HEADER, kept[-len(found) :]),
                flush=True,
            )
    return (
        "# The shipped head on test classes\n\n"
        f"`python benchmarks/heads.py test --episodes {arguments.episodes}`, in brackets what was run. NLL "
        "more than ours: the paired difference to the shipped head on the same episodes, with its 95% interval over "
        f"episodes.\n\n{format_markdown(HEADER, rows)}\n## Answers kept\n\nThe largest set of a task's answers whose "
        f"mean probability is {KEEP}.\n\n{format_markdown(KEPT_HEADER, kept)}"
    )


def unknown(setting: Setting, arguments: argparse.Namespace) -> str:
    """Queries of other classes told from a task's own."""
    pretrained, rows = load_pretrained("photographs"), []
    for way, shot in arguments.tasks or CHOICE:
        others = others_at(setting, SHIPPED, way, shot)
        for source in tested(setting, arguments):
            case = Case(source.name, source.dataset(source.classes(TEST)), Shape(way, shot, QUERIES))
            rows += unknown_rows(pretrained, others, case, arguments.episodes)
            print(rows[-3:], flush=True)
    return (
        "# Unknown classes\n\n"
        f"`python benchmarks/heads.py unknown --episodes {arguments.episodes}`: as many queries of as many other test "
        f"classes; AUROC, the mean over episodes.\n\n{format_markdown(UNKNOWN_HEADER, rows)}"
    )


def main() -> None:
    arguments = parse()
    compilation_cache.enable()
    processor.tune()
    setting = Setting([load(name, arguments.data_root) for name in NAMES])
    if arguments.what == "fit":
        run, table = fitted(setting, SHIPPED, arguments.episodes)
        store(Path(arguments.out), run, table, ENCODER)
        return
    pages = {"choose": lambda: choice(setting, arguments.episodes)}
    pages |= {"test": lambda: test(setting, arguments), "unknown": lambda: unknown(setting, arguments)}
    page = pages[arguments.what]()
    print(page)
    Path(arguments.out).write_text(page)


def shape(text: str) -> tuple[int, int]:
    way, shot = map(int, text.split("x"))
    return way, shot


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("choose", "fit", "test", "unknown"))
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--tasks", type=shape, nargs="+", metavar="5x1", help="classes x labelled pictures of tests")
    parser.add_argument("--also", metavar="FILE.npz")
    parser.add_argument("--seen", action="store_true", help="also test on Tiny ImageNet")
    parser.add_argument("--data-root")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
