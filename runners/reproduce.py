"""Train and test every method of a comparison, and print their table beside the published one; or run a study.

python runners/reproduce.py NAME [--quick] [--methods A,B] [--episodes N] [--out DIR]      every flag: --help

Rows that are finished in DIR stay, a training that was stopped goes on: run the same command until it is done. Rows of
other methods, shots and seeds that DIR has stay too. DIR holds results.json, table.md, the figures comparison.png,
tradeoff.png and reliability.png (of the five most accurate methods), and for every row its run folder with weights,
episodes.npz and predictions.npz.
"""

import argparse
from collections.abc import Sequence
from itertools import chain

from fewshot.runners.cli.flags import OneLineParser, count_or_auto, whole_number
from fewshot.runners.cli.launch import launch, leave
from fewshot.runners.studies.reporting import StudyError
from fewshot.runners.studies.reproduction import COMPARISONS, STUDIES, ReproductionConfig, main, selected
from fewshot.training.overrides import ConfigError


def parse(arguments: Sequence[str] | None = None) -> ReproductionConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="reproduce.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    known = ", ".join([*COMPARISONS, *STUDIES])
    parser.add_argument("name", metavar="NAME", help=known)
    parser.add_argument("--quick", action="store_true", help="the main methods, few episodes: minutes for characters")
    parser.add_argument("--methods", type=_words, default=(), metavar="A,B", help="only these rows, in this order")
    parser.add_argument("--shots", type=_numbers, default=(), metavar="1,5", help="only these numbers of shots")
    parser.add_argument("--episodes", type=count_or_auto, default=0, metavar="N", help="optimiser steps of a run")
    parser.add_argument("--out", metavar="DIR", help="default runs/NAME, or runs/NAME-quick")
    parser.add_argument("--seed", type=whole_number, default=0, help="of networks, training and inference (default 0)")
    parser.add_argument("--seeds", type=_seeds, nargs="+", default=(), metavar="n", help="several, one by one")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    parser.add_argument(
        "--robustness", action="store_true", help="also test every method on corrupted images and on other classes"
    )
    given = vars(parser.parse_args(arguments))
    config = ReproductionConfig(**given | {"seeds": tuple(chain.from_iterable(given["seeds"]))})
    if config.name in COMPARISONS:
        selected(COMPARISONS[config.name], config)
    elif config.name not in STUDIES:
        raise ConfigError(f"expected a known comparison or study, got {config.name!r}; known: {known}")
    elif any((config.methods, config.shots, config.episodes, config.robustness, config.data_root, config.seeds)):
        flags = "--methods, --shots, --episodes, --robustness, --seeds and --data-root"
        raise ConfigError(f"{flags} belong to a comparison; {config.name} is a study")
    return config


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(whole_number, _words(text)))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _words(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas, got {text!r}") from None


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments, StudyError)


if __name__ == "__main__":
    leave(command_line())
