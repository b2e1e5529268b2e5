"""Student-t processes (docs/student_t.md): ST(y | mu, R, nu) with covariance R and nu > 2 degrees of freedom.

    y | r ~ N(mu, r R),  r ~ InverseGamma(nu / 2, (nu - 2) / 2),  E r = 1          (T1)

A Gaussian process whose variance has an unknown factor r, the *scale*. Everything exact about it is the Gaussian
algebra of gaussian.py times functions of n and beta = (y - mu).R^-1 (y - mu).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian import GaussianPrior, Query, cholesky_inverse, highest_precision
from fewshot.models.regression import Noise, Regression, predict, regress

Scalar = Float[Array, ""] | float
SHIFT = 15


class StudentPrediction(NamedTuple):
    """Marginals at Q inputs: Student-t with `dof` degrees of freedom, mean and variance (not squared scale)."""

    dof: Float[Array, ""]
    mean: Float[Array, " Q"]
    variance: Float[Array, " Q"]

    def log_density(self, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
        """log ST(y_n | mean_n, variance_n, dof) for every n."""
        return log_density((y - self.mean) ** 2 / self.variance, jnp.log(self.variance), self.dof, 1)


class ScalePosterior(NamedTuple):
    """InverseGamma(shape, rate) of the scale r; the rate may have leading axes in `scale_posterior`."""

    shape: Float[Array, ""]
    rate: Float[Array, ""]

    def mean(self) -> Float[Array, ""]:
        """E r, for shape > 1."""
        return self.rate / (self.shape - 1)

    def mean_precision(self) -> Float[Array, ""]:
        """E 1/r."""
        return self.shape / self.rate

    def draw(self, key: Key[Array, ""]) -> Float[Array, ""]:
        """A draw of r."""
        return self.rate / jax.random.gamma(key, self.shape)

    def log_density(self, scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """log p(r)."""
        constant = self.shape * jnp.log(self.rate) - gammaln(self.shape)
        return constant - (self.shape + 1) * jnp.log(scale) - self.rate / scale


def scale_posterior(dof: Scalar, beta: Float[Array, "*s"] | float = 0.0, count: int = 0) -> ScalePosterior:
    """r given n values with square beta: InverseGamma((nu + n) / 2, (nu - 2 + beta) / 2); the prior where n = 0."""
    return ScalePosterior(jnp.asarray(0.5 * (dof + count)), jnp.asarray(0.5 * (dof - 2 + beta)))


def log_gamma_ratio(a: Scalar, b: Scalar) -> Float[Array, ""]:
    """log Gamma(a + b) - log Gamma(b) - a log b for a >= 0 and b > 1: 0 for large b, and nothing cancels on the way.

    `SHIFT` steps of Gamma(x + 1) = x Gamma(x) lead to B = b + SHIFT, where Stirling's series holds. (Differences of
    `gammaln` lose all digits in float32; `betaln` of JAX 0.10.2 is off by up to 1e-6 from b = 8.)
    """
    far = b + SHIFT
    steps = jnp.sum(jnp.log1p(a / (b + jnp.arange(SHIFT))))
    return (
        (far - 0.5) * jnp.log1p(a / far)
        + a * jnp.log1p((a + SHIFT) / b)
        - a
        - steps
        + (_stirling(a + far) - _stirling(far))
    )


def _stirling(x: Scalar) -> Scalar:
    """log Gamma(x) - (x - 1/2) log x + x - 1/2 log 2 pi, for x > SHIFT."""
    squares = 1 / (x * x)
    return (1 / 12 - squares * (1 / 360 - squares * (1 / 1260 - squares * (1 / 1680 - squares / 1188)))) / x


def log_constant(dof: Scalar, count: int) -> Float[Array, ""]:
    """log Gamma((nu + n) / 2) - log Gamma(nu / 2) - n/2 log((nu - 2) pi)."""
    a, b = 0.5 * count, 0.5 * dof
    return log_gamma_ratio(a, b) - a * (jnp.log1p(-1 / b) + jnp.log(2 * jnp.pi))


def log_density(
    beta: Float[Array, "*s"], log_determinant: Float[Array, "*s"], dof: Scalar, count: int
) -> Float[Array, "*s"]:
    """log ST of n values from beta and log|R| (T1)."""
    tail = 0.5 * (dof + count) * jnp.log1p(beta / (dof - 2))
    return log_constant(dof, count) - 0.5 * log_determinant - tail


@highest_precision
def log_prob(
    y: Float[Array, " n"], mean: Float[Array, " n"], covariance: Float[Array, "n n"], dof: Scalar
) -> Float[Array, ""]:
    """log ST(y | mean, covariance, dof) with a positive definite covariance."""
    inverses, determinant = cholesky_inverse(covariance[None])
    return log_density(jnp.sum((inverses[0] @ (y - mean)) ** 2), determinant, dof, y.shape[0])


def sample(key: Key[Array, ""], mean: Float[Array, " n"], root: Float[Array, "n R"], dof: Scalar) -> Float[Array, " n"]:
    """A draw: mean + r^1/2 S e with covariance S S^T, which may be singular."""
    scale_key, normal_key = jax.random.split(key)
    scale = scale_posterior(jnp.asarray(dof, root.dtype)).draw(scale_key)
    return mean + jnp.sqrt(scale) * (root @ jax.random.normal(normal_key, root.shape[1:], root.dtype))


def conditional_factor(dof: Scalar, beta: Float[Array, "*s"], count: int) -> Float[Array, "*s"]:
    """(nu + beta - 2) / (nu + n - 2): what n known values do to the covariance of the others, beyond the Gaussian (T2).

    With e = y1 - mu1 and beta = e.R11^-1 e: y2 | y1 ~ ST(nu + n, mu2 + R21 R11^-1 e, factor (R22 - R21 R11^-1 R12)).
    The factor is E[r | y1].
    """
    return (dof + beta - 2) / (dof + count - 2)


class StudentRegression(NamedTuple):
    """Exact inference where the noise is part of the process: y ~ ST(a, K + s2 I, nu).

    gaussian is what it would be at r = 1, factor and dof those of the conditional, scale is r given y.
    """

    gaussian: Regression
    dof: Float[Array, ""]
    factor: Float[Array, ""]
    scale: ScalePosterior
    log_evidence: Float[Array, ""]

    def predict(self, query: Query, noise: Scalar = 0.0) -> StudentPrediction:
        """f at new inputs, or y with its noise variance s2."""
        found = predict(self.gaussian.posterior, query).noisy(noise)
        return StudentPrediction(self.dof, found.mean, self.factor * found.variance)


@highest_precision
def student_regress(prior: GaussianPrior, y: Float[Array, " N"], noise: Noise, dof: Scalar) -> StudentRegression:
    """Posterior and log ST(y | a, K + s2 I, nu): f and noise share one scale r, so all is in closed form.

    beta is (y - a).alpha by (G4), and |K + s2 I| = |B| prod_n s2_n by (G1): read off the evidence it would be what
    beta, which is large where a label lies far out, leaves of it.
    """
    count = y.shape[0]
    found = regress(prior, y, noise)
    beta = jnp.sum((y - prior.mean[0]) * found.posterior.alpha[0])
    variances = jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)
    determinant = found.posterior.log_determinant + jnp.sum(jnp.log(variances))
    evidence = log_density(beta, determinant, dof, count)
    factor = conditional_factor(dof, beta, count)
    return StudentRegression(found, jnp.asarray(dof + count), factor, scale_posterior(dof, beta, count), evidence)
