"""Plain gradient ascent on a free Gaussian: the baseline that mirror descent is compared with (MD section 4.3).

q(u) = N(mu, L L^T) per class in the whitened basis of G8, f = a + S u. It has no sites, so only the objectives `elbo`
and `predictive` with the hyper-gradient `unroll` can use it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from fewshot.inference.inner.base import Code, Inference, Info, Mask, Traits, constructor, expected_data, finite_code
from fewshot.models.expectations import ExpectationRule, MonteCarlo, Points
from fewshot.models.gaussian import GaussianPrior, Marginals, Query, highest_precision, prior_root, root_of
from fewshot.models.likelihoods.base import Labels, Likelihood


class GradientState(NamedTuple):
    """Whitened mean mu [C, R], Cholesky factor L [C, R, R] of the covariance, and the task's nodes."""

    mean: Float[Array, "C R"]
    factor: Float[Array, "C R R"]
    points: Points | None


class FreeGaussian(NamedTuple):
    """q(f) pushed forward from q(u): mean and variance [C, N], kl [], and what prediction needs."""

    mean: Float[Array, "C N"]
    variance: Float[Array, "C N"]
    kl: Float[Array, ""]
    whitened_mean: Float[Array, "C R"]
    whitened_factor: Float[Array, "C R R"]
    pseudo_inverse: Float[Array, "N R"]
    indefinite: Array

    @property
    def marginals(self) -> Marginals:
        """Marginals of q at the labelled points."""
        return Marginals(self.mean, self.variance)

    @highest_precision
    def predict(self, query: Query) -> Marginals:
        """Marginals at new inputs: E[u | f] carries q, the rest of k_** keeps its prior variance."""
        basis = query.cross @ self.pseudo_inverse
        spread = jnp.sum(jnp.einsum("qr,crs->cqs", basis, self.whitened_factor) ** 2, axis=-1)
        unexplained = query.variance - jnp.sum(basis**2, axis=-1)
        return Marginals(query.mean + self.whitened_mean @ basis.T, jnp.maximum(unexplained, 0.0) + spread)

    @highest_precision
    def draws(self, key: Key[Array, ""], prior: GaussianPrior, count: int) -> Float[Array, "1 D C N"]:
        """Joint draws of f at the labelled points, from the whitened basis."""
        normal = jax.random.normal(key, (count, *self.whitened_mean.shape), self.mean.dtype)
        return (self.mean + jnp.einsum("nr,crs,dcs->dcn", root_of(prior), self.whitened_factor, normal))[None]


@constructor("gradient", needs=Likelihood, called="log_prob and expected_log_prob")
def gradient(
    likelihood: Likelihood, *, learning_rate: float = 0.02, expectation: ExpectationRule | None = None
) -> Inference:
    """Gradient ascent on the ELBO in (mu, L), from the prior. MD trains at 0.1 / 0.02 and studies 0.005.

    Raises TypeError for an object that is no likelihood, ValueError for a learning rate that is not positive.
    """
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")
    rule = MonteCarlo() if expectation is None else expectation

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None = None) -> GradientState:
        del y, mask
        classes, dtype = prior.mean.shape[0], prior.mean.dtype
        rank = prior.covariance.shape[-1] if prior.root is None else prior.root.shape[-1]
        identity = jnp.broadcast_to(jnp.eye(rank, dtype=dtype), (classes, rank, rank))
        return GradientState(jnp.zeros((classes, rank), dtype), identity, rule.points(key, classes, dtype))

    def elbo(state: GradientState, posterior: FreeGaussian, y: Labels, mask: Mask | None = None) -> Array:
        return expected_data(likelihood, y, posterior.marginals, state.points, mask) - posterior.kl

    def step(
        key: Key[Array, ""], state: GradientState, prior: GaussianPrior, y: Labels, mask: Mask | None = None
    ) -> tuple[GradientState, Info]:
        del key

        def bound(mean: Array, factor: Array) -> tuple[Array, Array]:
            posterior = free_posterior(state._replace(mean=mean, factor=factor), prior)
            return elbo(state, posterior, y, mask), posterior.indefinite

        slopes, indefinite = jax.grad(bound, argnums=(0, 1), has_aux=True)(state.mean, state.factor)
        moved = state._replace(
            mean=state.mean + learning_rate * slopes[0],
            factor=state.factor + learning_rate * jnp.tril(slopes[1]),
        )
        value, _ = bound(moved.mean, moved.factor)
        residual = jnp.maximum(jnp.max(jnp.abs(slopes[0])), jnp.max(jnp.abs(jnp.tril(slopes[1]))))
        code = jnp.where(indefinite, Code.INDEFINITE_KERNEL, finite_code(value, residual))
        return moved, Info(value, residual, code, jnp.asarray(0))

    return Inference(init, step, None, free_posterior, elbo, None, Traits("gradient"))


@highest_precision
def free_posterior(state: GradientState, prior: GaussianPrior) -> FreeGaussian:
    """q(f) of the state under a prior, and its KL from it in the whitened basis."""
    root = prior_root(prior)
    mean = prior.mean + state.mean @ root.factor.T
    variance = jnp.sum(jnp.einsum("nr,crs->cns", root.factor, state.factor) ** 2, axis=-1)
    diagonal = jnp.abs(jnp.diagonal(state.factor, axis1=-2, axis2=-1))
    kl = (
        0.5 * jnp.sum(state.factor**2) + 0.5 * jnp.sum(state.mean**2) - 0.5 * diagonal.size - jnp.sum(jnp.log(diagonal))
    )
    return FreeGaussian(mean, variance, kl, state.mean, state.factor, root.pseudo_inverse, root.indefinite)
