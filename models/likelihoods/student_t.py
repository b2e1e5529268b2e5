"""Real labels with Student-t noise: p(y | f) = t(y; f, s, nu), for labels with outliers (docs/student_t_noise.md).

It is a normal with a precision of its own for every point,

    (N1) y | f, omega ~ N(f, s2 / omega),  omega ~ Gamma(nu / 2, nu / 2)

so p(y, omega | f) is a Gaussian site in f with h = omega y / s2 and W = omega / s2, and

    (N2) omega | y, f ~ Gamma((nu + 1) / 2, (nu + (y - f)^2 / s2) / 2)
"""

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.expectations import Points, expect
from fewshot.models.gaussian import JointMarginals, Marginals, Sites
from fewshot.models.likelihoods.base import Labels, check_positive
from fewshot.models.likelihoods.normal import components, equal_mixture, noise_prior
from fewshot.models.student_t import log_gamma_ratio

# Nodes of log omega in `distribution`: of one Gaussian, and of each component of a mixture.
NODES, NODES_OF_MANY = 64, 32
NEGLIGIBLE = 20.0  # nats below the mode of log omega, at which its range ends where labels are near
WIDEST_STEP = 0.7  # between nodes of log omega, in its standard deviations (2 / nu)^1/2
FARTHEST = 2 * math.log(1e5)  # -log omega of the point at which a label is 100,000 s off


class StudentTLatents(NamedTuple):
    """A draw of omega [N]."""

    omega: Float[Array, " N"]


