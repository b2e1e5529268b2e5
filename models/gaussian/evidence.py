"""log Z (G6) and its derivatives in closed form (O13)."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from fewshot.models.gaussian.factors import highest_precision
from fewshot.models.gaussian.prior import AnySites, GaussianPrior


class Evidence(NamedTuple):
    """log Z (G6), alpha [C, N], and on request what its other derivatives take (O13).

    class_blocks() is the block [C, N, N] of each class of F = (K + L^-1)^-1; slope(change) is the derivative of log Z
    along a change of the sites.
    """

    value: Float[Array, ""]
    alpha: Float[Array, "C N"]
    class_blocks: Callable[[], Array]
    slope: Callable[[Any], Array]


def log_normaliser_of(sites: AnySites, prior: GaussianPrior, deviation: Array, determinant: Array) -> Array:
    """log Z (G6) from V r [C, N] and log|B|."""
    residual = sites.shift - sites.times(prior.mean)
    return 0.5 * jnp.sum((sites.shift + residual) * prior.mean + residual * deviation) - 0.5 * determinant


@jax.custom_jvp
def closed_log_normaliser(covariance: Array, mean: Array, sites: Any) -> Array:
    """log Z (G6) of sites that have an `evidence`."""
    return sites.evidence(GaussianPrior(mean, covariance)).value


@partial(closed_log_normaliser.defjvp, symbolic_zeros=True)
@highest_precision
def _closed_log_normaliser_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    """(O13): only what has a tangent is differentiated, so that fixed sites cost nothing."""
    (covariance, mean, sites), (covariance_change, mean_change, change) = primals, tangents
    found = sites.evidence(GaussianPrior(mean, covariance))
    slope = jnp.zeros_like(found.value)
    if not _is_zero(covariance_change):
        outer = found.alpha[:, :, None] * found.alpha[:, None] - found.class_blocks()
        slope += 0.5 * jnp.sum(outer * covariance_change)
    if not _is_zero(mean_change):
        slope += jnp.sum(found.alpha * mean_change)
    if not all(_is_zero(leaf) for leaf in change):
        slope += found.slope(type(sites)(*(jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x for x in change)))
    return found.value, slope


def _is_zero(tangent: object) -> bool:
    return isinstance(tangent, SymbolicZero)
