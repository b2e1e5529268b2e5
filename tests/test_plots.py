"""Pictures show the numbers that they were given; a report holds them without loading anything."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from predicted import calibrated_labels, random_predictions

from fewshot.evaluation import metrics, plots, report
from fewshot.evaluation.resampling import Interval, Reliability, reliability


@pytest.fixture(scope="module")
def predictions():
    probabilities, _ = random_predictions(0, episodes=20)
    return probabilities, calibrated_labels(np.random.default_rng(0), probabilities)


def points(axis):
    """All points drawn as single markers."""
    marked = [line.get_xydata() for line in axis.lines if line.get_marker() == "o"]
    return np.concatenate(marked)


def test_a_reliability_diagram_shows_every_bin_and_colours_those_beyond_chance(predictions):
    curve = reliability(np.random.default_rng(0), *predictions, draws=50)
    axis, counts = plots.reliability_diagram(curve).axes
    drawn = points(axis)
    order = np.argsort(drawn[:, 0])
    np.testing.assert_allclose(drawn[order], np.stack([curve.confidence, curve.accuracy], axis=1))
    assert counts.get_yscale() == "log" and len(counts.collections[0].get_segments()) == len(curve.counts)
    far = Reliability(*(np.array([value]) for value in (0.5, 0.9, 10, 0.4, 0.6)))
    axis, _ = plots.reliability_diagram(far).axes
    (red,) = [line for line in axis.lines if line.get_color() == plots.WRONG and len(line.get_xdata())]
    assert red.get_xydata().tolist() == [[0.5, 0.9]]


def test_risk_coverage_ends_at_the_error_rate(predictions):
    curve = metrics.risk_coverage(*predictions)
    (axis,) = plots.risk_coverage({"own": curve}).axes
    assert axis.lines[0].get_xydata()[-1] == pytest.approx([1.0, 1 - metrics.accuracy(*predictions)])


def test_a_confidence_histogram_sums_to_one():
    (axis,) = plots.confidence_histogram({"a": np.array([0.2, 0.99, 1.0]), "b": np.array([0.5])}).axes
    assert [patch.get_data().values.sum() for patch in axis.patches] == pytest.approx([1.0, 1.0])


def test_the_area_under_a_roc_curve_is_the_auroc():
    rng = np.random.default_rng(0)
    scores, positive = rng.integers(0, 9, size=200).astype(float), rng.uniform(size=200) < 0.4
    figure = plots.roc({"entropy": (scores, positive)}, {"entropy": Interval(0.4, 0.6)})
    false, true = figure.axes[0].lines[1].get_data()
    assert np.trapezoid(true, false) == pytest.approx(float(metrics.auroc(scores, positive)))
    assert figure.axes[0].get_legend().get_texts()[0].get_text() == "entropy: 0.400 to 0.600"


def test_severities_are_in_order():
    (axis,) = plots.accuracy_by_severity({5: (0.5, 0.1), 0: (0.9, 0.1)}, "gaussian-noise", 0.2).axes
    assert axis.lines[1].get_xydata().tolist() == [[0, 0.9], [5, 0.5]]


def test_a_learning_curve_leaves_out_what_was_not_recorded():
    records = [{"episodes": 0, "scale": 30.0, "validation_accuracy": 0.2}, {"episodes": 50, "scale": 40.0}]
    axes = plots.learning_curve(records).axes
    assert [axis.get_ylabel() for axis in axes] == ["validation accuracy", "output scale"]
    assert [len(axis.lines[0].get_xdata()) for axis in axes] == [1, 2]


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_of_an_episode_frames_the_wrong_queries(channels):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), 4)
    probabilities = np.eye(3)[labels]
    probabilities[[2, 9]] = [[0.1, 0.7, 0.2], [0.8, 0.1, 0.1]]
    support, query = (rng.integers(0, 256, size=(n, 5, 5, channels)).astype(np.uint8) for n in (6, 12))
    episode = plots.Episode(support, np.repeat(np.arange(3), 2), query, labels, probabilities)
    figure = plots.episode_picture(episode, ["alpha", "beta", "gamma"])
    shown = [axis for axis in figure.axes if axis.images]
    assert len(shown) == 6 + 12
    framed = [axis for axis in shown if axis.axison]
    assert [axis.get_title() for axis in framed] == ["1 0.70", "0 0.80"]
    assert all(axis.spines["left"].get_edgecolor() == to_rgba(plots.WRONG) for axis in framed)
    assert [text.get_text() for axis in figure.axes for text in axis.texts] == ["0: alpha", "1: beta", "2: gamma"]


def test_a_page_escapes_its_texts_and_holds_its_pictures():
    figure = plots.accuracy_by_severity({0: (0.9, 0.1)}, "noise", 0.2)
    section = report.Section("A < B", ["<script>"], [report.Table(["a&b"], [["<i>"]])], {'a "plot"': figure}, "x > y")
    text = report.page("T & t", [section])
    for escaped in (
        "A &lt; B",
        "&lt;script&gt;",
        "a&amp;b",
        "&lt;i&gt;",
        "a &quot;plot&quot;",
        "x &gt; y",
        "T &amp; t",
    ):
        assert escaped in text
    assert "<script" not in text and text.count("<img ") == text.count('src="data:image/png;base64,') == 1
    assert report.png(figure) == report.png(figure)


def test_class_names_are_drawn_as_text():
    """Two dollar signs are a formula to matplotlib, which fails at one that is none; a control has no picture."""
    images = np.zeros((2, 4, 4, 1), np.uint8)
    names = [r"$\undefined$", "a\x1b[31m$5$"]
    shown = plots.Episode(images, np.arange(2), images, np.arange(2), np.array([[0.9, 0.1], [0.6, 0.4]]))
    figure = plots.episode_picture(shown, names, names)
    assert report.png(figure)
    assert [text.get_text() for axis in figure.axes for text in axis.texts] == [names[0], "a\ufffd[31m$5$"]
    titles = {axis.get_title() for axis in figure.axes} - {""}
    assert titles == {f"{names[0]} 0.90", f"{names[0]} 0.60"}
