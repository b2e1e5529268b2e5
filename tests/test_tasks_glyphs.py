"""The built-in glyphs: classes, splits that share no pixels, drawing, and the cache."""

import hashlib
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from fewshot.tasks import DataError, load
from fewshot.tasks import glyph_classes as glyph_classes
from fewshot.tasks import glyphs as glyphs
from fewshot.tasks.glyph_classes import SCRIPTS, THRESHOLD, GlyphClass, canonical_images, find_classes, near_pairs
from fewshot.tasks.glyph_rendering import (
    FACES,
    KEPT_INK,
    Variation,
    canonical,
    change_stroke,
    draw_letter,
    letters_of,
    random_variation,
    script_of,
    vary,
)

SPLITS = ("train", "validation", "test")
REPOSITORY = Path(__file__).resolve().parents[1]
FEW = [GlyphClass(split, ord(letter), FACES[:4]) for split, letter in zip(SPLITS, "AԱა", strict=True)]


@pytest.fixture(scope="module")
def splits():
    return load("glyphs")


@pytest.fixture(scope="module")
def classes():
    return find_classes()


def images_of(splits, split: str) -> np.ndarray:
    dataset = getattr(splits, split)
    return np.asarray(dataset.images)[np.asarray(dataset.index)][..., 0]  # [K, 20, 28, 28]


def test_enough_classes_of_20_images_and_their_letters(splits, classes):
    sizes = {split: getattr(splits, split).classes for split in SPLITS}
    assert sizes["train"] >= 1000 and sizes["validation"] >= 100 and sizes["test"] >= 150
    assert splits.image_shape == (28, 28, 1)
    for split in SPLITS:
        dataset = getattr(splits, split)
        assert dataset.smallest == 20 and dataset.images.shape == (20 * dataset.classes, 28, 28, 1)
        codes = [ord(unicodedata.lookup(name)) for name in splits.class_names[split]]
        assert codes == [member.code for member in classes if member.split == split]
        assert {script_of(code) for code in codes} <= set(SCRIPTS[split])
    assert all(len(member.faces) >= 4 for member in classes)


@pytest.mark.long
def test_splits_and_classes_are_disjoint_in_pixels(splits, classes):
    """No two classes, of whichever splits, look alike in any face that both have; no image is in two splits."""
    for face in FACES:
        codes = np.array([member.code for member in classes if face in member.faces])
        assert len(near_pairs(canonical_images(face, codes), THRESHOLD)) == 0, face
    seen = [{image.tobytes() for image in images_of(splits, split).reshape(-1, 784)} for split in SPLITS]
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_splits_are_disjoint_in_pixels_by_brute_force(classes):
    """The same for one face, with every difference computed in full."""
    shared = [member for member in classes if "DejaVuSans" in member.faces]
    images = canonical_images("DejaVuSans", np.array([member.code for member in shared])).reshape(len(shared), -1)
    split = np.array([SPLITS.index(member.split) for member in shared])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        difference = cdist(images[split == one] / 255, images[split == other] / 255, "cityblock") / 784
        assert difference.min() >= 0.02


def test_look_alikes_of_several_scripts_are_one_class_of_the_first_split(classes):
    of_code = {member.code: member for member in classes}
    for letters in ("AΑА", "oοоօ", "XΧХ"):  # Latin, Greek, Cyrillic, and the Armenian o
        present = [of_code[ord(letter)] for letter in letters if ord(letter) in of_code]
        assert len(present) <= 1 and all(member.split == "train" for member in present)
    letters = letters_of(sum(SCRIPTS.values(), ()))
    enough = sum(len(faces) >= glyph_classes.MINIMUM_FACES for faces in letters.values())
    assert enough - len(classes) > 600  # letters merged into other ones


def test_near_pairs_are_those_of_brute_force():
    rng = np.random.default_rng(0)
    centres = rng.choice(np.array([0, 255], np.uint8), (40, 28, 28))
    changes = rng.integers(0, 30, (320, 28, 28)) * (rng.random((320, 28, 28)) < 0.6)
    images = np.clip(centres[rng.integers(0, 40, 320)].astype(int) + changes, 0, 255).astype(np.uint8)
    images[300:] = images[300] // 255 * 255  # whole pixels that change make the cheap bound tight
    for number in range(301, 320):
        images[number].reshape(-1)[: number - 300] ^= 255
    flat = images.reshape(320, -1) / 255
    difference = cdist(flat, flat, "cityblock") / 784
    for threshold in (0.0, 0.02, 0.035, 0.2):
        expected = np.argwhere(np.triu(difference < threshold, k=1))
        found = near_pairs(images, threshold)
        np.testing.assert_array_equal(found[np.lexsort(found.T[::-1])], expected)
    assert 100 < len(near_pairs(images, 0.02)) < len(near_pairs(images, 0.2))


