"""Out-of-episode detection: does a query belong to one of the classes that its support set shows? (OVE section 5.4.)

Five scores, each larger where a query looks less like any class of the episode:

    latent_mean          -max_c E_q f_c, the papers' score
    probability          -max_k p_k, with p_k = E_q p(k | f)
    entropy              H[p]
    mutual_information   H[E_q p(k | f)] - E_q H[p(k | f)]: what learning f would tell of the label
    distance             log min_k |phi(x) - m_k|^2 / (1 + 1 / n_k), k(x, z) = phi(x).phi(z), m_k the mean of class k

phi is the feature map of the kernel, for the cosine features of length 1. The squared distance of an input of class k
to the mean of its n_k examples is expected to be in proportion to 1 + 1 / n_k. Far from all classes is one thing,
unsure of the class another; to be unknown is made of both:

    (U2)  distance + entropy

A learner without a posterior of latent functions has the second and third score alone. A likelihood whose density is
not normalised over the label is normalised draw by draw in the mutual information. A detector is judged inside each
episode, by its AUROC over the episode's own queries and those of other classes.
Letters: C classes, Q own queries, O queries of other classes, M components of a mixture, B episodes of a block, E all.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr, rel_entr
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fewshot.evaluation.episodes import Episodes, Shape, draw_episodes
from fewshot.evaluation.metrics import auroc
from fewshot.evaluation.resampling import Interval, bootstrap, plain_interval
from fewshot.evaluation.scoring import EmbeddedEpisode, failures, in_blocks
from fewshot.evaluation.text import Json
from fewshot.inference.inner.base import Code
from fewshot.inference.predictive import draws_of_each, predict_marginals
from fewshot.learners.base import LatentLearner, Learner, Prediction
from fewshot.models.expectations import MonteCarlo, expect
from fewshot.models.gaussian import AnyMarginals, Query
from fewshot.models.likelihoods.base import Likelihood, log_densities
from fewshot.tasks import Dataset

DRAWS = 512


@runtime_checkable
class PredictsLatents(Protocol):
    """A fitted q(f)."""

    def predict(self, query: Query) -> AnyMarginals:
        """Marginals of the latent functions at queries; those of a mixture have a leading axis."""
        ...


class DetectionScores(NamedTuple):
    """The scores of every query, larger where it looks out of its episode; None for those that a learner has not."""

    latent_mean: Float[Array, "*E Q"] | None
    probability: Float[Array, "*E Q"]
    entropy: Float[Array, "*E Q"]
    mutual_information: Float[Array, "*E Q"] | None
    distance: Float[Array, "*E Q"] | None


class Labelled(NamedTuple):
    """The labelled inputs [N, ...] of a task, their labels [N] in 0..C-1, and which are real."""

    inputs: Array
    y: Int[Array, " N"]
    real: Bool[Array, " N"] | None = None


class Detection(NamedTuple):
    """One score's mean AUROC over the episodes, its 95% bootstrap interval, and the AUROC of every episode [E]."""

    auroc: float
    interval: Interval
    episodes: np.ndarray


class OutOfEpisode(NamedTuple):
    """Scores of own [E, Q] and other queries [E, O], how well each tells them apart, failures by result code.

    classes: from how many the other queries of an episode come.
    """

    inside: DetectionScores
    outside: DetectionScores
    detection: dict[str, Detection]
    failures: dict[str, int]
    classes: int

    def plain_areas(self) -> dict[str, Json]:
        """By score its AUROC and the interval, for a JSON file."""
        return {
            name: {"auroc": one.auroc, "auroc_interval": plain_interval(one.interval)}
            for name, one in self.detection.items()
        }


def scores_of(
    key: Key[Array, ""], learner: Learner, state: PyTree, labelled: Labelled, classes: int, query: Array
) -> DetectionScores:
    """Scores of Q queries by a learner that was fitted to a task.

    Draws are shared by all queries, so none depends on another.
    """
    if not isinstance(learner, LatentLearner):
        p = learner.predict(key, state, query).probabilities
        return DetectionScores(None, -jnp.max(p, axis=1), entropy(p), None, None)
    distance = class_distance(learner, labelled, classes, query)
    return latent_scores(key, learner.likelihood, state.posterior, learner.latent_query(state, query), distance)


def latent_scores(
    key: Key[Array, ""],
    likelihood: Likelihood,
    posterior: PredictsLatents,
    query: Query,
    distance: Float[Array, " Q"] | None = None,
    draws: int = DRAWS,
) -> DetectionScores:
    """Scores of Q queries under a fitted q(f), beside the distance that they have."""
    predict_key, draw_key = jax.random.split(key)
    marginals = posterior.predict(query)
    p = predict_marginals(predict_key, likelihood, marginals)
    return DetectionScores(
        latent_mean=-jnp.max(_components(marginals).mean.mean(axis=0), axis=0),
        probability=-jnp.max(p, axis=1),
        entropy=entropy(p),
        mutual_information=mutual_information(draw_key, likelihood, marginals, draws),
        distance=distance,
    )


def strangeness(
    key: Key[Array, ""], learner: Learner, state: PyTree, labelled: Labelled, classes: int, query: Array
) -> Float[Array, " Q"]:
    """The score of Q queries that `unknown` is made of, larger where one looks less like any class of the task.

    (U2), or the entropy of a learner without latents. Probabilities are untempered, and of the task's real classes. NaN
    where a prediction fails.
    """
    return strangeness_of(learner, learner.predict(key, state, query), labelled, classes, query)


