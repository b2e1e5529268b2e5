"""How little a query looks like any class of its task, measured by the task's own labelled inputs.

Each labelled input is left out and scored by the others, as (T2) of docs/evaluation.md leaves them out. Where a query
and these are alike, the rank of its score among theirs is uniform (conformal prediction), so that

    (U1)  p = (1 + #{known scores >= score}) / (1 + #known)

is at most a with probability a or less. Left-out inputs have one labelled example of their class fewer than the query
has: their distances allow for that, their entropies are larger. On photographs and characters 5 to 13% of a task's own
queries have a p of .1 or less (docs/results/heads/scores.md, unknown.md).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fewshot.evaluation.out_of_episode import Labelled, strangeness
from fewshot.inference.inner.base import Mask
from fewshot.learners.base import Learner, apply
from fewshot.learners.task_temperature import FOLDS, is_original, left_out


def p_values(scores: Float[np.ndarray, " Q"], known: Float[np.ndarray, " K"]) -> Float[np.ndarray, " Q"]:
    """(U1): small where a score is larger than those of known inputs; 1 where none is known."""
    larger = len(known) - np.searchsorted(np.sort(known), scores, side="left")
    return (1 + larger) / (1 + len(known))


def left_out_scores(
    key: Key[Array, ""],
    learner: Learner,
    support: Shaped[np.ndarray, "N ..."],
    y: Int[np.ndarray, " N"],
    real: Bool[np.ndarray, " N"] | None = None,
    origin: Int[np.ndarray, " N"] | None = None,
) -> Float[np.ndarray, " K"] | None:
    """Scores [K] of a task's labelled inputs, each without itself; None where no class has two of them.

    y are the labels [N], 0..C-1, of the labelled inputs [N, ...], of which those that are not real are padding; origin
    says which are copies, as in `left_out`. A copy is for the learner alone: it has no score, and counts in no mean.
    """
    real = np.ones(len(y), bool) if real is None else real
    counts = np.bincount(y[real & np.asarray(is_original(y, origin))])
    if counts.max() < 2:
        return None
    folds = int(min(FOLDS, counts.max()))
    scores, held = apply(_scores, learner, (len(counts), folds), key, support, y, real, origin)
    return np.asarray(scores)[np.asarray(held)]


def _scores(
    learner: Learner,
    classes: int,
    folds: int,
    key: Array,
    support: Array,
    y: Array,
    real: Array,
    origin: Array | None,
) -> tuple[Float[Array, "F N"], Bool[Array, "F N"]]:
    """Scores of all labelled inputs without each fold, and which of them the fold leaves out."""
    held, original = left_out(y, real, folds, origin), is_original(y, origin)
    fit_key, score_key = jax.random.split(key)

    def scored(fold: Array) -> Array:
        mask = Mask(real & ~fold, jnp.ones(classes, bool))
        state, _ = learner.fit(fit_key, support, y, classes, mask)
        return strangeness(score_key, learner, state, Labelled(support, y, mask.points & original), classes, support)

    each: Sequence[Array] | Array
    each = jax.lax.map(scored, held) if learner.traits.traceable else jnp.stack([scored(fold) for fold in held])
    return jnp.asarray(each), held & original
