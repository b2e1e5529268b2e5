"""Folders of pictures in, probabilities out: what `predict.py` does, for Python.

    found = predict_folders("photographs", "shop", ["basket"])       a folder with a subfolder a class; pictures
    print(table(found.answers))                                      or csv_text, json_text, html_page

of `fewshot.evaluation.prediction_report`. Each picture passes the network once.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fewshot.conditioning import TemperaturePrior, draws_for, embed, fit_task
from fewshot.evaluation.prediction_report import Predicted
from fewshot.evaluation.selection import kept_at
from fewshot.evaluation.text import plain
from fewshot.learners import Learner
from fewshot.models.deep_kernel import holds_features
from fewshot.models.networks import load_encoder
from fewshot.pretrained import DEFAULT, PRETRAINED, load_pretrained
from fewshot.tasks import DataError, preparation
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.tasks.images import Images, Prepare, labelled_files, load_labelled, load_unlabelled, unlabelled_files
from fewshot.tasks.ink import COVERED, STYLES, InkPreparation, covered
from fewshot.training import shape_temperature
from fewshot.training.overrides import ConfigError
from fewshot.training.run import Run, load_class_run
from fewshot.training.shape_temperature import Temperatures

KEEP_ACCURACY = 0.95


class Model(NamedTuple):
    """What answers a task.

    encoder: what turns pictures into its features, by name; dataset: whose pictures it was trained on; temperatures:
    those for counts of labelled images; prepare: how pictures become images for it.
    """

    name: str
    learner: Learner
    encoder: str | None
    dataset: str
    temperatures: Callable[[Sequence[int]], Temperatures]
    prepare: Prepare


class Found(NamedTuple):
    """What is said of every query, and the queries."""

    answers: Predicted
    query: Images


def predict_folders(
    name: str,
    support: str | Path,
    query: Iterable[str | Path],
    *,
    encoder: str | None = None,
    temperature: float | None = None,
    keep_accuracy: float = KEEP_ACCURACY,
    strict: bool = False,
    seed: int = 0,
    data_root: str | None = None,
    find_ink: bool = True,
) -> Found:
    """Probabilities, answers and scores of every query by the labelled pictures of a folder.

    name: a run folder, or weights that are shipped. find_ink: photographs of characters on paper are made into what the
    network was trained on. Raises ConfigError, DataError, EncoderError, RunError, WeightsError
    or InferenceFailedError, each with one line.
    """
    model = load_model(name, encoder, data_root, find_ink)
    labelled, queries = load_images(model, str(support), [str(path) for path in query], strict)
    counts = np.unique(labelled.labels, return_counts=True)[1].tolist()
    if model.learner.ways not in (None, len(counts)):
        raise DataError(f"expected {model.learner.ways} classes, which {name} tells apart, got {len(counts)}")
    temperatures = model.temperatures(counts) if temperature is None else Temperatures(temperature, None)
    return Found(answered(model, temperatures, labelled, queries, seed, keep_accuracy), queries)


def load_model(
    name: str = DEFAULT, encoder: str | None = None, data_root: str | None = None, find_ink: bool = True
) -> Model:
    """A run folder, or weights that are shipped. Raises RunError, and ConfigError for an encoder of no use."""
    if name in PRETRAINED and not Path(name).is_dir():
        shipped = load_pretrained(name)
        run, by, temperatures = shipped.run, shipped.encoder, shipped.temperatures
    else:
        run, by = load_class_run(name), None
        temperatures = partial(_fitted_temperatures, run, data_root)
    if encoder and not holds_features(run.learner.image_shape):
        raise ConfigError(f"expected no --encoder with {name}, which reads images itself; leave it out")
    prepare = preparation(run.config.dataset, find_ink)
    return Model(name, run.learner, encoder or by, run.config.dataset, temperatures, prepare)


def _fitted_temperatures(run: Run, data_root: str | None, counts: Sequence[int]) -> Temperatures:
    return shape_temperature.for_user(run, len(counts), round(sum(counts) / len(counts)), data_root)


def load_images(model: Model, support: str, query: Sequence[str], strict: bool = False) -> tuple[Images, Images]:
    """Support and queries: pictures, prepared as the model's own were, or features. Raises DataError for one class."""
    shape = model.learner.image_shape
    if not holds_features(shape):
        labelled = load_labelled(support, shape, model.prepare, strict)
        queries = [load_unlabelled(path, shape, model.prepare, strict) for path in query]
    else:
        labelled = _features(support, True, model, strict)
        queries = [_features(path, False, model, strict) for path in query]
    if len(set(labelled.labels)) < 2:
        raise DataError(f"expected labels of two classes or more in {support}, got only {labelled.labels[0]!r}")
    columns = [list(chain.from_iterable(column)) for column in list(zip(*queries, strict=True))[1:]]
    asked = Images(np.concatenate([part.pixels for part in queries]), *columns)
    if model.dataset in STYLES:
        _tell_unlike(model, labelled, asked)
    return labelled, asked


