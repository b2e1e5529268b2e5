"""Labelled pictures that are given more than once: no further evidence.

A twin that is left out finds the other, so that it looks less strange than any query can.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Shaped

SHOWN = 3
AS_TWO_CLASSES = "labelled pictures are given as two classes"


def once(
    inputs: Shaped[np.ndarray, "N ..."], labels: Sequence[object], names: Sequence[str], say: Callable[[str], object]
) -> Bool[np.ndarray, " N"]:
    """Which inputs [N, ...] are not equal, bit for bit, to an earlier one of their class.

    `say` is told, in a line each, of those that are, and of those that are equal to one of another class.
    """
    first: dict[bytes, dict[object, int]] = {}
    kept = np.ones(len(labels), bool)
    within, across = [], []
    for number, (row, label) in enumerate(zip(inputs, labels, strict=True)):
        earlier = first.setdefault(_bits(row), {})
        own, kept[number] = names[number], label not in earlier
        if not kept[number]:
            original = names[earlier[label]]
            within.append(own if own == original else f"{own} is {original}")
            continue
        across += [f"{own} ({label}) is {names[one]} ({other})" for other, one in earlier.items()]
        earlier[label] = number
    if within:
        say(f"labelled pictures that are given again count once: {first_of(within)}")
    if across:
        say(f"{AS_TWO_CLASSES}, which makes both unsure: {first_of(across)}")
    return kept


def among(inputs: Shaped[np.ndarray, "Q ..."], others: Shaped[np.ndarray, "N ..."]) -> Bool[np.ndarray, " Q"]:
    """Which inputs [Q, ...] are equal, bit for bit, to one of the others [N, ...]."""
    known = set(map(_bits, others))
    return np.array([_bits(row) in known for row in inputs], bool)


def first_of(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _bits(row: np.ndarray) -> bytes:
    return np.ascontiguousarray(row).tobytes()
