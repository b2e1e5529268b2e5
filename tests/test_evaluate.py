"""evaluate.py and `load_run`: a trained run scored again, on other tasks, and from a notebook."""

import base64
import contextlib
import html
import io
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot
from test_meta_train import contents

from fewshot import tasks
from fewshot.evaluation import episode_lists, metrics, prediction_files, scoring, tables
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.evaluation.out_of_episode import DetectionScores, detect
from fewshot.evaluation.resampling import plain_interval
from fewshot.evaluation.robustness import corrupted
from fewshot.evaluation.text import format_percent
from fewshot.learners.task_temperature import SPREAD, task_temperature
from fewshot.runners import evaluate
from fewshot.runners.cli.evaluation import parse
from fewshot.tasks import make_dataset, sample_task
from fewshot.training import assessment, run_directory
from fewshot.training.assessment import EvaluationConfig, check
from fewshot.training.data import check_images, load_splits, subset_of_classes
from fewshot.training.run import export, load_run
from fewshot.training.run_directory import RunError

KEYS = {
    "accuracy",
    "accuracy_ci95",
    "accuracy_std_batches",
    "nll",
    "brier",
    "ece",
    "mce",
    "ece_floor",
    "episodes",
    "seconds",
    "failures",
    "config",
}


@pytest.fixture
def flags(tiny_run, tiny_data):
    return [str(tiny_run.path), "--data-root", tiny_data, "--episodes", "12"]


def error_line(capfd, *words):
    with pytest.raises(SystemExit) as exit_info:
        evaluate.command_line([str(word) for word in words])
    printed = capfd.readouterr()
    assert exit_info.value.code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").removesuffix("\n")


