"""One-vs-each: p(y = k | f) = prod_{c != k} s(f_k - f_c), a composite likelihood (OVE equations 6 and 10).

It is not normalised over k: sum_k p(k | f) <= 1. The joint it stands for is p(f) prod_n p(y_n | f_n), normalised over
(f, y) together, so a new label has the probability E[p(k | f)] normalised over k. Polya-Gamma augmentation gives

    (O0) s(d) = exp(d / 2) / 2 E[exp(-omega d^2 / 2)],  omega ~ PG(1, 0),  d = f_y - f_c
    (O1) omega_c | f ~ PG(1, d)            (O2) h = 1/2 sum_c (e_y - e_c), L = sum_c omega_c (e_y - e_c)(e_y - e_c)^T

where c runs over the other classes: a star of class differences at every point.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key
from numpyro.distributions import constraints

from fewshot.models.expectations import Points, expect, expected_log_sigmoid
from fewshot.models.gaussian import JointMarginals, Marginals, StarSites
from fewshot.models.gaussian.factors import square_root
from fewshot.models.likelihoods.base import IntegerLabels, NoParameters, SampledPrediction, one_hot, own
from fewshot.models.polya_gamma import (
    PolyaGamma,
    log_cosh_half,
    polya_gamma_log_prob,
    polya_gamma_mean,
    sample_polya_gamma_one,
)


class OneVsEachLatents(NamedTuple):
    """A draw of omega [C, N]; 0 at the point's own class."""

    omega: Float[Array, "C N"]


class OneVsEachFactors(NamedTuple):
    """Factors of q: omega ~ PG(1, tilt) [C, N]; the point's own class plays no part."""

    tilt: Float[Array, "C N"]


