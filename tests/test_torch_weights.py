"""Weights of PyTorch as data: the numbers come out, and nothing that a file says is carried out."""

import builtins
import os
import pickle
import subprocess
import tracemalloc

import numpy as np
import pytest
import torch_file as written

from fewshot.models.networks.torch_weights import WeightsError, read_torch_weights

ARRAYS = {
    "conv.weight": np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
    "norm.bias": np.array([1.5, -2.0], np.float32),
    "norm.count": np.array(7, np.int64),
}
VECTOR = np.arange(6, dtype=np.float32)


def file_of(call, array=VECTOR):
    """A file of one tensor, made by `call`."""
    return written.torch_file({"w": array}, {"w": call})


def refused(content):
    with pytest.raises(WeightsError) as error:
        read_torch_weights(content)
    message = str(error.value)
    assert "\n" not in message and len(message) < 250 and message.startswith("expected ")
    return message


def test_tensors_come_out_as_they_went_in():
    read = read_torch_weights(written.torch_file(ARRAYS))
    assert list(read) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)
        assert not read[name].flags.writeable


def test_a_tensor_may_be_a_part_of_its_storage():
    call = written.tensor("w", VECTOR, offset=1, shape=(2, 2), strides=(3, 1))
    np.testing.assert_array_equal(read_torch_weights(file_of(call))["w"], [[1, 2], [4, 5]])


def test_what_pytorch_itself_writes(tmp_path):
    torch = pytest.importorskip("torch", reason="needs PyTorch, the reference: pip install torch")
    tensors = {"a": torch.arange(12.0).reshape(3, 4).t(), "b": torch.tensor(5)}
    path = tmp_path / "weights.pth"
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    read = read_torch_weights(path.read_bytes())
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor.numpy())


class Malicious:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("place", ["first", "dictionary", "tensor"])
@pytest.mark.parametrize("function", [os.system, builtins.eval, builtins.exec, subprocess.Popen, os.remove])
def test_no_call_of_a_file_is_carried_out(monkeypatch, tmp_path, function, place, protocol):
    victim = tmp_path / "victim"
    victim.write_text("here")
    command = {os.system: f"rm {victim}", subprocess.Popen: ["rm", str(victim)], os.remove: str(victim)}
    code = command.get(function, f"__import__('os').remove({str(victim)!r})")
    bomb = pickle.dumps(Malicious(function, code), protocol)
    whole = written.torch_file(ARRAYS)
    start = len(written.MAGIC + written.VERSION + written.facts())
    body = bomb[2:-1] if protocol >= 2 else bomb[:-1]
    contents = {"first": bomb + whole, "dictionary": whole[:start] + bomb + whole[start:], "tensor": file_of(body)}
    refused(contents[place])
    assert victim.exists()


@pytest.mark.parametrize(
    "text",
    [
        "os\nsystem",
        "posix\nsystem",
        "builtins\neval",
        "__builtin__\neval",
        "torch\nload",
        "torch._utils\n_rebuild_tensor",
        "collections\nUserDict",
        "collections\nOrderedDict.__init__",
        "models.networks.torch_weights\n_Machine",
    ],
)
def test_other_names_are_refused_by_name(text):
    message = refused(file_of(written.name(text) + b")R"))
    assert text.replace("\n", " ") in message


def test_allowed_names_are_called_only_with_what_they_are_for():
    for text in ("torch\nFloatStorage", "torch\nLongStorage"):
        assert "a call of 'torch" in refused(file_of(written.name(text) + written.group(written.number(3)) + b"R"))
    assert "a call of" in refused(file_of(written.name("collections\nOrderedDict") + written.group(b"]") + b"R"))
    refused(file_of(written.name("torch._utils\n_rebuild_tensor_v2") + b")R"))


@pytest.mark.parametrize(
    "operations, named",
    [
        (b"cos\nsystem\n", "os system"),
        (b"(ios\nsystem\n", "INST"),
        (b"\x82\x01", "EXT1"),
        (b"(ctorch\nFloatStorage\no", "OBJ"),
        (b")\x81", "NEWOBJ"),
        (b"\x8c\x02os\x8c\x06system\x93", "SHORT_BINUNICODE"),
        (b"P1\n", "PERSID"),
    ],
)
def test_every_way_to_an_object_is_closed(operations, named):
    assert named in refused(file_of(operations))


