"""Bayesian MAML, its chaser loss and ABML: the Stein direction, one particle, plain layers, and the divergence."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from numpyro.contrib.einstein import SVGD, RBFKernel
from numpyro.optim import SGD
from problems import double
from test_backbones import plain_block
from test_learners_adapted import KEY, WAY, Smooth, T, along, batch, objective_of

from fewshot.inference.inner.base import Mask
from fewshot.learners import ABML, MAML, BayesianMAML, Chaser
from fewshot.learners.abml import WeightBelief, divergence
from fewshot.learners.bayesian_maml import stein_direction
from fewshot.models.backbones import Conv4

SHAPE = (3, 3, 1)
STEPS = {"inner_steps": 2, "inner_rate": 0.4}


def particles_of(make, particles=3, backbone=None, **steps):
    made = make(backbone or Smooth(SHAPE, rngs=nnx.Rngs(0)), way=WAY, rngs=nnx.Rngs(1), particles=particles, **steps)
    for number, network in enumerate(made.networks):
        network.weights[...] = 0.5 * jax.random.normal(jax.random.key(number), network.weights[...].shape)
    return made


def value_of(learner, tasks):
    objective, parameters = objective_of(learner, tasks)
    return float(objective(parameters))


@pytest.mark.long
@double
def test_the_stein_direction_is_a_step_of_numpyro():
    def log_likelihood(row):
        return -((row[0] - jnp.sin(row[1]) + row[2] ** 2 - 1) ** 2)

    def model():
        row = numpyro.sample("row", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.factor("likelihood", log_likelihood(row))

    oracle = SVGD(model, SGD(0.5), RBFKernel(), num_stein_particles=4)
    start = oracle.init(KEY)
    (before,), (after,) = (oracle.get_params(one).values() for one in (start, oracle.update(start)[0]))
    gradients = jax.vmap(jax.grad(lambda row: log_likelihood(row) - row @ row / 2))(before)
    np.testing.assert_allclose(before + 0.5 * stein_direction(before, gradients), after, rtol=1e-9)
    assert np.abs(after - before).max() > 0.1


@pytest.mark.long
def test_particles_that_are_alike_climb_together():
    rows, gradients = jnp.ones((4, 3)), jnp.arange(12.0).reshape(4, 3)
    found, slope = jax.value_and_grad(lambda rows: stein_direction(rows, gradients).sum())(rows)
    np.testing.assert_allclose(stein_direction(rows, gradients), np.tile(gradients.mean(0), (4, 1)), rtol=1e-6)
    assert np.isfinite(found) and np.isfinite(slope).all()


@pytest.mark.long
@double
def test_one_particle_is_maml():
    """By the value that training raises, and by its gradient."""
    tasks, one = batch(SHAPE), particles_of(BayesianMAML, particles=1, **STEPS)
    rows = jax.random.normal(KEY, (1, 5))
    np.testing.assert_array_equal(stein_direction(rows, 3 * rows), 3 * rows)  # gradient ascent
    plain = MAML(one.networks[0].backbone, way=WAY, **STEPS)
    plain.network.weights[...] = one.networks[0].weights[...]
    (found, slopes), (expected, wanted) = (
        jax.value_and_grad(objective)(parameters)
        for objective, parameters in (objective_of(one, tasks), objective_of(plain, tasks))
    )
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
    slopes, wanted = nnx.to_pure_dict(slopes)["networks"][0], nnx.to_pure_dict(wanted)["network"]
    jax.tree.map(lambda slope, other: np.testing.assert_allclose(slope, other, rtol=1e-9, atol=1e-14), slopes, wanted)
    assert min(np.abs(slope).max() for slope in jax.tree.leaves(wanted)) > 1e-3
    assert value_of(particles_of(BayesianMAML, **STEPS), tasks) != pytest.approx(float(found), rel=1e-3)


@pytest.mark.long
@double
def test_the_gradient_of_bayesian_maml_is_that_of_finite_differences(monkeypatch):
    """With the width of the kernel fixed, as it is in derivatives."""
    monkeypatch.setattr(jnp, "median", lambda distances: jnp.asarray(1.5))
    exact, differences = along(*objective_of(particles_of(BayesianMAML, **STEPS), batch(SHAPE)))
    assert exact == pytest.approx(differences, rel=1e-6) and abs(exact) > 1e-3


def plain_logits(parameters, x):
    x = x[None]
    for kernel, scale, shift in parameters["blocks"]:
        x = plain_block(x, kernel, scale, shift)
    return x.reshape(x.shape[1], -1) @ parameters["weights"] + parameters["bias"]


def plain_ascent(particles, x, y, rate):
    """One Stein step of a list of two networks, the kernel written out; its width is a constant."""

    def log_likelihood(parameters):
        return jax.nn.log_softmax(plain_logits(parameters, x))[jnp.arange(len(y)), y].sum()

    def distance(one, other):
        leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        return sum(jnp.sum((a - b) ** 2) for a, b in leaves)

    # Of the four distances of two particles two are 0: the median is half of the other.
    width = jax.lax.stop_gradient(distance(*particles)) / 4 / math.log(2)
    slopes = [jax.grad(log_likelihood)(one) for one in particles]
    moved = []
    for one in particles:
        total = jax.tree.map(jnp.zeros_like, one)
        for other, slope in zip(particles, slopes, strict=True):
            alike, apart = jax.value_and_grad(lambda p: jnp.exp(-distance(p, one) / width))(other)  # noqa: B023
            total = jax.tree.map(lambda t, g, a: t + alike * g + a, total, slope, apart)  # noqa: B023
        moved.append(jax.tree.map(lambda value, t: value + rate / len(y) * t / 2, one, total))
    return moved


@pytest.mark.slow  # four programs of Conv4
@double
def test_the_gradient_of_the_chaser_loss_is_that_of_plain_layers():
    """Through Conv4, whose blocks have hand-written gradients; the leader is held fixed."""
    backbone = Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=2)
    learner = particles_of(Chaser, 2, backbone, inner_steps=1, inner_rate=0.1)
    tasks = batch((16, 16, 1), shot=1, queries=2)
    plain = []
    for network in learner.networks:
        blocks = [getattr(network.backbone, f"block{i}") for i in range(4)]
        held = [(block.kernel[...], block.norm.scale[...], block.norm.shift[...]) for block in blocks]
        plain.append({"blocks": held, "weights": network.weights[...], "bias": network.bias[...]})

    @jax.jit
    @jax.value_and_grad
    def by_plain_layers(particles):
        total = 0.0
        for t in range(T):
            x, y, new, labels = (leaf[t] for leaf in tasks)
            fitted = plain_ascent(particles, x, y, 0.1)
            leader = plain_ascent(fitted, jnp.concatenate([x, new]), jnp.concatenate([y, labels]), 0.1)
            pairs = zip(jax.tree.leaves(fitted), jax.tree.leaves(leader), strict=True)
            total -= sum(jnp.sum((one - jax.lax.stop_gradient(other)) ** 2) for one, other in pairs)
        return total / T / len(labels)

    expected, slopes = by_plain_layers(plain)
    objective, parameters = objective_of(learner, tasks)
    found, gradient = jax.jit(jax.value_and_grad(objective))(parameters)
    assert float(found) == pytest.approx(float(expected), rel=1e-8) and float(found) < -1e-6
    networks = nnx.to_pure_dict(gradient)["networks"]
    for number, slope in enumerate(slopes):
        np.testing.assert_allclose(networks[number]["weights"], slope["weights"], rtol=1e-6, atol=1e-10)
        for i, (kernel, scale, _) in enumerate(slope["blocks"]):
            block = networks[number]["backbone"][f"block{i}"]
            np.testing.assert_allclose(block["kernel"], kernel, rtol=1e-6, atol=1e-10)
            np.testing.assert_allclose(block["norm"]["scale"], scale, rtol=1e-6, atol=1e-10)
    assert np.abs(networks[0]["weights"]).max() > 1e-6


def test_particles_start_at_different_weights():
    learner = BayesianMAML(Smooth(SHAPE, rngs=nnx.Rngs(0), width=40), way=WAY, rngs=nnx.Rngs(1), particles=3)
    weights = [np.asarray(network.backbone.weights[...]) for network in learner.networks]
    assert all(0.4 < one.std() < 0.6 for one in weights)
    assert all(abs(np.corrcoef(weights[i].ravel(), weights[j].ravel())[0, 1]) < 0.2 for i in range(3) for j in range(i))
    with pytest.raises(ValueError, match="expected at least 1 particle, got 0"):
        BayesianMAML(Smooth(SHAPE, rngs=nnx.Rngs(0)), way=WAY, rngs=nnx.Rngs(1), particles=0)


def abml(**fields):
    learner = ABML(Smooth(SHAPE, rngs=nnx.Rngs(0)), way=WAY, **STEPS | fields)
    learner.network.weights[...] = 0.5 * jax.random.normal(jax.random.key(1), learner.network.weights[...].shape)
    return learner


@double
def test_the_divergence_of_weights_is_that_of_normals():
    rng = np.random.default_rng(0)
    belief, prior = (WeightBelief(*map(jnp.asarray, rng.normal(size=(2, 6)))) for _ in range(2))
    each = [dist.Normal(one.mean, jnp.exp(one.log_sd)) for one in (belief, prior)]
    expected = dist.kl_divergence(*each).sum()
    assert float(divergence(belief, prior)) == pytest.approx(float(expected), rel=1e-12)
    assert float(divergence(prior, prior)) == 0


@pytest.mark.long
@double
def test_weights_that_are_almost_certain_make_abml_maml():
    tasks = batch(SHAPE)
    certain, plain = abml(sd=1e-9, kl_weight=0.0), MAML(Smooth(SHAPE, rngs=nnx.Rngs(0)), way=WAY, **STEPS)
    plain.network.weights[...] = certain.network.weights[...]
    expected = value_of(plain, tasks)
    assert value_of(certain, tasks) == pytest.approx(expected, abs=1e-6)
    assert abs(value_of(abml(sd=0.3, kl_weight=0.0), tasks) - expected) > 1e-3


@pytest.mark.long
@double
def test_the_gradient_of_abml_is_that_of_finite_differences():
    exact, differences = along(*objective_of(abml(sd=0.3, kl_weight=0.5, draws=2), batch(SHAPE)))
    assert exact == pytest.approx(differences, rel=1e-6) and abs(exact) > 1e-3


@pytest.mark.long
@double
def test_what_abml_maximises_is_the_likelihood_less_the_divergence_of_the_belief_from_the_prior():
    learner = abml(sd=0.3, kl_weight=0.5, draws=3)
    task = jax.tree.map(lambda leaf: leaf[0], batch(SHAPE))
    fit_key, draw_key = jax.random.split(KEY)
    belief, _ = learner.fit(fit_key, task.x_support, task.y_support, WAY)
    logits = np.asarray(learner._drawn_logits(draw_key, belief, task.x_query, 3))
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    right = np.take_along_axis(logs, np.asarray(task.y_query)[None, :, None], -1).sum() / 3
    each = [dist.Normal(one.mean, jnp.exp(one.log_sd)) for one in (belief, learner.prior())]
    apart = dist.kl_divergence(*each).sum()
    assert float(learner.objective(KEY, task)) == pytest.approx(right - 0.5 * float(apart), rel=1e-9)
    assert abs(float(apart / dist.kl_divergence(*each[::-1]).sum()) - 1) > 0.01


@pytest.mark.long
@double
@pytest.mark.parametrize("kind", [BayesianMAML, Chaser])
def test_labelled_images_that_are_not_real_do_not_shorten_the_steps_of_particles(kind):
    learner, task = particles_of(kind, **STEPS), jax.tree.map(lambda leaf: leaf[0], batch(SHAPE))
    made_up = jnp.concatenate([task.x_support, task.x_query]), jnp.concatenate([task.y_support, task.y_query])
    real = jnp.arange(len(made_up[1])) < len(task.y_support)
    padded, _ = learner.fit(KEY, *made_up, WAY, Mask(real, jnp.ones(WAY, bool)))
    plain, _ = learner.fit(KEY, task.x_support, task.y_support, WAY)
    np.testing.assert_allclose(padded.rows, plain.rows, rtol=1e-9)


@pytest.mark.long
@double
def test_one_step_of_abml_from_a_zero_head_is_known_in_closed_form():
    """The prior's divergence has no slope at the prior; the log deviations move by the noise times the mean's slope."""
    learner = abml(inner_steps=1, inner_rate=0.3, sd=0.2, kl_weight=1.0)
    learner.network.weights[...] = jnp.zeros_like(learner.network.weights[...])
    task = jax.tree.map(lambda leaf: leaf[0], batch(SHAPE))
    prior, (found, _) = learner.prior(), learner.fit(KEY, task.x_support, task.y_support, WAY)
    (draw_key,) = jax.random.split(jax.random.split(KEY, 1)[0], 1)
    noise = jax.random.normal(draw_key, prior.mean.shape)
    np.testing.assert_allclose(
        found.log_sd - prior.log_sd, (found.mean - prior.mean) * noise * jnp.exp(prior.log_sd), rtol=1e-9, atol=1e-15
    )
    assert np.abs(found.mean - prior.mean).max() > 1e-3
    with pytest.raises(ValueError, match="expected a positive sd, draws and prediction_draws, and kl_weight >= 0"):
        abml(sd=0.0)
