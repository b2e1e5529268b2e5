"""Features are computed once for each picture and encoder, and never read from a damaged entry."""

import os

import numpy as np
import pytest

from fewshot.models.networks.pictures import FrozenEncoder, Preparation
from fewshot.tasks import feature_cache
from fewshot.tasks.feature_cache import FeatureCache

SMALL = Preparation(side=8, short=9, mean=(0.0,) * 3, deviation=(1.0,) * 3)
PICTURES = np.random.default_rng(0).integers(0, 256, (7, 12, 15, 3), np.uint8)


class Counting(FrozenEncoder):
    """Mean colours; counts the pictures that go through the network."""

    def __init__(self, identity="mean-1"):
        super().__init__("mean", SMALL, 3, identity, lambda pixels: pixels.mean((1, 2)) / 255, 2)
        self.seen = 0

    def encode(self, pictures):
        self.seen += len(pictures)
        return super().encode(pictures)


@pytest.fixture
def cache(tmp_path):
    return FeatureCache(tmp_path / "features")


def entries(cache):
    return sorted(cache.folder.rglob("*.npz"))


def test_a_second_call_takes_no_pass(cache, monkeypatch):
    monkeypatch.setattr(feature_cache, "BLOCK", 3)
    encoder = Counting()
    wanted = Counting().encode(PICTURES)
    np.testing.assert_array_equal(cache.encode(encoder, PICTURES), wanted)
    assert encoder.seen == 7 and len(entries(cache)) == 7
    np.testing.assert_array_equal(cache.encode(encoder, PICTURES), wanted)
    np.testing.assert_array_equal(FeatureCache(cache.folder).encode(encoder, PICTURES[::-1]), wanted[::-1])
    assert encoder.seen == 7


def test_only_new_pictures_take_a_pass_and_equal_ones_take_one(cache):
    encoder = Counting()
    cache.encode(encoder, PICTURES[:3])
    features = cache.encode(encoder, PICTURES[[5, 1, 5, 6, 0]])
    assert encoder.seen == 3 + 2
    np.testing.assert_array_equal(features, Counting().encode(PICTURES)[[5, 1, 5, 6, 0]])


def test_it_says_how_many_pictures_it_encodes(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "BLOCK", 4)
    said = []
    for _ in range(2):
        FeatureCache(tmp_path, said.append).encode(Counting(), PICTURES)
    assert said == ["new pictures to encode: 4", "new pictures to encode: 3"]


def test_another_encoder_or_picture_has_its_own_entry(cache):
    cache.encode(Counting(), PICTURES)
    other = Counting("mean-2")
    cache.encode(other, PICTURES)
    assert other.seen == 7 and len(entries(cache)) == 14
    changed = Counting().prepare(PICTURES[:1])
    changed[0, 0, 0, 0] ^= 1
    encoder = Counting()
    cache.encode(encoder, changed)
    assert encoder.seen == 1


def damage(kind, path):
    content = path.read_bytes()
    if kind == "cut":
        path.write_bytes(content[:-30])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "a bit":
        place = content.index(np.load(path)["features"].tobytes())
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        wrong = {
            "shape": np.zeros(4, np.float32),
            "dtype": np.zeros(3, np.float64),
            "nan": np.full(3, np.nan, np.float32),
            "object": np.array([print] * 3, object),
        }
        np.savez(path, features=wrong[kind])


@pytest.mark.parametrize("kind", ["cut", "empty", "a bit", "shape", "dtype", "nan", "object"])
def test_a_damaged_entry_is_computed_again(cache, kind):
    encoder = Counting()
    wanted = cache.encode(encoder, PICTURES)
    damage(kind, entries(cache)[2])
    np.testing.assert_array_equal(cache.encode(encoder, PICTURES), wanted)
    assert encoder.seen == 8
    np.testing.assert_array_equal(cache.encode(encoder, PICTURES), wanted)
    assert encoder.seen == 8


def test_the_folder_is_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert FeatureCache().folder == tmp_path / "bayesian-few-shot" / "features"


def test_a_folder_that_cannot_be_written_to_is_told_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    cache, encoder = FeatureCache(tmp_path / "file" / "features"), Counting()
    for _ in range(2):
        np.testing.assert_array_equal(cache.encode(encoder, PICTURES), Counting().encode(PICTURES))
    assert encoder.seen == 14
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "computed again" in error


def test_nothing_but_entries_is_left_and_no_pictures_are_none(cache):
    assert cache.encode(Counting(), PICTURES[:0]).shape == (0, 3)
    assert not cache.folder.exists()
    cache.encode(Counting(), PICTURES)
    names = [name for _, _, files in os.walk(cache.folder) for name in files]
    assert len(names) == 7 and all(name.endswith(".npz") for name in names)
