"""Learners through the command lines: trained, tested, evaluated and used, each by its name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot
from test_real_labels import interrupted_after, rows_of

from fewshot.learners import LEARNERS, TrainsOn
from fewshot.learners.adapted import AdaptedLearner
from fewshot.learners.base import LatentLearner
from fewshot.runners import evaluate, meta_train, predict
from fewshot.tasks import sample_task
from fewshot.tasks.images import load_labelled, load_unlabelled, whole
from fewshot.training import run_directory
from fewshot.training.configuration import RunConfig
from fewshot.training.data import load_splits
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run, load_run

SETTINGS = tiny_omniglot.SETTINGS | {"trainer.learning_rate": 0.01}
FEW = {f"trainer.{name}_episodes": 3 for name in ("validation", "temperature", "test")}


def trained(learner, data, path, backbone="mlp", episodes=6, **settings):
    flags = tiny_omniglot.FLAGS | {"settings": SETTINGS | settings, "episodes": episodes, "backbone": backbone}
    return meta_train.main(RunConfig(**flags, learner=learner, run_dir=str(path), data_root=data))


@pytest.fixture(scope="module")
def prototypical(tiny_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("prototypical") / "run"
    return path, trained("prototypical", tiny_data, path, backbone="conv4", episodes=12)


@pytest.mark.long
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


def written(way, data, folder):
    """A task of test classes, and the files of its labelled images and of its queries."""
    test = load_splits("omniglot", data).test
    task = jax.device_get(jax.jit(lambda key: sample_task(key, test, way=way, shot=2, query=3))(jax.random.key(0)))
    files = [str(folder / f"{part}_{way}.npz") for part in ("support", "query")]
    np.savez(files[0], images=task.x_support, labels=[f"class {y}" for y in task.y_support])
    np.savez(files[1], images=task.x_query)
    return task, files


@pytest.mark.long
def test_a_trained_learner_predicts_a_users_images(prototypical, tiny_data, tmp_path):
    """Of more classes than it was trained with, as many as there are images of each."""
    path, _ = prototypical
    task, files = written(4, tiny_data, tmp_path)
    found = predict.main(predict.PredictionConfig(str(path), files[0], (files[1],), temperature=1.0))
    learner = load_run(path).learner
    support, query = (
        load_labelled(files[0], (16, 16, 1), whole).pixels,
        load_unlabelled(files[1], (16, 16, 1), whole),
    )
    means = np.stack([np.asarray(learner.embed(jnp.asarray(support[task.y_support == k]))).mean(0) for k in range(4)])
    logits = -((np.asarray(learner.embed(jnp.asarray(query.pixels)))[:, None] - means) ** 2).sum(-1)
    expected = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(found.probabilities, expected / expected.sum(1, keepdims=True), atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("learner", ["feature-transfer", "first-order-maml", "nearest-mean", "logistic-regression"])
def test_other_ways_to_train_end_with_a_table(learner, tiny_data, tmp_path, capsys):
    """On batches of images, on images that a task adapts to, and on nothing; the run is read back."""
    learns = learner not in ("nearest-mean", "logistic-regression")
    steps = {"episodes": 2} if learns else {}
    result = trained(learner, tiny_data, tmp_path / "run", **{"episodes": 0, **steps}, **FEW, **{"backbone.width": 8})
    row = "trained" if learns else "not trained"
    assert result["failures"] == {} and 0 <= result["test"][row]["accuracy"] <= 1
    assert (f"{learner} learns nothing, so no step is taken" in capsys.readouterr().out) is not learns
    run = load_run(tmp_path / "run")
    assert run.config.learner == learner and np.isfinite(run.temperature)
    classes = run_directory.load(tmp_path / "run").config["training_classes"]
    if learner == "feature-transfer":
        assert run.learner.head["weights"][...].shape == (classes, 8)


@pytest.mark.long
def test_a_learner_of_fixed_ways_refuses_others(tiny_data, tmp_path):
    trained("maml", tiny_data, tmp_path / "run", episodes=1, **FEW, **{"learner.inner_steps": 1, "backbone.width": 8})
    assert load_run(tmp_path / "run").learner.inner_steps == 1
    with pytest.raises(ConfigError, match="maml tells 3 classes apart, got tasks of 4"):
        evaluate.main(evaluate.EvaluationConfig(str(tmp_path / "run"), way=4, episodes=3, data_root=tiny_data))


def refusal(command_line, words, capfd):
    """The one line, after warnings, that a command ends with when it refuses."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        command_line(words)
    *before, printed = capfd.readouterr().err.splitlines()
    assert exit_info.value.code == 2 and printed.startswith("error: ")
    assert all(line.startswith("warning: ") for line in before)
    return printed


