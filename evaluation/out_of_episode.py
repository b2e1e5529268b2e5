"""Out-of-episode detection: does a query belong to one of the classes that its support set shows? (OVE section 5.4.)

Four scores, each larger where a query looks less like any class of the episode:

    latent_mean          -max_c E_q f_c, the papers' score
    probability          -max_k p_k, with p_k = E_q p(k | f)
    entropy              H[p]
    mutual_information   H[E_q p(k | f)] - E_q H[p(k | f)]: what learning f would tell of the label

A likelihood whose density is not normalised over the label is normalised draw by draw in the last score. A detector is
judged inside each episode, by its AUROC over the episode's own queries and those of other classes.
Letters: C classes, Q own queries, O queries of other classes, M components of a mixture, B episodes of a block, E all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr, rel_entr
from jaxtyping import Array, Float, Int, Key

from evaluation.metrics import auroc
from evaluation.resampling import Interval, bootstrap
from inference.inner.base import Code, settle
from inference.predictive import draws_of_each, predict_marginals
from models.block_gaussian import JointMarginals
from models.expectations import MonteCarlo, expect
from models.gaussian import Marginals, Query
from models.likelihoods.base import Likelihood, log_densities
from models.process import LatentProcess

DRAWS = 512


class DetectionScores(NamedTuple):
    """The four scores of every query, larger where it looks out of its episode."""

    latent_mean: Float[Array, "*E Q"]
    probability: Float[Array, "*E Q"]
    entropy: Float[Array, "*E Q"]
    mutual_information: Float[Array, "*E Q"]


class Detection(NamedTuple):
    """One score's mean AUROC over the episodes, its 95% bootstrap interval, and the AUROC of every episode [E]."""

    auroc: float
    interval: Interval
    episodes: np.ndarray


def detection_scores(
    key: Key[Array, ""], likelihood: Likelihood, posterior: Any, query: Query, draws: int = DRAWS
) -> DetectionScores:
    """Scores of Q queries under a fitted q(f). Draws are shared by all queries, so none depends on another."""
    predict_key, draw_key = jax.random.split(key)
    marginals = posterior.predict(query)
    p = predict_marginals(predict_key, likelihood, marginals)
    return DetectionScores(
        latent_mean=-jnp.max(_components(marginals).mean.mean(axis=0), axis=0),
        probability=-jnp.max(p, axis=1),
        entropy=entropy(p),
        mutual_information=mutual_information(draw_key, likelihood, marginals, draws),
    )


def entropy(probabilities: Float[Array, "*rest C"]) -> Float[Array, "*rest"]:
    """-sum_c p_c log p_c in nats; 0 log 0 = 0."""
    return jnp.sum(entr(probabilities), axis=-1)


def mutual_information(
    key: Key[Array, ""], likelihood: Likelihood, marginals: Marginals | JointMarginals, draws: int = DRAWS
) -> Float[Array, " Q"]:
    """I(label; f) at every query from the marginals of q; those of a mixture have a leading axis over its components.

    Computed as E_q KL(p(. | f) || E_q p(. | f)) over the same draws, which the components divide between them. A
    difference of two entropies would lose the small values, by which confident queries are ranked, to rounding.
    """
    components = _components(marginals)
    count, classes, _ = components.mean.shape
    keys, rule = jax.random.split(key, count), MonteCarlo(draws_of_each(draws, count))

    def given(f: Array) -> Array:
        return jax.nn.softmax(log_densities(likelihood, f), axis=0).T

    def average(function: Callable[[Array], Array]) -> Array:
        def of_component(one: Array, component: Any) -> Array:
            return expect(function, component, rule.points(one, classes, component.mean.dtype))

        return jnp.mean(jax.vmap(of_component)(keys, components), axis=0)

    mean = average(given)
    mean = jnp.maximum(mean / jnp.sum(mean, axis=1, keepdims=True), jnp.finfo(mean.dtype).tiny)
    return average(lambda f: jnp.sum(rel_entr(given(f), mean), axis=1))


def _components(marginals: Any) -> Any:
    """The marginals with an axis over the components of a mixture, of one if there is no other."""
    return marginals if marginals.mean.ndim == 3 else jax.tree.map(lambda array: array[None], marginals)


@partial(jax.jit, static_argnums=(0, 1, 2))
def solve_open(
    make_inference: Any,
    kernel: Any,
    way: int,
    hyper: Any,
    likelihood: Likelihood,
    support: Float[Array, "B CS D"],
    y: Int[Array, "B CS"],
    query: Float[Array, "B Q D"],
    other: Float[Array, "B O D"],
    keys: Key[Array, " B"],
) -> tuple[DetectionScores, DetectionScores, Int[Array, " B"]]:
    """Scores of own [B, Q] and other queries [B, O] of a block of episodes, given features, and result codes [B].

    make_inference(likelihood) -> inference kernel; kernel and hyper-parameters as in `models.deep_kernel`.
    """
    algorithm = make_inference(likelihood)

    def one(support: Array, y: Array, queries: Array, key: Array) -> tuple[DetectionScores, Array]:
        fit_key, score_key = jax.random.split(key)
        prior = LatentProcess(kernel, hyper).prior(support, way)
        state, code = settle(fit_key, algorithm, prior, y)
        new = LatentProcess(kernel, hyper).query(support, queries, way)
        return detection_scores(score_key, likelihood, algorithm.posterior(state, prior), new), code

    scores, codes = jax.vmap(one)(support, y, jnp.concatenate([query, other], axis=1), keys)
    own = query.shape[1]
    inside, outside = DetectionScores(*(s[:, :own] for s in scores)), DetectionScores(*(s[:, own:] for s in scores))
    finite = jnp.stack([jnp.isfinite(array).all(axis=1) for array in scores]).all(axis=0)
    return inside, outside, jnp.where(finite, codes, Code.NON_FINITE)


def detect(rng: np.random.Generator, inside: DetectionScores, outside: DetectionScores) -> dict[str, Detection]:
    """How well each score tells other classes' queries [E, O] from an episode's own [E, Q], by its name.

    An episode with a score that is not a number counts as chance: its AUROC is 0.5.
    """
    found = {}
    for name, own, other in zip(DetectionScores._fields, inside, outside, strict=True):
        scores = np.concatenate([np.asarray(own), np.asarray(other)], axis=1)
        failed = ~np.isfinite(scores).all(axis=1)
        is_other = np.broadcast_to(np.arange(scores.shape[1]) >= own.shape[1], scores.shape)
        areas = np.where(failed, 0.5, auroc(np.where(failed[:, None], 0.0, scores), is_other))
        interval = bootstrap(rng, lambda sample: float(sample.mean()), areas, least=0.0, most=1.0)
        found[name] = Detection(float(areas.mean()), interval, areas)
    return found
