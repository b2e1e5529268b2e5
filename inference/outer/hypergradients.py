"""How the gradient of the outer loop crosses the inner loop (docs/hypergradients.md): one function a mode.

Each fits one task under `prior` and returns what the objectives need; they differ only in what is differentiated.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import gmres
from jaxtyping import Array, Key

from fewshot.inference.inner.base import Code, Inference, Info, Mask, State, fit
from fewshot.models.gaussian import GaussianPrior, Posterior
from fewshot.models.likelihoods.base import Labels

TOLERANCE = 1e-2  # of the residual, for the derivative of a fixed point to be trusted
KRYLOV = 60  # vectors that GMRES keeps before it restarts


class Fitted(NamedTuple):
    """Final state, its posterior under the prior that carries the gradient, and the Info of the last step."""

    state: State
    posterior: Posterior
    info: Info


HyperGradient = Callable[[Key[Array, ""], Inference, GaussianPrior, Labels, Mask | None, int], Fitted]


def sites(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None,
    steps: int,
) -> Fitted:
    """Stop the gradient at the sites, then recompute q from K: memory does not grow with the steps.

    A valid bound after any number of steps; the exact hyper-gradient of the ELBO at the fixed point of `cavi`, and at
    that of `cvi` unless precisions are clipped without a projection (C8). Sites that are an explicit function of the
    likelihood's parameters (`exact`) are not stopped.
    """
    if inference.traits.differentiable_sites:
        return unroll(key, inference, prior, y, mask, steps)
    state, info = fit(key, inference, jax.lax.stop_gradient(prior), y, mask, steps=steps)
    state = jax.lax.stop_gradient(state)
    return Fitted(state, inference.posterior(state, prior), _last(info))


def unroll(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None,
    steps: int,
) -> Fitted:
    """Differentiate through every step (what MD and CDKT do): memory grows with the steps."""
    state, info = fit(key, inference, prior, y, mask, steps=steps)
    return Fitted(state, inference.posterior(state, prior), _last(info))


def implicit(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None,
    steps: int,
) -> Fitted:
    """Differentiate the fixed point s = T(s, theta), whatever path led to it; T is the inference's undamped map.

    ds/dtheta = (I - dT/ds)^-1 dT/dtheta, applied to one vector by GMRES: forward it multiplies a displacement that is
    zero, backward it is the transposed system of the implicit function theorem. Exact at the fixed point; the code is
    IMPLICIT_UNRELIABLE where the residual exceeds TOLERANCE or a precision was clipped.
    """
    fixed_point = inference.fixed_point
    if fixed_point is None:
        raise ValueError(f"inference {inference.traits.name} has no fixed point; use hyper-gradient sites")
    fixed_prior = jax.lax.stop_gradient(prior)
    state, info = fit(key, inference, fixed_prior, y, mask, steps=steps)
    state, last = jax.lax.stop_gradient(state), _last(info)
    start, unravel = ravel_pytree(fixed_point.read(state))

    def mapped(flat: Array, under: GaussianPrior) -> Array:
        return ravel_pytree(fixed_point.update(fixed_point.write(state, unravel(flat)), under, y, mask))[0]

    image = mapped(start, prior)
    _, push = jax.linearize(lambda flat: mapped(flat, fixed_prior), start)
    displacement = image - jax.lax.stop_gradient(image)
    solution = jax.lax.custom_linear_solve(
        lambda vector: vector - push(vector), displacement, solve=_krylov, transpose_solve=_krylov
    )
    moved = fixed_point.write(state, unravel(start + solution))
    unreliable = ~(last.residual <= TOLERANCE) | (last.clipped > 0)  # written so that nan is unreliable
    code = jnp.where(unreliable & (last.code == Code.OK), Code.IMPLICIT_UNRELIABLE, last.code)
    return Fitted(moved, inference.posterior(moved, prior), last._replace(code=code))


def _krylov(matrix: Callable[[Array], Array], right: Array) -> Array:
    """The solution of matrix(x) = right by GMRES; 0 for a right side of 0, which it would divide by."""
    nothing = jnp.all(right == 0)
    solution, _ = gmres(
        matrix,
        jnp.where(nothing, 1.0, right),
        tol=10 * jnp.finfo(right.dtype).eps,
        restart=min(right.size, KRYLOV),
        maxiter=-(-right.size // KRYLOV) + 2,
        solve_method="incremental",
    )
    return jnp.where(nothing, 0.0, solution)


def _last(info: Info) -> Info:
    return jax.lax.stop_gradient(jax.tree.map(lambda leaf: leaf[-1], info))
