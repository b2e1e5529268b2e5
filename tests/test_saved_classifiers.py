"""Fitted classifiers as files: what comes back, and one line for every file that is damaged or foreign."""

import json
import pickle
import shutil

import numpy as np
import pandas as pd
import pytest
from foreign_runs import RAW, VALUES, alterations, altered
from fuzz_files import damaged
from problems import double
from safetensors import numpy as safetensors
from test_classifier import clusters

from fewshot import heads, pretrained, saving
from fewshot.classifier import FewShotClassifier
from fewshot.heads import GaussianProcessHead, PretrainedHead, StoredHead, TrainedRun
from fewshot.learners import NearestNeighbour
from fewshot.models import Identity
from fewshot.saving import SavedError
from fewshot.training import weights

FEATURES, LABELS = clusters()
MODEL = FewShotClassifier(GaussianProcessHead(likelihood="gaussian", kernel="rbf", scale=2.0), temperature=0.5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.safetensors"
    MODEL.fit(pd.DataFrame(FEATURES, columns=list("uvwxyz")), LABELS).save(path)
    return path


def test_a_file_holds_all_that_was_fitted(saved):
    again = FewShotClassifier.load(saved)
    table = pd.DataFrame(FEATURES, columns=list("uvwxyz"))
    fitted = MODEL.fit(table, LABELS)
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))
    assert again.get_params() | {"learner": None} == fitted.get_params() | {"learner": None}
    assert list(again.feature_names_in_) == list("uvwxyz") and again.n_features_in_ == 6
    assert list(again.classes_) == ["ash", "birch", "cedar"] and again.temperature_ == pytest.approx(0.5)
    more = clusters(1, classes=4, seed=5)
    for one in (again, fitted):
        one.add(pd.DataFrame(more[0], columns=list("uvwxyz")), more[1])
    np.testing.assert_array_equal(again.predict_proba(table), fitted.predict_proba(table))


def test_a_file_of_the_first_version_is_read(saved, tmp_path):
    def first(text):
        about = json.loads(text)
        assert about.pop("answers") is None and about.pop("balanced") is None and about["schema_version"] == 4
        return json.dumps(about | {"schema_version": 1})

    rewrite(saved, tmp_path / "a", change_text=first, change_arrays=lambda arrays: arrays.pop("groups"))
    table = pd.DataFrame(FEATURES, columns=list("uvwxyz"))
    again = FewShotClassifier.load(tmp_path / "a")
    np.testing.assert_array_equal(again.predict_proba(table), FewShotClassifier.load(saved).predict_proba(table))


def test_a_file_of_the_second_version_has_features_as_they_are(tmp_path):
    def second(text):
        about = json.loads(text)
        del about["parameters"]["power"]
        return json.dumps(about | {"schema_version": 2})

    head = GaussianProcessHead(likelihood="gaussian", power=1.0)
    fitted = FewShotClassifier(head, temperature=0.5).fit(FEATURES, LABELS)
    fitted.save(tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", second)
    again = FewShotClassifier.load(tmp_path / "b")
    assert again.learner.power == 1.0
    np.testing.assert_array_equal(again.predict_proba(FEATURES), fitted.predict_proba(FEATURES))


def test_weights_that_do_not_belong_to_the_learner_do_not_answer(saved, tmp_path):
    rewrite(saved, tmp_path / "a", change_text=lambda text: text.replace('"answers": null', '"answers": "omniglot"'))
    with pytest.raises(SavedError, match="learner: expected weights that belong to shipped ones, got 'omniglot'"):
        FewShotClassifier.load(tmp_path / "a")


@pytest.mark.parametrize("labels", [[True, False] * 3, [-3, 10**12, -3] * 2, [1.0, 2.0] * 3, ["", "é\n"] * 3])
def test_labels_keep_their_kind(labels, tmp_path):
    fitted = FewShotClassifier(MODEL.learner, temperature=1.0).fit(FEATURES[:6], labels)
    fitted.save(tmp_path / "a")
    again = FewShotClassifier.load(tmp_path / "a")
    assert (
        again.classes_.tolist() == fitted.classes_.tolist() and again.classes_.dtype.kind == fitted.classes_.dtype.kind
    )


@pytest.mark.long
@double
def test_temperatures_that_were_learned_are_kept(tmp_path):
    fitted = FewShotClassifier(MODEL.learner).fit(FEATURES, LABELS)
    fitted.save(tmp_path / "a")
    again = FewShotClassifier.load(tmp_path / "a")
    np.testing.assert_array_equal(again.temperatures_.temperatures, fitted.temperatures_.temperatures)
    np.testing.assert_array_equal(again.predict_proba(FEATURES), fitted.predict_proba(FEATURES))
    assert len(again.temperatures_.weights) > 1 and again.predict_proba(FEATURES).dtype == np.float64


@pytest.mark.long
def test_a_run_is_found_again_and_must_be_the_same(tiny_run, tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 1)).astype(np.uint8)
    monkeypatch.chdir(tiny_run.path.parent)
    fitted = FewShotClassifier.from_run(tiny_run.path.name).fit(images, list("aabbcc"))
    expected = fitted.predict_proba(images)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(fitted.predict_proba(images), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict_proba(images), expected)
    fitted.save(tmp_path / "a")
    np.testing.assert_array_equal(FewShotClassifier.load(tmp_path / "a").predict_proba(images), expected)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("config.json", "weights.safetensors"):
        (moved / name).write_bytes((tiny_run.path / name).read_bytes())
    again = FewShotClassifier.load(tmp_path / "a", learner=TrainedRun(str(moved)))
    np.testing.assert_array_equal(again.predict_proba(images), expected)
    (moved / "config.json").write_text((moved / "config.json").read_text() + " ")
    with pytest.raises(SavedError, match=r"expected the run learner .*, got another with SHA-256 .*; fit again"):
        FewShotClassifier.load(tmp_path / "a", learner=TrainedRun(str(moved)))


