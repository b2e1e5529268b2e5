"""reproduce.py: a tiny comparison from start to table, stopped and continued, and what it refuses."""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import tiny_omniglot

from fewshot.evaluation import prediction_files
from fewshot.runners import reproduce
from fewshot.runners.studies import comparison_figure as comparison_figures
from fewshot.runners.studies import comparison_table, naming, published, reporting, reproduction, robustness
from fewshot.runners.studies.comparison_figure import comparison_figure, reliability_figure, tradeoff_figure
from fewshot.runners.studies.comparisons import Comparison, Method
from fewshot.runners.studies.published import Published
from fewshot.runners.studies.reproduction import COMPARISONS, ReproductionConfig
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.overrides import ConfigError
from fewshot.training.run import build_run

CHANGES = {"backbone": "conv4", "query": 3}
SETTINGS = tiny_omniglot.SETTINGS
TINY = Comparison(
    "omniglot",
    (
        Method("softmax-cvi", "softmax", "cvi", CHANGES, SETTINGS),
        Method("gaussian-exact", "gaussian", "exact", CHANGES, SETTINGS),
    ),
    way=3,
    episodes={1: 30},
    quick_episodes=6,
    test_episodes=12,
    batches=2,
    published=(Published("a classic", {1: "71.90", 5: "80.00"}, "Somebody 1999", {1: "0.071"}),),
)


CLOCK = ("test_seconds", "training_seconds")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(COMPARISONS, "tiny", TINY)


@pytest.fixture(scope="module")
def by_two_commands(tiny_data, tmp_path_factory):
    """A folder of both methods, the last first, and the rows of each command."""
    out = tmp_path_factory.mktemp("compared")
    config = ReproductionConfig("tiny", quick=True, out=str(out), data_root=tiny_data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMPARISONS, "tiny", TINY)
        rows = [reproduction.main(replace(config, methods=(name,))) for name in ("gaussian-exact", "softmax-cvi")]
    return out, rows


@pytest.mark.long
def test_a_comparison_ends_with_its_table_and_is_the_same_when_run_again(
    tiny, by_two_commands, tiny_data, tmp_path, monkeypatch, capsys
):
    shutil.copytree(by_two_commands[0], tmp_path / "out")
    monkeypatch.setattr(reproduction.meta_train, "main", None)  # nothing is trained or tested twice
    config = ReproductionConfig("tiny", quick=True, out=str(tmp_path / "out"), data_root=tiny_data)
    rows = reproduction.main(config)
    assert [row["method"] for row in rows] == ["softmax-cvi", "gaussian-exact"]
    assert all(row["failures"] == row["training_failures"] == 0 and 0 < row["accuracy"] <= 1 for row in rows)
    assert [row["episodes"] for row in rows] == [6, 6]
    printed = capsys.readouterr().out
    assert printed.count("softmax-cvi  ") == 1 and "a classic (Somebody 1999)" in printed
    assert f"wrote {tmp_path / 'out' / 'table.md'}" in printed
    folder = tmp_path / "out" / "gaussian-exact-1shot"
    with np.load(folder / "episodes.npz") as listed:
        assert len(listed["accuracy"]) == 12
        assert listed["accuracy"].mean() == pytest.approx(rows[1]["accuracy"])
        halves = listed["accuracy"].reshape(TINY.batches, -1).mean(axis=1)
        assert halves.std() == pytest.approx(rows[1]["accuracy_std_batches"], abs=1e-9)
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["rows"] == rows
    table = (tmp_path / "out" / "table.md").read_text()
    title, _, header, _, *lines = table.splitlines()
    assert title.startswith("`tiny`: omniglot, 3-way, 12 test episodes, seed 0. Published rows are as printed")
    assert all(f"*{name}*" in lines[-1] for name in comparison_table.LEGEND if name != "rank" or name in header)
    assert "adapted" not in header and "80.00" not in table
    cells = [dict(zip(header.split(" | "), line.split(" | "), strict=True)) for line in lines[:3]]
    for row, shown in zip(rows, cells[:2], strict=True):
        assert shown["training episodes"] == "6" and shown["debiased ECE"] == f"{row['ece_debiased']:.3f}"
        assert shown["ECE by chance"] == f"{row['ece_floor_q95']:.3f}"
        assert shown["debiased calibrated"] == f"{row['calibrated']['ece_debiased']:.3f}"
    assert cells[2]["| method"] == "| a classic (Somebody 1999)" and cells[2]["training episodes"] == ""
    assert (cells[2]["accuracy"], cells[2]["ECE"]) == ("71.90%", "0.071")
    for name in ("comparison", "tradeoff", "reliability"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "out" / "table.md").unlink()
    assert reproduction.main(config) == rows and (tmp_path / "out" / "table.md").read_text() == table


