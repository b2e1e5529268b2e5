"""Class probabilities of images, from a few labelled images of each class and a trained run.

python runners/predict.py RUN_DIR --support DIR_OR_NPZ --query PATH [PATH ...] [--csv FILE]      every flag: --help

--support is a folder with a subfolder for each class, or an .npz file with `images` and `labels`; --query folders,
images or .npz files with `images`; for a run on embeddings, .npz files with `features`. Images are cropped or fitted as
those of the run's own data set were. The temperature of the probabilities belongs to a number of classes and of images:
where the run was trained with others, it is fitted again for yours on training classes of the run. With two labelled
images a class or more it is then learned from them, by leaving each out and predicting it from the others.
"""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fewshot.classifier import FewShotClassifier, InferenceFailedError
from fewshot.evaluation.text import csv_cell, format_percent, format_table, plain
from fewshot.models.deep_kernel import holds_features
from fewshot.runners.cli.flags import OneLineParser, check_output, positive, whole_number
from fewshot.runners.cli.launch import launch
from fewshot.tasks import DataError, preparation
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.images import Images, load_labelled, load_unlabelled
from fewshot.tasks.replacing import replace_text
from fewshot.training import shape_temperature
from fewshot.training.run import Run, load_run
from fewshot.training.shape_temperature import Temperatures

SHOWN = 20  # rows of the table; --csv has them all
DRAWS = 8192  # of every expectation: two seeds then agree to half a percent, and one task takes no longer
FEWEST_DRAWS, MOST_NUMBERS = 256, 40_000_000  # of large tasks: 160 MB of logits at once


@dataclass(frozen=True)
class PredictionConfig:
    """The flags of predict.py."""

    run_dir: str
    support: str
    query: tuple[str, ...]
    csv: str | None = None
    temperature: float | None = None
    seed: int = 0
    data_root: str | None = None


def main(config: PredictionConfig) -> dict[str, Any]:
    """Probabilities [Q, C], their temperature, the classes in the order of their columns, the names of the queries.

    Raises ConfigError, DataError, RunError or InferenceFailedError, each with one line.
    """
    check_output("--csv", config.csv)
    run = load_run(config.run_dir)
    support, query = _load(config, run)
    classes = len(set(support.labels))
    if run.learner.ways not in (None, classes):
        raise DataError(f"expected {run.learner.ways} classes, which {config.run_dir} tells apart, got {classes}")
    temperatures = _temperatures(run, support, config)
    fitted = _fitted(config, run, temperatures, support)
    probabilities, temperature = fitted.predict_proba(query.pixels), fitted.temperature_
    _print(config, run, temperatures, temperature, support, query, probabilities)
    if config.csv:
        replace_text(Path(config.csv), _csv(query, fitted.classes_, probabilities))
    found = {"probabilities": probabilities, "classes": list(fitted.classes_), "names": query.names}
    return {**found, "temperature": temperature}


def _fitted(config: PredictionConfig, run: Run, temperatures: Temperatures, support: Images) -> FewShotClassifier:
    return FewShotClassifier(
        run.learner,
        temperature=temperatures.own,
        temperature_of_fewer=temperatures.fewer,
        draws=_draws(support.labels),
        random_state=config.seed,
    ).fit(support.pixels, support.labels)


def _draws(labels: Sequence[str]) -> int:
    """DRAWS, or half as often as needed for the logits of all labelled images to fit into MOST_NUMBERS."""
    draws, numbers = DRAWS, len(labels) * len(set(labels))
    while draws > FEWEST_DRAWS and draws * numbers > MOST_NUMBERS:
        draws //= 2
    return draws


def _temperatures(run: Run, support: Images, config: PredictionConfig) -> Temperatures:
    """The temperature that was given, else those for as many classes and images a class, on average."""
    if config.temperature is not None:
        return Temperatures(config.temperature, None)
    classes = len(set(support.labels))
    return shape_temperature.for_user(run, classes, round(len(support.labels) / classes), config.data_root)


