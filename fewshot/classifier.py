"""A classifier to use: labelled images in, class probabilities out, with any labels and any counts of at least one.

    fitted = FewShotClassifier(learner, temperature).fit(key, images, labels)
    fitted.predict_proba(more_images)

It serves any learner. Little is compiled twice: queries go through in chunks of a fixed size, and tasks are padded to
one of a few (`bucket`), masked, so that ways from 2 to 5 with 1 to 5 shots need three programs to fit and three to
predict, not twenty of each. `add` takes further labelled images without another pass of the network over the old ones.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key, Shaped

from fewshot.evaluation.scoring import embed_images
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Learner, apply
from fewshot.learners.task_temperature import TemperatureMixture, single, task_temperature
from fewshot.models.deep_kernel import check_images

CHUNK = 64  # images that pass the network, and queries that are predicted, at a time
FEW_CLASSES, FEW_POINTS = 5, 128  # up to which classes are padded to FEW_CLASSES

Images = Shaped[Array | np.ndarray, "N H W Ch"]
Labels = Shaped[np.ndarray, " L"] | list


class InferenceFailedError(RuntimeError):
    """The inference did not end in finite numbers; the message is one line."""


@dataclass(frozen=True)
class FewShotClassifier:
    """What is learned once, for many tasks: a learner, and the temperature of its probabilities.

    `temperature` belongs to the ways and shots that it was fitted for (1 leaves the probabilities as they are). With
    `temperature_of_fewer`, that for one image a class fewer, each task learns its own from its labelled images.
    """

    learner: Learner = field(repr=False)
    temperature: float = 1.0
    temperature_of_fewer: float | None = None

    def fit(self, key: Key[Array, ""], images: Images, labels: Labels) -> "FittedClassifier":
        """Condition on labelled images [N, H, W, Ch], bytes or numbers in [0, 1]; labels are any that compare.

        Raises ValueError for images of another shape or beyond [0, 1], for numbers of images and labels that differ,
        for missing labels and fewer than two classes; InferenceFailedError where the posterior is not finite.
        """
        return _conditioned(self, key, embed(self.learner, images), _checked(labels))


@dataclass(frozen=True, eq=False, repr=False)
class FittedClassifier:
    """A classifier for one task. classes [C] are the labels in the order of the columns of `predict_proba`.

    inputs [N, ...] and labels [N] are what it was conditioned on; state is that of the padded task; code is the
    inference's result code. Probabilities are averaged over temperatures.
    """

    classifier: FewShotClassifier
    key: Key[Array, ""]
    inputs: np.ndarray
    labels: np.ndarray
    classes: np.ndarray
    state: Any
    temperatures: TemperatureMixture
    code: Code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.labels)} images of {len(self.classes)} classes, {self.classifier})"

    def predict_proba(self, images: Images) -> np.ndarray:
        """Probabilities [Q, C] of images [Q, H, W, Ch]. Raises as `fit`.

        No image depends on the others, unless the learner is transductive.
        """
        learner = self.classifier.learner
        new = embed(learner, images)
        key = jax.random.fold_in(self.key, 2)  # the fit splits the key in two, which are fold_in(key, 0) and (key, 1)
        if not len(new):
            return np.empty((0, len(self.classes)), jnp.result_type(float))
        size = len(new) if learner.traits.transductive else CHUNK
        parts = [
            apply(_predicted, learner, (), key, self.state, padded(new[start : start + size], size))
            for start in range(0, len(new), size)
        ]
        if any(code == Code.NON_FINITE for _, code in parts):
            raise InferenceFailedError("a prediction is not finite; check the images, or try another inference")
        real = [jnp.asarray(np.asarray(part)[:, : len(self.classes)]) for part, _ in parts]
        return np.concatenate([np.asarray(self.temperatures.temper(part)) for part in real])[: len(new)]

    def predict(self, images: Images) -> np.ndarray:
        """The most probable label of every image [Q]."""
        return self.classes[np.argmax(self.predict_proba(images), axis=1)]

    def add(self, images: Images, labels: Labels) -> "FittedClassifier":
        """The classifier with further labelled images, also of new classes; the old images are not needed again."""
        if not len(images) and not len(labels):
            return self
        more, words = _checked(labels), "USO"
        if (more.dtype.kind in words) != (self.labels.dtype.kind in words):
            raise ValueError(f"expected labels like {self.labels[0]}, got {more[0]}; convert them, or fit all anew")
        inputs = np.concatenate([self.inputs, embed(self.classifier.learner, images)])
        return _conditioned(self.classifier, self.key, inputs, np.concatenate([self.labels, more]))


def embed(learner: Learner, images: Images) -> np.ndarray:
    """Inputs [N, ...] of images [N, H, W, Ch], CHUNK images at a time.

    Raises ValueError for images of another shape than the learner's, and for those that `check_images` refuses.
    """
    images, shape = np.asarray(images), learner.image_shape
    if images.ndim != 4 or images.shape[1:] != shape:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"expected images [N, {wanted}], got shape {images.shape}; resize them, or add the first axis")
    check_images(images, "the images")
    blank = images if len(images) else np.zeros((1, *shape), np.uint8)
    return np.asarray(embed_images(learner, blank, chunk=CHUNK))[: len(images)]


def padded(rows: Shaped[Array | np.ndarray, "N *rest"], count: int) -> Shaped[np.ndarray, "count *rest"]:
    """`count` rows: the last one is repeated. On the host, where another number of rows compiles nothing."""
    return np.asarray(rows)[np.minimum(np.arange(count), len(rows) - 1)]


def bucket(points: int, classes: int) -> tuple[int, int]:
    """Points and classes to pad a task to: 8, 16 or a multiple of 32 points, and where those are few 5 classes."""
    size = next((size for size in (8, 16) if points <= size), -(-points // 32) * 32)
    return size, max(classes, FEW_CLASSES) if points <= FEW_POINTS else classes


def _padding(points: int, classes: int, transductive: bool = False) -> tuple[int, int, Mask]:
    """The bucket of a task, and what is real in it; a transductive learner's tasks are not padded."""
    most_points, most_classes = (points, classes) if transductive else bucket(points, classes)
    real = np.arange(most_points) < points, np.arange(most_classes) < classes
    return most_points, most_classes, Mask(*map(jnp.asarray, real))