@pytest.mark.parametrize("quick, trained, tested", [(False, 60_000, 3000), (True, 300, 600)])
def test_quick_means_few_episodes_of_the_main_methods(quick, trained, tested, tmp_path, monkeypatch):
    class Stopped(Exception):
        pass

    def stop(config):
        seen.append(config.episodes)
        raise Stopped

    seen = []
    monkeypatch.setattr(reproduction.meta_train, "main", lambda run: seen.append(run.episodes) or {})
    monkeypatch.setattr(reproduction.evaluate, "main", stop)
    with pytest.raises(Stopped):
        reproduction.main(ReproductionConfig("omniglot-emnist", quick=quick, shots=(1,), out=str(tmp_path)))
    assert seen == [trained, tested]
    for comparison in COMPARISONS.values():
        methods, shots = reproduction.selected(comparison, ReproductionConfig(comparison.dataset, quick=quick))
        expected = (quick and comparison.quick_methods) or [method.name for method in comparison.methods]
        assert [method.name for method in methods] == list(expected) and shots == list(comparison.episodes)


def drawn_row(method, accuracy, shot=1, **changes):
    metrics = {"nll": 1.02, "ece": 0.02, "raw": {"nll": 1.66, "ece": 0.3}, "training_seconds": 60}
    return {"method": method, "shot": shot, "accuracy": accuracy, "accuracy_ci95": 0.01, **metrics, **changes}


def names_down(axis):
    return [label.get_text() for label in axis.get_yticklabels()]


def test_a_comparison_is_drawn_with_the_published_numbers_on_the_lines_of_the_same_methods():
    rows = [drawn_row(name, one, shot) for shot in (1, 5) for name, one in (("prototypical", 0.7), ("another", 0.6))]
    printed = [*TINY.published, Published("ProtoNet", {1: "72.04", 5: "87.22"}, "Somebody 1999", {1: "0.071"})]
    figure = comparison_figure(rows, printed, "A data set, 5-way")
    (accuracy, nll, ece), (below, key, empty), (five, *_), _ = np.reshape(figure.axes, (4, 3))
    assert names_down(accuracy) == ["ProtoNet", "another"] and names_down(below) == ["a classic"]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in accuracy.lines}
    assert drawn.pop("published, Somebody 1999") == [[72.04, 0]]
    assert list(drawn.values()) == [[[70, 0], [60, 1]]]
    assert [line.get_xydata().tolist() for line in below.lines] == [[[71.9, 0]]]
    points = [[[0.3, 0], [0.3, 1]], [[0.02, 0], [0.02, 1]], [[0.071, 0]]]
    assert [line.get_xydata().tolist() for line in ece.lines] == points and len(nll.lines) == 2
    assert not key.axison and not empty.axison and below.get_xlim() == accuracy.get_xlim()
    assert "published, Somebody 1999" in [text.get_text() for text in key.get_legend().get_texts()]
    assert nll.get_xlabel() == "NLL, nats a query, 1-shot" and five.get_xlabel() == "accuracy, %, 5-shot"
    assert figure.get_suptitle() == "A data set, 5-way 1-shot and 5-shot"
    assert len(comparison_figure(rows, printed[1:]).axes) == 6  # nothing stands below


def number_of_labels(axis):
    low, high = axis.get_xlim()
    return sum(low <= tick <= high for tick in axis.get_xticks())


def test_every_axis_has_two_labels_or_more():
    rows = [drawn_row("ours", 0.7, ece=0.018, raw={"nll": 1.1, "ece": 0.65})]  # as of question-steps
    assert [number_of_labels(axis) >= 2 for axis in comparison_figure(rows, ()).axes] == [True] * 3
    (axis,) = reporting.new_figure(1, 1, (4, 4))[1].flat
    for ratio in np.geomspace(1.1, 50_000, 24):
        for least in np.geomspace(0.01, 0.1, 4):
            axis.clear()
            axis.plot([least, least * ratio], [0, 1], "o")
            comparison_figures._spread_out(axis)
            assert 2 <= number_of_labels(axis) <= 12, (least, ratio)


