"""What inference adds to a training step: the whole step against Conv4 alone, forward and backward, on the same images.

    python benchmarks/training_step.py [--repeats 40] [--kernel rbf] [--inner-steps 3] [--shot 1]

Both are compiled first (time printed apart), then timed in turns, so that both meet the same load of the machine.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from inference import HYPERGRADIENTS, OBJECTIVES
from inference.inner import cvi
from inference.outer.svi import Recipe, make_trainer
from models import KERNELS, Conv4
from models.deep_kernel import DeepKernel
from models.likelihoods import Softmax
from tasks.episodes import make_dataset, sample_task

WAY, QUERY, IMAGE = 5, 16, (28, 28, 1)


def main() -> None:
    """Prints medians, minima and their ratio."""
    arguments = parse()
    whole = training_step(arguments)
    alone = network_step(WAY * (arguments.shot + QUERY))
    for name, run in (("training step", whole), ("Conv4 alone", alone)):
        start = time.perf_counter()
        run()
        print(f"{name}: compiled and run once in {time.perf_counter() - start:.1f} s")
    times = np.array([[clock(whole), clock(alone)] for _ in range(arguments.repeats)])
    for label, (step, network) in (("median", np.median(times, axis=0)), ("minimum", times.min(axis=0))):
        print(f"{label}: step {1e3 * step:.1f} ms, Conv4 alone {1e3 * network:.1f} ms, ratio {step / network:.2f}")
    print(f"median of the ratios of neighbours: {np.median(times[:, 0] / times[:, 1]):.2f}")


def training_step(arguments: argparse.Namespace) -> Callable[[], None]:
    """One optimiser step, sampling and Adam included, on random images."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(50), arguments.shot + QUERY)
    dataset = make_dataset(rng.integers(0, 256, (len(labels), *IMAGE)).astype(np.uint8), labels)
    network = DeepKernel(Conv4(IMAGE, rngs=nnx.Rngs(0)), KERNELS[arguments.kernel](), rngs=nnx.Rngs(1))
    recipe = Recipe(Softmax(), cvi, OBJECTIVES["elbo"], HYPERGRADIENTS["sites"], arguments.inner_steps)
    trainer = make_trainer(
        jax.random.key(0),
        network,
        recipe,
        lambda key: sample_task(key, dataset, WAY, arguments.shot, QUERY),
        optax.adam(1e-3),
        classes=WAY,
    )
    state = trainer.init()

    def run() -> None:
        nonlocal state
        state, log = trainer.step(state, 0)
        jax.block_until_ready((state.optim_state, log))

    return run


def network_step(images: int) -> Callable[[], None]:
    """Forward and backward of Conv4 with batch statistics, its weights' gradients included."""
    graph, params, rest = nnx.split(Conv4(IMAGE, rngs=nnx.Rngs(0)), nnx.Param, ...)
    x = jax.random.uniform(jax.random.key(0), (1, images, *IMAGE))

    @jax.jit
    def gradient(params: nnx.State, x: jax.Array) -> nnx.State:
        return jax.grad(lambda p: jnp.sum(nnx.merge(graph, p, rest, copy=True)(x, True) ** 2))(params)

    return lambda: jax.block_until_ready(gradient(params, x))


def clock(run: Callable[[], None]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--kernel", choices=sorted(KERNELS), default="rbf")
    parser.add_argument("--inner-steps", type=int, default=3)
    parser.add_argument("--shot", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
