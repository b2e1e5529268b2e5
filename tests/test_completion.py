"""Image completion: pixels as tasks, two inputs through the learners of real labels, plain predictions, the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import double
from scipy.stats import norm
from test_neural_processes import answered, examples
from test_real_labels import SMALL

from fewshot.evaluation.plain_labels import VAGUE, MeanLabel, NearestLabel
from fewshot.inference.inner.base import Code
from fewshot.learners import ConditionalNeuralProcess
from fewshot.learners.base import apply, solve
from fewshot.learners.neural_process import Proposal
from fewshot.models.backbones import Identity
from fewshot.runners import evaluate, meta_train
from fewshot.tasks import glyphs
from fewshot.tasks.curves import Pixels, RealTask, load_curves

KEY = jax.random.key(0)


def pictures(*shape):
    """Images whose every pixel is different within an image."""
    size = shape[1] * shape[2]
    rng = np.random.default_rng(0)
    return jnp.asarray(np.stack([rng.permutation(250)[:size] for _ in range(shape[0])]).reshape(shape), jnp.uint8)


def sampled(curves, support, query, seed=0):
    return jax.jit(lambda key: curves.sample(key, support, query))(jax.random.key(seed))


@pytest.mark.long
def test_a_task_is_some_pixels_of_one_image_at_their_places():
    curves = Pixels(pictures(3, 4, 5), noise=0.0)
    first, again, other = (sampled(curves, 6, 14, seed) for seed in (0, 0, 1))
    assert [leaf.shape for leaf in first] == [(6, 1, 1, 2), (6,), (14, 1, 1, 2), (14,)]
    for left, right, changed in zip(first, again, other, strict=True):
        assert (left == right).all() and (left != changed).any()
    x, y = (np.concatenate([first[part], first[part + 2]]) for part in (0, 1))
    rows, columns = np.rint((x[:, 0, 0] + 1) / 2 * [3, 4]).astype(int).T
    np.testing.assert_allclose(x[:, 0, 0], np.stack([rows / 1.5 - 1, columns / 2 - 1], axis=1), atol=1e-6)
    assert len({*zip(rows.tolist(), columns.tolist(), strict=True)}) == 20 == curves.largest
    fits = [np.allclose(np.asarray(image)[rows, columns] / 255, y, atol=1e-6) for image in curves.images]
    assert sum(fits) == 1


@pytest.mark.long
def test_brightness_has_noise_of_the_stated_deviation_and_every_image_its_turn():
    curves = Pixels(jnp.asarray([np.full((10, 10), 51 * level) for level in range(4)], jnp.uint8), noise=0.05)
    tasks = jax.jit(jax.vmap(lambda key: curves.sample(key, 50, 50)))(jax.random.split(KEY, 200))
    y = np.concatenate([tasks.y_support, tasks.y_query], axis=1)
    levels = np.rint(y.mean(axis=1) / 0.2)
    assert np.bincount(levels.astype(int), minlength=4).min() > 25
    np.testing.assert_allclose((y - 0.2 * levels[:, None]).std(), 0.05, rtol=0.02)


@pytest.mark.long
def test_images_of_training_and_test_are_those_of_different_classes():
    """The splits of the classification data set, whose classes are of different scripts."""
    splits, classes = load_curves("glyph-completion"), glyphs.load()
    assert splits.image_shape == (1, 1, 2) and splits.test.largest == 784
    for name in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(splits, name).images, getattr(classes, name).images[..., 0])
    seen = {image.tobytes() for image in np.asarray(splits.train.images)}
    assert not any(image.tobytes() in seen for image in np.asarray(splits.test.images))
    assert not {*classes.class_names["train"]} & {*classes.class_names["test"]}


@pytest.mark.long
@double
@pytest.mark.parametrize("number", range(3))
def test_the_order_of_pixels_changes_nothing_and_their_places_do(number):
    learner, task = examples()[number], sampled(Pixels(pictures(2, 6, 6)), 12, 8)
    x, y, query = (np.asarray(part, float) for part in (task.x_support[:, 0, 0], task.y_support, task.x_query[:, 0, 0]))
    order = np.random.default_rng(1).permutation(12)
    whole = answered(learner, x, y, query)
    np.testing.assert_allclose(answered(learner, x[order], y[order], query), whole, rtol=1e-9)
    assert np.abs(answered(learner, x[:, ::-1].copy(), y, query) - whole).max() > 1e-4


@pytest.mark.long
@double
@pytest.mark.parametrize("proposal", Proposal)
def test_a_training_task_shows_some_of_its_points(proposal):
    """The loss is that of the task without the points that are not shown; from the fewest to all, alike often."""
    _, latent, _ = examples()
    latent.proposal, latent.fewest, latent.draws = proposal, 2, 3
    task = jax.tree.map(lambda leaf: leaf.astype(float), sampled(Pixels(pictures(2, 6, 6)), 5, 4))
    features = jnp.concatenate([task.x_support, task.x_query])[:, 0, 0]
    keys = jax.random.split(KEY, 400)
    shown = jax.jit(jax.vmap(lambda key: latent.shown(key, 5).sum()))(keys)
    assert np.bincount(shown).tolist()[:2] == [0, 0] and np.bincount(shown)[2:].min() > 70
    key, count = keys[np.argmax(shown == 3)], 3
    found = jax.jit(latent.objective)(key, features, task)
    latent.fewest = None
    few = RealTask(task.x_support[:count], task.y_support[:count], task.x_query, task.y_query)
    expected = jax.jit(latent.objective)(key, jnp.concatenate([features[:count], features[5:]]), few)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert abs(jax.jit(latent.objective)(key, features, task) - expected) > 1e-3
    latent.fewest = 9
    assert latent.shown(KEY, 5).all()


def test_fewer_than_no_points_are_refused():
    with pytest.raises(ValueError, match="expected fewest of at least 0, got -1"):
        ConditionalNeuralProcess(Identity((1, 1, 2)), rngs=nnx.Rngs(0), fewest=-1)


@double
@pytest.mark.parametrize("points", [1, 2, 7])
def test_plain_predictions_by_hand(points):
    rng = np.random.default_rng(points)
    x, y, query = rng.normal(size=(points, 2)), rng.uniform(size=points), rng.normal(size=(3, 2))

    def nearest(place, others):
        return y[min(others, key=lambda n: np.sum((x[n] - place) ** 2))] if others else 0.0

    def mean(place, others):
        return np.mean([y[n] for n in others]) if others else 0.0

    for learner, guess in ((MeanLabel(2), mean), (NearestLabel(2), nearest)):
        rest = [[n for n in range(points) if n != one] for one in range(points)]
        error = sum((y[n] - guess(x[n], rest[n])) ** 2 for n in range(points)) if points > 1 else 0.0
        expected = [guess(place, range(points)) for place in query]
        found = apply(lambda learner, *task: solve(learner, KEY, *task, 1), learner, (), x, y, query)
        assert found.code == Code.OK
        np.testing.assert_allclose(found.distribution.mean, expected)
        density = norm.logpdf(0.2, expected, np.sqrt((error + VAGUE) / (points + 1)))
        np.testing.assert_allclose(found.distribution.log_prob(0.2), density)


NARROW = {
    "cnp": ["backbone.width=8", "learner.width=8", "learner.fewest=2"],
    "np": ["backbone.width=8", "learner.width=8", "learner.latent=3", "learner.draws=2"],
    "anp": ["backbone.width=8", "learner.width=8", "learner.heads=2", "learner.fewest=0"],
    "gaussian-process": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("learner", NARROW)
def test_a_run_on_images(learner, tmp_path, capsys):
    """Train, test, evaluate at another number of pixels."""
    arguments = ["--dataset", "glyph-completion", "--learner", learner, "--episodes", "24", "--query", "9", *SMALL]
    backbone = ["--backbone", "identity"] if learner == "gaussian-process" else []
    path = tmp_path / "run"
    assert meta_train.command_line([*arguments, *NARROW[learner], *backbone, "--run-dir", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\nTest on glyph-completion: 8 tasks of 100 labelled points and 50 queries" in printed
    for row in ("trained  ", "untrained  ", "mean of the labelled  ", "nearest labelled  "):
        assert f"\n{row}" in printed
    out = tmp_path / "out.json"
    assert evaluate.command_line([str(path), "--episodes", "6", "--shot", "30", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {*found["others"]} == {"mean of the labelled", "nearest labelled"}
    for row in (found["metrics"], *found["others"].values()):
        assert all(np.isfinite(row[name]) for name in ("nll", "rmse", "crps", "coverage50", "coverage90"))
