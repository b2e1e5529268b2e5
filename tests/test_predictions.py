"""What predict.py writes: CSV, JSON and the page of pictures; damaged pictures, names of weights, encoders."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from sklearn.base import clone

from fewshot import FewShotClassifier, classifier, heads, predicting, pretrained
from fewshot.evaluation.prediction_report import Predicted, csv_text, html_page, json_text, summary, table
from fewshot.models.networks import encoders
from fewshot.models.networks.pictures import FrozenEncoder, Preparation
from fewshot.predicting import load_model
from fewshot.pretrained import TemperatureTable, store
from fewshot.runners import predict
from fewshot.runners.cli.flags import check_outputs
from fewshot.suggestion import suggested
from fewshot.tasks import DataError
from fewshot.tasks.images import Images
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run
from fewshot.training.run_directory import RunError


@pytest.fixture
def found():
    return Predicted(
        names=["sure.png", "=1+1.png", "<b>odd</b>.png"],
        classes=["ash", "=elm"],
        counts=[2, 3],
        probabilities=np.array([[0.99, 0.01], [0.6, 0.4], [0.2, 0.8]]),
        unknown=np.array([0.0, 0.5, 0.96]),
        kept=np.array([True, False, True]),
        temperature=0.1,
        before=None,
        read_as="features",
        left_out=(23, 24),
    )


def test_the_csv_leaves_answers_open_and_computes_nothing(found):
    rows = list(csv.DictReader(csv_text(found).splitlines()))
    assert [row["answer"] for row in rows] == ["ash", "", "'=elm"]
    assert [row["unknown"] for row in rows] == ["0.000", "0.500", "0.960"]
    assert rows[1]["image"] == "'=1+1.png" and rows[2]["'=elm"] == "0.800000"
    unseen = csv_text(found._replace(unknown=None))
    assert [row["unknown"] for row in csv.DictReader(unseen.splitlines())] == [""] * 3


def test_the_json_says_the_same(found):
    read = json.loads(json_text(found))
    assert [one["answer"] for one in read["queries"]] == ["ash", None, "=elm"]
    assert read["queries"][0]["probabilities"] == {"ash": 0.99, "=elm": 0.01} and read["labelled"] == [2, 3]
    assert json.loads(json_text(found._replace(unknown=None)))["queries"][0]["unknown"] is None


def test_the_summary_expects_what_the_probabilities_say(found):
    known = found._replace(unknown=None, left_out=None)
    assert summary(known) == "2 of 3 answers kept, of which 89.5% are expected to be right"
    assert "no answer is certain enough" in summary(found._replace(kept=np.zeros(3, bool)))


def test_answers_that_are_kept_of_strange_pictures_are_counted(found):
    strange = found._replace(kept=np.ones(3, bool), left_out=(9, 10))
    assert summary(strange) == (
        "3 of 3 answers kept, of which 79.7% are expected to be right if all show your classes; 1 of them looks "
        "strange (unknown 0.9 or more)"
    )
    assert "2 of them look strange" in summary(strange._replace(unknown=np.array([0.89, 0.9, 1.0])))
    assert "strange" not in summary(strange._replace(kept=np.array([True, True, False])))


def test_it_says_how_labelled_pictures_are_answered_and_that_few_tell_little(found):
    """9 of 10 look less strange at most: a share of 0.9 needs nine."""
    images = Images(np.zeros((3, 8, 8, 3), np.uint8), found.names, [""] * 3)
    few, enough = found._replace(left_out=(5, 8)), found._replace(left_out=(7, 9))
    line = "5 of 8 labelled pictures answered right by the others (left out, one of each class at a time)"
    unknown = "unknown: share of these that look less strange than the query"
    assert table(few).endswith(f"\n{line}\n{unknown} (at most 0.89; 0.9 is strange)")
    assert table(enough).endswith(f"at a time)\n{unknown} (0.9 is strange)")
    assert f"<p>{line}. U{unknown[1:]} (at most 0.89; 0.9 is strange). Red: strange.</p>" in html_page(few, images)
    assert "at most" not in html_page(enough, images)
    assert json.loads(json_text(few))["left_out"] == {"right": 5, "of": 8}
    single = found._replace(unknown=None, left_out=None)
    assert json.loads(json_text(single))["left_out"] is None and "left out" not in table(single)
    assert "Orange" in html_page(single, images) and "Red" not in html_page(single, images)  # none can be


def test_what_to_label_next_is_named_where_it_was_asked_for(found):
    pixels = np.zeros((3, 8, 8, 3), np.uint8)
    images = Images(pixels, found.names, [""] * 3)
    asked = found._replace(to_label=[1, 2])
    assert "\nlabel next: =1+1.png, <b>odd</b>.png\n" in table(asked)
    assert json.loads(json_text(asked))["label_next"] == ["=1+1.png", "<b>odd</b>.png"]
    assert "<p>Label next: =1+1.png, &lt;b&gt;odd&lt;/b&gt;.png.</p>" in html_page(asked, images)
    assert "abel next" not in table(found) + html_page(found, images) and "label_next" not in json_text(found)


def test_the_page_shows_the_least_certain_first_and_loads_nothing(found, tmp_path):
    pixels = np.zeros((3, 8, 8, 3), np.uint8)
    page = html_page(found, Images(pixels, found.names, [""] * 3))
    assert page.index("=1+1.png") < page.index("odd") < page.index("sure.png")
    assert "<b>odd" not in page and page.count("data:image/jpeg;base64") == 3
    assert 'class="card left"' in page and 'class="card strange"' in page
    assert "http" not in page and "src=" in page and all(part.startswith('"data:') for part in page.split("src=")[1:])
    assert "<img" not in html_page(found, Images(np.zeros((3, 1, 1, 4), np.float32), found.names, [""] * 3))


SMALL = Preparation(side=8, short=8, mean=(0.0,) * 3, deviation=(1.0,) * 3)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """Red and green pictures, weights under a name that reads their mean colours."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    encoder = FrozenEncoder("colours", SMALL, 3, "colours-1", lambda pixels: pixels.mean((1, 2)) / 255, 2)
    monkeypatch.setitem(encoders.ENCODERS, "colours", lambda: encoder)
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path)
    monkeypatch.setattr(pretrained, "SPECIAL", {})
    monkeypatch.setattr(heads, "_pretrained", pretrained.load_pretrained)
    ship(tmp_path)
    for name, colour in {"red": (255, 0, 0), "green": (0, 255, 0)}.items():
        for number in range(2):
            path = tmp_path / "support" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (9, 9), tuple(min(255, value + 9 * number) for value in colour)).save(path)
    (tmp_path / "query").mkdir()
    Image.new("RGB", (9, 9), (250, 5, 5)).save(tmp_path / "query" / "a.png")
    return tmp_path


