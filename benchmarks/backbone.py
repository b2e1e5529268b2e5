"""Conv4 against the same network in plain layers: forward, and forward with backward, on images of 28x28.

    python benchmarks/backbone.py [--images 85] [--repeats 20] [--steps 3]

Plain is what one writes first: convolution, batch norm, ReLU, reduce-window pooling, all left to autodiff. Whole is
ours with the gradient of a kernel from all images at once, as on a GPU, not as a sum over a few images at a time. Each
program is compiled first (time printed apart), then all are timed in turns, so that they meet the same load.
Training runs steps in a `lax.scan`; --steps is the length of that loop. The plain backward pass in such a loop is timed
once only: XLA's CPU compiler makes its convolutions' gradients scalar code. PyTorch is compared where it is installed.
One core: put `taskset -c 0` in front.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from timing import Run, by_turns

from fewshot.models import Conv4, convolution
from fewshot.models.convolution import EPSILON, max_pool

IMAGES, SHAPE = 85, (28, 28, 1)


def main() -> None:
    """Prints milliseconds (median and minimum) and the ratio of each program to ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=IMAGES, help="85: 5-way 1-shot training; 340: 20-way")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    programs = {"ours": ours(arguments.images), "plain": plain(arguments.images)}
    report("forward", programs, arguments.repeats)
    gradients = {name: gradient(program) for name, program in programs.items()}
    contestants: dict[str, Run] = gradients | {"whole": whole(gradients["ours"])}
    if has_torch():
        contestants["torch"] = torch_step(arguments.images)
    report("forward and backward, one call", contestants, arguments.repeats)
    looped = {name: loop(program, arguments.steps) for name, program in gradients.items()}
    report(f"forward and backward, {arguments.steps} steps in a scan", looped, 1)


def report(title: str, contestants: Mapping[str, Run], repeats: int) -> None:
    """Compile all, time all in turns, print one line each."""
    times = by_turns(contestants, repeats)
    print(title)
    for name, one in times.items():
        speed = (
            f"median {one.median:8.1f} ms, minimum {one.minimum:8.1f} ms, {one.ratio(times['ours']):5.2f} times ours"
        )
        print(f"  {name:6s} {speed} (compiled and run once in {one.first:.1f} s)")


class Program:
    """A network as a function of its parameters: call it for one compiled evaluation on x [1, N, H, W, Ch]."""

    def __init__(self, apply: Callable, parameters: object, x: jax.Array):
        self.apply, self.parameters, self.x = apply, parameters, x
        self.compiled = jax.jit(apply)

    def __call__(self) -> object:
        return self.compiled(self.parameters, self.x)


def random_images(images: int, shape: tuple[int, int, int]) -> jax.Array:
    return jax.random.uniform(jax.random.key(0), (1, images, *shape))


def ours(images: int = IMAGES, shape: tuple[int, int, int] = SHAPE) -> Program:
    """Conv4 with batch statistics."""
    graph, parameters, rest = nnx.split(Conv4(shape, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def apply(parameters: object, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, parameters, rest, copy=True)(x, True)

    return Program(apply, parameters, random_images(images, shape))


def plain(images: int = IMAGES, shape: tuple[int, int, int] = SHAPE) -> Program:
    """The same four blocks without custom gradients."""
    parameters = nnx.to_pure_dict(nnx.state(Conv4(shape, rngs=nnx.Rngs(0)), nnx.Param))

    def apply(parameters: dict, x: jax.Array) -> jax.Array:
        for block in parameters.values():
            z = jax.lax.conv_general_dilated(
                x[0], block["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            z = (z - z.mean((0, 1, 2))) * jax.lax.rsqrt(z.var((0, 1, 2)) + EPSILON)
            x = max_pool(jax.nn.relu(z * block["norm"]["scale"] + block["norm"]["shift"])[None])
        return x.reshape(1, images, -1)

    return Program(apply, parameters, random_images(images, shape))


def gradient(program: Program) -> Program:
    """Gradient of a scalar of the features in all parameters."""
    features = jax.eval_shape(program.apply, program.parameters, program.x).shape
    weights = jax.random.normal(jax.random.key(1), features)
    objective = jax.grad(lambda parameters, x: (weights * program.apply(parameters, x)).sum())
    return Program(objective, program.parameters, program.x)


def whole(program: Program) -> Program:
    """The same gradient with no sum over parts of the images."""

    def apply(parameters: object, x: jax.Array) -> object:
        with mock.patch.object(convolution, "WINDOW", sys.maxsize):
            return program.apply(parameters, x)

    return Program(apply, program.parameters, program.x)


def loop(program: Program, steps: int) -> Program:
    """`steps` gradient steps in one compiled loop."""

    def apply(parameters: object, x: jax.Array) -> object:
        def step(parameters: object, _: None) -> tuple[object, None]:
            moved = jax.tree.map(lambda p, g: p - 1e-3 * g, parameters, program.apply(parameters, x))
            return moved, None

        return jax.lax.scan(step, parameters, None, length=steps)[0]

    return Program(apply, program.parameters, program.x)


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def torch_step(images: int = IMAGES, shape: tuple[int, int, int] = SHAPE) -> Run:
    """The same network, forward and backward, in PyTorch on the CPU."""
    import torch

    layers, channels = [], shape[-1]
    for _ in range(4):
        convolution = torch.nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        layers += [convolution, torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        channels = 64
    network = torch.nn.Sequential(*layers)
    x = torch.rand(images, shape[-1], *shape[:2])
    weights = torch.randn_like(network(x))

    def run() -> object:
        network.zero_grad()
        (weights * network(x)).sum().backward()
        return jnp.zeros(())

    return run


if __name__ == "__main__":
    main()
