"""Folders of pictures in, probabilities out: what `predict.py` does, for Python.

    found = predict_folders("photographs", "shop", ["basket"])       a folder with a subfolder a class; pictures
    print(table(found.answers))                                      or csv_text, json_text, html_page

of `fewshot.evaluation.prediction_report`. Each picture passes the network once.
"""

import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fewshot.classifier import AUTO, FewShotClassifier
from fewshot.conditioning import embed
from fewshot.evaluation.prediction_report import STRANGE, Predicted, ceiling
from fewshot.evaluation.selection import kept_at
from fewshot.evaluation.text import plain
from fewshot.groups import number_of
from fewshot.heads import PretrainedHead, StoredHead, TrainedRun
from fewshot.inputs import name_of
from fewshot.models.deep_kernel import holds_features
from fewshot.models.networks import load_encoder
from fewshot.models.networks.encoders import Encoder
from fewshot.pretrained import DEFAULT, PRETRAINED
from fewshot.repetitions import AS_TWO_CLASSES, among, first_of, once
from fewshot.suggestion import suggested
from fewshot.tasks import DataError, preparation
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.tasks.files import resolve_root
from fewshot.tasks.images import (
    Images,
    Prepare,
    labelled_files,
    load_labelled,
    load_unlabelled,
    prepared_files,
    unlabelled_files,
)
from fewshot.tasks.ink import InkPreparation, unlike_characters
from fewshot.training.overrides import ConfigError

KEEP_ACCURACY = 0.95


class Model(NamedTuple):
    """What answers tasks.

    classifier: fitted where it was read from a file of `--save`; image_shape: of what it reads; dataset: whose pictures
    it was trained on; prepare: how pictures become images for it.
    """

    name: str
    classifier: FewShotClassifier
    image_shape: tuple[int, int, int]
    dataset: str
    prepare: Prepare

    @property
    def encoder(self) -> str | None:
        """The name of what turns pictures into features."""
        return name_of(self.classifier.encoder)

    @property
    def is_fitted(self) -> bool:
        """Whether it holds labelled images."""
        return hasattr(self.classifier, "classes_")


class Found(NamedTuple):
    """What is said of every query, the queries, and what says it."""

    answers: Predicted
    query: Images
    classifier: FewShotClassifier


def predict_folders(
    name: str,
    support: str | Path | None,
    query: Iterable[str | Path] = (),
    *,
    test: str | Path | None = None,
    add: Iterable[str | Path] = (),
    encoder: str | None = None,
    temperature: float | None = None,
    keep_accuracy: float = KEEP_ACCURACY,
    strict: bool = False,
    seed: int = 0,
    data_root: str | None = None,
    find_ink: bool = True,
    suggest: int = 0,
    run: str | None = None,
    leave_strange: bool = False,
) -> Found:
    """Probabilities, answers and scores of every query by the labelled pictures of a folder.

    name: a run folder, weights that are shipped, or a file of `FewShotClassifier.save`, which has its labelled pictures
    already: support is None then. test: labelled pictures in the place of queries, of these classes or others; answers
    are compared with their labels. add: further labelled pictures. find_ink: photographs of characters on paper are
    made into what the network was trained on. suggest: of how many queries the labels are asked for. run: where the run
    of a file is, if it has moved. leave_strange: answers of queries that look stranger than STRANGE of the labelled
    pictures stay open. Raises ConfigError, DataError, EncoderError, RunError, SavedError, WeightsError or
    InferenceFailedError, each with one line.
    """
    places = list(map(Path, query))
    if (test is None) != bool(places):
        raise ConfigError("expected either --query or --test, got " + ("both" if places else "neither"))
    model = load_model(name, encoder, temperature, seed, data_root, find_ink, run)
    if model.is_fitted and support is not None:
        raise ConfigError(
            f"expected no --support with {name}, which holds labelled images; put more of them after --add"
        )
    if not model.is_fitted and support is None:
        raise ConfigError(f"expected --support, the labelled images, with {name}, got none")
    given = [(str(path), fewest) for path, fewest in ((support, 2), *((path, 1) for path in add)) if path is not None]
    labelled = [load_support(model, path, strict, fewest) for path, fewest in given]
    asked = load_queries(model, places, strict) if test is None else load_support(model, str(test), strict, 1)
    if not 0 <= suggest <= len(asked.names):
        raise ConfigError(f"expected --suggest from 0 to {len(asked.names)}, the number of queries, got {suggest}")
    for part in (*labelled, asked):
        for message in unlike_characters(model.dataset, part.names, part.pixels):
            _warn(message)
    if labelled:
        learn(model, joined(labelled), " and ".join(path for path, _ in given))
    found = answered(model, asked, keep_accuracy, suggest, leave_strange)
    return Found(found._replace(labels=None if test is None else asked.labels), asked, model.classifier)