def ship(folder, **settings):
    chosen = {"likelihood": "gaussian", "kernel": "rbf", "backbone": "identity"}
    asked = RunConfig(dataset="embeddings:x", **chosen, settings=settings)
    known = TemperatureTable((2, 3), (1, 2), np.log([[0.5, 0.6], [0.7, 0.8]]))
    store(folder / "photographs.safetensors", build_run(resolve(asked), (1, 1, 3)), known, "colours")


def arguments(shop, *more):
    return ["--support", str(shop / "support"), "--query", str(shop / "query"), *more]


@pytest.mark.long
def test_pictures_to_answers_without_naming_a_run(shop, capsys, monkeypatch):
    passed: list[int] = []
    embed = predicting.embed
    for module in (predicting, classifier):
        monkeypatch.setattr(module, "embed", lambda learner, x: passed.append(len(x)) or embed(learner, x))
    (shop / "query" / "b.png").write_bytes(b"\x89PNG nothing")
    (shop / "support" / "red" / "c.png").write_bytes(b"")
    files = [shop / name for name in ("p.csv", "p.json", "p.html")]
    flags = ["--csv", str(files[0]), "--json", str(files[1]), "--report", str(files[2])]
    assert predict.command_line(arguments(shop, *flags, "--suggest", "1")) == 0
    printed, errors = capsys.readouterr()
    assert f"\nlabel next: {shop / 'query' / 'a.png'}\n" in printed
    assert "2 classes with 2 labelled images each, 1 query; read as 3 features of colours\n" in printed
    encoding = [line for line in errors.splitlines() if line.startswith("new pictures")]
    assert encoding == ["new pictures to encode: 4", "new pictures to encode: 1"]
    left_out = [line for line in errors.splitlines() if line not in encoding]
    assert sorted(line.split("got")[0].split("/")[-1].strip() for line in left_out) == ["b.png,", "c.png,"]
    assert passed == [4, 1]  # every picture once
    (row,) = csv.DictReader(files[0].read_text().splitlines())
    assert row["prediction"] == "red" and float(row["unknown"]) < 1 and files[1].exists() and files[2].exists()
    with pytest.raises(SystemExit):
        predict.command_line(arguments(shop, "--strict", "--csv", str(shop / "q.csv")))
    assert not (shop / "q.csv").exists() and "cannot be read" in capsys.readouterr().err


