"""EfficientNet-Lite0 (Tan & Le 2019 without squeeze-and-excitation, with ReLU6): photographs to 1,280 features.

A network for inference: its batch norms are folded into its convolutions when it is made, its weights are no
parameters. Conventions are TensorFlow's, where the weights were trained: padding is SAME, with the odd pixel after the
image, and batch norms add 1e-3 to a variance.

XLA's grouped convolution takes 40 to 60 times as long on a processor as the same sum written out, so a depthwise
convolution is k x k products of shifted images here, which XLA makes one loop of.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from fewshot.models.convolution import PRECISIONS, check_precision, conv1x1
from fewshot.models.networks.torch_weights import WeightsError

EPSILON = 1e-3
STEM, HEAD = 32, 1280
# Blocks, kernel, stride of the first block, expansion, channels of the output.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
Weights = Mapping[str, np.ndarray]


class Block(NamedTuple):
    """The shape of an inverted residual block: kernel, stride, and channels before, within and after it."""

    kernel: int
    stride: int
    before: int
    within: int
    after: int


def blocks() -> Iterator[Block]:
    """The 16 blocks in order."""
    before = STEM
    for count, kernel, stride, expansion, after in STAGES:
        for number in range(count):
            yield Block(kernel, stride if number == 0 else 1, before, expansion * before, after)
            before = after


class Frozen(nnx.Variable):
    """A weight that no optimiser sees."""


class Folded(nnx.Module):
    """Weights of a convolution with the batch norm after it: z w scale + (shift - scale mean), scale over channels."""

    def __init__(self, kernel: np.ndarray, factor: np.ndarray, shift: np.ndarray):
        self.kernel = Frozen(jnp.asarray(kernel * factor, jnp.float32))
        self.shift = Frozen(jnp.asarray(shift, jnp.float32))


def relu6(x: Array) -> Array:
    """min(max(x, 0), 6)."""
    return jnp.clip(x, 0.0, 6.0)


def same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels before and after an image's side, so that ceil(length / stride) come out; the odd one is after."""
    total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
    return total // 2, total - total // 2


def depthwise(x: Float[Array, "B H W D"], kernel: Float[Array, "k k D"], stride: int) -> Float[Array, "B h w D"]:
    """sum_ij x[:, s r + i - pad, s c + j - pad] kernel[i, j] for each channel alone, SAME padding."""
    size = len(kernel)
    padding = [same_padding(length, size, stride) for length in x.shape[1:3]]
    padded = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, columns = (stride * (-(-length // stride) - 1) + 1 for length in x.shape[1:3])
    return sum(
        (
            padded[:, i : i + rows : stride, j : j + columns : stride] * kernel[i, j]
            for i in range(size)
            for j in range(size)
        ),
        start=jnp.zeros((), x.dtype),
    )


class InvertedResidual(nnx.Module):
    """1x1 to more channels, depthwise, 1x1 to fewer; added to the input where the shapes agree."""

    def __init__(self, shape: Block, weights: Weights, prefix: str):
        self.stride = shape.stride
        self.adds = shape.stride == 1 and shape.before == shape.after
        wide = shape.within != shape.before
        self.expand = _folded(weights, f"{prefix}._expand_conv", f"{prefix}._bn0") if wide else None
        self.depthwise = _folded(weights, f"{prefix}._depthwise_conv", f"{prefix}._bn1")
        self.project = _folded(weights, f"{prefix}._project_conv", f"{prefix}._bn2")

    def __call__(self, x: Float[Array, "B H W I"], precision: str) -> Float[Array, "B h w D"]:
        """Images x [B, H, W, I] to [B, ceil(H / stride), ceil(W / stride), D]."""
        y = x if self.expand is None else relu6(_pointwise(x, self.expand, precision))
        y = relu6(depthwise(y, self.depthwise.kernel[...][:, :, 0], self.stride) + self.depthwise.shift[...])
        y = _pointwise(y, self.project, precision)
        return x + y if self.adds else y


def _pointwise(x: Array, layer: Folded, precision: str) -> Array:
    return conv1x1(x, layer.kernel[...][0, 0], precision) + layer.shift[...]


class EfficientNetLite0(nnx.Module):
    """Images [B, H, W, 3], normalised, to features [B, 1280]: the mean over pixels of the last convolution.

    weights: by PyTorch's names; their sums are in float32 by default, since features are kept and compared across
    devices (`precision` as in `models.convolution.PRECISIONS`). Raises WeightsError for an array that is missing, has
    another shape or is not finite, ValueError for another precision.
    """

    features = HEAD

    def __init__(self, weights: Weights, *, precision: str = "float32"):
        check_weights(weights)
        self.precision = check_precision(precision)
        self.stem = _folded(weights, "_conv_stem", "_bn0")
        for number, shape in enumerate(blocks()):
            setattr(self, f"block{number}", InvertedResidual(shape, weights, f"_blocks.{number}"))
        self.head = _folded(weights, "_conv_head", "_bn1")

    def __call__(self, x: Float[Array, "B H W 3"]) -> Float[Array, "B D"]:
        """Images x [B, H, W, 3] to features [B, D]."""
        padding = [same_padding(length, 3, 2) for length in x.shape[1:3]]
        order, precision = ("NHWC", "HWIO", "NHWC"), PRECISIONS[self.precision]
        kernel = self.stem.kernel[...]
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), padding, dimension_numbers=order, precision=precision)
        y = relu6(y + self.stem.shift[...])
        for number, _ in enumerate(blocks()):
            y = getattr(self, f"block{number}")(y, self.precision)
        return relu6(_pointwise(y, self.head, self.precision)).mean((1, 2))


def _folded(weights: Weights, convolution: str, norm: str) -> Folded:
    scale, shift, mean, variance = (
        weights[f"{norm}.{name}"].astype(np.float64) for name in ("weight", "bias", "running_mean", "running_var")
    )
    factor = scale / np.sqrt(variance + EPSILON)
    kernel = weights[f"{convolution}.weight"].astype(np.float64).transpose(2, 3, 1, 0)  # OIHW to HWIO
    return Folded(kernel, factor, shift - factor * mean)


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """The arrays that the network reads, by PyTorch's names; the classifier and counters are not among them."""
    shapes: dict[str, tuple[int, ...]] = {}

    def layer(convolution: str, norm: str, *shape: int) -> None:
        shapes[f"{convolution}.weight"] = shape
        for name in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{name}"] = shape[:1]

    layer("_conv_stem", "_bn0", STEM, 3, 3, 3)
    for number, block in enumerate(blocks()):
        prefix = f"_blocks.{number}"
        if block.within != block.before:
            layer(f"{prefix}._expand_conv", f"{prefix}._bn0", block.within, block.before, 1, 1)
        layer(f"{prefix}._depthwise_conv", f"{prefix}._bn1", block.within, 1, block.kernel, block.kernel)
        layer(f"{prefix}._project_conv", f"{prefix}._bn2", block.after, block.within, 1, 1)
    layer("_conv_head", "_bn1", HEAD, block.after, 1, 1)
    return shapes


def check_weights(weights: Weights) -> None:
    """Raises WeightsError unless every array is there, in its shape, finite, and every variance at least 0."""
    for name, shape in weight_shapes().items():
        array = weights.get(name)
        if array is None or array.shape != shape:
            got = "none" if array is None else f"{array.shape}"
            raise WeightsError(f"expected {name} {shape} among the weights of EfficientNet-Lite0, got {got}")
        if not np.isfinite(array).all() or (name.endswith("running_var") and array.min() < 0):
            raise WeightsError(f"expected finite numbers and variances of 0 or more in {name}, got others")
