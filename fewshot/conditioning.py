"""One task: a learner conditioned on labelled inputs, and what it says of others.

Little is compiled twice: queries go through in chunks of a fixed size, and tasks are padded to one of a few (`bucket`),
masked, so that ways from 2 to 5 with 1 to 5 shots need three programs to fit and three to predict, not twenty of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.evaluation.out_of_episode import Labelled, mutual_information, strangeness
from fewshot.evaluation.scoring import embed_images
from fewshot.evaluation.unknown import left_out_scores, p_values
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import LatentLearner, Learner, apply
from fewshot.learners.task_temperature import SPREAD, TemperatureMixture, is_original, single, task_temperature
from fewshot.models.deep_kernel import check_images
from fewshot.models.gaussian import AnyMarginals, JointMarginals, Marginals

CHUNK = 64  # images that pass the network, and queries that are predicted, at a time
FEW_CLASSES, FEW_POINTS = 5, 128  # up to which classes are padded to FEW_CLASSES
DRAWS, FEWEST_DRAWS = 1024, 256  # of every expectation
COPIES_POWER = 0.5  # chosen on validation classes of photographs (docs/results/heads/counts.md)
MOST_SHOWN = 1000  # labelled examples that copies of those of rare classes may lead to
MOST_NUMBERS = 4_000_000  # of the logits of all labelled examples at once, to which large tasks reduce their draws
# Numbers of keys: the fit splits its key in two, which are fold_in(key, 0) and fold_in(key, 1); `suggestion` has 4.
PREDICTION, INFORMATION, UNKNOWN = 2, 3, 5


class InferenceFailedError(RuntimeError):
    """The inference did not end in finite numbers; the message is one line."""


class TemperaturePrior(NamedTuple):
    """What is known of a task's temperature before its labels are seen (T2).

    own: for tasks of its shape. fewer: for those with one example a class fewer; None: own is certain, and nothing is
    learned from the labels. spread: the standard deviation of the task's log temperature.
    """

    own: float
    fewer: float | None = None
    spread: float = SPREAD


class Latents(NamedTuple):
    """Mean [Q, C] and covariance between the classes [Q, C, C] of the latent functions at every query."""

    mean: Float[np.ndarray, "Q C"]
    covariance: Float[np.ndarray, "Q C C"]

    @property
    def variance(self) -> Float[np.ndarray, "Q C"]:
        """Variances alone."""
        return np.diagonal(self.covariance, axis1=1, axis2=2)


class Kept(NamedTuple):
    """What a fitted task is made again from: inputs [N, ...], labels and copies [N], key, temperatures [G]."""

    inputs: Shaped[np.ndarray, "N ..."]
    y: Int[np.ndarray, " N"]
    key: Shaped[np.ndarray, " K"]
    temperatures: Float[np.ndarray, " G"]
    weights: Float[np.ndarray, " G"]
    copies: Int[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class FittedTask:
    """A learner that was conditioned on inputs [N, ...] with labels y [N] in 0..classes-1.

    copies: how often each is shown to the learner. examples: labelled ones a class that its prior is meant for. state
    is that of the padded task; code is the inference's result code.
    """

    learner: Learner
    key: Key[Array, ""]
    inputs: Shaped[np.ndarray, "N ..."]
    y: Int[np.ndarray, " N"]
    copies: Int[np.ndarray, " N"]
    classes: int
    examples: float
    temperatures: TemperatureMixture
    state: PyTree
    code: Code

    @property
    def kept(self) -> Kept:
        """What `restored` needs beside the learner."""
        key, mixture = np.asarray(jax.random.key_data(self.key)), self.temperatures
        nodes = np.asarray(mixture.temperatures), np.asarray(mixture.weights)
        return Kept(self.inputs, self.y, key, *nodes, self.copies)

    def probabilities(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, "Q C"]:
        """Class probabilities of new inputs, averaged over temperatures (T4).

        No query depends on the others, unless the learner is transductive. Raises InferenceFailedError.
        """
        if not len(new):
            return np.empty((0, self.classes), jnp.result_type(float))
        parts = self._answers(_predicted, (), PREDICTION, new)
        if any(code == Code.NON_FINITE for _, code in parts):
            raise InferenceFailedError("a prediction is not finite; check the examples, or try another inference")
        real = [jnp.asarray(np.asarray(part)[:, : self.classes]) for part, _ in parts]
        return np.concatenate([np.asarray(self.temperatures.temper(part)) for part in real])[: len(new)]

    def latents(self, new: Shaped[np.ndarray, "Q ..."]) -> Latents:
        """Mean and covariance of f at new inputs under q(f), which no temperature touches.

        Of a mixture of Gaussians they are those of the mixture. Raises TypeError for a learner without a posterior.
        """
        self._require_posterior()
        if not len(new):
            empty = np.empty((0, self.classes, self.classes), jnp.result_type(float))
            return Latents(empty[:, 0], empty)
        parts = self._answers(_latents, (self.classes,), INFORMATION, new)
        mean, covariance = (
            np.concatenate([np.asarray(leaf) for leaf in leaves]) for leaves in zip(*parts, strict=True)
        )
        return Latents(mean[: len(new)], covariance[: len(new)])

    def information(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"]:
        """I(label; f) in nats at new inputs: what learning f would tell of the label.

        Raises TypeError for a learner without a posterior.
        """
        self._require_posterior()
        if not len(new):
            return np.empty(0, jnp.result_type(float))
        parts = self._answers(_information, (self.classes,), INFORMATION, new)
        return np.concatenate([np.asarray(part) for part in parts])[: len(new)]

    def unknown(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"]:
        """How little new inputs look like the task's: `strangeness` of `evaluation/out_of_episode.py`.

        Raises InferenceFailedError.
        """
        if not len(new):
            return np.empty(0, jnp.result_type(float))
        ways, shown = _padded_task(self.learner, self.inputs, self.y, self.copies, self.classes)
        labelled = Labelled(
            jnp.asarray(shown.inputs), jnp.asarray(shown.y), shown.mask.points & is_original(shown.y, shown.origin)
        )
        parts = self._answers(_strange, (ways,), PREDICTION, new, labelled)
        found = np.concatenate([np.asarray(part) for part in parts])[: len(new)]
        if np.isnan(found).any():
            raise InferenceFailedError("a score is not a number; check the examples, or try another inference")
        return found

    def unknown_p_values(self, new: Shaped[np.ndarray, "Q ..."]) -> Float[np.ndarray, " Q"] | None:
        """(U1) p-values that new inputs show one of the task's classes; None where no class has two labelled inputs."""
        _, shown = _padded_task(self.learner, self.inputs, self.y, self.copies, self.classes)
        key, real = jax.random.fold_in(self.key, UNKNOWN), np.asarray(shown.mask.points)
        known = left_out_scores(key, self.learner, shown.inputs, shown.y, real, shown.origin)
        return None if known is None else p_values(self.unknown(new), known)

    def with_labels(self, inputs: Shaped[np.ndarray, "K ..."], y: Int[np.ndarray, " K"]) -> "FittedTask":
        """The same task with K more labelled inputs of its classes, at the prior and the temperatures that it has.

        Each of them is shown once.
        """
        inputs, y = np.concatenate([self.inputs, inputs]), np.concatenate([self.y, y])
        copies = np.concatenate([self.copies, np.ones(len(y) - len(self.y), int)])
        state, code = _conditioned(self.learner, self.key, inputs, y, copies, self.classes, self.examples)
        return replace(self, inputs=inputs, y=y, copies=copies, state=state, code=code)

    def _answers(
        self, question: Callable[..., PyTree], static: tuple, number: int, new: np.ndarray, *more: PyTree
    ) -> list[PyTree]:
        """What a question says of each chunk of new inputs, the last one filled up, and of what is the same for all."""
        key = jax.random.fold_in(self.key, number)
        size = len(new) if self.learner.traits.transductive else CHUNK
        return [
            apply(question, self.learner, static, key, self.state, padded(new[start : start + size], size), *more)
            for start in range(0, len(new), size)
        ]

    def _require_posterior(self) -> None:
        if not isinstance(self.learner, LatentLearner):
            name = type(self.learner).__name__
            raise TypeError(f"expected a learner with a posterior of latent functions, got {name}; try GaussianProcess")


