"""Inducing points: a process seen through its values at M inputs Z, in O(N M^2) (docs/sparse.md).

    f(x) = a(x) + phi(x).v + rest(x),  v ~ N(0, I),  phi(x) = P^T k(Z, x),  P P^T = (K_zz + e I)^+          (P3)

The features phi are what M numbers can say about f; the rest has variance k(x, x) - |phi(x)|^2 and is either paid for
(Titsias' bound) or kept as noise of its own for every point (FITC).

Policy for K_zz: no jitter. P comes from its eigenvectors; directions below M eps lambda_max, which hold rounding errors
only, are left out, and any subset of directions is itself a valid set of inducing variables. `inducing_noise` is the
variance e of noise on the inducing variables, u + e^1/2 xi instead of u. Any e >= 0 leaves the process as it is and
every bound a bound: it is a choice of what the process is seen through. The default is 0.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.gaussian import GaussianPrior, Marginals, Query, cholesky_inverse, highest_precision, prior_root
from fewshot.models.kernels import Hyper, Kernel, Stationary, inner_products
from fewshot.models.regression import Noise, Prediction


class View(NamedTuple):
    """What N inputs have of the inducing variables: f = mean + features v + rest.

    mean [N], or [C, N] of several functions, is a; cross [N, M] is the covariance k(X, Z), features [N, M] phi, rest
    [N] the variance that is left.
    """

    mean: Float[Array, "*C N"]
    cross: Float[Array, "N M"]
    features: Float[Array, "N M"]
    rest: Float[Array, " N"]


class Weights(NamedTuple):
    """Posterior N(mean, B^-1) of v [M], or of the v of each class [C, M].

    inverse is R^-1 with B = R R^T, determinant is log|B|, summed over classes.
    """

    mean: Float[Array, "*C M"]
    inverse: Float[Array, "*C M M"]
    determinant: Float[Array, ""]

    def kl(self) -> Float[Array, ""]:
        """KL(q(v) || N(0, I)) = 1/2 [ log|B| + tr B^-1 - M + |mean|^2 ] (G5), summed over classes."""
        excess = jnp.sum(self.inverse**2) - self.mean.size
        return 0.5 * (self.determinant + excess + jnp.sum(self.mean**2))

    @highest_precision
    def predict(self, view: View) -> Prediction:
        """Marginals [*C, N] of f: mean a + phi.mean, variance rest + phi.B^-1 phi (G7)."""
        mean = view.mean + self.mean @ view.features.T
        spread = view.features @ jnp.swapaxes(self.inverse, -1, -2)
        return Prediction(mean, view.rest + jnp.sum(spread**2, axis=-1))


@highest_precision
def whitening(
    kernel: Kernel, hyper: Hyper, inputs: Float[Array, "M D"], inducing_noise: Float[Array, ""] | float = 0.0
) -> Float[Array, "M M"]:
    """P with P P^T = (K_zz + e I)^+; a direction left out is a column of zeros.

    P is any such root: only what does not depend on which (all in this file) may be computed from it.
    """
    return prior_root(inducing_prior(kernel, hyper, inputs, inducing_noise)).pseudo_inverse


def inducing_prior(
    kernel: Kernel, hyper: Hyper, inputs: Float[Array, "M D"], inducing_noise: Float[Array, ""] | float = 0.0
) -> GaussianPrior:
    """N(0, K_zz + e I) of the inducing variables."""
    covariance = kernel.gram(hyper, inputs, inputs)
    covariance += inducing_noise * jnp.eye(inputs.shape[0], dtype=covariance.dtype)
    return GaussianPrior(jnp.zeros((1, inputs.shape[0]), covariance.dtype), covariance)


def view(
    kernel: Kernel,
    hyper: Hyper,
    x: Float[Array, "N D"],
    inputs: Float[Array, "M D"],
    whitener: Float[Array, "M M"],
    mean: Float[Array, ""] | float = 0.0,
) -> View:
    """The view of inputs x through inducing points, with P of `whitening` and a constant prior mean."""
    cross = kernel.gram(hyper, x, inputs)
    features = inner_products(cross, whitener.T)
    # Rounding alone makes the rest negative (G7 clamps likewise).
    rest = jnp.maximum(kernel.diagonal(hyper, x) - jnp.sum(features**2, axis=-1), 0.0)
    return View(jnp.full(x.shape[0], mean, cross.dtype), cross, features, rest)


class Parameters(NamedTuple):
    """What is learned: kernel, inducing inputs Z [M, D], log noise variance, log weights [D] of the inputs."""

    hyper: Hyper
    inputs: Float[Array, "M D"]
    log_noise: Float[Array, ""]
    log_weights: Float[Array, " D"]

    def weighted(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        """x * exp(log_weights), what the kernel sees."""
        return x * jnp.exp(self.log_weights)


@dataclass(frozen=True)
class InducingProcess:
    """A process of mean zero behind inducing points: a base kernel of x * exp(log_weights).

    inducing_noise is e relative to the kernel's variance. The default is 0; training in float32 wants about 1e-4, so
    that no direction of K_zz enters or leaves while Z moves (a bound is then smooth in Z).
    """

    kernel: Kernel
    inducing_noise: float = 0.0

    def initial(self, inputs: Float[Array, "M D"], noise: float = 0.1) -> Parameters:
        """Where learning starts on standardised data: variance 1, the kernel's own length, equal weights."""
        dtype = inputs.dtype
        hyper: Hyper = {name: jnp.asarray(value, dtype) for name, value in self.kernel.initial().items()}
        hyper["log_scale"] = jnp.zeros((), dtype)
        return Parameters(hyper, inputs, jnp.log(jnp.asarray(noise, dtype)), jnp.zeros(inputs.shape[1], dtype))

    def prior(self, parameters: Parameters) -> GaussianPrior:
        """N(0, K_zz + e I)."""
        noise = self.inducing_noise * jnp.exp(parameters.hyper["log_scale"])
        return inducing_prior(self.kernel, parameters.hyper, parameters.weighted(parameters.inputs), noise)

    @highest_precision
    def whitening(self, parameters: Parameters) -> Float[Array, "M M"]:
        """P of `whitening`; of a Cholesky factor where e alone keeps every direction in, which is several times faster.

        The largest eigenvalue is at most the trace M s2, the least at least e s2: above e = M^2 eps none is left out.
        """
        prior = self.prior(parameters)
        count = parameters.inputs.shape[0]
        rounding = count**2 * float(jnp.finfo(prior.covariance.dtype).eps)
        if isinstance(self.kernel, Stationary) and self.inducing_noise > rounding:
            return cholesky_inverse(prior.covariance)[0].T
        return prior_root(prior).pseudo_inverse

    @highest_precision
    def cross(self, parameters: Parameters, x: Float[Array, "N D"]) -> Float[Array, "N M"]:
        """k(X, Z)."""
        return self.kernel.gram(parameters.hyper, parameters.weighted(x), parameters.weighted(parameters.inputs))

    def view(self, parameters: Parameters, whitener: Float[Array, "M M"], x: Float[Array, "N D"]) -> View:
        """What inputs x have of the inducing variables."""
        inputs = parameters.weighted(parameters.inputs)
        return view(self.kernel, parameters.hyper, parameters.weighted(x), inputs, whitener)