@pytest.fixture
def of_flowers():
    """A classifier of features that the weights photographs-flowers answer, and other features."""
    x = np.random.default_rng(0).uniform(size=(9, 1280)).astype(np.float32)
    return FewShotClassifier(PretrainedHead("photographs-flowers")).fit(x[:6], list("aabbcc")), x


@pytest.fixture
def other_weights_are_shipped(monkeypatch, tmp_path):
    """A function that changes what the package ships, from then on."""

    def change():
        shutil.copytree(pretrained.FOLDER, tmp_path / "weights")
        file = tmp_path / "weights/photographs-flowers.safetensors"
        tree, metadata = weights.load(file)
        gains = tree["learner"]["deep_kernel"]["backbone"]["gains"]
        gains[:] = gains[::-1].copy()
        weights.save(file, tree, metadata)
        monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "weights")
        heads._pretrained.cache_clear()

    yield change
    heads._pretrained.cache_clear()


def test_shipped_weights_answer_as_when_they_were_saved(of_flowers, other_weights_are_shipped, tmp_path):
    fitted, x = of_flowers
    new = x[6:]
    before, more = fitted.predict_proba(new), np.random.default_rng(1).uniform(size=(1, 1280)).astype(np.float32)
    fitted.save(tmp_path / "a")
    pickled = pickle.dumps(fitted)
    after_more = FewShotClassifier.load(tmp_path / "a").add(more, ["d"]).predict_proba(new)
    assert not isinstance(FewShotClassifier.load(tmp_path / "a").head_, StoredHead)
    other_weights_are_shipped()
    loaded = FewShotClassifier.load(tmp_path / "a")
    loaded.save(tmp_path / "b")
    for one in (loaded, FewShotClassifier.load(tmp_path / "b"), pickle.loads(pickled)):
        assert isinstance(one.head_, StoredHead) and one.head_.name == "photographs-flowers"
        np.testing.assert_array_equal(one.predict_proba(new), before)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(one)).predict_proba(new), before)
        np.testing.assert_array_equal(one.add(more, ["d"]).predict_proba(new), after_more)
    kept = FewShotClassifier(loaded.head_).fit(x[:6], list("aabbcc"))
    kept.save(tmp_path / "c")
    np.testing.assert_array_equal(kept.predict_proba(new), before)
    np.testing.assert_array_equal(FewShotClassifier.load(tmp_path / "c").predict_proba(new), before)
    anew = loaded.fit(x[:6], list("aabbcc"))
    assert not isinstance(anew.head_, StoredHead) and not np.allclose(anew.predict_proba(new), before, atol=1e-3)


