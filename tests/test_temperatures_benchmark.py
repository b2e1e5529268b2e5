"""benchmarks/temperatures.py against the functions that runs themselves use."""

import argparse
import math

import pytest
from conftest import load_benchmark

from fewshot.evaluation import scoring
from fewshot.evaluation.calibration import NEW_CLASSES
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.learners.task_temperature import SPREAD
from fewshot.training import shape_temperature
from fewshot.training.data import load_splits
from fewshot.training.run import load_run


@pytest.fixture(scope="module")
def temperatures():
    return load_benchmark("temperatures")


@pytest.mark.slow
def test_rises_are_measured_from_training_to_validation_classes(temperatures, tiny_run, tiny_data):
    arguments = argparse.Namespace(data_root=tiny_data, episodes=20)
    found = temperatures.measure(f"{tiny_run.path}:2", arguments)
    run = load_run(tiny_run.path)
    risen = shape_temperature.for_shape(run, 3, 2, tiny_data)
    assert math.log(risen) - found.log_temperature == pytest.approx(NEW_CLASSES, abs=1e-4)
    validation = load_splits("omniglot", tiny_data).validation
    episodes = draw_episodes(0, "validation", validation, Shape(3, 2, 15), 20)
    features = scoring.embed(run.learner, validation)
    raw = scoring.score(run.learner, features, episodes)

    def nll(temperature):
        return raw.tempered(temperature).summary(1)["nll"]

    at = dict(zip(temperatures.RISES, found.at_rises, strict=True))
    assert at[NEW_CLASSES] == pytest.approx(nll(risen), rel=1e-5)
    best = nll(math.exp(found.log_temperature + found.rise))
    assert best <= min(found.at_rises)
    fewer = shape_temperature.for_shape(run, 3, 1, tiny_data)
    learned = scoring.task_temperatures(run.learner, features, episodes, risen, fewer)
    spreads = dict(zip(temperatures.SPREADS, found.at_spreads, strict=True))
    assert spreads[SPREAD] == pytest.approx(nll(learned), rel=1e-5)
    page = temperatures.tables([found, found])
    assert f"| {found.rise:+.3f} |" in page and f"| mean |  |  |  | {found.rise:+.3f} |" in page
