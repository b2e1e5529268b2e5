"""Class probabilities of pictures, from a few labelled ones of each class.

python runners/predict.py [RUN_DIR | NAME] --support DIR_OR_NPZ --query PATH [PATH ...] [--csv FILE]    see --help

Without RUN_DIR or NAME a pretrained encoder with its head answers (`photographs`). --support is a folder with a
subfolder for each class, or an .npz file with `images` and `labels`; --query folders, images or .npz files with
`images`; for a run on embeddings, .npz files with `features`, or pictures with --encoder. Images are cropped or fitted
as those of the run's own data set were. A picture that cannot be read is reported and left out.

The temperature of the probabilities belongs to a number of classes and of images. Those of the weights that are shipped
are known; that of a run for another shape than its own is fitted on its training classes, once. With two labelled
images a class or more it is then learned from them, by leaving each out and predicting it from the others.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fewshot.classifier import FewShotClassifier, InferenceFailedError
from fewshot.conditioning import embed as embedded
from fewshot.evaluation.selection import kept_at
from fewshot.evaluation.text import plain
from fewshot.evaluation.unknown import unknown_p_values
from fewshot.learners import Learner
from fewshot.models.deep_kernel import holds_features
from fewshot.models.networks import load_encoder
from fewshot.pretrained import DEFAULT, PRETRAINED, load_pretrained
from fewshot.runners.cli.flags import OneLineParser, check_output, positive, whole_number
from fewshot.runners.cli.launch import launch
from fewshot.runners.cli.predictions import Predicted, csv_text, html_page, json_text, printed
from fewshot.runners.encode import ENCODER_ERRORS
from fewshot.tasks import DataError, preparation
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.tasks.images import Images, labelled_files, load_labelled, load_unlabelled, unlabelled_files
from fewshot.tasks.replacing import replace_text
from fewshot.training import shape_temperature
from fewshot.training.overrides import ConfigError
from fewshot.training.run import load_run
from fewshot.training.shape_temperature import Temperatures

KEEP_ACCURACY = 0.95


@dataclass(frozen=True)
class PredictionConfig:
    """The flags of predict.py; run_dir is a run folder or the name of weights that are shipped."""

    run_dir: str
    support: str
    query: tuple[str, ...]
    csv: str | None = None
    temperature: float | None = None
    seed: int = 0
    data_root: str | None = None
    encoder: str | None = None
    json: str | None = None
    report: str | None = None
    keep_accuracy: float = KEEP_ACCURACY
    strict: bool = False


class Model(NamedTuple):
    """What answers a task.

    encoder: what turns pictures into its features, by name; dataset: whose pictures it was trained on; temperatures:
    those for counts of labelled images.
    """

    learner: Learner
    encoder: str | None
    dataset: str
    temperatures: Callable[[Sequence[int]], Temperatures]


class Answer(NamedTuple):
    """Probabilities [Q, C] of the classes [C], the temperature they are at, and its value before the task's labels."""

    probabilities: np.ndarray
    classes: np.ndarray
    temperature: float
    before: float | None


def main(config: PredictionConfig) -> Predicted:
    """Probabilities, answers and scores of every query, written where they were asked for.

    Raises ConfigError, DataError, EncoderError, RunError, WeightsError or InferenceFailedError, each with one line.
    """
    for flag, path in (("--csv", config.csv), ("--json", config.json), ("--report", config.report)):
        check_output(flag, path)
    model = load_model(config)
    support, query = load_images(config, model)
    counts = np.unique(support.labels, return_counts=True)[1].tolist()
    if model.learner.ways not in (None, len(counts)):
        raise DataError(f"expected {model.learner.ways} classes, which {config.run_dir} tells apart, got {len(counts)}")
    given = config.temperature
    temperatures = model.temperatures(counts) if given is None else Temperatures(given, None)
    answer = answered(model.learner, temperatures, support, query, config.seed)
    found = Predicted(
        names=query.names,
        classes=[str(one) for one in answer.classes],
        counts=counts,
        probabilities=answer.probabilities,
        unknown=unknown_shares(model.learner, support, query, config.seed),
        kept=kept_at(answer.probabilities, config.keep_accuracy),
        temperature=answer.temperature,
        before=answer.before,
        read_as=_read_as(model, config),
    )
    printed(found, config.csv)
    write(config, found, query)
    return found


def load_model(config: PredictionConfig) -> Model:
    """A run folder, or weights that are shipped. Raises RunError, and ConfigError for an encoder of no use."""
    if config.run_dir in PRETRAINED and not Path(config.run_dir).is_dir():
        shipped = load_pretrained(config.run_dir)
        model = Model(shipped.learner, shipped.encoder, shipped.run.config.dataset, shipped.temperatures)
    else:
        run = load_run(config.run_dir)

        def fitted(counts: Sequence[int]) -> Temperatures:
            shot = round(sum(counts) / len(counts))
            return shape_temperature.for_user(run, len(counts), shot, config.data_root)

        model = Model(run.learner, None, run.config.dataset, fitted)
    if config.encoder and not holds_features(model.learner.image_shape):
        raise ConfigError(f"expected no --encoder with {config.run_dir}, which reads images itself; leave it out")
    return model._replace(encoder=config.encoder or model.encoder)


