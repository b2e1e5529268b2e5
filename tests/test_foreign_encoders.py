"""Encoders of ONNX files and of timm, on networks so small that their features are known."""

import numpy as np
import pytest
from PIL import Image

from fewshot.models.networks import EncoderError, load_encoder
from fewshot.models.networks.foreign import IMAGENET_DEVIATION, IMAGENET_MEAN

WITHOUT_ONNX = 'needs ONNX Runtime and the package that writes its files: pip install "bayesian-few-shot[onnx]" onnx'
WITHOUT_TIMM = 'needs timm and PyTorch: pip install "bayesian-few-shot[timm]"'
MIX = np.arange(12, dtype=np.float32).reshape(3, 4) - 5


@pytest.fixture
def write(tmp_path):
    """Writes an ONNX file whose features are the mean colours times MIX, [N, 4], and its maps [N, 3, h, w]."""
    onnx = pytest.importorskip("onnx", reason=WITHOUT_ONNX)
    pytest.importorskip("onnxruntime", reason=WITHOUT_ONNX)
    helper, number = onnx.helper, onnx.TensorProto

    def write(shape=("N", 3, 16, 16), dtype=number.FLOAT, inputs=1):
        last = shape[-1] == 3
        mix = np.resize(MIX, (3 if last else shape[1], 4))
        nodes = [
            helper.make_node("Cast", ["x0"], ["real"], to=number.FLOAT),
            helper.make_node("Transpose", ["real"], ["maps"], perm=[0, 3, 1, 2] if last else [0, 1, 2, 3]),
            helper.make_node("GlobalAveragePool", ["maps"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["flat"]),
            helper.make_node("MatMul", ["flat", "mix"], ["features"]),
        ]
        graph = helper.make_graph(
            nodes,
            "small",
            [helper.make_tensor_value_info(f"x{i}", dtype, shape) for i in range(inputs)],
            [
                helper.make_tensor_value_info("features", number.FLOAT, None),
                helper.make_tensor_value_info("maps", number.FLOAT, None),
                helper.make_tensor_value_info("pooled", number.FLOAT, None),
            ],
            [onnx.numpy_helper.from_array(mix, "mix")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        path = tmp_path / "small.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return write


def plain(count):
    """Pictures of one colour each, which no resizing changes, and these colours."""
    colours = np.random.default_rng(0).integers(0, 256, (count, 3))
    return [Image.new("RGB", (30 + i, 40), tuple(map(int, one))) for i, one in enumerate(colours)], colours


def normalised(colours):
    return (colours / 255 - IMAGENET_MEAN) / IMAGENET_DEVIATION


@pytest.mark.parametrize("shape", [("N", 3, 16, 16), ("N", 16, 16, 3), (2, 3, 16, 16), (1, 16, 16, 3)])
def test_an_onnx_file(write, shape):
    some, colours = plain(5)
    encoder = load_encoder(f"onnx:{write(shape)}")
    assert (encoder.image_size, encoder.features) == (16, 4)
    np.testing.assert_allclose(encoder.encode(some), normalised(colours) @ MIX, rtol=1e-4, atol=1e-4)


def test_options_of_an_onnx_file(write):
    some, colours = plain(3)
    name = f"onnx:{write(('N', 3, 'H', 'W'))}"
    encoder = load_encoder(name, side=20, crop=1.0, mean=(0.0,) * 3, deviation=(1.0,) * 3, output="pooled")
    assert (encoder.image_size, encoder.features) == (20, 3)
    np.testing.assert_allclose(encoder.encode(some), colours / 255, atol=1e-6)


def test_the_identity_of_an_onnx_file_holds_all_that_features_depend_on(write):
    path = write()
    options = [{}, {"crop": 0.5}, {"mean": (0.5,) * 3}, {"deviation": (1.0,) * 3}, {"output": "pooled"}]
    identities = {load_encoder(f"onnx:{path}", **one).identity for one in options}
    write(("N", 3, 20, 20))
    assert len(identities | {load_encoder(f"onnx:{path}").identity}) == len(options) + 1


def test_onnx_files_that_cannot_be_used(write, tmp_path):
    import onnx

    def message(path, **options):
        with pytest.raises(EncoderError) as error:
            load_encoder(f"onnx:{path}", **options)
        assert "\n" not in str(error.value) and str(error.value).startswith("expected ")
        return str(error.value)

    assert "none.onnx" in message(tmp_path / "none.onnx")
    (tmp_path / "damaged.onnx").write_bytes(b"no network")
    assert "damaged.onnx" in message(tmp_path / "damaged.onnx")
    assert "choose side" in message(write(("N", 3, "H", "W")))
    assert "choose side" in message(write(("N", 3, 16, 20)))
    assert "choose side" in message(write(), side=20)
    assert "one float32 input" in message(write(dtype=onnx.TensorProto.DOUBLE))
    assert "one float32 input" in message(write(inputs=2))
    assert "one float32 input" in message(write(("N", 4, 16, 16)))
    assert "features, maps, pooled" in message(write(), output="logits")
    assert "another output" in message(write(), output="maps")
    assert "crop in (0, 1]" in message(write(), crop=1.5)


def test_a_network_of_timm():
    pytest.importorskip("timm", reason=WITHOUT_TIMM)
    encoder = load_encoder("timm:resnet10t", pretrained=False)
    some, _ = plain(2)
    assert encoder.encode(some).shape == (2, encoder.features)
    with pytest.raises(EncoderError, match="timm to load 'no-such-network'"):
        load_encoder("timm:no-such-network", pretrained=False)
