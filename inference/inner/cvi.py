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

With `covariance="block"` q couples the classes of a point: g_v is the gradient in the covariance [C, C] of each point,
W^ and the sites are blocks, no step is longer than 1, so that they stay positive semi-definite. A likelihood that knows
differences of logits only is shown those alone, so that W^ is 0 along their common shift, sampled or not.

With `curvature="expected"` W^ is the mean over the nodes of the likelihood's own curvature, never negative.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from fewshot.inference.inner.base import (
    Code,
    FixedPoint,
    InferenceKernel,
    Info,
    Mask,
    Traits,
    classes_of,
    expected_data,
    finite_code,
    gaussian_posterior,
    mask_sites,
    prior_marginals_like,
    relative_distance,
    require,
    sites_held,
)
from fewshot.inference.inner.cone import nearest_precisions, squared_correlations
from fewshot.models.block_gaussian import JointMarginals
from fewshot.models.dense_sites import BlockSites, positive_part, zero_block_sites
from fewshot.models.expectations import Exact, ExpectationRule, MonteCarlo, Points, expect
from fewshot.models.gaussian import (
    GaussianPrior,
    Marginals,
    Sites,
    condition,
    highest_precision,
    log_normaliser,
    zero_sites,
)
from fewshot.models.likelihoods.base import Likelihood, SmoothLikelihood

FIRST_STEP = 0.2  # of 0.1, 0.2, 0.3, 0.5 and 1 the one with the smallest gap after 3 and 5 steps, on average
SHORTEST_STEP, LONGEST_STEP = 0.02, 8.0


class CVIState(NamedTuple):
    """Sites, the target C1 computed at them, and what the step-size rule remembers.

    elbo, residual and the number of clipped precisions belong to the sites; rho is the length of the next step; points
    are the nodes of the task's expectations (None: deterministic).
    """

    sites: Sites | BlockSites
    target: Sites | BlockSites
    elbo: Float[Array, ""]
    residual: Float[Array, ""]
    clipped: Int[Array, ""]
    rho: Float[Array, ""]
    points: Points | None


