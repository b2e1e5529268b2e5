"""Floating-point operations and bytes of one episode, and the two floors that they set on this machine.

    taskset -c 0 python benchmarks/roofline.py [--repeats 10] [--images 85]

Peaks are measured: float32 products of two 1024 x 1024 matrices, and a triad a = b + s c far larger than the caches.
Then Conv4, forward and backward, at 28x28x1 and 84x84x3 is timed and set against the larger of the two floors.

Counts, for N images. A 3x3 convolution to 64 channels on H x W pixels with I channels takes 2 * 9 * I * 64 * H * W
operations an image; its backward pass the same for the weights and again for the input, which the first layer does
not need. Bytes count every pass over an un-pooled array z of 64 channels, which is what does not fit in a cache:
written by the convolution, read for the mean, the variance and the pooling (3), read and its gradient written by the
backward pass of batch norm (2), the gradient read for weights and input (2).
"""

import argparse
from typing import NamedTuple

import backbone
import jax
import jax.numpy as jnp
import numpy as np
from timing import Timed, by_turns, markdown

WIDTH, PASSES, BYTES = 64, 8, 4
SHAPES = {"28x28x1": (28, 28, 1), "84x84x3": (84, 84, 3)}


class Count(NamedTuple):
    """Operations and bytes."""

    operations: float
    bytes: float


class Peaks(NamedTuple):
    """Operations and bytes a second."""

    operations: float
    bytes: float


def main() -> None:
    arguments = parse()
    peaks = measure_peaks(arguments.repeats)
    print(
        f"{jax.devices()[0].device_kind}: {peaks.operations / 1e9:.1f} GFLOP/s in float32 products, "
        f"{peaks.bytes / 1e9:.1f} GB/s\n"
    )
    rows = []
    for name, shape in SHAPES.items():
        repeats = max(2, arguments.repeats // (1 if shape[0] < 50 else 5))
        times = by_turns(programs(arguments.images, shape), repeats)
        rows += [
            row(f"{name}, {kind}", count(arguments.images, shape, kind), one, peaks) for kind, one in times.items()
        ]
    for points, classes in ((85, 5), (25, 5), (500, 20)):
        rows.append(step_row(points, classes, peaks))
    header = ["", "GFLOP", "MB", "arithmetic floor, ms", "memory floor, ms", "measured (minimum), ms", "of the floor"]
    print(markdown(header, rows))


def measure_peaks(repeats: int) -> Peaks:
    """Best of several rounds: other processes only ever slow these down."""
    size, length = 1024, 1 << 24
    left = jnp.ones((size, size), jnp.float32)
    b, c = jnp.ones(length, jnp.float32), jnp.ones(length, jnp.float32)
    product = jax.jit(lambda x: jnp.matmul(x, x, precision="highest"))
    triad = jax.jit(lambda x, y: x + 3.0 * y)
    times = by_turns({"product": lambda: product(left), "triad": lambda: triad(b, c)}, repeats)
    return Peaks(2e3 * size**3 / times["product"].minimum, 3e3 * BYTES * length / times["triad"].minimum)


def programs(images: int, shape: tuple[int, int, int]) -> dict:
    found = {
        "forward": backbone.ours(images, shape),
        "forward and backward": backbone.gradient(backbone.ours(images, shape)),
    }
    return found | ({"PyTorch": backbone.torch_step(images, shape)} if backbone.has_torch() else {})


def count(images: int, shape: tuple[int, int, int], kind: str = "forward and backward") -> Count:
    """Operations and bytes of Conv4 on a number of images (the counts of the module's docstring)."""
    height, width, channels = shape
    operations = traffic = 0.0
    for layer in range(4):
        one = 2.0 * 9 * channels * WIDTH * height * width * images
        operations += one * (1 if kind == "forward" else 3 - (layer == 0))
        traffic += BYTES * WIDTH * height * width * images * (4 if kind == "forward" else PASSES)
        height, width, channels = height // 2, width // 2, WIDTH
    return Count(operations, traffic)


def inference_step_count(points: int, classes: int, draws: int = 256) -> Count:
    """One step of cvi: a Cholesky factor and N right sides a class; a gradient over the draws, some 40 each.

    A Cholesky factor takes N^3 / 3 operations and a triangular solve of N right sides N^3; B and its solution are
    written and read once each.
    """
    algebra = classes * points**3 * (1 / 3 + 1)
    return Count(algebra + 40.0 * draws * classes * points, BYTES * classes * points**2 * 6)


def step_row(points: int, classes: int, peaks: Peaks) -> list[str]:
    cells = _cells(inference_step_count(points, classes), peaks)
    return [f"one step of cvi, N = {points}, C = {classes}", *cells, "-", "-"]


def row(name: str, counted: Count, one: Timed, peaks: Peaks) -> list[str]:
    floor = 1e3 * max(counted.operations / peaks.operations, counted.bytes / peaks.bytes)
    return [name, *_cells(counted, peaks), f"{one.minimum:.1f}", f"{one.minimum / floor:.2f}"]


def _cells(counted: Count, peaks: Peaks) -> list[str]:
    floors = np.array([counted.operations / peaks.operations, counted.bytes / peaks.bytes]) * 1e3
    return [f"{counted.operations / 1e9:.3f}", f"{counted.bytes / 1e6:.1f}", *(f"{floor:.2f}" for floor in floors)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--images", type=int, default=85)
    return parser.parse_args()


if __name__ == "__main__":
    main()
