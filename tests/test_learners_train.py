"""Learners through the command lines: trained, tested, evaluated and used, each by its name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot

from fewshot.runners import evaluate, meta_train, predict
from fewshot.tasks import sample_task
from fewshot.tasks.images import load_labelled, load_unlabelled, whole
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig
from fewshot.training.data import load_splits
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run, load_run

SETTINGS = tiny_omniglot.SETTINGS | {"trainer.learning_rate": 0.01}


def trained(learner, data, path, backbone="mlp", episodes=6, **settings):
    flags = tiny_omniglot.FLAGS | {"settings": SETTINGS | settings, "episodes": episodes, "backbone": backbone}
    return meta_train.main(RunConfig(**flags, learner=learner, run_dir=str(path), data_root=data))


@pytest.fixture(scope="module")
def prototypical(tiny_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("prototypical") / "run"
    return path, trained("prototypical", tiny_data, path, backbone="conv4", episodes=12)


def test_prototypical_networks_train(prototypical):
    path, result = prototypical
    records = run_directory.load(path).read_metrics()
    assert [record["step"] for record in records if "validation_accuracy" in record] == [0, 6, 12]
    assert all(np.isfinite(record["loss"]) for record in records[1:])
    assert result["failures"] == {} and 0.3 < result["test"]["trained"]["accuracy"] <= 1
    learner = load_run(path).learner
    assert type(learner).__name__ == "Prototypical" and learner.way == 3
    first = build_run(load_run(path).config, (16, 16, 1)).learner
    moved = learner.backbone.block0.kernel[...] - first.backbone.block0.kernel[...]
    assert np.abs(np.asarray(moved)).max() > 1e-3


@pytest.mark.long
def test_a_trained_learner_is_evaluated(prototypical, tiny_data):
    path, _ = prototypical
    flags = {"episodes": 12, "way": 4, "shot": 2, "adapt": True, "data_root": tiny_data}
    metrics = evaluate.main(evaluate.EvaluationConfig(str(path), **flags))
    assert metrics["failures"] == {} and 0.25 < metrics["accuracy"] <= 1
    assert metrics["nll"] < 5 and metrics["raw"]["accuracy"] == metrics["accuracy"]


@pytest.mark.long
def test_a_trained_learner_predicts_a_users_images(prototypical, tiny_data, tmp_path):
    """Of more classes than it was trained with, as many as there are images of each."""
    path, _ = prototypical
    test = load_splits("omniglot", tiny_data).test
    task = jax.device_get(jax.jit(lambda key: sample_task(key, test, way=4, shot=2, query=3))(jax.random.key(0)))
    np.savez(tmp_path / "support.npz", images=task.x_support, labels=[f"class {y}" for y in task.y_support])
    np.savez(tmp_path / "query.npz", images=task.x_query)
    files = str(tmp_path / "support.npz"), (str(tmp_path / "query.npz"),)
    found = predict.main(predict.PredictionConfig(str(path), *files, temperature=1.0))
    learner = load_run(path).learner
    support, query = (
        load_labelled(files[0], (16, 16, 1), whole).pixels,
        load_unlabelled(files[1][0], (16, 16, 1), whole),
    )
    means = np.stack([np.asarray(learner.embed(jnp.asarray(support[task.y_support == k]))).mean(0) for k in range(4)])
    logits = -((np.asarray(learner.embed(jnp.asarray(query.pixels)))[:, None] - means) ** 2).sum(-1)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(found.probabilities, expected / expected.sum(1, keepdims=True), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("learner", ["feature-transfer", "first-order-maml", "nearest-mean", "logistic-regression"])
def test_other_ways_to_train_end_with_a_table(learner, tiny_data, tmp_path):
    """On batches of images, on images that a task adapts to, and on nothing; the run is read back."""
    steps = {} if learner in ("nearest-mean", "logistic-regression") else {"episodes": 2}
    few = {"trainer.validation_episodes": 3, "trainer.temperature_episodes": 3, "trainer.test_episodes": 3}
    result = trained(learner, tiny_data, tmp_path / "run", **{"episodes": 0, **steps}, **few, **{"backbone.width": 8})
    assert result["failures"] == {} and 0 <= result["test"]["trained"]["accuracy"] <= 1
    run = load_run(tmp_path / "run")
    assert run.config.learner == learner and np.isfinite(run.temperature)
    classes = run_directory.load(tmp_path / "run").config["training_classes"]
    if learner == "feature-transfer":
        assert run.learner.head["weights"][...].shape == (classes, 8)


@pytest.mark.long
def test_a_learner_of_fixed_ways_refuses_others(tiny_data, tmp_path):
    few = {"trainer.validation_episodes": 3, "trainer.temperature_episodes": 3, "trainer.test_episodes": 3}
    trained("maml", tiny_data, tmp_path / "run", episodes=1, **few, **{"learner.inner_steps": 1, "backbone.width": 8})
    assert load_run(tmp_path / "run").learner.inner_steps == 1
    with pytest.raises(ConfigError, match="maml tells 3 classes apart, got tasks of 4"):
        evaluate.main(evaluate.EvaluationConfig(str(tmp_path / "run"), way=4, episodes=3, data_root=tiny_data))