def fit_task(
    learner: Learner,
    key: Key[Array, ""],
    inputs: Shaped[np.ndarray, "N ..."],
    y: Int[np.ndarray, " N"],
    classes: int,
    temperature: TemperaturePrior,
    copies: Int[np.ndarray, " N"] | None = None,
) -> FittedTask:
    """Condition a learner on inputs [N, ...] with labels y [N], and learn the task's temperature where that is open.

    copies: how often each input is shown to the learner, as `copies_of` finds it; None: once. Raises ValueError for a
    number of classes that the learner cannot tell apart; InferenceFailedError.
    """
    if learner.ways not in (None, classes):
        raise ValueError(f"expected {learner.ways} classes, which this learner tells apart, got {classes}")
    copies = np.ones(len(y), int) if copies is None else copies
    examples = int(copies.sum()) / classes
    state, code = _conditioned(learner, key, inputs, y, copies, classes, examples)
    if temperature.fewer is None or np.bincount(y).max() < 2:
        temperatures = single(temperature.own)
    else:
        ways, task = _padded_task(learner, inputs, y, copies, classes)
        known = temperature.own, temperature.fewer, temperature.spread
        temperatures = apply(_own_temperature, learner, (ways,), key, *task, known)
    return FittedTask(learner, key, inputs, y, copies, classes, examples, temperatures, state, code)