def _checked(labels: Labels) -> np.ndarray:
    """Labels as an array. Raises ValueError where one is missing: None, or NaN, which is not equal to itself."""
    each = labels.ravel() if isinstance(labels, np.ndarray) else labels  # as an array of text NaN would be a word
    missing = [label for label in each if label is None or label != label]
    if missing:
        raise ValueError(f"expected a label for every image, got {missing[0]}; leave images without a label out")
    return np.asarray(labels)


def _conditioned(
    model: FewShotClassifier, key: Key[Array, ""], inputs: np.ndarray, labels: np.ndarray
) -> FittedClassifier:
    learner = model.learner
    if labels.ndim != 1 or len(labels) != len(inputs):
        raise ValueError(f"expected one label for each of the {len(inputs)} images, got labels of {labels.shape}")
    classes, y = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"expected images of at least two classes, got {len(classes)}; add labelled images of another")
    if learner.ways not in (None, len(classes)):
        raise ValueError(f"expected {learner.ways} classes, which this learner tells apart, got {len(classes)}")
    points, ways, present = _padding(len(inputs), len(classes), learner.traits.transductive)
    task = padded(inputs, points), padded(y.astype(np.int32), points)
    state, code = apply(_fitted, learner, (ways,), key, *task, present)
    if code == Code.NON_FINITE:
        raise InferenceFailedError("the posterior is not finite; check the images, or try another inference")
    if model.temperature_of_fewer is None:
        temperatures = single(model.temperature)
    else:
        both = model.temperature, model.temperature_of_fewer
        temperatures = apply(_own_temperature, learner, (ways,), key, *task, present, both)
    return FittedClassifier(model, key, inputs, labels, classes, state, temperatures, Code(int(code)))


def _fitted(learner: Learner, classes: int, key: Array, inputs: Array, y: Array, mask: Mask) -> Any:
    return learner.fit(key, inputs, y, classes, mask)


def _own_temperature(
    learner: Learner, classes: int, key: Array, inputs: Array, y: Array, mask: Mask, temperatures: tuple[Any, Any]
) -> TemperatureMixture:
    return task_temperature(key, learner, inputs, y, classes, *temperatures, mask)


def _predicted(learner: Learner, key: Array, state: Any, query: Array) -> tuple[Array, Array]:
    found = learner.predict(key, state, query)
    return found.probabilities, found.code