def test_a_file_without_its_shipped_weights_needs_them_as_they_were(of_flowers, other_weights_are_shipped, tmp_path):
    def of_the_second_version(arrays, metadata):
        without_shipped(arrays)
        del metadata["shipped"]
        metadata["about"] = json.dumps(json.loads(metadata["about"]) | {"schema_version": 2})

    fitted, new = of_flowers
    fitted.save(tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", change_all=of_the_second_version)
    np.testing.assert_array_equal(FewShotClassifier.load(tmp_path / "b").predict_proba(new), fitted.predict_proba(new))
    other_weights_are_shipped()
    with pytest.raises(SavedError, match=r"got .*: the weights photographs-flowers have changed since; fit again"):
        FewShotClassifier.load(tmp_path / "b")


SHIPPED_DAMAGE = {
    "no words": (lambda arrays, about: about.pop("shipped"), "expected weights and words about them as shipped"),
    "numbers for words": (lambda arrays, about: about.update(shipped='{"config": 1}'), "as shipped, got others"),
    "no weights": (lambda arrays, about: about.update(shipped="{}"), "to hold a configuration of this version"),
    "an array": (lambda arrays, about: only_an_array(arrays), "as shipped, got others"),
    "no table": (lambda arrays, about: arrays.pop("shipped/temperatures/logs"), "expected temperatures in"),
    "another number": (lambda arrays, about: arrays[GAINS].__setitem__(0, 7.0), "got another with SHA-256"),
    "no number": (lambda arrays, about: arrays[GAINS].__setitem__(0, np.nan), "learner: .*expected finite numbers in"),
    "other sizes": (lambda arrays, about: arrays.update({GAINS: np.ones(3, np.float32)}), "does not fit"),
}  # fmt: skip
GAINS = "shipped/learner/deep_kernel/backbone/gains"


def without_shipped(arrays):
    for name in [name for name in arrays if name.startswith("shipped/")]:
        del arrays[name]


def only_an_array(arrays):
    without_shipped(arrays)
    arrays["shipped"] = np.ones(2)


@pytest.mark.parametrize("damage", SHIPPED_DAMAGE)
def test_damaged_shipped_weights_are_refused_in_one_line(damage, of_flowers, other_weights_are_shipped, tmp_path):
    change, message = SHIPPED_DAMAGE[damage]
    of_flowers[0].save(tmp_path / "a")
    other_weights_are_shipped()
    rewrite(tmp_path / "a", tmp_path / "b", change_all=change)
    with pytest.raises(SavedError, match=message) as error:
        FewShotClassifier.load(tmp_path / "b")
    assert "\n" not in str(error.value) and "--resume" not in str(error.value)


def test_a_learner_of_ones_own_is_brought_along(tmp_path):
    learner = NearestNeighbour(Identity((1, 1, 6)))
    FewShotClassifier(learner, temperature=1.0).fit(FEATURES, LABELS).save(tmp_path / "a")
    with pytest.raises(SavedError, match=r"expected learner=, the Learner that .* was fitted with, got none"):
        FewShotClassifier.load(tmp_path / "a")
    assert FewShotClassifier.load(tmp_path / "a", learner=learner).score(FEATURES, LABELS) == 1.0
    with pytest.raises(SavedError, match=r"expected the given learner .*, got gaussian-process"):
        FewShotClassifier.load(tmp_path / "a", learner=GaussianProcessHead())
    with pytest.raises(SavedError, match=r"expected shape \[N, 5\] as inputs, got \(12, 6\)"):
        FewShotClassifier.load(tmp_path / "a", learner=NearestNeighbour(Identity((1, 1, 5))))


def test_a_file_leads_to_no_other_encoder_unasked(saved, tmp_path):
    def named(name):
        rewrite(saved, tmp_path / "a", lambda text: altered(text, ("encoder",), json.dumps(name)))
        return tmp_path / "a"

    for name in ("onnx:/etc/passwd", "timm:resnet18"):
        with pytest.raises(SavedError, match="which is not opened unasked; pass encoder= if you trust it"):
            FewShotClassifier.load(named(name))
        assert FewShotClassifier.load(named(name), encoder=name).encoder == name
    assert FewShotClassifier.load(named("efficientnet-lite0")).encoder == "efficientnet-lite0"
    with pytest.raises(SavedError, match="expected the encoder timm:resnet18, got efficientnet-lite0"):
        FewShotClassifier.load(named("timm:resnet18"), encoder="efficientnet-lite0")


def test_what_a_file_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    days = np.array(["2026-01-01", "2026-01-02"] * 6, "datetime64[D]")
    with pytest.raises(SavedError, match=r"expected labels that a file can hold, got .*; convert them"):
        FewShotClassifier(MODEL.learner, temperature=1.0).fit(FEATURES, days).save(tmp_path / "a")
    assert not any(tmp_path.iterdir())


def rewrite(source, target, change_text=None, change_arrays=None, change_all=None):
    """A file again, with another JSON text, other arrays, or both changed by a function of arrays and metadata."""
    arrays = {name: array.copy() for name, array in safetensors.load(source.read_bytes()).items()}
    if change_arrays:
        change_arrays(arrays)
    size = int.from_bytes(source.read_bytes()[:8], "little")
    metadata = json.loads(source.read_bytes()[8 : 8 + size])["__metadata__"]
    del metadata[weights.DIGEST]  # which whoever makes a file can compute again
    if change_text:
        metadata["about"] = change_text(metadata["about"])
    if change_all:
        change_all(arrays, metadata)
    target.write_bytes(safetensors.save(arrays, metadata))


def told(path):
    """The line that refuses a file; None where it is taken, and then it predicts."""
    try:
        loaded = FewShotClassifier.load(path)
    except SavedError as error:
        assert "\n" not in str(error), error
        return str(error)
    assert np.isfinite(loaded._kept.inputs).all() and len(loaded.classes_) >= 2
    return None


def set_to(name, value):
    return lambda arrays: arrays.__setitem__(name, value(arrays[name]) if callable(value) else value)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda arrays: arrays.pop("key"), "expected inputs, y, groups, key, temperatures, weights as arrays, got key"),
        (set_to("more", np.zeros(3)), "as arrays, got more"),
        (set_to("y", lambda y: y + 1), "expected labels from 0 to 2, each at least once as y"),
        (set_to("y", lambda y: y * 0), "expected labels from 0 to 2, each at least once as y"),
        (set_to("y", lambda y: y[:-1]), "expected a label for each of the inputs"),
        (set_to("y", lambda y: y.astype(np.float32)), "expected an array of numbers as y, got float32"),
        (set_to("inputs", lambda x: x * np.nan), "expected finite numbers as inputs"),
        (set_to("inputs", lambda x: x[:, :5]), r"expected \d+ or null as features|expected shape \[N, 6\] as inputs"),
        (set_to("inputs", lambda x: x[:, 0]), "expected a label for each of the inputs"),
        (set_to("inputs", lambda x: x[:, None]), r"learner: expected features \[N, D\], got pictures"),
        (set_to("key", lambda key: key[:1]), "expected two numbers of 32 bits as key"),
        (set_to("temperatures", lambda t: -t), "expected a list of numbers above 0"),
        (set_to("temperatures", lambda t: t * 1e30), "expected a list of numbers above 0"),
        (set_to("weights", lambda w: w * 2), "expected as many probabilities as temperatures, with sum 1"),
        (set_to("weights", np.ones(2, np.float32) / 2), "expected as many probabilities as temperatures"),
    ],
)
def test_arrays_that_were_never_saved_are_refused(change, message, saved, tmp_path):
    rewrite(saved, tmp_path / "a", change_arrays=change)
    with pytest.raises(SavedError, match=message):
        FewShotClassifier.load(tmp_path / "a")