def _load(config: PredictionConfig, run: Run) -> tuple[Images, Images]:
    """Support and queries: pictures, prepared as the run's own were, or features. Raises DataError for one class."""
    shape = run.learner.image_shape
    if holds_features(shape):
        width = shape[2]
        support = load_features(config.support, width, labelled=True)
        queries = [load_features(path, width, labelled=False) for path in config.query]
    else:
        prepare = preparation(run.config.dataset)
        support = load_labelled(config.support, shape, prepare)
        queries = [load_unlabelled(path, shape, prepare) for path in config.query]
    if len(set(support.labels)) < 2:
        raise DataError(f"expected labels of two classes or more in {config.support}, got only {support.labels[0]!r}")
    return support, _joined(queries)


def _joined(parts: Sequence[Images]) -> Images:
    names, labels = (list(chain.from_iterable(column)) for column in list(zip(*parts, strict=True))[1:])
    return Images(np.concatenate([part.pixels for part in parts]), names, labels)


def _print(
    config: PredictionConfig,
    run: Run,
    temperatures: Temperatures,
    temperature: float,
    support: Images,
    query: Images,
    probabilities: np.ndarray,
) -> None:
    classes, counts = np.unique(support.labels, return_counts=True)
    low, high = counts.min(), counts.max()
    images = f"{low} labelled image{'s' if low > 1 else ''}" if low == high else f"{low} to {high} labelled images"
    queries = "1 query" if len(query.names) == 1 else f"{len(query.names)} queries"
    print(f"{len(classes)} classes with {images} each, {queries}; read as {_read_as(run)}")
    before = f", learned from the labelled images; before them {temperatures.own:.3g}" if temperatures.fewer else ""
    print(f"temperature {temperature:.3g}{before}")
    best = np.argsort(-probabilities, axis=1)[:, :2]
    rows = [
        [plain(name), *(f"{plain(classes[k])} {format_percent(float(p[k]))}" for k in top)]
        for name, p, top in zip(query.names, probabilities, best, strict=True)
    ]
    print(format_table(["image", "most probable", "then"], rows[:SHOWN]))
    if len(rows) > SHOWN:
        where = f"{plain(config.csv)} has" if config.csv else "--csv FILE writes"
        print(f"... and {len(rows) - SHOWN} more; {where} all of them")


def _read_as(run: Run) -> str:
    """What the network sees: a user's photographs may be larger, and have colours that it was not trained on."""
    shape = run.learner.image_shape
    height, width, channels = shape
    if holds_features(shape):
        return f"{channels} features"
    return f"{width} x {height} pixels, {'grey' if channels == 1 else 'colour'}"


def _csv(query: Images, classes: np.ndarray, probabilities: np.ndarray) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [csv_cell(one) for one in classes]
    writer.writerow(["image", "prediction", *names])
    for name, row in zip(query.names, probabilities, strict=True):
        writer.writerow([csv_cell(name), names[np.argmax(row)], *(f"{value:.6f}" for value in row)])
    return text.getvalue()


def parse(arguments: Sequence[str] | None = None) -> PredictionConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="predict.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--support", required=True, metavar="PATH", help="folder with a subfolder a class, or .npz")
    parser.add_argument(
        "--query", required=True, nargs="+", metavar="PATH", help="folders of images, single images, or .npz"
    )
    parser.add_argument("--csv", metavar="FILE", help="write all probabilities to this file")
    parser.add_argument(
        "--temperature",
        type=positive,
        metavar="T",
        help="of the probabilities (default: fitted for as many classes and images, on training classes of the run, "
        "then learned from your labelled images)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the inference (default 0)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    given = vars(parser.parse_args(arguments))
    return PredictionConfig(**given | {"query": tuple(given["query"])})


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments, InferenceFailedError)


if __name__ == "__main__":
    sys.exit(command_line())
