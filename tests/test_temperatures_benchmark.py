"""benchmarks/temperatures.py against the functions that runs themselves use."""

import argparse
import importlib.util
import math
from pathlib import Path

import pytest

from evaluation.calibration import NEW_CLASSES
from runners import scoring, shape_temperature
from runners.build import load_run
from runners.data import Shape, draw_episodes, load_splits

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "temperatures.py"


@pytest.fixture(scope="module")
def temperatures():
    spec = importlib.util.spec_from_file_location("temperatures", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_rises_are_measured_from_training_to_validation_classes(temperatures, tiny_run, tiny_data):
    arguments = argparse.Namespace(data_root=tiny_data, episodes=20)
    found = temperatures.measure(f"{tiny_run.path}:2", arguments)
    model = load_run(tiny_run.path)
    risen = shape_temperature.for_shape(model, 3, 2, tiny_data)
    assert math.log(risen) - found.log_temperature == pytest.approx(NEW_CLASSES, abs=1e-4)
    validation = load_splits("omniglot", tiny_data).validation
    episodes = draw_episodes(0, "validation", validation, Shape(3, 2, 15), 20)
    raw = scoring.score(model, scoring.embed(model.deep_kernel, validation), episodes)

    def nll(temperature):
        return raw.tempered(temperature).summary(1)["nll"]

    at = dict(zip(temperatures.RISES, found.at_rises, strict=True))
    assert at[NEW_CLASSES] == pytest.approx(nll(risen), rel=1e-5)
    best = nll(math.exp(found.log_temperature + found.rise))
    assert best <= min(found.at_rises) and len(found.at_spreads) == len(temperatures.SPREADS)
    page = temperatures.tables([found, found])
    assert f"| {found.rise:+.3f} |" in page and f"| mean |  |  |  | {found.rise:+.3f} |" in page
