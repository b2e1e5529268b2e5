"""Labels that are real numbers: noise models, the learner on them, their data sets, scores and commands."""

import json
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from flax import nnx
from problems import double
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, ExpSineSquared, Matern
from test_meta_train import error_line

from fewshot import learners
from fewshot.evaluation.known_process import KnownProcess
from fewshot.evaluation.real_scores import draw_real_episodes, score_reals
from fewshot.inference.conformance import check_likelihood
from fewshot.inference.inner import exact
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import GaussianProcess, Learner, TrainsOn, Traits, solve
from fewshot.learners.base import predicted
from fewshot.models import NOISE_MODELS
from fewshot.models.backbones import Identity
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.kernels import RBF
from fewshot.models.likelihoods import Normal
from fewshot.runners import evaluate, meta_train
from fewshot.tasks.curves import GENERATED, Covariance, ProcessCurves, RealTask, Rows, Sinusoids, load_curves
from fewshot.training.configuration import configured
from fewshot.training.run import load_class_run
from fewshot.training.run_directory import RunError

SETTINGS = {"validation_episodes": 6, "test_episodes": 8, "log_every": 4, "validate_every": 8, "schedule": "constant"}
SMALL = ["--set", *(f"trainer.{name}={value}" for name, value in SETTINGS.items())]


def gaussian_process(noise=0.05, inputs=2, **starts):
    kernel = DeepKernel(Identity((1, 1, inputs)), RBF(), rngs=nnx.Rngs(0), classes=1)
    for name, value in starts.items():
        kernel.hyper[name][...] = jnp.asarray(value, jnp.result_type(float))
    return GaussianProcess(kernel, Normal(noise), exact)


@pytest.mark.long
@double
def test_the_learner_is_scikit_learns_regressor():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(12, 2)), rng.normal(size=(7, 2))
    y = np.sin(x[:, 0]) + 0.2 * rng.normal(size=12)
    learner = gaussian_process(0.05, log_scale=np.log(1.7), log_lengthscale=np.log(0.6))
    inputs = [learner.embed(jnp.asarray(each)[:, None, None]) for each in (x, new)]
    found = jax.jit(lambda: solve(learner, jax.random.key(0), inputs[0], jnp.asarray(y), inputs[1], 1))()
    kernel = ConstantKernel(1.7) * SklearnRBF(0.6 * np.sqrt(2))  # ours divides inputs by the root of their number
    other = GaussianProcessRegressor(kernel, alpha=0.05, optimizer=None).fit(x, y)
    mean, deviation = other.predict(new, return_std=True)
    assert isinstance(found.distribution, dist.Normal) and found.code == Code.OK
    np.testing.assert_allclose(found.distribution.mean, mean, atol=1e-8)
    np.testing.assert_allclose(found.distribution.variance, deviation**2 + 0.05, atol=1e-8)
    parts = [x[:8, None, None], y[:8], x[8:, None, None], y[8:]]
    tasks = RealTask(*(jnp.asarray(part)[None] for part in parts))
    outcome = jax.jit(lambda: learner.loss(jax.random.split(jax.random.key(0), 1), tasks, jax.vmap))()
    np.testing.assert_allclose(outcome.objective, other.log_marginal_likelihood_value_, atol=1e-8)
    assert outcome.points == 12


@pytest.mark.long
def test_padding_and_a_failed_task():
    x, y = np.linspace(-1, 1, 6)[:, None], np.linspace(0, 2, 6) ** 2
    learner, new = gaussian_process(inputs=1), jnp.asarray([[0.3], [2.0]])
    mask = Mask(jnp.arange(6) < 4, jnp.ones(1, bool))

    @jax.jit
    def solved(x, y, mask=None):
        state, _ = learner.fit(jax.random.key(0), x, y, 1, mask)
        return learner.predict(jax.random.key(0), state, new).distribution

    both = [solved(jnp.asarray(x[:4]), jnp.asarray(y[:4])), solved(jnp.asarray(x), jnp.asarray(y), mask)]
    np.testing.assert_allclose(both[0].mean, both[1].mean, atol=1e-4)
    np.testing.assert_allclose(both[0].variance, both[1].variance, atol=1e-4)
    wrong = jnp.asarray(y).at[0].set(jnp.nan)
    broken = jax.jit(lambda: solve(learner, jax.random.key(0), jnp.asarray(x), wrong, new, 1))()
    assert broken.code == Code.NON_FINITE


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISE_MODELS)
def test_registered_noise_models_pass(name):
    assert {"expects", "forecasts"} <= set(check_likelihood(NOISE_MODELS[name]()))


@pytest.mark.parametrize("name", GENERATED)
def test_a_task_is_a_function_of_its_key(name):
    curves = GENERATED[name]()
    first, again, other = (curves.sample(jax.random.key(seed), 5, 9) for seed in (0, 0, 1))
    shapes = [leaf.shape for leaf in first]
    assert shapes == [(5, 1, 1, 1), (5,), (9, 1, 1, 1), (9,)]
    for left, right, changed in zip(first, again, other, strict=True):
        assert (left == right).all() and (left != changed).any()