def test_no_alteration_of_the_text_is_a_traceback(saved, tmp_path):
    """Every place with every value; what is still taken is a classifier."""
    texts = []
    rewrite(saved, tmp_path / "a", change_text=lambda text: texts.append(text) or text)
    assert told(tmp_path / "a") is None
    cases = [altered(texts[0], at, raw) for at, raw in alterations(texts[0])]
    cases += [*RAW, *map(json.dumps, VALUES), "", texts[0][:-1]]
    lines = []
    for case in np.random.default_rng(0).permutation(np.array(cases, object))[:150]:
        rewrite(saved, tmp_path / "b", change_text=lambda text, case=case: case)
        lines.append(told(tmp_path / "b"))
    refused = [line for line in lines if line]
    assert len(refused) > 0.8 * len(lines) and len(set(refused)) > 40


def test_no_damage_of_the_file_is_a_traceback(saved, tmp_path):
    rng, content = np.random.default_rng(0), saved.read_bytes()
    lines = []
    for _ in range(100):
        (tmp_path / "a").write_bytes(damaged(rng, content))
        lines.append(told(tmp_path / "a"))
    assert sum(line is not None for line in lines) > 50
    for path in (tmp_path, tmp_path / "nothing"):
        assert "expected a saved classifier in" in told(path)


def test_a_pickle_is_no_saved_classifier(tmp_path):
    (tmp_path / "a").write_bytes(pickle.dumps([1, 2, 3]))
    assert "expected a saved classifier in" in told(tmp_path / "a")
    assert saving.SCHEMA_VERSION == 4