class StudentTFactors(NamedTuple):
    """Factors of q: omega ~ Gamma((nu + 1) / 2, rate) [N]."""

    rate: Float[Array, " N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StudentT:
    """Student-t noise with nu = dof degrees of freedom and squared scale s2 = noise; its variance is s2 nu / (nu - 2).

    learn_noise, learn_dof: whether the outer loop learns them; False holds them where they are. Raises ValueError for
    a noise or dof that is not positive.
    """

    noise: float | Float[Array, ""] = 0.1
    dof: float | Float[Array, ""] = 4.0
    learn_noise: bool = field(default=True, metadata={"static": True})
    learn_dof: bool = field(default=True, metadata={"static": True})

    prior_mean: ClassVar[float | None] = 0.0

    def __post_init__(self) -> None:
        check_positive("noise", self.noise)
        check_positive("dof", self.dof)

    def parameters(self) -> dict[str, float | Array]:
        """log s2 and log nu, where they are learned."""
        values = {"log_noise": (self.learn_noise, self.noise), "log_dof": (self.learn_dof, self.dof)}
        return {name: jnp.log(jnp.asarray(value)) for name, (learned, value) in values.items() if learned}

    def priors(self) -> dict[str, dist.Distribution]:
        """`noise_prior`, and log nu ~ N(log 4, 1): between 1.5 and 11, two tails in three."""
        every = {"log_noise": noise_prior(), "log_dof": dist.Normal(jnp.log(4.0), 1.0)}
        return {name: every[name] for name in self.parameters()}

    def with_parameters(self, values: dict[str, Array]) -> "StudentT":
        """The same with s2 = exp(log_noise) and nu = exp(log_dof)."""
        found = {name: jnp.exp(value) for name, value in values.items()}
        return replace(self, noise=found.get("log_noise", self.noise), dof=found.get("log_dof", self.dof))

    def log_prob(
        self, y: Labels, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log t(y_n; f_n, s, nu)."""
        del classes
        dof = jnp.asarray(self.dof, f.dtype)
        return self._log_mode(dof) - 0.5 * (dof + 1) * jnp.log1p((y - f[0]) ** 2 / (self.noise * dof))

    def expected_log_prob(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log t(y_n; f_n, s, nu); without points to rounding (N5)."""
        if points is not None:
            return expect(lambda f: self.log_prob(y, f, classes), marginals, points)
        dof = jnp.asarray(self.dof, marginals.mean.dtype)
        tail = _expected_log1p_square(y - marginals.mean[0], marginals.variance[0], self.noise * dof)
        return self._log_mode(dof) - 0.5 * (dof + 1) * tail

    def distribution(self, marginals: Marginals | JointMarginals) -> dist.Distribution:
        """E_q t(y_*; f_*, s, nu) = E_omega N(y_*; m_*, v_* + s2 / omega), a mixture over nodes of log omega (N4)."""
        mean, variance = components(marginals)
        count = NODES if len(mean) == 1 else NODES_OF_MANY
        log_weights, omega = _gamma_nodes(jnp.asarray(self.dof, mean.dtype), count)
        return equal_mixture(mean, variance, log_weights, self.noise / omega)

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """Labels y [N] given f."""
        return dist.StudentT(self.dof, f[0], jnp.sqrt(self.noise)).to_event(1)

    def observed(self, y: Labels, classes: int) -> Labels:
        """The labels."""
        del classes
        return y

    # Tier 2, sampled column

    def aux_conditional(
        self, key: Key[Array, ""], y: Labels, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> StudentTLatents:
        """An exact draw of omega given y and f (N2)."""
        del classes
        rate = self._rate((y - f[0]) ** 2)
        return StudentTLatents(jax.random.gamma(key, self._shape(f.dtype), rate.shape, f.dtype) / rate)

    def sites(self, y: Labels, aux: StudentTLatents, classes: Bool[Array, " C"] | None = None) -> Sites:
        """h = omega y / s2 and W = omega / s2."""
        del classes
        precision = (aux.omega / self.noise)[None]
        return Sites(precision * y, precision)

    def aux_model(self, y: Labels, f: Float[Array, "C N"]) -> None:
        """omega as a NumPyro sample site, and the tilt N(y; f, s2 / omega) as a factor."""
        half = jnp.full(y.shape, 0.5 * self.dof, f.dtype)
        omega = numpyro.sample("omega", dist.Gamma(half, half).to_event(1))
        numpyro.factor("tilt", jnp.sum(self._log_tilt((y - f[0]) ** 2, omega, jnp.log(omega))))

    def log_joint(self, y: Labels, aux: StudentTLatents, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(y, omega | f)."""
        half = 0.5 * jnp.asarray(self.dof, f.dtype)
        return dist.Gamma(half, half).log_prob(aux.omega) + self._log_tilt(
            (y - f[0]) ** 2, aux.omega, jnp.log(aux.omega)
        )

    def log_conditional(self, y: Labels, aux: StudentTLatents, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(omega | y, f): what `aux_conditional` draws from."""
        return dist.Gamma(self._shape(f.dtype), self._rate((y - f[0]) ** 2)).log_prob(aux.omega)

    # Tier 2, expected column

    def aux_posterior(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        aux: StudentTFactors | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> StudentTFactors:
        """Optimal q(omega) given q(f): (N2) with E (y - f)^2."""
        del aux, classes
        return StudentTFactors(self._rate(_second_moment(y, marginals)))

    def expected_sites(self, y: Labels, aux: StudentTFactors, classes: Bool[Array, " C"] | None = None) -> Sites:
        """The sites with the expected omega."""
        omega = self._shape(aux.rate.dtype) / aux.rate
        return self.sites(y, StudentTLatents(omega), classes)

    def augmented_bound(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        aux: StudentTFactors,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q[log p(y, omega | f) - log q(omega)], at most E_q log p(y | f) (N3)."""
        del classes
        shape, half = self._shape(aux.rate.dtype), 0.5 * jnp.asarray(self.dof, aux.rate.dtype)
        omega, log_omega = shape / aux.rate, digamma(shape) - jnp.log(aux.rate)
        expected = self._log_tilt(_second_moment(y, marginals), omega, log_omega)
        prior = half * jnp.log(half) - gammaln(half) + (half - 1) * log_omega - half * omega
        entropy = shape - jnp.log(aux.rate) + gammaln(shape) + (1 - shape) * digamma(shape)
        return expected + prior + entropy

    def _log_mode(self, dof: Array) -> Array:
        """log t(0; 0, s, nu)."""
        return log_gamma_half(dof) - 0.5 * jnp.log(2 * jnp.pi * self.noise)

    def _shape(self, dtype: jnp.dtype) -> Array:
        return 0.5 * (jnp.asarray(self.dof, dtype) + 1)

    def _rate(self, square: Array) -> Array:
        return 0.5 * (self.dof + square / self.noise)

    def _log_tilt(self, square: Array, omega: Array, log_omega: Array) -> Array:
        """log N(y; f, s2 / omega), or its expectation from those of (y - f)^2, omega and log omega."""
        return 0.5 * (log_omega - jnp.log(2 * jnp.pi * self.noise) - omega * square / self.noise)


def log_gamma_half(dof: Float[Array, ""]) -> Float[Array, ""]:
    """log Gamma((nu + 1) / 2) - log Gamma(nu / 2) - 1/2 log(nu / 2): 0 for large nu, and nothing cancels on the way."""
    half = 0.5 * dof
    # `log_gamma_ratio` takes b > 1: from half one step of Gamma(x + 1) = x Gamma(x) in both.
    above = half + 1
    return log_gamma_ratio(0.5, above) + 0.5 * jnp.log1p(1 / half) - jnp.log1p(0.5 / half)


def _second_moment(y: Array, marginals: Marginals | JointMarginals) -> Array:
    return (y - marginals.mean[0]) ** 2 + marginals.variance[0]


def _expected_log1p_square(
    offset: Float[Array, " N"], variance: Float[Array, " N"], scale: Float[Array, ""]
) -> Float[Array, " N"]:
    """E log(1 + x^2 / c) of x ~ N(d, v), c = scale: the integral of (1 - E exp(-t x^2 / c)) exp(-t) / t over t (N5).

    By the trapezoidal rule in u = log t, in which the integrand is analytic up to |Im u| < pi / 2 whatever c, d and v:
    within 2e-12 of its value, and 1e-6 in single precision, for v / c up to 1e10 and d^2 / c up to 1e12.
    """
    negligible, count = (38.0, 171) if offset.dtype == jnp.float64 else (18.0, 57)
    low = jax.lax.stop_gradient(-negligible - jnp.log1p((variance + offset**2) / scale))
    step = (math.log(negligible) - low) / (count - 1)
    t = jnp.exp(low + step * jnp.arange(count, dtype=offset.dtype)[:, None])
    spread = scale + 2 * t * variance
    log_mean = -0.5 * jnp.log1p(2 * t * variance / scale) - t * offset**2 / spread
    return step * jnp.sum(-jnp.expm1(log_mean) * jnp.exp(-t), axis=0)


def _gamma_nodes(dof: Array, count: int) -> tuple[Array, Array]:
    """Log-weights and nodes omega of Gamma(nu / 2, nu / 2): the trapezoidal rule on u = log omega.

    The density of u is proportional to exp(nu / 2 (u - e^u)), and the one given a label r deviations off has its mode
    at log((nu + 1) / (nu + r^2)). So nodes go from NEGLIGIBLE nats below the mode at u = 0 on its right as far to the
    left as their number allows, and at least to where the density is as small there.
    """
    drop = 2 * NEGLIGIBLE / dof

    def height(u: Array) -> Array:
        return jnp.expm1(u) - u

    # Newton's iteration on a convex function from bounds of its two roots: it comes from outside and stays there.
    low = -jnp.minimum(drop + 1, drop / 3 + jnp.sqrt(drop**2 / 9 + 2 * drop))
    high = jnp.log1p(jnp.sqrt(2 * drop) + drop)
    for _ in range(6):
        low = low - (height(low) - drop) / jnp.expm1(low)
        high = high - (height(high) - drop) / jnp.expm1(high)
    reached = high - (count - 1) * WIDEST_STEP * jnp.sqrt(2 / dof)
    u = jnp.linspace(jnp.minimum(low, jnp.maximum(reached, -FARTHEST)), high, count)
    return jax.nn.log_softmax(-0.5 * dof * height(u)), jnp.exp(u)
