"""The probabilities of published runs give the numbers that stand beside them, by our code and by NumPy alone."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from fewshot.evaluation import metrics, prediction_files
from fewshot.evaluation.class_interval import intervals_over_classes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
KEPT = [path.parent for path in sorted(RESULTS.rglob("predictions.npz"))]
each_run = pytest.mark.parametrize("run", KEPT, ids=lambda run: run.relative_to(RESULTS).as_posix())


def evaluation(run):
    return json.loads((run / "evaluation.json").read_text())


def test_both_headline_runs_keep_every_test_episode():
    for name in ("1shot-60000", "5shot-40000"):
        p, labels, classes = prediction_files.read(RESULTS / "omniglot-emnist" / name / "predictions.npz")
        assert p.shape == (3000, 75, 5) and labels.shape == p.shape[:2] and classes.max() == 30


@each_run
def test_kept_probabilities_give_the_published_numbers(run):
    p, labels, classes = prediction_files.read(run / "predictions.npz")
    written = evaluation(run)
    assert len(p) == written["episodes"] == written["config"]["evaluation"]["episodes"]
    assert metrics.accuracy(p, labels) == pytest.approx(written["accuracy"], abs=1e-12)
    found = {name: getattr(metrics, name)(p, labels) for name in ("nll", "brier", "ece", "mce")}
    right = p.argmax(-1) == labels
    found["auroc"] = metrics.auroc(p.max(-1).ravel(), right.ravel())
    assert found == pytest.approx({name: written[name] for name in found}, abs=2e-4)
    for name, bounds in intervals_over_classes(p, labels, classes).items():
        np.testing.assert_allclose(bounds, written["intervals_over_classes"][name], atol=2e-4)


@each_run
def test_they_are_of_the_published_episodes(run):
    p, labels, _ = prediction_files.read(run / "predictions.npz")
    with np.load(run / "episodes.npz") as listed:
        count = min(len(p), len(listed["nll"]))
        np.testing.assert_array_equal(labels[:count], listed["y_query"][:count])
        accuracy = metrics.episode_accuracy(p, labels)[:count]
        # A list may have been written with other roundings, by which the answer to a query or two differs.
        assert np.mean(np.abs(accuracy - listed["accuracy"][:count]) < 1e-6) > 0.99


def test_the_lines_of_the_documentation_print_what_is_published(monkeypatch, capsys):
    (code,) = re.findall(
        r"```python\n([^`]*1shot-60000/predictions\.npz[^`]*)```", (ROOT / "docs/evaluation.md").read_text()
    )
    assert len([line for line in code.splitlines() if line and not line.startswith("import")]) <= 6
    monkeypatch.chdir(ROOT)
    exec(compile(code, "docs/evaluation.md", "exec"), {})
    written = evaluation(RESULTS / "omniglot-emnist" / "1shot-60000")
    assert capsys.readouterr().out.split() == [f"{written[name]:.4f}" for name in ("accuracy", "nll", "ece")]
