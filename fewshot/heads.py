"""What answers behind a `FewShotClassifier`, described by plain parameters: to be searched, cloned and saved.

    GaussianProcessHead(likelihood=..., kernel=..., inference=...)   a Gaussian process on features, nothing trained
    TrainedRun(DIR)                                                  the network and the head of a run folder
    PretrainedHead(NAME)                                             what is shipped under a name

A head builds a learner, and says which temperature a task is expected to have before its labels are seen.
"""

import functools
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Shaped
from sklearn.base import BaseEstimator

from fewshot.conditioning import TemperaturePrior
from fewshot.inference.many_labels import ManyLabels
from fewshot.learners import GaussianProcess, Learner
from fewshot.pretrained import PRETRAINED, Content, Pretrained, content_of, load_pretrained, parsed
from fewshot.training import shape_temperature
from fewshot.training.configuration import GAUSSIAN_PROCESS, RunConfig, resolve
from fewshot.training.overrides import ConfigError, Setting
from fewshot.training.run import Run, build_run, load_class_run
from fewshot.training.run_directory import RunError

Counts = Sequence[int]  # labelled examples of each class
EMBEDDINGS = "embeddings:"  # the data set of features

# log T = LEVEL + BY_CLASSES log C + BY_EXAMPLES log n of tasks on features that nothing was trained on, for the default
# head, on digits and training classes of photographs (benchmarks/untrained_temperature.py, docs/results/untrained.md).
LEVEL, BY_CLASSES, BY_EXAMPLES = -2.03, 0.27, 0.16
UNTRAINED_SPREAD = 0.5  # of a task's log T about that: kinds of features differ by more than tasks of one kind
COSINE_POWER = 0.7  # of such features before the cosine kernel, chosen by the same command
UNKNOWN = TemperaturePrior(1.0, 1.0, 1.0)  # of learners of which nothing was measured


class Built(NamedTuple):
    """A learner, the prior of a task's temperature by its counts, and the data set whose pictures it was trained on.

    balanced: whether it is shown as many examples of every class (`groups_of`), unless it is told otherwise.
    """

    learner: Learner
    temperature: Callable[[Counts], TemperaturePrior]
    balanced: bool
    dataset: str = EMBEDDINGS


class Head(BaseEstimator):
    """The base of descriptions. `kind` is their name in files."""

    kind: ClassVar[str]

    def build(self, width: int | None) -> Built:
        """The learner for features [N, width], or for images where there are no features. Raises ValueError."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    def for_task(self, images: Shaped[np.ndarray, "N H W Ch"]) -> "Head":
        """What answers a task with these labelled images or features: this, or one that is better for their kind."""
        del images
        return self.located()

    def located(self) -> "Head":
        """This, found from any working folder."""
        return self

    def fingerprint(self) -> str:
        """SHA-256 of what the description only points at, "" where it says all."""
        return ""


class GaussianProcessHead(Head):
    """A Gaussian process on features [N, D], with a kernel that is not trained.

    likelihood, kernel and inference are names of the command line; scale is s2, the prior variance of every latent
    function; lengthscale is that of stationary kernels, of features divided by sqrt(D); settings are further values as
    after `--set`, by their dotted names. inducing: tasks of more examples than that are seen through so many of them,
    which takes memory and time in proportion to the examples (docs/sparse.md); None for no limit. power: features are
    raised to it first, their signs kept: below 1 a few large ones decide less (docs/results/untrained.md); None for 0.7
    before the cosine kernel and 1 before others. The temperature is learned from each task's labels where a class has
    two.
    """

    kind = "gaussian-process"

    def __init__(
        self,
        likelihood: str = "softmax",
        kernel: str = "cosine",
        inference: str = "auto",
        scale: float = 30.0,
        lengthscale: float | None = None,
        settings: Mapping[str, Setting] | None = None,
        inducing: int | None = None,
        power: float | None = None,
    ):
        self.likelihood, self.kernel, self.inference = likelihood, kernel, inference
        self.scale, self.lengthscale, self.settings, self.inducing = scale, lengthscale, settings, inducing
        self.power = power

    def build(self, width: int | None) -> Built:
        """The learner. Raises ValueError without features, and for parameters that make no sense."""
        if width is None:
            raise ValueError("expected features [N, D], got pictures; give an encoder, as encoder='efficientnet-lite0'")
        try:
            learner = build_run(self._configuration(), (1, 1, width)).learner
            if self.inducing is not None:
                assert isinstance(learner, GaussianProcess)
                learner = learner.with_many_labels(ManyLabels(self.inducing))
        except (ConfigError, ValueError) as error:
            raise ValueError(f"GaussianProcessHead: {str(error).removeprefix('--set ')}") from error
        # The labels -1 and 1 of label regression leave its probabilities too sure, not too careful.
        prior = (lambda counts: UNKNOWN) if self.likelihood == "gaussian" else untrained
        return Built(learner, prior, balanced=self.kernel == "cosine")

    def _configuration(self) -> RunConfig:
        own = COSINE_POWER if self.kernel == "cosine" else 1.0
        power = own if self.power is None else _number("power", self.power)
        settings = {
            "kernel.prior_scale": _number("scale", self.scale),
            "backbone.power": power,
            **(self.settings or {}),
        }
        if self.lengthscale is not None:
            settings["kernel.log_lengthscale"] = math.log(_number("lengthscale", self.lengthscale))
        chosen = {"likelihood": self.likelihood, "kernel": self.kernel, "inference": self.inference}
        if wrong := [name for name, value in chosen.items() if not isinstance(value, str)]:
            raise ConfigError(f"expected a name as {wrong[0]}, got {chosen[wrong[0]]!r}"[:200])
        return resolve(
            RunConfig(
                dataset=EMBEDDINGS,
                learner=GAUSSIAN_PROCESS,
                likelihood=self.likelihood,
                inference=self.inference,
                kernel=self.kernel,
                backbone="identity",
                settings=settings,
            )
        )


def untrained(counts: Counts) -> TemperaturePrior:
    """What is expected of a task's temperature on features that nothing was trained on."""

    def at(examples: float) -> float:
        return math.exp(LEVEL + BY_CLASSES * math.log(len(counts)) + BY_EXAMPLES * math.log(examples))

    examples = sum(counts) / len(counts)
    return TemperaturePrior(at(examples), at(max(examples - 1, 1)), UNTRAINED_SPREAD)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf:
        raise ConfigError(f"{name}: expected a positive number, got {str(value)[:40]}")
    return float(value)


