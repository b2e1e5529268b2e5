"""Conformance of every registered likelihood, masks, label permutations, registration."""

import importlib
import inspect
import pkgutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from scipy.special import logsumexp, softmax
from scipy.stats import norm

from fewshot.models import ALL_LIKELIHOODS, LIKELIHOODS, likelihoods
from fewshot.models.expectations import GaussHermite, MonteCarlo, expect
from fewshot.models.gaussian import Marginals
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import Likelihood
from fewshot.models.likelihoods.label_regression import Rule

CLASSES, POINTS = 3, 6
Y = np.array([0, 1, 2, 2, 1, 0], np.int32)
REAL = np.array([True, False, True])  # a class mask
ABSENT_LATENT = 9.0  # large where a class is masked: it would dominate if it entered


@pytest.fixture(params=LIKELIHOODS)
def likelihood(request):
    return LIKELIHOODS[request.param]()


def latents(seed=0, spread=1.5):
    return spread * np.random.default_rng(seed).normal(size=(CLASSES, POINTS))


def random_marginals(seed=0, largest=2.0):
    return Marginals(latents(seed), np.random.default_rng(seed + 1).uniform(0.05, largest, size=(CLASSES, POINTS)))


def single(tree):
    return jax.tree.map(np.float32, tree)


@jax.jit
def log_prob(likelihood, y, f, classes=None):
    return likelihood.log_prob(y, f, classes)


@jax.jit
def expected(likelihood, y, marginals, points=None, classes=None):
    return likelihood.expected_log_prob(y, marginals, points, classes)


@jax.jit
def predict(key, likelihood, marginals, classes=None):
    return likelihood.predict(key, marginals, classes)


@jax.jit
def averaged_prediction(keys, likelihood, marginals, classes=None):
    """Mean of `predict` over keys, with its standard error."""
    values = jax.vmap(lambda key: likelihood.predict(key, marginals, classes))(keys)
    return values.mean(0), values.std(0) / np.sqrt(len(keys))


def log_densities(likelihood, f, classes=None):
    """log p(y = k | f_n) [K, N] for every label k."""
    points = f.shape[1]
    return np.stack([log_prob(likelihood, np.full(points, k, np.int32), f, classes) for k in range(CLASSES)])


# Values


@double
def test_densities_of_all_labels_are_those_of_each(likelihood):
    f = latents()
    found = jax.jit(partial(likelihoods.base.log_densities, likelihood))(f)
    np.testing.assert_allclose(found, log_densities(likelihood, f), rtol=1e-12, atol=1e-12)


@double
def test_softmax_density_is_the_textbook_formula():
    f = latents()
    np.testing.assert_allclose(log_prob(Softmax(), Y, f), np.log(softmax(f, axis=0))[Y, np.arange(POINTS)], rtol=1e-12)


@double
def test_label_regression_density_is_the_textbook_formula():
    f, noise = latents(), 0.3
    coded = 2.0 * (np.arange(CLASSES)[:, None] == Y) - 1
    expected_value = norm(f, np.sqrt(noise)).logpdf(coded).sum(0)
    np.testing.assert_allclose(log_prob(LabelRegression(noise), Y, f), expected_value, rtol=1e-12)


@double
def test_gaussian_sites_are_the_density_up_to_a_constant():
    likelihood, f, g = LabelRegression(0.3), latents(0), latents(1)
    shift, precision = likelihood.gaussian_sites(jnp.asarray(Y), CLASSES)

    def log_sites(value):
        return (shift * value - 0.5 * precision * value**2).sum(0)

    change = log_prob(likelihood, Y, f) - log_prob(likelihood, Y, g)
    np.testing.assert_allclose(log_sites(f) - log_sites(g), change, rtol=1e-10)


# L1 and L8: prediction


@pytest.mark.parametrize("masked", [False, True])
def test_probabilities_sum_to_one_and_masked_classes_have_none(likelihood, masked):
    classes = REAL if masked else None
    probabilities = predict(jax.random.key(0), likelihood, single(random_marginals()), classes)
    assert probabilities.shape == (POINTS, CLASSES) and probabilities.dtype == jnp.float32
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=2e-6)
    assert (probabilities >= 0).all()
    if masked:
        np.testing.assert_array_equal(probabilities[:, ~REAL], 0.0)


