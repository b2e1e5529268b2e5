"""The command line of meta_train.py."""

import argparse
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from fewshot.runners.cli.console import QUIET
from fewshot.tasks import names
from fewshot.tasks.curves import CURVES, has_real_labels
from fewshot.tasks.images import HEIC, SUFFIXES
from fewshot.training import run_directory
from fewshot.training.configuration import AUTO, NOT_STORED, REGISTRIES, RunConfig, configured, is_open, resolve
from fewshot.training.overrides import LARGEST_SEED, ConfigError, parse_override


def parse(arguments: Sequence[str] | None = None) -> RunConfig:
    """The command line of meta_train.py.

    With --resume the flags not given are those of the run folder, with --config those of another run. Raises
    ConfigError, and RunError if there is no run to resume, or none to repeat.
    """
    given = vars(_parser().parse_args(arguments))
    if "set" in given:
        given["settings"] = dict(parse_override(text) for text in given.pop("set"))
    if (file := given.pop("config", None)) is not None:
        return _again(Path(file), given)
    config = configured(**given)
    return _resumed(config, given) if config.resume else config


def _again(file: Path, given: Mapping[str, Any]) -> RunConfig:
    """The configuration of another run, but for the flags that are given."""
    if given.get("resume"):
        raise ConfigError(
            "expected --config or --resume, got both; --resume goes on with a run, --config begins it anew"
        )
    folder = file if file.is_dir() else file.parent
    if not file.is_dir() and file.name != "config.json":
        raise ConfigError(f"expected --config to be a run folder or its config.json, got {file}")
    stored = RunConfig.from_json(run_directory.load(folder).config, str(folder))
    fill: Callable[..., RunConfig] = replace
    settings = stored.settings | given.get("settings", {})
    return fill(stored, **{"run_dir": None, **given, "settings": settings})


