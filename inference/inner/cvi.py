"""Mirror-descent / conjugate-computation variational inference (MD section 3.3): C1, C2, with a safe step size.

q(f) is the prior times diagonal sites. A step moves the sites towards the target of C1 by a fraction rho:

    (C1)  W^ = -2 g_v,  h^ = g_m + W^ m,   g = gradient of E_q[log p(y | f)] in the marginal means and variances
    (C2)  (h, W) <- (1 - rho) (h, W) + rho (h^, W^)

That is a natural-gradient step of length rho. The full step oscillates where the output scale is large, so rho is
chosen by the Barzilai-Borwein secant rule, rho = <s, s> / <s, y> with s the last step and y the change of the
direction; at most three times the last one, and FIRST_STEP at first: from the prior, whose variances are the largest,
the full step overshoots most. Its inner product is that of the marginals N(m_n, v_n) point by point, about their means:
v h h' + v^2 W W' / 2. It is not the Fisher metric of q(f), which has V_nk in the places of the products of deviations
and is the metric of the step itself; the correlations between points only matter for the length, and are left out.
Lengths beyond 1 shorten the slow directions of large output scales; a precision that such a step would make negative
becomes 0. A step that would lower the ELBO is refused and retried at half its length; one of SHORTEST_STEP that is
refused would be refused for ever, and the code is STALLED. Each step costs one factorisation and one gradient, refused
or not.

A likelihood that is not log-concave asks for negative precisions. With diagonal sites W^ is then the nearest target in
the cone W >= 0, in the Fisher metric of q(f) (`cone.py`, C8): the step remains one of ascent, and where it leads is the
best bound over W >= 0. For log-concave ones W^ is negative by the noise of few nodes alone, and set to 0; so is what is
negative of blocks.

With `BlockSites` q couples the classes of a point: g_v is the gradient in the covariance [C, C] of each point,
W^ and the sites are blocks, no step is longer than 1, so that they stay positive semi-definite. A likelihood that knows
differences of logits only is shown those alone, so that W^ is 0 along their common shift, sampled or not.

With `Curvature.EXPECTED` W^ is the mean over the nodes of the likelihood's own curvature, never negative.
"""

import enum
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fewshot.inference.inner.base import (
    Code,
    FixedPoint,
    Inference,
    Info,
    Mask,
    Traits,
    classes_of,
    constructor,
    expected_data,
    finite_code,
    gaussian_posterior,
    mask_sites,
    relative_distance,
    sites_held,
)
from fewshot.inference.inner.cone import nearest_precisions, squared_correlations
from fewshot.models.expectations import Exact, ExpectationRule, MonteCarlo, Points, expect
from fewshot.models.gaussian import (
    AnyMarginals,
    AnySites,
    BlockSites,
    DiagonalPosterior,
    GaussianPosterior,
    GaussianPrior,
    LowRankPosterior,
    Posterior,
    Sites,
    highest_precision,
)
from fewshot.models.likelihoods.base import Labels, Likelihood, SmoothLikelihood

FIRST_STEP = 0.2  # of 0.1, 0.2, 0.3, 0.5 and 1 the one with the smallest gap after 3 and 5 steps, on average
SHORTEST_STEP = 0.02
SiteKind = type[Sites] | type[BlockSites]


class CVIState(NamedTuple):
    """Sites, the target C1 computed at them, and what the step-size rule remembers.

    elbo, residual and the number of clipped precisions belong to the sites; rho is the length of the next step; points
    are the nodes of the task's expectations (None: deterministic). excess: half of what the projection (C8) added to
    the precisions of the target (None: none is projected).
    """

    sites: Sites | BlockSites
    target: Sites | BlockSites
    elbo: Float[Array, ""]
    residual: Float[Array, ""]
    clipped: Int[Array, ""]
    rho: Float[Array, ""]
    points: Points | None
    excess: Float[Array, "C N"] | None


class Curvature(enum.Enum):
    """Where W^ of (C1) comes from."""

    GRADIENT = "gradient"  # the bound's own estimate, with which alone the fixed point is stationary
    EXPECTED = "expected"  # the mean over the nodes of the curvature of `local_sites`, never negative


