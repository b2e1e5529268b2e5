"""Optimisers of a network and schedules of their rate, by the names of `trainer.optimiser` and `trainer.schedule`.

A module that FEWSHOT_PLUGINS names may add to both:

    OPTIMISERS["lion"] = optax.lion
"""

from collections.abc import Callable
from functools import partial

import optax

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