def test_chains_of_look_alikes_are_one_class(monkeypatch):
    """a ~ b and b ~ c in different faces join all three; the first split's letter with most faces stands for it."""
    faces_of = {ord("A"): FACES[:4], ord("B"): FACES[:5], ord("Ա"): FACES[:6], ord("Բ"): FACES[:6]}
    pairs = {FACES[0]: [[0, 2]], FACES[4]: [[0, 1]]}  # A ~ Ա; of B, Ա, Բ the first two
    images = {face: np.full((4, 28, 28), number, np.uint8) for number, face in enumerate(FACES)}
    monkeypatch.setattr(glyph_classes, "letters_of", lambda scripts: faces_of)
    monkeypatch.setattr(glyph_classes, "canonical_images", lambda face, codes: images[face])
    monkeypatch.setattr(
        glyph_classes, "near_pairs", lambda x, t: np.array(pairs.get(FACES[x[0, 0, 0]], np.zeros((0, 2))), int)
    )
    assert find_classes() == [
        GlyphClass("train", ord("B"), FACES[:5]),
        GlyphClass("validation", ord("Բ"), FACES[:6]),
    ]


def test_only_letters_that_a_face_has_are_drawn():
    letters = letters_of(("HEBREW",))
    assert "DejaVuSans" in letters[ord("א")] and "DejaVuSerif" not in letters[ord("א")]
    assert all(unicodedata.category(chr(code)) == "Lo" for code in letters)
    missing = draw_letter("DejaVuSerif", ord("א"))  # the box that stands for what a face lacks
    boxes = [draw_letter(face, code) for code, faces in letters.items() for face in faces if face == "DejaVuSans"]
    assert not any(box.shape == missing.shape and (box == missing).all() for box in boxes)
    with pytest.raises(ValueError, match=r"U\+0020"):
        draw_letter("DejaVuSans", ord(" "))


@pytest.mark.parametrize("letter", "Iołшმ")
def test_canonical_letters_fill_20_pixels_and_are_centred(letter):
    for face in ("DejaVuSans-Bold", "DejaVuSerif-Italic"):
        image = canonical(draw_letter(face, ord(letter))).astype(float)
        rows, columns = np.flatnonzero(image.sum(1)), np.flatnonzero(image.sum(0))
        assert 20 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 22
        assert abs(rows.mean() - 13.5) <= 0.5 and abs(columns.mean() - 13.5) <= 0.5


def still(n: int) -> Variation:
    return Variation(np.zeros(n), np.ones(n), np.zeros(n), np.zeros((n, 2)), np.zeros(n))


def test_no_change_is_the_canonical_rendering():
    letter = draw_letter("DejaVuSans", ord("R"))
    difference = vary([letter], still(1))[0].astype(float) - canonical(letter)
    assert np.abs(difference).mean() < 0.01 * 255


def test_changes_do_what_their_names_say():
    bar = np.pad(np.full((80, 8), 255, np.uint8), 1)  # 20 x 2 pixels
    plain = vary([bar], still(1))[0].astype(float)
    shifted = vary([bar], still(1)._replace(shift=np.array([[2.0, -1.0]])))[0]
    np.testing.assert_allclose(shifted, np.roll(plain, (-1, 2), axis=(0, 1)), atol=1)
    larger = vary([bar], still(1)._replace(scale=np.array([1.2])))[0]
    assert larger.sum() == pytest.approx(1.44 * plain.sum(), rel=0.03)
    wider = vary([bar], still(1)._replace(stroke=np.array([1.0])))[0]
    assert wider.sum() == pytest.approx(plain.sum() * 3 / 2 * 21 / 20, rel=0.04)
    slanted = vary([bar], still(1)._replace(shear=np.array([0.2])))[0].astype(float)
    columns = (slanted * np.arange(28)).sum(1)[6:22] / slanted.sum(1)[6:22]
    np.testing.assert_allclose(np.diff(columns), 0.2, atol=0.03)
    turned = vary([bar], still(1)._replace(rotation=np.array([15.0])))[0].astype(float)
    columns = (turned * np.arange(28)).sum(1)[6:22] / turned.sum(1)[6:22]
    np.testing.assert_allclose(np.diff(columns), -np.tan(np.deg2rad(15)), atol=0.03)


