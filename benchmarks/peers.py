"""Other libraries on the same episode, each with its own optimum checked against ours.

    taskset -c 0 python benchmarks/peers.py [--repeats 5]

- GPyTorch: variational GP with a softmax likelihood, inducing points at the data, natural gradients of length 0.5,
  256 draws. Same kernel, prior and labels; its q, evaluated by our deterministic bound, against that of cvi.
- scikit-learn: GaussianProcessClassifier, Laplace, one against the rest. With two classes a softmax of two GPs with
  covariance K is a logistic of one GP with 2 K, so there its evidence must be ours to rounding.
- polyagamma: draws of PG(1, z); see polya_gamma.py for the tables.

What is not installed is named and left out: pip install -e '.[bench,peers]'.
"""

import argparse
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from inference_cost import episode
from timing import Run, by_turns, markdown

from fewshot.evaluation import metrics
from fewshot.inference.inner import cvi, fit_to_tolerance, laplace
from fewshot.inference.predictive import predict
from fewshot.models.gaussian import GaussianPrior, Marginals
from fewshot.models.kernels import RBF
from fewshot.models.likelihoods import Softmax
from fewshot.models.polya_gamma import sample_polya_gamma_one
from fewshot.models.process import LatentProcess

WAY, SHOT, QUERY, DRAWS, NATURAL_STEPS, GAMMAS = 5, 5, 15, 256, 40, 100_000
SCALE, LENGTHSCALE = 10.0, 0.8  # s2 and l of k = s2 exp(-|x - z|^2 / (2 D l^2))
PEERS = {"gpytorch": "gpytorch", "scikit-learn": "sklearn", "polyagamma": "polyagamma"}


class Setting(NamedTuple):
    """One episode in float64 numbers: support x [N, D] and y [N], queries, and the prior at the support."""

    x: np.ndarray
    y: np.ndarray
    x_query: np.ndarray
    y_query: np.ndarray

    @property
    def prior(self) -> GaussianPrior:
        return PROCESS.prior(jnp.asarray(self.x), self.classes)

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


class Outcome(NamedTuple):
    """One line of the report: what was compared, theirs, ours, and the ratio of the times."""

    peer: str
    what: str
    theirs: str
    ours: str
    ratio: str


PROCESS = LatentProcess(RBF(), {"log_scale": math.log(SCALE), "log_lengthscale": math.log(LENGTHSCALE)})


def main() -> None:
    arguments = parse()
    lines = [line for name, compare in COMPARISONS.items() if installed(name) for line in compare(arguments.repeats)]
    print(markdown(["peer", "what", "theirs", "ours", "their time / ours"], [list(line) for line in lines]))


def installed(peer: str) -> bool:
    if importlib.util.find_spec(PEERS[peer]):
        return True
    print(f"{peer} is not installed: no comparison")
    return False


def setting(way: int = WAY, shot: int = SHOT, query: int = QUERY) -> Setting:
    x, y = (np.asarray(part) for part in episode(way, shot, query))
    labelled = way * shot
    return Setting(x[:labelled].astype(float), y[:labelled], x[labelled:].astype(float), y[labelled:])


# GPyTorch


def gpytorch_fit(task: Setting, steps: int, draws: int = DRAWS) -> tuple[Any, Any]:
    """(model, step): a variational GP after natural-gradient steps of length 0.5; hyper-parameters are fixed."""
    import gpytorch
    import torch

    torch.manual_seed(0)
    x, y = torch.tensor(task.x), torch.tensor(task.y).long()
    batch = torch.Size([task.classes])

    class Model(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(x), batch_shape=batch)
            points = x.expand(task.classes, *x.shape).clone()
            inner = gpytorch.variational.VariationalStrategy(
                self, points, q, learn_inducing_locations=False, jitter_val=1e-8
            )
            super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(inner, task.classes))
            self.mean_module = gpytorch.means.ZeroMean(batch_shape=batch)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.covar_module.outputscale = SCALE
            self.covar_module.base_kernel.lengthscale = LENGTHSCALE * math.sqrt(x.shape[1])
            self.requires_grad_(False)
            for parameter in self.variational_parameters():
                parameter.requires_grad_(True)

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Model().double()
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=task.classes, mixing_weights=False)
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    optimiser = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(x), lr=0.5)
    model.train()

    def step() -> float:
        with gpytorch.settings.num_likelihood_samples(draws):
            optimiser.zero_grad()
            loss = -bound(model(x), y)
            loss.backward()
            optimiser.step()
        return float(loss.detach())

    for _ in range(steps):
        step()
    return model, step


