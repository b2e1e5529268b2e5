"""What inference adds to a training episode: objective and gradient in features and hyper-parameters, 5-way 1-shot.

    taskset -c 0 python benchmarks/inference_cost.py [--repeats 30] [--shot 1]

Float32, RBF kernel on 64 features; the labelled points are the merged task (N = 85), for `predictive` the support
(N = 5, 80 queries). Each contestant is timed by turns with the forward and backward pass of Conv4 on the same number of
images, and with PyTorch's Conv4 where PyTorch is installed. Then a test episode at 50 inner steps against the forward
pass alone.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import backbone
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from timing import Run, by_turns, markdown

from fewshot.inference import HYPERGRADIENTS, OBJECTIVES
from fewshot.inference.inner import Inference, cavi, cvi, exact, fit, gibbs
from fewshot.inference.outer.objectives import EmbeddedTask, Inner
from fewshot.inference.predictive import predict
from fewshot.models import Conv4
from fewshot.models.kernels import RBF
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import Likelihood
from fewshot.models.process import LatentProcess

WAY, TRAIN_QUERY, TEST_QUERY, FEATURES = 5, 16, 15, 64
CONV4, TORCH = "Conv4", "Conv4 (PyTorch)"


class Method(NamedTuple):
    """One cell: what is trained, how, and the milliseconds it is meant to take on one core."""

    likelihood: Likelihood
    inference: Callable[..., Inference]
    objective: str
    steps: int
    target: float


METHODS = {
    "cvi, 3 steps": Method(Softmax(), cvi, "elbo", 3, 6.0),
    "cvi, 20 steps": Method(Softmax(), cvi, "elbo", 20, 14.0),
    "exact": Method(LabelRegression(), exact, "elbo", 1, 4.0),
    "cavi, 2 steps": Method(LogisticSoftmax(), cavi, "elbo", 2, 6.0),
    "one-vs-each Gibbs predictive, 20 chains": Method(OneVsEach(), gibbs, "predictive", 1, 8.0),
    "one-vs-each Gibbs evidence, 20 chains": Method(OneVsEach(), gibbs, "evidence", 1, 30.0),
}


def main() -> None:
    arguments = parse()
    contestants = {name: training(method, arguments.shot) for name, method in METHODS.items()}
    references = networks(WAY * (arguments.shot + TRAIN_QUERY))
    times = by_turns(references | contestants, arguments.repeats)
    rows = []
    for name, one in times.items():
        ratios = [f"{one.ratio(times[reference]):.3f}" if reference in times else "-" for reference in (CONV4, TORCH)]
        target = f"{METHODS[name].target:.0f}" if name in METHODS else "-"
        rows.append([name, f"{one.median:.2f}", f"{one.minimum:.2f}", target, *ratios, f"{one.first:.1f}"])
    header = ["", "median, ms", "minimum, ms", "target, ms", "of Conv4", "of PyTorch's Conv4", "first call, s"]
    print(markdown(header, rows))
    pair = by_turns(whole_test_episode(arguments.shot), arguments.repeats)
    whole, forward = pair.values()
    print(
        f"\ntest episode, {WAY}-way {arguments.shot}-shot, 50 inner steps: median {whole.median:.1f} ms, minimum "
        f"{whole.minimum:.1f} ms; {whole.ratio(forward):.2f} times the forward pass (at most 1.3 is wanted)"
    )


def networks(images: int) -> dict[str, Run]:
    """Forward and backward passes of Conv4: ours, and PyTorch's where it is installed."""
    found = {CONV4: backbone.gradient(backbone.ours(images))}
    return found | ({TORCH: backbone.torch_step(images)} if backbone.has_torch() else {})


def training(method: Method, shot: int = 1, way: int = WAY, query: int = TRAIN_QUERY) -> Run:
    """Objective and its gradient for one task, as one compiled call with a new key each time."""
    values = (hyperparameters(), episode(way, shot, query)[0])
    gradient, keys = jax.jit(gradient_of(method, way, shot, query)), iter(jax.random.split(jax.random.key(0), 10_000))
    return lambda: gradient(values, next(keys))


def gradient_of(method: Method, way: int, shot: int, query: int) -> Callable:
    """(hyper-parameters, features [N + Q, D]), key -> objective and its gradient, for the labels of `episode`."""
    y, labelled = episode(way, shot, query)[1], way * shot
    inner = Inner(method.inference(method.likelihood), method.steps, HYPERGRADIENTS["sites"], way)

    def objective(values: tuple, key: jax.Array) -> jax.Array:
        hyper, x = values
        task = EmbeddedTask(x[:labelled], y[:labelled], x[labelled:], y[labelled:])
        return OBJECTIVES[method.objective](key, inner, method.likelihood, LatentProcess(RBF(), hyper), task).value

    return jax.value_and_grad(objective)


def whole_test_episode(shot: int = 1) -> dict[str, Run]:
    """A test episode from images to probabilities, 50 inner steps of cvi; and the network's forward pass alone.

    Weights are arguments, as in the runners: of constants a compiler would work the batch norms into the convolutions.
    """
    labelled = WAY * shot
    graph, weights = nnx.split(Conv4(backbone.SHAPE, rngs=nnx.Rngs(0)))
    images = jax.random.uniform(jax.random.key(0), (1, labelled + WAY * TEST_QUERY, *backbone.SHAPE))
    y, hyper, likelihood = jnp.repeat(jnp.arange(WAY), shot), hyperparameters(), Softmax()

    @jax.jit
    def forward(weights: object, images: jax.Array) -> jax.Array:
        return nnx.merge(graph, weights, copy=True)(images, False)[0]

    @jax.jit
    def whole(key: jax.Array, weights: object, images: jax.Array) -> jax.Array:
        x = forward(weights, images)
        fit_key, predict_key = jax.random.split(key)
        kernel, process = cvi(likelihood), LatentProcess(RBF(), hyper)
        prior, query = process.prior(x[:labelled], WAY), process.query(x[:labelled], x[labelled:], WAY)
        state, _ = fit(fit_key, kernel, prior, y, steps=50)
        return predict(predict_key, likelihood, kernel.posterior(state, prior), query)

    return {"whole": lambda: whole(jax.random.key(0), weights, images), "forward": lambda: forward(weights, images)}


def hyperparameters() -> dict[str, jax.Array]:
    """Where the RBF kernel starts."""
    return {name: jnp.float32(value) for name, value in RBF().initial().items()}


def episode(way: int, shot: int, query: int) -> tuple[jax.Array, jax.Array]:
    """ReLU features [N + Q, D] around one centre a class, labels; support first, both parts class-major."""
    rng = np.random.default_rng(0)
    y = np.concatenate([np.repeat(np.arange(way), shot), np.repeat(np.arange(way), query)])
    centres = rng.normal(size=(way, FEATURES))
    x = np.maximum(centres[y] + rng.normal(size=(len(y), FEATURES)), 0.0)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--shot", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