@double
def test_prediction_at_certain_latents_is_the_normalised_density(likelihood):
    f = latents()
    probabilities = predict(jax.random.key(0), likelihood, Marginals(f, np.zeros_like(f)))
    np.testing.assert_allclose(probabilities, softmax(log_densities(likelihood, f), axis=0).T, atol=1e-9)


@double
@pytest.mark.parametrize("masked", [False, True])
def test_prediction_is_within_five_errors_of_brute_monte_carlo(likelihood, masked):
    """L8: E_q p(y = k | f), normalised over k where the likelihood is a density of something else than labels."""
    # Wide and close to each other: brute force cannot see the tails of a density with little noise.
    rng, classes = np.random.default_rng(2), REAL if masked else None
    mean, variance = rng.uniform(-0.4, 0.4, size=(CLASSES, POINTS)), rng.uniform(0.2, 0.4, size=(CLASSES, POINTS))
    marginals = Marginals(mean, variance)
    if masked:
        mean[~REAL] = ABSENT_LATENT
    draws = 40_000
    noise = np.sqrt(variance)[..., None] * rng.normal(size=(CLASSES, POINTS, draws))
    f = (mean[..., None] + noise).reshape(CLASSES, -1)
    densities = np.exp(log_densities(likelihood, f, classes)).reshape(CLASSES, POINTS, draws)
    if masked:
        densities[~REAL] = 0.0
    density = densities.mean(-1)
    reference = density / density.sum(0)
    # Standard error of a ratio of means, by the delta method.
    deviations = (densities - reference[:, :, None] * densities.sum(0)) / density.sum(0)[:, None]
    reference_error = deviations.std(-1) / np.sqrt(draws)
    value, error = averaged_prediction(jax.random.split(jax.random.key(4), 200), likelihood, marginals, classes)
    tolerance = 5 * np.hypot(reference_error.T, error) + 1e-12
    assert (np.abs(value - reference.T) < tolerance).all()


# Expectations of the log density


@double
@pytest.mark.parametrize("masked", [False, True])
def test_expected_log_prob_is_that_of_quadrature(likelihood, masked):
    marginals, classes = random_marginals(5), REAL if masked else None
    labels = np.where(REAL[Y], Y, 0).astype(np.int32) if masked else Y
    mask = None if classes is None else jnp.asarray(classes)
    points = GaussHermite(30).points(jax.random.key(0), CLASSES)
    by_nodes = jax.jit(partial(expect, lambda f: likelihood.log_prob(jnp.asarray(labels), f, mask)))
    reference = by_nodes(marginals, points)
    np.testing.assert_allclose(expected(likelihood, labels, marginals, None, classes), reference, atol=1e-8)
    np.testing.assert_allclose(expected(likelihood, labels, marginals, points, classes), reference, atol=1e-8)


@pytest.mark.long
@double
def test_expected_log_prob_over_given_nodes_is_their_mean(likelihood):
    """Few nodes, so that the deterministic formula would not do; a closed form may ignore them."""
    marginals = random_marginals(6)
    points = MonteCarlo(8).points(jax.random.key(1), CLASSES)
    value = expected(likelihood, Y, marginals, points)
    closed = np.allclose(value, expected(likelihood, Y, marginals), atol=1e-12)
    mean = jax.jit(partial(expect, lambda f: likelihood.log_prob(jnp.asarray(Y), f)))(marginals, points)
    assert closed or np.allclose(value, mean, atol=1e-12)
    assert closed == isinstance(likelihood, LabelRegression)


@double
@pytest.mark.parametrize("sampled", [False, True])
def test_expected_log_prob_without_variance_is_log_prob(likelihood, sampled):
    f = latents(7)
    points = MonteCarlo(8).points(jax.random.key(1), CLASSES) if sampled else None
    value = expected(likelihood, Y, Marginals(f, np.zeros_like(f)), points)
    np.testing.assert_allclose(value, log_prob(likelihood, Y, f), atol=1e-10)


@double
def test_a_temperature_divides_the_latents():
    """(LS7): densities and expectations at tau are those of f / tau, of mean m / tau and variance v / tau^2, at 1."""
    plain, sharp, m = LogisticSoftmax(), LogisticSoftmax(temperature=0.7), random_marginals(5)
    scaled = Marginals(m.mean / 0.7, m.variance / 0.7**2)
    np.testing.assert_allclose(log_prob(sharp, Y, m.mean), log_prob(plain, Y, scaled.mean), rtol=1e-12)
    for points in (None, MonteCarlo(8).points(jax.random.key(1), CLASSES)):
        np.testing.assert_allclose(expected(sharp, Y, m, points), expected(plain, Y, scaled, points), rtol=1e-10)
    key = jax.random.key(0)
    np.testing.assert_allclose(predict(key, sharp, m), predict(key, plain, scaled), rtol=1e-10)


