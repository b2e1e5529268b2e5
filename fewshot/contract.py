"""What the estimators share of scikit-learn's contract: seeds, scaling, and that a fit which fails changes nothing."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Shaped
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state

FAINT = 100.0  # deviations of a column, in units of its mean's rounding, that leave two digits


@contextmanager
def unchanged_by_failure(estimator: BaseEstimator) -> Iterator[None]:
    """The estimator has the attributes of before again where what runs inside raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def seed_of(random_state: int | np.integer | np.random.RandomState | None) -> int:
    """A seed as it is; of a random generator, or of None, a number that it draws."""
    generator = check_random_state(random_state)
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(generator.randint(np.iinfo(np.int32).max))


def key_of(random_state: int | np.integer | np.random.RandomState | None) -> Key[Array, ""]:
    """The key of `seed_of`."""
    return jax.random.key(np.uint32(seed_of(random_state)))


def in_precision(values: Shaped[np.ndarray, " N *D"], called: str) -> Float[np.ndarray, " N *D"]:
    """Numbers [N] or [N, D] as learners read them, in JAX's precision. Raises ValueError for numbers beyond it."""
    precision = np.dtype(jnp.result_type(float))
    with np.errstate(over="ignore"):
        found = np.asarray(values, precision)
    if not np.isfinite(found).all():
        limit, largest = np.finfo(precision).max, np.abs(values).max()
        raise ValueError(f"expected numbers below {limit:.2g} as {called}, got {largest:.3g}; use another unit")
    return found


def warn_of_lost_digits(table: Shaped[np.ndarray, "N D"], stacklevel: int) -> None:
    """Warns of a column whose numbers differ by less than JAX's precision holds well."""
    with np.errstate(over="ignore", invalid="ignore"):
        level, spread = np.abs(table.mean(axis=0, dtype=np.float64)), table.std(axis=0, dtype=np.float64)
    lost = np.flatnonzero((spread > 0) & (spread < FAINT * np.finfo(jnp.result_type(float)).eps * level))
    if len(lost):
        first = lost[0]
        warnings.warn(
            f"expected columns that vary about 0, got column {first} with mean {level[first]:.3g} and deviation "
            f"{spread[first]:.3g}, whose digits single precision drops; centre it, as StandardScaler does",
            stacklevel=stacklevel,
        )


class Scaling(NamedTuple):
    """Where columns [D] or targets [] are centred, and their unit: 1 for what never changes."""

    centre: Float[np.ndarray, "*D"]
    unit: Float[np.ndarray, "*D"]

    @classmethod
    def of(cls, values: Float[np.ndarray, " N *D"], called: str, *, fewer: int = 0) -> "Scaling":
        """Mean and standard deviation with the divisor N - fewer.

        Raises ValueError for values, called so in the message, that are too large to be squared.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            centre, unit = np.asarray(values.mean(axis=0)), np.ones(values.shape[1:])
            varies = np.ptp(values, axis=0) > 0
            if len(values) > fewer:
                unit = np.where(varies, values.std(axis=0, ddof=fewer), 1.0)
        if not (np.isfinite(centre).all() and np.isfinite(unit).all()):
            largest = np.abs(values).max()
            raise ValueError(f"expected numbers that can be squared as {called}, got {largest:.3g}; use another unit")
        return cls(centre, unit)
