"""Weights by name: temperatures of any counts, files that come back, damaged ones, and what is shipped."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors

from fewshot.learners import solve
from fewshot.pretrained import (
    FOLDER,
    PRETRAINED,
    SPECIAL,
    Kind,
    Pretrained,
    TemperatureTable,
    load_pretrained,
    read,
    store,
)
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.run import build_run
from fewshot.training.run_directory import RunError
from fewshot.training.weights import DIGEST

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


KIND = Kind(np.eye(4, dtype=np.float32)[:2], 0.5)


@pytest.fixture
def file(run, tmp_path):
    store(tmp_path / "x.safetensors", run, TABLE, "efficientnet-lite0", KIND)
    return tmp_path / "x.safetensors"


def test_likeness_is_the_mean_cosine_with_the_nearest_class():
    features = np.random.default_rng(0).normal(size=(5, 4))
    cosines = [[one @ mean / np.linalg.norm(one) for mean in KIND.means] for one in features]
    assert KIND.likeness(features) == pytest.approx(np.mean([max(row) for row in cosines]))
    assert KIND.likeness(1000 * features) == pytest.approx(KIND.likeness(features))


def test_the_labelled_images_tell_which_head_answers(run):
    """Of two kinds that fit the one that is nearer; what is for all where none fits, as for half of the images."""
    axes = np.eye(4, dtype=np.float32)
    some, more = (
        Pretrained(name, run, None, TABLE, Kind(means, 0.55))
        for name, means in (("some", axes[:2]), ("more", axes[1:3]))
    )
    every = Pretrained("every", run, None, TABLE, special=(some, more))
    images = 7 * axes[:, None, None]
    assert every.for_task(images[[0, 1]]) is some
    assert every.for_task(images[[1, 2, 2]]) is more
    assert every.for_task(images[[0, 1, 2]]) in (some, more)  # two thirds of them are like each
    assert every.for_task(images[[0, 3]]) is every
    assert every.for_task(images[[3]]) is every
    assert some.for_task(images[[3]]) is some


@pytest.mark.long
def test_what_was_stored_answers_as_before(run, file):
    found = read(file, "x")
    assert found.encoder == "efficientnet-lite0" and found.temperature([1, 1]) == pytest.approx(0.1)
    np.testing.assert_array_equal(found.kind.means, KIND.means)
    assert found.kind.least == KIND.least
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
    del metadata[DIGEST]  # which whoever makes a file can compute again
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
    "no least likeness": (lambda arrays, _: arrays.pop("kind/least"), "class means and a least likeness"),
    "a word for means": (lambda arrays, _: arrays.update({"kind/means": np.array([1, 2])}), r"class means \[K, D\]"),
    "longer means": (lambda arrays, _: arrays.update({"kind/means": 2 * KIND.means}), "class means of length 1"),
    "means that are none": (lambda arrays, _: arrays.update({"kind/means": np.nan * KIND.means}), "of length 1"),
    "fewer features": (lambda arrays, _: arrays.update({"kind/means": np.eye(3)}), "class means of 4 features"),
    "no cosine": (lambda arrays, _: arrays.update({"kind/least": np.array(2.0)}), "and a cosine"),
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


def test_special_weights_answer_their_own_kind_alone():
    for name, names in SPECIAL.items():
        found = load_pretrained(name)
        assert found.kind is None and tuple(one.name for one in found.special) == names
        for one in found.special:
            assert found.for_task(one.kind.means[:, None, None]) is one
        noise = np.abs(np.random.default_rng(0).normal(size=(10, 1, 1, found.learner.image_shape[2])))
        assert found.for_task(noise) is found