@pytest.mark.long
def test_queries_that_are_labelled_are_named_and_strange_ones_left_open_where_that_is_asked(shop, capsys):
    for name, red in {"a": 255, "b": 243, "c": 231}.items():  # five of each class with those that are there
        for kind, colour in {"red": (red, 3, 0), "green": (0, red, 3)}.items():
            Image.new("RGB", (9, 9), colour).save(shop / "support" / kind / f"{name}.png")
    Image.new("RGB", (9, 9), (0, 0, 255)).save(shop / "query" / "blue.png")
    shutil.copy(shop / "support" / "red" / "0.png", shop / "query" / "known.png")
    kept = predict.main(predict.parse(arguments(shop, "--keep-accuracy", "0.5")))
    known = f"queries that are labelled pictures too say nothing of new ones: {shop / 'query' / 'known.png'}"
    assert f"warning: {known}\n" in capsys.readouterr().err
    assert kept.left_out == (10, 10) and kept.kept.tolist() == [True, True, True]
    assert kept.strange.tolist() == [False, True, False]  # of a.png, blue.png and known.png
    left = predict.main(predict.parse(arguments(shop, "--keep-accuracy", "0.5", "--leave-strange")))
    assert left.kept.tolist() == [True, False, True] and "strange (unknown" not in capsys.readouterr().out
    np.testing.assert_array_equal(left.probabilities, kept.probabilities)
    for name in "abc":
        (shop / "support" / "red" / f"{name}.png").unlink()
    (shop / "support" / "red" / "1.png").unlink()
    few = "expected nine labelled pictures or more in classes of two or more with --leave-strange, got 5; label more"
    with pytest.raises(ConfigError, match=few):
        predict.main(predict.parse(arguments(shop, "--leave-strange")))


@pytest.mark.long
def test_what_to_label_next_is_what_the_estimator_says(shop, monkeypatch):
    asked = []
    monkeypatch.setattr(
        predicting, "suggested", lambda *given, **named: asked.append(named) or suggested(*given, **named)
    )
    for name, colour in {"b": (120, 140, 0), "c": (30, 200, 0), "d": (125, 130, 9), "e": (90, 90, 90)}.items():
        Image.new("RGB", (9, 9), colour).save(shop / "query" / f"{name}.png")
    Image.new("RGB", (9, 9), (200, 40, 0)).save(shop / "support" / "red" / "7.png")
    found = predicting.predict_folders("photographs", shop / "support", [shop / "query"], suggest=3)
    expected = found.classifier.suggest(predicting.estimator_input(found.query), 3).positions.tolist()
    assert found.answers.to_label == expected != sorted(expected)
    assert asked == [{"balanced": True}]


@pytest.mark.long
def test_labelled_pictures_that_are_given_again_count_once(shop, capsys):
    """Answers, the temperature and what looks unknown are those of each picture once."""
    query = ["--query", str(shop / "query")]
    alone = predict.main(predict.parse(arguments(shop, "--save", str(shop / "file"))))
    assert "warning" not in capsys.readouterr().err
    twice = predict.main(predict.parse(arguments(shop, "--add", str(shop / "support"))))
    assert twice.counts == alone.counts == [2, 2] and json_text(twice) == json_text(alone)
    green, red = shop / "support" / "green", shop / "support" / "red"
    pairs = f"{green / '0.png'}, {green / '1.png'}, {red / '0.png'}"
    counts = "warning: labelled pictures that are given again count once: "
    assert capsys.readouterr().err == f"{counts}{pairs}, and 1 more\n"
    again = predict.main(predict.parse([str(shop / "file"), *query, "--add", str(shop / "support")]))
    np.testing.assert_array_equal(again.probabilities, alone.probabilities)
    held = f"{counts}{green / '0.png'} is one that {shop / 'file'} holds, "
    assert capsys.readouterr().err.startswith(held)
    shutil.copy(red / "0.png", green / "also.png")
    both = predict.main(predict.parse(arguments(shop)))
    assert both.counts == [3, 2]
    unsure = f"given as two classes, which makes both unsure: {red / '0.png'} (red) is {green / 'also.png'} (green)\n"
    assert capsys.readouterr().err == f"warning: labelled pictures are {unsure}"


