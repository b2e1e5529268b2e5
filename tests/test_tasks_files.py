"""The data root, downloads with check sums and damaged files; nothing here touches the network."""

import hashlib
import os
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from fewshot.tasks import files as files
from fewshot.tasks.files import Archive, DataError, cache_folder, check_digest, find_or_convert, read_npz, resolve_root

CONTENT = b"three images" * 1000


@pytest.fixture
def archive(tmp_path_factory) -> Archive:
    """An archive behind a file:// address."""
    path = tmp_path_factory.mktemp("server") / "things.zip"
    path.write_bytes(CONTENT)
    return Archive("things.zip", path.as_uri(), hashlib.md5(CONTENT).hexdigest(), 1)


@pytest.fixture(autouse=True)
def downloads_allowed(monkeypatch):
    monkeypatch.delenv(files.DOWNLOAD_VARIABLE, raising=False)


def convert(path: Path) -> dict[str, np.ndarray]:
    return {"images": np.frombuffer(path.read_bytes(), np.uint8), "unused": np.zeros(3)}


def get(root: Path, archive: Archive, names: tuple[str, ...] = ("images",)) -> dict[str, np.ndarray]:
    return find_or_convert(root, "things.npz", (archive,), convert, names)


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_argument_comes_before_the_variable_before_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEWSHOT_DATA", raising=False)
    assert resolve_root() == cache_folder() == tmp_path / "cache" / "bayesian-few-shot"
    monkeypatch.setenv("FEWSHOT_DATA", str(tmp_path))
    assert resolve_root() == tmp_path
    other = tmp_path / "other"
    other.mkdir()
    assert resolve_root(other) == other
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "bayesian-few-shot"


def test_a_named_root_must_exist(monkeypatch, tmp_path):
    with pytest.raises(DataError, match="missing") as error:
        resolve_root(tmp_path / "missing")
    assert "--data-root" in one_line(error)
    monkeypatch.setenv("FEWSHOT_DATA", str(tmp_path / "missing"))
    with pytest.raises(DataError, match="FEWSHOT_DATA"):
        resolve_root()


def test_a_missing_file_is_downloaded_checked_converted_and_kept(archive, tmp_path, capsys):
    root = tmp_path / "new"
    assert get(root, archive)["images"].tobytes() == CONTENT
    assert archive.url in capsys.readouterr().err
    assert [path.name for path in root.iterdir()] == ["things.npz"]
    Path(archive.url.removeprefix("file://")).unlink()
    assert get(root, archive)["images"].tobytes() == CONTENT
    assert capsys.readouterr().err == ""


def test_an_archive_put_there_by_hand_is_used_and_left(archive, tmp_path, monkeypatch):
    monkeypatch.setenv(files.DOWNLOAD_VARIABLE, "0")
    (tmp_path / "things.zip").write_bytes(CONTENT)
    assert get(tmp_path, archive)["images"].tobytes() == CONTENT
    assert (tmp_path / "things.zip").exists()


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_wrong_check_sum_is_refused_and_leaves_no_file(archive, tmp_path, by_hand):
    wrong = archive._replace(md5="0" * 32)
    if by_hand:
        (tmp_path / "things.zip").write_bytes(CONTENT)
    with pytest.raises(DataError, match="expected MD5 000") as error:
        get(tmp_path, wrong)
    assert archive.url in one_line(error)
    assert [path.name for path in tmp_path.iterdir()] == (["things.zip"] if by_hand else [])


@pytest.mark.parametrize(
    "failure", [urllib.error.URLError("no route to host"), TimeoutError("timed out"), ConnectionResetError("reset")]
)
def test_a_failed_download_says_what_to_fetch_and_where_to_put_it(archive, tmp_path, monkeypatch, failure):
    def fail(url, timeout):
        raise failure

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    with pytest.raises(DataError) as error:
        get(tmp_path, archive)
    message = one_line(error)
    assert all(word in message for word in (archive.url, str(tmp_path), "things.npz"))
    assert not list(tmp_path.iterdir())


def test_downloads_can_be_forbidden(archive, tmp_path, monkeypatch):
    monkeypatch.setenv(files.DOWNLOAD_VARIABLE, "0")
    with pytest.raises(DataError) as error:
        get(tmp_path, archive)
    message = one_line(error)
    assert all(word in message for word in ("things.npz", str(tmp_path), archive.url, "FEWSHOT_DATA"))


@pytest.mark.parametrize("before", [None, "1"])
def test_downloads_are_forbidden_for_a_while_and_then_as_they_were(archive, tmp_path, monkeypatch, before):
    if before is not None:
        monkeypatch.setenv(files.DOWNLOAD_VARIABLE, before)
    with pytest.raises(DataError, match="forbids downloads"), files.downloads_forbidden():
        get(tmp_path, archive)
    assert os.environ.get(files.DOWNLOAD_VARIABLE) == before
    assert len(get(tmp_path, archive)["images"]) == len(CONTENT)


def test_damaged_and_foreign_files_are_named(archive, tmp_path):
    path = tmp_path / "things.npz"
    get(tmp_path, archive)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"no zip file", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"things\.npz") as error:
            get(tmp_path, archive)
        assert "delete it" in one_line(error)
    path.write_bytes(whole)
    with pytest.raises(DataError, match="expected the arrays images, labels"):
        read_npz(path, ("images", "labels"))


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_damage_anywhere_is_found_or_harmless(archive, tmp_path, flip):
    path = tmp_path / "things.npz"
    get(tmp_path, archive)
    whole = path.read_bytes()
    found = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= flip
        path.write_bytes(damaged)
        try:
            assert get(tmp_path, archive)["images"].tobytes() == CONTENT
        except DataError as error:
            found += "\n" not in str(error)
    assert found > len(whole) // 3


def test_a_folder_that_cannot_be_written_to_is_named(archive, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="file") as error:
        files.write_npz(tmp_path / "file" / "things.npz", {"images": np.zeros(2)})
    assert "--data-root" in one_line(error)
    with pytest.raises(DataError, match="expected to download"):
        get(tmp_path / "file", archive)


def test_images_that_differ_from_the_reference_are_refused():
    images = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    check_digest("things", images, hashlib.sha256(images.tobytes()).hexdigest())
    with pytest.raises(DataError, match="things") as error:
        check_digest("things", images + 1, hashlib.sha256(images.tobytes()).hexdigest())
    one_line(error)
