"""A Student-t process with independent Gaussian noise, by its augmented scale: Gibbs, CAVI, and a sum (T8 to T10).

    r ~ InverseGamma(nu / 2, (nu - 2) / 2),  f | r ~ N(a, r K),  y | f ~ N(f, s2)

Given r all is Gaussian, and given f the scale is InverseGamma((nu + R) / 2, (nu - 2 + b) / 2), b = (f - a).K^+ (f - a),
R the rank of K. One number stands between this model and a Gaussian process, so its posterior is also a
one-dimensional sum, to which the others are compared. (Where the noise shares the scale, all is in closed form:
models/student_t.py.)
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import digamma, gammaln, logsumexp
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian import GaussianPrior, Root, highest_precision, prior_root
from fewshot.models.regression import noise_scale, noise_sites
from fewshot.models.student_t import ScalePosterior, scale_posterior

Scalar = Float[Array, ""] | float


class Draws(NamedTuple):
    """Of a chain: scales [T] and latents [T, N]."""

    scale: Float[Array, " T"]
    f: Float[Array, "T N"]


class Factorised(NamedTuple):
    """CAVI's q(f) q(r): mean and variance [N] of f, r, and the bound."""

    mean: Float[Array, " N"]
    variance: Float[Array, " N"]
    scale: ScalePosterior
    bound: Float[Array, ""]


class Summed(NamedTuple):
    """The exact posterior as a sum over scales [G] with masses [G]: mean and variance [N] of f, log p(y)."""

    scale: Float[Array, " G"]
    mass: Float[Array, " G"]
    mean: Float[Array, " N"]
    variance: Float[Array, " N"]
    log_evidence: Float[Array, ""]


def rank(root: Root) -> Float[Array, ""]:
    """R, the directions that K has."""
    present = jnp.any(root.factor != 0, axis=0)
    return jnp.sum(present).astype(root.factor.dtype)


@partial(jax.jit, static_argnames=("sweeps",))
def gibbs(
    key: Key[Array, ""], prior: GaussianPrior, y: Float[Array, " N"], noise: Scalar, dof: Scalar, sweeps: int
) -> Draws:
    """`sweeps` draws of (f | r, y) and then (r | f), from a draw of the prior's r. Both are exact (Matheron, G8)."""
    root, sites = prior_root(prior), noise_sites(y, noise)
    count = rank(root)

    def sweep(scale: Array, key: Array) -> tuple[Array, Draws]:
        f_key, scale_key = jax.random.split(key)
        scaled = GaussianPrior(prior.mean, scale * prior.covariance, jnp.sqrt(scale) * root.factor)
        f = scaled.draw(f_key, sites)[0]
        beta = jnp.sum((root.pseudo_inverse.T @ (f - prior.mean[0])) ** 2)
        scale = _given(dof, count, beta).draw(scale_key)
        return scale, Draws(scale, f)

    start_key, key = jax.random.split(key)
    start = _given(dof, jnp.zeros_like(count), jnp.zeros_like(count)).draw(start_key)
    return jax.lax.scan(sweep, start, jax.random.split(key, sweeps))[1]


def _given(dof: Scalar, count: Array, beta: Array) -> ScalePosterior:
    """r given a latent vector of `count` directions with square beta."""
    return ScalePosterior(0.5 * (dof + count), 0.5 * (dof - 2 + beta))


@highest_precision
def cavi_step(
    prior: GaussianPrior, y: Float[Array, " N"], noise: Scalar, dof: Scalar, scale: ScalePosterior, count: Scalar
) -> Factorised:
    """q(f) given q(r), then q(r) given q(f), and the bound at both.

    With k = E 1/r, q(f) = N(m, V) is the posterior under N(a, K / k). E b = (m - a).K^+ (m - a) + tr K^+ V, and
    k tr K^+ V = R - sum_n W_n V_nn.
    """
    precision = scale.mean_precision()
    sites = noise_sites(y, noise)
    found = GaussianPrior(prior.mean, prior.covariance / precision).given(sites)
    deviation = found.mean[0] - prior.mean[0]
    trace = count - jnp.sum(sites.precision * found.variance)
    beta = (jnp.sum(deviation * found.alpha[0]) + trace) / precision
    moved = _given(dof, jnp.asarray(count), beta)
    data = noise_scale(y - found.mean[0], noise) - 0.5 * jnp.sum(found.variance / noise)
    bound = (
        data - _latent_kl(found.kl, beta, precision, moved, count) - scale_kl(moved, _given(dof, 0 * beta, 0 * beta))
    )
    return Factorised(found.mean[0], found.variance[0], moved, bound)