def test_the_mean_accuracy_over_seeds_is_drawn_against_nll_and_training_time():
    ours = drawn_row("dkt", 0.7, nll=0.8, training_seconds=120, augment="none", budget=600)
    other = drawn_row("other", 0.8, nll=1.2, augment="handwriting", budget=600)
    figure = tradeoff_figure([ours, other, other | {"accuracy": 0.9, "nll": 1.6, "seed": 2}], "A data set, 5-way")
    nll, minutes = figure.axes
    for axis, expected in ((nll, [[0.8, 70], [1.4, 85]]), (minutes, [[2, 70], [1, 85]])):
        points = [line.get_xydata()[0].tolist() for line in axis.lines]
        assert points == [pytest.approx(point) for point in expected]
        colours = [naming.style(name).colour for name in ("dkt", "other")]
        assert [line.get_color() for line in axis.lines] == colours
        assert [line.get_markerfacecolor() for line in axis.lines] == [colours[0], "white"]
    across, along = nll.containers[1].lines[2]
    assert across.get_segments()[0][:, 0].tolist() == pytest.approx([1.2, 1.6])
    assert along.get_segments()[0][:, 1].tolist() == pytest.approx([80, 90])
    _, single = nll.containers[0].lines[2]
    assert np.ptp(single.get_segments()[0][:, 1]) == 0  # one seed has no spread
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == ["other", "DKT"]
    assert key.get_title().get_text().startswith("mean over seeds; bars: lowest to highest seed")
    title = "A data set, 5-way 1-shot after 600 steps, training images as they are or changed at random"
    assert figure.get_suptitle() == title
    assert "by the clock" in minutes.get_xlabel() and "others used" in minutes.get_xlabel()


def test_bars_of_single_seeds_are_intervals_and_steps_are_named_where_they_differ():
    rows = [drawn_row("dkt", 0.7, budget=budget, augment="none") for budget in (600, 900)]
    figure = tradeoff_figure(rows)
    _, along = figure.axes[0].containers[0].lines[2]
    assert along.get_segments()[0][:, 1].tolist() == pytest.approx([69, 71])
    (key,) = figure.legends
    assert [text.get_text() for text in key.get_texts()] == ["DKT, 600 steps", "DKT, 900 steps"]
    assert key.get_title().get_text() == "one seed; bars: 95% interval over test episodes"
    other = drawn_row("dkt", 0.7, shot=5, budget=900, augment="none")
    (key,) = tradeoff_figure([rows[0], other]).legends
    assert [text.get_text() for text in key.get_texts()] == ["DKT"]


def test_leaders_are_drawn_once_more_inside_a_box_of_the_first_panel():
    scores = {"dkt": (0.8, 0.5), "prototypical": (0.79, 0.52), "relation": (0.79, 2.0), "maml": (0.4, 2.5)}
    figure = tradeoff_figure([drawn_row(name, one, nll=nll) for name, (one, nll) in scores.items()])
    every, leaders, _ = figure.axes
    *_, box = every.lines
    (left, low), (right, high) = box.get_xydata()[0], box.get_xydata()[2]
    assert (left, right) == leaders.get_xlim() and (low, high) == leaders.get_ylim()
    inside = [name for name, (one, nll) in scores.items() if left < nll < right and low < 100 * one < high]
    assert inside == ["dkt", "prototypical"]
    low, high = every.get_xlim()
    assert low < 0.5 and high > 2.5  # all of them are in the first panel


@pytest.mark.parametrize("name", COMPARISONS)
def test_methods_of_a_comparison_have_names_and_styles_of_their_own(name):
    methods = [method.name for method in COMPARISONS[name].methods]
    assert len(set(naming.names(methods).values())) == len(methods)
    plain = list(dict.fromkeys(map(naming.plain, methods)))
    assert len({naming.style(method) for method in plain}) == len(plain)


