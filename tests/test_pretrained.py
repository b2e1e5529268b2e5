"""Weights by name: temperatures of any counts, files that come back, damaged ones, and what is shipped."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from fewshot.learners import solve
from fewshot.pretrained import FOLDER, PRETRAINED, TemperatureTable, load_pretrained, read, store
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import build_run
from fewshot.training.run_directory import RunError

TABLE = TemperatureTable((2, 8), (1, 4), np.log([[0.1, 0.2], [0.4, 0.6]]))


def test_temperatures_at_and_between_the_crossings():
    assert TABLE.at([1, 1]) == pytest.approx(0.1)
    assert TABLE.at([4] * 8) == pytest.approx(0.6)
    assert TABLE.at([1] * 4) == pytest.approx(np.sqrt(0.1 * 0.4))  # 4 is half way from 2 to 8
    assert TABLE.at([2, 2]) == pytest.approx(np.sqrt(0.1 * 0.2))
    assert TABLE.at([1, 4]) == pytest.approx(np.sqrt(0.1 * 0.2))  # unequal counts: the mean of the logs
    assert TABLE.at([9] * 30) == pytest.approx(0.6)  # beyond the table as at its edge


@pytest.mark.parametrize("counts", [[], [3], [2, 0]])
def test_counts_of_no_task_are_refused(counts):
    with pytest.raises(ValueError, match="expected at least two classes with an example each"):
        TABLE.at(counts)


@pytest.fixture
def run():
    asked = RunConfig(
        dataset="embeddings:x", likelihood="gaussian", kernel="cosine", backbone="metric", settings={"backbone.rank": 2}
    )
    return build_run(resolve(asked), (1, 1, 4))


@pytest.fixture
def file(run, tmp_path):
    store(tmp_path / "x.safetensors", run, TABLE, "efficientnet-lite0")
    return tmp_path / "x.safetensors"


@pytest.mark.long
def test_what_was_stored_answers_as_before(run, file):
    found = read(file, "x")
    assert found.encoder == "efficientnet-lite0" and found.temperature([1, 1]) == pytest.approx(0.1)
    x = jax.random.normal(jax.random.key(1), (6, 4))
    y = jnp.array([0, 1, 0, 1])
    before, after = (
        solve(learner, jax.random.key(0), learner.embed(x[:4, None, None]), y, learner.embed(x[4:, None, None]), 2)
        for learner in (run.learner, found.learner)
    )
    np.testing.assert_array_equal(before.probabilities, after.probabilities)


def changed(file, change):
    """The file with its arrays or its metadata changed by a function of both."""
    arrays = safetensors.load_file(file)
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        metadata = json.loads(stream.read(size))["__metadata__"]
    change(arrays, metadata)
    file.write_bytes(safetensors.save(arrays, metadata))


def replaced(metadata, before, after):
    assert before in metadata["config"]
    metadata["config"] = metadata["config"].replace(before, after)


DAMAGE = {
    "no table": (lambda arrays, _: arrays.pop("temperatures/logs"), "expected temperatures in"),
    "falling ways": (lambda arrays, _: arrays.update({"temperatures/ways": np.array([8, 2])}), "rising ways"),
    "other sizes": (lambda arrays, _: arrays.update({"temperatures/shots": np.array([1])}), "rising ways"),
    "nan": (lambda arrays, _: arrays.update({"temperatures/logs": np.full((2, 2), np.nan)}), "temperatures up to"),
    "huge": (lambda arrays, _: arrays.update({"temperatures/logs": np.full((2, 2), 1e3)}), "temperatures up to"),
    "encoder": (lambda _, about: about.update(encoder="\x1b[2Jnone"), "to name one of"),
    "no configuration": (lambda _, about: about.update(config="[]"), "to hold a configuration"),
    "no JSON": (lambda _, about: about.update(config="{"), "install the package again"),
    "another rank": (lambda _, about: replaced(about, '"backbone.rank": 2', '"backbone.rank": 3'), "does not fit"),
    "no such kernel": (lambda _, about: replaced(about, '"kernel": "cosine"', '"kernel": "x"'), "one of cosine"),
    "no weights": (lambda arrays, _: arrays.pop("learner/deep_kernel/backbone/gains"), "does not fit"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(file, damage):
    change, expected = DAMAGE[damage]
    changed(file, change)
    with pytest.raises(RunError, match=expected) as error:
        read(file, "x")
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(RunError, match="got no such file"):
        read(tmp_path / "x.safetensors", "x")
    (tmp_path / "x.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(RunError, match="install the package again"):
        read(tmp_path / "x.safetensors", "x")
    with pytest.raises(ValueError, match="expected weights named photographs"):
        load_pretrained("dinosaurs")


@pytest.mark.parametrize("name", PRETRAINED)
def test_what_is_shipped_can_be_loaded_and_has_a_card(name):
    found = load_pretrained(name)
    assert all(0.005 < found.temperature([shot] * way) < 5 for way in (2, 5, 20) for shot in (1, 5, 10))
    card = (FOLDER / f"{name}.md").read_text()
    assert all(f"## {part}" in card for part in ("Data", "Command", "Metrics", "Licence", "Limits"))