def test_thin_strokes_stay_visible():
    images = np.zeros((2, 112, 112), np.uint8)
    images[0, :, 50:62] = 255  # 3 pixels wide
    images[1, :, 50:53] = 255  # less than one
    thinned = change_stroke(images, np.full(2, -1.0)).sum(axis=(1, 2)) / images.sum(axis=(1, 2))
    np.testing.assert_allclose(thinned, [2 / 3, 1.0])
    assert (thinned >= KEPT_INK).all()
    np.testing.assert_array_equal(change_stroke(images, np.zeros(2)), images)


def test_random_changes_have_the_documented_ranges():
    change = random_variation(np.random.default_rng(0), 4000)
    for values, low, high in (
        (change.rotation, -15, 15),
        (change.scale, 0.8, 1.2),
        (change.shear, -0.2, 0.2),
        (change.shift, -2, 2),
        (change.stroke, -1, 1),
    ):
        assert low <= values.min() < low + 0.01 * (high - low) and high - 0.01 * (high - low) < values.max() <= high


def test_images_are_complete_bright_and_differ(splits):
    for split in SPLITS:
        images = images_of(splits, split)
        border = np.concatenate([images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], axis=-1)
        assert ((border > 128).sum(-1) >= 8).mean() < 0.01  # hardly any is cut off
        assert images.max(axis=(2, 3)).min() > 128
        assert all(len({image.tobytes() for image in images[k]}) == 20 for k in range(0, len(images), 7))


def test_the_cache_holds_what_the_code_draws(splits, classes):
    """If this fails after a change of the drawing code, raise VERSION, so that nobody reads old images."""
    for split in SPLITS:
        members = [member for member in classes if member.split == split]
        for k in range(0, len(members), 40):
            np.testing.assert_array_equal(images_of(splits, split)[k], glyphs.draw_class(members[k]))


@pytest.mark.long
def test_another_process_draws_the_same():
    program = (
        "import hashlib, sys; from tasks.glyphs import GlyphClass, draw_class; from tasks.glyph_rendering import FACES;"
        "print(hashlib.sha256(draw_class(GlyphClass('test', 0x10D3, FACES[:4])).tobytes()).hexdigest())"
    )
    here = hashlib.sha256(glyphs.draw_class(GlyphClass("test", 0x10D3, FACES[:4])).tobytes()).hexdigest()
    run = {"cwd": REPOSITORY, "env": {**os.environ, "PYTHONHASHSEED": "5"}, "capture_output": True, "text": True}
    assert subprocess.run([sys.executable, "-c", program], check=True, **run).stdout.strip() == here


@pytest.fixture
def small(monkeypatch, tmp_path) -> Path:
    """A cache folder of its own and three classes instead of all; the path of the cache file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(glyphs, "find_classes", lambda: FEW)
    return glyphs._cache_path()


def test_the_cache_is_written_once_and_read_again(small, monkeypatch, capsys):
    first = load("glyphs", data_root="/nowhere")
    assert "drawing" in capsys.readouterr().err
    assert [path.name for path in small.parent.iterdir()] == [small.name]
    monkeypatch.setattr(glyphs, "draw", None)
    second = load("glyphs")
    assert capsys.readouterr().err == ""
    np.testing.assert_array_equal(first.test.images, second.test.images)
    assert second.class_names == {
        "train": ("LATIN CAPITAL LETTER A",),
        "validation": ("ARMENIAN CAPITAL LETTER AYB",),
        "test": ("GEORGIAN LETTER AN",),
    }


def test_a_damaged_or_foreign_cache_is_drawn_again(small):
    expected = np.asarray(load("glyphs").train.images)
    whole = small.read_bytes()
    arrays = glyphs.draw(FEW)
    for damage in (
        lambda: small.write_bytes(whole[: len(whole) // 2]),
        lambda: small.write_bytes(b""),
        lambda: np.savez(small, **{**arrays, "version": np.array(0), "images": 255 - arrays["images"]}),
        lambda: np.savez(small, **{**arrays, "images": arrays["images"][:, :5]}),
        lambda: np.savez(small, codes=arrays["codes"]),
    ):
        damage()
        np.testing.assert_array_equal(load("glyphs").train.images, expected)
        assert glyphs._read_cache() is not None


def test_an_unwritable_cache_only_costs_time(small, capsys):
    small.parent.write_bytes(b"a file where the folder should be")
    assert load("glyphs").train.classes == 1
    assert "drawn again next time" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["glyph", "", "Omniglot"])
def test_unknown_data_sets_are_refused_with_the_known_ones(name):
    with pytest.raises(DataError, match=f"got '{name}'; try one of glyphs, omniglot, omniglot-emnist"):
        load(name)


@pytest.mark.long
def test_importing_tasks_loads_no_drawing_library():
    program = "import sys, tasks; print({'matplotlib', 'PIL', 'fontTools'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"