def test_names_are_readable():
    known = {
        "softmax-cvi-loo": "softmax, leaving one out",
        "one-vs-each-gibbs-ml": "one-vs-each by Gibbs, evidence",
        "prototypical": "ProtoNet",
        "rho-0.1": "rho-0.1",
    }
    assert naming.names(known) == known
    assert naming.names(["softmax-cvi-ml", "softmax-laplace-ml"])["softmax-cvi-ml"] == "softmax by CVI, bound"
    assert naming.names(["dkt", "dkt-augmented"])["dkt-augmented"] == "DKT, changed images"
    assert naming.names(["dkt-augmented"]) == {"dkt-augmented": "DKT"}
    four = "softmax-cvi-augmented-loo-4-tasks"
    assert naming.names([four]) == {four: "softmax, leaving one out, 4 tasks a step"}
    assert naming.style("dkt-augmented") == naming.style("dkt")
    assert naming.measured_as("ProtoNet", ["dkt", "prototypical-augmented", "prototypical"]) == "prototypical"
    assert naming.measured_as("ProtoNet", ["prototypical-augmented"]) == "prototypical-augmented"
    assert naming.measured_as("tau-1", ["tau-1"]) == "tau-1" and naming.measured_as("CDKT ML", ["dkt"]) is None


def predictions_of(method, shot, seed, folder, accuracy, shift):
    """A row, and its run's file of 200 queries whose confidence is 0.8 and that are right in 0.8 + shift of them."""
    right = np.arange(200) < round(200 * (0.8 + shift))
    labels = np.where(right, 0, 1).reshape(10, 20)
    p = np.broadcast_to([0.8, 0.2], (10, 20, 2))
    run = folder / f"{method}-{shot}shot{f'-seed{seed}' if seed else ''}"
    run.mkdir()
    classes = np.tile([0, 1], (10, 1))
    (run / "predictions.npz").write_bytes(prediction_files.to_bytes(p, labels, classes))
    return {"method": method, "shot": shot, "seed": seed, "accuracy": accuracy}


def test_reliability_is_that_of_the_five_most_accurate_methods(tmp_path):
    accuracies = [0.7, 0.9, 0.6, 0.8, 0.5, 0.4]
    rows = [predictions_of(f"m{k}", 5, 0, tmp_path, one, -0.1 * k) for k, one in enumerate(accuracies)]
    rows += [predictions_of("m0", 5, 1, tmp_path, 0.99, 0.2), predictions_of("m0", 1, 0, tmp_path, 0.3, 0.2)]
    elsewhere = {"method": "m9", "shot": 5, "seed": 0, "accuracy": 1.0}  # its run folder is not here
    curves = reproduction._reliability_of_best([elsewhere, *rows], tmp_path)
    assert {shot: list(named) for shot, named in curves.items()} == {1: ["m0"], 5: ["m1", "m3", "m0", "m2", "m4"]}
    shares = {name: curve.accuracy.tolist() for name, curve in curves[5].items()}
    assert shares == {name: [pytest.approx(0.8 - 0.1 * int(name[1]))] for name in shares}
    figure = reliability_figure(curves)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["m0, 1-shot", "", "", "", "", *(f"{name}, 5-shot" for name in curves[5])]
    drawn = [line.get_xydata() for line in figure.axes[5].lines if str(line.get_label()).startswith("observed")]
    np.testing.assert_allclose(np.concatenate(drawn), [[0.8, 0.7]], atol=1e-3)
    (tmp_path / "m1-5shot" / "predictions.npz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"expected predictions of test episodes, got .*m1-5shot"):
        reproduction._reliability_of_best(rows, tmp_path)


@pytest.mark.slow
def test_rows_can_be_chosen_and_two_runs_give_the_same_table(tiny, tiny_data, tmp_path):
    flags = ["tiny", "--methods", "gaussian-exact", "--shots", "1", "--episodes", "4", "--data-root", tiny_data]
    for name in ("once", "twice"):
        rows = reproduction.main(reproduce.parse([*flags, "--out", str(tmp_path / name)]))
        assert [(row["method"], row["episodes"]) for row in rows] == [("gaussian-exact", 4)]
    once, twice = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("once", "twice"))
    for row, again in zip(once["rows"], twice["rows"], strict=True):
        assert row | dict.fromkeys(CLOCK) == again | dict.fromkeys(CLOCK)
    once, twice = ((tmp_path / name / "table.md").read_text() for name in ("once", "twice"))
    assert without_times(once) == without_times(twice)


def without_times(table):
    return re.sub(r"\| [^|]* (?=\| \d+ \+ \d+ \|\n)", "", table)


