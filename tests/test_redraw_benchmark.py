"""benchmarks/redraw.py: the figures that a kept folder has, from its results.json alone."""

import json
import shutil

import pytest
from conftest import REPOSITORY, load_benchmark
from PIL import Image

KEPT = REPOSITORY / "docs" / "results"
FIGURES = ("comparison.png", "tradeoff.png")


@pytest.fixture(scope="module")
def redraw():
    return load_benchmark("redraw")


def test_figures_that_a_folder_has_are_drawn_anew_and_no_others(redraw, tmp_path):
    shutil.copy(KEPT / "question-objectives" / "results.json", tmp_path)
    redraw.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    for name in FIGURES:
        (tmp_path / name).touch()
    redraw.main([str(tmp_path)])
    for name in FIGURES:
        with Image.open(tmp_path / name) as drawn, Image.open(KEPT / "question-objectives" / name) as kept:
            assert drawn.size == kept.size and drawn.mode == kept.mode == "P"


def test_kept_figures_can_all_be_drawn_and_are_small(redraw):
    kept = [path for name in FIGURES for path in KEPT.rglob(name)]
    assert len(kept) > 30
    for path in kept:
        assert path.name in redraw.figures(path.parent) and path.stat().st_size < 120_000


def test_published_numbers_have_their_shots_back(redraw):
    published = redraw.COMPARISONS["omniglot-emnist"].published
    stored = json.loads((KEPT / "omniglot-emnist" / "learners-5shot" / "results.json").read_text())["published"]
    assert tuple(redraw._published(**one) for one in stored) == published


@pytest.mark.parametrize("content", [None, "[]", json.dumps({"rows": [], "config": {"name": "iris"}})])
def test_a_folder_without_a_comparison_is_refused_in_one_line(redraw, tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit, match=r"expected results\.json of reproduce.py in"):
        redraw.main([str(tmp_path)])
