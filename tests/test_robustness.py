"""Robustness of finished runs: the numbers of evaluate.py, for every run of a comparison."""

import pytest

from fewshot.evaluation.out_of_episode import DetectionScores
from fewshot.runners import evaluate
from fewshot.runners.studies import reproduction, robustness
from fewshot.training.assessment import EvaluationConfig

EPISODES = 12


@pytest.fixture(scope="module")
def rows(tiny_run, tiny_data):
    corruptions = ["gaussian-noise", "contrast"]
    return robustness.measure([tiny_run.path], tiny_data, corruptions=corruptions, episodes=EPISODES)


@pytest.mark.long
@pytest.mark.parametrize("corruption", [None, "gaussian-noise", "contrast"])
def test_scores_are_those_of_evaluate(corruption, rows, tiny_run, tiny_data):
    asked = corruption and f"{corruption}:{robustness.SEVERITY}"
    config = EvaluationConfig(
        str(tiny_run.path),
        episodes=EPISODES,
        batches=2,
        corruption=asked,
        out_of_episode=corruption is None,
        data_root=tiny_data,
    )
    found = rows[0]["corrupted"][corruption] if corruption else rows[0]["clean"]
    tested = evaluate.main(config)
    assert found == pytest.approx({name: tested[name] for name in robustness.SCORES}, rel=1e-6)
    if corruption is None:
        for score, area in rows[0]["out_of_episode"].items():
            for name, value in area.items():
                assert value == pytest.approx(tested["out_of_episode"][score][name], rel=1e-6)


@pytest.mark.long
def test_other_classes_are_those_that_the_test_has_left(rows):
    """Four test classes, three of which a task shows."""
    assert rows[0]["failures"] == 0
    areas = rows[0]["out_of_episode"]
    assert set(areas) == set(DetectionScores._fields)
    assert all(
        0 < area["auroc_interval"][0] < area["auroc"] < area["auroc_interval"][1] <= 1 for area in areas.values()
    )


@pytest.mark.long
def test_tables_hold_every_number(rows):
    text = robustness.tables(rows)
    name, corrupted = rows[0]["method"], rows[0]["corrupted"]
    mean = sum(found["accuracy"] for found in corrupted.values()) / 2
    cells = [rows[0]["clean"]["accuracy"], *(found["accuracy"] for found in corrupted.values()), mean]
    assert f"| {name} | " + " | ".join(f"{100 * cell:.1f}" for cell in cells) + " |" in text
    assert f"| {corrupted['contrast']['brier']:.3f} | " in text
    area, (low, high) = (rows[0]["out_of_episode"]["entropy"][key] for key in ("auroc", "auroc_interval"))
    assert f"| {area:.3f} ({low:.3f} to {high:.3f}) |" in text and "failed: none" in text
    margins = [100 * found["accuracy_ci95"] for found in (rows[0]["clean"], *corrupted.values())]
    assert f"single accuracies: +- {min(margins):.1f} to {max(margins):.1f}." in text


@pytest.mark.long
def test_methods_with_other_scores_are_in_one_table(rows):
    """A learner without latents first: the columns are those of all rows."""
    some = {name: rows[0]["out_of_episode"][name] for name in ("probability", "entropy")}
    lines = robustness.tables([{**rows[0], "method": "plain", "out_of_episode": some}, *rows]).splitlines()[::-1]
    header, plain, own = (
        next(line for line in lines if line.startswith(start))
        for start in ("| method | probability", "| plain | 0", f"| {rows[0]['method']} | 0")
    )
    assert header == "| method | probability | entropy | latent mean | mutual information | distance |"
    assert plain.endswith("| - | - | - |") and "| - |" not in own


@pytest.mark.long
def test_after_a_stop_it_goes_on(rows, tiny_run, tiny_data, tmp_path, monkeypatch):
    file, scored, calls = tmp_path / "unfinished.json", robustness._scored, []

    def counted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scored(*arguments, **options)

    def measure():
        corruptions = ["gaussian-noise", "contrast"]
        return robustness.measure(
            [tiny_run.path],
            tiny_data,
            corruptions=corruptions,
            episodes=EPISODES,
            unfinished=file,
        )

    monkeypatch.setattr(robustness, "_scored", counted)
    with pytest.raises(KeyboardInterrupt):
        measure()
    assert file.exists()
    assert measure() == rows
    assert len(calls) == 4  # clean and noise before the stop, contrast once more after it
    assert not file.exists()


@pytest.mark.long
def test_a_comparison_ends_with_them(monkeypatch, tmp_path, tiny_run, tiny_data, rows):
    asked = []

    def measure(runs, root, episodes, unfinished):
        asked.append((runs, root, episodes))
        return rows

    monkeypatch.setattr(robustness, "measure", measure)
    for quick in (False, True):
        config = reproduction.ReproductionConfig("tiny", quick=quick, data_root=tiny_data, robustness=True)
        reproduction._write_robustness(tmp_path, [tiny_run.path], config)
    assert asked == [([tiny_run.path], tiny_data, episodes) for episodes in (robustness.EPISODES, 200)]
    assert (tmp_path / "robustness.md").read_text() == robustness.tables(rows)