@pytest.mark.long
def test_with_two_labelled_images_a_class_tasks_adapt(tiny_data, tmp_path, monkeypatch):
    method = Method("gaussian-exact", "gaussian", "exact", CHANGES | {"backbone": "mlp"}, SETTINGS)
    monkeypatch.setitem(COMPARISONS, "tiny", replace(TINY, methods=(method,), episodes={2: 4}))
    (row,) = reproduction.main(ReproductionConfig("tiny", out=str(tmp_path / "out"), data_root=tiny_data))
    _, _, header, _, line, *_ = (tmp_path / "out" / "table.md").read_text().splitlines()
    cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert cells["adapted ECE"] == f"{row['adapted']['ece']:.3f}" and row["adapted"]["nll"] != row["nll"]


CHEAP = CHANGES | {"backbone": "mlp"}
STILL = {"trainer.learning_rate": 1e-12, "trainer.patience": 1 / 3, "trainer.validate_every": 6}


def test_seeds_are_divided_by_commas_or_spaces():
    assert reproduce.parse(["omniglot-emnist", "--seeds", "0,3", "5"]).seeds == (0, 3, 5)
    with pytest.raises(ConfigError, match="expected a whole number from 0, got 'x'"):
        reproduce.parse(["omniglot-emnist", "--seeds", "0,x"])


@pytest.mark.slow
def test_learners_share_a_table_with_seeds_and_stop_where_validation_stands_still(tiny_data, tmp_path, monkeypatch):
    """With next to no learning no validation is better than the first: a third of 30 steps later the run is over."""
    methods = (
        Method("still", changes=CHEAP | {"learner": "prototypical"}, settings=SETTINGS | STILL),
        Method("four-tasks", changes=CHEAP | {"learner": "prototypical", "tasks_per_step": 4}, settings=SETTINGS),
        Method("pixels", changes={"learner": "nearest-mean", "backbone": "identity", "query": 3}),
    )
    monkeypatch.setitem(COMPARISONS, "tiny", replace(TINY, methods=methods, settings={"trainer.augment": "none"}))
    config = ReproductionConfig("tiny", out=str(tmp_path / "out"), data_root=tiny_data)
    rows = reproduction.main(config)
    assert [(row["steps"], row["best_step"], row["budget"], row["episodes"]) for row in rows] == [
        (12, 0, 30, 30),
        (30, rows[1]["best_step"], 30, 120),
        (0, 0, 0, 0),
    ]
    assert rows[2]["training_seconds"] == 0 and rows[0]["training_seconds"] > 0
    (tmp_path / "out" / "results.json").unlink()  # the runs are there: tested again, and trained no further
    (again,) = reproduction.main(replace(config, methods=("still",)))
    assert again == rows[0] | {"test_seconds": again["test_seconds"], "training_seconds": again["training_seconds"]}
    two = reproduction.main(reproduce.parse(["tiny", "--methods", "still", "--seeds", "0,3", *_folders(config)]))
    assert [row["seed"] for row in two] == [0, 3] and two[0] == again and two[1]["nll"] != again["nll"]
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert lines[0].endswith(
        "test episodes, seeds 0, 3. Published rows are as printed, with training, calibration and "
        "episodes of their own."
    )
    assert "| still | 1 | mean of 2 |" in lines[6] and (tmp_path / "out" / "still-1shot-seed3").is_dir()


def _folders(config):
    return ["--out", config.out, "--data-root", config.data_root]


ALONE = (("budget", 200), ("augment", "handwriting"), ("episodes", 400))  # each without another row like it


def test_only_rows_of_equal_conditions_are_ranked():
    row = {"shot": 1, "seed": 0, "augment": "none", "budget": 100, "episodes": 100}
    rows = [row | {"accuracy": accuracy} for accuracy in (0.6, 0.8, 0.7)]
    alone = [row | {"accuracy": 0.9, name: value} for name, value in ALONE]
    nothing_learned = [row | {"accuracy": accuracy, "budget": 0} for accuracy in (0.95, 0.96)]
    ranked = comparison_table.ranks([*rows, *alone, *nothing_learned])
    assert ranked == [3, 1, 2, None, None, None, None, None]