@constructor("cvi", needs=Likelihood, called="log_prob, expected_log_prob and predict")
def cvi(
    likelihood: Likelihood,
    *,
    rho: float | None = None,
    sites: SiteKind = Sites,
    curvature: Curvature = Curvature.GRADIENT,
    expectation: ExpectationRule | None = None,
) -> Inference:
    """Conjugate-computation VI for any tier-1 likelihood.

    rho: None chooses every step's length; a number in (0, 1] is used as it is, without a safeguard (as published).
    sites: `Sites`, or `BlockSites` for a q in which the classes of a point are dependent; those are dense and limited
    to N C = 4,000. expectation: rule for E_q[log p(y | f)]; default MonteCarlo(256), which leaves 0.05 to 0.4 nats
    against Exact(). Raises TypeError for an object that is no likelihood, for a curvature that it does not offer and
    for other kinds of sites, ValueError for rho outside (0, 1].
    """
    rule = MonteCarlo() if expectation is None else expectation
    target = _Target(likelihood, sites, curvature)
    _check(rho, target, rule)

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Labels, mask: Mask | None = None) -> CVIState:
        points = rule.points(key, prior.mean.shape[0], prior.mean.dtype)
        first, start = jnp.asarray(FIRST_STEP if rho is None else rho, prior.mean.dtype), sites.zero(prior)
        # Where no precision is projected, marginals will do, which take no factorisation.
        q = prior.given(start) if target.projected else None
        known = start.prior_marginals(prior) if q is None else q.marginals
        found = target.at(known, start, y, mask, points, prior, q)
        infinite = jnp.full_like(found.data, jnp.inf)
        return CVIState(start, found.sites, found.data, infinite, found.clipped, first, points, found.excess)

    def step(
        key: Key[Array, ""], state: CVIState, prior: GaussianPrior, y: Labels, mask: Mask | None = None
    ) -> tuple[CVIState, Info]:
        del key
        direction = _subtract(state.target, state.sites)
        q = prior.given(proposal := state.sites.moved(state.rho, direction))
        found = target.at(q.marginals, proposal, y, mask, state.points, prior, q)
        elbo = found.data - q.kl
        if rho is not None:
            accepted, stalled, following = jnp.asarray(True), jnp.asarray(False), state.rho
        else:
            accepted = elbo >= state.elbo - _rounding(found.data, q.kl, y.size * prior.mean.shape[0])
            stalled = ~accepted & (state.rho <= SHORTEST_STEP)
            following = _following_length(state.rho, accepted, direction, _subtract(found.sites, proposal), q.marginals)
        residual, code = _residual(q, proposal, found.slope, found.sites), finite_code(elbo, *proposal)
        moved = CVIState(proposal, found.sites, elbo, residual, found.clipped, following, state.points, found.excess)
        state = jax.tree.map(partial(jnp.where, accepted), moved, state._replace(rho=following))
        code = jnp.where(stalled & (code == Code.OK), Code.STALLED, code)
        return state, Info(state.elbo, state.residual, code, state.clipped)

    def elbo(state: CVIState, posterior: Posterior, y: Labels, mask: Mask | None = None) -> Array:
        return target.data(posterior.marginals, y, mask, state.points) - posterior.kl

    update = partial(_update, target)
    fixed_point = FixedPoint(lambda state: state.sites, lambda state, sites: state._replace(sites=sites), update)
    traits = Traits("cvi", free_sites=True)
    return Inference(init, step, sites_held, gaussian_posterior, elbo, _log_evidence, traits, fixed_point)


def _log_evidence(state: CVIState, prior: GaussianPrior) -> Float[Array, ""]:
    """log Z of the sites, with the slope in the variances that projected precisions leave to it (H7)."""
    found = prior.log_normaliser(state.sites)
    if state.excess is None:
        return found
    left_out = jnp.vdot(jax.lax.stop_gradient(state.excess), prior.given(state.sites).variance)
    return found + left_out - jax.lax.stop_gradient(left_out)


def _update(target: "_Target", state: CVIState, prior: GaussianPrior, y: Array, mask: Mask | None) -> AnySites:
    """The target of (C1) at the sites of a state."""
    q = prior.given(state.sites)
    return target.at(q.marginals, state.sites, y, mask, state.points, prior, q).sites


def _following_length(
    rho: Array, accepted: Array, direction: AnySites, there: AnySites, marginals: AnyMarginals
) -> Float[Array, ""]:
    """Length of the next step: by the secant rule after one that was accepted, else half; `there` is where it led."""
    secant = _secant_length(rho, direction, _subtract(direction, there), marginals)
    return jnp.where(accepted, secant, jnp.maximum(0.5 * rho, SHORTEST_STEP))


def _rounding(data: Array, kl: Array, terms: int) -> Array:
    """What a bound may fall by for rounding: it is a difference of sums of so many terms of order one."""
    return 100 * jnp.finfo(data.dtype).eps * (jnp.abs(data) + kl + terms)


def _check(rho: float | None, target: "_Target", rule: ExpectationRule) -> None:
    """Raises TypeError or ValueError for arguments that make no sense, or none together."""
    if rho is not None and not 0 < rho <= 1:
        raise ValueError(f"rho must lie in (0, 1], got {rho}; None chooses it at every step")
    if target.kind not in (Sites, BlockSites) or not isinstance(target.curvature, Curvature):
        got = f"{target.kind!r} and {target.curvature!r}"
        raise TypeError(f"expected sites=Sites or BlockSites and a Curvature, got {got}")
    if target.curvature is Curvature.GRADIENT:
        return
    if not isinstance(target.likelihood, SmoothLikelihood):
        name = type(target.likelihood).__name__
        raise TypeError(f"Curvature.EXPECTED needs local_sites; {name} offers none: use Curvature.GRADIENT")
    if isinstance(rule, Exact):
        raise ValueError("Curvature.EXPECTED is a mean over nodes, of which Exact has none: use Curvature.GRADIENT")


