"""FewShotClassifier and predict.py: folders and files of images in, probabilities out, and what they refuse."""

import csv
import os
import shutil
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot
from flax import nnx
from PIL import Image
from problems import double
from sklearn.base import clone

from fewshot import classifier as classifier_module
from fewshot import conditioning, heads, predicting
from fewshot.classifier import FewShotClassifier
from fewshot.conditioning import fit_task
from fewshot.evaluation.learner_conformance import task_of
from fewshot.inference.inner import exact, run
from fewshot.inference.predictive import predict as predict_probabilities
from fewshot.learners import GaussianProcess, InductiveMAML
from fewshot.learners.base import Traits, solve, traced
from fewshot.models import KERNELS, Conv4, Identity, LabelRegression, deep_kernel
from fewshot.models.deep_kernel import DeepKernel
from fewshot.runners import meta_train, predict
from fewshot.saving import SavedError
from fewshot.tasks import DataError, photographs, preparation, sample_task
from fewshot.tasks.embeddings import load_features
from fewshot.tasks.images import (
    HEIC_HINT,
    ORIENTATION,
    as_read,
    load_labelled,
    load_unlabelled,
    picture_of,
    read_picture,
    whole,
)
from fewshot.tasks.photographs import SPLITS, centre_square
from fewshot.training import shape_temperature
from fewshot.training.configuration import RunConfig
from fewshot.training.data import load_splits
from fewshot.training.overrides import ConfigError
from fewshot.training.run import load_run

SHAPE = (16, 16, 1)


@pytest.fixture(scope="module")
def model(tiny_run):
    return load_run(tiny_run.path)


@pytest.fixture
def classifier(model):
    return FewShotClassifier(model.learner, temperature=model.temperature, draws=None)


def changed(classifier, **parameters):
    return clone(classifier).set_params(**parameters)


@pytest.fixture(scope="module")
def task(tiny_data):
    return jax.device_get(
        jax.jit(lambda key: sample_task(key, load_splits("omniglot", tiny_data).test, way=4, shot=3, query=5))(
            jax.random.key(0)
        )
    )


@pytest.fixture
def unequal(task):
    """Four images of class 0, one of each other class; labels are words."""
    keep = np.array([0, 1, 2, 3, 6, 9])
    return task.x_support[keep], np.array(["ash", "birch", "cedar", "elm"])[task.y_support[keep]]


@pytest.mark.long
def test_any_labels_counts_and_numbers_of_queries(classifier, task, unequal):
    images, labels = unequal
    result = classifier.fit(images, labels)
    assert list(result.classes_) == ["ash", "birch", "cedar", "elm"]
    probabilities = result.predict_proba(task.x_query)
    assert probabilities.shape == (20, 4)
    np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
    assert (result.predict(task.x_query) == result.classes_[probabilities.argmax(1)]).all()
    many = result.predict_proba(np.concatenate([task.x_query] * 5))  # more than a chunk
    np.testing.assert_allclose(many[:20], probabilities, atol=1e-6)
    np.testing.assert_allclose(result.predict_proba(task.x_query[3:4]), probabilities[3:4], atol=1e-6)


@pytest.mark.long
def test_queries_of_other_numbers_compile_nothing(classifier, task, unequal):
    result = classifier.fit(*unequal)
    result.predict_proba(task.x_query)
    compiled = traced._cache_size()
    result.predict_proba(np.concatenate([task.x_query] * 4)[:77])
    changed(classifier, random_state=1).fit(*unequal)
    assert traced._cache_size() == compiled


@pytest.mark.long
def test_other_ways_and_shots_share_programs(classifier, task):
    """Padded to buckets: ways 2 to 4 with up to 3 shots need two programs to fit and two to predict."""
    before = traced._cache_size()
    for way in (2, 3, 4):
        for shot in (1, 2, 3):
            keep = np.array([3 * c + s for c in range(way) for s in range(shot)])
            result = classifier.fit(task.x_support[keep], task.y_support[keep])
            assert result.predict_proba(task.x_query).shape == (20, way)
    assert traced._cache_size() - before <= 5  # one of them embeds


@pytest.mark.parametrize(
    "points, classes, expected",
    [(2, 2, (8, 5)), (9, 3, (16, 5)), (25, 5, (32, 5)), (33, 6, (64, 6)), (129, 2, (160, 2)), (2000, 2, (2016, 2))],
)
def test_buckets_are_never_too_small_nor_much_too_large(points, classes, expected):
    assert conditioning.bucket(points, classes) == expected
    *sizes, real = conditioning.padding(points, classes, Traits())
    assert tuple(sizes) == expected == (len(real.points), len(real.classes))
    assert real.points[:points].all() and real.classes[:classes].all()
    assert (real.points.sum(), real.classes.sum()) == (points, classes)