@pytest.mark.long
def test_the_estimator_counts_each_labelled_picture_once(shop):
    """But each row of a table: two things that were measured may have the same numbers."""
    paths = sorted((shop / "support").rglob("*.png"))
    labels = [path.parent.name for path in paths]
    model = FewShotClassifier.from_pretrained("photographs")
    alone = clone(model).fit(paths, labels)
    with pytest.warns(UserWarning, match="that are given again count once: number 4 is number 0$"):
        fitted = clone(model).fit([*paths, paths[0]], [*labels, labels[0]])
    assert fitted.class_count_.tolist() == [2, 2]
    np.testing.assert_array_equal(fitted.predict_proba(paths), alone.predict_proba(paths))
    with pytest.warns(UserWarning, match="once: number 1 is one held$"):
        fitted.add([shop / "query" / "a.png", paths[3]], ["red", labels[3]])
    assert fitted.class_count_.tolist() == [2, 3]
    with pytest.warns(UserWarning, match=r"both unsure: number 0 \(green\) is one held \(red\)$"):
        fitted.add([paths[3]], ["green"])
    features = np.eye(3)[[0, 0, 1, 1]]
    assert clone(model).fit(features, labels).add(features, labels).class_count_.tolist() == [4, 4]


@pytest.mark.long
def test_a_damaged_file_among_others_is_left_out_however_they_are_named(shop, capsys):
    damaged, sound = shop / "query" / "b.png", shop / "query" / "a.png"
    damaged.write_bytes(b"nothing")
    given = ["--support", str(shop / "support"), "--query", str(damaged), str(sound)]
    assert predict.main(predict.parse(given)).names == [str(sound)]
    assert capsys.readouterr().err.count("left out: expected an image in") == 1
    with pytest.raises(DataError, match="expected an image in"):
        predict.main(predict.parse([*given, "--strict"]))


def test_the_temperature_of_a_name_is_the_stored_one(shop, monkeypatch):
    temperature = load_model().classifier.built().temperature
    assert temperature([1, 1])[:2] == (pytest.approx(0.5), None)
    assert temperature([2, 2])[:2] == (pytest.approx(0.6), pytest.approx(0.5))
    assert temperature([2, 1])[:2] == (pytest.approx(np.sqrt(0.5 * 0.6)), pytest.approx(0.5))


@pytest.mark.long
def test_what_was_learned_is_saved_and_added_to(shop, capsys):
    """A file answers as the folder did, without it; more pictures are added, as if they had been there before."""
    (shop / "more" / "red").mkdir(parents=True)
    Image.new("RGB", (9, 9), (200, 40, 0)).save(shop / "more" / "red" / "7.png")
    first, second, query = shop / "first.fewshot", shop / "second.fewshot", ["--query", str(shop / "query")]
    at_once = predict.main(predict.parse(arguments(shop, "--save", str(first))))
    of_file = predict.main(predict.parse([str(first), *query]))
    assert json_text(of_file) == json_text(at_once)
    more = ["--add", str(shop / "more")]
    added = predict.main(predict.parse([str(first), *query, *more, "--save", str(second)]))
    assert sum(added.counts) == 5 and added.read_as == at_once.read_as
    together = predict.main(predict.parse(arguments(shop, *more)))
    again = predict.main(predict.parse([str(second), *query]))
    for one in (together, again):
        np.testing.assert_allclose(one.probabilities, added.probabilities, rtol=1e-4, atol=0)
    assert not np.allclose(added.probabilities, at_once.probabilities, rtol=1e-3, atol=0)
    loaded = FewShotClassifier.load(second)
    assert loaded.predict([shop / "query" / "a.png"]) == ["red"] and loaded.class_count_.tolist() == [2, 3]
    ship(shop, **{"kernel.log_lengthscale": 1.0})
    as_before = predict.main(predict.parse([str(first), *query]))
    np.testing.assert_array_equal(as_before.probabilities, at_once.probabilities)
    assert as_before.read_as == at_once.read_as + f", answered by photographs as it was when {first} was saved"
    by_others = predict.main(predict.parse(arguments(shop)))
    assert not np.allclose(by_others.probabilities, at_once.probabilities, rtol=1e-3, atol=0)


