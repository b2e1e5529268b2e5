"""What heads.py works on: features by class, a metric of some classes, and the processes on it.

A metric that was learned from a class flatters it. So the classes that may be learned from, those of training and of
validation, are cut into folds, and what is `unseen` is each fold by the metric of the others.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from encoders import among_first, class_split, pictures
from PIL.Image import Image

from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, score
from fewshot.learners import GaussianProcess
from fewshot.models.backbones import powered
from fewshot.models.networks import load_encoder
from fewshot.models.networks.metric import gains, unit, within_class_covariance
from fewshot.tasks import Dataset, make_dataset
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import Run, build_run

ENCODER, NAMES = "efficientnet-lite0", ("flowers102", "groceries")
IMAGES = 30  # of a class in episodes, the first; metrics are made of all
TRAIN, VALIDATION, TEST = range(3)
FOLDS = 4
QUERIES, SEED = 10, 0
BOUNDS = (1e-3, 20.0)  # of temperatures: a process of output scale .3 needs one of .01
BLOCK = 10  # episodes at once, the same for parts of all sizes, so that one program serves them all


class Source(NamedTuple):
    """Features [N, D] of a data set, labels [N] in 0..K-1, and the split of every class [K]."""

    name: str
    features: np.ndarray
    labels: np.ndarray
    split: np.ndarray

    def classes(self, split: int) -> np.ndarray:
        return np.flatnonzero(self.split == split)

    def rows(self, classes: np.ndarray, images: int | None) -> np.ndarray:
        """Which pictures [N] are the first `images` of some classes; None: all of them."""
        found = np.isin(self.labels, classes)
        return found if images is None else found & among_first(self.labels, images)

    def dataset(self, classes: np.ndarray, images: int | None = IMAGES) -> Dataset:
        """Those pictures, features in the place of images."""
        rows = self.rows(classes, images)
        return make_dataset(self.features[rows][:, None, None], np.searchsorted(classes, self.labels[rows]))


def load(name: str, data_root: str | None) -> Source:
    """The features of a data set, from the cache where they are kept."""
    some, labels = pictures(name, None, data_root)
    return Source(name, encoded(some), labels, class_split(name, labels.max() + 1, data_root))


def encoded(some: list[Image]) -> np.ndarray:
    """Features [N, D]."""
    return FeatureCache().encode(load_encoder(ENCODER), some)


class Head(NamedTuple):
    """What is chosen: shrinkage and rank of the metric (0: none), power of the features, the process, the inference.

    constant: of the cosine kernel, the prior variance of an intercept in units of the scale; the powers are those of
    the examples a class by which scale and constant change. plug_in: probabilities at the posterior mean.
    """

    shrinkage: float = 0.2
    rank: int = 32
    power: float = 1.0
    scale: float = 5.0
    constant: float = 0.0
    scale_power: float = 0.0
    constant_power: float = 0.0
    plug_in: bool = False
    kernel: str = "cosine"
    likelihood: str = "softmax"
    inference: str = "cvi"


class Metric(NamedTuple):
    """m [D], and the eigenvalues [D] and eigenvectors [D, D] of S, the largest first."""

    mean: np.ndarray
    values: np.ndarray
    vectors: np.ndarray


def metric_of(
    sources: Sequence[Source], classes: Mapping[str, np.ndarray], power: float = 1.0, images: int | None = None
) -> Metric:
    """Of powers of the features of the first `images` pictures (None: all) of some classes of each source.

    The mean is that of class means. Both are averages over the sources, so that a larger one does not decide alone.
    """
    means, spreads = [], []
    for source in sources:
        rows = source.rows(classes[source.name], images)
        features, labels = np.asarray(powered(jnp.asarray(source.features[rows]), power)), source.labels[rows]
        means.append(np.mean([unit(features[labels == one]).mean(0) for one in np.unique(labels)], axis=0))
        spreads.append(within_class_covariance(features, labels))
    values, vectors = np.linalg.eigh(np.mean(spreads, axis=0))
    return Metric(np.mean(means, axis=0), np.maximum(values[::-1], 0.0), vectors[:, ::-1])


class Unseen(NamedTuple):
    """Some classes of a source, and the learner on a metric that was made of others: those, by the source's name."""

    learner: GaussianProcess
    source: Source
    classes: np.ndarray
    made_of: Mapping[str, np.ndarray]

    @property
    def dataset(self) -> Dataset:
        return self.source.dataset(self.classes)


