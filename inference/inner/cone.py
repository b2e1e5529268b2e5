"""The non-negative precisions that are nearest to those asked for, in the metric of the bound (docs/softmax.md, C8).

A likelihood that is not log-concave can ask for negative precisions W^ (C1). Setting them to 0 one by one is no
projection in the geometry in which C2 is an ascent: it can point down, and its fixed point is no maximum. About the
mean of q the Fisher information of q(f) in the precisions is (V o V) / 2, V o V the elementwise square of the posterior
covariance of a class. In units of the marginal variances, b = v W^, w = v W and x = v times the wanted precision,

    (C8)  x = argmin_{x >= 0} q(x),  q(x) = (x - b)^T M (x - b) / 2 + e |x - w|^2 / 2,  M_nk = V_nk^2 / (v_n v_k).

Where no b is negative, x = b. e = sqrt(rounding unit) makes x unique where points are duplicates; it moves no fixed
point, as its slope is 0 at x = w. Any x with q(x) < q(w) is a direction of ascent: there (b - w)^T M (x - w) > 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg
from jaxtyping import Array, Bool, Float

from fewshot.models.gaussian import DiagonalPosterior, GaussianPrior, LowRankPosterior, highest_precision

SEARCHES, HALVINGS = 30, 10  # Newton steps of the search, and the lengths 1, 1/2, ... that each tries
MOST_ITERATIONS = 200  # of conjugate gradients: no function of N, so that padding changes nothing


def nearest_precisions(
    metric: Callable[[], Float[Array, "C N N"]],
    variance: Float[Array, "C N"],
    wanted: Float[Array, "C N"],
    current: Float[Array, "C N"],
    real: Bool[Array, "C N"],
) -> Float[Array, "C N"]:
    """Precisions (C8) from those wanted, W^, and those of now, W; `metric` gives M, and is asked only where W^ < 0.

    Entries that are not real have no part in it.
    """
    some = jnp.any((wanted < 0) & real)
    clipped = jnp.maximum(wanted, 0.0)
    real = real & (variance > 0)
    unit = jnp.where(real, variance, 1.0)

    def project(clipped: Array) -> Array:
        b, w = (jnp.where(real, unit * one, 0.0) for one in (wanted, current))
        return jnp.where(real & some, project_onto_cone(metric(), b, w, real) / unit, clipped)

    return jax.lax.cond(some, project, lambda clipped: clipped, clipped)


@highest_precision
def squared_correlations(
    prior: GaussianPrior, posterior: DiagonalPosterior | LowRankPosterior
) -> Float[Array, "C N N"]:
    """M_nk = V_nk^2 / (v_n v_k) of a posterior (G2)."""
    covariance = posterior.covariance(prior)
    unit = jnp.where(posterior.variance > 0, posterior.variance, 1.0)
    squares = jnp.minimum(covariance**2 / (unit[:, :, None] * unit[:, None, :]), 1.0)
    return jnp.where(jnp.eye(unit.shape[1], dtype=bool), 1.0, squares)


@jax.custom_jvp
@highest_precision
def project_onto_cone(
    metric: Float[Array, "C N N"], b: Float[Array, "C N"], w: Float[Array, "C N"], real: Bool[Array, "C N"]
) -> Float[Array, "C N"]:
    """argmin of q over x >= 0 (C8) by projected Newton steps (Bertsekas 1982), each solved by conjugate gradients.

    The search starts at w, or at b with its negative entries set to 0 where q is lower, and never raises q.
    """

    def value(x: Array) -> Array:
        return 0.5 * jnp.sum((x - b) * _times(metric, x - b) + _near(x) * (x - w) ** 2, axis=1)

    def search(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, _, count = carry
        slope = _times(metric, x - b) + _near(x) * (x - w)
        step = _solve(metric, real & ((x > 0) | (slope < 0)), slope)
        lengths = 0.5 ** jnp.arange(HALVINGS, dtype=x.dtype)[:, None, None]
        tried = jnp.maximum(x - lengths * step, 0.0)
        values = jax.vmap(value)(tried)
        best = jnp.take_along_axis(tried, jnp.argmin(values, axis=0)[None, :, None], axis=0)[0]
        lower = jnp.min(values, axis=0) < value(x)
        return jnp.where(lower[:, None], best, x), jnp.any(lower), count + 1

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        return carry[1] & (carry[2] < SEARCHES)

    clipped = jnp.maximum(b, 0.0)
    first = jnp.where((value(clipped) < value(w))[:, None], clipped, w)
    return jax.lax.while_loop(unfinished, search, (first, jnp.any((b < 0) & real), jnp.asarray(0)))[0]


@project_onto_cone.defjvp
@highest_precision
def _project_onto_cone_jvp(
    primals: tuple[Array, Array, Array, Array], tangents: tuple[Any, ...]
) -> tuple[Array, Array]:
    """The slope of q stays 0 at the entries that are not held at 0."""
    metric, b, w, real = primals
    dmetric, db, dw = map(jnp.asarray, tangents[:3])
    x = project_onto_cone(metric, b, w, real)
    right = _times(metric, db) + _near(x) * dw - _times(dmetric, x - b)
    return x, _solve(metric, real & (x > 0), right)


def _near(x: Array) -> float:
    """e, the weight of the distance from w."""
    return float(jnp.finfo(x.dtype).eps) ** 0.5


def _times(metric: Array, x: Array) -> Array:
    return jnp.einsum("cij,cj->ci", metric, x)


def _solve(metric: Array, free: Array, right: Array) -> Array:
    """(M + e I)^-1 right among the free entries; 0 at the others."""

    def matrix(x: Array) -> Array:
        return jnp.where(free, _times(metric, jnp.where(free, x, 0.0)) + _near(x) * x, x)

    def solve(times: Callable[[Array], Array], right: Array) -> Array:
        return cg(times, right, tol=10 * jnp.finfo(right.dtype).eps, maxiter=MOST_ITERATIONS)[0]

    # Not `cg` alone: its transpose fails, as the point that it starts at comes from the right side.
    return jax.lax.custom_linear_solve(matrix, jnp.where(free, right, 0.0), solve, symmetric=True)