def cvi(
    likelihood: Likelihood,
    *,
    rho: float | None = None,
    covariance: str = "diagonal",
    curvature: str = "gradient",
    expectation: ExpectationRule | None = None,
) -> InferenceKernel:
    """Conjugate-computation VI for any tier-1 likelihood.

    rho: None chooses every step's length; a number in (0, 1] is used as it is, without a safeguard (as published).
    covariance: "diagonal" sites, or "block" ones for a q in which the classes of a point are dependent; those are dense
    and limited to N C = 4,000. curvature: W^ from the "gradient" of the bound's own estimate, with which alone the
    fixed point is stationary, or "expected": the mean over the nodes of the curvature of the likelihood's
    `local_sites`, never negative. expectation: rule for E_q[log p(y | f)]; default MonteCarlo(256), which leaves 0.05
    to 0.4 nats against Exact(). Raises TypeError for an object that is no likelihood, or for a curvature that it does
    not offer, ValueError for rho outside (0, 1] and for other words.
    """
    require(isinstance(likelihood, Likelihood), "cvi", likelihood, "log_prob, expected_log_prob and predict")
    if rho is not None and not 0 < rho <= 1:
        raise ValueError(f"rho must lie in (0, 1], got {rho}; None chooses it at every step")
    if covariance not in ("diagonal", "block"):
        raise ValueError(f'covariance must be "diagonal" or "block", got {covariance!r}')
    rule = MonteCarlo() if expectation is None else expectation
    _check_curvature(curvature, likelihood, rule)
    block, expected = covariance == "block", curvature == "expected"
    projected = not (block or expected or getattr(likelihood, "log_concave", False))

    def target_at(posterior: Any, current: Any, prior: GaussianPrior, y: Array, mask: Mask | None, points: Any) -> Any:
        """`_target` at the posterior with the sites of now."""
        cone = _cone(prior, posterior, current, mask) if projected else _not_below_zero
        return _target(likelihood, expected, posterior.marginals, y, mask, points, cone)

    def init(key: Key[Array, ""], prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None) -> CVIState:
        points = rule.points(key, prior.mean.shape[0], prior.mean.dtype)
        first = jnp.asarray(FIRST_STEP if rho is None else rho, prior.mean.dtype)
        start = zero_block_sites(prior) if block else zero_sites(prior)
        if projected:
            target, data, _, clipped = target_at(condition(prior, start), start, prior, y, mask, points)
        else:
            marginals = prior_marginals_like(start, prior)
            target, data, _, clipped = _target(likelihood, expected, marginals, y, mask, points)
        return CVIState(start, target, data, jnp.full_like(data, jnp.inf), clipped, first, points)

    def step(
        key: Key[Array, ""], state: CVIState, prior: GaussianPrior, y: Int[Array, " N"], mask: Mask | None = None
    ) -> tuple[CVIState, Info]:
        del key
        direction = _subtract(state.target, state.sites)
        proposal = _add(state.sites, state.rho, direction)
        posterior = condition(prior, proposal)
        target, data, slope, clipped = target_at(posterior, proposal, prior, y, mask, state.points)
        elbo = data - posterior.kl
        if rho is not None:
            accepted, stalled, following = jnp.asarray(True), jnp.asarray(False), state.rho
        else:
            # A bound is a difference of sums of N C terms of order one: that is what its rounding is relative to.
            magnitude = jnp.abs(data) + posterior.kl + y.size * prior.mean.shape[0]
            rounding = 100 * jnp.finfo(elbo.dtype).eps * magnitude
            accepted = elbo >= state.elbo - rounding
            stalled = ~accepted & (state.rho <= SHORTEST_STEP)
            change = _subtract(direction, _subtract(target, proposal))
            secant = _secant_length(state.rho, direction, change, posterior, 1.0 if block else LONGEST_STEP)
            following = jnp.where(accepted, secant, jnp.maximum(0.5 * state.rho, SHORTEST_STEP))
        residual, code = _residual(posterior, proposal, slope, target), finite_code(elbo, *proposal)
        moved = CVIState(proposal, target, elbo, residual, clipped, following, state.points)
        state = jax.tree.map(partial(jnp.where, accepted), moved, state._replace(rho=following))
        code = jnp.where(stalled & (code == Code.OK), Code.STALLED, code)
        return state, Info(state.elbo, state.residual, code, state.clipped)

    def elbo(state: CVIState, posterior: Any, y: Int[Array, " N"], mask: Mask | None = None) -> Array:
        return _data(likelihood, posterior.marginals, y, mask, state.points) - posterior.kl

    def log_evidence(state: CVIState, prior: GaussianPrior) -> Float[Array, ""]:
        return log_normaliser(prior, state.sites)

    def update(state: CVIState, prior: GaussianPrior, y: Array, mask: Mask | None) -> Any:
        return target_at(condition(prior, state.sites), state.sites, prior, y, mask, state.points)[0]

    fixed_point = FixedPoint(lambda state: state.sites, lambda state, sites: state._replace(sites=sites), update)
    traits = Traits("cvi", free_sites=True)
    return InferenceKernel(init, step, sites_held, gaussian_posterior, elbo, log_evidence, traits, fixed_point)


def _check_curvature(curvature: str, likelihood: Likelihood, rule: ExpectationRule) -> None:
    if curvature not in ("gradient", "expected"):
        raise ValueError(f'curvature must be "gradient" or "expected", got {curvature!r}')
    if curvature == "gradient":
        return
    if not isinstance(likelihood, SmoothLikelihood):
        raise TypeError(
            f'curvature="expected" needs local_sites; {type(likelihood).__name__} offers none: use "gradient"'
        )
    if isinstance(rule, Exact):
        raise ValueError('curvature="expected" is a mean over nodes, of which Exact has none: use "gradient"')


def _not_below_zero(precision: Array) -> Array:
    return jnp.maximum(precision, 0.0)


def _cone(prior: GaussianPrior, posterior: Any, current: Sites, mask: Mask | None) -> Callable[[Array], Array]:
    """Precisions wanted at a posterior -> the nearest ones in the cone W >= 0 (C8)."""
    present = jnp.ones(current.precision.shape, bool)
    real = present if mask is None else present & mask.classes[:, None] & mask.points

    def metric() -> Array:
        return squared_correlations(prior, posterior)

    return lambda wanted: nearest_precisions(metric, posterior.variance, wanted, current.precision, real)


