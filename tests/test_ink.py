"""Photographs of ink on paper: found, cleaned, centred; scans stay as they are."""

import warnings

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy import ndimage

from fewshot import FewShotClassifier, predicting
from fewshot.tasks import DATASETS, ink, preparation
from fewshot.tasks.images import whole

SHAPE, STYLE = (28, 28, 1), ink.STYLES["omniglot"]


def stroke(side, at=(0.5, 0.5), size=0.4, width=0.03):
    """A hook with a bar, light on black, [side, side] in [0, 1]."""
    picture = Image.new("L", (side, side), 0)
    corners = [(0, 0), (0, 1), (1, 1), (1, 0.6), (0, 0.4)]
    points = [(side * (at[0] + size * (x - 0.5)), side * (at[1] + size * (y - 0.5))) for x, y in corners]
    ImageDraw.Draw(picture).line(points, 255, round(side * width))
    return ndimage.gaussian_filter(np.asarray(picture) / 255, 0.6)


def photograph(light_on_dark=False, at=(0.65, 0.4), size=0.4, seed=0, side=200):
    """Ink of it under uneven light, with noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    light = 180 + 25 * x - 15 * y - 12 * (x * x + y * y)
    seen = light * (1 - 0.6 * stroke(side, at, size)) + random.normal(0, 4, (side, side))
    seen = 255 - seen if light_on_dark else seen
    return Image.fromarray(np.clip(seen, 0, 255).astype(np.uint8)).convert("RGB")


def test_scans_stay_as_they_are_to_the_last_bit():
    prepare = ink.InkPreparation("omniglot")
    for seed in range(4):
        random = np.random.default_rng(seed)
        scan = stroke(int(random.integers(28, 120)), random.uniform(0.45, 0.55, 2), random.uniform(0.5, 0.9), 0.06)
        for picture in (scan, 1 - scan, 0.02 + 0.98 * scan):
            picture = Image.fromarray(np.round(255 * picture).astype(np.uint8))
            np.testing.assert_array_equal(prepare(picture, SHAPE), whole(picture, SHAPE))
    assert prepare.photographs == 0


@pytest.mark.parametrize("light_on_dark", [False, True])
@pytest.mark.parametrize("at, size", [((0.65, 0.4), 0.4), ((0.3, 0.7), 0.25)])
def test_ink_is_found_wherever_it_is_and_made_like_a_training_image(light_on_dark, at, size):
    prepare = ink.InkPreparation("omniglot")
    found = prepare(photograph(light_on_dark, at, size), SHAPE)
    assert prepare.photographs == 1 and found.shape == SHAPE and found.dtype == np.uint8
    clean = whole(Image.fromarray(np.uint8(255 * stroke(112, (0.5, 0.5), (STYLE.side - 1.75) / 28, 1 / 16))), SHAPE)
    a, b = found > 127, clean > 127
    assert (a & b).sum() / (a | b).sum() > 0.55  # two pixels wide: one of them off is a third
    rows, columns = np.nonzero(a[..., 0])
    assert abs(max(np.ptp(rows), np.ptp(columns)) + 1 - STYLE.side) <= 1.5
    assert abs(rows.min() + rows.max() - 27) <= 2 and abs(columns.min() + columns.max() - 27) <= 2
    assert (found[~ndimage.binary_dilation(b, iterations=2)] == 0).mean() > 0.98  # the paper is black
    left = prepare(photograph(light_on_dark, at, size), SHAPE), whole(photograph(light_on_dark, at, size), SHAPE)
    assert (left[1] > 8).mean() > 0.5  # which it is not as it is


def test_the_light_on_the_paper_is_found_under_the_ink():
    y, x = np.mgrid[-1:1:80j, -1:1:90j]
    light = 170 + 20 * x - 9 * y + 7 * x * y - 12 * y * y + 5 * x * x
    seen = light - 90 * (np.abs(x - y) < 0.15)
    fitted, noise = ink.paper(seen)
    np.testing.assert_allclose(fitted, light, atol=1e-6)
    assert noise == 1.0  # its least value
    _, noise = ink.paper(seen + np.random.default_rng(0).normal(0, 5, seen.shape))
    assert noise == pytest.approx(5, rel=0.15)


def test_strokes_have_the_width_that_they_have():
    for width in (4, 8, 12):
        bar = np.zeros((40, 400), bool)
        bar[10 : 10 + width] = True
        assert ink.stroke_width(bar) == pytest.approx(width, rel=0.02)
    thin = np.zeros((30, 200))
    thin[14:16] = 1
    assert ink.stroke_width(ink.thickened(thin, 10) > 0.5) == pytest.approx(10, abs=1.6)
    assert ink.thickened(thin, 2) is thin
    wanted = ink.wanted_width(100, 4, 18, 1.5)
    assert wanted / (100 + wanted - 4) == pytest.approx(1.5 / 18)


def test_a_threshold_parts_two_levels_and_dirt_is_no_stroke():
    random = np.random.default_rng(0)
    values = np.concatenate([random.normal(10, 2, 900), random.normal(60, 2, 100)])
    assert 18 < ink.otsu(values) < 52
    mask = np.zeros((60, 60), bool)
    mask[20:40, 20:24] = mask[50, 50] = mask[0, 10:40] = True
    kept = ink.without_specks(mask)
    assert kept[20:40, 20:24].all() and kept.sum() == 80
    mask[20:40, 20:24] = mask[50, 50] = False
    assert ink.without_specks(mask)[0, 10:40].all()  # it is all there is


def test_empty_paper_has_no_ink():
    random = np.random.default_rng(0)
    blank = Image.fromarray(np.clip(170 + random.normal(0, 4, (200, 200)), 0, 255).astype(np.uint8))
    prepare = ink.InkPreparation("glyphs")
    np.testing.assert_array_equal(prepare(blank, SHAPE), whole(blank, SHAPE))
    assert prepare.photographs == 0 and ink.is_photograph(blank)


def test_it_is_for_characters_and_can_be_switched_off():
    assert isinstance(preparation("omniglot"), ink.InkPreparation)
    assert preparation("omniglot", False) is whole and preparation("folder-28:x") is whole
    assert set(ink.STYLES) <= set(DATASETS)


@pytest.mark.long
def test_a_run_on_characters_says_what_it_read_and_what_looks_like_none(tiny_run, tmp_path, capsys):
    for seed, folder in enumerate(("support/a", "support/b", "query")):
        (tmp_path / folder).mkdir(parents=True)
        photograph(seed=seed).save(tmp_path / folder / "1.png")
    Image.fromarray(np.uint8(255 * stroke(60, size=0.6, width=0.06))).save(tmp_path / "query" / "scan.png")
    full = np.full((40, 40), 255, np.uint8)
    full[:, 0] = full[:, -1] = full[0] = full[-1] = 0
    Image.fromarray(full).save(tmp_path / "query" / "full.png")
    where = str(tiny_run.path), str(tmp_path / "support"), [str(tmp_path / "query")]
    found = predicting.predict_folders(*where, temperature=1.0).answers
    assert "; 3 photographs of ink cleaned and centred (--no-ink leaves them" in found.read_as
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "full.png does not look like the characters of omniglot" in line
    with pytest.warns(UserWarning, match=r"full.png does not look like the characters of omniglot: strokes cover .*%"):
        FewShotClassifier.from_run(tiny_run.path).fit([tmp_path / "query" / f"{n}.png" for n in ("1", "full")], [0, 1])
    photograph(seed=0).save(tmp_path / "support" / "b" / "2.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it is said once, in the words of the command
        predicting.predict_folders(*where, temperature=1.0)
    unlike, twice = capsys.readouterr().err.splitlines()
    assert "full.png does not look like the characters of omniglot" in unlike
    assert twice.startswith("warning: labelled pictures are given as two classes")
    found = predicting.predict_folders(*where, temperature=1.0, find_ink=False).answers
    assert "ink" not in found.read_as
