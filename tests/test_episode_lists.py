"""Published episodes are those that seed 0 draws, and the runs beside them still score as was written."""

from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import data_file

from fewshot.evaluation import episode_lists, metrics, scoring
from fewshot.evaluation.episodes import draw_episodes
from fewshot.tasks import DataError, make_dataset, tinyimagenet
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


@pytest.mark.long
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


def listing(**changes):
    """Two episodes of two classes with an image and a query each, of a data set of eight images."""
    x = np.array([[0, 4], [1, 5]], np.int32)
    y = np.array([[0, 1], [0, 1]], np.int32)
    return {"x_support": x, "y_support": y, "x_query": x + 2, "y_query": y, "images_crc32": np.int64(1)} | changes


DAMAGED = {
    "a position that is negative": {"x_query": np.array([[-1, 4], [1, 5]])},
    "positions that are no whole numbers": {"x_support": np.zeros((2, 2))},
    "positions beyond 32 bits": {"x_support": np.full((2, 2), 2**40)},
    "other numbers of labels": {"y_support": np.zeros((2, 3), int)},
    "other numbers of episodes": {"x_query": np.zeros((1, 2), int), "y_query": np.array([[0, 1]])},
    "no episodes": {"x_query": np.zeros((0, 2), int)},
    "labels without an axis": {"y_support": np.int32(3)},
    "words": {"y_query": np.array([["a", "b"]] * 2)},
    "a checksum that is a list": {"images_crc32": np.arange(2)},
    "a checksum that is NaN": {"images_crc32": np.float64(np.nan)},
}


@pytest.mark.parametrize("changes", DAMAGED.values(), ids=DAMAGED)
def test_lists_that_are_none_are_refused_in_one_line(tmp_path, changes):
    np.savez(tmp_path / "a.npz", **listing(**changes))
    with pytest.raises(
        DataError, match=r"expected a file of episodes written by --episodes-file, got .*a\.npz"
    ) as error:
        episode_lists.read(tmp_path / "a.npz")
    assert "\n" not in str(error.value)


def test_positions_and_labels_that_a_data_set_does_not_have_are_refused(tmp_path):
    dataset = make_dataset(np.arange(8, dtype=np.uint8).reshape(8, 1, 1, 1), np.repeat([0, 1], 4))
    crc = np.int64(episode_lists.checksum(dataset))
    np.savez(tmp_path / "a.npz", **listing(images_crc32=crc))
    assert episode_lists.episodes_of(episode_lists.read(tmp_path / "a.npz"), 0, dataset).shape == (2, 1, 1)
    beyond = np.array([[0, 8], [1, 5]])
    for changes, message in (
        ({"x_query": beyond}, "expected positions below 8, .* got 8 in x_query"),
        ({"y_support": np.full((2, 2), 10**9)}, "as many images of every class"),
        ({"y_query": np.full((2, 2), 10**9)}, "as many images of every class"),
    ):
        np.savez(tmp_path / "a.npz", **listing(images_crc32=crc, **changes))
        with pytest.raises(DataError, match=message):
            episode_lists.episodes_of(episode_lists.read(tmp_path / "a.npz"), 0, dataset)


def test_episodes_of_other_images_are_refused(tmp_path):
    """As many images of as many classes: positions and labels fit, and would be tested on what was never drawn."""
    first, other = (
        make_dataset(np.arange(start, start + 8, dtype=np.uint8).reshape(8, 1, 1, 1), np.repeat([0, 1], 4))
        for start in (0, 1)
    )
    np.savez(tmp_path / "a.npz", **listing(images_crc32=np.int64(episode_lists.checksum(first))))
    listed = episode_lists.read(tmp_path / "a.npz")
    assert episode_lists.episodes_of(listed, 0, first).shape == (2, 1, 1)
    with pytest.raises(DataError, match="images") as error:
        episode_lists.episodes_of(listed, 0, other)
    assert "\n" not in str(error.value)