# Each is like another that is asked after every change; `make slow` asks these too.
ALIKE = {"relation", "matching", "baseline++", "first-order-maml", "inductive-maml", "bayesian-maml", "chaser", "abml"}
ALIKE |= {"nearest-mean", "logistic-regression"}
CLASSIFIERS = [name for name, made in LEARNERS.items() if made.traits.class_labels]


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CLASSIFIERS])
def small_run(request, tiny_data, tmp_path, capfd):
    """A run of each learner of two steps, stopped after the first and resumed; of no step where it learns nothing."""
    name, path = request.param, tmp_path / "run"
    settings = FEW | {"backbone.width": 4, "trainer.log_every": 1, "trainer.validate_every": 1}
    settings |= {"learner.inner_steps": 1} if issubclass(LEARNERS[name], AdaptedLearner) else {}
    flags = ["--learner", name, "--dataset", "omniglot", "--backbone", "mlp", "--way", "3", "--query", "3"]
    where = ["--run-dir", str(path), "--data-root", tiny_data]
    words = [*flags, "--set", *(f"{setting}={value}" for setting, value in settings.items()), *where]
    if LEARNERS[name].traits.trains_on is TrainsOn.NOTHING:
        assert meta_train.command_line(words) == 0 and not (path / "metrics.jsonl").exists()
    else:
        interrupted_after(1, meta_train.parse([*words, "--episodes", "2"]))
        assert [row["step"] for row in rows_of(path)] == [0, 1]
        assert meta_train.command_line(["--resume", *where]) == 0
        assert [row["step"] for row in rows_of(path)] == [0, 1, 2]
        assert "resumed after step 1 of 2" in capfd.readouterr().out
    return load_run(path), str(path)


@pytest.mark.long
def test_every_learner_passes_every_command(small_run, tiny_data, tmp_path, capfd):
    """Trained, evaluated with every flag that it has a use for, and asked about a user's images."""
    run, path = small_run
    name, learner, where = run.config.learner, run.learner, ["--data-root", tiny_data]
    evaluated, output = [path, *where, "--episodes", "6", "--query", "3"], tmp_path / "metrics.json"
    files = ["--json", str(output), "--report", str(tmp_path / "report.html")]
    asked = ["--calibrate", "--corruption", "gaussian-noise:3", "--out-of-episode"]
    assert evaluate.command_line([*evaluated, *asked, *files]) == 0
    metrics = json.loads(output.read_text())
    others = metrics["out_of_episode"]
    assert metrics["failures"] == others.pop("failures") == {} and name in (tmp_path / "report.html").read_text()
    assert others.keys() >= {"probability", "entropy"} and all(0 <= one["auroc"] <= 1 for one in others.values())
    assert metrics["calibrated"]["temperature"] > 0 and len(metrics["severities"]) == 6
    assert ("latent_mean" in others) == isinstance(learner, LatentLearner)
    if not isinstance(learner, LatentLearner):
        printed = refusal(evaluate.command_line, [*evaluated, "--papers-calibration"], capfd)
        assert f"divides latent functions, which {name} has not" in printed

    def asking(way):
        support, query = written(way, tiny_data, tmp_path)[1]
        return [path, "--support", support, "--query", query, "--temperature", "1", *where]

    found = predict.main(predict.parse(asking(learner.ways or 4))).probabilities
    assert found.shape == (3 * (learner.ways or 4), learner.ways or 4)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-5)
    if learner.ways:
        assert "expected 3 classes, which" in refusal(predict.command_line, asking(4), capfd)