def _resumed(config: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    path = config.run_dir or resolve(config).run_dir
    assert path is not None
    fill: Callable[..., RunConfig] = replace
    here = {name: getattr(config, name) for name in NOT_STORED - {"run_dir"}}
    stored = fill(RunConfig.from_json(run_directory.load(Path(path)).config, path), **here)
    # A flag given as auto asks for nothing; a seed of 0 is a seed.
    asked = {name: value for name, value in given.items() if name == "seed" or not is_open(value)}
    wanted = {name: value for name, value in asked.items() if name not in NOT_STORED}
    wanted |= wanted.pop("settings", {})
    for name, value in wanted.items():
        kept = stored.settings.get(name) if "." in name else getattr(stored, name)
        if value != kept:
            raise ConfigError(
                f"run folder {path} was trained with {name} {kept}, got {value}; resume it without that, or choose "
                "another --run-dir"
            )
    return stored


class Noted(argparse.Action):
    """A flag that leaves nothing in what was parsed: `silent_where_asked` reads it."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        """Nothing."""


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line as a ConfigError, without the usage text. Every one takes QUIET."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        said = "print warnings and errors alone; files are written as ever"
        self.add_argument(QUIET, action=Noted, nargs=0, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, help=said)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; try --help")


def positive(text: str) -> float:
    """A positive number. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def whole_number(text: str) -> int:
    """A whole number from 0. Raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    if int(text) > LARGEST_SEED:  # keys are made of 32 bits: a larger seed would be another one's
        raise argparse.ArgumentTypeError(f"expected a number of at most {LARGEST_SEED}, got {text}")
    return int(text)


def dataset_name(text: str) -> str:
    """A data set's name, a PATH in it from the root: a run folder is used from other folders too."""
    kind, colon, path = text.partition(":")
    if has_real_labels(text):
        return text
    return f"{kind}:{Path(path).expanduser().absolute()}" if colon and path else text


def count_or_auto(text: str) -> int:
    """A whole number from 1, or 0 for auto. Raises ArgumentTypeError."""
    if text != AUTO and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, or {AUTO}, got {text!r}")
    return 0 if text == AUTO else int(text)


def check_outputs(outputs: Mapping[str, str | None], inputs: Iterable[str] = ()) -> None:
    """Raises ConfigError unless a file can be written at the path of each flag that has one.

    Every path is another one, and none is a file that is read, a picture, or what training leaves in a run folder.
    """
    taken = {Path(path).resolve(): f"{path} is read" for path in inputs if Path(path).is_file()}
    for flag, path in outputs.items():
        if not path:
            continue
        place = Path(path).resolve()
        if place.is_dir():
            raise ConfigError(f"expected {flag} to be a file, got the folder {path}; name a file in it")
        if not place.parent.is_dir():
            raise ConfigError(f"expected {flag} to be in a folder that exists, got {path}; make the folder first")
        if not os.access(place.parent, os.W_OK):
            raise ConfigError(f"expected {flag} to be in a folder that can be written, got {path}; name another")
        if place.name in run_directory.FILES and (place.parent / run_directory.CONFIG).exists():
            raise ConfigError(f"expected {flag} to be no file of a run, got {path}, which is kept; name another")
        if place in taken:
            raise ConfigError(f"expected {flag} to be a file of its own, but {taken[place]}; name another")
        if place.is_file() and place.suffix.lower() in (*SUFFIXES, *HEIC):
            raise ConfigError(f"expected {flag} to be no picture, got {path}, which is kept; name another file")
        taken[place] = f"{path} is that of {flag}"


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="meta_train.py",
        description="Meta-train a few-shot learner, a deep-kernel Gaussian process by default, and test it.",
        argument_default=argparse.SUPPRESS,  # so that flags given can be told from defaults when resuming
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dataset",
        type=dataset_name,
        metavar="NAME",
        help=f"{', '.join((*names(), *CURVES))} (default glyphs, built in)",
    )
    for kind, registry in REGISTRIES.items():
        default = RunConfig.__dataclass_fields__[kind].default
        parser.add_argument(f"--{kind}", metavar="NAME", help=f"{', '.join(registry)} (default {default})")
    parser.add_argument(
        "--way", type=int, metavar="C", help="classes of a task (default 5, none where labels are real)"
    )
    parser.add_argument(
        "--shot",
        type=int,
        metavar="S",
        help="labelled images a class (default 1), or labelled points of a curve (default 5), or pixels (100)",
    )
    parser.add_argument("--query", type=count_or_auto, metavar="Q", help="queries a class in training")
    parser.add_argument("--episodes", type=count_or_auto, metavar="N", help="training tasks in all")
    parser.add_argument(
        "--tasks-per-step", type=int, metavar="T", help="tasks of an optimiser step, shared by all devices (default 1)"
    )
    parser.add_argument("--inner-steps", type=count_or_auto, metavar="n", help="inference steps in training")
    parser.add_argument("--set", nargs="+", action="extend", metavar="NAME=VALUE", help="e.g. inference.rho=0.5")
    parser.add_argument("--seed", type=whole_number, help="of the network, the tasks and the inference (default 0)")
    parser.add_argument("--run-dir", metavar="DIR", help="default runs/<dataset>-<likelihood>-...")
    parser.add_argument(
        "--config", metavar="FILE", help="repeat the run of this config.json or folder, with the flags given changed"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of the run folder")
    parser.add_argument("--tensorboard", action="store_true", help="also write the metrics for TensorBoard")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    several = parser.add_argument_group("several processes", "start the same command line in each, numbered from 0")
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0; auto under Slurm or Open MPI (default $JAX_COORDINATOR_ADDRESS)",
    )
    several.add_argument("--processes", type=int, metavar="K", help="how many (default $JAX_NUM_PROCESSES)")
    several.add_argument("--process-id", type=int, metavar="I", help="of this one (default $JAX_PROCESS_ID)")
    return parser
