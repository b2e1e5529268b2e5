"""What a run is trained and tested on, as the training loop and the command line see it: classes, or real labels.

All that the two do differently is said by a `Problem`: class_problem.py and curve_problem.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict, cast, runtime_checkable

from fewshot.inference.outer.svi import Trainer
from fewshot.learners import Learner
from fewshot.training.configuration import RunConfig
from fewshot.training.run import Run


@runtime_checkable
class Scored(Protocol):
    """Scores of a learner on fixed episodes."""

    def validation(self) -> dict[str, float]:
        """What a row of the training log says, by names that begin with `validation_`."""
        ...

    def failures(self) -> dict[str, int]:
        """Episodes by result code, those that went well left out."""
        ...


class Tested(TypedDict, total=False):
    """The temperature, failed test tasks by result code, and the rows of the table: `Metrics`, or `RealSummary`."""

    temperature: float
    failures: dict[str, int]
    test: Mapping[str, Any]


class Selection(NamedTuple):
    """Which number of a validation chooses the best weights, whether larger is better, and how it is shown.

    Of weights with the same number those with the least NLL are the best.
    """

    name: str
    larger: bool
    shown: Callable[[float], str]

    def value(self, row: Mapping[str, object]) -> tuple[float, float]:
        """The number of a row of the log and its NLL, such that larger is better."""
        number, nll = cast(float, row[self.name]), cast(float, row.get("validation_nll", math.inf))
        return number if self.larger else -number, -nll


@runtime_checkable
class Problem(Protocol):
    """The data of a run, loaded and checked, and what follows from their labels."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, Ch) of the images, or of inputs that stand for them."""
        ...

    @property
    def selection(self) -> Selection:
        """How the best weights are chosen."""
        ...

    @property
    def class_names(self) -> dict[str, list[str]] | None:
        """Those of a user's own files by split, None for all other data."""
        ...

    def check_classes(self, trained_with: Mapping[str, Sequence[str]] | None) -> None:
        """Raises DataError unless a user's own classes are where they were when the run began."""
        ...

    def training_classes(self, config: RunConfig) -> int:
        """How many classes steps are taken on, 0 where labels are real."""
        ...

    def trainer(self, run: Run) -> Trainer:
        """The outer loop on the training tasks."""
        ...

    def validation(self, config: RunConfig) -> Callable[[Learner], Scored]:
        """Scores of a learner on fixed validation episodes."""
        ...

    def calibration(self, config: RunConfig) -> Callable[[Learner], float]:
        """The temperature of a learner's probabilities; 1 where there are none."""
        ...

    def untrained(self, run: Run) -> Learner:
        """The learner with the batch statistics of training tasks, and nothing learned."""
        ...

    def test(self, run: Run, best: Run, failures: int) -> Tested:
        """Print a table of the best weights beside what they must beat, and return its rows by name."""
        ...