@pytest.mark.long
def test_a_run_scores_as_at_the_end_of_its_training(flags, tiny_run, tmp_path, capfd):
    before = contents(tiny_run.path)
    assert evaluate.command_line([*flags, "--json", str(tmp_path / "metrics.json")]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics.keys() >= KEYS and metrics["failures"] == {}
    trained, raw = list(tiny_run.result["test"].values())[:2]
    assert {name: metrics[name] for name in trained} == trained
    assert {name: metrics["raw"][name] for name in raw} == raw
    assert metrics["temperature"] == tiny_run.result["temperature"]
    assert metrics["config"]["kernel"] == "rbf" and metrics["config"]["evaluation"]["episodes"] == 12
    printed = capfd.readouterr().out
    assert "Test on 4 classes of omniglot never seen in training: 12 3-way 1-shot episodes with 15 queries" in printed
    assert "\nraw (temperature 1)  " in printed and "fitting" not in printed
    assert contents(tiny_run.path) == before


@pytest.fixture(scope="module")
def everything(tiny_run, tiny_data, tmp_path_factory):
    """All options at once: metrics, files, printed text. Two of the four test classes are left as other classes."""
    folder = tmp_path_factory.mktemp("evaluation")
    config = EvaluationConfig(
        str(tiny_run.path),
        way=2,
        shot=2,
        episodes=12,
        batches=2,
        seed=5,
        calibrate=True,
        papers_calibration=True,
        corruption="gaussian-noise:3",
        out_of_episode=True,
        report=str(folder / "report.html"),
        json=str(folder / "metrics.json"),
        episodes_file=str(folder / "episodes.npz"),
        predictions_file=str(folder / "predictions.npz"),
        data_root=tiny_data,
    )
    before, printed = contents(tiny_run.path), io.StringIO()
    with contextlib.redirect_stdout(printed):
        metrics = evaluate.main(config)
    assert contents(tiny_run.path) == before
    return SimpleNamespace(metrics=metrics, folder=folder, printed=printed.getvalue(), config=config)


def test_another_way_and_shot_get_their_own_temperature(everything, tiny_run):
    first = "fitting the temperature for 2-way 2-shot on training classes of the run\n"
    assert everything.printed.startswith(first)
    assert "12 2-way 2-shot episodes with 15 queries a class" in everything.printed
    assert everything.metrics["temperature"] != tiny_run.result["temperature"]


def test_raw_and_calibrated_are_always_together(everything):
    rows = ["at its temperature", "raw (temperature 1)", "calibrated on validation classes", "papers' two temperatures"]
    assert [everything.printed.count(f"\n{row}") for row in rows] == [1, 1, 2, 2]  # the last two with a note
    metrics = everything.metrics
    assert json.loads((everything.folder / "metrics.json").read_text()) == json.loads(json.dumps(metrics))
    for row in (metrics["raw"], metrics["calibrated"], metrics["papers_calibration"]):
        assert row.keys() >= KEYS - {"seconds", "failures", "config"}
        assert row["intervals"].keys() == {"accuracy", "nll", "brier", "ece", "ece_debiased"}
        assert row["intervals"]["ece"] is None and 0 <= row["intervals"]["ece_debiased"][0] <= 1
    assert 0 < metrics["calibrated"]["temperature"] != metrics["temperature"]
    assert metrics["papers_calibration"].keys() >= {"latent_temperature", "predictive_temperature", "validation_ece"}
    assert metrics["calibrated"]["accuracy"] == metrics["raw"]["accuracy"]


def test_the_rule_of_batch_norms_is_said_everywhere(everything):
    said = "Batch norms use the running statistics of training, so no answer depends on the other queries (inductive)."
    assert f"\n{said}\n" in everything.printed
    assert said in (everything.folder / "report.html").read_text()
    assert everything.metrics["batch_norm"] == "inductive"


def test_rules_that_learn_nothing_are_scored_on_the_same_features(everything):
    """By hand: the nearest direction of a class mean of directions, and the nearest labelled image."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 8)
    dataset = make_dataset(np.zeros((32, 1, 1, 1), np.float32), labels)
    features = rng.normal(size=(4, 6))[labels] + 1.2 * rng.normal(size=(32, 6))
    episodes = draw_episodes(0, "test", dataset, Shape(3, 2, 4), 25)
    found = assessment._same_features(jnp.asarray(features, jnp.float32), episodes)
    right = {"class means": [], "nearest neighbour": []}
    drawn = jax.device_get(episodes.indices)
    for support, y, query, wanted in zip(drawn.x_support, drawn.y_support, drawn.x_query, drawn.y_query, strict=True):
        unit = features / np.linalg.norm(features, axis=1, keepdims=True)
        means = np.stack([unit[support][y == k].mean(0) for k in range(3)])
        nearest = (unit[query] @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T).argmax(1)
        right["class means"].append((nearest == wanted).mean())
        distances = np.linalg.norm(features[query][:, None] - features[support], axis=2)
        right["nearest neighbour"].append((y[distances.argmin(1)] == wanted).mean())
    for name, shares in right.items():
        assert found[name]["accuracy"] == pytest.approx(np.mean(shares))
    assert assessment._same_features(jnp.zeros((32, 2, 2, 1)), episodes) == {}  # a learner that adapts its network
    assert everything.metrics["same_features"].keys() == right.keys()
    row = everything.metrics["same_features"]["class means"]
    assert f"class means {format_percent(row['accuracy'], row['accuracy_ci95'])}, nearest" in everything.printed


def test_the_calibrated_temperature_is_that_of_validation_episodes(everything, tiny_run, tiny_data):
    model, validation = load_run(tiny_run.path), load_splits("omniglot", tiny_data).validation
    episodes = draw_episodes(0, "validation", validation, Shape(2, 2, 15), 12)
    learner = model.learner
    scores = scoring.score(learner, scoring.embed(learner, validation), episodes)
    assert everything.metrics["calibrated"]["temperature"] == fit_temperature(scores.probabilities, scores.labels)


def test_queries_of_other_classes_are_scored(everything):
    found = everything.metrics["out_of_episode"]
    assert "Queries of 2 classes outside the episode told from its own 2" in everything.printed
    assert found.pop("failures") == {}
    assert found.keys() == set(DetectionScores._fields)
    for row in found.values():
        low, high = row["auroc_interval"]
        assert 0 < low < row["auroc"] < high
    assert "AUROC per episode" in everything.printed


def test_corruption_changes_support_and_query_and_its_severities_are_reported(everything, tiny_run, tiny_data):
    metrics = everything.metrics
    assert metrics["corruption"] == {"name": "gaussian-noise", "severity": 3}
    assert "images corrupted by gaussian-noise:3" in everything.printed
    assert list(metrics["severities"]) == [0, 1, 2, 3, 4, 5]
    assert metrics["severities"][3]["brier"] == pytest.approx(metrics["brier"], rel=1e-5)
    assert metrics["severities"][0]["brier"] != metrics["severities"][3]["brier"]
    clean = load_splits("omniglot", tiny_data).test
    noisy = corrupted(everything.config.corruption, everything.config.seed, clean)
    assert (np.asarray(noisy.images) != np.asarray(clean.images)).any(axis=(1, 2, 3)).all()


def test_features_are_not_corrupted(everything, tiny_data):
    clean = load_splits("omniglot", tiny_data).test
    features = clean._replace(images=clean.images.astype(np.float32) / 255)
    with pytest.raises(tasks.DataError, match="expected images as bytes for --corruption, got float32"):
        corrupted(everything.config.corruption, everything.config.seed, features)


def test_the_report_holds_everything_in_one_file(everything):
    text = (everything.folder / "report.html").read_text()
    page = ParsedPage(text)
    assert not page.loaded  # nothing from elsewhere
    titles = ["Scores", "Calibration", "Confidence", "Out-of-episode detection", "Robustness", "Episodes", "Training"]
    assert page.titles == [*titles, "Command, versions and configuration of the run"]
    assert len(page.images) == 10 and all(image.startswith(b"\x89PNG") for image in page.images)
    assert everything.config.command() in html.unescape(text)
    assert (
        "--way 2 --shot 2 --seed 5 --calibrate --papers-calibration --corruption gaussian-noise:3"
        in everything.config.command()
    )


class ParsedPage(HTMLParser):
    """What an HTML file shows, and what a browser would load for it."""

    def __init__(self, text):
        super().__init__()
        self.titles, self.images, self.loaded, self.inside = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.inside = tag
        for name, value in attrs:
            if name in ("src", "href", "data", "srcset", "action"):
                kind, _, data = value.partition(",")
                if kind == "data:image/png;base64":
                    self.images.append(base64.b64decode(data, validate=True))
                else:
                    self.loaded.append(value)
        if tag in ("script", "link", "iframe", "object"):
            self.loaded.append(tag)

    def handle_data(self, data):
        if self.inside == "h2":
            self.titles.append(data)
        if self.inside == "style" and ("url(" in data or "@import" in data):
            self.loaded.append(data)
        self.inside = None


@pytest.mark.long
def test_an_episode_file_gives_the_same_table_again(flags, tmp_path, capfd):
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    episodes = str(tmp_path / "episodes.npz")
    assert evaluate.command_line([*flags, "--json", str(first), "--episodes-file", episodes, "--seed", "3"]) == 0
    before = capfd.readouterr().out
    assert evaluate.command_line([*flags[:3], "--json", str(again), "--from-episodes", episodes, "--seed", "3"]) == 0
    assert capfd.readouterr().out.split("Solved")[0] == before.split("Solved")[0]
    one, two = (json.loads(path.read_text()) for path in (first, again))
    assert {name: one[name] for name in one if name not in ("seconds", "config")} == {
        name: two[name] for name in two if name not in ("seconds", "config")
    }
    with np.load(episodes) as held:
        assert held["x_support"].shape == (12, 3) and held["x_query"].shape == (12, 45)
        assert held["accuracy"].mean() == pytest.approx(one["accuracy"])
        assert held["nll"].mean() == pytest.approx(one["nll"]) and held["brier"].mean() == pytest.approx(one["brier"])


def test_an_episode_file_belongs_to_its_images(everything, flags, tmp_path, capfd):
    episodes = everything.folder / "episodes.npz"
    tiny_omniglot.write(tmp_path, size=16, images=18)
    message = error_line(capfd, flags[0], "--data-root", tmp_path, "--from-episodes", episodes)
    assert message.startswith("expected the images that the file of episodes was written for, got others")
    for flag in ("--way", "--episodes"):
        refused = error_line(capfd, *flags[:3], "--from-episodes", episodes, flag, "2")
        assert refused.startswith("--from-episodes decides")
    refused = error_line(capfd, *flags[:3], "--from-episodes", episodes, "--batches", "13")
    assert refused.startswith("--batches must lie between 1 and the 12 episodes, got 13")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(episodes.read_bytes()[:200])
    for path in (damaged, tmp_path / "none.npz"):
        assert error_line(capfd, *flags[:3], "--from-episodes", path).startswith(
            "expected a file of episodes written by"
        )


def test_kept_predictions_say_of_which_images_and_temperature_they_are(everything):
    file = everything.folder / "predictions.npz"
    p, labels, classes = prediction_files.read(file)
    listed = episode_lists.read(everything.folder / "episodes.npz")
    assert metrics.accuracy(p, labels) == everything.metrics["accuracy"] and classes.shape == (12, 2)
    np.testing.assert_array_equal(labels, listed.arrays["y_query"])
    expected = (listed.checksum, everything.metrics["temperature"], 2, "gaussian-noise:3")
    assert prediction_files.read_origin(file) == expected


def test_one_episode_has_scores_and_no_intervals():
    """Tables and files hold no nan, which JSON does not know; the number of batches need not be named."""
    check(parse(["run", "--episodes", "1"]))
    probabilities, labels = np.array([[[0.9, 0.1], [0.2, 0.8]]]), np.array([[0, 1]])
    scores = scoring.Scores(probabilities, labels, np.zeros(1, int), 0.0)
    row = scoring.summary_with_intervals(scores, batches=0)
    assert row.metrics["accuracy_std_batches"] == 0 and set(row.intervals.values()) == {None}
    assert scores.accuracies() == {"accuracy": 1.0, "accuracy_ci95": None}
    json.dumps(row.to_json(), allow_nan=False)
    others = DetectionScores(*(np.array([[0.1, 0.2]]) for _ in DetectionScores._fields))
    found = detect(np.random.default_rng(0), others, others._replace(entropy=np.array([[0.5, 0.15]])))
    assert tables.detection_cells(found["entropy"]) == ["0.7500", "-"]
    assert plain_interval(found["entropy"].interval) is None


@pytest.mark.long
def test_each_task_can_learn_its_temperature(tiny_run, tiny_data, capsys):
    """As the functions that it calls, episode by episode; accuracy is hardly touched."""
    found = evaluate.main(
        EvaluationConfig(str(tiny_run.path), episodes=6, shot=3, adapt=True, seed=1, data_root=tiny_data)
    )
    printed = capsys.readouterr().out
    adapted = found["adapted"]
    assert "\nadapted to each task " in printed
    assert f"adapted to each task: temperature {adapted['mean_temperature']:.3f} on average" in printed
    learner, test = load_run(tiny_run.path).learner, load_splits("omniglot", tiny_data).test
    episodes = draw_episodes(1, "test", test, Shape(3, 3, 15), 6)
    features, both = scoring.embed(learner, test), (found["temperature"], adapted["temperature_of_fewer"])
    each = scoring.task_temperatures(learner, features, episodes, *both, block=4)
    assert both[0] != both[1] and np.shape(each.weights)[0] == 6
    for number in range(6):
        one = jax.tree.map(lambda values, number=number: values[number], episodes.indices)
        alone = task_temperature(episodes.keys[number], learner, features[one.x_support], one.y_support, 3, *both)
        np.testing.assert_allclose(each.weights[number], alone.weights, rtol=1e-3, atol=1e-5)
    wide = scoring.task_temperatures(learner, features, episodes, *both, spread=2 * SPREAD)
    np.testing.assert_allclose(wide.temperatures[:, -1] / each.temperatures[:, -1], np.exp(5 * SPREAD), rtol=1e-4)
    expected = scoring.score(learner, features, episodes).tempered(each)
    assert adapted["nll"] == pytest.approx(expected.summary()["nll"], rel=1e-4)
    assert adapted["mean_temperature"] == pytest.approx(float(each.mean.mean()), rel=1e-5)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--dataset", "foo"], "expected the name of a data set, got 'foo'"),
        (["--way", "5"], "expected at least 5 classes for 5-way tasks, got 4"),
        (["--adapt"], "--adapt leaves labelled images out, so it needs two of every class, got 1-shot tasks"),
        (["--query", "20"], "expected at least 21 images in every class"),
        (["--shot", "20"], "expected at least 21 images in every class"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0, got '-1'"),
        (["--batches", "13"], "--batches must lie between 1 and the 12 episodes, got 13"),
        (["--data-root", "/no/such/folder"], "expected the data root to be a folder"),
        (["--json", "/no/such/folder/m.json"], "expected --json to be in a folder that exists, got /no/such"),
        (
            ["--report", "/no/such/folder/r.html"],
            "expected --report to be in a folder that exists, got /no/such",
        ),
        (["--episodes-file", "/"], "expected --episodes-file to be a file, got the folder /;"),
        (["--corruption", "snow:3"], "expected the name of a corruption, got 'snow'"),
        (["--corruption", "gaussian-noise:6"], "expected a severity from 1 to 5, got 6"),
        (["--out-of-episode", "--way", "4"], "--out-of-episode needs test classes that an episode does not show"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(more, message, flags, capfd):
    assert error_line(capfd, *flags, *more).startswith(message)


def test_calibration_needs_tasks_of_validation_classes(tiny_run, tiny_data):
    model, splits = load_run(tiny_run.path), load_splits("omniglot", tiny_data)
    few = splits._replace(validation=subset_of_classes(0, splits.validation, 2))
    with pytest.raises(
        tasks.DataError, match="no tasks of validation classes to calibrate on: expected at least 3 classes"
    ):
        assessment._validation(model, few, 3, 1, EvaluationConfig(str(tiny_run.path)))


@pytest.mark.long
def test_other_classes_are_counted_as_they_are_and_of_other_data_sets_nothing_is_claimed(flags, capsys, monkeypatch):
    assert evaluate.command_line([*flags, "--out-of-episode"]) == 0
    assert "Queries of 1 class outside the episode told from its own 3" in capsys.readouterr().out
    heading = tables.heading("emnist", "omniglot", Shape(3, 1, 15), 12, 4)
    assert "Test on 4 classes of emnist: 12 3-way" in heading


def test_a_temperature_that_was_never_fitted_is_not_called_fitted():
    shape = Shape(5, 1, 15)
    assert tables.temperature_note(1.0, shape, held_out=False).startswith("No temperature: validation found no weights")
    assert tables.temperature_note(0.5, shape, held_out=False).startswith(
        "Temperature 0.500, fitted on queries of 5-way"
    )


def test_a_data_set_of_other_images_is_refused(flags, tmp_path, capfd):
    tiny_omniglot.write(tmp_path, size=12)
    message = error_line(capfd, flags[0], "--data-root", tmp_path)
    assert message.startswith("expected images of shape (16, 16, 1), as ")
    assert "got (12, 12, 1)" in message


def test_missing_and_damaged_runs_are_named(tiny_run, tmp_path, capfd):
    assert error_line(capfd, tmp_path / "none").startswith(f"no run in {tmp_path / 'none'}")
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    weights = copy / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert error_line(capfd, copy).startswith(f"damaged weights: {weights}")
    weights.unlink()
    assert error_line(capfd, copy).startswith(f"no exported weights in {copy}")


def test_weights_of_another_configuration_are_refused(tiny_run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    config = json.loads((copy / "config.json").read_text())
    config["settings"]["backbone.width"] = 5
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunError, match=r"does not fit its config\.json \(at learner\.deep_kernel\.backbone"):
        load_run(copy)


@pytest.mark.long
def test_a_loaded_run_takes_bytes_and_numbers(tiny_run, tiny_data):
    task = sample_task(jax.random.key(0), load_splits("omniglot", tiny_data).test, way=4, shot=1, query=5)
    model = load_run(tiny_run.path).learner
    prior = model.prior(task.x_support, classes=4)
    assert prior.mean.shape == (4, 4) and model.prior(task.x_support).mean.shape == (3, 4)
    as_numbers = np.asarray(task.x_support) / np.float32(255)
    np.testing.assert_allclose(model.prior(as_numbers).covariance, prior.covariance, rtol=1e-5)
    assert model.query(task.x_support, task.x_query, classes=4).cross.shape == (20, 4)


def test_a_loaded_run_refuses_nan_pixels(tiny_run):
    model = load_run(tiny_run.path).learner
    images = np.full((2, 16, 16, 1), 0.5, np.float32)
    images[1, 3, 3] = np.nan
    for refused in (lambda: model.prior(images), lambda: model.query(images[:1], images)):
        with pytest.raises(ValueError, match=r"images within \[0, 1\], got values from nan to nan"):
            refused()
    with pytest.raises(tasks.DataError, match="got int64; convert them to uint8"):
        check_images(np.zeros((2, 16, 16, 1), np.int64), "the images")


def test_loading_finds_what_was_exported(tiny_run, tmp_path):
    model = load_run(tiny_run.path)
    before = run_directory.load(tiny_run.path).load_weights()
    directory = run_directory.create(tmp_path / "again", run_directory.load(tiny_run.path).config)
    export(directory, model, int(before["step"]))
    after = directory.load_weights()
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True))


@pytest.mark.long
def test_help_works_from_any_folder(tmp_path):
    script = Path(__file__).resolve().parents[1] / "runners" / "evaluate.py"
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "--calibrate" in done.stdout and done.stderr == ""
