"""How little a query looks like any class of its task, measured by the task's own labelled inputs.

Each labelled input is left out and scored by the others, as (T2) of docs/evaluation.md leaves them out. Where a query
and these are alike, the rank of its score among theirs is uniform (conformal prediction), so that

    (U1)  p = (1 + #{known scores >= score}) / (1 + #known)

is at most a with probability a or less. Left-out inputs have one labelled example of their class fewer than the query
has, which raises their scores: p is too large rather than too small.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.evaluation.out_of_episode import scores_of
from fewshot.inference.inner.base import Mask
from fewshot.learners.base import Inputs, Learner, Queries, apply
from fewshot.learners.task_temperature import FOLDS, left_out


def p_values(scores: Float[np.ndarray, " Q"], known: Float[np.ndarray, " K"]) -> Float[np.ndarray, " Q"]:
    """(U1): small where a score is larger than those of known inputs; 1 where none is known."""
    larger = len(known) - np.searchsorted(np.sort(known), scores, side="left")
    return (1 + larger) / (1 + len(known))


def unknown_p_values(
    key: Key[Array, ""], learner: Learner, support: Inputs, y: Int[np.ndarray, " N"], query: Queries
) -> Float[np.ndarray, " Q"] | None:
    """p-values [Q] that queries show one of the classes of a task; None where no class has two labelled inputs.

    y are the labels [N], 0..C-1, of the labelled inputs [N, ...]. Scores are the mutual information of label and latent
    functions, or the entropy of the probabilities for a learner without a posterior.
    """
    counts = np.bincount(y)
    if counts.max() < 2:
        return None
    folds = int(min(FOLDS, counts.max()))
    own, others, held = apply(_scores, learner, (len(counts), folds), key, support, y, query)
    return p_values(np.asarray(own), np.asarray(others)[np.asarray(held)])


def _scores(
    learner: Learner, classes: int, folds: int, key: Array, support: Array, y: Array, query: Array
) -> tuple[Float[Array, " Q"], Float[Array, "F N"], Bool[Array, "F N"]]:
    """Scores of the queries by all labelled inputs, of labelled inputs without each fold, and which count."""
    real = jnp.ones(y.shape, bool)
    held = left_out(y, real, folds)
    fit_key, score_key = jax.random.split(key)

    def scored(fold: Array) -> Array:
        mask = Mask(real & ~fold, jnp.ones(classes, bool))
        state, _ = learner.fit(fit_key, support, y, classes, mask)
        found = scores_of(score_key, learner, state, jnp.concatenate([support, query]))
        return found.entropy if found.mutual_information is None else found.mutual_information

    left = jnp.concatenate([jnp.zeros_like(held[:1]), held])
    each: Sequence[Array] | Array
    each = jax.lax.map(scored, left) if learner.traits.traceable else jnp.stack([scored(fold) for fold in left])
    return each[0][len(y) :], each[1:, : len(y)], held
