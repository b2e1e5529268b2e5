"""Logistic-softmax: p(y = k | f) = s(g_k) / sum_c s(g_c), g = f / tau, s the logistic function (CDKT section 3.1).

Three augmentations make it conditionally Gaussian. With S = sum_c s(g_c),

    (LS1) 1 / S = int_0^inf exp(-lambda S) dlambda
    (LS2) exp(-lambda s(g)) = sum_m Poisson(m; lambda) s(-g)^m
    (LS3) s(g)^y s(-g)^m = 2^-(m+y) exp((y - m) g / 2) E[exp(-omega g^2 / 2)],  omega ~ PG(m + y, 0)

so p(y, lambda, m, omega | f) is a Gaussian site in f with h = (y - m) / (2 tau), W = omega / tau^2 (A1).
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.expectations import Points, expect, expected_log_sigmoid, expected_log_sum_sigmoid
from fewshot.models.gaussian import JointMarginals, Marginals, SimplexSites, Sites
from fewshot.models.likelihoods.base import CategoricalLabels, check_positive, one_hot, own, present, present_or_zero
from fewshot.models.poisson import sample_poisson
from fewshot.models.polya_gamma import (
    PolyaGamma,
    log_cosh_half,
    polya_gamma_log_prob,
    polya_gamma_mean,
    sample_polya_gamma,
)


class LogisticSoftmaxLatents(NamedTuple):
    """A draw of the latents: rate lambda [N], counts m and omega [C, N]."""

    rate: Float[Array, " N"]
    counts: Float[Array, "C N"]
    omega: Float[Array, "C N"]


class LogisticSoftmaxFactors(NamedTuple):
    """Factors of q: lambda ~ Gamma(shape, C) [N], m ~ Poisson(counts), omega | m ~ PG(m + y, tilt), both [C, N]."""

    shape: Float[Array, " N"]
    counts: Float[Array, "C N"]
    tilt: Float[Array, "C N"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogisticSoftmax(CategoricalLabels):
    """Logistic-softmax with temperature tau: where all f < 0 it sharpens as tau falls, and it is softmax-like.

    prediction_draws: size of the Monte-Carlo rule of `predict`. learn_temperature: whether the outer loop learns tau;
    False holds it where it is. Raises ValueError for a temperature that is not positive.
    """

    temperature: float | Float[Array, ""] = 1.0
    prediction_draws: int = field(default=512, metadata={"static": True})
    learn_temperature: bool = field(default=True, metadata={"static": True})

    prior_mean: ClassVar[float | None] = -3.0
    most_slices: ClassVar[int] = 40  # of a sweep of Gibbs: docs/logistic_softmax.md has what they are worth

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)

    def parameters(self) -> dict[str, float | Array]:
        """log tau, where it is learned."""
        if not self.learn_temperature:
            return {}
        return {"log_temperature": jnp.log(jnp.asarray(self.temperature))}

    def priors(self) -> dict[str, dist.Distribution]:
        """log tau ~ N(its start, 0.5^2): only f / tau matters, so tau is known no better than the output scale."""
        if not self.learn_temperature:
            return {}
        return {"log_temperature": dist.Normal(jnp.log(jnp.asarray(self.temperature)), 0.5)}

    def with_parameters(self, values: dict[str, Array]) -> "LogisticSoftmax":
        """The same with tau = exp(log_temperature)."""
        return replace(self, temperature=jnp.exp(values["log_temperature"])) if values else self

    def slices(self, points: int | Int[Array, ""]) -> Int[Array, ""]:
        """Elliptical slices that a sweep of Gibbs takes with so many labelled points: 2 points / tau^2, at most 40.

        The blocks move each other the less, the more the likelihood says about f; few points need few slices.
        """
        wanted = jnp.ceil(2 * points / jnp.asarray(self.temperature) ** 2)
        return jnp.clip(wanted, 1, self.most_slices).astype(jnp.int32)

    def label_logits(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """log s(g)."""
        return jax.nn.log_sigmoid(f / self.temperature)

    def log_prob(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log s(g_y) - log sum_c s(g_c)."""
        return _log_share(f / self.temperature, y, classes)

    def expected_log_prob(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log p(y_n | f_n); one-dimensional sums without points, which need classes that are independent in q."""
        if points is not None:
            return expect(lambda f: self.log_prob(y, f, classes), marginals, points)
        scaled = Marginals(marginals.mean / self.temperature, marginals.variance / self.temperature**2)
        first = own(y, expected_log_sigmoid(scaled.mean, scaled.variance))
        if isinstance(marginals, JointMarginals):
            raise ValueError("logistic-softmax has no deterministic expectation over coupled classes; pass points")
        return first - expected_log_sum_sigmoid(scaled, classes)

    def local_sites(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> SimplexSites:
        """Sites with the slope of log p(y | f) at f and its Fisher information J (diag p - p p^T) J, J = (1 - s) / tau.

        The Hessian itself can be indefinite; it has the same expectation over y.
        """
        p = self.probabilities(f, classes)
        slope = jax.nn.sigmoid(-f / self.temperature) / self.temperature
        flat = SimplexSites(slope * (one_hot(y, f.shape[0], f.dtype) - p), p, slope)
        return flat.shifted(flat.times(f))

    # Tier 2, sampled column

    def aux_conditional(
        self,
        key: Key[Array, ""],
        y: Int[Array, " N"],
        f: Float[Array, "C N"],
        classes: Bool[Array, " C"] | None = None,
    ) -> LogisticSoftmaxLatents:
        """An exact draw of (lambda, m, omega) given y and f, in that order."""
        rate_key, count_key, omega_key = jax.random.split(key, 3)
        g = f / self.temperature
        total = jnp.exp(log_sum_sigmoid(g, classes))
        rate = jax.random.exponential(rate_key, total.shape, f.dtype) / total
        count = sample_poisson(count_key, present_or_zero(rate * jax.nn.sigmoid(-g), classes))
        omega = sample_polya_gamma(omega_key, count + one_hot(y, f.shape[0], f.dtype), g)
        return LogisticSoftmaxLatents(rate, count, omega)

    def sites(
        self, y: Int[Array, " N"], aux: LogisticSoftmaxLatents, classes: Bool[Array, " C"] | None = None
    ) -> Sites:
        """(A1) given a draw of the latents."""
        return self._sites(y, aux.counts, aux.omega, classes)

    def aux_model(self, y: Int[Array, " N"], f: Float[Array, "C N"]) -> None:
        """The latents as NumPyro sample sites `rate` (improper), `counts`, `omega`, and the tilt as a factor."""
        labels = one_hot(y, f.shape[0], f.dtype)
        improper = dist.ImproperUniform(dist.constraints.positive, (), y.shape)
        rate = numpyro.sample("rate", improper)
        count = numpyro.sample("counts", dist.Poisson(jnp.broadcast_to(rate, f.shape)).to_event(2))
        omega = numpyro.sample("omega", PolyaGamma(count + labels, jnp.zeros_like(f)).to_event(2))
        numpyro.factor("tilt", jnp.sum(self._log_tilt(labels, f, count, omega)))

    def log_joint(self, y: Int[Array, " N"], aux: LogisticSoftmaxLatents, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(y, lambda, m, omega | f), in the measure dlambda."""
        labels = one_hot(y, f.shape[0], f.dtype)
        counts = dist.Poisson(aux.rate).log_prob(aux.counts)
        weights = polya_gamma_log_prob(aux.omega, aux.counts + labels, jnp.zeros_like(f))
        return jnp.sum(counts + weights + self._log_tilt(labels, f, aux.counts, aux.omega), axis=0)

    def log_conditional(
        self, y: Int[Array, " N"], aux: LogisticSoftmaxLatents, f: Float[Array, "C N"]
    ) -> Float[Array, " N"]:
        """log p(lambda, m, omega | y, f): what `aux_conditional` draws from."""
        g = f / self.temperature
        total = jnp.sum(jax.nn.sigmoid(g), axis=0)
        counts = dist.Poisson(aux.rate * jax.nn.sigmoid(-g)).log_prob(aux.counts)
        weights = polya_gamma_log_prob(aux.omega, aux.counts + one_hot(y, f.shape[0], f.dtype), g)
        return dist.Exponential(total).log_prob(aux.rate) + jnp.sum(counts + weights, axis=0)

    # Tier 2, expected column

    def aux_posterior(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        aux: LogisticSoftmaxFactors | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> LogisticSoftmaxFactors:
        """Optimal q(m, omega) given q(f) and the last q(lambda), then optimal q(lambda) (CDKT 4.4a-d)."""
        del y
        size = _number_of(marginals.mean, classes)
        shape = jnp.broadcast_to(size, marginals.mean.shape[1:]) if aux is None else aux.shape
        mean = marginals.mean / self.temperature
        tilt = jnp.sqrt(_second_moment(marginals)) / self.temperature
        log_count = digamma(shape) - jnp.log(size) - 0.5 * mean - jnp.log(2.0) - log_cosh_half(tilt)
        count = present_or_zero(jnp.exp(log_count), classes)
        return LogisticSoftmaxFactors(1.0 + jnp.sum(count, axis=0), count, tilt)

    def expected_sites(
        self, y: Int[Array, " N"], aux: LogisticSoftmaxFactors, classes: Bool[Array, " C"] | None = None
    ) -> Sites:
        """(A1) with the expected latents."""
        total = aux.counts + one_hot(y, aux.counts.shape[0], aux.counts.dtype)
        return self._sites(y, aux.counts, polya_gamma_mean(total, aux.tilt), classes)

    def augmented_bound(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        aux: LogisticSoftmaxFactors,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q[log p(y, aux | f) - log q(aux)], at most E_q log p(y | f) (CDKT 13, alpha_n once a point)."""
        size = _number_of(marginals.mean, classes)
        labels = one_hot(y, marginals.mean.shape[0], marginals.mean.dtype)
        half = 0.5 * marginals.mean / self.temperature - jnp.log(2.0) - log_cosh_half(aux.tilt)
        expected_log_rate = digamma(aux.shape) - jnp.log(size)
        log_count = jnp.log(jnp.where(aux.counts > 0, aux.counts, 1.0))
        other = expected_log_rate + half - marginals.mean / self.temperature - log_count
        omega = polya_gamma_mean(aux.counts + labels, aux.tilt)
        slack = 0.5 * omega * (aux.tilt**2 - _second_moment(marginals) / self.temperature**2)
        terms = aux.counts * other + aux.counts + labels * half + slack
        entropy = aux.shape - jnp.log(size) + gammaln(aux.shape) + (1.0 - aux.shape) * digamma(aux.shape)
        return jnp.sum(present_or_zero(terms, classes), axis=0) - aux.shape + entropy

    def _sites(self, y: Array, count: Array, omega: Array, classes: Array | None) -> Sites:
        labels = one_hot(y, count.shape[0], count.dtype)
        shift, precision = (labels - count) / (2.0 * self.temperature), omega / self.temperature**2
        return Sites(present_or_zero(shift, classes), present_or_zero(precision, classes))

    def _log_tilt(self, labels: Array, f: Array, count: Array, omega: Array) -> Array:
        """log of 2^-(m+y) exp((y - m) g / 2 - omega g^2 / 2) (LS3)."""
        g = f / self.temperature
        return -(count + labels) * jnp.log(2.0) + 0.5 * (labels - count) * g - 0.5 * omega * g**2


def _second_moment(marginals: Marginals | JointMarginals) -> Array:
    return marginals.mean**2 + marginals.variance


def _number_of(mean: Array, classes: Array | None) -> Array:
    """Number of classes that exist."""
    return jnp.asarray(mean.shape[0] if classes is None else jnp.sum(classes), mean.dtype)


@jax.custom_jvp
def log_sum_sigmoid(g: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None) -> Float[Array, " N"]:
    """log sum_c s(g_c) over the classes that exist, without overflow: s(g) = exp(min(g, 0)) / (1 + exp(-|g|))."""
    below = present(jnp.minimum(g, 0.0), classes)
    most = jnp.max(below, axis=0)
    return most + jnp.log(jnp.sum(jnp.exp(below - most) / (1.0 + jnp.exp(-jnp.abs(g))), axis=0))


@log_sum_sigmoid.defjvp
def _(primals: tuple[Array, Array | None], tangents: tuple[Array, object]) -> tuple[Array, Array]:
    """d = sum_c s(g_c) s(-g_c) dg_c / sum_c s(g_c); min and |.| have no second derivative at 0, this has."""
    g, classes = primals
    value = log_sum_sigmoid(g, classes)
    weights = jnp.exp(present(jax.nn.log_sigmoid(g), classes) - value) * jax.nn.sigmoid(-g)
    return value, jnp.sum(weights * tangents[0], axis=0)


@jax.custom_jvp
def _log_share(g: Array, y: Array, classes: Array | None) -> Array:
    """log s(g_y) - log sum_c s(g_c) with one logarithm a point: it is most of the time of Gibbs."""
    below, above = jnp.minimum(g, 0.0), 1.0 + jnp.exp(-jnp.abs(g))
    most = jnp.max(present(below, classes), axis=0)
    total = jnp.sum(present_or_zero(jnp.exp(below - most) / above, classes), axis=0)
    chosen = g[y, jnp.arange(g.shape[1])]  # a sum over classes here would end the fusion with what is above
    return jnp.minimum(chosen, 0.0) - most - jnp.log(total * (1.0 + jnp.exp(-jnp.abs(chosen))))


@_log_share.defjvp
def _(primals: tuple[Array, Array, Array | None], tangents: tuple[Array, object, object]) -> tuple[Array, Array]:
    """d = s(-g_y) dg_y - d log sum_c s(g_c)."""
    g, y, classes = primals
    _, slope = jax.jvp(lambda one: log_sum_sigmoid(one, classes), (g,), tangents[:1])
    return _log_share(g, y, classes), own(y, jax.nn.sigmoid(-g) * tangents[0]) - slope