def test_single_precision_is_near_double_precision(likelihood):
    marginals = random_marginals(8)
    with jax.enable_x64(True):
        reference = jax.device_get((expected(likelihood, Y, marginals), log_prob(likelihood, Y, marginals.mean)))
    values = expected(likelihood, Y, single(marginals)), log_prob(likelihood, Y, single(marginals.mean))
    for value, exact in zip(values, reference, strict=True):
        assert value.dtype == jnp.float32
        np.testing.assert_allclose(value, exact, rtol=2e-5, atol=1e-5)


def test_log_prob_of_extreme_latents_is_finite(likelihood):
    f = np.float32([[1e4] * POINTS, [-1e4] * POINTS, [0.0] * POINTS])
    value, slope = jax.jit(jax.value_and_grad(lambda f: jnp.sum(likelihood.log_prob(jnp.asarray(Y), f))))(f)
    assert np.isfinite(value) and np.isfinite(slope).all()


# Masks and permutations


@double
def test_a_masked_class_changes_nothing(likelihood):
    """The problem with a masked class is the problem without it, whatever its latent."""
    kept = np.flatnonzero(REAL)
    labels = np.array([0, 1, 1, 0, 1, 0], np.int32)  # positions in `kept`
    marginals = random_marginals(9)
    marginals.mean[~REAL] = ABSENT_LATENT
    small = jax.tree.map(lambda leaf: leaf[REAL], marginals)
    values = log_prob(likelihood, kept[labels].astype(np.int32), marginals.mean, REAL)
    np.testing.assert_allclose(values, log_prob(likelihood, labels, small.mean), rtol=1e-10)
    values = expected(likelihood, kept[labels].astype(np.int32), marginals, None, REAL)
    np.testing.assert_allclose(values, expected(likelihood, labels, small), rtol=1e-9)


@double
def test_permuting_the_classes_permutes_everything(likelihood):
    order = np.array([2, 0, 1])  # new class i is old class order[i]
    labels = np.argsort(order)[Y].astype(np.int32)
    marginals = random_marginals(10)
    moved = jax.tree.map(lambda leaf: leaf[order], marginals)
    points = MonteCarlo(8).points(jax.random.key(2), CLASSES)
    moved_points = points._replace(nodes=points.nodes[:, order])
    close = partial(np.testing.assert_allclose, rtol=1e-9)
    close(log_prob(likelihood, labels, moved.mean), log_prob(likelihood, Y, marginals.mean))
    close(expected(likelihood, labels, moved), expected(likelihood, Y, marginals))
    close(expected(likelihood, labels, moved, moved_points), expected(likelihood, Y, marginals, points))
    keys = jax.random.split(jax.random.key(3), 200)
    (value, error), (moved_value, _) = (averaged_prediction(keys, likelihood, m) for m in (marginals, moved))
    assert (np.abs(moved_value - value[:, order]) < 8 * error[:, order] + 1e-12).all()


# Parameters, observations, registration


def test_parameters_have_priors_and_can_be_replaced(likelihood):
    values = likelihood.parameters()
    assert values.keys() == likelihood.priors().keys()
    assert all(np.ndim(value) == 0 for value in values.values())
    same = likelihood.with_parameters(values)
    f = single(latents())
    np.testing.assert_allclose(log_prob(same, Y, f), log_prob(likelihood, Y, f), rtol=1e-6)
    if values:
        other = likelihood.with_parameters({name: value + 1.0 for name, value in values.items()})
        assert not np.allclose(log_prob(other, Y, f), log_prob(likelihood, Y, f))


@double
def test_observation_has_the_density_of_the_likelihood(likelihood):
    f = jnp.asarray(latents())
    observation, observed = likelihood.observation(f), likelihood.observed(jnp.asarray(Y), CLASSES)
    np.testing.assert_allclose(observation.log_prob(observed), log_prob(likelihood, Y, f).sum(), rtol=1e-12)
    assert observation.sample(jax.random.key(0)).shape == observed.shape