@pytest.mark.parametrize("traits", [Traits(padded=False), Traits(transductive=True)])
def test_tasks_of_learners_that_look_at_every_row_are_not_padded(traits):
    *sizes, real = conditioning.padding(5, 3, traits)
    assert sizes == [5, 3] and real.points.all() and real.classes.all()


@pytest.mark.long
def test_an_estimator_shows_inductive_maml_no_row_that_was_made_up():
    """It would be normalised by it."""
    learner = InductiveMAML(Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=4), way=3, inner_steps=1, inner_rate=1.0)
    x, y, query, _ = task_of((16, 16, 1), 0)
    found = fit_task(learner, jax.random.key(0), np.asarray(x), np.asarray(y), 3, conditioning.TemperaturePrior(1.0))
    expected = solve(learner, jax.random.key(0), x, y, query, 3).probabilities
    np.testing.assert_allclose(found.probabilities(np.asarray(query)), expected, atol=1e-5)


@pytest.mark.long
@double
def test_a_padded_task_gives_the_probabilities_of_the_task_itself():
    """With label regression, which has no random expectation: those of other likelihoods draw once for each class."""
    deep_kernel = DeepKernel(Identity((2, 2, 1)), KERNELS["rbf"](), rngs=nnx.Rngs(0))
    likelihood, y = LabelRegression(0.3), np.array([0, 0, 2, 1, 3, 0], np.int32)
    images = np.random.default_rng(0).uniform(size=(26, 2, 2, 1))
    x, new = images[:6], images[6:]
    model = FewShotClassifier(GaussianProcess(deep_kernel, likelihood, exact), temperature=1.0)
    got = model.fit(x, y).predict_proba(new)
    prior, query = deep_kernel.prior(jnp.asarray(x), 4), deep_kernel.query(jnp.asarray(x), jnp.asarray(new), 4)
    posterior = run(jax.random.key(0), exact(likelihood), prior, jnp.asarray(y), steps=1)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, predict_probabilities(jax.random.key(0), likelihood, posterior, query), rtol=1e-9)
    flatter = changed(model, temperature=2.0).fit(x, y).predict_proba(new)  # applied once, to the real classes
    np.testing.assert_allclose(flatter, np.sqrt(got) / np.sqrt(got).sum(1, keepdims=True), rtol=1e-9)


@pytest.mark.long
def test_a_task_learns_its_own_temperature(classifier, task, unequal):
    """From the class that has four images; with one of each there is nothing to learn from."""
    images, labels = unequal
    own = changed(classifier, temperature_of_fewer=classifier.temperature)
    fixed, learned = (clone(one).fit(images, labels) for one in (classifier, own))
    assert fixed.temperature_ == pytest.approx(classifier.temperature)
    assert learned.temperature_ != pytest.approx(classifier.temperature, rel=1e-3)
    plain = changed(classifier, temperature=1.0).fit(images, labels).predict_proba(task.x_query)
    np.testing.assert_allclose(
        learned.predict_proba(task.x_query), learned.temperatures_.temper(jnp.asarray(plain)), rtol=1e-4
    )
    about, learned = [], []
    for factor in (0.05, 1.0):  # what is learned depends on it, what it is learned about does not
        other = changed(classifier, temperature_of_fewer=factor * classifier.temperature)
        temperatures = other.fit(images, labels).temperatures_
        about.append(float(np.median(temperatures.temperatures)))
        learned.append(float(temperatures.mean))
    assert about == pytest.approx([classifier.temperature] * 2)
    assert abs(learned[0] / learned[1] - 1) > 0.01
    few = own.fit(images[[0, 4, 5]], labels[[0, 4, 5]])
    assert few.temperature_ == pytest.approx(classifier.temperature)


def test_adding_images_is_fitting_all_of_them(classifier, task, unequal):
    images, labels = unequal
    more, names = task.x_query[:3], ["elm", "fir", "ash"]
    added = classifier.fit(images, labels).add(more, names)
    whole = clone(classifier).fit(np.concatenate([images, more]), [*labels, *names])
    assert list(added.classes_) == ["ash", "birch", "cedar", "elm", "fir"]
    np.testing.assert_allclose(added.predict_proba(task.x_query), whole.predict_proba(task.x_query), atol=1e-5)


