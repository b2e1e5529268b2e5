"""Scores of one task's predictions by the labels of its queries."""

import json

import numpy as np
import pytest
from scipy import stats
from test_predictions import found  # noqa: F401 - a fixture

from fewshot.evaluation.prediction_report import csv_text, html_page, json_text, table
from fewshot.evaluation.prediction_scores import Count, scores, scores_lines, wilson_interval
from fewshot.tasks.images import Images


def test_counts_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    classes, labels = ["a", "b", "c"], list(rng.choice(["a", "b", "d"], 40))
    p = rng.dirichlet(np.ones(3), 40)
    kept, strange = rng.random(40) < 0.5, rng.random(40) < 0.3
    one = scores(classes, labels, p, kept, strange)
    rows = list(zip(labels, p, kept, strange, strict=True))
    mine = [(classes[row.argmax()] == label, *rest) for label, row, *rest in rows if label != "d"]
    assert one.right == Count(sum(right for right, *_ in mine), len(mine))
    assert one.kept_right == Count(sum(right for right, keep, _ in mine if keep), sum(keep for _, keep, _ in mine))
    assert one.nll == pytest.approx(-np.mean([np.log(row[classes.index(y)]) for y, row, *_ in rows if y != "d"]))
    for name in "ab":
        of = [classes[row.argmax()] == name for label, row, *_ in rows if label == name]
        assert one.classes[name] == Count(sum(of), len(of))
    assert list(one.classes) == ["a", "b"]
    others = [(keep, odd) for label, _, keep, odd in rows if label == "d"]
    assert one.others_kept == Count(sum(keep for keep, _ in others), len(others))
    assert one.others_strange == Count(sum(odd for _, odd in others), len(others))


@pytest.mark.parametrize(("right", "number"), [(0, 5), (5, 5), (24, 30), (1, 1), (999, 1000)])
def test_the_interval_is_that_of_wilson(right, number):
    expected = stats.binomtest(right, number).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson_interval(Count(right, number)), expected, atol=1e-12)
    assert wilson_interval(Count(0, 0)) == (0.0, 1.0)


def test_queries_of_no_class_of_the_task_have_no_accuracy():
    one = scores(["a", "b"], ["z", "y"], np.full((2, 2), 0.5), np.array([True, False]), np.array([True, True]))
    assert one.right == Count(0, 0) and one.nll is None and one.classes == {}
    assert scores_lines(one) == ["2 of classes that are not labelled: 2 look strange, 1 answers kept"]


def test_every_output_has_the_labels(found):  # noqa: F811
    """The fixture's answers are ash, ash and =elm, the second left open and the last strange."""
    asked = found._replace(labels=["ash", "=elm", "oak"])
    text = table(asked)
    assert "3 queries, those that are answered wrong first; read as" in text
    first = [line.split()[0] for line in text.splitlines()[4:7]]
    assert first == ["=1+1.png", "<b>odd</b>.png", "sure.png"]
    assert "1 of 2 right: 50.0%, between 9.5% and 90.5% with 95% confidence for such pictures; NLL 0.463; " in text
    assert "1 of 1 kept answers right\nright of each class with mistakes: =elm 0 of 1\n" in text
    assert "1 of classes that are not labelled: 1 look strange, 1 answers kept" in text
    assert csv_text(asked).splitlines()[2].startswith("'=1+1.png,'=elm,ash,,0.500,")
    read = json.loads(json_text(asked))
    assert [one["label"] for one in read["queries"]] == asked.labels
    assert read["scores"]["right"] == {"number": 1, "of": 2}
    assert read["scores"]["classes"] == {"ash": {"number": 1, "of": 1}, "=elm": {"number": 0, "of": 1}}
    page = html_page(asked, Images(np.zeros((3, 1, 1, 2)), asked.names, [""] * 3))
    assert page.count('class="card left wrong"') == 1 and page.count('class="card strange wrong"') == 1
    assert "<small>label oak</small>" in page and "Struck out: wrong." in page
    assert "label" not in csv_text(found).splitlines()[0] and "scores" not in json_text(found)
    assert "wrong" not in table(found) and "Struck out" not in html_page(
        found, Images(np.zeros((3, 1, 1, 2)), found.names, [""] * 3)
    )
