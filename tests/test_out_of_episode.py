"""Scores of out-of-episode detection against their definitions, brute-force sums and limits; AUROC per episode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double

from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.out_of_episode import (
    DetectionScores,
    Labelled,
    class_distance,
    detect,
    entropy,
    latent_scores,
    mutual_information,
    score_open,
)
from fewshot.inference.inner import exact
from fewshot.inference.inner.base import Code
from fewshot.inference.predictive import predict_marginals
from fewshot.learners import GaussianProcess, NearestNeighbour
from fewshot.models import KERNELS, LIKELIHOODS
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.gaussian import JointMarginals, Marginals, Query
from fewshot.models.likelihoods import LabelRegression, Softmax
from fewshot.tasks import make_dataset

KEY = jax.random.key(0)
information = jax.jit(functools.partial(mutual_information, KEY, draws=1024))


def test_entropy_of_known_distributions():
    p = jnp.array([[0.25] * 4, [0.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    np.testing.assert_allclose(entropy(p), np.log([4, 1, 2]), atol=1e-6)


def test_information_is_nothing_where_f_is_known_and_everything_where_it_is_unknown():
    mean = jnp.array([[0.5, 0.0], [-1.0, 0.0], [0.2, 0.0]])
    known, unknown = information(Softmax(), Marginals(mean, jnp.array([[0.0, 1e8]] * 3)))
    assert abs(known) < 1e-6
    assert unknown == pytest.approx(np.log(3), abs=0.01)  # softmax is one-hot almost surely, each class equally often


def test_information_of_a_mixture_of_points_is_that_of_the_mixture_component():
    """Two equally probable f: I = H[(p + q) / 2] - (H[p] + H[q]) / 2, Jensen and Shannon's divergence."""
    mean = jnp.array([[[1.0], [0.0], [-1.0]], [[-2.0], [0.5], [1.0]]])
    p, q = (np.exp(f) / np.exp(f).sum() for f in np.asarray(mean[:, :, 0], float))

    def h(p):
        return -(p * np.log(p)).sum()

    expected = h((p + q) / 2) - (h(p) + h(q)) / 2
    found = jax.jit(functools.partial(mutual_information, KEY))(Softmax(), Marginals(mean, jnp.zeros_like(mean)))
    np.testing.assert_allclose(found, [expected], rtol=1e-4)


@double
def test_information_agrees_with_a_brute_force_sum_for_coupled_classes():
    """Two classes: f_1 - f_2 is one normal, integrated on a fine grid."""
    mean, covariance = jnp.array([[0.7], [-0.3]]), jnp.array([[[1.5, 0.4], [0.4, 0.8]]])
    deviation = np.sqrt(1.5 + 0.8 - 2 * 0.4)
    z = np.linspace(-9, 9, 20001)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    p = 1 / (1 + np.exp(-(1.0 + deviation * z)))

    def h(p):
        return -p * np.log(p) - (1 - p) * np.log1p(-p)

    expected = h((weight * p).sum()) - (weight * h(p)).sum()
    found = jax.jit(functools.partial(mutual_information, KEY, draws=4096))(Softmax(), JointMarginals(mean, covariance))
    np.testing.assert_allclose(found, [expected], rtol=5e-3)


class Fitted:
    """A posterior whose marginals at the queries are given."""

    def __init__(self, marginals):
        self.marginals = marginals

    def predict(self, query):
        del query
        return self.marginals


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_scores_are_their_definitions_for_every_likelihood(name):
    likelihood = LIKELIHOODS[name]()
    rng = np.random.default_rng(0)
    mean, variance = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), jnp.asarray([[0.0, 0.5, 1.0, 4.0]] * 3)
    marginals, nowhere = Marginals(mean, variance), Query(jnp.zeros((3, 4)), jnp.zeros((4, 1)), jnp.ones(4))

    @jax.jit
    def scores(marginals):
        p = predict_marginals(jax.random.split(KEY)[0], likelihood, marginals)
        return latent_scores(KEY, likelihood, Fitted(marginals), nowhere, draws=64), p

    found, p = jax.device_get(scores(marginals))
    np.testing.assert_allclose(found.latent_mean, -np.asarray(mean).max(0))
    np.testing.assert_allclose(found.probability, -p.max(1), rtol=1e-5)
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum(1), rtol=1e-4)
    gain = np.asarray(found.mutual_information)
    assert abs(gain[0]) < 1e-6 and (gain[1:] > 1e-4).all() and (gain < np.log(3)).all()
    other, _ = scores(Marginals(mean.at[0, 1:].add(3.0), variance))
    assert found.distance is None
    for one, changed in zip(found[:-1], other[:-1], strict=True):
        np.testing.assert_array_equal(one[0], changed[0])  # a query does not depend on the others
        assert (one[1:] != changed[1:]).any()


def test_the_latent_mean_of_a_mixture_is_that_of_its_components_together():
    mean = jnp.array([[[2.0, 0.0], [-1.0, 0.5]], [[-4.0, 1.0], [0.0, -0.5]]])  # [M, C, Q]
    nowhere = Query(jnp.zeros((2, 2)), jnp.zeros((2, 1)), jnp.ones(2))
    fitted = Fitted(Marginals(mean, jnp.ones_like(mean)))
    found = jax.jit(lambda: latent_scores(KEY, LabelRegression(), fitted, nowhere, draws=64))()
    np.testing.assert_allclose(found.latent_mean, [0.5, -0.5])