def restored(learner: Learner, classes: int, kept: Kept) -> FittedTask:
    """The task that was kept, conditioned on again. Raises InferenceFailedError."""
    key = jax.random.wrap_key_data(jnp.asarray(kept.key))
    examples = int(kept.copies.sum()) / classes
    state, code = _conditioned(learner, key, kept.inputs, kept.y, kept.copies, classes, examples)
    mixture = TemperatureMixture(jnp.asarray(kept.temperatures), jnp.asarray(kept.weights))
    return FittedTask(learner, key, kept.inputs, kept.y, kept.copies, classes, examples, mixture, state, code)


def copies_of(y: Int[np.ndarray, " N"], classes: int) -> Int[np.ndarray, " N"]:
    """How often each example is shown, so that a learner sees about as many of every class: max(1, round(n / n_c)).

    n is the largest number n_c of examples of a class, or MOST_SHOWN / C where that is less; up to there the shown
    numbers of two classes have a ratio below 2. All examples of a class are shown as often, so that their order
    does not matter. Learners are trained on tasks with equally many examples of each class, and would take one with
    more of them for likelier everywhere (docs/photographs.md).
    """
    counts = np.bincount(y, minlength=classes)
    most = min(counts.max(), MOST_SHOWN / classes)
    return np.maximum(np.round(most / np.maximum(counts, 1)), 1).astype(int)[y]


def with_copies(
    temperature: Callable[[Sequence[int]], TemperaturePrior],
    y: Int[np.ndarray, " N"],
    copies: Int[np.ndarray, " N"],
    power: float = COPIES_POWER,
) -> TemperaturePrior:
    """The prior of the temperature of a task with copies, from those by counts: T of what is shown, times k^power.

    k is the geometric mean over the classes of the number of copies: an example that is shown again tells nothing new,
    but makes probabilities surer.
    """
    shown = np.bincount(y, copies).round().astype(int)
    own, fewer, spread = temperature(shown.tolist())
    warmer = float(np.exp(power * np.mean(np.log(shown / np.bincount(y)))))
    return TemperaturePrior(own * warmer, None if fewer is None else fewer * warmer, spread)


def embed(learner: Learner, images: Shaped[np.ndarray, "*N"]) -> Shaped[np.ndarray, "N ..."]:
    """Inputs [N, ...] of images [N, H, W, Ch], CHUNK images at a time.

    Raises ValueError for images of another shape than the learner's, and for those that `check_images` refuses.
    """
    shape = learner.image_shape
    if images.ndim != 4 or images.shape[1:] != shape:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"expected images [N, {wanted}], got shape {images.shape}; resize them, or add the first axis")
    check_images(images, "the images")
    blank = images if len(images) else np.zeros((1, *shape), np.uint8)
    return np.asarray(embed_images(learner, blank, chunk=CHUNK))[: len(images)]


def draws_for(points: int, classes: int) -> int:
    """DRAWS, or half as often as needed for the logits of all labelled examples to fit into MOST_NUMBERS."""
    draws = DRAWS
    while draws > FEWEST_DRAWS and draws * points * classes > MOST_NUMBERS:
        draws //= 2
    return draws


def padded(rows: Shaped[Array | np.ndarray, "N *rest"], count: int) -> Shaped[np.ndarray, "count *rest"]:
    """`count` rows: the last one is repeated. On the host, where another number of rows compiles nothing."""
    return np.asarray(rows)[np.minimum(np.arange(count), len(rows) - 1)]