def strangeness_of(
    learner: Learner, found: Prediction, labelled: Labelled, classes: int, query: Array
) -> Float[Array, " Q"]:
    """`strangeness` of queries that the learner has predicted."""
    score = entropy(found.probabilities)
    if isinstance(learner, LatentLearner):
        score = score + class_distance(learner, labelled, classes, query)
    return jnp.where(found.code == Code.NON_FINITE, jnp.nan, score)


def class_distance(
    learner: LatentLearner, labelled: Labelled, classes: int, query: Float[Array, "Q D"]
) -> Float[Array, " Q"]:
    """The distance of Q queries; classes without examples are none.

    The least number of the precision stands for a squared distance of 0.
    """
    members = jax.nn.one_hot(labelled.y, classes, dtype=query.dtype)
    if labelled.real is not None:
        members = members * labelled.real[:, None]
    count = jnp.sum(members, axis=0)
    squares = learner.squared_distances(labelled.inputs, members / jnp.maximum(count, 1), query)
    nearest = jnp.min(jnp.where(count > 0, squares * count / (count + 1), jnp.inf), axis=1)
    return jnp.log(jnp.maximum(nearest, jnp.finfo(query.dtype).tiny))


def entropy(probabilities: Float[Array, "*rest C"]) -> Float[Array, "*rest"]:
    """-sum_c p_c log p_c in nats; 0 log 0 = 0."""
    return jnp.sum(entr(probabilities), axis=-1)


def mutual_information(
    key: Key[Array, ""], likelihood: Likelihood, marginals: AnyMarginals, draws: int = DRAWS
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
        def of_component(one: Array, component: AnyMarginals) -> Array:
            return expect(function, component, rule.points(one, classes, component.mean.dtype))

        return jnp.mean(jax.vmap(of_component)(keys, components), axis=0)

    mean = average(given)
    mean = jnp.maximum(mean / jnp.sum(mean, axis=1, keepdims=True), jnp.finfo(mean.dtype).tiny)
    return average(lambda f: jnp.sum(rel_entr(given(f), mean), axis=1))


def _components(marginals: AnyMarginals) -> AnyMarginals:
    """The marginals with an axis over the components of a mixture, of one if there is no other."""
    return marginals if marginals.mean.ndim == 3 else jax.tree.map(lambda array: array[None], marginals)


def score_open(
    learner: Learner, features: Array | np.ndarray, episodes: Episodes, block: int | None = None
) -> tuple[DetectionScores, DetectionScores, np.ndarray]:
    """Scores of own queries [E, Q] and of those of other classes [E, O], and result codes [E]."""
    return in_blocks(_open, learner, features, episodes, block)


def _open(
    learner: Learner, classes: int, key: Key[Array, ""], episode: EmbeddedEpisode
) -> tuple[DetectionScores, DetectionScores, Int[Array, ""]]:
    """Scores of own [Q] and other queries [O] of one episode, and its result code."""
    fit_key, score_key = jax.random.split(key)
    state, code = learner.fit(fit_key, episode.support, episode.y, classes)
    labelled = Labelled(episode.support, episode.y)
    scores = scores_of(score_key, learner, state, labelled, classes, jnp.concatenate([episode.query, episode.other]))
    own = len(episode.query)
    finite = jnp.stack([jnp.isfinite(array).all() for array in jax.tree.leaves(scores)]).all()
    inside, outside = jax.tree.map(lambda array: array[:own], scores), jax.tree.map(lambda array: array[own:], scores)
    return inside, outside, jnp.where(finite, code, Code.NON_FINITE)


def detect(rng: np.random.Generator, inside: DetectionScores, outside: DetectionScores) -> dict[str, Detection]:
    """How well each score that there is tells other classes' queries [E, O] from an episode's own [E, Q], by its name.

    An episode with a score that is not a number counts as chance: its AUROC is 0.5.
    """
    found = {}
    for name, own, other in zip(DetectionScores._fields, inside, outside, strict=True):
        if own is None or other is None:
            continue
        scores = np.concatenate([np.asarray(own), np.asarray(other)], axis=1)
        failed = ~np.isfinite(scores).all(axis=1)
        is_other = np.broadcast_to(np.arange(scores.shape[1]) >= own.shape[1], scores.shape)
        areas = np.where(failed, 0.5, auroc(np.where(failed[:, None], 0.0, scores), is_other))
        interval = bootstrap(rng, lambda sample: float(sample.mean()), areas, least=0.0, most=1.0)
        found[name] = Detection(float(areas.mean()), interval, areas)
    return found


def detect_others(
    learner: Learner, features: Array, test: Dataset, shape: Shape, count: int, seed: int
) -> OutOfEpisode:
    """`count` test episodes with as many queries of each of as many other classes (METHODS 6), or of all there are."""
    others = min(shape.way, test.classes - shape.way)
    drawn = draw_episodes(seed, "test", test, shape, count, other_classes=others)
    inside, outside, codes = score_open(learner, features, drawn)
    found = detect(np.random.default_rng(0), inside, outside)
    return OutOfEpisode(inside, outside, found, failures(codes), others)
