"""Runs by a training loop of one's own: the example of docs/learners.md, and what is refused."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny_omniglot
from conftest import REPOSITORY
from flax import nnx

from fewshot import load_run, new_run, save_run
from fewshot.runners import evaluate
from fewshot.training import making
from fewshot.training.overrides import ConfigError
from fewshot.training.run_directory import RunError

FIELDS = {**tiny_omniglot.FLAGS, "learner": "prototypical"}


@pytest.mark.long
def test_a_loop_of_ones_own_leaves_a_run_that_commands_take(tiny_data, tmp_path, monkeypatch, capsys):
    text = (REPOSITORY / "docs" / "learners.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*new_run\([^`]*)```", text)
    asked = 'dataset="omniglot", learner="prototypical", shot=5'
    assert code.count(asked) == code.count("range(1000)") == 1
    monkeypatch.chdir(tmp_path)
    names = {"fields": {**FIELDS, "data_root": tiny_data}}
    exec(code.replace(asked, "**fields").replace("range(1000)", "range(3)"), names)
    saved, opened = names["saved"], load_run("runs/mine")
    assert saved.temperature == pytest.approx(opened.temperature) and saved.temperature != 1
    for one, other in zip(*(jax.tree.leaves(nnx.state(run.learner)) for run in (saved, opened)), strict=True):
        np.testing.assert_array_equal(one, other)
    before = jax.tree.leaves(nnx.state(new_run(**names["fields"])[0].learner, nnx.Param))
    after = jax.tree.leaves(nnx.state(opened.learner, nnx.Param))
    assert any((one != other).any() for one, other in zip(before, after, strict=True))
    assert (
        evaluate.command_line(["runs/mine", "--episodes", "8", "--data-root", tiny_data, "--report", "page.html"]) == 0
    )
    assert f"Temperature {opened.temperature:.3f}, fitted on" in capsys.readouterr().out


def test_what_is_no_flag_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"expected flags of meta_train.py by their names, got learners, shots$"):
        new_run(shots=5, learners="prototypical")


@pytest.mark.parametrize("field", [{"shot": "5"}, {"dataset": 5}, {"settings": ["a=b"]}, {"way": True}])
def test_what_is_no_value_of_a_flag_is_refused_in_one_line(field):
    ((name, value),) = field.items()
    with pytest.raises(ConfigError, match=rf"^expected (int|str|dict) as {name}, got {re.escape(repr(value))}$"):
        new_run(**field)


def test_a_learner_of_another_run_is_refused_and_nothing_is_written(tiny_data, tmp_path, monkeypatch):
    run, problem = new_run(**FIELDS, data_root=tiny_data)
    other, _ = new_run(**{**FIELDS, "learner": "matching"}, data_root=tiny_data)
    with pytest.raises(RunError, match=r"expected the learner of .*learner prototypical.*: the learner does not fit"):
        save_run(replace(run, learner=other.learner), problem, tmp_path / "run")
    graph, state = nnx.split(run.learner)
    state = jax.tree.map(lambda leaf: leaf * np.nan, state)
    with pytest.raises(RunError, match=r"expected a whole number from 0 on as steps, got -1$"):
        save_run(run, problem, tmp_path / "run", steps=-1)
    with pytest.raises(RunError, match=r"expected finite numbers"):
        save_run(replace(run, learner=nnx.merge(graph, state)), problem, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("kept")
    monkeypatch.setattr(making, "untrained", None)  # it is asked before anything takes time
    with pytest.raises(RunError, match=r"already exists; choose another$"):
        save_run(run, problem, tmp_path / "run")
