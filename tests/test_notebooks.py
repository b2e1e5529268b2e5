"""Every notebook runs from its first cell to its last, on the tiny run of the tests."""

import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tiny_run, tiny_data, monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use("agg")
    monkeypatch.setenv("FEWSHOT_DATA", tiny_data)
    monkeypatch.chdir(tmp_path)
    source = path.read_text()
    assert 'RUN, DATASET, WAY = "' in source
    source = re.sub(r"RUN, DATASET, WAY = .*", f'RUN, DATASET, WAY = {str(tiny_run.path)!r}, "omniglot", 3', source)
    exec(compile(source, path.name, "exec"), {"__name__": "__main__"})
    import matplotlib.pyplot as plt

    assert plt.get_fignums()
    plt.close("all")