def load_images(config: PredictionConfig, model: Model) -> tuple[Images, Images]:
    """Support and queries: pictures, prepared as the model's own were, or features. Raises DataError for one class."""
    shape, strict = model.learner.image_shape, config.strict
    if not holds_features(shape):
        prepare = preparation(model.dataset)
        support = load_labelled(config.support, shape, prepare, strict)
        queries = [load_unlabelled(path, shape, prepare, strict) for path in config.query]
    else:
        support = _features(config.support, True, model, strict)
        queries = [_features(path, False, model, strict) for path in config.query]
    if len(set(support.labels)) < 2:
        raise DataError(f"expected labels of two classes or more in {config.support}, got only {support.labels[0]!r}")
    columns = [list(chain.from_iterable(column)) for column in list(zip(*queries, strict=True))[1:]]
    return support, Images(np.concatenate([part.pixels for part in queries]), *columns)


def _features(path: str, labelled: bool, model: Model, strict: bool) -> Images:
    """Features of an .npz file, or of pictures by the model's encoder. Raises DataError."""
    width = model.learner.image_shape[2]
    if Path(path).suffix == ".npz" or model.encoder is None:
        return load_features(path, width, labelled)
    encoder = load_encoder(model.encoder)
    if encoder.features != width:
        raise DataError(f"expected an encoder of {width} features, got {encoder.features} of {plain(encoder.name)}")
    files = (labelled_files if labelled else unlabelled_files)(Path(path))
    return FeatureCache().encode_files(encoder, files, strict)


def answered(learner: Learner, temperatures: Temperatures, support: Images, query: Images, seed: int) -> Answer:
    """What the estimator says of the queries."""
    classifier = FewShotClassifier(
        learner, temperature=temperatures.own, temperature_of_fewer=temperatures.fewer, random_state=seed
    )
    fitted = classifier.fit(support.pixels, support.labels)
    before = None if temperatures.fewer is None else temperatures.own
    return Answer(fitted.predict_proba(query.pixels), fitted.classes_, fitted.temperature_, before)


def unknown_shares(learner: Learner, support: Images, query: Images, seed: int) -> np.ndarray | None:
    """1 - p of `unknown_p_values` [Q]; None where no class has two labelled images."""
    y = np.unique(support.labels, return_inverse=True)[1].astype(np.int32)
    inputs = (jnp.asarray(embedded(learner, one.pixels)) for one in (support, query))
    p = unknown_p_values(jax.random.key(seed), learner, next(inputs), y, next(inputs))
    return None if p is None else 1 - p


def write(config: PredictionConfig, found: Predicted, query: Images) -> None:
    """The files that were asked for, each in one move."""
    if config.csv:
        replace_text(Path(config.csv), csv_text(found))
    if config.json:
        replace_text(Path(config.json), json_text(found))
    if config.report:
        replace_text(Path(config.report), html_page(found, query))


def _read_as(model: Model, config: PredictionConfig) -> str:
    """What the network sees: a user's photographs may be larger, and have colours that it was not trained on."""
    height, width, channels = model.learner.image_shape
    if holds_features(model.learner.image_shape):
        by = f" of {plain(model.encoder)}" if model.encoder and not config.support.endswith(".npz") else ""
        return f"{channels} features{by}"
    return f"{width} x {height} pixels, {'grey' if channels == 1 else 'colour'}"


def share(text: str) -> float:
    """An accuracy above 0 and at most 1. Raises ConfigError by way of the parser."""
    number = positive(text)
    if number > 1:
        raise ConfigError(f"expected --keep-accuracy above 0 and at most 1, got {text}; 0.95 is 95%")
    return number


def parse(arguments: Sequence[str] | None = None) -> PredictionConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="predict.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "run_dir",
        nargs="?",
        default=DEFAULT,
        metavar="RUN_DIR | NAME",
        help=f"folder of a run, or one of {', '.join(PRETRAINED)} (default {DEFAULT})",
    )
    parser.add_argument("--support", required=True, metavar="PATH", help="folder with a subfolder a class, or .npz")
    parser.add_argument(
        "--query", required=True, nargs="+", metavar="PATH", help="folders of images, single images, or .npz"
    )
    parser.add_argument("--encoder", metavar="NAME", help="reads the pictures of a run on embeddings")
    parser.add_argument("--csv", metavar="FILE", help="write all probabilities to this file")
    parser.add_argument("--json", metavar="FILE", help="the same for programs")
    parser.add_argument("--report", metavar="FILE", help="an HTML page of the pictures, the least certain first")
    parser.add_argument(
        "--keep-accuracy",
        type=share,
        default=KEEP_ACCURACY,
        metavar="A",
        help=f"answer as many queries as this accuracy allows (default {KEEP_ACCURACY})",
    )
    parser.add_argument("--strict", action="store_true", help="end the run at a picture that cannot be read")
    parser.add_argument(
        "--temperature",
        type=positive,
        metavar="T",
        help="of the probabilities (default: the known one for as many classes and images, or fitted on training "
        "classes of the run, then learned from your labelled images)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the inference (default 0)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    given = vars(parser.parse_args(arguments))
    return PredictionConfig(**given | {"query": tuple(given["query"])})


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments, InferenceFailedError, *ENCODER_ERRORS)


if __name__ == "__main__":
    sys.exit(command_line())
