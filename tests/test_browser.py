"""Reports in a real browser: pictures are drawn, nothing is asked for from elsewhere, no text leaves its place."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fewshot.evaluation.prediction_report import Predicted, html_page
from fewshot.evaluation.report import Section, Table, page
from fewshot.runners import evaluate
from fewshot.tasks.images import Images

pytest.importorskip("PySide6.QtWebEngineCore", reason="a browser comes with the extra browser")
pytestmark = pytest.mark.slow

WIDE, NARROW = 1200, 390  # pixels of a screen, and of a telephone


def opened(text: str, folder: Path, width: int = WIDE) -> dict:
    """What a browser makes of a page; fails where it does not load."""
    path = folder / "page.html"
    path.write_text(text)
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), str(path), str(folder / "page.png")]
    done = subprocess.run([*command, str(width)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_self_contained(found: dict) -> None:
    """No request, no script, no complaint; every picture was decoded and has a size; nothing to scroll sideways."""
    assert found["elsewhere"] == [] and found["scripts"] == 0 and found["said"] == []
    assert all(min(size) > 0 for size in found["pictures"])
    assert found["wider"] == 0


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_page_of_predictions(tmp_path, width):
    names = ["sure.png", "<img src=x onerror=alert(1)>.png", "a" * 80 + ".png"]
    found = Predicted(
        names=names,
        classes=["ash", "<b>elm</b>", "a class with a long name " * 4],
        counts=[2, 3, 1],
        probabilities=np.array([[0.99, 0.005, 0.005], [0.3, 0.6, 0.1], [0.1, 0.2, 0.7]]),
        unknown=np.array([0.0, 0.5, 0.96]),
        kept=np.array([True, False, True]),
        temperature=0.1,
        before=None,
        read_as="features",
    )
    pixels = np.random.default_rng(0).integers(0, 255, (3, 40, 30, 3)).astype(np.uint8)
    shown = opened(html_page(found, Images(pixels, names, [""] * 3)), tmp_path, width)
    check_self_contained(shown)
    assert shown["title"] == "Predictions" and shown["headings"] == ["3 pictures, the least certain first"]
    assert len(shown["pictures"]) == 3
    kinds, texts = zip(*shown["cards"], strict=True)
    assert kinds == ("card left", "card strange", "card")
    assert texts[0].startswith("<b>elm</b> 60.0%") and names[1] in texts[0]  # shown as text, not as a tag


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_report_of_a_run(tiny_run, tiny_data, tmp_path, width):
    report = tmp_path / "report.html"
    flags = ["--data-root", tiny_data, "--episodes", "6", "--way", "2", "--out-of-episode", "--calibrate"]
    assert evaluate.command_line([str(tiny_run.path), *map(str, flags), "--report", str(report)]) == 0
    shown = opened(report.read_text(), tmp_path, width)
    check_self_contained(shown)
    assert shown["headings"][1:3] == ["Scores", "Calibration"] and len(shown["pictures"]) >= 8


def test_a_page_that_is_wrong_is_noticed(tmp_path):
    """The four things that are checked, each broken in one page."""
    table = Table(["one"], [["wide" * 400]])
    good = page("Title", [Section("A section", ["text"], [table])])
    check_self_contained(opened(good, tmp_path))
    for wrong in (
        '<img src="data:image/png;base64,AAAA">',
        '<img src="https://example.org/a.png" width="5">',
        "<script>console.log(1)</script>",
        '<div style="width: 5000px">wide</div>',
    ):
        with pytest.raises(AssertionError):
            check_self_contained(opened(good.replace("</body>", f"{wrong}</body>"), tmp_path))