@highest_precision
def posterior(seen: View, y: Float[Array, " N"], noise: Noise) -> Weights:
    """q(v) given y = a + phi.v + N(0, noise): B = I + phi^T W phi, mean B^-1 phi^T W (y - a), W = 1 / noise (P4)."""
    weighted = seen.features / jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)[:, None]
    return weights_of(weighted.T @ (y - seen.mean), weighted.T @ seen.features)


@highest_precision
def weights_of(shift: Float[Array, "*C M"], precision: Float[Array, "*C M M"]) -> Weights:
    """N(0, I) times a site exp(shift.v - 1/2 v.precision v): B = I + precision, mean B^-1 shift."""
    inverse, determinant = cholesky_inverse(jnp.eye(shift.shape[-1], dtype=shift.dtype) + precision)
    whitened = jnp.einsum("...ij,...j->...i", inverse, shift)
    return Weights(jnp.einsum("...ij,...i->...j", inverse, whitened), inverse, determinant)


class InducingPosterior(NamedTuple):
    """q(f) of C classes behind M inducing points, which stand where labelled points stand in other posteriors.

    prior: N(a, K_zz); whitener: P of (P3); weights: q(v) of every class; bound: what it reaches of log p(y).
    """

    prior: GaussianPrior
    whitener: Float[Array, "M M"]
    weights: Weights
    bound: Float[Array, ""]

    @property
    def kl(self) -> Float[Array, ""]:
        """KL(q || prior)."""
        return self.weights.kl()

    @property
    def marginals(self) -> Marginals:
        """Marginals at the inducing points."""
        own = self.prior.marginals()
        return self.predict(Query(own.mean, self.prior.covariance, own.variance[0]))

    def predict(self, query: Query) -> Marginals:
        """Marginals [C, Q] at new inputs: phi.v + rest."""
        features = inner_products(query.cross, self.whitener.T)
        rest = jnp.maximum(query.variance - jnp.sum(features**2, axis=-1), 0.0)
        return Marginals(*self.weights.predict(View(query.mean, query.cross, features, rest)))

    @highest_precision
    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "1 D C M"]:
        """Joint draws of f at the inducing points, but for directions that P leaves out."""
        noise = jax.random.normal(key, (count, *self.weights.mean.shape), self.weights.mean.dtype)
        v = self.weights.mean + jnp.einsum("cij,dci->dcj", self.weights.inverse, noise)
        return (prior.mean + v @ (prior.covariance @ self.whitener).T)[None]


