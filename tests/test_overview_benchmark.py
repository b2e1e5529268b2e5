"""benchmarks/overview.py: its means and its order, and the kept page, which is what the command on it writes."""

import json

import pytest
from conftest import REPOSITORY, load_benchmark

KEPT = REPOSITORY / "docs" / "results" / "omniglot-emnist"


@pytest.fixture(scope="module")
def overview():
    return load_benchmark("overview")


def row(method, accuracy, nll=1.0, budget=1000, augment="none", shot=1):
    return {"method": method, "shot": shot, "augment": augment, "budget": budget, "accuracy": accuracy, "nll": nll}


ROWS = [
    row("maml", 0.9),
    row("dkt", 0.5, 1.0),
    row("dkt", 0.6, 2.0),
    row("dkt", 0.7, budget=6000),
    row("dkt-augmented", 0.8, 0.25, augment="handwriting"),
    row("relation", 0.75, budget=6000),
    row("maml", 0.1, shot=5),
    row("nearest-mean", 0.95, shot=5, budget=0),
]


def test_rows_are_means_over_seeds_under_their_conditions(overview):
    found = overview.overview(ROWS, 1)
    assert list(found) == ["relation", "dkt", "maml"]  # most steps first, whatever few steps reach
    accuracy, nll, seeds = found["dkt"][overview.Condition(False, 1000)]
    assert accuracy == pytest.approx(55) and nll == pytest.approx(1.5) and seeds == 2
    lines = overview.table(found, 1, overview.published.of("omniglot-emnist")).splitlines()
    assert lines[0] == "| 1-shot | 1,000 steps | 6,000 steps | 1,000 steps, changed | published |"
    assert lines[2] == "| relation |  | 75.0, 1.000 |  | 75.62 |"
    assert lines[3] == "| dkt | 55.0, 1.500 (2) | 70.0, 1.000 | 80.0, 0.250 | 73.06 |"
    several = overview.overview([*ROWS, row("abml-augmented", 0.05, augment="handwriting", shot=5)], 5)
    assert list(several["maml"].values()) == [(pytest.approx(10), 1.0, 1)]
    assert list(several) == ["maml", "abml", "nearest-mean"]  # what saw changed images alone between the others
    assert overview.table(several, 5, []).startswith(
        "| 5-shot | untrained | 1,000 steps | 1,000 steps, changed | published |"
    )


def test_published_names_are_those_of_the_papers_table(overview):
    assert set(overview.naming.PRINTED.values()) <= {one.method for one in overview.published.of("omniglot-emnist")}


def test_the_kept_page_is_what_its_command_writes(overview, tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    page = (KEPT / "overview.md").read_text()
    command = page.split("`")[1].split()
    assert command[:2] == ["python", "benchmarks/overview.py"]
    overview.main([*command[2:], "--out", str(tmp_path / "new" / "folder")])
    assert (tmp_path / "new" / "folder" / "overview.md").read_text() == page
    assert (tmp_path / "new" / "folder" / "overview.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "expected results.json of reproduce.py in"),
        ("[]", "expected results.json of reproduce.py in"),
        (json.dumps({"rows": [row("dkt", 0.5) | {"budget": 1}, {"method": "dkt", "shot": 1}]}), "augment, budget in"),
    ],
)
def test_a_folder_without_a_comparison_is_refused_in_one_line(overview, tmp_path, content, message):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(SystemExit, match=message):
        overview.main([str(tmp_path)])
