"""How the gradient of the outer loop crosses the inner loop (METHODS 4): one function a mode.

Each fits one task under `prior` and returns what the objectives need; they differ only in what is differentiated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, Key

from inference.inner.base import InferenceKernel, Info, Mask, fit
from models.gaussian import GaussianPrior


class Fitted(NamedTuple):
    """Final state, its posterior under the prior that carries the gradient, and the Info of the last step."""

    state: Any
    posterior: Any
    info: Info


HyperGradient = Callable[[Key[Array, ""], InferenceKernel, GaussianPrior, Int[Array, " N"], Mask | None, int], Fitted]


def sites(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None,
    steps: int,
) -> Fitted:
    """Stop the gradient at the sites, then recompute q from K: memory does not grow with the steps.

    A valid bound after any number of steps, the exact hyper-gradient of the ELBO at the fixed point. Sites that are an
    explicit function of the likelihood's parameters (`exact`) are not stopped.
    """
    if kernel.traits.differentiable_sites:
        return unroll(key, kernel, prior, y, mask, steps)
    state, info = fit(key, kernel, jax.lax.stop_gradient(prior), y, mask, steps=steps)
    state = jax.lax.stop_gradient(state)
    return Fitted(state, kernel.posterior(state, prior), _last(info))


def unroll(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None,
    steps: int,
) -> Fitted:
    """Differentiate through every step (what MD and CDKT do): memory grows with the steps."""
    state, info = fit(key, kernel, prior, y, mask, steps=steps)
    return Fitted(state, kernel.posterior(state, prior), _last(info))


def _last(info: Info) -> Info:
    return jax.lax.stop_gradient(jax.tree.map(lambda leaf: leaf[-1], info))
