"""The NumPyro model of one task: its density, the shapes and the moments of its draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from problems import double, problem
from scipy.stats import norm

from fewshot.models import LIKELIHOODS
from fewshot.models.generative import augmented_model, classification_model
from fewshot.models.likelihoods import LabelRegression, Softmax
from fewshot.models.likelihoods.base import AugmentedLikelihood

AUGMENTED = [name for name, make in LIKELIHOODS.items() if isinstance(make(), AugmentedLikelihood)]
CLASSES, POINTS = 3, 9
DRAWS = 4000


@pytest.mark.long
@double
@pytest.mark.parametrize("kernel", ["rbf", "linear"])  # without and with features
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_log_density_is_prior_plus_log_likelihood(name, kernel):
    """A non-zero prior mean; for `linear` N > D, so that K is singular and f has no density but u has one."""
    task, likelihood = problem(0, kernel=kernel, features=4), LIKELIHOODS[name]()
    rank = 4 if kernel == "linear" else POINTS
    u = np.random.default_rng(1).normal(size=(CLASSES, rank))

    @jax.jit
    def density(u):
        value, trace = log_density(classification_model, (task.prior, likelihood, task.y), {}, {"u": u})
        return value, trace["f"]["value"]

    value, f = density(u)
    assert f.shape == (CLASSES, POINTS)
    likelihood_part = np.sum(likelihood.log_prob(task.y, f))
    np.testing.assert_allclose(value, norm.logpdf(u).sum() + likelihood_part, rtol=1e-12)


@pytest.mark.long
@double
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_log_density_is_prior_plus_tilt_plus_auxiliary_prior(name, kernel):
    """Of the augmented model too, at a draw of the latents given other logits than those of the density."""
    task, likelihood = problem(0, kernel=kernel, features=4), LIKELIHOODS[name]()
    rng = np.random.default_rng(1)
    u = rng.normal(size=(CLASSES, 4 if kernel == "linear" else POINTS))
    elsewhere = jnp.asarray(rng.normal(size=(CLASSES, POINTS)))
    names = set()

    @jax.jit
    def densities():
        aux = likelihood.aux_conditional(jax.random.key(3), task.y, elsewhere)
        value, trace = log_density(augmented_model, (task.prior, likelihood, task.y), {}, {"u": u, **aux._asdict()})
        names.update(name for name, site in trace.items() if site["type"] == "sample")
        assert names == {"u", *aux._fields, "tilt"}
        return value, jnp.sum(likelihood.log_joint(task.y, aux, trace["f"]["value"]))

    value, joint = densities()
    np.testing.assert_allclose(value, norm.logpdf(u).sum() + joint, rtol=1e-12)


@pytest.mark.long
@double
@pytest.mark.parametrize("name", AUGMENTED)
def test_augmented_and_marginal_model_agree(name):
    """log p(u, aux, y) - log p(aux | u, y) is log p(u, y), whatever aux is."""
    task, likelihood = problem(2), LIKELIHOODS[name]()
    u = np.random.default_rng(4).normal(size=(CLASSES, POINTS))
    arguments = (task.prior, likelihood, task.y)

    @jax.jit
    def densities(key):
        marginal, trace = log_density(classification_model, arguments, {}, {"u": u})
        f = trace["f"]["value"]
        aux = likelihood.aux_conditional(key, task.y, f)
        joint, _ = log_density(augmented_model, arguments, {}, {"u": u, **aux._asdict()})
        return marginal, joint - jnp.sum(likelihood.log_conditional(task.y, aux, f))

    for seed in range(3):
        marginal, difference = densities(jax.random.key(seed))
        np.testing.assert_allclose(difference, marginal, rtol=1e-7)


@pytest.mark.parametrize("likelihood", [Softmax(), LabelRegression()], ids=lambda likelihood: type(likelihood).__name__)
def test_augmented_model_needs_augmented_latents(likelihood):
    task = problem(7)
    with pytest.raises(TypeError, match=f"{type(likelihood).__name__} offers none"):
        handlers.trace(handlers.seed(augmented_model, jax.random.key(0))).get_trace(task.prior, likelihood, task.y)


@pytest.fixture(scope="module", params=LIKELIHOODS)
def drawn(request):
    """A task whose first two points are one image twice, its likelihood, and its prior predictive draws."""
    likelihood, task = LIKELIHOODS[request.param](), problem(3, scale=2.0)
    twice = np.array([0, 0, *range(2, POINTS)])
    prior = task.prior._replace(covariance=task.prior.covariance[np.ix_(twice, twice)])
    predictive = Predictive(classification_model, num_samples=DRAWS)
    draws = jax.jit(lambda key, prior: predictive(key, prior, likelihood))(jax.random.key(2), prior)
    return prior, likelihood, *jax.device_get((draws["f"], draws["y"]))


def within_five_errors(samples, reference):
    """The mean of samples [DRAWS, ...] against its expectation."""
    return (np.abs(samples.mean(0) - reference) < 5 * samples.std(0) / np.sqrt(DRAWS)).all()


def test_latents_of_the_prior_predictive_have_the_moments_of_the_prior(drawn):
    prior, _, f, _ = drawn
    assert f.shape == (DRAWS, CLASSES, POINTS)
    centred = f - prior.mean
    assert within_five_errors(f, prior.mean)
    assert within_five_errors(centred[:, :, :, None] * centred[:, :, None, :], prior.covariance)
    assert within_five_errors(centred[:, 0] * centred[:, 1], 0.0)  # classes are independent
    np.testing.assert_allclose(f[:, :, 0], f[:, :, 1], atol=2e-3)  # one image, one latent


def test_labels_of_the_prior_predictive_follow_the_latents(drawn):
    _, likelihood, f, y = drawn
    assert y.shape == (DRAWS, *likelihood.observed(jnp.zeros(POINTS, jnp.int32), CLASSES).shape)
    if isinstance(likelihood, LabelRegression):
        residuals = y - f
        np.testing.assert_allclose(residuals.var(), likelihood.noise, rtol=5 * np.sqrt(2 / residuals.size))
        assert within_five_errors(residuals, 0.0)
    else:
        assert y.min() == 0 and y.max() == CLASSES - 1
        probabilities = jax.jit(jax.vmap(lambda f: class_probabilities(likelihood, f)))(f)
        assert within_five_errors((np.arange(CLASSES)[:, None] == y[:, None, :]) - probabilities, 0.0)


def class_probabilities(likelihood, f):
    """p(y = k | f) [C, N], normalised over k: the density of one-vs-each is not."""
    labels = jnp.broadcast_to(jnp.arange(f.shape[0])[:, None], f.shape)
    return jax.nn.softmax(jax.vmap(lambda y: likelihood.log_prob(y, f))(labels), axis=0)


def test_sample_sites_of_the_model():
    task = problem(7)
    traces = []

    @jax.jit
    def run(key, prior, y):
        traces.append(handlers.trace(handlers.seed(classification_model, key)).get_trace(prior, Softmax(), y))
        return {name: site["value"] for name, site in traces[-1].items()}

    values = run(jax.random.key(0), task.prior, task.y)
    trace = traces[-1]
    assert {name: site["type"] for name, site in trace.items()} == {
        "u": "sample",
        "f": "deterministic",
        "y": "sample",
    }
    assert trace["y"]["is_observed"] and not trace["u"]["is_observed"]
    np.testing.assert_array_equal(values["y"], task.y)
    assert values["u"].dtype == jnp.float32
