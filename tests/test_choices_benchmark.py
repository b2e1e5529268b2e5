"""benchmarks/choices.py on tiny data: what it writes, that it sees no test class, and that it trains nothing twice."""

import json

import numpy as np
import pytest
from conftest import REPOSITORY, load_benchmark
from tiny_omniglot import SETTINGS

from fewshot.evaluation import metrics, scoring
from fewshot.evaluation.episodes import Shape
from fewshot.tasks import flat_images
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.data import load_splits
from fewshot.training.run import load_run


@pytest.fixture(scope="module")
def choices():
    return load_benchmark("choices")


def test_no_split_holds_a_test_class(choices, tiny_data):
    splits = load_splits("omniglot", tiny_data)
    seen = choices.without_test(splits)
    for name in ("train", "validation", "test"):
        own = splits.validation if name == "test" else getattr(splits, name)
        np.testing.assert_array_equal(flat_images(getattr(seen, name)), flat_images(own))
    shown = {label for names in seen.class_names.values() for label in names}
    assert shown.isdisjoint(splits.class_names["test"])


def test_a_row_is_compared_with_the_first_on_the_same_episodes(choices):
    """Classes that do not differ, 0.1 nats less in every episode: no doubt about it."""
    rng = np.random.default_rng(0)
    classes = np.argsort(rng.uniform(size=(30, 9)), axis=1)[:, :3]
    nll = rng.uniform(0.3, 0.8, size=30)
    common = {"classes": classes, "accuracy": 0.9, "ece": 0.1, "failures": 0, "seconds": 3.0}
    first = [{"episodes": nll, "nll": nll.mean(), **common}]
    own = [{"episodes": nll - 0.1, "nll": nll.mean() - 0.1, **common}]
    row = choices.row_of("handwriting", own, first)
    assert row["gain"] == pytest.approx(0.1) and row["nll"] == pytest.approx(nll.mean() - 0.1)
    np.testing.assert_allclose(row["gain_over_classes"], [0.1, 0.1])
    assert choices.cells(row)[3:5] == ["+0.100", "+0.100 to +0.100"]
    assert row["ranges"]["rotation"] == 15.0 and "ranges" not in choices.row_of(0.5, own, first)


def test_a_run_has_one_name_whether_its_values_were_given_or_chosen(choices):
    def named(*words):
        arguments = choices.parse([*words, "--out", "out"])
        return choices.digest(resolve(choices.configuration(arguments, arguments.values[0], 0)))

    assert named("inner_steps", "3") == named("inference", "cvi") == named("kernel.prior_scale", "30.0")
    assert named("kernel.prior_scale", "30") == named("kernel.prior_scale", "30.0")
    others = [named("inner_steps", "10"), named("inference", "laplace"), named("inference.rho", "0.5")]
    others += [named("inference", "cvi", "--set", "likelihood=one-vs-each"), named("inference", "cvi", "--shot", "5")]
    assert len({named("inner_steps", "3"), *others}) == 6


def test_names_of_records_tell_questions_apart(choices):
    besides = ["likelihood=one-vs-each", "trainer.log_every=2", "backbone.width=4"]
    arguments = choices.parse(["inference", "cvi", "--set", *besides, "--out", "out"])
    assert choices.record_name(arguments) == "omniglot-inference-one-vs-each-width4"
    assert choices.asked_words(arguments)[-6:] == ["--out", "DIR", "--set", *besides]
    assert choices.record_name(choices.parse(["kernel.prior_scale", "3", "--out", "out"])) == "omniglot-prior-scale"


@pytest.mark.slow
def test_the_record_says_what_validation_episodes_say(choices, tiny_data, tmp_path, monkeypatch, capsys):
    words = ["choices.py", "trainer.augment", "none", "handwriting", "--dataset", "omniglot", "--way", "3"]
    words += ["--episodes", "8", "--test-episodes", "15"]
    words += ["--seeds", "1", "--data-root", tiny_data, "--out", str(tmp_path / "out")]
    words += ["--set", *(f"{name}={value}" for name, value in SETTINGS.items())]
    monkeypatch.setattr("sys.argv", words)
    choices.main()
    written = tmp_path / "out" / "omniglot-augment-width4"
    record = json.loads(written.with_suffix(".json").read_text())
    assert [row["value"] for row in record["rows"]] == ["none", "handwriting"]
    assert record["rows"][0]["gain"] == 0
    assert record["chosen"] == min(record["rows"], key=lambda row: row["nll"])["value"]
    validation = load_splits("omniglot", tiny_data).validation
    for row in record["rows"]:
        model = load_run(tmp_path / "out" / "runs" / row["runs"][0]["folder"])
        assert model.config.trainer.augment == row["value"]
        episodes = choices.validation_episodes(validation, Shape(3, 1, 15), 15)
        scores = scoring.score(model.learner, scoring.embed(model.learner, validation), episodes)
        assert row["accuracy"] == pytest.approx(metrics.accuracy(scores.probabilities, scores.labels))
        assert row["nll"] == pytest.approx(scores.tempered(model.temperature).summary(1)["nll"])
        assert row["seconds"] > 0
    page = written.with_suffix(".md").read_text()
    assert f"Chosen: `{record['chosen']}`" in page and page.strip() in capsys.readouterr().out
    choices.main()  # nothing is trained again
    assert json.loads(written.with_suffix(".json").read_text()) == record


def test_the_page_of_comparisons_has_every_record_and_defaults_follow_them():
    page = (REPOSITORY / "docs" / "comparisons.md").read_text()
    paths = sorted((REPOSITORY / "docs" / "results" / "choices").glob("*.json"))
    assert len(paths) > 20
    for path in paths:
        record = json.loads(path.read_text())
        for row in record["rows"][1:]:
            numbers = [
                f"{number:.3f}".replace("-0.000", "0.000") for number in (row["gain"], *row["gain_over_classes"])
            ]
            assert "{} ({} to {})".format(*numbers) in page, path
        asked = {name: value for name, value in record["config"]["set"] if "." not in name}
        default = resolve(RunConfig(dataset=record["config"]["dataset"], **asked))
        if record["config"]["name"] == "objective" and asked.keys() <= {"likelihood", "inference"}:
            assert default.objective == record["chosen"], path
        if record["config"]["name"] == "inner_steps":
            gains = [row["value"] for row in record["rows"] if row["gain_over_classes"][0] > 0]
            assert default.inner_steps in (gains or [record["rows"][0]["value"]]), path
