"""The scikit-learn estimator: a few labelled examples of each class in, calibrated class probabilities out.

    classifier = FewShotClassifier().fit(features, labels)                    features [N, D] of any network
    classifier = FewShotClassifier.from_run("runs/omniglot").fit(images, labels)
    classifier = FewShotClassifier(encoder="efficientnet-lite0").fit(paths, labels)
    classifier.predict_proba(more)

It serves any learner, takes any labels of one kind, and any counts of at least one example a class.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import LabelEncoder
from sklearn.utils.validation import check_is_fitted, validate_data

from fewshot import saving
from fewshot.conditioning import (
    FittedTask,
    InferenceFailedError,
    Kept,
    Latents,
    TemperaturePrior,
    draws_for,
    embed,
    fit_task,
    restored,
)
from fewshot.contract import in_precision, key_of, unchanged_by_failure, warn_of_lost_digits
from fewshot.evaluation.selection import kept_at
from fewshot.groups import groups_of, labels_of, number_of, order_of
from fewshot.heads import UNKNOWN, Built, GaussianProcessHead, Head, PretrainedHead, TrainedRun
from fewshot.inference.inner.base import Code
from fewshot.inputs import (
    checked_labels,
    encoded,
    given_pictures,
    kind_of,
    name_of,
    named_encoder,
    names_of,
    read_pictures,
)
from fewshot.learners import Learner
from fewshot.learners.task_temperature import TemperatureMixture
from fewshot.models.deep_kernel import holds_features
from fewshot.models.networks.encoders import Encoder
from fewshot.pretrained import HEAD_OF
from fewshot.repetitions import once
from fewshot.suggestion import MARGIN, suggested
from fewshot.tasks import preparation
from fewshot.tasks.ink import unlike_characters
from fewshot.training.run import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE
from fewshot.training.run_directory import RunError

if TYPE_CHECKING:
    from fewshot.inputs import Pictures

__all__ = ["Answers", "FewShotClassifier", "InferenceFailedError", "Latents", "Suggestion"]

AUTO = "auto"
ENCODER_EXAMPLE = "encoder='efficientnet-lite0'"


class Answers(NamedTuple):
    """Labels [Q] with the probability of each [Q], which are kept [Q], and the accuracy to expect of those kept."""

    labels: Shaped[np.ndarray, " Q"]
    probability: Float[np.ndarray, " Q"]
    kept: Bool[np.ndarray, " Q"]
    expected_accuracy: float


class Suggestion(NamedTuple):
    """Positions [k] in the pool, in the order to label them, and the expected utility [k] of each: larger is better."""

    positions: Int[np.ndarray, " k"]
    utility: Float[np.ndarray, " k"]


class FewShotClassifier(ClassifierMixin, BaseEstimator):
    """Bayesian few-shot classification in scikit-learn's contract.

    learner: a head (`GaussianProcessHead`, `TrainedRun`, `PretrainedHead`), whose parameters are `learner__likelihood`
    and so on, or a trained `Learner`; None stands for what is shipped for the encoder, else `GaussianProcessHead()`.
    encoder: the name of a pretrained encoder, or one that was loaded, for pictures; None where X is features, or images
    that the learner itself reads.

    temperature: of the probabilities, "auto" for the one of the head, from which a task departs as its labels tell
    wherever a class has two examples. A number is taken as it is, unless temperature_of_fewer, that of tasks with an
    example a class fewer, is given too: then the task departs from it. balanced: True takes every class to be as likely
    as any other, and shows the learner so many means of each as the rarest has examples (`fewshot/groups.py`); False
    shows each example, and answers lean to classes that have more; None is True for trained networks and shipped heads,
    and before the cosine kernel, and False for other kernels, a `Learner`, and networks that adapt to images. draws: of
    every Monte-Carlo expectation, "auto" for as many as the task's size allows and predictions of softmax by sums that
    have no noise, None for the learner's own number. random_state: the seed. What a fit draws moves probabilities by
    some 0.03, with one example a class, from seed to seed and where classes are named in another order; shipped heads
    for photographs draw nothing.

    X is a table of features [N, D], images [N, H, W, Ch] as bytes or numbers in [0, 1], or a list of paths of pictures
    or of Pillow's pictures, or of arrays of bytes of unlike sizes; y is words, whole numbers or truth values.

    After `fit`: classes_ in the order of the columns of `predict_proba`; head_, what answers, of shipped ones that for
    the kind of pictures which the labelled ones were; learner_; class_count_, labelled examples of each class;
    balanced_, whether these are shown alike; task_, the posterior; prior_temperature_, temperatures_, and temperature_,
    their geometric mean; code_, the inference's result code; for tables n_features_in_ and feature_names_in_.
    """

    _kept: Kept

    def __init__(
        self,
        learner: Head | Learner | None = None,
        encoder: str | Encoder | None = None,
        *,
        temperature: float | str = AUTO,
        temperature_of_fewer: float | None = None,
        balanced: bool | None = None,
        draws: int | str | None = AUTO,
        random_state: int | np.random.RandomState | None = 0,
    ):
        self.learner, self.encoder = learner, encoder
        self.temperature, self.temperature_of_fewer = temperature, temperature_of_fewer
        self.balanced, self.draws, self.random_state = balanced, draws, random_state

    @classmethod
    def from_run(cls, run_dir: str | Path, data_root: str | None = None, **parameters: Any) -> "FewShotClassifier":
        """An estimator on the network of a run folder; parameters are those of the constructor.

        Raises RunError for a folder that is missing or damaged.
        """
        head = TrainedRun(str(run_dir), data_root)
        head.build(None)
        return cls(head, **parameters)

    @classmethod
    def from_pretrained(cls, name: str, **parameters: Any) -> "FewShotClassifier":
        """An estimator on what is shipped under a name. Raises ValueError for an unknown one."""
        head = PretrainedHead(name)
        return cls(head, **{"encoder": head.load().encoder, **parameters})

    def fit(self, X: object, y: object) -> "FewShotClassifier":
        """Condition on labelled examples; where that fails, everything stays as it was.

        Raises ValueError, in one line, for examples that the learner cannot read, for numbers of examples and labels
        that differ, for labels that are missing or of mixed kinds, and for fewer than two classes; InferenceFailedError
        where the posterior is not finite.
        """
        with unchanged_by_failure(self):
            labels, pictures = checked_labels(y), given_pictures(X)
            images = self._images(X, pictures, reset=True)
            _check_lengths(images, labels)
            head = _for_task(self._head(), images)
            built = _built(head, images.shape[3] if holds_features(images.shape) else None)
            inputs = embed(built.learner, images)
            if pictures is not None:
                inputs, labels = _once(inputs, labels)
            self._learn(key_of(self.random_state), inputs, labels, built)
            self.head_, self._fingerprint = head, _fingerprint(head)
        return self

    def add(self, X: object, y: object) -> "FewShotClassifier":
        """Condition on further labelled examples too, also of new classes; the old ones pass no network again."""
        check_is_fitted(self)
        labels, pictures = checked_labels(y), given_pictures(X)
        inputs = embed(self.task_.learner, self._images(X, pictures, reset=False))
        _check_lengths(inputs, labels)
        if not len(labels):
            return self
        known, new = self.classes_[0], labels[0]
        if kind_of(known) != kind_of(new):
            raise ValueError(f"expected labels like {known}, got {new}; convert them, or fit all anew")
        old = self.task_
        everything = np.concatenate([old.inputs, inputs]), np.concatenate([self.classes_[old.y], labels])
        if pictures is not None:
            everything = _once(*everything, held=len(old.y))
        self._learn(old.key, *everything, self.built())
        return self

    def predict_proba(self, X: object) -> Float[np.ndarray, "Q C"]:
        """Class probabilities [Q, C]. No query depends on the others, unless the learner is transductive."""
        check_is_fitted(self)
        return self.task_.probabilities(self._inputs(X))

    def predict_log_proba(self, X: object) -> Float[np.ndarray, "Q C"]:
        """Logarithms of `predict_proba` [Q, C], in nats; -inf where a probability is less than its precision holds."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def set_params(self, **params: Any) -> "FewShotClassifier":
        """Change parameters, also of the head, as `learner__kernel`. Raises ValueError for those of no head."""
        nested = next((name for name in params if name.startswith("learner__")), None)
        if nested and params.get("learner", self.learner) is None:
            raise ValueError(f"expected a head before {nested}, got None; give learner=GaussianProcessHead()")
        super().set_params(**params)
        return self

    def predict(self, X: object) -> Shaped[np.ndarray, " Q"]:
        """The most probable label of every query [Q]."""
        check_is_fitted(self)
        return self.classes_[np.argmax(self.predict_proba(X), axis=1)]

    def predict_latent(self, X: object) -> Latents:
        """Mean [Q, C] and covariance [Q, C, C] of the latent functions; no temperature touches them.

        Raises TypeError for a learner without a posterior.
        """
        check_is_fitted(self)
        return self.task_.latents(self._inputs(X))

    def unknown_score(self, X: object) -> Float[np.ndarray, " Q"]:
        """A score [Q] that is larger where a query looks less like any of the classes.

        Log distance to the nearest class and entropy, (U2) of `evaluation/out_of_episode.py`; the entropy alone of a
        learner without latent functions. Probabilities are untempered. It ranks queries; it is no probability.
        """
        check_is_fitted(self)
        return self.task_.unknown(self._inputs(X))

    def unknown_p_value(self, X: object) -> Float[np.ndarray, " Q"]:
        """p-values [Q] that a query shows one of the classes: small where it looks stranger than labelled examples do.

        The rank of its `unknown_score` among those of the labelled examples, each left out; with K of them it is a
        multiple of 1 / (K + 1). Raises ValueError where no class has two labelled examples.
        """
        check_is_fitted(self)
        found = self.task_.unknown_p_values(self._inputs(X))
        if found is None:
            raise ValueError("expected a class with two labelled examples or more, got one of each; add another")
        return found

    def reject(self, X: object, wanted_accuracy: float = 0.95) -> Answers:
        """Answers, and the largest set of them to keep whose expected accuracy is the wanted one.

        Expected by the probabilities themselves: of calibrated ones the accuracy of kept answers is the mean of their
        largest probabilities. Which are kept depends on all of X; where all would be right more often, all are kept.
        Raises ValueError for an accuracy beyond (0, 1].
        """
        p = self.predict_proba(X)
        kept, probability = kept_at(p, wanted_accuracy), p.max(axis=1, initial=0.0)
        expected = float(probability[kept].mean()) if kept.any() else float("nan")
        return Answers(self.classes_[np.argmax(p, axis=1)], probability, kept, expected)

    def suggest(self, X_pool: object, k: int = 1, by: str = MARGIN) -> Suggestion:
        """Which k examples of a pool to label next, each judged after the labels that the earlier ones may get.

        by: "margin", those whose two most probable classes are nearest to each other, with a utility of 1 where they
        are level and of 0 where one class is certain; "information", those whose labels are expected to tell most of
        the latent functions, in nats (`fewshot/suggestion.py`). Raises ValueError for a k beyond the pool, and for
        another name; TypeError for the information where a learner has no posterior.
        """
        check_is_fitted(self)
        return Suggestion(*suggested(self.task_, self._inputs(X_pool), k, by, self.balanced_))

    def save(self, path: str | Path) -> None:
        """Write what was fitted to a file that `load` reads: examples, labels, key, temperatures, shipped weights.

        Raises SavedError for labels that a file cannot hold; OSError.
        """
        check_is_fitted(self)
        saving.save(Path(path), self._described(), self.classes_, self.task_.kept, self.head_)

    @classmethod
    def load(
        cls, path: str | Path, learner: Head | Learner | None = None, encoder: str | Encoder | None = None
    ) -> "FewShotClassifier":
        """The fitted estimator of a file, which may be from somebody else: all of it is checked.

        learner: needed where a `Learner` was fitted, or the run folder was moved. encoder: needed where the file names
        one that is not this project's own. Raises SavedError, in one line.
        """
        about, classes, kept, shipped = saving.load(Path(path))
        described, head = saving.learner_of(about, shipped, learner, Path(path))
        found = cls(
            described,
            saving.encoder_of(about, encoder, Path(path)),
            temperature=about.temperature,
            temperature_of_fewer=about.temperature_of_fewer,
            balanced=about.balanced,
            draws=about.draws,
        )
        saving.check_fit(lambda: _built(head, _width(kept.inputs)), about, kept, Path(path))
        found.classes_, found._kept, found.head_, found._fingerprint = classes, kept, head, _fingerprint(head)
        if about.features is not None:
            found.n_features_in_ = about.features
        if about.feature_names is not None:
            found.feature_names_in_ = np.array(about.feature_names, object)
        return found

    def built(self) -> Built:
        """What answers: of the fitted head, or else of the one that is to be fitted.

        Raises ValueError for a head that depends on the number of features, before `fit`; RunError, also for a run
        folder with other weights than it was fitted with.
        """
        if not self.__sklearn_is_fitted__():
            return _built(self._head(), None)
        if _fingerprint(self.head_) != self._fingerprint:
            raise RunError(f"expected {self.head_} as it was when this was fitted, got other weights; fit again")
        return _built(self.head_, _width(self._kept.inputs))

    @property
    def task_(self) -> FittedTask:
        """The labelled examples, and the posterior; of what was loaded it is found when it is first asked for."""
        check_is_fitted(self)
        if not hasattr(self, "_task"):
            ways = len(self.classes_)
            learner = self._drawn(self.built().learner, number_of(self._kept.groups), ways)
            self._task = restored(learner, ways, self._kept)
        return self._task

    @property
    def class_count_(self) -> Int[np.ndarray, " C"]:
        """Labelled examples of each class."""
        check_is_fitted(self)
        return np.bincount(self._kept.y, minlength=len(self.classes_))

    @property
    def balanced_(self) -> bool:
        """Whether classes with unlike numbers of examples are shown alike."""
        check_is_fitted(self)
        return self._is_balanced(self.built())

    @property
    def prior_temperature_(self) -> TemperaturePrior:
        """What was expected of the task's temperature before its labels were seen."""
        check_is_fitted(self)
        kept = self._kept
        return self._temperature_prior(self.built(), labels_of(kept.y, kept.groups))

    @property
    def learner_(self) -> Learner:
        """The learner, with the draws of this task."""
        return self.task_.learner

    @property
    def temperatures_(self) -> TemperatureMixture:
        """The temperatures of the task and the probability of each."""
        return self.task_.temperatures

    @property
    def temperature_(self) -> float:
        """Their geometric mean."""
        return float(self.temperatures_.mean)

    @property
    def code_(self) -> Code:
        """The result code of the inference."""
        return self.task_.code

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "classes_")

    def __getstate__(self) -> dict[str, object]:
        """What a pickle holds: no posterior, which is found again from inputs, labels and key; shipped weights."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_task"}
        if isinstance(head := state.get("head_"), PretrainedHead):
            state["head_"] = head.kept()
        return state

    def _learn(self, key: Key[Array, ""], inputs: np.ndarray, labels: np.ndarray, built: Built) -> None:
        """Condition on all labelled inputs; where that fails, everything stays as it was."""
        encoder = LabelEncoder().fit(labels)
        y, classes = encoder.transform(labels).astype(np.int32), encoder.classes_
        if len(classes) < 2:
            got = "1 class" if len(classes) else "0 classes"
            raise ValueError(f"expected examples of at least two classes, got {got}; add labelled examples of another")
        order = order_of(inputs, y)
        inputs, y = inputs[order], y[order]
        groups = groups_of(y) if self._is_balanced(built) else np.arange(len(y))
        shown = labels_of(y, groups)
        learner = self._drawn(built.learner, len(shown), len(classes))
        task = fit_task(learner, key, inputs, y, len(classes), self._temperature_prior(built, shown), groups)
        self.classes_, self._task, self._kept = classes, task, task.kept

    def _inputs(self, X: object) -> np.ndarray:
        """Inputs [Q, ...] of further examples."""
        return embed(self.task_.learner, self._images(X, given_pictures(X), reset=False))

    def _images(self, X: object, pictures: "Pictures | None", reset: bool) -> np.ndarray:
        """What the learner reads: images [N, H, W, Ch], or features, the table X, as images of one pixel."""
        if reset:
            for name in ("n_features_in_", "feature_names_in_"):  # of an earlier fit to a table
                self.__dict__.pop(name, None)
        if pictures is None and isinstance(X, list | tuple) and not X:
            if reset:
                raise ValueError("expected labelled examples, got none")
            return np.empty((0, *self.built().learner.image_shape), np.uint8)
        if pictures is None:
            table = validate_data(self, X, reset=reset, ensure_min_samples=int(reset))
            if reset:
                warn_of_lost_digits(table, stacklevel=4)
            return in_precision(table, "X")[:, None, None]
        if self.encoder is not None:
            encoder = named_encoder(self.encoder) if isinstance(self.encoder, str) else self.encoder
            return encoded(encoder, pictures)[:, None, None]
        if isinstance(pictures, np.ndarray):
            return pictures
        built = _built(self._head(), None)
        shape = built.learner.image_shape
        if holds_features(shape):
            raise ValueError(f"expected features [N, {shape[2]}], got pictures; give an encoder, as {ENCODER_EXAMPLE}")
        images = read_pictures(pictures, shape, preparation(built.dataset))
        for message in unlike_characters(built.dataset, names_of(pictures), images):
            warnings.warn(message, stacklevel=3)
        return images

    def _head(self) -> Head | Learner:
        given: object = self.learner
        if isinstance(given, Head | Learner):
            return given
        if given is not None:
            raise ValueError(f"expected a head, as GaussianProcessHead(), or a Learner as learner, got {given!r:.80}")
        shipped = HEAD_OF.get(self.encoder) if isinstance(self.encoder, str) else None
        return PretrainedHead(shipped) if shipped else GaussianProcessHead()

    def _drawn(self, learner: Learner, points: int, classes: int) -> Learner:
        if self.draws is None:
            return learner
        if self.draws == AUTO:
            return learner.with_draws(draws_for(points, classes), summed=True)
        if not isinstance(self.draws, int | np.integer) or isinstance(self.draws, bool):
            raise ValueError(f"expected draws as an even number, 'auto' or None, got {self.draws!r:.40}")
        return learner.with_draws(int(self.draws))

    def _is_balanced(self, built: Built) -> bool:
        if self.balanced is not None and not isinstance(self.balanced, bool | np.bool_):
            raise ValueError(f"expected True, False or None as balanced, got {self.balanced!r:.40}")
        return built.balanced if self.balanced is None else bool(self.balanced)

    def _temperature_prior(self, built: Built, shown: np.ndarray) -> TemperaturePrior:
        """Of a task with the labels `shown`."""
        own, fewer = self.temperature, self.temperature_of_fewer
        if own == AUTO and fewer is None:
            return built.temperature(np.bincount(shown).tolist())
        for name, value in (("temperature", own), ("temperature_of_fewer", 1.0 if fewer is None else fewer)):
            if (
                not isinstance(value, int | float | np.number)
                or isinstance(value, bool)
                or not SMALLEST_TEMPERATURE <= value <= LARGEST_TEMPERATURE
            ):
                wanted = f"a number from {SMALLEST_TEMPERATURE:.2g} to {LARGEST_TEMPERATURE:g}"
                raise ValueError(f"expected {wanted} as {name}, got {value!r:.40}")
        return TemperaturePrior(float(own), None if fewer is None else float(fewer))

    def _described(self) -> saving.About:
        """What a file says beside the arrays."""
        encoder, names = self.encoder, getattr(self, "feature_names_in_", None)
        return saving.About(
            *saving.described(self._head(), self.head_),
            encoder=name_of(encoder),
            temperature=self.temperature,
            temperature_of_fewer=self.temperature_of_fewer,
            balanced=None if self.balanced is None else bool(self.balanced),
            draws=self.draws,
            features=getattr(self, "n_features_in_", None),
            feature_names=None if names is None else [str(name) for name in names],
        )


def _for_task(head: Head | Learner, images: np.ndarray) -> Head | Learner:
    return head if isinstance(head, Learner) else head.for_task(images)


def _built(head: Head | Learner, width: int | None) -> Built:
    return Built(head, lambda counts: UNKNOWN, False) if isinstance(head, Learner) else head.build(width)


def _fingerprint(head: Head | Learner) -> str:
    """What a head only points at; a learner is at hand."""
    return "" if isinstance(head, Learner) else head.fingerprint()


def _width(inputs: np.ndarray) -> int | None:
    """The number of features of inputs that are features."""
    return inputs.shape[1] if inputs.ndim == 2 else None


def _once(inputs: np.ndarray, labels: np.ndarray, held: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The inputs without those given again, with their labels; `held` of them were there before. Warns of any."""
    names = [*("one held" for _ in range(held)), *(f"number {number}" for number in range(len(labels) - held))]
    kept = once(inputs, labels.tolist(), names, lambda message: warnings.warn(message, stacklevel=5))
    return inputs[kept], labels[kept]


def _check_lengths(examples: np.ndarray, labels: np.ndarray) -> None:
    if len(examples) != len(labels):
        raise ValueError(f"expected one label for each of the {len(examples)} examples, got {len(labels)}")