def test_images_that_are_none_are_refused_and_not_guessed(classifier, task, unequal):
    """The network would answer each of these with probabilities."""
    images, labels = unequal
    result = classifier.fit(images, labels)
    nan = np.where(np.arange(16) == 3, np.nan, task.x_query[:2].squeeze(-1) / 255.0)[..., None]
    cases = [
        (images.astype(np.float32), r"within \[0, 1\], got values from 0.0 to 255.0; divide them by 255"),
        (images.astype(np.int64), "got int64; convert them to uint8"),
        (nan, "got values from nan to nan; remove NaN"),
        (images[:, 1:], r"expected images \[N, 16, 16, 1\], got shape \(\d+, 15, 16, 1\)"),
    ]
    for wrong, message in cases:
        for use in (lambda x: classifier.fit(x, labels[: len(x)]), result.predict_proba):
            with pytest.raises(ValueError, match=message):
                use(wrong)
    with pytest.raises(ValueError, match="got values from nan to nan"):
        result.add(nan, ["ash", "ash"])
    features = np.full((2, 1, 1, 3), -5.0)
    deep_kernel.check_images(features, "features")
    with pytest.raises(ValueError, match=r"expected finite numbers as features, got values from -5.0 to inf"):
        deep_kernel.check_images(np.where(np.arange(3) == 1, np.inf, features), "features")


def test_nothing_asked_is_nothing_answered_and_a_notebook_shows_one_line(classifier, task, unequal):
    result = classifier.fit(*unequal)
    assert result.predict_proba(task.x_query[:0]).shape == (0, 4)
    assert result.predict(task.x_query[:0]).shape == (0,)
    assert result.add(task.x_query[:0], []) is result
    assert result.suggest(task.x_query[:1], 1).positions == [0]


def test_tasks_that_make_no_sense_are_refused(classifier, unequal):
    images, labels = unequal
    with pytest.raises(ValueError, match="at least two classes, got 0 classes"):
        classifier.fit(images[:0], [])
    time = np.array(["2026-01-01", "NaT"] * 3, "datetime64[D]")
    for missing in ([0.0, 1.0, 1.0, np.nan, 0.0, 0.0], ["a", "b", None] * 2, ["a", "b", np.nan] * 2, time):
        for given in (missing, np.array(missing, object), np.asarray(missing) if missing is time else missing):
            with pytest.raises(ValueError, match=r"expected a label for every example, got (nan|None|NaT); leave"):
                classifier.fit(images, given)
    numbered = classifier.fit(images, [1, 2, 1, 2, 1, 2])
    with pytest.raises(ValueError, match="expected labels like 1, got ash; convert them"):
        numbered.add(images[:1], ["ash"])
    assert list(numbered.add(255 - images[:1], [3]).classes_) == [1, 2, 3]
    with pytest.raises(ValueError, match="expected one label for each of the 6 examples, got 5"):
        classifier.fit(images, labels[:-1])
    with pytest.raises(ValueError, match="expected examples of at least two classes, got 1 class;"):
        classifier.fit(images, ["ash"] * 6)


# Images of a user


def drawing(dark_on_light=True, size=(40, 30)):
    """A stroke, as a scanner sees it: dark on light, taller than wide."""
    image = np.full(size, 250, np.uint8)
    image[5:35, 12:16] = 10
    return image if dark_on_light else 255 - image


def fitted(image, shape):
    return whole(picture_of(image), shape)


def test_images_are_fitted_to_the_model():
    light, dark = fitted(drawing(), SHAPE), fitted(drawing(False), SHAPE)
    assert light.shape == SHAPE and light.dtype == np.uint8
    np.testing.assert_array_equal(light, dark)  # ink is light either way
    assert light[:, 0].max() < 10 and light.max() > 200 and 4 <= np.argmax(light.sum(0).squeeze()) <= 9
    colour = fitted(np.stack([drawing()] * 3, -1), (16, 16, 3))
    assert colour.shape == (16, 16, 3) and colour[0, 0, 0] > 240  # photographs are not inverted
    transparent = np.zeros((40, 30, 4), np.uint8)
    transparent[5:35, 12:16, 3] = 255  # black ink on nothing
    assert fitted(transparent, SHAPE)[:, 0].max() < 10 and fitted(transparent, SHAPE).max() > 200


def test_photographs_are_the_right_way_up(tmp_path):
    """A camera that is held on its side stores the picture as it lay, and says how to turn it."""
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    turned = Image.Exif()
    turned[ORIENTATION] = 6  # turn a quarter clockwise to view
    Image.fromarray(np.rot90(pixels)).save(tmp_path / "turned.png", exif=turned)
    Image.fromarray(pixels).save(tmp_path / "upright.png")
    turned, upright = (
        load_unlabelled(tmp_path / name, (16, 16, 3), whole).pixels for name in ("turned.png", "upright.png")
    )
    np.testing.assert_array_equal(turned, upright)


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif"])
def test_every_orientation_of_every_format_is_read_upright(tmp_path, name):
    """Corners of three colours, stored as Exif defines each orientation."""
    corners = np.zeros((16, 32, 3), np.uint8)
    corners[:8, :8], corners[:8, 24:], corners[8:, :8] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    lying = corners.transpose(1, 0, 2)
    stored = [corners, corners[:, ::-1], corners[::-1, ::-1], corners[::-1]]
    stored += [lying, np.rot90(corners), np.rot90(lying, 2), np.rot90(corners, -1)]
    for orientation, pixels in enumerate(stored, start=1):
        tags = Image.Exif()
        tags[ORIENTATION] = orientation
        exact = {"a.jpg": {"quality": 100, "subsampling": 0}, "a.webp": {"lossless": True}}.get(name, {})
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / name, exif=tags, **exact)
        found = np.asarray(read_picture(tmp_path / name))
        np.testing.assert_allclose(found.astype(float), corners, atol=5 if name == "a.jpg" else 0, err_msg=orientation)
        with Image.open(tmp_path / name) as opened:
            np.testing.assert_array_equal(as_read(opened, name), found)


