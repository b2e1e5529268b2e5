"""What inference adds to a training step: the whole step against Conv4 alone, forward and backward, on the same images.

    python benchmarks/training_step.py [--repeats 40] [--kernel rbf] [--inner-steps 3] [--shot 1]
        [--learner NAME] [--tasks 1]

Both are compiled first (time printed apart), then timed in turns, so that both meet the same load of the machine.
"""

import argparse

import backbone
import jax
import numpy as np
import optax
from flax import nnx
from timing import Run, by_turns

from fewshot.inference.inner import cvi
from fewshot.inference.outer.objectives import leave_one_out
from fewshot.inference.outer.svi import make_trainer
from fewshot.learners import (
    ABML,
    MAML,
    BayesianMAML,
    Chaser,
    FirstOrderMAML,
    GaussianProcess,
    InductiveMAML,
    Learner,
    Matching,
    Prototypical,
    Relation,
)
from fewshot.models import KERNELS, Conv4
from fewshot.models.backbones import Conv4Maps
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.likelihoods import Softmax
from fewshot.tasks.episodes import make_dataset, sample_task

WAY, QUERY, IMAGE = 5, 16, (28, 28, 1)


def main() -> None:
    """Prints medians, minima and their ratio."""
    arguments = parse()
    alone = backbone.gradient(backbone.ours(WAY * (arguments.shot + QUERY)))
    step = step_of_arguments(arguments)
    times = by_turns({"step": step, "Conv4 alone": alone}, arguments.repeats)
    for name, one in times.items():
        print(f"{name}: median {one.median:.1f} ms, minimum {one.minimum:.1f} ms, first call {one.first:.1f} s")
    print(f"ratio of the fastest rounds: {times['step'].ratio(times['Conv4 alone']):.2f}")


def training_step(arguments: argparse.Namespace) -> Run:
    """One optimiser step of a Gaussian process, sampling and Adam included, on random images."""
    network, kernel = Conv4(IMAGE, rngs=nnx.Rngs(0)), KERNELS[arguments.kernel]()
    deep_kernel = DeepKernel(network, kernel, rngs=nnx.Rngs(1), classes=WAY)
    steps = 3 if arguments.inner_steps is None else arguments.inner_steps
    learner = GaussianProcess(deep_kernel, Softmax(), cvi, objective=leave_one_out, inner_steps=steps)
    return step_of(learner, arguments.shot, arguments.tasks)


# Learners whose step is the network's and a distance; the last has LSTMs of its own.
METRIC = {
    "prototypical": lambda network: Prototypical(network, way=WAY),
    "matching": lambda network: Matching(network, way=WAY, context=False, rngs=nnx.Rngs(1)),
    "matching with context": lambda network: Matching(network, way=WAY, rngs=nnx.Rngs(1)),
}


# Learners of steps of gradient descent in every task.
ADAPTED = {
    "maml": MAML,
    "first-order-maml": FirstOrderMAML,
    "inductive-maml": InductiveMAML,
    "bayesian-maml": BayesianMAML,
    "chaser": Chaser,
    "abml": ABML,
}


def step_of_arguments(arguments: argparse.Namespace) -> Run:
    """The step that was asked for."""
    if arguments.learner is None:
        return training_step(arguments)
    if arguments.learner in METRIC:
        return metric_step(arguments.learner, arguments.shot, arguments.tasks)
    if arguments.learner == "relation":
        relation = Relation(Conv4Maps(IMAGE, rngs=nnx.Rngs(0)), way=WAY, rngs=nnx.Rngs(1))
        return step_of(relation, arguments.shot, arguments.tasks)
    steps = {} if arguments.inner_steps is None else {"inner_steps": arguments.inner_steps}
    learner = ADAPTED[arguments.learner](Conv4(IMAGE, rngs=nnx.Rngs(0)), way=WAY, rngs=nnx.Rngs(1), **steps)
    return step_of(learner, arguments.shot, arguments.tasks)


def metric_step(name: str, shot: int, tasks: int = 1) -> Run:
    """One optimiser step of one of METRIC."""
    return step_of(METRIC[name](Conv4(IMAGE, rngs=nnx.Rngs(0))), shot, tasks)


def step_of(learner: Learner, shot: int, tasks: int = 1) -> Run:
    """One optimiser step of a learner, sampling and Adam included, on random images."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(50), shot + QUERY)
    dataset = make_dataset(rng.integers(0, 256, (len(labels), *IMAGE)).astype(np.uint8), labels)
    trainer = make_trainer(
        jax.random.key(0),
        learner,
        lambda key: sample_task(key, dataset, WAY, shot, QUERY),
        optax.adam(1e-3),
        tasks_per_step=tasks,
    )
    state = trainer.init()

    def run() -> object:
        nonlocal state
        state, log = trainer.step(state, 0)
        return state.optim_state, log

    return run


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--kernel", choices=sorted(KERNELS), default="rbf")
    parser.add_argument("--inner-steps", type=int, help="of a task (default: 3; of learners that adapt a network, 5)")
    parser.add_argument("--shot", type=int, default=1)
    names = sorted(["relation", *METRIC, *ADAPTED])
    parser.add_argument("--learner", choices=names, help="instead of the Gaussian process")
    parser.add_argument("--tasks", type=int, default=1, help="of an optimiser step; Conv4 alone sees the images of one")
    return parser.parse_args()


if __name__ == "__main__":
    main()
