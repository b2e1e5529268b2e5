"""Run by test_devices.py with 8 simulated devices: the same training on one of them and on several; prints JSON."""

import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from fewshot.inference.inner import exact
from fewshot.inference.outer.devices import TASKS, task_mesh
from fewshot.inference.outer.svi import make_trainer
from fewshot.learners import GaussianProcess
from fewshot.models import KERNELS, MLP, LabelRegression
from fewshot.models.deep_kernel import DeepKernel
from fewshot.runners.cli import compilation_cache
from fewshot.tasks import make_dataset, sample_task
from fewshot.training import checkpoint
from fewshot.training.log import table

SHAPE, WAY, SHOT, QUERY, TASKS_PER_STEP, STEPS = (4, 4, 1), 3, 1, 2, 8, 50


def pool():
    rng = np.random.default_rng(0)
    patterns = rng.uniform(0, 255, size=(6, 1, *SHAPE))
    images = np.clip(patterns + 60 * rng.normal(size=(6, 5, *SHAPE)), 0, 255).astype(np.uint8)
    return make_dataset(images.reshape(-1, *SHAPE), np.repeat(np.arange(6), 5))


def trainer(mesh):
    """Plain gradient steps: Adam makes steps out of the rounding of gradients that are 0, as before a batch norm."""
    rngs = nnx.Rngs(0)
    deep_kernel = DeepKernel(MLP(SHAPE, rngs=rngs, width=8), KERNELS["cosine-bn"](), rngs=rngs, classes=WAY)
    sampler = jax.tree_util.Partial(lambda data, key: sample_task(key, data, WAY, SHOT, QUERY), pool())
    learner = GaussianProcess(deep_kernel, LabelRegression(1.0), exact, inner_steps=1)
    settings = {"tasks_per_step": TASKS_PER_STEP, "mesh": mesh}
    return make_trainer(jax.random.key(1), learner, sampler, optax.sgd(0.01), **settings)


def train(made, state, first, last):
    logs = []
    for index in range(first, last):
        state, log = made.step(state, index)
        logs.append(log)
    return state, table(logs, GaussianProcess.diagnostics).tolist()


def learned(made, state):
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(made.module(state).deep_kernel)))
    return np.concatenate([np.ravel(leaf) for leaf in leaves]).tolist()


def exchanges(made):
    """How often the devices exchange numbers in one compiled step."""
    program = made.step.lower(made.init(), 0).compile().as_text()
    return len(re.findall(r" (?:all-|reduce-scatter|collective)[a-z-]*\(", program))


def main(folder):
    compilation_cache.keep_programs()
    made = {1: trainer(None), 8: trainer(task_mesh(TASKS_PER_STEP))}
    result = {"devices": len(jax.devices()), "rows": {}, "learned": {}, "exchanges": exchanges(made[8])}
    for count, one in made.items():
        state, result["rows"][count] = train(one, one.init(), 0, STEPS)
        result["learned"][count] = learned(one, state)
    four = trainer(Mesh(np.array(jax.devices()[:4]), (TASKS,)))  # two tasks each
    result["rows"][4] = train(four, four.init(), 0, 10)[1]
    for before, after in ((8, 1), (1, 8)):
        state, rows = train(made[before], made[before].init(), 0, 5)
        checkpoint.save(folder / f"{before}", 5, state)
        state = checkpoint.restore(folder / f"{before}", 5, made[after].init())
        state, more = train(made[after], state, 5, 10)
        result["rows"][f"{before} then {after}"] = rows + more
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