@pytest.mark.long
def test_a_method_that_diverges_does_not_end_the_comparison(tiny_data, tmp_path, monkeypatch, capsys):
    cheap = CHANGES | {"backbone": "mlp"}
    wild = Method("wild", "gaussian", "exact", cheap, SETTINGS | {"trainer.kernel_learning_rate": 1000.0})
    calm = Method("calm", "gaussian", "exact", cheap, SETTINGS)
    monkeypatch.setitem(COMPARISONS, "tiny", replace(TINY, methods=(wild, calm)))
    config = ReproductionConfig("tiny", quick=True, out=str(tmp_path / "out"), data_root=tiny_data)
    assert [row["method"] for row in reproduction.main(config)] == ["calm"]
    printed = capsys.readouterr().out
    assert "wild has no row: the loss of step 2 is nan" in printed
    assert re.search(r"\nwild +1 +diverged *\n", printed)
    stored = json.loads((tmp_path / "out" / "results.json").read_text())["diverged"]
    assert [(one["method"], one["shot"]) for one in stored] == [("wild", 1)]
    assert re.search(r"\n\| wild \| 1 [ |]*\| diverged \|", (tmp_path / "out" / "table.md").read_text())
    alone = replace(config, methods=("wild",), out=str(tmp_path / "alone"), robustness=True)
    assert reproduction.main(alone) == [] and not (tmp_path / "alone" / "comparison.png").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--methods", "magic"], "expected a method of tiny, got 'magic'; known: softmax-cvi, gaussian-exact"),
        (["--shots", "5"], "expected a shot of tiny, got 5; known: 1"),
        (["--shots", "one"], "expected numbers with commas, got 'one'"),
    ],
)
def test_rows_that_a_comparison_lacks_are_refused(tiny, flags, message, capsys):
    with pytest.raises(SystemExit):
        reproduce.command_line(["tiny", *flags])
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_rows_of_earlier_commands_stay_where_they_are_comparable(tiny, by_two_commands, tiny_data, tmp_path):
    out = tmp_path / "out"
    folder, (first, both) = by_two_commands
    shutil.copytree(folder, out)
    one = ReproductionConfig("tiny", quick=True, methods=("gaussian-exact",), out=str(out), data_root=tiny_data)
    assert [row["method"] for row in both] == ["softmax-cvi", "gaussian-exact"] and both[1] == first[0]
    assert json.loads((out / "results.json").read_text())["rows"] == both
    assert all(f"| {row['method']} |" in (out / "table.md").read_text() for row in both)
    with pytest.raises(ConfigError, match=r"rows of other conditions .quick True, now False.; choose another --out"):
        reproduction.main(replace(one, quick=False))
    stored = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps(stored | {"versions": stored["versions"] | {"jax": "0.1"}}))
    with pytest.raises(ConfigError, match=r"jax 0.1, now"):
        reproduction.main(one)
    (out / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"expected results of reproduce.py in"):
        reproduction.main(one)


