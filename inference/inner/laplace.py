"""Laplace's approximation: a Gaussian at the mode of p(f | y), found by Newton's method (docs/softmax.md).

At the mode the likelihood's `local_sites` have the slope of log p(y | f) and its curvature L, so that the posterior is
the prior times these sites and its mean is the mode. A Newton step goes to the mean of the prior times the sites of now

    psi(f) = log p(y | f) - 1/2 (f - a).alpha,  alpha = K^-1 (f - a), carried along and never solved for;

a step that would lower psi is refused and retried at half its length. Where L is the Fisher information and not the
Hessian (logistic-softmax) the mode is the same and the convergence linear.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import (
    FixedPoint,
    Inference,
    Info,
    Mask,
    Traits,
    classes_of,
    constructor,
    expected_data,
    finite_code,
    mask_sites,
    relative_distance,
    sum_over_points,
)
from fewshot.models.expectations import ExpectationRule, MonteCarlo, Points
from fewshot.models.gaussian import (
    AnySites,
    GaussianPosterior,
    GaussianPrior,
    Posterior,
)
from fewshot.models.likelihoods.base import SmoothLikelihood

SHORTEST_STEP = 1e-3


class Mode(NamedTuple):
    """Latents f and alpha = K^-1 (f - a), both [C, N]."""

    f: Float[Array, "C N"]
    alpha: Float[Array, "C N"]


class LaplaceState(NamedTuple):
    """Where the search for the mode stands, and the mean that the next Newton step goes to.

    objective is psi, elbo and residual belong to f, rho is the length of the next step; points are the nodes of the
    bound's expectations; the sites depend on labels and mask.
    """

    mode: Mode
    target: Mode
    objective: Float[Array, ""]
    elbo: Float[Array, ""]
    residual: Float[Array, ""]
    rho: Float[Array, ""]
    points: Points | None
    y: Int[Array, " N"]
    mask: Mask | None


@constructor("laplace", needs=SmoothLikelihood, called="local_sites")
def laplace(likelihood: SmoothLikelihood, *, expectation: ExpectationRule | None = None) -> Inference:
    """Laplace's approximation with block sites, for any likelihood that offers `local_sites`.

    expectation: rule for the bound's E_q[log p(y | f)], which the search itself does not use; default MonteCarlo(256).
    Raises TypeError for a likelihood without `local_sites`.
    """
    rule = MonteCarlo() if expectation is None else expectation

    sites_at, log_likelihood = partial(_sites_at, likelihood), partial(_log_likelihood, likelihood)

    def at(
        mode: Mode, rho: Array, points: Points | None, prior: GaussianPrior, y: Array, mask: Mask | None
    ) -> LaplaceState:
        local = sites_at(mode.f, y, mask)
        q = prior.given(local)
        objective = log_likelihood(mode.f, y, mask) - 0.5 * jnp.sum((mode.f - prior.mean) * mode.alpha)
        bound = expected_data(likelihood, y, q.marginals, points, mask) - q.kl
        slope = local.shift - local.times(mode.f)
        residual = relative_distance(mode.alpha, slope, slope)
        return LaplaceState(mode, Mode(q.mean, q.alpha), objective, bound, residual, rho, points, y, mask)

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None) -> LaplaceState:
        points = rule.points(key, prior.mean.shape[0], prior.mean.dtype)
        start = Mode(prior.mean, jnp.zeros_like(prior.mean))
        return at(start, jnp.ones((), prior.mean.dtype), points, prior, y, mask)

    def step(
        key: Key[Array, ""], state: LaplaceState, prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None
    ) -> tuple[LaplaceState, Info]:
        del key
        proposal = jax.tree.map(lambda here, there: here + state.rho * (there - here), state.mode, state.target)
        moved = at(proposal, jnp.minimum(2 * state.rho, 1.0), state.points, prior, y, mask)
        rounding = 100 * jnp.finfo(moved.objective.dtype).eps * (jnp.abs(state.objective) + y.size)
        accepted = moved.objective >= state.objective - rounding
        refused = state._replace(rho=jnp.maximum(0.5 * state.rho, SHORTEST_STEP))
        kept = jax.tree.map(partial(jnp.where, accepted), moved, refused)
        return kept, Info(kept.elbo, kept.residual, finite_code(moved.objective, *proposal), jnp.asarray(0))

    def sites(state: LaplaceState) -> AnySites:
        return sites_at(state.mode.f, state.y, state.mask)

    def posterior(state: LaplaceState, prior: GaussianPrior) -> GaussianPosterior:
        return prior.given(sites(state))

    def log_evidence(state: LaplaceState, prior: GaussianPrior) -> Float[Array, ""]:
        """log p(y) by Laplace: log Z of the sites, and what log p(y | f) and the sites differ by at f."""
        f, local = state.mode.f, sites(state)
        log_sites = jnp.sum(local.shift * f) - 0.5 * jnp.sum(f * local.times(f))
        return prior.log_normaliser(local) + log_likelihood(f, state.y, state.mask) - log_sites

    def update(state: LaplaceState, prior: GaussianPrior, y: Array, mask: Mask | None) -> Array:
        return prior.given(sites_at(state.mode.f, y, mask)).mean

    def write(state: LaplaceState, f: Array) -> LaplaceState:
        return state._replace(mode=state.mode._replace(f=f))

    fixed_point, elbo = FixedPoint(lambda state: state.mode.f, write, update), partial(_bound, likelihood)
    traits = Traits("laplace", evidence_value=True)
    return Inference(init, step, sites, posterior, elbo, log_evidence, traits, fixed_point)


def _bound(
    likelihood: SmoothLikelihood,
    state: LaplaceState,
    posterior: Posterior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
) -> Float[Array, ""]:
    return expected_data(likelihood, y, posterior.marginals, state.points, mask) - posterior.kl


def _sites_at(likelihood: SmoothLikelihood, f: Array, y: Array, mask: Mask | None) -> AnySites:
    return mask_sites(likelihood.local_sites(y, f, classes_of(mask)), mask)


def _log_likelihood(likelihood: SmoothLikelihood, f: Array, y: Array, mask: Mask | None) -> Array:
    return sum_over_points(likelihood.log_prob(y, f, classes_of(mask)), mask)