def bound_of_gpytorch(task: Setting, model: Any) -> float:
    """E1 of their q in our arithmetic: the deterministic expectation of the softmax, and the KL of full Gaussians."""
    import gpytorch
    import torch

    model.eval()
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        q = model.variational_strategy.base_variational_strategy(torch.tensor(task.x))
        mean, covariance = q.mean.numpy(), q.covariance_matrix.numpy()
    prior = np.asarray(task.prior.covariance)
    inverse = np.linalg.inv(prior)
    kl = 0.5 * sum(
        np.trace(inverse @ s) + m @ inverse @ m - len(m) + np.linalg.slogdet(prior)[1] - np.linalg.slogdet(s)[1]
        for m, s in zip(mean, covariance, strict=True)
    )
    variance = jnp.asarray(np.diagonal(covariance, axis1=1, axis2=2))
    return float(jnp.sum(Softmax().expected_log_prob(jnp.asarray(task.y), Marginals(jnp.asarray(mean), variance))) - kl)


def our_bound(task: Setting) -> float:
    """E1 of cvi, run to convergence on the same number of draws, by the same deterministic expectation."""
    kernel, prior, y = cvi(Softmax()), task.prior, jnp.asarray(task.y)
    state, _, _ = jax.jit(lambda: fit_to_tolerance(jax.random.key(0), kernel, prior, y, tolerance=1e-8))()
    q = kernel.posterior(state, prior)
    return float(jnp.sum(Softmax().expected_log_prob(y, q.marginals)) - q.kl)


def compare_gpytorch(repeats: int) -> list[Outcome]:
    with jax.enable_x64(True):
        task = setting()
        model, _ = gpytorch_fit(task, NATURAL_STEPS)
        theirs, ours = bound_of_gpytorch(task, model), our_bound(task)
    times = by_turns(gpytorch_runs(), repeats)
    a, b = times["theirs"], times["ours"]
    ratio = f"{a.ratio(b):.0f}"
    size = f"{task.classes}-way, N = {len(task.y)}"
    return [
        Outcome("GPyTorch", f"ELBO at the optimum, {size}", f"{theirs:.3f}", f"{ours:.3f}", "-"),
        Outcome("GPyTorch", f"one step, {size}", f"{a.minimum:.2f} ms", f"{b.minimum:.2f} ms", ratio),
    ]


def gpytorch_runs() -> dict[str, Run]:
    task = setting()
    return {"theirs": gpytorch_fit(task, 0)[1], "ours": our_step(task)}


def our_step(task: Setting) -> Run:
    """One step of cvi in float64, gradient over the draws and bound included, as theirs."""
    with jax.enable_x64(True):
        kernel, y = cvi(Softmax()), jnp.asarray(task.y)
        prior = task.prior
        state = jax.jit(kernel.init)(jax.random.key(0), prior, y, None)
        step = jax.jit(kernel.step).lower(jax.random.key(0), state, prior, y, None).compile()
        key = jax.random.key(0)
    return lambda: step(key, state, prior, y, None)


# scikit-learn


def sklearn_classifier(factor: float, features: int) -> Any:
    """Laplace's approximation with k = factor s2 exp(...) held fixed."""
    from sklearn.gaussian_process import GaussianProcessClassifier, kernels

    base = kernels.RBF(LENGTHSCALE * math.sqrt(features), "fixed")
    covariance = kernels.ConstantKernel(factor * SCALE, "fixed") * base
    return GaussianProcessClassifier(covariance, optimizer=None, multi_class="one_vs_rest", max_iter_predict=1000)