def _tell_unlike(model: Model, *images: Images) -> None:
    """Say on the error stream which pictures do not look like the characters that the network was trained on."""
    for part in images:
        for name, image in zip(part.names, part.pixels, strict=True):
            share = covered(image)
            if not COVERED[0] <= share <= COVERED[1]:
                print(
                    f"warning: {plain(name)} does not look like the characters of {model.dataset}: strokes cover "
                    f"{share:.1%} of it, in training {COVERED[0]:.1%} to {COVERED[1]:.0%}; look at it, or leave it out",
                    file=sys.stderr,
                )


def _features(path: str, labelled: bool, model: Model, strict: bool) -> Images:
    """Features of an .npz file, or of pictures by the model's encoder. Raises DataError."""
    width = model.learner.image_shape[2]
    if Path(path).suffix == ".npz" or model.encoder is None:
        return load_features(path, width, labelled)
    encoder = load_encoder(model.encoder)
    if encoder.features != width:
        raise DataError(f"expected an encoder of {width} features, got {encoder.features} of {plain(encoder.name)}")
    files = (labelled_files if labelled else unlabelled_files)(Path(path))
    return FeatureCache(say=partial(print, file=sys.stderr)).encode_files(encoder, files, strict)


def answered(
    model: Model,
    temperatures: Temperatures,
    support: Images,
    query: Images,
    seed: int = 0,
    keep_accuracy: float = KEEP_ACCURACY,
) -> Predicted:
    """What the model says of the queries, and how unknown each looks. Raises InferenceFailedError."""
    classes, y = np.unique(support.labels, return_inverse=True)
    learner = model.learner.with_draws(draws_for(len(y), len(classes)))
    inputs, new = (embed(learner, images.pixels) for images in (support, query))
    prior = TemperaturePrior(temperatures.own, temperatures.fewer)
    task = fit_task(learner, jax.random.key(seed), inputs, y.astype(np.int32), len(classes), prior)
    probabilities, p_values = task.probabilities(new), task.unknown_p_values(new)
    return Predicted(
        names=query.names,
        classes=[str(one) for one in classes],
        counts=np.bincount(y).tolist(),
        probabilities=probabilities,
        unknown=None if p_values is None else 1 - p_values,
        kept=kept_at(probabilities, keep_accuracy),
        temperature=float(task.temperatures.mean),
        before=None if temperatures.fewer is None else temperatures.own,
        read_as=_read_as(model, support),
    )


def _read_as(model: Model, support: Images) -> str:
    """What the network sees: a user's photographs may be larger, and have colours that it was not trained on."""
    height, width, channels = model.learner.image_shape
    if holds_features(model.learner.image_shape):
        by = f" of {plain(model.encoder)}" if model.encoder and Path(support.names[0]).is_file() else ""
        return f"{channels} features{by}"
    ink = model.prepare.photographs if isinstance(model.prepare, InkPreparation) else 0
    of_ink = f"; {ink} photographs of ink cleaned and centred (--no-ink leaves them as they are)" if ink else ""
    return f"{width} x {height} pixels, {'grey' if channels == 1 else 'colour'}{of_ink}"
