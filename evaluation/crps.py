"""The continuous ranked probability score, and quantiles, of predictive distributions of numbers.

    CRPS(F, y) = int (F(t) - 1{t >= y})^2 dt = E|Y - y| - 1/2 E|Y - Y'|

In the unit of y, smaller is better; of a point prediction it is the absolute error. In closed form for normal and
Student-t distributions (docs/regression.md), by quadrature of the distribution function for all others.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import betaln, ndtr, ndtri
from jaxtyping import Array, Float

Parameter = Float[Array | np.ndarray, "#Q"]  # of a distribution: one for all queries, or one for each
NODES = 64  # of Gauss and Legendre, on either side of y
BISECTIONS = 50
WIDEST = 1e3  # scales from the centre of a Student-t distribution within which its quantiles are looked for
HILL = 50  # degrees of freedom of a Student-t distribution from which on it has a normal deviate
TAIL = 1e-5  # probability beyond which no distribution function is integrated


def crps(distribution: dist.Distribution, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """CRPS of every query. Raises TypeError for a distribution that `quantile` does not know."""
    if isinstance(distribution, dist.Normal):
        return normal_crps(distribution.loc, distribution.scale, y)
    if isinstance(distribution, dist.StudentT):
        return student_t_crps(distribution.df, distribution.loc, distribution.scale, y)
    return integrated_crps(distribution, y)


def normal_crps(mean: Parameter, deviation: Parameter, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """s [z (2 Phi(z) - 1) + 2 phi(z) - pi^-1/2], z = (y - m) / s."""
    z = (y - mean) / deviation
    density = jnp.exp(-0.5 * z**2) / np.sqrt(2 * np.pi)
    return deviation * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / np.sqrt(np.pi))


def student_t_crps(dof: Parameter, mean: Parameter, scale: Parameter, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """s [z (2 F(z) - 1) + 2 f(z) (nu + z^2) / (nu - 1) - 2 nu^1/2 B(1/2, nu - 1/2) / ((nu - 1) B(1/2, nu/2)^2)].

    f and F are those of t with nu > 1 degrees of freedom; infinite for fewer.
    """
    z, dof = (y - mean) / scale, jnp.asarray(dof)
    log_beta = betaln(0.5, 0.5 * dof)
    spread = jnp.exp(betaln(0.5, dof - 0.5) - 2 * log_beta)
    density = jnp.exp(-log_beta - 0.5 * (dof + 1) * jnp.log1p(z**2 / dof)) / jnp.sqrt(dof)
    found = z * (2 * student_t_cdf(z, dof) - 1) + 2 * density * (dof + z**2) / (dof - 1)
    value = scale * (found - 2 * jnp.sqrt(dof) / (dof - 1) * spread)
    return jnp.where(dof > 1, value, jnp.inf)


def student_t_cdf(z: Float[Array, " Q"], dof: Parameter) -> Float[Array, " Q"]:
    """P(t <= z) with nu degrees of freedom: from 50 on by Hill's normal deviate (1970, CACM algorithm 395).

    With a = nu - 1/2, b = 48 a^2 and y = a log(1 + z^2 / nu) it is Phi of the sign of z times

        y^1/2 [1 + (y + 3 - (0.4 y^3 + 3.3 y^2 + 24 y + 85.5) / (0.8 y^2 + 100 + b)) / b]

    within 1e-13. The incomplete beta function is off in single precision, with 1,000 degrees of freedom by 5e-5, with
    100,000 by 0.002.
    """
    a = jnp.asarray(dof) - 0.5
    b, y = 48 * a**2, a * jnp.log1p(z**2 / dof)
    correction = (85.5 + y * (24.0 + y * (3.3 + 0.4 * y))) / (0.8 * y**2 + 100.0 + b)
    deviate = jnp.sign(z) * jnp.sqrt(y) * (1 + (y + 3 - correction) / b)
    return jnp.where(dof >= HILL, ndtr(deviate), dist.StudentT(dof).cdf(z))


def integrated_crps(distribution: dist.Distribution, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """The integral of F^2 below y and of (1 - F)^2 above, between the quantiles TAIL and 1 - TAIL; beyond, F is a step.

    With t = c + w sinh(u), c the median and w the distance of the quartiles, a long tail takes as many nodes as the
    centre.
    """
    low, centre, high = (quantile(distribution, p) for p in (TAIL, 0.5, 1 - TAIL))
    width = quantile(distribution, 0.75) - quantile(distribution, 0.25)
    nodes, weights = (jnp.asarray(values, y.dtype)[:, None] for values in np.polynomial.legendre.leggauss(NODES))

    def integral(start: Array, end: Array, above: bool) -> Array:
        first, last = (jnp.arcsinh((t - centre) / width) for t in (start, end))
        u = first + 0.5 * (last - first) * (nodes + 1)
        value = distribution.cdf(centre + width * jnp.sinh(u))
        missed = 1 - value if above else value
        return 0.5 * (last - first) * width * jnp.sum(weights * missed**2 * jnp.cosh(u), axis=0)

    inside = jnp.clip(y, low, high)
    return integral(low, inside, False) + integral(inside, high, True) + jnp.abs(y - inside)


def quantile(distribution: dist.Distribution, probability: float) -> Float[Array, " Q"]:
    """The quantile of every query: in closed form, or by bisection of the distribution function.

    Raises TypeError for a distribution that is not normal, Student-t or a mixture of normals.
    """
    if isinstance(distribution, dist.Normal):
        return distribution.loc + distribution.scale * ndtri(jnp.asarray(probability, distribution.loc.dtype))
    low, high = _bracket(distribution, probability)

    def halved(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        above = _cdf(distribution, middle) > probability
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    low, high = jax.lax.fori_loop(0, BISECTIONS, halved, (low, high))
    return 0.5 * (low + high)


def _cdf(distribution: dist.Distribution, t: Array) -> Array:
    if isinstance(distribution, dist.StudentT):
        return student_t_cdf((t - distribution.loc) / distribution.scale, distribution.df)
    return distribution.cdf(t)


def _bracket(distribution: dist.Distribution, probability: float) -> tuple[Array, Array]:
    """Two numbers about the quantile of every query; that of a mixture lies between those of its components."""
    if isinstance(distribution, dist.StudentT):
        reach = WIDEST * distribution.scale
        return distribution.loc - reach, distribution.loc + reach
    if isinstance(distribution, dist.MixtureSameFamily):
        inner = distribution.component_distribution
        if isinstance(inner, dist.Normal):
            each = inner.loc + inner.scale * ndtri(jnp.asarray(probability, inner.loc.dtype))
            return each.min(-1), each.max(-1)
    raise TypeError(f"expected a normal, a Student-t or a mixture of normals, got {type(distribution).__name__}")
