"""The data root, downloads with check sums and damaged files; nothing here touches the network."""

import hashlib
import io
import os
import stat
import struct
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fewshot.tasks import files as files
from fewshot.tasks.files import Archive, DataError, cache_folder, check_digest, find_or_convert, read_npz, resolve_root

CONTENT = b"three images" * 1000


@pytest.fixture
def archive(monkeypatch) -> Archive:
    """An archive that any https address gives."""
    url = "https://example.org/things.zip"
    monkeypatch.setattr(files, "open_address", lambda _: io.BytesIO(CONTENT))
    return Archive("things.zip", url, hashlib.sha256(CONTENT).hexdigest(), 1)


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


def test_a_missing_file_is_downloaded_checked_converted_and_kept(archive, tmp_path, capsys, monkeypatch):
    root = tmp_path / "new"
    assert get(root, archive)["images"].tobytes() == CONTENT
    assert archive.url in capsys.readouterr().err
    assert [path.name for path in root.iterdir()] == ["things.npz"]
    monkeypatch.setattr(files, "open_address", None)
    assert get(root, archive)["images"].tobytes() == CONTENT
    assert capsys.readouterr().err == ""


def test_an_archive_put_there_by_hand_is_used_and_left(archive, tmp_path, monkeypatch):
    monkeypatch.setenv(files.DOWNLOAD_VARIABLE, "0")
    (tmp_path / "things.zip").write_bytes(CONTENT)
    assert get(tmp_path, archive)["images"].tobytes() == CONTENT
    assert (tmp_path / "things.zip").exists()


@pytest.mark.parametrize("by_hand", [True, False])
def test_a_wrong_check_sum_is_refused_and_leaves_no_file(archive, tmp_path, by_hand):
    wrong = archive._replace(sha256="0" * 64)
    if by_hand:
        (tmp_path / "things.zip").write_bytes(CONTENT)
    with pytest.raises(DataError, match="expected SHA-256 000") as error:
        get(tmp_path, wrong)
    assert archive.url in one_line(error)
    assert [path.name for path in tmp_path.iterdir()] == (["things.zip"] if by_hand else [])


@pytest.mark.parametrize(
    "failure", [urllib.error.URLError("no route to host"), TimeoutError("timed out"), ConnectionResetError("reset")]
)
def test_a_failed_download_says_what_to_fetch_and_where_to_put_it(archive, tmp_path, monkeypatch, failure):
    def fail(_):
        raise failure

    monkeypatch.setattr(files, "open_address", fail)
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


@pytest.mark.parametrize("url", ["http://example.org/things.zip", "file:///etc/passwd", "ftp://example.org/a"])
def test_only_https_is_downloaded(tmp_path, url):
    with pytest.raises(DataError, match="an address that is not https") as error:
        get(tmp_path, Archive("things.zip", url, "0" * 64, 1))
    assert url in one_line(error) and not list(tmp_path.iterdir())


def test_a_redirection_to_another_kind_of_address_is_not_followed():
    handler, request = files._HttpsOnly(), urllib.request.Request("https://example.org/a")
    with pytest.raises(OSError, match=r"not https, http://example\.org/b"):
        handler.redirect_request(request, None, 302, "Found", {}, "http://example.org/b")
    assert handler.redirect_request(request, None, 302, "Found", {}, "https://example.org/b").full_url.endswith("b")


def test_every_archive_has_an_https_address_and_a_sha256_sum():
    from fewshot.tasks import birds, emnist, flowers102, omniglot, tinyimagenet

    listed = [*omniglot.ARCHIVES, *emnist.ARCHIVES, *flowers102.ARCHIVES, *tinyimagenet.ARCHIVES, birds.ARCHIVE]
    assert len(listed) == 8
    for archive in listed:
        assert archive.url.startswith("https://") and len(bytes.fromhex(archive.sha256)) == 32, archive