def test_a_damaged_tag_beside_the_orientation_costs_no_picture(tmp_path):
    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    tags = b"II*\0\x08\0\0\0\x02\0" + b"\x12\x01\x03\0\x01\0\0\0\x03\0\0\0"  # turned half
    tags += b"\x1a\x01\x02\0\x04\0\0\0abc\0" + b"\0\0\0\0"  # a resolution that is a word
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=b"Exif\0\0" + tags)
    read = load_unlabelled(tmp_path / "a.png", (16, 16, 3), whole).pixels[0]
    np.testing.assert_array_equal(read, np.rot90(pixels, 2))


@pytest.mark.parametrize("error", [Image.DecompressionBombError, TypeError, OverflowError, struct.error])
def test_whatever_reading_a_picture_raises_is_one_line(error, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise error("no picture")

    save_picture = tmp_path / "a.png"
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(save_picture)
    monkeypatch.setattr(Image, "open", refuse)
    for read in (
        lambda: load_unlabelled(save_picture, SHAPE, whole),
        lambda: photographs.decode(save_picture, 16, centre_square, "a.png"),
    ):
        with pytest.raises(
            DataError, match=r"expected an image in .*a.png, got one that cannot be read \(no picture\)"
        ):
            read()


def test_linked_folders_are_read_and_dangling_links_named(tmp_path):
    held, asked = tmp_path / "held", tmp_path / "asked"
    held.mkdir()
    asked.mkdir()
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(held / "a.png")
    (asked / "link").symlink_to(held)
    (asked / "round").symlink_to(asked)
    assert load_unlabelled(asked, SHAPE, whole).names == [str(asked / "link" / "a.png")]
    (asked / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(DataError, match=r"expected an image in .*gone.png"):
        load_unlabelled(asked, SHAPE, whole)


def test_large_tasks_take_fewer_draws_and_no_more_memory():
    assert conditioning.draws_for(2, 2) == conditioning.draws_for(25, 5) == conditioning.DRAWS
    for classes, shots in ((50, 5), (100, 20), (300, 5)):
        points, most = classes * shots, conditioning.DRAWS
        draws = conditioning.draws_for(points, classes)
        assert conditioning.FEWEST_DRAWS <= draws < most and most % draws == 0
        assert draws == conditioning.FEWEST_DRAWS or draws * classes * points <= conditioning.MOST_NUMBERS


def test_one_class_is_no_task_whatever_holds_it(tiny_run, tmp_path, capsys):
    np.savez(tmp_path / "one.npz", images=np.zeros((2, 16, 16), np.uint8), labels=["a", "a"])
    with pytest.raises(SystemExit):
        predict.command_line(
            [str(tiny_run.path), "--support", str(tmp_path / "one.npz"), "--query", str(tmp_path / "one.npz")]
        )
    assert "expected labels of two classes or more in" in capsys.readouterr().err


def test_grey_pictures_of_more_bits_are_scaled_and_not_cut_off(tmp_path):
    pixels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(pixels).save(tmp_path / "8.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.png")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "16.tif")
    Image.fromarray((pixels / 255).astype(np.float32)).save(tmp_path / "float.tif")
    expected, *others = (
        load_unlabelled(tmp_path / name, SHAPE, whole).pixels for name in ("8.png", "16.png", "16.tif", "float.tif")
    )
    for other in others:
        np.testing.assert_array_equal(other, expected)
    for name, wrong in (("large", pixels.astype(np.float32)), ("int", pixels.astype(np.int32))):
        Image.fromarray(wrong).save(tmp_path / f"{name}.tif")
        with pytest.raises(DataError, match=r"within \[0, 1\] in .*large.tif, got 0.0 to 255.0|int.tif, got int32"):
            load_unlabelled(tmp_path / f"{name}.tif", SHAPE, whole)


def test_a_picture_of_twelve_bits_in_sixteen_is_read_as_dark_with_a_warning(tmp_path, capsys):
    pixels = np.linspace(0, 4095, 256).astype(np.uint16).reshape(16, 16)
    for name, scaled in (("12", pixels), ("8", pixels // 16), ("16", 16 * pixels), ("black", 0 * pixels)):
        Image.fromarray(scaled).save(tmp_path / f"{name}.png")
        load_unlabelled(tmp_path / f"{name}.png", SHAPE, whole)
    said = [f"warning: {tmp_path / name} has 16 bits, of which it uses 12 at most" for name in ("12.png", "8.png")]
    assert capsys.readouterr().err.splitlines() == [f"{line}: it is read as dark" for line in said]


def test_pictures_too_large_for_pillow_are_refused_in_one_line(tmp_path, monkeypatch):
    Image.fromarray(drawing()).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match=r"large.png, got one that cannot be read .*exceeds limit"):
        load_unlabelled(tmp_path, SHAPE, whole)


def test_a_large_picture_is_read_without_a_warning(tmp_path, monkeypatch, recwarn):
    Image.fromarray(drawing()).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", drawing().size - 1)  # refused at twice as many
    assert len(load_unlabelled(tmp_path, SHAPE, whole).pixels) == 1 and not recwarn.list


def test_hidden_files_and_folders_are_no_images_and_what_is_left_out_is_said(tmp_path, capsys):
    """Copies of notebooks and of a Mac's archives are no class; photographs in a format not read must not vanish."""
    pixels = Image.fromarray(drawing())
    for folder in ("ash", "birch", ".ipynb_checkpoints", "birch/.ipynb_checkpoints", "__MACOSX"):
        (tmp_path / folder).mkdir()
        pixels.save(tmp_path / folder / "A.PNG")
    (tmp_path / "ash" / "._A.PNG").write_bytes(b"a Mac's notes")
    (tmp_path / ".DS_Store").write_bytes(b"more of them")
    (tmp_path / "Thumbs.db").write_bytes(b"and those of Windows")
    support = load_labelled(tmp_path, SHAPE, whole)
    assert support.labels == ["ash", "birch"]
    assert capsys.readouterr().err == ""
    for number in range(4):
        (tmp_path / "ash" / f"IMG_{number}.HEIC").write_bytes(b"a telephone's")
    load_labelled(tmp_path, SHAPE, whole)
    names = ", ".join(f"ash/IMG_{number}.HEIC" for number in range(3))
    assert capsys.readouterr().err == f"left out of {tmp_path}: {names} and 1 more; {HEIC_HINT}\n"
    with pytest.raises(DataError, match=r"IMG_0.HEIC, got one that cannot be read \(HEIC is not read: save as JPEG"):
        load_unlabelled(tmp_path / "ash" / "IMG_0.HEIC", SHAPE, whole)
    assert len(load_unlabelled(tmp_path / "ash", SHAPE, whole).names) == 1


@pytest.fixture
def folders(tmp_path, task):
    for number, (image, y) in enumerate(zip(task.x_support, task.y_support, strict=True)):
        folder = tmp_path / "support" / f"class {y}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze(-1)).save(folder / f"{number:02}.png")  # in the order of the task
    (tmp_path / "query").mkdir()
    for number, image in enumerate(task.x_query):
        Image.fromarray(image.squeeze(-1)).save(tmp_path / "query" / f"{number:02}.png")
    return tmp_path


@pytest.mark.long
def test_folders_in_probabilities_out(tiny_run, folders, task, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(predicting, "preparation", lambda name, ink: asked.append(name) or preparation(name, ink))
    arguments = [str(tiny_run.path), "--support", str(folders / "support"), "--query", str(folders / "query")]
    arguments += ["--temperature", "0.5"]
    assert predict.command_line([*arguments, "--csv", str(folders / "p.csv")]) == 0
    printed = capsys.readouterr().out
    assert "4 classes with 3 labelled images each, 20 queries; read as 16 x 16 pixels, grey\n" in printed
    rows = list(csv.DictReader((folders / "p.csv").read_text().splitlines()))
    assert [row["prediction"] in row and float(row[row["prediction"]]) >= 0.25 for row in rows] == [True] * 20
    np.savez(folders / "support.npz", images=task.x_support, labels=[f"class {y}" for y in task.y_support])
    np.savez(folders / "query.npz", images=task.x_query / np.float32(255))
    from_files = predict.main(
        predict.PredictionConfig(
            str(tiny_run.path), str(folders / "support.npz"), (str(folders / "query.npz"),), temperature=0.5
        )
    )
    values = [[float(row[name]) for name in from_files.classes] for row in rows]
    np.testing.assert_allclose(from_files.probabilities, values, atol=1e-6)  # as printed, with six digits
    assert asked == ["omniglot"] * 2  # the run's own data set


@pytest.mark.long
def test_labelled_queries_are_asked_like_others_and_scored(tiny_run, folders, task, capsys):
    for number, y in enumerate(task.y_query):
        folder = folders / "test" / (f"class {y}" if y else "of no class")
        folder.mkdir(parents=True, exist_ok=True)
        (folders / "query" / f"{number:02}.png").rename(folder / f"{number:02}.png")
    support = [str(tiny_run.path), "--support", str(folders / "support"), "--temperature", "0.5"]
    found = predict.main(predict.parse([*support, "--test", str(folders / "test")]))
    order = np.argsort([(folders / one).name for one in found.names])
    unlabelled = predict.main(predict.parse([*support, "--query", str(folders / "test")]))
    again = np.argsort([(folders / one).name for one in unlabelled.names])
    np.testing.assert_allclose(found.probabilities[order], unlabelled.probabilities[again], atol=1e-6)
    labels = np.array(found.labels)[order]
    assert labels.tolist() == [f"class {y}" if y else "of no class" for y in task.y_query] and unlabelled.labels is None
    right = np.array(found.predictions)[order] == labels
    assert found.scores.right == (right.sum(), (task.y_query > 0).sum()) and found.scores.others_kept.of == 5
    np.savez(folders / "test.npz", images=task.x_query, labels=[f"class {y}" for y in task.y_query])
    arrays = predict.main(predict.parse([*support, "--test", str(folders / "test.npz")]))
    assert arrays.scores.right.of == 20 and arrays.scores.classes.keys() == {f"class {y}" for y in range(4)}
    capsys.readouterr()
    both = ["--test", str(folders / "test.npz"), "--query", str(folders / "query")]
    for arguments in (both, []):
        with pytest.raises(SystemExit) as stopped:
            predict.command_line([*support, *arguments])
        assert stopped.value.code == 2 and "--query" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="expected either --query or --test, got neither"):
        predicting.predict_folders(str(tiny_run.path), folders / "support")


@pytest.mark.long
def test_features_of_ones_own_from_training_to_probabilities(tmp_path, capsys):
    rng = np.random.default_rng(0)

    def clusters(classes):
        labels = np.repeat(np.arange(classes), 6)
        return (rng.normal(scale=3, size=(classes, 5))[labels] + rng.normal(size=(len(labels), 5))), labels

    arrays = {}
    for part in SPLITS:
        arrays[f"{part}_features"], arrays[f"{part}_labels"] = clusters(8)
    np.savez(tmp_path / "network.npz", **arrays)
    settings = {name: value for name, value in tiny_omniglot.SETTINGS.items() if name.startswith("trainer.")}
    run = RunConfig(
        dataset=f"embeddings:{tmp_path / 'network.npz'}",
        backbone="identity",
        way=3,
        query=3,
        episodes=4,
        run_dir=str(tmp_path / "run"),
        settings=settings,
    )
    rows = meta_train.main(run)["test"]
    assert rows["trained"]["accuracy"] > 0.6 and "1-nearest neighbour on features" in rows
    features, labels = clusters(3)
    np.savez(tmp_path / "support.npz", features=features[::2], labels=np.array(["oak", "ash", "elm"])[labels[::2]])
    np.savez(tmp_path / "query.npz", features=features[1::2])
    asked = [str(tmp_path / name) for name in ("run", "support.npz", "query.npz")]
    found = predict.main(predict.parse([asked[0], "--support", asked[1], "--query", asked[2], "--temperature", "0.2"]))
    assert "3 classes with 3 labelled images each, 9 queries; read as 5 features\n" in capsys.readouterr().out
    truth = [["oak", "ash", "elm"][label] for label in labels[1::2]]
    assert [found.classes[k] for k in found.probabilities.argmax(1)] == truth
    assert found.names == [f"{asked[2]}:{number}" for number in range(9)]


def test_rows_of_features_have_the_names_that_the_file_gives_them(tmp_path):
    """With the file before them, so that no picture of this machine is shown for a name in a foreign file."""
    file, rows = tmp_path / "some.npz", np.eye(3)
    np.savez(file, features=rows, names=np.array(["a.png", "b/a.png", __file__]), labels=np.arange(3))
    for labelled in (True, False):
        assert load_features(file, 3, labelled).names == [f"{file}:{name}" for name in ("a.png", "b/a.png", __file__)]
    for wrong in (np.array(["a.png"]), np.arange(3), np.array([["a", "b", "c"]])):
        np.savez(file, features=rows, names=wrong)
        with pytest.raises(
            DataError, match=r"expected as names in .* a word for each of 3 rows, got .*; leave that array out"
        ):
            load_features(file, 3, False)


def test_predictions_draw_by_a_key_that_inference_does_not_use(classifier, task, monkeypatch):
    """Draws that come twice would have the prediction's error follow that of the inference."""
    fitted, used = classifier.fit(task.x_support, task.y_support), []
    plain, key = conditioning.apply, fitted.task_.key

    def apply(function, learner, static, *arguments):
        if function is not conditioning._predicted:
            return plain(function, learner, static, *arguments)
        return used.append(arguments[0]) or (np.ones((64, 5)), 0)

    monkeypatch.setattr(conditioning, "apply", apply)
    fitted.predict_proba(task.x_query)
    known = {np.asarray(jax.random.key_data(one)).tobytes() for one in (key, *jax.random.split(key))}
    assert used and not known & {np.asarray(jax.random.key_data(key)).tobytes() for key in used}


@pytest.mark.long
def test_more_draws_leave_less_to_the_seed(classifier, task):
    def spread(draws):
        models = [changed(classifier, temperature=1.0, draws=draws, random_state=seed) for seed in range(4)]
        fits = [model.fit(task.x_support, task.y_support) for model in models]
        return np.ptp([fit.predict_proba(task.x_query) for fit in fits], axis=0).max()

    assert spread(8192) < min(2e-3, spread(64) / 5)


@pytest.mark.long
def test_the_temperature_is_that_of_as_many_classes_and_images(
    tiny_run, tiny_data, folders, tmp_path, capsys, monkeypatch
):
    """Fitted on the run's training classes as evaluate.py does; without its data the run's own stays, as it says."""
    asked, given = [], []

    def fitted(learner, known, episodes, *, raised):
        asked.append((known.classes, *episodes.shape[:2]))
        return 0.1 * episodes.shape.shot

    def fit(*arguments):
        given.append(arguments[5][:2])
        return fit_task(*arguments)

    monkeypatch.setattr(shape_temperature, "temperature_of", fitted)
    monkeypatch.setattr(classifier_module, "fit_task", fit)
    without = shutil.ignore_patterns(shape_temperature.KEPT)  # what is fitted is kept there
    path = shutil.copytree(tiny_run.path, tmp_path / "run", ignore=without)
    own = load_run(path)
    chosen, data = own.config.trainer.temperature_classes, ["--data-root", tiny_data]
    arguments = [str(path), "--support", str(folders / "support"), "--query", str(folders / "query")]
    found = predict.main(predict.parse([*arguments, *data]))
    predict.main(predict.parse([*arguments, *data]))  # which fits nothing
    given.pop()
    assert asked == [(chosen, 4, 3), (chosen, 4, 2)] and given == [(pytest.approx(0.3), pytest.approx(0.2))]
    learned = f"temperature {found.temperature:.3g}, learned from the labelled images; before them 0.3\n"
    assert learned in capsys.readouterr().out
    assert found.temperature != pytest.approx(0.3)
    asked.clear()
    for way, shot in ((10_000, 10_000), (2, 10_000)):  # as near as time and the data allow
        shape_temperature.for_user(own, way, shot, tiny_data)
    assert asked == [(chosen, 20, 10), (chosen, 20, 9), (chosen, 2, 19), (chosen, 2, 18)]
    assert shape_temperature.for_shape(own, 2, 5, tiny_data) == pytest.approx(0.5)
    assert shape_temperature.for_shape(own, 3, 1, tiny_data) == own.temperature  # as trained
    assert shape_temperature.for_user(own, 3, 1, tiny_data) == (own.temperature, None)
    assert shape_temperature.for_user(own, 3, 2, tiny_data) == (pytest.approx(0.2), own.temperature)
    assert len(asked) == 6
    (tmp_path / "nothing").mkdir()
    without_data = [*arguments, "--data-root", str(tmp_path / "nothing")]
    predict.main(predict.parse(without_data))
    assert given[-1] == (pytest.approx(0.3), pytest.approx(0.2)) and len(asked) == 6  # those that were kept
    unknown = "was fitted for 3-way 1-shot tasks; where the data set omniglot is at hand"
    assert unknown not in capsys.readouterr().out
    (path / shape_temperature.KEPT).write_text("{}")
    heads._fitted_for.cache_clear()  # within a process it is asked for once
    predict.main(predict.parse(without_data))
    assert given[-1] == (own.temperature, own.temperature) and len(asked) == 6
    assert unknown in capsys.readouterr().out


@pytest.mark.long
def test_a_file_finds_its_run_from_any_folder(tiny_run, folders, tiny_data, tmp_path, monkeypatch):
    """The file holds where the run lay, so that it is not bound to the working folder of the time."""
    without = shutil.ignore_patterns(shape_temperature.KEPT)
    shutil.copytree(tiny_run.path, tmp_path / "run", ignore=without)
    (tmp_path / "elsewhere").mkdir()
    file, query = str(tmp_path / "a"), ["--query", str(folders / "query")]
    monkeypatch.chdir(tmp_path)
    before = ["--support", str(folders / "support"), "--temperature", "1"]
    first = predict.main(predict.parse(["run", *before, *query, "--save", file]))
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = predict.main(predict.parse([file, *query]))
    np.testing.assert_array_equal(again.probabilities, first.probabilities)
    assert predicting.load_model(file, data_root=tiny_data).classifier.head_.data_root == tiny_data
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(SavedError, match=r"no run in .*run: .* has moved, say so: .* or predict.py FILE --run DIR$"):
        predict.main(predict.parse([file, *query]))
    again = predict.main(predict.parse([file, *query, "--run", "../moved", "--save", file]))
    np.testing.assert_array_equal(again.probabilities, first.probabilities)
    monkeypatch.chdir(tmp_path)
    again = predict.main(predict.parse([file, *query]))  # where it has moved is kept
    np.testing.assert_array_equal(again.probabilities, first.probabilities)
    with pytest.raises(ConfigError, match="expected --run with a file that --save wrote, got moved; name the folder"):
        predict.main(predict.parse(["moved", *before, *query, "--run", "moved"]))


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "warm"])
def test_a_temperature_that_is_not_positive_is_refused(text):
    with pytest.raises(ConfigError, match=f"expected a positive number, got '{text}'"):
        predict.parse(["run", "--support", "a", "--query", "b", "--temperature", text])