def load_model(
    name: str = DEFAULT,
    encoder: str | None = None,
    temperature: float | None = None,
    seed: int = 0,
    data_root: str | None = None,
    find_ink: bool = True,
    run: str | None = None,
) -> Model:
    """A run folder, weights that are shipped, or a saved classifier, whose run may have moved to `run`.

    Raises RunError, SavedError, and ConfigError for flags of no use.
    """
    if Path(name).is_file():
        if temperature is not None:
            raise ConfigError(f"expected no --temperature with {name}, which has its own; save it with another")
        moved = None if run is None else TrainedRun(run, str(resolve_root(data_root)))
        classifier = FewShotClassifier.load(name, moved, encoder)
        if data_root is not None and isinstance(classifier.head_, TrainedRun):
            classifier.head_.data_root = str(resolve_root(data_root))
    elif run is not None:
        raise ConfigError(f"expected --run with a file that --save wrote, got {name}; name the folder in its place")
    else:
        shipped = PretrainedHead(name) if name in PRETRAINED and not (Path(name) / "config.json").exists() else None
        head = shipped or TrainedRun(name, str(resolve_root(data_root)))
        by = encoder or (shipped.load().encoder if shipped else None)
        own = AUTO if temperature is None else temperature
        classifier = FewShotClassifier(head, by, temperature=own, random_state=seed)
    built = classifier.built()
    shape = built.learner.image_shape
    if encoder and not holds_features(shape):
        raise ConfigError(f"expected no --encoder with {name}, which reads images itself; leave it out")
    return Model(name, classifier, shape, built.dataset, preparation(built.dataset, find_ink))


def load_support(model: Model, path: str, strict: bool = False, fewest: int = 2) -> Images:
    """Labelled pictures of `fewest` classes or more, prepared for the model, or features. Raises DataError."""
    if not holds_features(model.image_shape):
        return load_labelled(path, model.image_shape, model.prepare, strict, fewest)
    encoder = _encoder(model, path)
    if encoder is None:
        return load_features(path, model.image_shape[2], True)
    return _cache().encode_files(encoder, labelled_files(Path(path), fewest), strict)


def load_queries(model: Model, paths: Sequence[Path], strict: bool = False) -> Images:
    """Pictures without labels, prepared for the model, or features, in the order of the paths. Raises DataError."""
    parts = []
    for of_arrays, group in groupby(paths, lambda path: path.suffix == ".npz"):
        if of_arrays:
            parts += [_queries_of_array(model, path) for path in group]
        else:
            parts.append(_queries_of_files(model, list(group), strict))
    return joined(parts)


def _queries_of_array(model: Model, path: Path) -> Images:
    if holds_features(model.image_shape):
        return load_features(str(path), model.image_shape[2], False)
    return load_unlabelled(path, model.image_shape, model.prepare)


def _queries_of_files(model: Model, paths: Sequence[Path], strict: bool) -> Images:
    """Of all files together, so that one that cannot be read is left out among others."""
    if not holds_features(model.image_shape):
        files = [file for path in paths for file in unlabelled_files(path)]
        return prepared_files(files, model.image_shape, model.prepare, strict)
    encoder = _encoder(model, str(paths[0]))
    if encoder is None:
        return load_features(str(paths[0]), model.image_shape[2], False)
    return _cache().encode_files(encoder, [file for path in paths for file in unlabelled_files(path)], strict)


def joined(parts: Sequence[Images]) -> Images:
    """All of them."""
    columns = [list(chain.from_iterable(column)) for column in list(zip(*parts, strict=True))[1:]]
    return Images(np.concatenate([part.pixels for part in parts]), *columns)


def learn(model: Model, labelled: Images, places: str) -> None:
    """Fit the model's classifier to labelled images, or add them to those that it has. Raises DataError."""
    classifier = model.classifier
    classes, ways = set(labelled.labels), classifier.built().learner.ways
    if model.is_fitted:
        known = classifier.classes_.tolist()
        if not isinstance(known[0], str):
            raise DataError(f"expected words as labels in {model.name}, got {known[0]!r}; add to it in Python")
        classes |= set(known)
    if len(classes) < 2:
        raise DataError(f"expected labels of two classes or more in {places}, got only {labelled.labels[0]!r}")
    if ways not in (None, len(classes)):
        raise DataError(f"expected {ways} classes, which {model.name} tells apart, got {len(classes)}")
    labelled = _once(model, labelled)
    with warnings.catch_warnings():  # what the estimator says by numbers has been said by names
        warnings.filterwarnings("ignore", AS_TWO_CLASSES, UserWarning)
        (classifier.add if model.is_fitted else classifier.fit)(estimator_input(labelled), labelled.labels)


