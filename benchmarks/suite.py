"""pytest-benchmark suite: what inference adds, a training step, and peers; each round next to a round of Conv4.

    taskset -c 0 python -m pytest benchmarks/suite.py --benchmark-json=.benchmarks/latest.json

`make bench` runs it and prints ratios (summary.py). Compiling is timed apart. Before every round the neighbour, forward
and backward pass of Conv4 on 85 images, is run and timed, so that both meet the same load of the machine; the JSON file
keeps the round's times and, as extra_info, the fastest round of the neighbour and the ratio of the fastest rounds.
"""

from collections.abc import Callable
from types import SimpleNamespace

import backbone
import jax
import peers
import pytest
from inference_cost import METHODS, TRAIN_QUERY, WAY, training, whole_test_episode
from timing import Run, clock, seconds
from training_step import METRIC, metric_step, training_step

from fewshot.runners.cli import processor

pytestmark = pytest.mark.filterwarnings("default")  # peers warn about their own insides
ROUNDS = 20
IMAGES = WAY * (1 + TRAIN_QUERY)


@pytest.fixture(scope="session")
def neighbour() -> Run:
    """Conv4, forward and backward, compiled."""
    processor.tune()
    run = backbone.gradient(backbone.ours(IMAGES))
    clock(run)
    return run


@pytest.fixture
def measure(benchmark: Callable, neighbour: Run) -> Callable[[Run], None]:
    """Times a contestant; what is particular to it goes to the JSON file as extra_info."""

    def timed(run: Run) -> None:
        beside: list[float] = []
        benchmark._timer = seconds  # processor time on one core, as in timing.py
        benchmark.extra_info["first_call_s"] = clock(run)
        benchmark.pedantic(
            lambda: jax.block_until_ready(run()), setup=lambda: beside.append(clock(neighbour)), rounds=ROUNDS
        )
        benchmark.extra_info["neighbour_ms"] = 1e3 * min(beside)
        benchmark.extra_info["ratio"] = benchmark.stats.stats.min / min(beside)

    return timed


@pytest.mark.parametrize("name", METHODS)
def test_what_inference_adds(name: str, measure: Callable) -> None:
    measure(training(METHODS[name]))


@pytest.mark.parametrize("steps", [3, 10])
def test_training_step(steps: int, measure: Callable) -> None:
    measure(training_step(SimpleNamespace(kernel="rbf", inner_steps=steps, shot=1, tasks=1)))


@pytest.mark.parametrize("name", METRIC)
def test_training_step_of_a_metric_learner(name: str, measure: Callable) -> None:
    measure(metric_step(name, shot=1))


@pytest.mark.parametrize("part", ["whole", "forward"])
def test_test_episode(part: str, measure: Callable) -> None:
    measure(whole_test_episode()[part])


def test_torch_backbone(measure: Callable) -> None:
    pytest.importorskip("torch", reason="install PyTorch (pip install -e '.[peers]') to compare the backbone with it")
    measure(backbone.torch_step(IMAGES))


@pytest.mark.parametrize("side", ["theirs", "ours"])
@pytest.mark.parametrize("peer", peers.RUNS)
def test_peer(peer: str, side: str, measure: Callable) -> None:
    package = peers.PEERS[peer]
    pytest.importorskip(package, reason=f"install {peer} (pip install -e '.[bench,peers]') to compare with it")
    measure(peers.RUNS[peer]()[side])