def test_bad_images_are_refused_in_one_line(tiny_run, folders, tmp_path, capsys):
    empty, damaged = tmp_path / "empty", tmp_path / "query" / "damaged.png"
    empty.mkdir()
    np.savez(tmp_path / "nan.npz", images=np.full((2, 4, 4), np.nan))
    np.savez(tmp_path / "long.npz", images=np.zeros((2, 4, 4), np.uint8), labels=["a"])
    np.savez(tmp_path / "single.npz", images=np.zeros((2, 4, 4), np.uint8), labels="a")
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    np.savez(tmp_path / "channels.npz", images=np.zeros((2, 3, 5, 5), np.uint8))
    cases = [
        (load_labelled, tmp_path / "nothing", "got .*nothing, which does not exist"),
        (load_labelled, tmp_path / "nan.npz" / "x", "got .*x, which does not exist"),
        (load_labelled, empty, "a subfolder of images for each of two classes or more in .*empty, got no subfolder"),
        (load_labelled, tmp_path / "nan.npz", "expected the arrays images, labels in .*, got images"),
        (load_labelled, tmp_path / "long.npz", r"got images of shape \(2, 4, 4\) and labels of \(1,\)"),
        (load_labelled, tmp_path / "single.npz", r"and labels of \(\)"),
        (load_unlabelled, tmp_path / "array.npz", "expected an .npz file at .*array.npz, got one that cannot be read"),
        (load_unlabelled, empty, "expected images .* got none"),
        (load_unlabelled, tmp_path / "nan.npz", r"expected numbers within \[0, 1\]"),
        (load_unlabelled, tmp_path / "channels.npz", "expected 1, 3 or 4 channels last"),
        (load_unlabelled, tmp_path / "missing.npz", "expected an .npz file"),
    ]
    for load, path, message in cases:
        with pytest.raises(DataError, match=message):
            load(path, SHAPE, whole)
    one = folders / "one"
    (folders / "support" / "class 0").rename(folders / "class 0")
    one.mkdir()
    (folders / "class 0").rename(one / "class 0")
    with pytest.raises(DataError, match="got only class 0"):
        load_labelled(one, SHAPE, whole)
    (one / "class 1").mkdir()
    with pytest.raises(DataError, match=r"got none in .*class 1; remove it"):  # not a task of one class fewer
        load_labelled(one, SHAPE, whole)
    damaged.write_bytes(b"not an image")
    with pytest.raises(SystemExit) as exit_info:
        predict.command_line([str(tiny_run.path), "--support", str(folders / "support"), "--query", str(damaged)])
    printed = capsys.readouterr().err
    assert exit_info.value.code == 2 and printed.count("\n") == 1 and "got one that cannot be read" in printed


def test_names_of_classes_and_files_are_text_on_the_screen_and_in_a_table(tmp_path, tiny_run, task, capsys):
    names = ["=1+1", "\x1b[2J"]
    for name, y in zip(names, (0, 1), strict=True):
        (tmp_path / "support" / name).mkdir(parents=True)
        image = Image.fromarray(task.x_support[task.y_support == y][0].squeeze(-1))
        image.save(tmp_path / "support" / name / os.fsdecode(b"caf\xe9.png"))
    given = [str(tiny_run.path), "--support", str(tmp_path / "support"), "--query", str(tmp_path / "support")]
    assert predict.command_line([*given, "--temperature", "1", "--csv", str(tmp_path / "a.csv")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and r"\x1b[2J" in printed and r"caf\xe9.png" in printed
    with (tmp_path / "a.csv").open(newline="", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    assert header[2:4] == ["answer", "unknown"] and sorted(header[4:]) == sorted(["'=1+1", names[1]])
    assert {row[1] for row in rows} <= set(header[4:])