@pytest.mark.parametrize(
    "given",
    [
        {"shape": (7,)},
        {"shape": (3,), "strides": (3,)},
        {"offset": 1},
        {"offset": -1, "shape": (2,)},
        {"shape": (-2,)},
        {"shape": (3,), "strides": (-1,), "offset": 5},
        {"shape": (2, 3), "strides": (1,)},
        {"shape": (100_000, 100_000), "strides": (0, 0)},
        {"shape": (0,)},
        {"shape": (1,) * 9, "strides": (1,) * 9},
        {"count": 5, "shape": (5,)},
        {"count": 7, "shape": (7,)},
        {"count": -6},
    ],
)
def test_a_tensor_outside_its_storage_is_refused(given):
    refused(file_of(written.tensor("w", VECTOR, **given)))


def test_a_tensor_beside_another_view_of_its_storage_may_not_announce_more():
    honest, other = written.tensor("w", VECTOR), written.tensor("w", VECTOR, count=60, shape=(60,), strides=(1,))
    assert len(read_torch_weights(written.torch_file({"w": VECTOR}, {"w": honest, "v": honest}))) == 2
    refused(written.torch_file({"w": VECTOR}, {"w": honest, "v": other}))
    refused(written.torch_file({"w": VECTOR}, {"w": other, "v": honest}))


def test_a_file_cut_anywhere_is_refused():
    whole = written.torch_file(ARRAYS)
    read_torch_weights(whole)
    for end in range(len(whole)):
        refused(whole[:end])
    refused(whole + b"\x00")


def test_a_file_with_one_wrong_byte_gives_its_tensors_or_an_error():
    whole = written.torch_file(ARRAYS)
    generator = np.random.default_rng(0)
    outcomes = set()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= int(generator.integers(1, 256))
        try:
            read = read_torch_weights(bytes(damaged))
        except WeightsError as error:
            outcomes.add("refused")
            assert "\n" not in str(error)
        else:
            outcomes.add("read")
            assert all(array.base is not None and array.size for array in read.values())
    assert outcomes == {"refused", "read"}


@pytest.mark.long
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not weights",
        b"PK\x03\x04" + bytes(100),
        written.MAGIC,
        written.VERSION * 3,
        written.MAGIC + written.VERSION + written.facts(little=False),
        written.MAGIC + written.VERSION + written.VERSION,
        file_of(b"}"),
        file_of(written.number(3)),
        file_of(b"\x80\x04"),
        file_of(b")" + b"\x85" * 100_000),
        file_of(b"}(" + b")" + b"\x85" * 300_000 + b"Nu"),  # whose hash, taken in C, would overflow the stack
        file_of(b"r\xff\xff\xff\x7fN"),
        file_of(b"h\x63"),
        file_of(b"t"),
        file_of(b"R"),
    ],
)
def test_other_content_is_refused(content):
    refused(content)


def test_a_small_file_takes_little_memory():
    whole = file_of(written.tensor("w", VECTOR, shape=(6,)) + b"r\xff\xff\xff\x7f")  # the memory's place 2^31 - 1
    tracemalloc.start()
    read_torch_weights(whole)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_storages_are_those_that_were_announced():
    first, second = np.ones(3, np.float32), np.ones(3, np.float32)
    assert set(read_torch_weights(written.torch_file({"a": first, "b": second}))) == {"a", "b"}
    call = {"b": written.tensor("a", first)}
    refused(written.torch_file({"a": first, "b": second}, call))  # b's storage belongs to no tensor
    dictionary = written.pickled(written.dictionary({"a": written.tensor("a", first)}))
    head = written.MAGIC + written.VERSION + written.facts() + dictionary
    assert read_torch_weights(head + written.keys("a") + written.numbers(first))["a"].tolist() == [1, 1, 1]
    refused(head + written.keys("aa") + 2 * written.numbers(first))
    refused(head + written.keys("") + written.numbers(first))