def test_a_download_ends_where_it_is_larger_than_it_should_be(archive, tmp_path, monkeypatch):
    class Endless:
        read_so_far = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def read(self, count):
            Endless.read_so_far += count
            assert Endless.read_so_far < 64_000_000  # and not for ever, where nobody looks at the size
            return bytes(count)

    monkeypatch.setattr(files, "open_address", lambda _: Endless())
    with pytest.raises(DataError, match="more than the 1 MB that it has") as error:
        get(tmp_path, archive)
    one_line(error)
    assert Endless.read_so_far < 4_000_000 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_are_made_under_the_users_umask(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        files.write_npz(tmp_path / "a.npz", {"images": np.zeros(2)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == mode


def test_nothing_is_written_through_a_planted_link(tmp_path, monkeypatch):
    """Neither at the path itself nor at the name of the new file beside it, had somebody guessed it."""
    kept = tmp_path / "kept"
    kept.write_text("precious")
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / ".a.npz.guessed.part").symlink_to(kept)
    with pytest.raises(DataError, match="expected to write"):
        files.write_npz(tmp_path / "a.npz", {"images": np.zeros(2)})
    (tmp_path / "b.npz").symlink_to(kept)
    files.write_npz(tmp_path / "b.npz", {"images": np.zeros(2)})
    assert kept.read_text() == "precious" and not (tmp_path / "b.npz").is_symlink()


def npy(header: str | bytes, data: bytes = b"", version: int = 1) -> bytes:
    """An .npy file with that header."""
    text = header.encode("latin-1") if isinstance(header, str) else header
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + data


def described(shape: str = "(2,)", descr: str = "'<f8'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


FOREIGN = {
    "claims 10^12 entries": npy(described("(1000000000000,)"), bytes(16)),
    "claims 10^18 in two axes": npy(described("(1000000000, 1000000000)"), bytes(16)),
    "claims none along a long axis": npy(described("(1000000000000, 0)")),
    "has too few bytes": npy(described("(3,)"), bytes(16)),
    "has too many bytes": npy(described("(1,)"), bytes(16)),
    "wrong magic": b"\x93NUMPX" + npy(described(), bytes(16))[6:],
    "unknown version": npy(described(), bytes(16), version=9),
    "a header of 9,000 brackets": npy("(" * 9000, bytes(16)),
    "a header of brackets in the shape": npy(described("(" * 9000), bytes(16)),
    "a header of minus signs": npy(described("-" * 9000 + "1"), bytes(16)),
    "a header beyond its file": npy(described())[:30],
    "a header of 65,000 letters": npy("a" * 65_000),
    "a header of 4 GB": b"\x93NUMPY\2\0\xff\xff\xff\xff" + b"{",
    "a negative axis": npy(described("(-2,)"), bytes(16)),
    "an axis of 5,000 digits": npy(described(f"({'9' * 5000},)"), bytes(16)),
    "no dtype": npy("{'fortran_order': False, 'shape': (2,), 'shape': (2,)}", bytes(16)),
    "an order that is none": npy(described(order="(1,)"), bytes(16)),
    "a shape that is none": npy(described(shape="True"), bytes(16)),
    "complex": npy(described(descr="'<c16'"), bytes(32)),
    "dates": npy(described(descr="'<M8[D]'"), bytes(16)),
    "durations": npy(described(descr="'<m8[s]'"), bytes(16)),
    "objects": npy(described(descr="'|O'"), bytes(16)),
    "records": npy(described(descr="[('a', '<f8')]"), bytes(16)),
    "words without letters": npy(described("(1000000000,)", descr="'<U0'")),
    "empty": b"",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_arrays_that_are_not_what_they_claim_are_refused_in_one_line(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("images.npy", content)
    with pytest.raises(DataError, match=r"expected the arrays images in .*a\.npz") as error:
        read_npz(tmp_path / "a.npz", ("images",))
    assert len(one_line(error)) < 600


@pytest.mark.parametrize("dtype", ["u1", "<i2", ">i4", "<f2", ">f8", "?", "<U3", "S5"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("compress", [True, False])
def test_what_numpy_writes_is_read_as_it_reads_it(tmp_path, dtype, shape, compress):
    drawn = np.random.default_rng(0).integers(0, 99, shape)
    for array in (np.array(drawn, dtype, order=order) for order in "CF"):
        files.write_npz(tmp_path / "a.npz", {"images": array}, compress)
        read = read_npz(tmp_path / "a.npz", ("images",))["images"]
        assert read.dtype == array.dtype.newbyteorder("=") and read.shape == shape and (read == array).all()
        assert read.flags.writeable


def test_a_small_file_cannot_fill_the_memory(tmp_path, monkeypatch):
    files.write_npz(tmp_path / "a.npz", {"images": np.zeros(10_000_000, np.uint8)})
    assert read_npz(tmp_path / "a.npz", ("images",))["images"].shape == (10_000_000,)
    monkeypatch.setattr("fewshot.tasks.arrays.FREE", 1_000_000)
    with pytest.raises(DataError, match=r"images unpacks to 10,000,128 bytes, 1,000,000 at most are read") as error:
        read_npz(tmp_path / "a.npz", ("images",))
    one_line(error)


@pytest.mark.usefixtures("no_waiting")
def test_pipes_are_not_waited_for(archive, tmp_path):
    for name in ("things.npz", "things.zip"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="no plain file") as error:
        get(tmp_path, archive)
    one_line(error)
    (tmp_path / "things.npz").unlink()
    with pytest.raises(DataError, match="got no plain file") as error:
        get(tmp_path, archive)
    one_line(error)
