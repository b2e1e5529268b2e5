"""A made-up Omniglot of 16x16 noise patterns and a tiny run on it: every runner works on it in seconds."""

import numpy as np

from tasks.omniglot import FILE, VALIDATION_ALPHABETS

IMAGES, SIZE = 20, 16
SETTINGS = {
    "trainer.validation_episodes": 12,
    "trainer.temperature_episodes": 12,
    "trainer.temperature_classes": 20,
    "trainer.test_episodes": 12,
    "trainer.validate_every": 6,
    "trainer.log_every": 4,
}
FLAGS = {"dataset": "omniglot", "backbone": "mlp", "way": 3, "query": 3, "episodes": 18, "settings": SETTINGS}


def write(folder):
    """omniglot.npz in `folder`: two characters in each of 32 alphabets, the last two of them for the test."""
    rng = np.random.default_rng(0)
    characters = 64
    names = np.array([*VALIDATION_ALPHABETS, *(f"Alphabet{i}" for i in range(27))])
    patterns = rng.uniform(size=(characters, 1, SIZE, SIZE))
    images = np.clip(patterns + rng.normal(scale=0.3, size=(characters, IMAGES, SIZE, SIZE)), 0, 1)
    np.savez(
        folder / FILE,
        images=(255 * images).astype(np.uint8).reshape(-1, SIZE, SIZE),
        character=np.repeat(np.arange(characters), IMAGES).astype(np.int16),
        character_names=np.array([f"character {i}" for i in range(characters)]),
        character_alphabet=(np.arange(characters) // 2).astype(np.uint8),
        alphabet_names=names,
    )
    return folder


def arguments(**changes):
    """The flags as words of a command line."""
    flags = {**FLAGS, **changes}
    settings = [f"{name}={value}" for name, value in flags.pop("settings").items()]
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [*words, "--set", *settings]