def _once(model: Model, labelled: Images) -> Images:
    """The labelled images without those given again, which it names on the error stream."""
    classifier, names, labels = model.classifier, labelled.names, labelled.labels
    inputs = labelled.pixels
    if model.is_fitted:
        task = classifier.task_
        inputs = np.concatenate([task.inputs, embed(task.learner, inputs)])
        labels = [*classifier.classes_[task.y].tolist(), *labels]
        names = [*(f"one that {model.name} holds" for _ in task.y), *names]
    kept = once(inputs, labels, names, _warn)[-len(labelled.names) :]
    columns = ([one for one, keep in zip(column, kept, strict=True) if keep] for column in labelled[1:])
    return Images(labelled.pixels[kept], *columns)


def _warn(message: str) -> None:
    print("warning:", plain(message), file=sys.stderr)


def estimator_input(images: Images) -> np.ndarray:
    """What an estimator takes: features [N, D], or images [N, H, W, Ch]."""
    return images.pixels[:, 0, 0] if holds_features(images.pixels.shape[1:]) else images.pixels


def _encoder(model: Model, path: str) -> Encoder | None:
    """What turns the pictures of a path into features, None for an .npz file. Raises DataError."""
    if Path(path).suffix == ".npz" or model.encoder is None:
        return None
    encoder, width = load_encoder(model.encoder), model.image_shape[2]
    if encoder.features != width:
        raise DataError(f"expected an encoder of {width} features, got {encoder.features} of {plain(encoder.name)}")
    return encoder


def _cache() -> FeatureCache:
    return FeatureCache(say=partial(print, file=sys.stderr))


def answered(
    model: Model,
    query: Images,
    keep_accuracy: float = KEEP_ACCURACY,
    suggest: int = 0,
    leave_strange: bool = False,
) -> Predicted:
    """What the fitted model says of the queries, how unknown each looks, and which of them to label next.

    Queries that are labelled pictures too are named on the error stream. Raises InferenceFailedError, and ConfigError
    for leave_strange with too few labelled pictures.
    """
    classifier, task, prior = model.classifier, model.classifier.task_, model.classifier.prior_temperature_
    new = embed(task.learner, query.pixels)
    if labelled := [name for name, one in zip(query.names, among(new, task.inputs), strict=True) if one]:
        _warn(f"queries that are labelled pictures too say nothing of new ones: {first_of(labelled)}")
    probabilities, p_values, left_out = task.probabilities(new), task.unknown_p_values(new), task.left_out
    unknown = None if p_values is None else 1 - p_values
    number = 0 if left_out is None else len(left_out.right)
    if leave_strange and ceiling(number) < STRANGE:
        wanted = "nine labelled pictures or more in classes of two or more"
        raise ConfigError(f"expected {wanted} with --leave-strange, got {number}; label more, or leave it out")
    asked = unknown < STRANGE if leave_strange and unknown is not None else np.ones(len(new), bool)
    kept = np.zeros(len(new), bool)
    kept[asked] = kept_at(probabilities[asked], keep_accuracy)
    return Predicted(
        names=query.names,
        classes=[str(one) for one in classifier.classes_],
        counts=classifier.class_count_.tolist(),
        probabilities=probabilities,
        unknown=unknown,
        left_out=None if left_out is None else (int(left_out.right.sum()), number),
        kept=kept,
        temperature=classifier.temperature_,
        before=None if prior.fewer is None else prior.own,
        read_as=_read_as(model, query),
        means=None if number_of(task.groups) == len(task.y) else number_of(task.groups) // task.classes,
        to_label=suggested(task, new, suggest, balanced=classifier.balanced_)[0].tolist() if suggest else [],
    )


def _read_as(model: Model, query: Images) -> str:
    """What the network sees: a user's photographs may be larger, and have colours that it was not trained on."""
    height, width, channels = model.image_shape
    asked, head = model.classifier.learner, model.classifier.head_
    special = ""
    if isinstance(head, StoredHead):
        special = f", answered by {head.name} as it was when {plain(model.name)} was saved"
    elif isinstance(head, PretrainedHead) and isinstance(asked, PretrainedHead) and head.name != asked.name:
        special = f", answered by {head.name}"
    if holds_features(model.image_shape):
        by = f" of {plain(model.encoder)}" if model.encoder and Path(query.names[0]).is_file() else ""
        return f"{channels} features{by}{special}"
    ink = model.prepare.photographs if isinstance(model.prepare, InkPreparation) else 0
    of_ink = f"; {ink} photographs of ink cleaned and centred (--no-ink leaves them as they are)" if ink else ""
    return f"{width} x {height} pixels, {'grey' if channels == 1 else 'colour'}{special}{of_ink}"
