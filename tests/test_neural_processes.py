"""Neural processes: attention, means and the bound by hand and by brute force; what must not change an answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double
from scipy.stats import norm
from test_real_labels import SMALL, interrupted_after, rows_of

from fewshot import FewShotRegressor
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import AttentiveNeuralProcess, ConditionalNeuralProcess, LatentNeuralProcess
from fewshot.learners.base import apply
from fewshot.learners.neural_process import FLOOR, LATENT_FLOOR, Proposal
from fewshot.models.backbones import MLP, Identity
from fewshot.models.networks.points import Attention, attend, mean_of
from fewshot.runners import evaluate, meta_train
from fewshot.tasks.curves import RealTask

KEY, D = jax.random.key(3), 2
EVERY = jnp.ones(5, bool)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def make(kind, identity=True, **fields):
    backbone = Identity if identity else MLP
    return kind(backbone((1, 1, D), rngs=nnx.Rngs(1)), rngs=nnx.Rngs(2), width=8, **fields)


def examples():
    """One of each, the attentive one with all of its parts."""
    attentive = make(AttentiveNeuralProcess, False, heads=2, rounds=2, latent=3, prediction_draws=5)
    return make(ConditionalNeuralProcess), make(LatentNeuralProcess, latent=3, prediction_draws=5), attentive


def by_layers(layers, x):
    """The layers in NumPy."""
    for number, layer in enumerate(layers.layers):
        x = (x if number == 0 else np.maximum(x, 0)) @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
    return x


def answered(learner, x, y, query, mask=None):
    """Mean and log density at 0.3 of every query."""

    mean, density, code = apply(_answer, learner, (), x, y, query, mask)
    assert code == Code.OK
    return np.stack([mean, density])


def _answer(learner, x, y, query, mask):
    state, code = learner.fit(KEY, learner.embed(x[:, None, None]), y, 1, mask)
    found = learner.predict(KEY, state, learner.embed(query[:, None, None]))
    return found.distribution.mean, found.distribution.log_prob(0.3), jnp.maximum(code, found.code)


def test_a_training_task_shows_from_the_fewest_points_to_all_of_them():
    learner = make(ConditionalNeuralProcess, fewest=2)
    shown = np.asarray(jax.vmap(lambda key: learner.shown(key, 4))(jax.random.split(KEY, 300)))
    counts = shown.sum(1)
    assert (shown == (np.arange(4) < counts[:, None])).all()  # the first ones
    assert np.bincount(counts, minlength=5)[2:].min() > 60 and counts.min() == 2
    assert np.asarray(make(ConditionalNeuralProcess).shown(KEY, 4)).all()


@double
def test_attention_is_a_plain_loop():
    attention = Attention(3, 6, 2, rngs=nnx.Rngs(0))
    query, keys, values = draw(4, 3), draw(5, 3, seed=1), draw(5, 6, seed=2)
    maps = {name: np.asarray(getattr(attention, name).kernel[...]) for name in ("query", "key", "value", "output")}
    expected = []
    for one in query:
        heads = []
        for part in (slice(0, 3), slice(3, 6)):
            scores = [(one @ maps["query"])[part] @ (k @ maps["key"])[part] / np.sqrt(3) for k in keys]
            weights = np.exp(scores) / np.exp(scores).sum()
            heads.append(sum(w * (v @ maps["value"])[part] for w, v in zip(weights, values, strict=True)))
        expected.append(np.concatenate(heads) @ maps["output"])
    found = jax.jit(attention)(query, keys, values, EVERY)
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-12)


@double
def test_attention_to_one_point_to_none_and_past_those_that_are_not_real():
    query, keys, values = map(jnp.asarray, (30 * draw(4, 3), draw(5, 3, seed=1), draw(5, 6, seed=2)))
    real = np.array([True, False, True, True, False])

    @jax.jit
    def found():
        one = attend(query, keys[:1], values[:1], EVERY[:1])
        spoiled = attend(query, keys.at[4].set(jnp.inf), values.at[1].set(jnp.nan), jnp.asarray(real))
        left_out = attend(query, keys[real], values[real], EVERY[:3])
        nothing = attend(query, keys[:0], values[:0], EVERY[:0]), attend(query, keys, values, ~EVERY)
        return one, spoiled, left_out, nothing, jax.grad(lambda q: attend(q, keys, values, ~EVERY).sum())(query)

    one, spoiled, left_out, nothing, slope = found()
    np.testing.assert_allclose(one, np.tile(values[:1], (4, 1)), rtol=1e-12)
    np.testing.assert_allclose(spoiled, left_out, rtol=1e-12)
    for each in nothing:
        assert each.shape == (4, 6) and (each == 0).all()
    assert (slope == 0).all()


@double
@pytest.mark.parametrize("points", [0, 1, 3])
def test_cnp_by_hand(points):
    learner = make(ConditionalNeuralProcess, floor=0.2)
    x, y, query = draw(points, D), draw(points, seed=1), draw(4, D, seed=2)
    each = by_layers(learner.encoder.layers, np.concatenate([x, y[:, None]], axis=1))
    mean = each.sum(0) / points if points else np.zeros(8)
    outputs = by_layers(learner.decoder, np.concatenate([query, np.tile(mean, (4, 1))], axis=1))
    deviation = 0.2 + np.log1p(np.exp(outputs[:, 1]))
    found = answered(learner, x, y, query)
    np.testing.assert_allclose(found[0], outputs[:, 0], rtol=1e-10)
    np.testing.assert_allclose(found[1], norm.logpdf(0.3, outputs[:, 0], deviation), rtol=1e-10)


@pytest.mark.long
@double
@pytest.mark.parametrize("number", range(3))
def test_order_padding_and_other_queries_change_nothing(number):
    learner = examples()[number]
    x, y, query, order = draw(5, D), draw(5, seed=1), draw(4, D, seed=2), np.array([3, 0, 4, 2, 1])
    whole = answered(learner, x, y, query)
    np.testing.assert_allclose(answered(learner, x[order], y[order], query), whole, rtol=1e-9)
    np.testing.assert_allclose(answered(learner, x, y, query[::-1])[:, ::-1], whole, rtol=1e-9)
    np.testing.assert_allclose(answered(learner, x, y, query + 9 * np.arange(4)[:, None])[:, 0], whole[:, 0], rtol=1e-9)
    for wrong in (100.0, np.nan):
        padded = np.insert(x, [2, 2], wrong, axis=0), np.insert(y, [2, 2], wrong)
        mask = Mask(jnp.array([1, 1, 0, 0, 1, 1, 1], bool), jnp.ones(1, bool))
        np.testing.assert_allclose(answered(learner, *padded, query, mask), whole, rtol=1e-9)
    assert np.abs(answered(learner, x, y[order], query) - whole).max() > 1e-4  # labels belong to their inputs


def by_quadrature(learner, x, y, query, wanted):
    """log of the integral over one z of q(z | C) prod_q p(y_q | x_q, z), and that of each query, on a fine grid."""
    state, _ = jax.jit(lambda: learner.fit(KEY, x, y, 1))()
    (mean,), (sd,) = state.belief
    z = jnp.linspace(mean - 9 * sd, mean + 9 * sd, 4001)
    means, deviations = jax.jit(learner.decode)(state, query, z[:, None])
    each = norm.logpdf(np.asarray(wanted), np.asarray(means), np.asarray(deviations))
    weights = norm.pdf(np.asarray(z), float(mean), float(sd)) * float(z[1] - z[0])
    return np.log(weights @ np.exp(each.sum(1))), np.log(weights @ np.exp(each))


def latent_problem(proposal, draws):
    """A learner with one latent that matters, and a task."""
    learner = make(LatentNeuralProcess, latent=1, draws=draws, proposal=proposal, prediction_draws=20_000, floor=1.0)
    learner.decoder.layers[0].kernel[...] *= 2
    parts = draw(3, D), draw(4, D, seed=5), draw(3, seed=1), 0.3 * draw(4, seed=2)
    x, query, y, wanted = map(jnp.asarray, parts)
    return learner, RealTask(x[:, None, None], y, query[:, None, None], wanted), jnp.concatenate([x, query])


@pytest.mark.long
@double
@pytest.mark.parametrize("proposal", Proposal)
def test_the_bound_is_below_the_log_predictive_and_reaches_it(proposal):
    """(N3): by brute force on one latent. With one draw a mean over many keys, with many draws the value itself."""
    learner, task, features = latent_problem(proposal, 1)
    exact, _ = by_quadrature(learner, features[:3], task.y_support, features[3:], task.y_query)
    keys = jax.random.split(jax.random.key(0), 40_000)
    found = jax.jit(jax.vmap(lambda key: learner.objective(key, features, task)))(keys)
    error = float(found.std()) / np.sqrt(len(keys))
    assert found.mean() < exact - 5 * error
    weights = np.exp(np.asarray(found) - exact)  # of mean 1
    error = weights.std() / np.sqrt(len(keys))
    assert error < 0.005 and abs(weights.mean() - 1) < 4 * error
    many = latent_problem(proposal, 40_000)[0]
    assert float(jax.jit(many.objective)(KEY, features, task)) == pytest.approx(exact, abs=0.02)


@double
def test_predictions_integrate_the_latent():
    """A mixture over draws of z: with many of them, the integral."""
    learner, task, features = latent_problem(Proposal.CONTEXT, 1)
    _, exact = by_quadrature(learner, features[:3], task.y_support, features[3:], task.y_query)

    @jax.jit
    def found():
        state, _ = learner.fit(KEY, features[:3], task.y_support, 1)
        return learner.predict(KEY, state, features[3:]).distribution.log_prob(task.y_query)

    np.testing.assert_allclose(found(), exact, atol=0.02)


@pytest.mark.long
@double
def test_gradients_are_finite_where_the_deviation_is_its_floor_and_without_points():
    """Deviations of z and of the labels that vanish but for their floors; a task whose points are all masked."""
    learner = make(AttentiveNeuralProcess, heads=2, rounds=1, latent=3, prediction_draws=2)
    learner.decoder.layers[-1].bias[...] = jnp.array([0.0, -1e4])
    learner.latent.head.layers[-1].bias[3:] = jnp.full(3, -1e4)
    graph, parameters, rest = nnx.split(learner, nnx.Param, ...)
    x, y, query, wanted = map(jnp.asarray, (draw(3, D), draw(3), draw(4, D, seed=2), draw(4)))
    task = RealTask(x[:, None, None], y, query[:, None, None], wanted)

    def loss(parameters):
        other = nnx.merge(graph, parameters, rest, copy=True)
        found = other.objective(KEY, jnp.concatenate([x, query]), task)
        state, _ = other.fit(KEY, x, y, 1, Mask(jnp.zeros(3, bool), jnp.ones(1, bool)))
        distribution = other.predict(KEY, state, query).distribution
        return found + distribution.log_prob(jnp.zeros(4)).sum(), (state.belief.sd, other.decode(state, query, y[None]))

    (value, (sd, decoded)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    np.testing.assert_allclose(sd, LATENT_FLOOR)
    np.testing.assert_allclose(decoded[1], FLOOR)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(slopes)) > 1


def test_means_leave_out_what_is_not_real():
    values = jnp.array([[1.0, 2.0], [jnp.nan, 5.0], [3.0, 6.0]])
    np.testing.assert_array_equal(mean_of(values, jnp.array([True, False, True])), [2.0, 4.0])
    np.testing.assert_array_equal(mean_of(values, jnp.zeros(3, bool)), [0.0, 0.0])


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (AttentiveNeuralProcess, {"heads": 3}, "a number of heads that divides the width 8, got 3"),
        (AttentiveNeuralProcess, {"rounds": -1}, "expected rounds of at least 0, got -1"),
        (LatentNeuralProcess, {"latent": 0}, "expected latent of at least 1, got 0"),
        (ConditionalNeuralProcess, {"floor": 0.0}, "expected a positive floor"),
    ],
)
def test_what_makes_no_sense_is_refused(kind, fields, message):
    with pytest.raises(ValueError, match=message):
        make(kind, **fields)


ARGUMENTS = ["--dataset", "gp-curves:rbf", "--learner", "anp", "--episodes", "24", *SMALL, "learner.latent=2"]
NARROW = ["learner.width=8", "learner.heads=2", "backbone.width=8", "learner.draws=2", "learner.prediction_draws=4"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped_and_serves_the_estimator(tmp_path, capsys):
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert meta_train.command_line([*ARGUMENTS, *NARROW, "--run-dir", str(whole)]) == 0
    interrupted_after(8, meta_train.parse([*ARGUMENTS, *NARROW, "--run-dir", str(half)]))
    assert meta_train.command_line(["--resume", "--run-dir", str(half)]) == 0
    assert rows_of(half) == rows_of(whole)
    assert evaluate.command_line([str(whole), "--episodes", "8"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("trained ")]
    assert table[0] == table[-1]
    x = np.linspace(-1, 1, 6)[:, None]
    regressor = FewShotRegressor.from_run(whole).fit(x, np.sin(x[:, 0]))
    mean, deviation = regressor.predict(np.linspace(-2, 2, 300)[:, None], return_std=True)
    assert np.isfinite(mean).all() and (deviation > 0.01).all() and mean.shape == (300,)
