"""A made-up Omniglot of 16x16 noise patterns, and one tiny run on it that several test files share."""

import contextlib
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fewshot.tasks.omniglot import FILE, VALIDATION_ALPHABETS

SETTINGS = {
    "backbone.width": 4,
    "trainer.learning_rate": 0.1,  # so large that not every validation is the best so far
    "trainer.log_every": 2,
    "trainer.validate_every": 6,
    "trainer.validation_episodes": 12,
    "trainer.temperature_episodes": 12,
    "trainer.temperature_classes": 20,
    "trainer.test_episodes": 12,
}
# Conv4, so that running statistics are part of the state.
FLAGS = {"dataset": "omniglot", "backbone": "conv4", "way": 3, "query": 3, "episodes": 20, "settings": SETTINGS}


class Run(NamedTuple):
    """What a finished run left: its folder, its result, what it printed, and how many programs its scores needed."""

    path: Path
    result: dict
    printed: str
    programs: int


def write(folder, size=16, images=20):
    """omniglot.npz in `folder`: two characters in each of 32 alphabets, the last two of them for the test."""
    rng = np.random.default_rng(0)
    characters = 64
    patterns = rng.uniform(size=(characters, 1, size, size))
    drawn = np.clip(patterns + rng.normal(scale=0.3, size=(characters, images, size, size)), 0, 1)
    np.savez(
        folder / FILE,
        images=(255 * drawn).astype(np.uint8).reshape(-1, size, size),
        character=np.repeat(np.arange(characters), images).astype(np.int16),
        character_names=np.array([f"character {i}" for i in range(characters)]),
        character_alphabet=(np.arange(characters) // 2).astype(np.uint8),
        alphabet_names=np.array([*VALIDATION_ALPHABETS, *(f"Alphabet{i}" for i in range(27))]),
    )
    return folder


def arguments(**changes):
    """The flags as words of a command line."""
    flags = {**FLAGS, **changes}
    settings = [f"{name}={value}" for name, value in flags.pop("settings").items()]
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--set", *settings]


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    return str(write(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="session")
def tiny_run(tiny_data, tmp_path_factory):
    # Not on top: conftest.py imports this file in the process too that only hands tests out to others.
    from fewshot.learners.base import traced
    from fewshot.runners import meta_train
    from fewshot.training.configuration import RunConfig

    path = tmp_path_factory.mktemp("runs") / "tiny"
    printed = io.StringIO()
    programs = traced._cache_size()
    with contextlib.redirect_stdout(printed):
        result = meta_train.main(RunConfig(**FLAGS, run_dir=str(path), data_root=tiny_data))
    assert "interrupted" not in result, printed.getvalue()
    programs = traced._cache_size() - programs
    return Run(path, result, printed.getvalue(), programs)