def test_sinusoids_are_sinusoids():
    """y is a sin(x) + b cos(x) but for the noise, whose deviation is the stated one."""
    tasks = jax.vmap(lambda key: Sinusoids().sample(key, 5, 195))(jax.random.split(jax.random.key(0), 50))
    x = np.concatenate([tasks.x_support, tasks.x_query], axis=1)[..., 0, 0, 0]
    y = np.concatenate([tasks.y_support, tasks.y_query], axis=1)
    assert np.abs(x).max() <= 5 and np.abs(x).max() > 4.9
    basis = np.stack([np.sin(x), np.cos(x)], axis=-1)
    fits = [np.linalg.lstsq(*each, rcond=None)[0] for each in zip(basis, y, strict=True)]
    rest = y - np.einsum("enk,ek->en", basis, np.stack(fits))
    np.testing.assert_allclose(rest.std(), 0.1, atol=0.003)
    amplitude, phase = np.hypot(*np.transpose(fits)), np.arctan2(*-np.transpose(fits)[::-1])
    assert amplitude.min() > 0.1 and amplitude.max() < 5.1 and phase.min() > -0.3 and phase.max() < np.pi + 0.3


THEIRS = {
    Covariance.RBF: SklearnRBF(0.5),
    Covariance.MATERN52: Matern(0.5, nu=2.5),
    Covariance.PERIODIC: ExpSineSquared(1.0, 1.0),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", Covariance)
def test_curves_of_a_process_have_its_covariance(kind):
    """It is scikit-learn's. With R its root, R^-1 y is white: its squares have mean 1, within 5 errors."""
    inputs = np.linspace(-2, 2, 9)
    expected = THEIRS[kind](inputs[:, None])
    np.testing.assert_allclose(kind.matrix(*[jnp.asarray(inputs)] * 2), expected, atol=2e-6)
    curves = ProcessCurves((kind,))
    tasks = jax.vmap(lambda key: curves.sample(key, 3, 17))(jax.random.split(jax.random.key(1), 400))
    x = np.concatenate([tasks.x_support, tasks.x_query], axis=1)[..., 0, 0, 0]
    y = np.concatenate([tasks.y_support, tasks.y_query], axis=1)
    covariance = np.stack([curves.covariance(kind, jnp.asarray(each)) for each in x])
    white = np.linalg.solve(np.linalg.cholesky(covariance.astype(float)), y[..., None])
    assert abs(np.mean(white**2) - 1) < 5 * np.sqrt(2 / white.size)


@pytest.mark.slow
def test_no_prediction_is_better_than_the_process_itself():
    """Its intervals hold what they say; knowing less of the covariance costs nats."""
    mixed = ProcessCurves()
    episodes = draw_real_episodes(0, "test", mixed, 6, 40, 150)
    known = score_reals(KnownProcess(mixed), episodes)
    found = known.summary()
    assert abs(found["coverage50"] - 0.5) < 0.04 and abs(found["coverage90"] - 0.9) < 0.025
    for kind in Covariance:
        wrong = score_reals(KnownProcess(ProcessCurves((kind,))), episodes).summary()
        assert wrong["nll"] > found["nll"] + 0.02
    one = ProcessCurves((Covariance.PERIODIC,))
    told = draw_real_episodes(0, "test", one, 20, 40, 50)  # many points tell which covariance it is
    both = [score_reals(KnownProcess(each), told).summary()["nll"] for each in (one, mixed)]
    assert both[0] <= both[1] < both[0] + 0.05


@pytest.mark.long
def test_tables_are_one_task():
    splits = load_curves("uci:energy")
    assert splits.image_shape == (1, 1, 8) and splits.train.largest + len(splits.validation.x_query) == 692
    task = splits.test.sample(jax.random.key(0), 30, 20)
    rows = {tuple(row) for row in np.asarray(splits.test.x_query)}
    assert all(tuple(row) in rows for row in np.asarray(task.x_query)[:, 0, 0])
    assert not any(tuple(row) in rows for row in np.asarray(task.x_support)[:, 0, 0])


def test_rows_are_drawn_without_replacement():
    rows = Rows(jnp.arange(10.0)[:, None], 2 * jnp.arange(10.0))
    task = rows.sample(jax.random.key(0), 4, 6)
    y = np.concatenate([task.y_support, task.y_query])
    assert sorted(y) == list(2 * np.arange(10.0))
    assert (np.concatenate([task.x_support, task.x_query])[:, 0, 0, 0] * 2 == y).all()


ARGUMENTS = ["--dataset", "gp-curves:rbf", "--episodes", "24", "--backbone", "identity", *SMALL]
TIMED = {"seconds", "episodes_per_second"}


def rows_of(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMED} for row in rows]


