"""Networks that turn a batch of tasks of images [T, N, H, W, Ch] into features [T, N, D], in Flax NNX.

The task axis T is carried inside the network: in training every batch norm takes its statistics over the images of one
task, never over the batch of tasks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from fewshot.models.convolution import (
    EPSILON,
    check_precision,
    conv1x1,
    conv3x3,
    max_pool,
    norm_relu_pool,
    pool_first,
    pool_shared,
)
from fewshot.models.layers import linear

Images = Float[Array, "T N H W Ch"]
Features = Float[Array, "T N D"]


class Backbone(nnx.Module):
    """A network from images [T, N, H, W, Ch] to features [T, N, D]; `image_shape` is (H, W, Ch), `features` is D."""

    convolutional: ClassVar[bool] = False
    image_shape: tuple[int, int, int]
    features: int

    def __call__(self, x: Images, train: bool) -> Features:
        raise NotImplementedError(f"{type(self).__name__} has no __call__")


class TaskBatchNorm(nnx.Module):
    """Batch norm of x [T, ..., D] whose statistics belong to one task (the leading axis).

    train=True uses and records the task's own mean and variance; train=False uses the running ones, so that no
    prediction depends on the other queries. The running statistics are means over the T tasks of a batch.

    normalised_by: how many rows of a task, its first, the task's own statistics are of; None for all. `set_attributes`
    of a network sets it in all of its norms. Statistics of a part are not recorded.
    """

    def __init__(self, features: int, *, affine: bool = True, momentum: float = 0.9):
        self.momentum = momentum
        self.normalised_by: int | None = None
        self.mean = nnx.BatchStat(jnp.zeros(features))
        self.variance = nnx.BatchStat(jnp.ones(features))
        self.scale = nnx.Param(jnp.ones(features)) if affine else None
        self.shift = nnx.Param(jnp.zeros(features)) if affine else None

    def record(self, mean: Float[Array, "T D"], variance: Float[Array, "T D"]) -> None:
        """Moves the running statistics towards those of this batch of tasks."""
        for running, batch in ((self.mean, mean), (self.variance, variance)):
            running[...] = self.momentum * running[...] + (1.0 - self.momentum) * jax.lax.stop_gradient(batch).mean(0)

    def affine(self) -> tuple[Float[Array, " D"], Float[Array, " D"]]:
        """(scale, shift), each [D]; (1, 0) without learned ones."""
        if self.scale is None or self.shift is None:
            return jnp.ones_like(self.mean[...]), jnp.zeros_like(self.mean[...])
        return self.scale[...], self.shift[...]

    def statistics(self, x: Float[Array, "T *rest D"]) -> tuple[Float[Array, "T *one D"], Float[Array, "T *one D"]]:
        """Mean and variance of each task, of the rows that normalise it."""
        axes, rows = tuple(range(1, x.ndim - 1)), x[:, : self.normalised_by]
        return rows.mean(axes, keepdims=True), rows.var(axes, keepdims=True)

    def __call__(self, x: Float[Array, "T *rest D"], train: bool) -> Float[Array, "T *rest D"]:
        """(x - mean) / sqrt(variance + EPSILON) * scale + shift."""
        mean, variance = self.mean[...], self.variance[...]
        if train:
            mean, variance = self.statistics(x)
            if self.normalised_by is None:
                self.record(mean.reshape(x.shape[0], -1), variance.reshape(x.shape[0], -1))
        scale, shift = self.affine()
        return (x - mean) * (jax.lax.rsqrt(variance + EPSILON) * scale) + shift


class ConvBlock(nnx.Module):
    """3x3 convolution (same padding), batch norm, ReLU, 2x2 max-pool (floor)."""

    padded: ClassVar[bool] = True

    def __init__(
        self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs, momentum: float = 0.9, precision: str = "auto"
    ):
        # No bias: the batch norm would subtract it again.
        self.kernel = nnx.Param(_initial(rngs, 3, 3, channels_in, channels_out))
        self.norm = TaskBatchNorm(channels_out, momentum=momentum)
        self.precision = check_precision(precision)

    def __call__(self, x: Float[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N h w D"]:
        """Images x [T, N, H, W, Ch] to [T, N, H // 2, W // 2, D].

        What multiplies the convolution's output is folded into its kernel, so that pooling may come right after it: in
        training the sign of the batch norm's scale, in evaluation all of the (then constant) factor.
        """
        scale, shift = self.norm.affine()
        if not train:
            factor = scale * jax.lax.rsqrt(self.norm.variance[...] + EPSILON)
            return jax.nn.relu(max_pool(self._convolve(x, factor)) + (shift - factor * self.norm.mean[...]))
        sign = jnp.where(scale < 0, -1.0, 1.0).astype(scale.dtype)
        if self.norm.normalised_by is not None:
            z = self._convolve(x, sign)
            mean, variance = self.norm.statistics(z)
            return jax.nn.relu((pool_shared(z) - mean) * (jax.lax.rsqrt(variance + EPSILON) * sign * scale) + shift)
        y, mean, variance = norm_relu_pool(self._convolve(x, sign), sign * scale, shift)
        self.norm.record(sign * mean, variance)
        return y

    def _convolve(self, x: Float[Array, "T N H W Ch"], factor: Float[Array, " D"]) -> Float[Array, "T N h w D"]:
        kernel = self.kernel[...] * factor
        found = _convolve_tasks(x, kernel, self.precision)
        return found if self.padded else found[:, :, 1:-1, 1:-1]  # away from the border padding changes nothing


class UnpaddedBlock(ConvBlock):
    """ConvBlock without padding: x [T, N, H, W, Ch] to [T, N, H // 2 - 1, W // 2 - 1, D]."""

    padded: ClassVar[bool] = False


class FlatBlock(ConvBlock):
    """ConvBlock without its pooling: x [T, N, H, W, Ch] to [T, N, H, W, D]."""

    def __call__(self, x: Float[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N H W D"]:
        """Convolution, batch norm, ReLU."""
        return jax.nn.relu(self.norm(_convolve_tasks(x, self.kernel[...], self.precision), train))


def _initial(rngs: nnx.Rngs, *shape: int) -> Array:
    """He's normal initialisation by the size of the output."""
    return jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")(rngs.params(), shape)


def _convolve_tasks(
    x: Float[Array, "T N H W Ch"], kernel: Float[Array, "3 3 Ch D"], precision: str
) -> Float[Array, "T N H W D"]:
    z = conv3x3(x.reshape(-1, *x.shape[2:]).astype(kernel.dtype), kernel, precision)
    return z.reshape(*x.shape[:2], *z.shape[1:])


class _Blocks(Backbone):
    """Blocks one after another, each of which halves the sides of the images (floor).

    channels: of the images and of every block's output. Raises ValueError for images that the poolings reduce to
    nothing.
    """

    convolutional: ClassVar[bool] = True

    def __init__(
        self, image_shape: tuple[int, int, int], make_block: Callable[[int, int], nnx.Module], channels: Sequence[int]
    ):
        self.image_shape, self.depth = image_shape, len(channels) - 1
        height, width, _ = image_shape
        least = 2**self.depth
        if min(height, width) < least:
            raise ValueError(
                f"{type(self).__name__} expects images of at least {least}x{least}, got {height}x{width}: "
                "enlarge them or use MLP"
            )
        for i, (inputs, outputs) in enumerate(pairwise(channels)):
            setattr(self, f"block{i}", make_block(inputs, outputs))

    def maps(self, x: Images, train: bool) -> Float[Array, "T N h w D"]:
        """Images x [T, N, H, W, Ch] to the last block's output, H and W halved `depth` times."""
        for i in range(self.depth):
            x = getattr(self, f"block{i}")(x, train)
        return x


class Conv4(_Blocks):
    """The four-block network of the field: 28x28x1 -> 64 features, 84x84x3 -> 1600.

    precision: of the convolutions, one of `models.convolution.PRECISIONS`. Raises ValueError for another, and for
    images smaller than 16x16.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        momentum: float = 0.9,
        precision: str = "auto",
    ):
        block = partial(ConvBlock, rngs=rngs, momentum=momentum, precision=precision)
        super().__init__(image_shape, block, (image_shape[2], width, width, width, width))
        self.features = (image_shape[0] >> self.depth) * (image_shape[1] >> self.depth) * width

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] in [0, 1] to features [T, N, D]."""
        return self.maps(x, train).reshape(*x.shape[:2], self.features)


class Conv4Maps(Backbone):
    """Conv4 with larger last maps, for relation networks: 28x28x1 -> 5x5 maps, 84x84x3 -> 19x19 (Sung et al. 2018).

    Two blocks without padding pool, two with padding do not. precision: as in Conv4. Raises ValueError for images
    smaller than 10x10.
    """

    convolutional: ClassVar[bool] = True

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        momentum: float = 0.9,
        precision: str = "auto",
    ):
        self.image_shape = image_shape
        sides = [((side - 2) // 2 - 2) // 2 for side in image_shape[:2]]
        if min(sides) < 1:
            raise ValueError(
                f"Conv4Maps expects images of at least 10x10, got {image_shape[0]}x{image_shape[1]}: "
                "enlarge them or use MLP"
            )
        self.features = math.prod(sides) * width
        channels = (image_shape[2], width, width, width, width)
        for i, (inputs, outputs) in enumerate(pairwise(channels)):
            make = UnpaddedBlock if i < 2 else FlatBlock
            setattr(self, f"block{i}", make(inputs, outputs, rngs=rngs, momentum=momentum, precision=precision))

    def maps(self, x: Images, train: bool) -> Float[Array, "T N h w D"]:
        """Images x [T, N, H, W, Ch] to the last block's output."""
        for i in range(4):
            x = getattr(self, f"block{i}")(x, train)
        return x

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] in [0, 1] to features [T, N, D]."""
        return self.maps(x, train).reshape(*x.shape[:2], self.features)


class ResidualBlock(nnx.Module):
    """Three 3x3 convolutions with batch norm, a 1x1 shortcut with batch norm, leaky ReLU, 2x2 max-pool (floor)."""

    convolutions = 3

    def __init__(self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs, momentum: float, precision: str):
        self.precision = check_precision(precision)
        for i in range(self.convolutions):
            inputs = channels_in if i == 0 else channels_out
            setattr(self, f"kernel{i}", nnx.Param(_initial(rngs, 3, 3, inputs, channels_out)))
            setattr(self, f"norm{i}", TaskBatchNorm(channels_out, momentum=momentum))
        self.shortcut = nnx.Param(_initial(rngs, 1, 1, channels_in, channels_out)[0, 0])
        self.norm = TaskBatchNorm(channels_out, momentum=momentum)

    def __call__(self, x: Float[Array, "T N H W Ch"], train: bool) -> Float[Array, "T N h w D"]:
        """Images x [T, N, H, W, Ch] to [T, N, H // 2, W // 2, D]."""
        x = x.astype(self.shortcut[...].dtype)
        straight = self.norm(conv1x1(x, self.shortcut[...], self.precision), train)
        for i in range(self.convolutions):
            x = _convolve_tasks(x, getattr(self, f"kernel{i}")[...], self.precision)
            x = getattr(self, f"norm{i}")(x, train)
            x = _leaky(x if i < self.convolutions - 1 else x + straight)
        return pool_first(x)


def _leaky(x: Array) -> Array:
    return jax.nn.leaky_relu(x, 0.1)


class ResNet12(_Blocks):
    """Four residual blocks of width, 2.5, 5 and 10 times width channels, then the mean over pixels: D = 10 width.

    The network of Lee et al. 2019 (MetaOptNet, section 4.1) without DropBlock: 84x84x3 -> 640 features. precision: as
    in Conv4. Raises ValueError for images smaller than 16x16 and for an odd width.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        *,
        rngs: nnx.Rngs,
        width: int = 64,
        momentum: float = 0.9,
        precision: str = "auto",
    ):
        if width % 2:
            raise ValueError(f"ResNet12 expects an even width, got {width}: its second block has 2.5 times as many")
        block = partial(ResidualBlock, rngs=rngs, momentum=momentum, precision=precision)
        super().__init__(image_shape, block, (image_shape[2], width, 5 * width // 2, 5 * width, 10 * width))
        self.features = 10 * width

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] in [0, 1] to features [T, N, D]."""
        return self.maps(x, train).mean((2, 3))


class MLP(Backbone):
    """Fully connected on the pixels, one hidden ReLU layer; it has no state, so `train` changes nothing.

    rectified: the output is a ReLU's too, so that what a linear head sits on are two hidden layers.
    """

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs, width: int = 64, rectified: bool = False):
        self.image_shape, self.rectified = image_shape, rectified
        self.hidden = linear(math.prod(image_shape), width, rngs=rngs)
        self.output = linear(width, width, rngs=rngs)
        self.features = width

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] to features [T, N, D]."""
        x = x.reshape(*x.shape[:2], -1)
        found = self.output(jax.nn.relu(self.hidden(x)))
        return jax.nn.relu(found) if self.rectified else found


class Identity(Backbone):
    """The pixels themselves as features, or a power of them: the kernel method without a network.

    Raises ValueError for a power that is not a positive number.
    """

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs | None = None, power: float = 1.0):
        check_power(power)
        self.image_shape, self.features, self.power = image_shape, math.prod(image_shape), power

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] to features [T, N, D]."""
        return powered(x.reshape(*x.shape[:2], self.features), self.power)


def check_power(power: float) -> None:
    """Raises ValueError for one that is not a positive number."""
    if not 0 < power < math.inf:
        raise ValueError(f"power must be a positive number, got {power}")


def powered(x: Float[Array, "*N D"], power: float) -> Float[Array, "*N D"]:
    """sign(x) |x|^p: below 1 a few large features decide less of what is alike."""
    return x if power == 1.0 else jnp.sign(x) * jnp.abs(x) ** power
