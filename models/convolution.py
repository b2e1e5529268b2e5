"""The convolution block of Conv4 as two fused operations with hand-written gradients.

Plain layers cost more on a CPU than their arithmetic: XLA compiles the gradient of a convolution inside `lax.scan` to
a scalar loop (80 times slower), batch norm and ReLU pass over the large un-pooled array several times, and the gradient
of max-pooling is a slow select-and-scatter. What is here is plain JAX, so it runs on every device.

Products may be less exact than float32, sums and all that is stored are not: `precision` is one of PRECISIONS.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

EPSILON = 1e-5  # added to every variance of a batch norm
WINDOW = 1000  # entries of a window, of images together, that a CPU convolves with fast
_CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")

# What a network's products are rounded to: auto is TF32 on GPUs that have it and float32 elsewhere; the other two make
# a difference on such GPUs only. bfloat16 also rounds what a convolution returns, on every device.
PRECISIONS = {
    "auto": None,
    "float32": jax.lax.Precision.HIGHEST,
    "tensorfloat32": jax.lax.Precision.HIGH,
    "bfloat16": None,
}


def check_precision(precision: str) -> str:
    """Its argument. Raises ValueError unless it is one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    return precision


def _rounded(x: Array, precision: str) -> Array:
    return x.astype(jnp.bfloat16) if precision == "bfloat16" else x


def conv1x1(
    x: Float[Array, "*rest I"], kernel: Float[Array, "I D"], precision: str = "auto"
) -> Float[Array, "*rest D"]:
    """1x1 convolution: x [..., I] to [..., D]."""
    left, right = _rounded(x, precision), _rounded(kernel, precision)
    return jnp.matmul(left, right, precision=PRECISIONS[precision]).astype(x.dtype)


def conv3x3(
    x: Float[Array, "B H W I"], kernel: Float[Array, "3 3 I D"], precision: str = "auto"
) -> Float[Array, "B H W D"]:
    """3x3 convolution with same padding, x [B, H, W, I] to [B, H, W, D], and its gradients at the same precision.

    Gradients of every order are made of two operations, this one and the gradient in the kernel, both convolutions with
    the standard axis order. XLA's CPU compiler has fast forms of other orders at the top level only, and not of those
    that it makes itself when it differentiates the gradient in a kernel.
    """
    return _same(x, kernel, precision)


def _convolved(x: Float[Array, "B H W I"], kernel: Float[Array, "M N I D"], precision: str) -> Float[Array, "B h w D"]:
    """With one row and column of zeros on every side of x: h = H + 3 - M and w = W + 3 - N."""
    left, right, zeros = _rounded(x, precision), _rounded(kernel, precision), [(1, 1), (1, 1)]
    z = jax.lax.conv_general_dilated(
        left, right, (1, 1), zeros, dimension_numbers=_CHANNELS_LAST, precision=PRECISIONS[precision]
    )
    return z.astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _same(x: Float[Array, "B H W I"], kernel: Float[Array, "3 3 I D"], precision: str) -> Float[Array, "B H W D"]:
    return _convolved(x, kernel, precision)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _to_kernel(
    x: Float[Array, "B H W I"], cotangent: Float[Array, "B H W D"], precision: str
) -> Float[Array, "3 3 I D"]:
    """Gradient of sum(cotangent * _same(x, kernel)) in the kernel, which it does not depend on."""
    all_at_once = partial(_images_summed, precision=precision)
    in_parts = partial(_in_parts, all_at_once)
    return jax.lax.platform_dependent(x, cotangent, cpu=in_parts, default=all_at_once)


def _to_images(cotangent: Float[Array, "B H W D"], kernel: Float[Array, "3 3 I D"], precision: str) -> Array:
    """Gradient [B, H, W, I] of the same sum in x."""
    return _same(cotangent, kernel[::-1, ::-1].swapaxes(2, 3), precision)


def _with_arguments(
    operation: Callable[..., Array], left: Array, right: Array, precision: str
) -> tuple[Array, tuple[Array, Array]]:
    return operation(left, right, precision), (left, right)


