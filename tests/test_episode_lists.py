"""Published episodes are those that seed 0 draws, and the runs beside them still score as was written."""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import data_file

from fewshot.evaluation import episode_lists, metrics, scoring
from fewshot.evaluation.episodes import draw_episodes
from fewshot.tasks import tinyimagenet
from fewshot.training.data import load_splits
from fewshot.training.run import load_run

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
FILES = {"omniglot": "omniglot.npz", "omniglot-emnist": "emnist.npz", "tinyimagenet": tinyimagenet.FILE}
SLOW = {"tinyimagenet"}  # to decode


def listed(path):
    name = path.relative_to(RESULTS)
    return pytest.param(path, id=name.as_posix(), marks=[pytest.mark.slow] if SLOW & set(name.parts) else [])


@pytest.fixture(scope="module", params=map(listed, sorted(RESULTS.rglob("episodes*.npz"))))
def published(request):
    """The path of a list, the run beside it, the test split that it points into, and its episodes."""
    model = load_run(request.param.parent)
    data_file(FILES[model.config.dataset])
    test = load_splits(model.config.dataset, None).test
    return request.param, model, test, episode_lists.episodes_of(episode_lists.read(request.param), 0, test)


def test_published_episodes_are_those_of_seed_0(published):
    _, _, test, episodes = published
    drawn = draw_episodes(0, "test", test, episodes.shape, len(episodes.keys))
    for name in episode_lists.POSITIONS:
        np.testing.assert_array_equal(getattr(episodes.indices, name), getattr(drawn.indices, name))


@pytest.mark.slow
def test_a_kept_run_scores_its_published_episodes_as_was_written(published):
    path, model, test, episodes = published
    few = episodes._replace(indices=jax.tree.map(lambda leaf: leaf[:100], episodes.indices), keys=episodes.keys[:100])
    scores = scoring.score(model.learner, scoring.embed(model.learner, test), few).tempered(model.temperature)
    with np.load(path) as written:
        np.testing.assert_allclose(
            metrics.episode_nll(scores.probabilities, scores.labels), written["nll"][:100], atol=0.01
        )
        assert not written["code"].any() and not scores.codes.any()