@pytest.mark.long
def test_the_distance_is_that_to_the_nearest_class_in_what_its_own_examples_have():
    """By hand, of classes with 3, 1 and no examples; what is not real is none, and no length of a feature counts.

    Neither does what a kernel has for tasks of other sizes.
    """
    rng = np.random.default_rng(5)
    x, query = rng.normal(size=(6, 8)), rng.normal(size=(9, 8))
    y, real = np.array([0, 1, 0, 0, 2, 1]), np.array([True, True, True, True, False, False])
    u, v = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (x, query))
    means, counts = [u[[0, 2, 3]].mean(0), u[1]], [3, 1]
    each = [((v - m) ** 2).sum(1) / (1 + 1 / n) for m, n in zip(means, counts, strict=True)]
    assert len({int(np.argmin(one)) for one in np.transpose(each)}) == 2  # each of them is the nearest of some
    of_sizes = functools.partial(KERNELS["cosine"], constant=10.0, scale_power=1.0, constant_power=-2.5)
    for kernel, lengths in ((KERNELS["cosine"], np.ones((6, 1))), (of_sizes, rng.uniform(0.1, 9.0, (6, 1)))):
        cosine = learner(kernel)
        labelled = Labelled(jnp.asarray(x * lengths, jnp.float32), jnp.asarray(y), jnp.asarray(real))
        found = class_distance(cosine, labelled, 3, 7 * jnp.asarray(query, jnp.float32))
        np.testing.assert_allclose(found, 1 + np.log(np.min(each, axis=0)), rtol=1e-4, atol=1e-5)  # s2 is e
    assert np.isfinite(class_distance(cosine, labelled, 3, labelled.inputs[1:2])).all()  # at a distance of 0


SHAPE = Shape(3, 2, 4)


@pytest.fixture(scope="module")
def block():
    """Features of three 3-way 2-shot episodes with 4 own queries a class and 5 of other classes, and the episodes.

    Features scatter about class centres.
    """
    rng = np.random.default_rng(1)
    classes = np.repeat(np.arange(5), 20)
    features = jnp.asarray((3 * rng.normal(size=(5, 8)))[classes] + 0.3 * rng.normal(size=(100, 8)), jnp.float32)
    dataset = make_dataset(np.zeros((100, 1, 1, 8), np.float32), classes)
    return features, draw_episodes(0, "test", dataset, SHAPE, 3, other_classes=2)


def learner(kernel=KERNELS["rbf"]):
    deep_kernel = DeepKernel(Identity((1, 1, 8)), kernel(), rngs=nnx.Rngs(0), classes=3)
    deep_kernel.hyper["log_scale"][...] = jnp.asarray(1.0)
    return GaussianProcess(deep_kernel, LabelRegression(), exact)


@pytest.mark.long
def test_a_block_of_episodes_is_solved_one_by_one_and_others_are_found(block):
    features, episodes = block
    inside, outside, codes = score_open(learner(), features, episodes)
    assert inside.entropy.shape == (3, 12) and outside.entropy.shape == (3, 8) and (codes == Code.OK).all()
    order = np.array([2, 0, 1])
    reordered = episodes._replace(indices=jax.tree.map(lambda leaf: leaf[order], episodes.indices))
    reordered = reordered._replace(keys=episodes.keys[order])
    again, _, _ = score_open(learner(), features, reordered, block=2)
    np.testing.assert_allclose(again.mutual_information[0], inside.mutual_information[2], atol=1e-6)
    for name, found in detect(np.random.default_rng(0), inside, outside).items():
        assert found.auroc > 0.95, name


@pytest.mark.long
def test_an_episode_with_a_score_that_is_no_number_counts_as_chance(block):
    features, episodes = block
    broken = int(episodes.indices.x_other[1, 0])
    touched = (np.asarray(episodes.indices.x_other) == broken).any(axis=1)
    for name in ("x_support", "x_query"):
        touched |= (np.asarray(getattr(episodes.indices, name)) == broken).any(axis=1)
    inside, outside, codes = score_open(learner(), features.at[broken].set(jnp.nan), episodes)
    assert ((codes == Code.NON_FINITE) == touched).all() and touched[1] and not touched.all()
    found = detect(np.random.default_rng(0), inside, outside)["entropy"].episodes
    assert (found[touched] == 0.5).all() and (found[~touched] > 0.5).all()


def test_a_learner_without_latents_has_the_scores_of_its_probabilities(block):
    features, episodes = block
    inside, outside, codes = score_open(NearestNeighbour(Identity((1, 1, 8))), features, episodes)
    assert inside.latent_mean is outside.mutual_information is inside.distance is None and (codes == Code.OK).all()
    assert set(detect(np.random.default_rng(0), inside, outside)) == {"probability", "entropy"}


def test_detection_counts_pairs_in_every_episode():
    rng = np.random.default_rng(3)
    inside = DetectionScores(*(rng.integers(0, 6, (40, 7)).astype(float) for _ in DetectionScores._fields))
    outside = DetectionScores(*(rng.integers(2, 8, (40, 5)).astype(float) for _ in DetectionScores._fields))
    found = detect(np.random.default_rng(0), inside, outside)
    assert tuple(found) == DetectionScores._fields
    for name, own, other in zip(found, inside, outside, strict=True):
        pairs = [[(b > a) + 0.5 * (b == a) for a in row for b in more] for row, more in zip(own, other, strict=True)]
        np.testing.assert_allclose(found[name].episodes, np.mean(pairs, axis=1))
        assert found[name].auroc == pytest.approx(np.mean(pairs))
        half = 1.96 * np.std(np.mean(pairs, axis=1), ddof=1) / np.sqrt(40)
        assert found[name].interval.low == pytest.approx(found[name].auroc - half, abs=0.3 * half)
        assert found[name].interval.high == pytest.approx(found[name].auroc + half, abs=0.3 * half)
    again = detect(np.random.default_rng(0), inside, outside)
    assert again["entropy"].interval == found["entropy"].interval