def _same_backward(precision: str, saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return _to_images(cotangent, kernel, precision), _to_kernel(x, cotangent, precision)


def _to_kernel_backward(precision: str, saved: tuple[Array, Array], direction: Array) -> tuple[Array, Array]:
    """The sum is linear in each of x, kernel and cotangent, so the kernel's place is taken by the direction."""
    x, cotangent = saved
    return _to_images(cotangent, direction, precision), _same(x, direction, precision)


_same.defvjp(partial(_with_arguments, _same), _same_backward)
_to_kernel.defvjp(partial(_with_arguments, _to_kernel), _to_kernel_backward)


def _images_summed(
    x: Float[Array, "B H W I"], cotangent: Float[Array, "B H W D"], precision: str
) -> Float[Array, "3 3 I D"]:
    """Input channels take the batch's place and images are summed over, with the cotangent as an H x W kernel."""
    return _convolved(x.transpose(3, 1, 2, 0), cotangent.transpose(1, 2, 0, 3), precision).transpose(1, 2, 0, 3)


def _in_parts(
    gradient: Callable[[Array, Array], Array], x: Float[Array, "B H W I"], cotangent: Float[Array, "B H W D"]
) -> Float[Array, "3 3 I D"]:
    """The gradient as a sum over a few images at a time, which is up to ten times faster on a CPU.

    XLA's convolution is slow there with a window of many entries, and this one has H W for each image.
    """
    images, (rows, columns) = x.shape[0], cotangent.shape[1:3]
    few = max(WINDOW // (rows * columns), 2)
    if images <= few:
        return gradient(x, cotangent)
    before = (images - 1) // few * few  # the last part may be smaller
    parts = jax.tree.map(lambda a: a[:before].reshape(-1, few, *a.shape[1:]), (x, cotangent))
    last = gradient(x[before:], cotangent[before:])
    return jax.lax.scan(lambda total, part: (total + gradient(*part), None), last, parts)[0]


def max_pool(z: Float[Array, "T N H W D"]) -> Float[Array, "T N h w D"]:
    """Maximum over 2x2 windows; an odd last row or column is left out (floor)."""
    window = (1, 1, 2, 2, 1)
    return jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, window, window, "VALID")


def _windows(z: Float[Array, "T N H W D"]) -> Float[Array, "T N h 2 w 2 D"]:
    """The 2x2 windows of `max_pool`, as a view."""
    tasks, images, rows, columns, width = z.shape
    cropped = z[:, :, : rows // 2 * 2, : columns // 2 * 2]
    return cropped.reshape(tasks, images, rows // 2, 2, columns // 2, 2, width)


def pool_first(z: Float[Array, "T N H W D"]) -> Float[Array, "T N h w D"]:
    """`max_pool` whose gradient goes to the first of equal maxima, for z that is no stored array.

    Which entry was the largest is kept, so nothing is compared twice, and there is no scatter.
    """
    rows, columns = (size // 2 * 2 for size in z.shape[2:4])
    return _pool_even(z[:, :, :rows, :columns])


@jax.custom_vjp
def _pool_even(z: Array) -> Array:
    return max_pool(z)


def _pool_forward(z: Array) -> tuple[Array, Array]:
    corners = jnp.stack(_corners(z))
    return corners.max(0), corners.argmax(0).astype(jnp.int8)


def _pool_backward(winner: Array, cotangent: Array) -> tuple[Array]:
    parts = [jnp.where(winner == i, cotangent, 0.0) for i in range(4)]
    rows = [jnp.stack(parts[i : i + 2], axis=4) for i in (0, 2)]  # [T, N, h, w, 2, D]
    tasks, images, height, width, channels = winner.shape
    return (jnp.stack(rows, axis=3).reshape(tasks, images, 2 * height, 2 * width, channels),)


def _corners(z: Array) -> list[Array]:
    """The four entries [T, N, h, w, D] of every window of `max_pool`, row by row."""
    windows = _windows(z)
    return [windows[:, :, :, i, :, j] for i in (0, 1) for j in (0, 1)]


_pool_even.defvjp(_pool_forward, _pool_backward)


def _spread(pooled: Float[Array, "T N h w D"]) -> Float[Array, "T N h 1 w 1 D"]:
    return pooled[:, :, :, None, :, None]


def _task_mean(z: Float[Array, "T N H W D"]) -> Float[Array, "T 1 1 1 D"]:
    """Mean over the images of each task, first within every image: one long float32 sum may lose two digits.

    Two sums would not do: XLA merges them, but not two means.
    """
    return z.mean((2, 3), keepdims=True).mean(1, keepdims=True)


@jax.custom_vjp
def norm_relu_pool(
    z: Float[Array, "T N H W D"], scale: Float[Array, " D"], shift: Float[Array, " D"]
) -> tuple[Float[Array, "T N h w D"], Float[Array, "T D"], Float[Array, "T D"]]:
    """max_pool(relu(scale (z - mean) / sqrt(variance + EPSILON) + shift)), and each task's mean and variance [T, D].

    For scale >= 0 everything after the statistics is increasing in z, so z is pooled first and the rest sees a quarter
    of the data. A negative scale is not allowed: negate z and scale together. No gradient flows into the returned
    statistics, which are for the running averages only. Where several entries of a window share the maximum, each gets
    an equal part of its gradient. They are found by comparing z with its maxima, so z must be a stored array, such as
    the output of a convolution: XLA may compute an elementwise expression twice, with different rounding.
    """
    return _block_forward(z, scale, shift)[0]


def _block_forward(z: Array, scale: Array, shift: Array) -> tuple[tuple[Array, Array, Array], tuple[Array, ...]]:
    mean = _task_mean(z)
    variance = _task_mean((z - mean) ** 2)  # two passes: E[z^2] - E[z]^2 would cancel
    inverse = jax.lax.rsqrt(variance + EPSILON)
    pooled = pool_shared(z)
    y = jax.nn.relu((pooled - mean) * (inverse * scale) + shift)
    tasks, width = z.shape[0], z.shape[-1]
    return (y, mean.reshape(tasks, width), variance.reshape(tasks, width)), (z, pooled, mean, inverse, scale, shift)


def _block_backward(saved: tuple[Array, ...], cotangents: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Batch norm's gradient with both of its sums taken over the pooled array: all other terms of them are zero."""
    z, pooled, mean, inverse, scale, shift = saved
    standard = (pooled - mean) * inverse
    active = jnp.where(standard * scale + shift > 0, cotangents[0], 0.0)
    to_shift, to_scale = _task_mean(active), _task_mean(active * standard)
    kept = pooled[0, 0, :, :, 0].size / z[0, 0, :, :, 0].size
    dense = kept * (to_shift + to_scale * inverse * (z - mean))
    to_z = scale * inverse * (_unpool(z, pooled, active) - dense)
    count = pooled[0, ..., 0].size
    return to_z, count * to_scale.sum(0).reshape(-1), count * to_shift.sum(0).reshape(-1)


def _unpool(
    z: Float[Array, "T N H W D"], pooled: Float[Array, "T N h w D"], cotangent: Float[Array, "T N h w D"]
) -> Float[Array, "T N H W D"]:
    """Gradient [T, N, H, W, D] of `max_pool` at z, ties shared equally."""
    # Four slices, not a sum over the window axes: XLA then fuses the count into one pass over z.
    ties = sum((corner == pooled).astype(z.dtype) for corner in _corners(z))
    shared = jnp.where(_windows(z) == _spread(pooled), _spread(cotangent / ties), 0.0)
    rows, columns = z.shape[2] // 2 * 2, z.shape[3] // 2 * 2
    shared = shared.reshape(*z.shape[:2], rows, columns, z.shape[-1])
    return jnp.pad(shared, ((0, 0), (0, 0), (0, z.shape[2] - rows), (0, z.shape[3] - columns), (0, 0)))


@jax.custom_vjp
def pool_shared(z: Float[Array, "T N H W D"]) -> Float[Array, "T N h w D"]:
    """`max_pool`, with ties shared in the gradient of a gradient too, and no scatter there."""
    return max_pool(z)


def _shared_forward(z: Array) -> tuple[Array, tuple[Array, Array]]:
    pooled = pool_shared(z)
    return pooled, (z, pooled)


def _shared_backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array]:
    return (_unpool(*saved, cotangent),)


pool_shared.defvjp(_shared_forward, _shared_backward)
norm_relu_pool.defvjp(_block_forward, _block_backward)
