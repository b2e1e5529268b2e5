"""How little a query looks like any class of its task, measured by the task's own labelled inputs.

Each labelled input is left out and scored by the others, as (T2) of docs/evaluation.md leaves them out. Where a query
and these are alike, the rank of its score among theirs is uniform (conformal prediction), so that

    (U1)  p = (1 + #{known scores >= score}) / (1 + #known)

is at most a with probability a or less. Left-out inputs have one labelled example of their class fewer than the query
has: their distances allow for that, their entropies are larger. On photographs and characters 5 to 13% of a task's own
queries have a p of .1 or less (docs/results/heads/scores.md, unknown.md).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fewshot.evaluation.out_of_episode import Labelled, strangeness_of
from fewshot.inference.inner.base import Mask
from fewshot.learners.base import Learner, apply
from fewshot.learners.task_temperature import FOLDS, Without, for_each_fold, left_out, rest_of


class LeftOut(NamedTuple):
    """Of labelled inputs, each without itself: the score, and whether its own class is the most probable one."""

    scores: Float[np.ndarray, " K"]
    right: Bool[np.ndarray, " K"]


def p_values(scores: Float[np.ndarray, " Q"], known: Float[np.ndarray, " K"]) -> Float[np.ndarray, " Q"]:
    """(U1): small where a score is larger than those of known inputs; 1 where none is known."""
    larger = len(known) - np.searchsorted(np.sort(known), scores, side="left")
    return (1 + larger) / (1 + len(known))


def each_left_out(
    key: Key[Array, ""],
    learner: Learner,
    support: Shaped[np.ndarray, "N ..."],
    y: Int[np.ndarray, " N"],
    real: Bool[np.ndarray, " N"] | None = None,
    without: Without | None = None,
) -> LeftOut | None:
    """What is found of a task's labelled inputs, each without itself; None where no class has two of them.

    At most FOLDS of each class are left out, one at a time. y are the labels [N], 0..C-1, of the labelled inputs
    [N, ...], of which those that are not real are padding. `without`: the tasks that are left without each fold, None
    for the others of these inputs.
    """
    real = np.ones(len(y), bool) if real is None else real
    counts = np.bincount(y[real])
    if counts.max() < 2:
        return None
    folds = int(min(FOLDS, counts.max()))
    found, held = apply(_found, learner, (len(counts), folds), key, support, y, real, without)
    return LeftOut(*(np.asarray(part)[np.asarray(held)] for part in found))


def _found(
    learner: Learner,
    classes: int,
    folds: int,
    key: Array,
    support: Array,
    y: Array,
    real: Array,
    without: Without | None,
) -> tuple[tuple[Float[Array, "F N"], Bool[Array, "F N"]], Bool[Array, "F N"]]:
    """The columns of `LeftOut` of all labelled inputs without each fold, and which of them the fold leaves out."""
    held = jnp.asarray(left_out(y, real, folds) if without is None else without.held)
    fit_key, score_key = jax.random.split(key)

    def asked(fold: Array | Without) -> tuple[Array, Array]:
        inputs, labels, shown = rest_of(support, y, real, fold)
        state, _ = learner.fit(fit_key, inputs, labels, classes, Mask(shown, jnp.ones(classes, bool)))
        others = real & ~(fold.held if isinstance(fold, Without) else fold)
        found = learner.predict(score_key, state, support)
        scores = strangeness_of(learner, found, Labelled(support, y, others), classes, support)
        return scores, jnp.argmax(found.probabilities, axis=1) == y

    return for_each_fold(learner, asked, held if without is None else without), held