def titsias_bound(seen: View, y: Float[Array, " N"], noise: Noise) -> Float[Array, ""]:
    """log N(y | a, phi phi^T + s2 I) - 1/2 sum_n rest_n / s2_n, a lower bound of log p(y) (P5)."""
    return _log_density(seen, y, noise) - 0.5 * jnp.sum(seen.rest / noise)


def fitc_evidence(seen: View, y: Float[Array, " N"], noise: Noise) -> Float[Array, ""]:
    """log N(y | a, phi phi^T + diag(rest) + s2 I) (P6): the evidence of another model, not a bound."""
    return _log_density(seen, y, noise + seen.rest)


def fitc_posterior(seen: View, y: Float[Array, " N"], noise: Noise) -> Weights:
    """q(v) of FITC: the rest is noise of every training point."""
    return posterior(seen, y, noise + seen.rest)


@highest_precision
def _log_density(seen: View, y: Array, noise: Noise) -> Array:
    """log N(y | a, phi phi^T + diag noise).

    With r = y - a and the posterior mean w of v the square r.(phi phi^T + D)^-1 r is |D^-1/2 (r - phi w)|^2 + |w|^2:
    a sum of squares, so nothing cancels.
    """
    variance = jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)
    found = posterior(seen, y, variance)
    error = y - seen.mean - seen.features @ found.mean
    squares = jnp.sum(error**2 / variance) + jnp.sum(found.mean**2)
    return -0.5 * (squares + found.determinant + jnp.sum(jnp.log(2 * jnp.pi * variance)))


class Sums(NamedTuple):
    """Sums over rows with noise D that say all there is about v and the bound (P10): additive over blocks of rows.

    precision = phi^T D^-1 phi, shift = phi^T D^-1 (y - a), square = (y - a).D^-1 (y - a), scale = sum_n log 2 pi D_n,
    rest = sum_n rest_n / D_n.
    """

    precision: Float[Array, "M M"]
    shift: Float[Array, " M"]
    square: Float[Array, ""]
    scale: Float[Array, ""]
    rest: Float[Array, ""]

    def plus(self, other: "Sums") -> "Sums":
        """Of the rows of both."""
        return Sums(*(one + more for one, more in zip(self, other, strict=True)))

    def weights(self) -> Weights:
        """q(v) of (P4)."""
        return weights_of(self.shift, self.precision)

    def log_density(self) -> Float[Array, ""]:
        """log N(y | a, phi phi^T + D) = -1/2 [square - shift.v^ + log|B| + scale] with the posterior mean v^ of v.

        square - shift.v^ cancels where the signal is far above the noise; `titsias_bound` sums squares instead.
        """
        found = self.weights()
        return -0.5 * (self.square - jnp.sum(self.shift * found.mean) + found.determinant + self.scale)


@highest_precision
def sums_of(seen: View, y: Float[Array, " N"], noise: Noise, real: Bool[Array, " N"]) -> Sums:
    """The sums of the rows that are real."""
    variance = jnp.broadcast_to(jnp.asarray(noise, y.dtype), y.shape)
    precision = real / variance
    weighted, residual = seen.features * precision[:, None], y - seen.mean
    squares = jnp.sum(residual**2 * precision)
    scale = jnp.sum(jnp.where(real, jnp.log(2 * jnp.pi * variance), 0.0))
    rest = jnp.sum(seen.rest * precision)
    return Sums(weighted.T @ seen.features, weighted.T @ residual, squares, scale, rest)


def chosen_inputs(x: Float[Array, "N D"], count: int) -> Float[Array, "M D"]:
    """`count` rows of x that lie far from each other: each next one is farthest from those chosen (Gonzalez 1985).

    The first is the row nearest to the mean. Raises ValueError where x has fewer rows.
    """
    if not 0 < count <= x.shape[0]:
        raise ValueError(f"expected 1 to {x.shape[0]} inducing points, got {count}; x has that many rows")

    def choose(nearest: Array, _: None) -> tuple[Array, Array]:
        best = jnp.argmax(nearest)
        return jnp.minimum(nearest, jnp.sum((x - x[best]) ** 2, axis=-1)), best

    start = jnp.argmin(jnp.sum((x - x.mean(axis=0)) ** 2, axis=-1))
    first = jnp.sum((x - x[start]) ** 2, axis=-1)
    _, rest = jax.lax.scan(choose, first, length=count - 1)
    return x[jnp.concatenate([start[None], rest])]
