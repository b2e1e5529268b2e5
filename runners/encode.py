"""Features of pictures by a pretrained encoder, for `embeddings:FILE`, predict.py or any other program.

python runners/encode.py --encoder NAME PATH [PATH ...] --out FILE.npz      every flag: --help

PATH is a folder with a subfolder for each class, a folder of pictures, or a picture. FILE gets the arrays `features`
[N, D], `names` and, of class folders, `labels`; a folder that holds the folders train, validation and test gives the
six arrays that `embeddings:FILE` reads. Features are kept: a picture that was seen before takes no pass of the network.
A picture that cannot be read is left out, in one line; with --strict it ends the run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from fewshot.evaluation.text import plain
from fewshot.models.networks import EncoderError, load_encoder
from fewshot.models.networks.encoders import NAMES, Encoder
from fewshot.models.networks.torch_weights import WeightsError
from fewshot.runners.cli.flags import OneLineParser, check_outputs
from fewshot.runners.cli.launch import launch, leave
from fewshot.tasks import DataError
from fewshot.tasks.feature_cache import FeatureCache
from fewshot.tasks.files import write_npz
from fewshot.tasks.images import Images, image_files, labelled_files, subfolders, unlabelled_files
from fewshot.tasks.photographs import SPLITS
from fewshot.training.overrides import ConfigError

DEFAULT = "efficientnet-lite0"
ENCODER_ERRORS = (EncoderError, WeightsError)


@dataclass(frozen=True)
class EncodingConfig:
    """The flags of encode.py."""

    paths: tuple[str, ...]
    out: str
    encoder: str = DEFAULT
    strict: bool = False


def main(config: EncodingConfig) -> dict[str, np.ndarray]:
    """Write the arrays of FILE and return them.

    Raises ConfigError, DataError, EncoderError or WeightsError, each with one line.
    """
    check_outputs({"--out": config.out}, config.paths)
    if Path(config.out).suffix != ".npz":
        raise ConfigError(f"expected --out to end in .npz, got {plain(config.out)}")
    parts = _parts([Path(path).expanduser() for path in config.paths])
    encoder, cache = load_encoder(config.encoder), FeatureCache(say=partial(print, file=sys.stderr))
    arrays: dict[str, np.ndarray] = {"encoder": np.array(encoder.identity)}
    for prefix, files in parts.items():
        arrays |= _arrays(prefix, _encoded(encoder, cache, files, config.strict))
    write_npz(Path(config.out), arrays)
    print(f"features of {plain(encoder.name)}, {encoder.features} a picture, in {plain(config.out)}")
    return arrays


def _parts(paths: list[Path]) -> dict[str, list[tuple[Path, str]]]:
    """Files with their labels, by the prefix of their arrays: none, or one for each split. Raises DataError."""
    if len(paths) == 1 and all((paths[0] / split).is_dir() for split in SPLITS):
        return {f"{split}_": labelled_files(paths[0] / split) for split in SPLITS}
    kinds = {_holds_classes(path) for path in paths}
    if len(kinds) > 1:
        raise DataError("expected class folders or pictures without labels, got both; encode them one after the other")
    find = labelled_files if kinds.pop() else unlabelled_files
    return {"": [file for path in paths for file in find(path)]}


def _holds_classes(path: Path) -> bool:
    """Whether a folder's pictures lie in subfolders alone."""
    if not path.is_dir():
        return False
    return bool(subfolders(path)) and all(file.parent != path for file in image_files(path))


def _encoded(encoder: Encoder, cache: FeatureCache, files: list[tuple[Path, str]], strict: bool) -> Images:
    return cache.encode_files(encoder, files, strict)


def _arrays(prefix: str, found: Images) -> dict[str, np.ndarray]:
    arrays = {f"{prefix}features": found.pixels[:, 0, 0], f"{prefix}names": np.array(found.names)}
    return arrays | ({f"{prefix}labels": np.array(found.labels)} if any(found.labels) else {})


def parse(arguments: Sequence[str] | None = None) -> EncodingConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="encode.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="class folders, folders of pictures, or pictures")
    parser.add_argument("--encoder", default=DEFAULT, metavar="NAME", help=f"{', '.join(NAMES)} (default {DEFAULT})")
    parser.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    parser.add_argument("--strict", action="store_true", help="end the run at a picture that cannot be read")
    given = vars(parser.parse_args(arguments))
    return EncodingConfig(**given | {"paths": tuple(given["paths"])})


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments, *ENCODER_ERRORS)


if __name__ == "__main__":
    leave(command_line())