def _target(
    likelihood: Likelihood,
    expected: bool,
    marginals: Marginals | JointMarginals,
    y: Array,
    mask: Mask | None,
    points: Points | None,
    cone: Callable[[Array], Array] = _not_below_zero,
) -> tuple[Any, Array, Array, Array]:
    """Target sites (C1), E_q[log p(y | f)], its slope g_m [C, N], and how many precisions were to be negative."""
    value, (slope, gradient) = jax.value_and_grad(lambda q: _data(likelihood, q, y, mask, points))(marginals)
    if isinstance(marginals, JointMarginals):
        blocks = -(gradient + jnp.swapaxes(gradient, 1, 2))
        blocks = _expected_blocks(likelihood, marginals, y, mask, points) if expected else blocks
        precision, clipped = positive_part(blocks)
        sites: Any = BlockSites(slope, precision)
        sites = sites._replace(shift=slope + sites.times(marginals.mean))
    else:
        curvature = -2 * gradient
        if expected:
            blocks = _expected_blocks(likelihood, marginals, y, mask, points)
            curvature = jnp.diagonal(blocks, axis1=1, axis2=2).T
        precision, clipped = cone(curvature), jnp.sum(curvature < 0)
        sites = Sites(slope + precision * marginals.mean, precision)
    return mask_sites(sites, mask), value, slope, clipped


def _data(
    likelihood: Likelihood, marginals: Marginals | JointMarginals, y: Array, mask: Mask | None, points: Points | None
) -> Array:
    """E_q log p(y | f), summed over the real points."""
    return expected_data(likelihood, y, _seen(likelihood, marginals, mask), points, mask)


def _seen(
    likelihood: Likelihood, marginals: Marginals | JointMarginals, mask: Mask | None
) -> Marginals | JointMarginals:
    """What the likelihood knows of q: of coupled classes the differences, if it knows those only."""
    if isinstance(marginals, JointMarginals) and likelihood.prior_mean is None:
        return marginals.differences(classes_of(mask))
    return marginals


def _expected_blocks(
    likelihood: Any, marginals: Marginals | JointMarginals, y: Array, mask: Mask | None, points: Points | None
) -> Array:
    """E_q of the local curvature, [N, C, C]."""
    if points is None:
        raise ValueError('curvature="expected" is a mean over nodes, and the expectation rule gave none')

    def blocks(f: Array) -> Array:
        return likelihood.local_sites(y, f, classes_of(mask)).blocks()

    return expect(blocks, _seen(likelihood, marginals, mask), points)


def _residual(posterior: Any, sites: Any, slope: Array, target: Any) -> Array:
    """max(|alpha - g_m|, |W - W^| v), relative to max(1, |g_m|): zero exactly at the fixed point."""
    mean_part = relative_distance(posterior.alpha, slope, slope)
    if isinstance(sites, Sites):
        difference = (sites.precision - target.precision) * posterior.variance
        return jnp.maximum(mean_part, relative_distance(difference, jnp.zeros_like(slope), slope))
    deviation = jnp.sqrt(jnp.maximum(posterior.variance, 0.0)).T
    difference = (sites.precision - target.precision) * deviation[:, :, None] * deviation[:, None, :]
    return jnp.maximum(mean_part, relative_distance(difference, jnp.zeros_like(difference), slope.T[:, :, None]))


def _secant_length(rho: Array, direction: Any, change: Any, posterior: Any, limit: float) -> Array:
    """Barzilai-Borwein length <s, s> / <s, y> with s = rho direction and y = change, at most 3 rho.

    It divides only where the ratio is below that, so that unrolling past the fixed point has a finite derivative.
    """
    squared, curvature = rho * _inner(posterior, direction, direction), _inner(posterior, direction, change)
    longest = jnp.minimum(limit, 3.0 * rho)
    curved = squared < longest * curvature
    length = jnp.where(curved, squared / jnp.where(curved, curvature, 1.0), longest)
    return jnp.where(squared > 0, jnp.maximum(length, SHORTEST_STEP), 1.0)


@highest_precision
def _inner(posterior: Any, left: Any, right: Any) -> Array:
    """Inner product in the Fisher metric of normals about their mean, point by point: h V h + tr(V L V L) / 2."""
    if isinstance(left, Sites):
        variance = posterior.variance
        shifts = variance * left.shift * right.shift
        return jnp.sum(shifts + 0.5 * variance**2 * left.precision * right.precision)
    spread = posterior.covariance
    shifts = jnp.einsum("cn,ncd,dn->", left.shift, spread, right.shift)
    return shifts + 0.5 * jnp.einsum("nab,nbc,ncd,nda->", spread, left.precision, spread, right.precision)


def _subtract(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.subtract, left, right)


def _add(sites: Any, length: Array, direction: Any) -> Any:
    moved = jax.tree.map(lambda site, part: site + length * part, sites, direction)
    return moved._replace(precision=jnp.maximum(moved.precision, 0.0)) if isinstance(sites, Sites) else moved