def _latent_kl(kl: Array, beta: Array, precision: Array, scale: ScalePosterior, count: Scalar) -> Array:
    """E_r KL(q(f) || N(a, r K)): that to N(a, K / k), and R/2 (E log r + log k) + 1/2 (E 1/r - k) E b on top of it."""
    log_scale = jnp.log(scale.rate) - digamma(scale.shape)
    return kl + 0.5 * count * (log_scale + jnp.log(precision)) + 0.5 * (scale.mean_precision() - precision) * beta


def scale_kl(q: ScalePosterior, p: ScalePosterior) -> Float[Array, ""]:
    """KL between two inverse gamma distributions."""
    shapes = (q.shape - p.shape) * digamma(q.shape) - gammaln(q.shape) + gammaln(p.shape)
    return shapes + p.shape * jnp.log(q.rate / p.rate) + q.shape * (p.rate / q.rate - 1)


@partial(jax.jit, static_argnames=("steps",))
def cavi(
    prior: GaussianPrior, y: Float[Array, " N"], noise: Scalar, dof: Scalar, steps: int
) -> tuple[Factorised, Float[Array, " steps"]]:
    """Coordinate ascent from the prior's q(r); the bound of every step, which never falls."""
    count = rank(prior_root(prior))
    start = scale_posterior(jnp.asarray(dof, y.dtype))

    def one(scale: ScalePosterior, _: None) -> tuple[ScalePosterior, Factorised]:
        found = cavi_step(prior, y, noise, dof, scale, count)
        return found.scale, found

    history = jax.lax.scan(one, start, length=steps)[1]
    return jax.tree.map(lambda leaf: leaf[-1], history), history.bound


@highest_precision
def summed(
    prior: GaussianPrior, y: Float[Array, " N"], noise: Scalar, dof: Scalar, nodes: int = 400, width: float = 12.0
) -> Summed:
    """Exact inference as a trapezoidal sum over log r in [-width, width], one noise variance for all points.

    With K = sum_i l_i u_i u_i^T all scales share the basis u_i: f has variances r l_i, y has r l_i + s2.
    What lies outside the interval is lost.
    """
    factor = prior_root(prior).factor
    values = jnp.sum(factor**2, axis=0)
    basis = factor / jnp.sqrt(jnp.where(values > 0, values, 1.0))
    residual = y - prior.mean[0]
    inside = basis.T @ residual
    outside = residual - basis @ inside
    log_scale = jnp.linspace(-width, width, nodes, dtype=y.dtype)
    scale = jnp.exp(log_scale)
    spread = scale[:, None] * values + noise
    directions = y.shape[0] - jnp.sum(values > 0)
    log_density = -0.5 * (
        jnp.sum(jnp.where(values > 0, jnp.log(spread) + inside**2 / spread, 0.0), axis=1)
        + (directions * jnp.log(noise) + jnp.sum(outside**2) / noise)
        + y.shape[0] * jnp.log(2 * jnp.pi)
    )
    weights = log_density + scale_posterior(jnp.asarray(dof, y.dtype)).log_density(scale) + log_scale
    total = logsumexp(weights)
    mass = jnp.exp(weights - total)
    gains = scale[:, None] * values / spread
    means = (gains * inside) @ basis.T
    mean = mass @ means
    variance = mass @ ((gains * noise) @ basis.T**2 + (means - mean) ** 2)
    step = 2 * width / (nodes - 1)
    return Summed(scale, mass, prior.mean[0] + mean, variance, total + jnp.log(step))
