"""Networks that turn a batch of tasks of images [T, N, H, W, Ch] into features [T, N, D] (METHODS 5), in Flax NNX.

The task axis T is carried inside the network: in training every batch norm takes its statistics over the images of one
task, never over the batch of tasks.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

Images = Float[Array, "T N H W Ch"]
Features = Float[Array, "T N D"]


class TaskBatchNorm(nnx.Module):
    """Batch norm of x [T, ..., D] whose statistics belong to one task (the leading axis).

    train=True uses and records the task's own mean and variance; train=False uses the running ones, so that no
    prediction depends on the other queries. The running statistics are means over the T tasks of a batch.
    """

    def __init__(self, features: int, *, affine: bool = True, momentum: float = 0.9, epsilon: float = 1e-5):
        self.momentum, self.epsilon = momentum, epsilon
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

    def __call__(self, x: Float[Array, "T *rest D"], train: bool) -> Float[Array, "T *rest D"]:
        """(x - mean) / sqrt(variance + epsilon) * scale + shift."""
        axes = tuple(range(1, x.ndim - 1))
        mean, variance = self.mean[...], self.variance[...]
        if train:
            mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
            self.record(mean.reshape(x.shape[0], -1), variance.reshape(x.shape[0], -1))
        scale, shift = self.affine()
        return (x - mean) * (jax.lax.rsqrt(variance + self.epsilon) * scale) + shift


class ConvBlock(nnx.Module):
    """3x3 convolution (same padding), batch norm, ReLU, 2x2 max-pool (floor)."""

    def __init__(self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs, momentum: float = 0.9):
        initial = jax.nn.initializers.variance_scaling(2.0, "fan_out", "normal")
        # No bias: the batch norm would subtract it again.
        self.kernel = nnx.Param(initial(rngs.params(), (3, 3, channels_in, channels_out)))
        self.norm = TaskBatchNorm(channels_out, momentum=momentum)

    def __call__(self, x: Images, train: bool) -> Images:
        tasks, images = x.shape[:2]
        x = x.reshape(-1, *x.shape[2:])
        x = jax.lax.conv_general_dilated(
            x, self.kernel[...], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.reshape(tasks, images, *x.shape[1:])
        x = jax.nn.relu(self.norm(x, train))
        rows, columns = x.shape[2] // 2, x.shape[3] // 2
        x = x[:, :, : 2 * rows, : 2 * columns].reshape(tasks, images, rows, 2, columns, 2, -1)
        return x.max(axis=(3, 5))


class Conv4(nnx.Module):
    """The four-block network of the field: 28x28x1 -> 64 features, 84x84x3 -> 1600.

    Raises ValueError for images smaller than 16x16, which four poolings reduce to nothing.
    """

    depth = 4

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs, width: int = 64, momentum: float = 0.9):
        height, columns, channels = image_shape
        if min(height, columns) < 2**self.depth:
            raise ValueError(f"Conv4 expects images of at least 16x16, got {height}x{columns}: enlarge them or use MLP")
        for i in range(self.depth):
            block = ConvBlock(channels if i == 0 else width, width, rngs=rngs, momentum=momentum)
            setattr(self, f"block{i}", block)
        self.features = (height >> self.depth) * (columns >> self.depth) * width

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] in [0, 1] to features [T, N, D]."""
        for i in range(self.depth):
            x = getattr(self, f"block{i}")(x, train)
        return x.reshape(*x.shape[:2], self.features)


class MLP(nnx.Module):
    """Two fully connected ReLU layers on the pixels; it has no state, so `train` changes nothing."""

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs, width: int = 64):
        height, columns, channels = image_shape
        self.hidden = nnx.Linear(height * columns * channels, width, rngs=rngs)
        self.output = nnx.Linear(width, width, rngs=rngs)
        self.features = width

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] to features [T, N, D]."""
        x = x.reshape(*x.shape[:2], -1)
        return jax.nn.relu(self.output(jax.nn.relu(self.hidden(x))))


class Identity(nnx.Module):
    """The pixels themselves as features: the kernel method without a network."""

    def __init__(self, image_shape: tuple[int, int, int], *, rngs: nnx.Rngs | None = None):
        height, columns, channels = image_shape
        self.features = height * columns * channels

    def __call__(self, x: Images, train: bool) -> Features:
        """Images x [T, N, H, W, Ch] to features [T, N, D]."""
        return x.reshape(*x.shape[:2], self.features)