def bucket(points: int, classes: int) -> tuple[int, int]:
    """Points and classes to pad a task to: 8, 16 or a multiple of 32 points, and where those are few 5 classes."""
    size = next((size for size in (8, 16) if points <= size), -(-points // 32) * 32)
    return size, max(classes, FEW_CLASSES) if points <= FEW_POINTS else classes


def padding(points: int, classes: int, transductive: bool = False) -> tuple[int, int, Mask]:
    """The bucket of a task, and what is real in it; a transductive learner's tasks are not padded."""
    most_points, most_classes = (points, classes) if transductive else bucket(points, classes)
    real = np.arange(most_points) < points, np.arange(most_classes) < classes
    return most_points, most_classes, Mask(*map(jnp.asarray, real))


class Shown(NamedTuple):
    """A padded task: inputs [P, ...], labels y [P], what is real in it, and of which input each is a copy [P]."""

    inputs: Shaped[np.ndarray, "P ..."]
    y: Int[np.ndarray, " P"]
    mask: Mask
    origin: Int[np.ndarray, " P"]


def _padded_task(
    learner: Learner, inputs: np.ndarray, y: np.ndarray, copies: np.ndarray, classes: int
) -> tuple[int, Shown]:
    """The number of classes of the padded task, and what a learner is shown of it: copies follow what they are of."""
    number = np.arange(len(y))
    rows = np.concatenate([number, np.repeat(number, copies - 1)])
    points, ways, present = padding(len(rows), classes, learner.traits.transductive)
    origin = np.concatenate([rows, np.arange(len(rows), points)])
    return ways, Shown(padded(inputs[rows], points), padded(y[rows].astype(np.int32), points), present, origin)


def _conditioned(
    learner: Learner,
    key: Key[Array, ""],
    inputs: np.ndarray,
    y: np.ndarray,
    copies: np.ndarray,
    classes: int,
    examples: float,
) -> tuple[PyTree, Code]:
    ways, shown = _padded_task(learner, inputs, y, copies, classes)
    state, code = apply(_fitted, learner, (ways,), key, shown.inputs, shown.y, shown.mask._replace(examples=examples))
    if code == Code.NON_FINITE:
        raise InferenceFailedError("the posterior is not finite; check the examples, or try another inference")
    return state, Code(int(code))


def _fitted(learner: Learner, classes: int, key: Array, inputs: Array, y: Array, mask: Mask) -> PyTree:
    return learner.fit(key, inputs, y, classes, mask)


def _own_temperature(
    learner: Learner,
    classes: int,
    key: Array,
    inputs: Array,
    y: Array,
    mask: Mask,
    origin: Array,
    known: tuple[Array, Array, Array],
) -> TemperatureMixture:
    own, fewer, spread = known
    return task_temperature(key, learner, inputs, y, classes, own, fewer, mask, spread=spread, origin=origin)


def _predicted(learner: Learner, key: Array, state: PyTree, query: Array) -> tuple[Array, Array]:
    found = learner.predict(key, state, query)
    return found.probabilities, found.code


def _strange(
    learner: Learner, classes: int, key: Array, state: PyTree, query: Array, labelled: Labelled
) -> Float[Array, " Q"]:
    return strangeness(key, learner, state, labelled, classes, query)


def _real_marginals(learner: LatentLearner, classes: int, state: PyTree, query: Array) -> AnyMarginals:
    """Marginals of f of the real classes, which come first, with an axis over the components of a mixture."""
    marginals = state.posterior.predict(learner.latent_query(state, query))
    if marginals.mean.ndim == 2:
        marginals = jax.tree.map(lambda leaf: leaf[None], marginals)
    mean, spread = marginals  # variances [M, C, Q], or covariances [M, Q, C, C]
    if spread.ndim == 3:
        return Marginals(mean[:, :classes], spread[:, :classes])
    return JointMarginals(mean[:, :classes], spread[:, :, :classes, :classes])


def _latents(learner: LatentLearner, classes: int, key: Array, state: PyTree, query: Array) -> tuple[Array, Array]:
    """Mean [Q, C] and covariance [Q, C, C]: E V + Cov E over the components of a mixture."""
    del key
    marginals = _real_marginals(learner, classes, state, query)
    means = jnp.swapaxes(marginals.mean, 1, 2)
    mean = means.mean(axis=0)
    inside = jax.vmap(lambda one: one.covariance_blocks())(marginals).mean(axis=0)
    between = jnp.einsum("mqc,mqd->qcd", means - mean, means - mean, precision="highest") / len(means)
    return mean, inside + between


def _information(learner: LatentLearner, classes: int, key: Array, state: PyTree, query: Array) -> Array:
    return mutual_information(key, learner.likelihood, _real_marginals(learner, classes, state, query))