@pytest.mark.long
def test_files_and_labelled_images_that_do_not_fit_are_refused(shop, capsys):
    path = shop / "a.fewshot"
    predict.main(predict.parse(arguments(shop, "--save", str(path))))
    query = ["--query", str(shop / "query")]
    FewShotClassifier.from_pretrained("photographs").fit(np.eye(3), [1, 2, 3]).save(shop / "numbers")
    for given, message in (
        (query, "expected --support, the labelled images, with photographs, got none"),
        (arguments(shop, "--suggest", "2"), "expected --suggest from 0 to 1, the number of queries, got 2"),
        ([str(path), *arguments(shop)], "which holds labelled images; put more of them after --add"),
        ([str(path), *query, "--temperature", "1"], "expected no --temperature with"),
        ([str(path), *query, "--encoder", "onnx:a.onnx"], "expected the encoder colours, got onnx:a.onnx"),
        ([str(shop / "query" / "a.png"), *query], "expected a saved classifier in"),
        ([*arguments(shop), "--save", str(shop / "nothing" / "a")], "--save"),
        ([str(shop / "numbers"), *query, "--add", str(shop / "support")], "expected words as labels in"),
    ):
        with pytest.raises(SystemExit):
            predict.command_line(given)
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert message in line


def test_what_makes_no_sense_is_refused(shop, tiny_run):
    with pytest.raises(ConfigError, match="expected no --encoder with"):
        load_model(str(tiny_run.path), "colours")
    for text, message in {
        "0": "a positive number",
        "95": "at most 1, got 95; 0.95 is 95%",
        "nan": "a positive",
    }.items():
        with pytest.raises(ConfigError, match=message):
            predict.parse(arguments(shop, "--keep-accuracy", text))


def test_a_folder_of_a_users_does_not_hide_weights_of_its_name(shop, tiny_run, monkeypatch):
    monkeypatch.chdir(shop)
    (shop / "photographs").mkdir()
    assert isinstance(load_model("photographs").classifier.learner, heads.PretrainedHead)
    (shop / "photographs" / "config.json").write_text("{}")
    with pytest.raises(RunError, match="no run in photographs"):
        load_model("photographs")


def test_no_output_takes_the_place_of_another_file(shop):
    same, picture = str(shop / "out"), shop / "query" / "a.png"
    before = picture.read_bytes()
    for flags, message in {
        ("--csv", same, "--json", same): "expected --json to be a file of its own, but .* is that of --csv",
        ("--report", str(picture)): "expected --report to be a file of its own, but .* is read; name",
        ("--csv", str(shop)): "expected --csv to be a file, got the folder",
        ("--save", str(shop / "support" / "red" / "0.png")): "expected --save to be no picture, got .*, which is kept",
    }.items():
        with pytest.raises(ConfigError, match=message):
            predict.main(predict.parse(["--support", str(shop / "support"), "--query", str(picture), *flags]))
    assert picture.read_bytes() == before and not (shop / "out").exists()
    with pytest.raises(ConfigError, match=r"expected a temperature from 1.2e-38 to 1e.06, got '1e-40'"):
        predict.parse(arguments(shop, "--temperature", "1e-40"))


def test_outputs_are_refused_where_nothing_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="expected --csv to be in a folder that can be written"):
        check_outputs({"--csv": str(tmp_path / "a.csv"), "--json": None})


def test_a_flag_that_comes_twice_adds_to_what_it_said():
    given = predict.parse(["--support", "s", "--query", "a", "b", "--query", "c", "--add", "d", "--add", "e", "f"])
    assert given.query == ("a", "b", "c") and given.add == ("d", "e", "f")


def test_it_says_where_means_are_shown_in_the_place_of_images(found):
    pixels = Images(np.zeros((3, 8, 8, 3), np.uint8), found.names, [""] * 3)
    for means, said in {1: "averaged to 1 a class", 2: "averaged to 2 a class"}.items():
        one = found._replace(means=means)
        assert table(one).startswith(f"2 classes with 2 to 3 labelled images each, {said}, 3 queries; ")
        assert f"ash (2), =elm (3), {said}." in html_page(one, pixels)
    assert "shown as" not in table(found) + html_page(found, pixels)


@pytest.mark.long
def test_unlike_numbers_of_pictures_are_shown_as_means(shop, capsys):
    predict.main(predict.parse(arguments(shop)))
    assert "2 classes with 2 labelled images each, 1 query" in capsys.readouterr().out
    (shop / "support" / "red" / "1.png").unlink()
    predict.main(predict.parse(arguments(shop)))
    assert "2 classes with 1 to 2 labelled images each, averaged to 1 a class, 1 query" in capsys.readouterr().out