def evidence_pair(task: Setting) -> tuple[float, float]:
    """log p(y) by Laplace of a task of two classes: theirs for one GP with 2 K, ours for two with K."""
    theirs = sklearn_classifier(2.0, task.x.shape[1]).fit(task.x, task.y).log_marginal_likelihood_value_
    kernel, prior = laplace(Softmax()), task.prior
    state, _, _ = fit_to_tolerance(jax.random.key(0), kernel, prior, jnp.asarray(task.y), tolerance=1e-9)
    assert kernel.log_evidence is not None
    return float(theirs), float(kernel.log_evidence(state, prior))


def our_classifier(task: Setting, make: Callable) -> Callable[[], jax.Array]:
    """Fit to the tolerance and predict, in float32."""
    x, y, new = jnp.float32(task.x), jnp.asarray(task.y), jnp.float32(task.x_query)
    kernel, way = make(Softmax()), task.classes

    @jax.jit
    def solve(x: jax.Array, y: jax.Array, new: jax.Array) -> jax.Array:
        prior = PROCESS.prior(x, way)
        state, _, _ = fit_to_tolerance(jax.random.key(0), kernel, prior, y)
        return predict(jax.random.key(1), Softmax(), kernel.posterior(state, prior), PROCESS.query(x, new, way))

    return lambda: solve(x, y, new)


def sklearn_runs() -> dict[str, Run]:
    task = setting()

    def theirs() -> np.ndarray:
        return sklearn_classifier(1.0, task.x.shape[1]).fit(task.x, task.y).predict_proba(task.x_query)

    return {"theirs": theirs, "ours": our_classifier(task, cvi)}


def compare_sklearn(repeats: int) -> list[Outcome]:
    with jax.enable_x64(True):
        evidence = evidence_pair(setting(way=2))
    task, runs = setting(), sklearn_runs()
    times = by_turns(runs, repeats)
    scores = [
        f"{100 * metrics.accuracy(p[None], task.y_query[None]):.1f}%, {metrics.nll(p[None], task.y_query[None]):.3f}"
        for p in (np.asarray(run()) for run in runs.values())
    ]
    size = f"{task.classes}-way, N = {len(task.y)}, Q = {len(task.y_query)}"
    a, b = times["theirs"], times["ours"]
    return [
        Outcome("scikit-learn", "Laplace evidence, 2-way", *(f"{value:.6f}" for value in evidence), "-"),
        Outcome("scikit-learn", f"accuracy, NLL (Laplace one-vs-rest; cvi), {size}", *scores, "-"),
        Outcome(
            "scikit-learn",
            f"fit and predict, {size}",
            f"{a.minimum:.1f} ms",
            f"{b.minimum:.1f} ms",
            f"{a.ratio(b):.0f}",
        ),
    ]


# polyagamma


def polyagamma_runs() -> dict[str, Run]:
    from polyagamma import random_polyagamma

    z = 2 * np.random.default_rng(0).normal(size=GAMMAS).astype(np.float32)
    generator, tilt, placed = np.random.default_rng(0), z.astype(float), jnp.asarray(z)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    return {
        "theirs": lambda: random_polyagamma(1, tilt, method="devroye", random_state=generator),
        "ours": lambda: sample_polya_gamma_one(next(keys), placed),
    }


def compare_polyagamma(repeats: int) -> list[Outcome]:
    runs = polyagamma_runs()
    means = [float(np.mean(run())) for run in runs.values()]
    times = by_turns(runs, repeats)
    a, b = times["theirs"], times["ours"]
    return [
        Outcome("polyagamma", f"mean of {GAMMAS:,} draws of PG(1, z), z ~ N(0, 4)", *(f"{m:.4f}" for m in means), "-"),
        Outcome("polyagamma", "the draws", f"{a.minimum:.1f} ms", f"{b.minimum:.1f} ms", f"{a.ratio(b):.2f}"),
    ]


COMPARISONS: dict[str, Callable[[int], list[Outcome]]] = {
    "gpytorch": compare_gpytorch,
    "scikit-learn": compare_sklearn,
    "polyagamma": compare_polyagamma,
}


RUNS: dict[str, Callable[[], dict[str, Run]]] = {
    "gpytorch": gpytorch_runs,
    "scikit-learn": sklearn_runs,
    "polyagamma": polyagamma_runs,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