class Fold(NamedTuple):
    """Some classes of every source, and those of the other folds."""

    classes: Mapping[str, np.ndarray]
    made_of: Mapping[str, np.ndarray]


def folds(orders: Mapping[str, np.ndarray], count: int) -> list[Fold]:
    """Every `count`-th class in the order given makes a fold."""
    found = []
    for k in range(count):
        classes = {name: np.sort(order[k::count]) for name, order in orders.items()}
        found.append(Fold(classes, {name: np.setdiff1d(order, classes[name]) for name, order in orders.items()}))
    return found


class Setting:
    """The data sets, the classes that may be learned from, and the metrics that they make.

    images: pictures a class that a metric is made of; None: all.
    """

    def __init__(self, sources: Sequence[Source], most_folds: int = FOLDS, images: int | None = None):
        self.sources, self.most_folds, self.images = sources, most_folds, images
        self.learned = {one.name: np.flatnonzero(np.isin(one.split, (TRAIN, VALIDATION))) for one in sources}
        orders = {name: np.random.default_rng(SEED).permutation(classes) for name, classes in self.learned.items()}
        self._folds, self._metrics = cache(partial(folds, orders)), cache(self._metrics_of_folds)
        self._metric = cache(lambda power: metric_of(sources, self.learned, power, images))

    def metric(self, head: Head) -> Metric:
        """That of all classes to learn from, for a head."""
        return self._metric(head.power)

    def _metrics_of_folds(self, count: int, power: float) -> list[Metric]:
        """That of the other folds, for each."""
        return [metric_of(self.sources, one.made_of, power, self.images) for one in self._folds(count)]

    def unseen(self, head: Head, way: int) -> list[Unseen]:
        """Folds of the classes to learn from, with a learner on the metric of the other folds.

        As many folds as leave every one of them enough classes, `most_folds` at most.
        """
        count = min(self.most_folds, min(map(len, self.learned.values())) // way)
        if count < 2:
            raise ValueError(f"expected at least {2 * way} classes of each data set for two folds, got fewer")
        return [
            Unseen(learner_of(head, metric), one, fold.classes[one.name], fold.made_of)
            for fold, metric in zip(self._folds(count), self._metrics(count, head.power), strict=True)
            for one in self.sources
        ]

    def answers(self, head: Head, way: int, shot: int, count: int) -> list[Scores]:
        """Those to about `count` episodes on all that is unseen, every class with the same weight."""
        unseen = self.unseen(head, way)
        counts = shares(unseen, count)
        return [answers(one.learner, one.dataset, way, shot, part) for one, part in zip(unseen, counts, strict=True)]

    def by_source(self, head: Head, way: int, shot: int, count: int) -> dict[str, list[Scores]]:
        """Those answers under the name of their data set."""
        found: dict[str, list[Scores]] = {one.name: [] for one in self.sources}
        for one, scores in zip(self.unseen(head, way), self.answers(head, way, shot, count), strict=True):
            found[one.source.name].append(scores)
        return found

    def temperature(self, head: Head, way: int, shot: int, count: int) -> float:
        """The temperature of least NLL there."""
        return temperature_of(self.answers(head, way, shot, count))


def shares(unseen: Sequence[Unseen], count: int) -> list[int]:
    """Episodes of each part, by its classes."""
    total = sum(len(one.classes) for one in unseen)
    return [max(1, round(count * len(one.classes) / total)) for one in unseen]


def temperature_of(found: Sequence[Scores]) -> float:
    """That of least NLL of all answers."""
    return fit_temperature(*pooled(found), bounds=BOUNDS)


def pooled(found: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels of all episodes."""
    return np.concatenate([one.probabilities for one in found]), np.concatenate([one.labels for one in found])


def run_of(head: Head, metric: Metric, name: str = "photographs") -> Run:
    """The run of a head, as `load_run` would have it: a Gaussian process on features or the metric, nothing trained."""
    settings: dict[str, object] = {"backbone.rank": head.rank, "backbone.power": head.power}
    of_kernel = {each: getattr(head, each) for each in ("constant", "scale_power", "constant_power")}
    settings |= {f"kernel.{each}": value for each, value in of_kernel.items() if value}
    if head.plug_in:
        settings["likelihood.plug_in"] = True
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
    if head.rank:
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
    return score(learner, embed(learner, dataset), episodes, BLOCK)