class TrainedRun(Head):
    """The network and the head of a run folder.

    A run's temperature belongs to one number of classes and of images a class. Where the run's data set lies in
    data_root, it is fitted for yours, once for each shape, which takes seconds; otherwise the run's own is used.
    """

    kind = "run"

    def __init__(self, run_dir: str, data_root: str | None = None):
        self.run_dir, self.data_root = run_dir, data_root

    def build(self, width: int | None) -> Built:
        """The learner. Raises RunError for a folder that is missing or damaged."""
        run = _loaded(str(self.run_dir), self.fingerprint())
        temperature = functools.partial(self._temperature, run)
        return Built(run.learner, temperature, has_features(run.learner), run.config.dataset)

    def located(self) -> "TrainedRun":
        """With absolute paths."""
        return TrainedRun(os.path.abspath(self.run_dir), self.data_root and os.path.abspath(self.data_root))

    def fingerprint(self) -> str:
        """SHA-256 of the configuration and the weights. Raises RunError."""
        digest = hashlib.sha256()
        for name in ("config.json", "weights.safetensors"):
            path = Path(self.run_dir) / name
            if not path.is_file():
                otherwise = f"train one with meta_train.py --run-dir, or name one of {', '.join(PRETRAINED)}"
                raise RunError(f"no run in {self.run_dir}: expected {path}; {otherwise}")
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _temperature(self, run: Run, counts: Counts) -> TemperaturePrior:
        several = max(counts) > 1
        if self.data_root is None:
            return TemperaturePrior(run.temperature, run.temperature if several else None)
        shot = round(sum(counts) / len(counts))
        return _fitted_for(str(self.run_dir), self.fingerprint(), len(counts), shot, self.data_root)


@functools.lru_cache(maxsize=8)
def _loaded(run_dir: str, fingerprint: str) -> Run:
    del fingerprint  # another one is another run
    return load_class_run(run_dir)


@functools.lru_cache(maxsize=64)
def _fitted_for(run_dir: str, fingerprint: str, way: int, shot: int, data_root: str) -> TemperaturePrior:
    return TemperaturePrior(*shape_temperature.for_user(_loaded(run_dir, fingerprint), way, shot, data_root))


class PretrainedHead(Head):
    """What is shipped under a name, with temperatures for common numbers of classes and examples.

    Where there are special ones for kinds of pictures, the labelled ones choose between them and what is for all.
    """

    kind = "pretrained"

    def __init__(self, name: str):
        self.name = name

    def load(self) -> Pretrained:
        """Learner, encoder and temperatures. Raises ValueError for an unknown name."""
        return _pretrained(self.name)

    def build(self, width: int | None) -> Built:
        """The learner. Raises ValueError for an unknown name."""
        found = self.load()
        temperatures, dataset = found.temperatures, found.run.config.dataset
        return Built(found.learner, lambda counts: TemperaturePrior(*temperatures(counts)), True, dataset)

    def for_task(self, images: Shaped[np.ndarray, "N H W Ch"]) -> "PretrainedHead":
        """The special one that the labelled images are most like, or this."""
        return PretrainedHead(self.load().for_task(images).name)

    def fingerprint(self) -> str:
        """SHA-256 of the weights."""
        return fingerprint_of(self.load().learner)

    def kept(self) -> "StoredHead":
        """The same, whatever will be shipped under its name."""
        return StoredHead(self.name, content_of(self.name))


class StoredHead(PretrainedHead):
    """Weights that were shipped under a name when a classifier was fitted, as a file or a pickle of it holds them."""

    def __init__(self, name: str, content: Content):
        super().__init__(name)
        self.content = content

    def load(self) -> Pretrained:
        """Learner, encoder and temperatures. Raises RunError for a content that is damaged."""
        if not hasattr(self, "_found"):
            self._found = parsed(self.content, Path(f"{self.name}.safetensors"), self.name)
        return self._found

    def for_task(self, images: Shaped[np.ndarray, "N H W Ch"]) -> "PretrainedHead":
        """This: what answered a task goes on to."""
        del images
        return self

    def kept(self) -> "StoredHead":
        """This."""
        return self

    def __getstate__(self) -> dict[str, object]:
        """Name and content, from which the rest is made again."""
        return {name: value for name, value in super().__getstate__().items() if name != "_found"}


_pretrained = functools.cache(load_pretrained)


def has_features(learner: Learner) -> bool:
    """Whether its inputs are features of images, whose means mean something, and not the images themselves."""
    return type(learner).embed is not Learner.embed


def fingerprint_of(learner: Learner) -> str:
    """SHA-256 of a learner's numbers by their names."""
    digest = hashlib.sha256(type(learner).__name__.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(learner))):
        array = np.asarray(leaf, order="C")
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


HEADS: dict[str, type[Head]] = {head.kind: head for head in (GaussianProcessHead, TrainedRun, PretrainedHead)}
