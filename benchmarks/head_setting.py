"""What heads.py works on: features by class, a metric of some classes, and the processes on it.

A metric that was learned from a class flatters it. So the training classes are cut into halves, and what is `unseen` is
each half by the metric of the other one, and validation classes by that of all training classes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from encoders import class_split, pictures
from PIL.Image import Image

from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.scoring import Scores, embed, score
from fewshot.learners import GaussianProcess
from fewshot.models.networks import load_encoder
from fewshot.models.networks.metric import gains, unit, within_class_covariance
from fewshot.tasks import Dataset, make_dataset
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import Run, build_run

ENCODER, NAMES, IMAGES = "efficientnet-lite0", ("flowers102", "groceries"), 30
TRAIN, VALIDATION, TEST = range(3)
QUERIES, SEED = 10, 0
BLOCK = 10  # episodes at once, the same for parts of all sizes, so that one program serves them all


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
    """What is chosen: the metric's shrinkage and rank, the process, the inference.

    constant: of the cosine kernel, the prior variance of an intercept in units of the scale. plug_in: probabilities at
    the posterior mean.
    """

    shrinkage: float = 0.2
    rank: int = 32
    scale: float = 5.0
    constant: float = 0.0
    plug_in: bool = False
    kernel: str = "cosine"
    likelihood: str = "softmax"
    inference: str = "cvi"


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


class Unseen(NamedTuple):
    """Some classes of a source, and the learner on a metric that was made of others: those, by the source's name."""

    learner: GaussianProcess
    source: Source
    classes: np.ndarray
    made_of: Mapping[str, np.ndarray]

    @property
    def dataset(self) -> Dataset:
        return self.source.dataset(self.classes)


class Setting:
    """The data sets, and the metrics of all training classes and of either half."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = sources
        self.training = {one.name: one.classes(TRAIN) for one in sources}
        orders = {name: np.random.default_rng(SEED).permutation(classes) for name, classes in self.training.items()}
        self.halves = [{name: np.sort(order[k::2]) for name, order in orders.items()} for k in (0, 1)]
        self.metric = metric_of(sources, self.training)
        self.metrics_of_halves = [metric_of(sources, half) for half in self.halves]

    def unseen(self, head: Head, way: int) -> list[Unseen]:
        """Classes with a learner whose metric they did not make: halves of training classes, validation classes."""
        found = []
        for half, other, metric in zip(self.halves, self.halves[::-1], self.metrics_of_halves[::-1], strict=True):
            found += [Unseen(learner_of(head, metric), one, half[one.name], other) for one in self.sources]
        learner = learner_of(head, self.metric)
        found += [Unseen(learner, one, one.classes(VALIDATION), self.training) for one in self.sources]
        return [one for one in found if len(one.classes) >= way]

    def answers(self, head: Head, way: int, shot: int, count: int) -> list[Scores]:
        """Those to about `count` episodes on all that is unseen, every class with the same weight."""
        unseen = self.unseen(head, way)
        counts = shares(unseen, count)
        return [answers(one.learner, one.dataset, way, shot, part) for one, part in zip(unseen, counts, strict=True)]

    def temperature(self, head: Head, way: int, shot: int, count: int) -> float:
        """The temperature of least NLL there."""
        return fit_temperature(*pooled(self.answers(head, way, shot, count)))


def shares(unseen: Sequence[Unseen], count: int) -> list[int]:
    """Episodes of each part, by its classes."""
    total = sum(len(one.classes) for one in unseen)
    return [max(1, round(count * len(one.classes) / total)) for one in unseen]


def pooled(found: Sequence[Scores]) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and labels of all episodes."""
    return np.concatenate([one.probabilities for one in found]), np.concatenate([one.labels for one in found])


def run_of(head: Head, metric: Metric, name: str = "photographs") -> Run:
    """The run of a head, as `load_run` would have it: a Gaussian process on the metric, nothing of it trained."""
    settings: dict[str, object] = {"backbone.rank": head.rank}
    if head.constant:
        settings["kernel.constant"] = head.constant
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
