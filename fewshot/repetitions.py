"""Labelled pictures that are given more than once: no further evidence.

A twin that is left out finds the other, so that it looks less strange than any query can.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Shaped

SHOWN = 3
AS_TWO_CLASSES = "labelled pictures are given as two classes"


class Repetitions(NamedTuple):
    """Pairs (repetition, original) of numbers of inputs: equal ones of one class, and of two."""

    within: list[tuple[int, int]]
    across: list[tuple[int, int]]

    def messages(self, names: Sequence[str], labels: Sequence[object]) -> list[str]:
        """A line for each kind that there is."""
        lines = []
        if self.within:
            named = [(names[one], names[other]) for one, other in self.within]
            pairs = [one if one == other else f"{one} is {other}" for one, other in named]
            lines.append(f"labelled pictures that are given again count once: {_first(pairs)}")
        if self.across:
            pairs = [f"{names[one]} ({labels[one]}) is {names[other]} ({labels[other]})" for one, other in self.across]
            lines.append(f"{AS_TWO_CLASSES}, which makes both unsure: {_first(pairs)}")
        return lines

    def kept(self, count: int) -> Bool[np.ndarray, " N"]:
        """Which of so many inputs are no repetitions within their class."""
        found = np.ones(count, bool)
        found[[one for one, _ in self.within]] = False
        return found


def repetitions(inputs: Shaped[np.ndarray, "N ..."], labels: Sequence[object]) -> Repetitions:
    """Which inputs [N, ...] are equal, bit for bit, to an earlier one of their class or of another."""
    first: dict[bytes, dict[object, int]] = {}
    found = Repetitions([], [])
    for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
        earlier = first.setdefault(np.ascontiguousarray(row).tobytes(), {})
        if label in earlier:
            found.within.append((number, earlier[label]))
        else:
            found.across.extend((number, original) for original in earlier.values())
            earlier[label] = number
    return found


def _first(pairs: list[str]) -> str:
    more = f", and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    return ", ".join(pairs[:SHOWN]) + more
