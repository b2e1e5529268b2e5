"""benchmarks/divisions.py against the splits that it divides anew, and against evaluate.py."""

import argparse

import numpy as np
import pytest
from conftest import REPOSITORY, load_benchmark

from fewshot.evaluation import scoring
from fewshot.evaluation.calibration import fit_temperature
from fewshot.evaluation.episodes import Shape, draw_episodes, queries
from fewshot.runners import evaluate
from fewshot.tasks import flat_images
from fewshot.training.assessment import EvaluationConfig
from fewshot.training.data import load_splits
from fewshot.training.run import load_run


@pytest.fixture(scope="module")
def divisions():
    return load_benchmark("divisions")


def images_of(dataset, label):
    return np.asarray(flat_images(dataset))[np.asarray(dataset.index[label, : dataset.counts[label]])]


def test_joined_splits_hold_the_classes_of_both(divisions, tiny_data):
    splits = load_splits("omniglot", tiny_data)
    joined, validating = divisions.join(splits.validation, splits.test), splits.validation.classes
    assert joined.classes == validating + splits.test.classes
    for label in range(joined.classes):
        split, own = (splits.validation, label) if label < validating else (splits.test, label - validating)
        np.testing.assert_array_equal(images_of(joined, label), images_of(split, own))
    chosen = np.array([joined.classes - 1, 0])
    some = divisions.classes_of(joined, chosen)
    for label, original in enumerate(chosen):
        np.testing.assert_array_equal(images_of(some, label), images_of(joined, original))


@pytest.mark.slow
def test_one_side_is_tested_at_the_temperature_of_the_other(divisions, tiny_run, tiny_data):
    run, splits = load_run(tiny_run.path), load_splits("omniglot", tiny_data)
    joined, validating = divisions.join(splits.validation, splits.test), splits.validation.classes
    sides = np.split(np.arange(joined.classes), [validating])
    found = divisions.divide(run, scoring.embed(run.learner, joined), joined, sides, 20)
    tested = evaluate.main(EvaluationConfig(str(tiny_run.path), episodes=20, data_root=tiny_data))
    assert found.accuracy == pytest.approx(tested["accuracy"]) and found.own_ece == pytest.approx(
        tested["ece"], rel=1e-4
    )
    shape = Shape(run.config.way, run.config.shot, queries(splits.validation, run.config.shot))
    drawn = draw_episodes(0, "test", splits.validation, shape, 20)
    fitted = scoring.score(run.learner, scoring.embed(run.learner, splits.validation), drawn)
    assert found.other_accuracy == pytest.approx(fitted.summary(1)["accuracy"])
    assert found.temperature == pytest.approx(fit_temperature(fitted.probabilities, fitted.labels), rel=1e-3)
    # At the temperature of least NLL of the tested side itself: another one, not always of a smaller ECE.
    assert len({found.least_ece, found.ece, found.own_ece}) == 3


@pytest.mark.slow
def test_rows_are_the_published_division_and_the_mean_of_others(divisions, tiny_run, tiny_data):
    arguments = argparse.Namespace(data_root=tiny_data, divisions=3, episodes=10)
    published, others = divisions.rows_of(tiny_run.path, arguments)
    assert len(published) == len(others) == len(divisions.HEADER)
    assert published[3] == "published" and others[3].startswith("3 random")


def test_the_kept_page_ends_as_it_is_written_today(divisions):
    kept = (REPOSITORY / "docs" / "results" / "divisions.md").read_text()
    assert kept.endswith(divisions.LEGEND + "\n") and "| " + " | ".join(divisions.HEADER) + " |" in kept