def test_registered_likelihoods_keep_the_protocol(likelihood):
    assert isinstance(likelihood, Likelihood)
    for name, method in inspect.getmembers(Likelihood, inspect.isfunction):
        if not name.startswith("_"):
            assert list(inspect.signature(method).parameters) == list(
                inspect.signature(getattr(type(likelihood), name)).parameters
            ), name


def likelihood_classes(package):
    """Every concrete class with the methods of a likelihood that a module of the package defines."""
    names = [name for name, member in inspect.getmembers(Likelihood, inspect.isfunction) if name[0] != "_"]
    for entry in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(entry.name)
        for _, member in inspect.getmembers(module, inspect.isclass):
            protocol = getattr(member, "_is_protocol", False)
            if member.__module__ == module.__name__ and not protocol and all(hasattr(member, name) for name in names):
                yield member


def unregistered(package, registry):
    constructors = {getattr(constructor, "func", constructor) for constructor in registry.values()}
    return set(likelihood_classes(package)) - constructors


def test_every_likelihood_is_registered():
    assert {Softmax, LabelRegression} <= set(likelihood_classes(likelihoods))
    assert unregistered(likelihoods, ALL_LIKELIHOODS) == set()


def test_an_unregistered_likelihood_would_be_seen():
    others = {name: constructor for name, constructor in ALL_LIKELIHOODS.items() if name != "softmax"}
    assert unregistered(likelihoods, others) == {Softmax}


def test_the_reference_formulas_of_this_file():
    """softmax over labels of the coded density is softmax of 2 f / s2, the published rule at zero variance."""
    f, noise = latents(), 0.3
    coded = 2.0 * np.eye(CLASSES) - 1
    log_density = norm(f[None], np.sqrt(noise)).logpdf(coded[:, :, None]).sum(1)
    np.testing.assert_allclose(log_density - logsumexp(log_density, 0), np.log(softmax(2 * f / noise, 0)), atol=1e-12)


def test_the_published_rule_of_label_regression_is_chosen_by_name():
    """(R6) knows means alone and is normalised; the default is (R5)."""
    mean, variance = jnp.asarray(latents(3)[:, :4], jnp.float32), jnp.linspace(0.1, 2.0, CLASSES)[:, None] * jnp.ones(4)
    q, key = Marginals(mean, variance), jax.random.key(0)
    published = LabelRegression(rule=Rule.SIGMOID).predict(key, q)
    scores = 1 / (1 + np.exp(-np.asarray(mean, np.float64)))
    np.testing.assert_allclose(published, (scores / scores.sum(0)).T, rtol=1e-5)
    assert not np.allclose(published, LabelRegression().predict(key, q))
    real = jnp.arange(CLASSES) < 2
    masked = LabelRegression(rule=Rule.SIGMOID).predict(key, q, real)
    np.testing.assert_allclose(masked[:, :2], (scores[:2] / scores[:2].sum(0)).T, rtol=1e-5)
    assert (masked[:, 2:] == 0).all()
    learned = LabelRegression(rule=Rule.SIGMOID).with_parameters({"log_noise": jnp.asarray(0.0)})
    assert learned.rule is Rule.SIGMOID and jax.tree.map(lambda leaf: leaf, learned).rule is Rule.SIGMOID
    with pytest.raises(TypeError, match="Rule"):
        LabelRegression(rule="probit")


def test_noise_and_temperature_are_positive():
    with pytest.raises(ValueError, match=r"noise must be positive, got -0.1"):
        LabelRegression(noise=-0.1)
    with pytest.raises(ValueError, match=r"temperature must be positive, got 0.0"):
        LogisticSoftmax(temperature=0.0)


@pytest.mark.parametrize("likelihood", [Softmax, LogisticSoftmax, OneVsEach])
def test_draws_that_come_in_pairs_cannot_be_odd(likelihood):
    with pytest.raises(ValueError, match=r"an even number of draws .* got 7"):
        likelihood(prediction_draws=7)


def test_a_temperature_that_is_held_is_no_parameter():
    held = LogisticSoftmax(0.2, learn_temperature=False)
    assert held.parameters() == held.priors() == {}
    assert held.with_parameters({}).temperature == 0.2
    leaves = jax.tree.leaves(held)
    assert leaves == [0.2] and jax.tree.map(lambda leaf: leaf, held) == held
    assert LogisticSoftmax(0.2).parameters().keys() == LogisticSoftmax(0.2).priors().keys() == {"log_temperature"}