@pytest.mark.parametrize("name", ["omniglot", "iris"])
@pytest.mark.parametrize("flags", [[], ["--out", "runs/{}"]])
def test_nothing_is_written_into_the_folder_of_a_training(name, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / name
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        reproduce.command_line([name, *(flag.format(name) for flag in flags)])
    said = capsys.readouterr().err
    assert f"expected --out to be another folder than that of a run, got runs/{name}" in said and said.count("\n") == 1
    assert [path.name for path in run.iterdir()] == ["config.json"]


def test_a_stopped_training_ends_the_command_with_a_failure(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reproduction.meta_train, "main", lambda run: {"interrupted": 15})
    assert reproduce.command_line(["tiny", "--out", str(tmp_path)]) == 130
    assert "files written so far are complete" in capsys.readouterr().err


def test_a_folder_of_other_runs_is_refused(tiny, tiny_data, tiny_run, tmp_path, capsys):
    (tmp_path / "softmax-cvi-1shot").symlink_to(tiny_run.path)
    flags = ["tiny", "--quick", "--out", str(tmp_path), "--data-root", tiny_data]
    with pytest.raises(SystemExit) as exit_info:
        reproduce.command_line(flags)
    assert exit_info.value.code == 2
    assert "was trained with episodes 20, got 6; choose another --out" in capsys.readouterr().err


def test_rows_of_gaussian_processes_name_what_they_maximise():
    # A kept table is of one objective, whatever the default becomes.
    rows = [(name, method) for name, one in COMPARISONS.items() for method in one.methods]
    processes = [(name, method) for name, method in rows if "learner" not in method.changes]
    assert len(processes) > 100
    assert not [(name, method.name) for name, method in processes if "objective" not in method.changes]


def test_unknown_comparisons_are_refused(capsys):
    with pytest.raises(SystemExit):
        reproduce.command_line(["nothing"])
    message = "expected a known comparison or study, got 'nothing'; known: omniglot-kernels, omniglot-pairs, omniglot,"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--episodes", "--data-root"])
def test_a_study_is_run_whole(flag, capsys):
    with pytest.raises(SystemExit):
        reproduce.command_line(["iris", flag, "3"])
    assert "belong to a comparison; iris is a study" in capsys.readouterr().err


KEPT = Path(__file__).parent.parent / "docs" / "results"


def kept_comparisons():
    for path in sorted(KEPT.rglob("results.json")):
        stored = json.loads(path.read_text())
        if isinstance(stored, dict) and stored.get("config", {}).get("name") in COMPARISONS:
            yield pytest.param(path.parent, stored, id=str(path.parent.relative_to(KEPT)))


@pytest.mark.parametrize("folder, stored", list(kept_comparisons()))
def test_kept_tables_are_what_is_written_today(folder, stored):
    config = ReproductionConfig(*(stored["config"][name] for name in ("name", "quick")), seed=stored["config"]["seed"])
    comparison = COMPARISONS[config.name]
    diverged = [comparison_table.Diverged(**one) for one in stored["diverged"]]
    assert (folder / "table.md").read_text() == reproduction.table(stored["rows"], comparison, config, diverged)
    assert stored["published"] == json.loads(json.dumps([asdict(row) for row in comparison.published]))


@pytest.mark.parametrize("name", ["flowers102-32", "omniglot-emnist/learners-5shot"])
def test_kept_tables_of_robustness_are_what_is_written_today(name):
    # Those of other folders are from before they had intervals.
    stored = json.loads((KEPT / name / "robustness.json").read_text())
    assert (KEPT / name / "robustness.md").read_text() == robustness.tables(stored)


@pytest.mark.parametrize(
    "dataset, method, accuracy, ece",
    [
        ("cub", "mirror descent", {1: "65.45", 5: "78.38"}, {5: "0.005"}),
        ("mini-imagenet", "ProtoNet", {1: "44.19", 5: "64.07"}, {5: "0.035"}),
        ("omniglot-emnist", "HyperShot (point estimate)", {1: "80.65", 5: "90.81"}, {}),
        ("omniglot-emnist", "DKT, batch norm + cosine", {1: "75.40", 5: "90.30"}, {}),
        ("cub", "DKT, batch norm + cosine", {1: "62.96", 5: "77.76"}, {}),
        ("mini-imagenet-cub", "RelationNet", {1: "37.13", 5: "51.76"}, {5: "0.234"}),
        ("mini-imagenet-cub", "mirror descent", {1: "40.75", 5: "56.98"}, {5: "0.005"}),
    ],
)
def test_published_rows_are_of_their_data_set(dataset, method, accuracy, ece):
    """Looked up in the papers by hand; a method that has no numbers of a data set has no row."""
    (row,) = (row for row in published.of(dataset) if row.method == method)
    assert row.accuracy == accuracy and row.ece == ece
    assert ("mirror descent" in {row.method for row in published.of(dataset)}) == (dataset != "mini-imagenet")


def test_rows_that_were_not_read_in_their_paper_say_so():
    second_hand = {row.method for row in published.of("omniglot-emnist") if "second-hand" in row.source}
    assert second_hand == {"HyperShot (point estimate)", "DKT, batch norm + cosine"}
    gaussian_processes = [row for row in published.of("omniglot-emnist") if row.accuracy[5] == "90.30"]
    assert [row.source for row in gaussian_processes] == ["DKT, second-hand"]


def test_methods_by_cvi_take_the_steps_of_the_kept_tables_where_they_name_no_other():
    asked = ReproductionConfig("omniglot", quick=True)
    methods = [
        (Method("softmax", "softmax", "cvi"), 10),
        (Method("three", "softmax", "cvi", {"inner_steps": 3}), 3),
        (Method("laplace", "softmax", "laplace"), 0),
    ]
    for method, steps in methods:
        found = reproduction._configuration(COMPARISONS["omniglot"], method, 1, 0, Path("runs"), asked)
        assert found.inner_steps == steps, method.name


@pytest.mark.long
@pytest.mark.parametrize("name", COMPARISONS)
def test_every_method_of_a_comparison_can_be_configured(name):
    methods = COMPARISONS[name].methods
    assert len({method.name for method in methods}) == len(methods)
    for method in methods:
        config = RunConfig(
            likelihood=method.likelihood, inference=method.inference, settings=method.settings, **method.changes
        )
        build_run(resolve(config), (28, 28, 1), classes=20)