class Found(NamedTuple):
    """Target sites (C1), E_q[log p(y | f)], its slope g_m, how many precisions were negative, and their `excess`."""

    sites: Sites | BlockSites
    data: Float[Array, ""]
    slope: Float[Array, "C N"]
    clipped: Int[Array, ""]
    excess: Float[Array, "C N"] | None


@dataclass(frozen=True)
class _Target:
    """What (C1) asks for under one likelihood, as one kind of sites.

    Where `projected`, diagonal precisions are the nearest ones in the cone W >= 0 (C8).
    """

    likelihood: Likelihood
    kind: SiteKind
    curvature: Curvature

    @property
    def projected(self) -> bool:
        """Whether negative precisions are more than the noise of few nodes, and not blocks."""
        free = self.curvature is Curvature.GRADIENT and not getattr(self.likelihood, "log_concave", False)
        return free and self.kind is Sites

    def data(self, marginals: AnyMarginals, y: Array, mask: Mask | None, points: Points | None) -> Array:
        """E_q log p(y | f), summed over the real points."""
        return expected_data(self.likelihood, y, self._seen(marginals, mask), points, mask)

    def at(
        self,
        marginals: AnyMarginals,
        current: PyTree,
        y: Array,
        mask: Mask | None,
        points: Points | None,
        prior: GaussianPrior,
        posterior: PyTree | None,
    ) -> Found:
        """The target at a posterior with the current sites; without the posterior nothing is projected."""
        value, slopes = jax.value_and_grad(lambda q: self.data(q, y, mask, points))(marginals)
        wanted = self.kind.curvature(slopes)
        if self.curvature is Curvature.EXPECTED:
            wanted = self.kind.of_blocks(self._expected(marginals, y, mask, points))
        precision, clipped = self.kind.nonnegative(wanted)
        excess = None
        if self.projected and posterior is not None:
            real = _real(mask, wanted.shape)
            precision = _projected(prior, posterior, wanted, current, real)
            excess = jnp.where(real, 0.5 * (precision - wanted), 0.0)
        found = mask_sites(self.kind.with_slope(slopes.mean, precision, marginals.mean), mask)
        return Found(found, value, slopes.mean, clipped, excess)

    def _seen(self, marginals: AnyMarginals, mask: Mask | None) -> AnyMarginals:
        """What the likelihood knows of q: of coupled classes the differences, if it knows those only."""
        differences_only = getattr(self.likelihood, "differences_only", False)
        return marginals.differences(classes_of(mask)) if differences_only else marginals

    def _expected(self, marginals: AnyMarginals, y: Array, mask: Mask | None, points: Points | None) -> Array:
        """E_q of the local curvature, [N, C, C]."""
        if points is None:
            raise ValueError("Curvature.EXPECTED is a mean over nodes, and the expectation rule gave none")
        assert isinstance(self.likelihood, SmoothLikelihood)  # as was checked
        smooth = self.likelihood

        def blocks(f: Array) -> Array:
            return smooth.local_sites(y, f, classes_of(mask)).blocks()

        return expect(blocks, self._seen(marginals, mask), points)


def _projected(
    prior: GaussianPrior,
    posterior: DiagonalPosterior | LowRankPosterior,
    wanted: Array,
    current: Sites,
    real: Bool[Array, "C N"],
) -> Float[Array, "C N"]:
    """The precisions nearest to those wanted in the cone W >= 0 (C8)."""

    def metric() -> Array:
        return squared_correlations(prior, posterior)

    return nearest_precisions(metric, posterior.variance, wanted, current.precision, real)


def _real(mask: Mask | None, shape: tuple[int, ...]) -> Bool[Array, "C N"]:
    """The pairs of class and point that are no padding."""
    present = jnp.ones(shape, bool)
    return present if mask is None else present & mask.classes[:, None] & mask.points


def _residual(posterior: GaussianPosterior, sites: AnySites, slope: Array, target: AnySites) -> Array:
    """max(|alpha - g_m|, |W - W^| v), relative to max(1, |g_m|): zero exactly at the fixed point."""
    mean_part = relative_distance(posterior.alpha, slope, slope)
    return jnp.maximum(mean_part, sites.distance(target, posterior.marginals, slope))


@highest_precision
def _secant_length(rho: Array, direction: PyTree, change: PyTree, marginals: AnyMarginals) -> Array:
    """Barzilai-Borwein length <s, s> / <s, y> with s = rho direction and y = change, at most 3 rho.

    It divides only where the ratio is below that, so that unrolling past the fixed point has a finite derivative.
    """
    squared, curvature = rho * direction.inner(direction, marginals), direction.inner(change, marginals)
    longest = jnp.minimum(direction.longest_step, 3.0 * rho)
    curved = squared < longest * curvature
    length = jnp.where(curved, squared / jnp.where(curved, curvature, 1.0), longest)
    return jnp.where(squared > 0, jnp.maximum(length, SHORTEST_STEP), 1.0)


def _subtract(left: PyTree, right: PyTree) -> PyTree:
    return jax.tree.map(jnp.subtract, left, right)
