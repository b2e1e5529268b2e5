"""Optimisers of a network and schedules of their rate, by the names of `trainer.optimiser` and `trainer.schedule`.

A module that FEWSHOT_PLUGINS names may add to both:

    OPTIMISERS["lion"] = optax.lion
"""

from collections.abc import Callable
from functools import partial

import jax
import optax

from fewshot.training.overrides import ConfigError

# A learning rate, or a function of the step that says it.
OPTIMISERS: dict[str, Callable[[optax.ScalarOrSchedule], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "sgd": partial(optax.sgd, momentum=0.9, nesterov=True),
}
# The first rate and the steps of the run.
SCHEDULES: dict[str, Callable[[float, int], optax.ScalarOrSchedule]] = {
    "constant": lambda rate, steps: rate,
    "cosine": optax.cosine_decay_schedule,
}


def optimiser_of_network(optimiser: str, schedule: str, rate: float, steps: int) -> optax.GradientTransformation:
    """The one of these names. Raises ConfigError, in one line, for an entry that makes none."""
    named = f"optimiser {optimiser} with schedule {schedule}"
    try:
        scheduled = SCHEDULES[schedule](rate, steps)
        if not callable(scheduled) and not isinstance(scheduled, int | float | jax.Array):
            raise TypeError(f"{scheduled!r:.40} is no rate and no function of the step")
        found = OPTIMISERS[optimiser](scheduled)
    except Exception as error:  # of an entry of the user's, which may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"expected optax to make {named}, got {reason}") from error
    if not isinstance(found, optax.GradientTransformation):
        raise ConfigError(f"expected an optax.GradientTransformation of {named}, got {found!r:.60}")
    return found