@jax.tree_util.register_static
@dataclass(frozen=True)
class OneVsEach(IntegerLabels, SampledPrediction, NoParameters):
    """One-vs-each composite likelihood; it has no free parameter and knows differences of logits only.

    prediction_draws: size of the Monte-Carlo rule of `predict`.
    """

    prediction_draws: int = 512

    prior_mean: ClassVar[float | None] = None
    differences_only: ClassVar[bool] = True
    log_concave: ClassVar[bool] = True

    def log_prob(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log p(y_n | f_n), not normalised over y."""
        return _sum_of_others(y, jax.nn.log_sigmoid(own(y, f) - f), classes)

    def log_densities(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """log p(y_n = k | f_n) of every label k, not normalised over k."""
        return _all_log_probs(f, None)

    def expected_log_prob(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log p(y_n | f_n); every term knows one difference, so without points it is a one-dimensional sum."""
        if points is not None:
            return expect(lambda f: self.log_prob(y, f, classes), marginals, points)
        return _sum_of_others(y, expected_log_sigmoid(*_differences(y, marginals)), classes)

    def predict(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """E_q p(k | f), then normalised over k."""
        densities = self.expected_density(key, marginals, classes)
        return densities / jnp.sum(densities, axis=1, keepdims=True)

    def expected_density(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """E_q p(k | f) of every query, not normalised; Monte Carlo with draws shared by all queries."""
        mean = marginals.mean
        points = self.prediction_points(key, mean)
        real = jnp.ones(mean.shape[0], bool) if classes is None else classes
        f = marginals.at(points.nodes)
        densities = _densities(f.reshape(len(f), -1), real).reshape(f.shape)
        return jnp.einsum("m,cmq->qc", points.weights, densities, precision=jax.lax.Precision.HIGHEST)

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """Labels y [N] given f: the composite density; draws are those of p(y | f), normalised."""
        return OneVsEachLabels(f)

    def local_sites(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> StarSites:
        """Sites with the slope and minus the Hessian of log p(y | f) at f: a star with rays s'(d)."""
        difference = own(y, f) - f
        rays = jax.nn.sigmoid(difference) * jax.nn.sigmoid(-difference)
        flat = self._star(y, jax.nn.sigmoid(-difference), rays, classes)
        return flat._replace(shift=flat.shift + flat.times(f))

    # Tier 2, sampled column

    def aux_conditional(
        self,
        key: Key[Array, ""],
        y: Int[Array, " N"],
        f: Float[Array, "C N"],
        classes: Bool[Array, " C"] | None = None,
    ) -> OneVsEachLatents:
        """An exact draw of omega given y and f (O1)."""
        omega = sample_polya_gamma_one(key, own(y, f) - f)
        return OneVsEachLatents(jnp.where(_others(y, f.shape[0], classes), omega, 0.0))

    def sites(self, y: Int[Array, " N"], aux: OneVsEachLatents, classes: Bool[Array, " C"] | None = None) -> StarSites:
        """(O2) given a draw of omega."""
        return self._star(y, jnp.full_like(aux.omega, 0.5), aux.omega, classes)

    def aux_model(self, y: Int[Array, " N"], f: Float[Array, "C N"]) -> None:
        """omega as a NumPyro sample site, and the tilt as a factor."""
        others = _others(y, f.shape[0], None)
        omega = numpyro.sample("omega", PolyaGamma(others.astype(f.dtype), jnp.zeros_like(f)).to_event(2))
        numpyro.factor("tilt", jnp.sum(_sum_of_others(y, _log_tilt(own(y, f) - f, omega), None)))

    def log_joint(self, y: Int[Array, " N"], aux: OneVsEachLatents, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(y, omega | f)."""
        return self._log_weights(y, aux, jnp.zeros_like(f)) + _sum_of_others(
            y, _log_tilt(own(y, f) - f, aux.omega), None
        )

    def log_conditional(self, y: Int[Array, " N"], aux: OneVsEachLatents, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(omega | y, f): what `aux_conditional` draws from."""
        return self._log_weights(y, aux, own(y, f) - f)

    # Tier 2, expected column

    def aux_posterior(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        aux: OneVsEachFactors | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> OneVsEachFactors:
        """Optimal q(omega) given q(f): tilt^2 = E d^2."""
        del aux, classes
        mean, variance = _differences(y, marginals)
        return OneVsEachFactors(square_root(mean**2 + variance))  # 0 at the own class, which has d = 0

    def expected_sites(
        self, y: Int[Array, " N"], aux: OneVsEachFactors, classes: Bool[Array, " C"] | None = None
    ) -> StarSites:
        """(O2) with the expected omega."""
        return self._star(y, jnp.full_like(aux.tilt, 0.5), polya_gamma_mean(1.0, aux.tilt), classes)

    def augmented_bound(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        aux: OneVsEachFactors,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q[log p(y, omega | f) - log q(omega)], at most E_q log p(y | f)."""
        mean, variance = _differences(y, marginals)
        slack = 0.5 * polya_gamma_mean(1.0, aux.tilt) * (aux.tilt**2 - mean**2 - variance)
        return _sum_of_others(y, 0.5 * mean - jnp.log(2.0) - log_cosh_half(aux.tilt) + slack, classes)

    def _star(self, y: Array, slope: Array, rays: Array, classes: Array | None) -> StarSites:
        """Star sites at zero shift's linear part sum_c slope_c (e_y - e_c)."""
        others = _others(y, rays.shape[0], classes)
        pull = jnp.where(others, slope, 0.0)
        centre = one_hot(y, rays.shape[0], rays.dtype)
        return StarSites(centre * jnp.sum(pull, axis=0) - pull, jnp.where(others, rays, 0.0), centre)

    def _log_weights(self, y: Array, aux: OneVsEachLatents, tilt: Array) -> Array:
        return _sum_of_others(y, polya_gamma_log_prob(jnp.where(aux.omega > 0, aux.omega, 1.0), 1.0, tilt), None)


class OneVsEachLabels(dist.Distribution):
    """Labels y [N] given logits f [C, N] with the composite density, which is not normalised over y."""

    support = constraints.nonnegative_integer

    def __init__(self, f: Float[Array, "C N"]):
        self.f = f
        super().__init__(event_shape=f.shape[1:], validate_args=False)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws of p(y | f), the density normalised over y."""
        return jax.random.categorical(key, _all_log_probs(self.f, None).T, shape=(*sample_shape, self.f.shape[1]))

    def log_prob(self, value: Array) -> Array:
        """Sum over the points of the log density, not normalised over y."""
        return jnp.sum(OneVsEach().log_prob(value, self.f))


def _others(y: Array, classes: int, real: Array | None) -> Array:
    """True [C, N] at the classes c != y_n that exist."""
    others = jnp.arange(classes)[:, None] != y
    return others if real is None else others & real[:, None]


def _sum_of_others(y: Array, values: Array, real: Array | None) -> Array:
    return jnp.sum(jnp.where(_others(y, values.shape[0], real), values, 0.0), axis=0)


def _differences(y: Array, marginals: Marginals | JointMarginals) -> tuple[Array, Array]:
    """Mean and variance [C, N] of d_c = f_y - f_c under q."""
    mean, variance = marginals.mean, marginals.variance
    crossed = 2 * own(y, variance)[None] * one_hot(y, mean.shape[0], mean.dtype)
    if isinstance(marginals, JointMarginals):
        crossed = 2 * jnp.take_along_axis(marginals.covariance, y[:, None, None], axis=1)[:, 0].T
    return own(y, mean) - mean, jnp.maximum(own(y, variance) + variance - crossed, 0.0)


def _all_log_probs(f: Array, real: Array | None) -> Array:
    """log p(y = k | f) [C, N] for every k; -inf for classes that do not exist."""
    pairs = jax.nn.log_sigmoid(f[:, None] - f[None])  # [k, c, N]
    other = ~jnp.eye(f.shape[0], dtype=bool)[:, :, None]
    other = other if real is None else other & real[None, :, None]
    total = jnp.sum(jnp.where(other, pairs, 0.0), axis=1)
    return total if real is None else jnp.where(real[:, None], total, -jnp.inf)


@jax.custom_jvp
def _densities(f: Array, real: Array) -> Array:
    """p(y = k | f) [C, N] for every k; 0 for classes that do not exist.

    Products of s(f_k - f_c), without logarithms, and a derivative of their own: both are taken at every node of every
    chain. Written class by class, not as an array over pairs that is reduced, so that processors use vectors.
    """
    wins = (_duels(f, c, real)[0] for c in range(len(f)))
    return jnp.where(real[:, None], functools.reduce(jnp.multiply, wins), 0.0)


@_densities.defjvp
def _densities_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    """d log p(k | f) = sum_c s(f_c - f_k) (df_k - df_c)."""
    (f, real), change = primals, tangents[0]
    moved = (_duels(f, c, real)[1] * (change - change[c]) for c in range(len(f)))
    value = _densities(f, real)
    return value, value * functools.reduce(jnp.add, moved)


def _duels(f: Array, c: int, real: Array) -> tuple[Array, Array]:
    """s(f_k - f_c) and s(f_c - f_k) [k, N], accurate relative to their size; 1 and 0 where there is no duel."""
    difference = f - f[c]
    smaller = jnp.exp(-jnp.abs(difference))
    larger = 1 / (1 + smaller)
    other = ((jnp.arange(len(f)) != c) & real[c])[:, None]
    wins = jnp.where(difference >= 0, larger, smaller * larger)
    losses = jnp.where(difference >= 0, smaller * larger, larger)
    return jnp.where(other, wins, 1.0), jnp.where(other, losses, 0.0)


def _log_tilt(difference: Array, omega: Array) -> Array:
    """log of exp(d / 2 - omega d^2 / 2) / 2 (O0)."""
    return 0.5 * difference - 0.5 * omega * difference**2 - jnp.log(2.0)
