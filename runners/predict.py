"""Class probabilities of pictures, from a few labelled ones of each class.

python runners/predict.py [RUN_DIR | NAME] --support DIR_OR_NPZ --query PATH [PATH ...] [--save FILE]    see --help
python runners/predict.py [RUN_DIR | NAME] --support DIR_OR_NPZ --test DIR_OR_NPZ
python runners/predict.py FILE [--add DIR_OR_NPZ ...] --query PATH [PATH ...]

Without RUN_DIR or NAME a pretrained encoder with its head answers (`photographs`). --support is a folder with a
subfolder for each class, or an .npz file with `images` and `labels`; --query folders, images or .npz files with
`images`; --test is labelled as --support is, and its labels are compared with the answers. A run on embeddings takes
.npz files with `features`, or pictures with --encoder. Images are cropped or fitted as those of the run's own data set
were; of a run on characters, photographs of ink on paper are cleaned and centred. A picture that cannot be read is
reported and left out. --save keeps what was learned from the labelled images: FILE answers without them, and --add
gives it more.

The temperature of the probabilities belongs to a number of classes and of images. Those of the weights that are shipped
are known; that of a run for another shape than its own is fitted on its training classes, once. With two labelled
images a class or more it is then learned from them, by leaving each out and predicting it from the others.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fewshot.classifier import InferenceFailedError
from fewshot.evaluation.prediction_report import Predicted, csv_text, html_page, json_text, table
from fewshot.predicting import KEEP_ACCURACY, predict_folders
from fewshot.pretrained import DEFAULT, PRETRAINED
from fewshot.runners.cli.flags import OneLineParser, check_outputs, positive, whole_number
from fewshot.runners.cli.launch import launch, leave
from fewshot.runners.encode import ENCODER_ERRORS
from fewshot.saving import SavedError
from fewshot.tasks.replacing import replace_text
from fewshot.training.run import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE


@dataclass(frozen=True)
class PredictionConfig:
    """The flags of predict.py; run_dir is a run folder, the name of weights that are shipped, or a file of --save."""

    run_dir: str
    support: str | None
    query: tuple[str, ...] = ()
    test: str | None = None
    add: tuple[str, ...] = ()
    save: str | None = None
    csv: str | None = None
    temperature: float | None = None
    seed: int = 0
    data_root: str | None = None
    encoder: str | None = None
    json: str | None = None
    report: str | None = None
    keep_accuracy: float = KEEP_ACCURACY
    suggest: int = 0
    strict: bool = False
    no_ink: bool = False
    leave_strange: bool = False
    run: str | None = None


def main(config: PredictionConfig) -> Predicted:
    """Probabilities, answers and scores of every query, written where they were asked for.

    Raises ConfigError, DataError, EncoderError, RunError, SavedError, WeightsError or InferenceFailedError, each with
    one line.
    """
    outputs = {"--csv": config.csv, "--json": config.json, "--report": config.report, "--save": config.save}
    check_outputs(outputs, [*config.query, *config.add, *filter(None, [config.support, config.test])])
    found, query, classifier = predict_folders(
        config.run_dir,
        config.support,
        config.query,
        test=config.test,
        add=config.add,
        encoder=config.encoder,
        temperature=config.temperature,
        keep_accuracy=config.keep_accuracy,
        strict=config.strict,
        seed=config.seed,
        data_root=config.data_root,
        find_ink=not config.no_ink,
        suggest=config.suggest,
        run=config.run,
        leave_strange=config.leave_strange,
    )
    print(table(found, config.csv))
    if config.csv:
        replace_text(Path(config.csv), csv_text(found))
    if config.json:
        replace_text(Path(config.json), json_text(found))
    if config.report:
        replace_text(Path(config.report), html_page(found, query))
    if config.save:
        classifier.save(config.save)
    return found


def share(text: str) -> float:
    """An accuracy above 0 and at most 1. Raises ArgumentTypeError, whose text the parser prints."""
    number = positive(text)
    if number > 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and at most 1, got {text}; 0.95 is 95%")
    return number


def temperature(text: str) -> float:
    """One that can be divided by. Raises ArgumentTypeError."""
    number = positive(text)
    if not SMALLEST_TEMPERATURE <= number <= LARGEST_TEMPERATURE:
        wanted = f"a temperature from {SMALLEST_TEMPERATURE:.2g} to {LARGEST_TEMPERATURE:g}"
        raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return number


def parse(arguments: Sequence[str] | None = None) -> PredictionConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="predict.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "run_dir",
        nargs="?",
        default=DEFAULT,
        metavar="RUN_DIR | NAME | FILE",
        help=f"folder of a run, one of {', '.join(PRETRAINED)} (default {DEFAULT}), or what --save wrote",
    )
    parser.add_argument("--support", metavar="PATH", help="folder with a subfolder a class, or .npz; not with FILE")
    parser.add_argument(
        "--add", nargs="+", action="extend", default=[], metavar="PATH", help="more of the same, as for what FILE holds"
    )
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--query",
        default=[],
        nargs="+",
        action="extend",
        metavar="PATH",
        help="folders of images, single images, or .npz",
    )
    asked.add_argument("--test", metavar="PATH", help="labelled images, as --support, to compare the answers with")
    parser.add_argument("--encoder", metavar="NAME", help="reads the pictures of a run on embeddings")
    parser.add_argument("--save", metavar="FILE", help="write what was learned from the labelled images to this file")
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
    parser.add_argument(
        "--leave-strange",
        action="store_true",
        help="leave answers open of queries that look like none of the classes (unknown 0.9 or more); needs nine "
        "labelled images that can be left out",
    )
    parser.add_argument(
        "--suggest",
        type=whole_number,
        default=0,
        metavar="N",
        help="say which N queries to label next (default 0): the least decided ones, each given the labels before it",
    )
    parser.add_argument("--strict", action="store_true", help="end the run at a picture that cannot be read")
    parser.add_argument("--no-ink", action="store_true", help="leave photographs of characters on paper as they are")
    parser.add_argument(
        "--temperature",
        type=temperature,
        metavar="T",
        help="of the probabilities (default: the known one for as many classes and images, or fitted on training "
        "classes of the run, then learned from your labelled images)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, help="of the inference (default 0)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument("--run", metavar="DIR", help="with FILE: where its run is, if that has moved")
    given = vars(parser.parse_args(arguments))
    return PredictionConfig(**given | {name: tuple(given[name]) for name in ("query", "add")})


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments, InferenceFailedError, SavedError, *ENCODER_ERRORS)


if __name__ == "__main__":
    leave(command_line())
