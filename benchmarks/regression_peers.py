"""Regression by other libraries, for benchmarks/regression.py: rows and targets in, predictions out."""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

Answer = tuple[np.ndarray, np.ndarray]


def scikit_learn(x: np.ndarray, y: np.ndarray, new: np.ndarray, arguments: argparse.Namespace) -> Answer:
    """GaussianProcessRegressor: a Matern kernel with a length-scale for every input, learned on some rows."""
    from scipy.optimize import minimize
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    def optimise(loss: Callable, start: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, float]:
        options = {"maxiter": arguments.steps}
        end = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
        return end.x, end.fun

    lengths = np.full(x.shape[1], np.sqrt(x.shape[1]))
    kernel = ConstantKernel(1.0) * Matern(lengths, (1e-3, 1e4), nu=2.5) + WhiteKernel(0.1, (1e-4, 10.0))
    few = slice(0, arguments.learn)
    learned = GaussianProcessRegressor(kernel, alpha=0.0, optimizer=optimise).fit(x[few], y[few])
    found = GaussianProcessRegressor(learned.kernel_, alpha=0.0, optimizer=None).fit(x, y)
    mean, deviation = found.predict(new, return_std=True)
    return mean, deviation**2


def _kernel(width: int) -> Any:
    import gpytorch

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=width))
    kernel.outputscale = 1.0
    kernel.base_kernel.lengthscale = np.sqrt(width)
    return kernel


def _descend(step: Callable[[int], None], optimisers: list[Any], steps: int, decaying: int) -> None:
    """`step` computes gradients; the rate of the first `decaying` optimisers falls to 0 as a cosine."""
    import torch

    falling = [torch.optim.lr_scheduler.CosineAnnealingLR(one, steps) for one in optimisers[:decaying]]
    for number in range(steps):
        for one in optimisers:
            one.zero_grad()
        step(number)
        for one in [*optimisers, *falling]:
            one.step()


def gpytorch_exact(x: np.ndarray, y: np.ndarray, new: np.ndarray, arguments: argparse.Namespace) -> Answer:
    """ExactGP by Cholesky factors: learned on some rows by Adam, conditioned on all that are given."""
    import gpytorch
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(arguments.seed)

    class Model(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self, rows: Any, targets: Any, likelihood: Any) -> None:
            super().__init__(rows, targets, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), _kernel(x.shape[1])

        def forward(self, rows: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(rows), self.covar_module(rows))

    rows, targets = torch.tensor(x), torch.tensor(y)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    few = slice(0, arguments.learn)
    model = Model(rows[few], targets[few], likelihood)
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=arguments.rate)
    with gpytorch.settings.fast_computations(False, False, False):
        _descend(lambda _: (-evidence(model(rows[few]), targets[few])).backward(), [optimiser], arguments.adam_steps, 1)
        model.set_train_data(rows, targets, strict=False)
        model.eval(), likelihood.eval()
        with torch.no_grad(), gpytorch.settings.skip_posterior_variances(False):
            parts = [likelihood(model(part)) for part in torch.tensor(new).split(1024)]
            return _numbers(parts)


def gpytorch_svgp(x: np.ndarray, y: np.ndarray, new: np.ndarray, arguments: argparse.Namespace) -> Answer:
    """ApproximateGP: natural gradients of length 0.1 for q(u), Adam for the rest, on batches."""
    import gpytorch
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(arguments.seed)
    rows, targets = torch.tensor(x), torch.tensor(y)
    start = rows[torch.randperm(len(rows))[: arguments.inducing]]

    class Model(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(len(start))
            super().__init__(gpytorch.variational.VariationalStrategy(self, start, q, learn_inducing_locations=True))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), _kernel(x.shape[1])

        def forward(self, rows: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(rows), self.covar_module(rows))

    model, likelihood = Model(), gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.1
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(rows))
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(rows), lr=0.1)
    others = [*model.hyperparameters(), *likelihood.parameters()]
    adam = torch.optim.Adam(others, lr=arguments.batch_rate)
    batch = min(arguments.batch, len(rows))

    def step(number: int) -> None:
        chosen = torch.randint(len(rows), (batch,))
        (-bound(model(rows[chosen]), targets[chosen])).backward()

    _descend(step, [adam, natural], arguments.batch_steps, 1)
    model.eval(), likelihood.eval()
    with torch.no_grad():
        return _numbers([likelihood(model(part)) for part in torch.tensor(new).split(1024)])


def _numbers(parts: list[Any]) -> Answer:
    return tuple(np.concatenate([getattr(one, name).numpy() for one in parts]) for name in ("mean", "variance"))


METHODS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray, argparse.Namespace], Answer]] = {
    "scikit-learn, exact": scikit_learn,
    "GPyTorch, exact": gpytorch_exact,
    "GPyTorch, SVGP": gpytorch_svgp,
}