@pytest.mark.slow
def test_a_run_on_curves(tmp_path, capsys):
    """Train, test and evaluate."""
    whole = tmp_path / "whole"
    assert meta_train.command_line([*ARGUMENTS, "--run-dir", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "\nTest on gp-curves:rbf: 8 tasks of 5 labelled points and 50 queries" in printed
    for row in ("trained  ", "untrained  ", "the process they are drawn from  "):
        assert f"\n{row}" in printed
    rows = rows_of(whole)
    assert [row["step"] for row in rows if "validation_nll" in row] == [0, 8, 16, 24]
    assert rows[-1]["loss"] < rows[1]["loss"]
    assert evaluate.command_line([str(whole), "--episodes", "10", "--json", str(tmp_path / "out.json")]) == 0
    metrics = json.loads((tmp_path / "out.json").read_text())["metrics"]
    assert metrics["episodes"] == 10 and f"{metrics['nll']:.4f}  " in capsys.readouterr().out
    assert metrics["intervals"]["crps"][0] < metrics["crps"] < metrics["intervals"]["crps"][1]
    assert metrics["intervals"]["nll"][0] < metrics["nll"] < metrics["intervals"]["nll"][1]
    with pytest.raises(RunError, match=r"expected a run on classes in .*, got one on gp-curves:rbf"):
        load_class_run(whole)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_the_same_numbers(tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert meta_train.command_line([*ARGUMENTS, "--run-dir", str(whole)]) == 0
    interrupted_after(8, meta_train.parse([*ARGUMENTS, "--run-dir", str(half)]))
    assert rows_of(half)[-1]["step"] < 24
    assert meta_train.command_line(["--resume", "--run-dir", str(half)]) == 0
    assert rows_of(half) == rows_of(whole)


def interrupted_after(step, config):
    from fewshot.training import loop

    before = loop.Training._agreed
    loop.Training._agreed = lambda self, received: 2 if self.step >= step else before(self, received)
    try:
        assert meta_train.main(config)["interrupted"] == 2
    finally:
        loop.Training._agreed = before


@pytest.mark.long
@pytest.mark.parametrize(
    "words, message",
    [
        (["--dataset", "sinusoids", "--likelihood", "softmax"], "has real labels, got likelihood softmax"),
        (["--dataset", "glyphs", "--likelihood", "normal"], "glyphs has classes as labels, got likelihood normal"),
        (["--dataset", "sinusoids", "--learner", "prototypical"], "which prototypical does not fit"),
        (["--dataset", "glyphs", "--learner", "cnp"], "glyphs has classes as labels, which cnp does not fit"),
        (["--dataset", "sinusoids", "--way", "3"], "--way counts classes"),
        (["--dataset", "sinusoids", "--inference", "cavi"], "cavi needs augmented latents"),
        (["--dataset", "gp-curves:cubic"], "expected a data set with real labels, got 'gp-curves:cubic'"),
        (["--dataset", "uci:energy", "--shot", "700"], "expected at most 623 points in a task"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capfd, words, message):
    path = tmp_path / "run"
    assert message in error_line(capfd, *words, "--run-dir", path)
    assert not path.exists()


class NearestPoint(Learner):
    """A learner of other people's: the label of the nearest point, with a deviation that it learns."""

    traits: ClassVar[Traits] = Traits(trains_on=TrainsOn.EPISODES, real_labels=True)

    def __init__(self, backbone, *, rngs=None):
        self.backbone, self.log_deviation = backbone, nnx.Param(jnp.zeros(()))

    @property
    def image_shape(self):
        return self.backbone.image_shape

    def embed(self, images):
        return images.reshape(len(images), -1)

    def fit(self, key, support, y, classes, mask=None):
        return (support, y), jnp.asarray(Code.OK)

    def predict(self, key, state, query):
        nearest = jnp.argmin(jnp.sum((query[:, None] - state[0]) ** 2, -1), 1)
        return predicted(dist.Normal(state[1][nearest], jnp.exp(self.log_deviation[...])))

    def loss(self, keys, tasks, for_each):
        def one(key, task):
            found = solve(self, key, self.embed(task.x_support), task.y_support, self.embed(task.x_query), 1)
            return jnp.sum(found.distribution.log_prob(task.y_query))

        from fewshot.inference.outer.loss import Outcome

        return Outcome(jnp.mean(for_each(one)(keys, tasks)), tasks.y_query.shape[1], {})


@pytest.mark.long
def test_a_learner_of_other_people_trains_on_real_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(learners.LEARNERS, "nearest-point", NearestPoint)
    config = configured(
        dataset="sinusoids",
        learner="nearest-point",
        backbone="identity",
        episodes=30,
        run_dir=str(tmp_path / "run"),
        settings={f"trainer.{name}": value for name, value in SETTINGS.items()} | {"trainer.learning_rate": 0.05},
    )
    found = meta_train.main(config)["test"]
    assert found["trained"]["nll"] < found["untrained"]["nll"]
    assert evaluate.command_line([str(tmp_path / "run"), "--episodes", "8"]) == 0
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trained ")]
    assert len(again) == 2 and again[0].split() == again[1].split()
