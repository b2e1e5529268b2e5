"""The inner loop's protocol: an inference kernel for one task, the loops that run it, and its result codes.

An inference kernel is a NamedTuple of pure functions. State is the sites plus what the algorithm itself adds, never
K: the outer loop puts the same sites under a new K. Info holds diagnostics of one step.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.mixing import mixed
from fewshot.models.block_gaussian import JointMarginals
from fewshot.models.gaussian import (
    AnySites,
    GaussianPrior,
    Marginals,
    Query,
    Sites,
    condition,
    prior_marginals,
    with_root,
)
from fewshot.models.likelihoods.base import AugmentedLikelihood, GaussianLikelihood, Likelihood, SmoothLikelihood

# Of an inference whose posterior is used, not trained through. Half of a sampler's sweeps are warm-up; of the others as
# many are kept as make SAMPLER_DRAWS draws together with its chains.
TOLERANCE, MAX_STEPS, SAMPLER_STEPS, SAMPLER_DRAWS = 1e-3, 100, 50, 64


class Mask(NamedTuple):
    """What is real in a padded task: points [N] and classes [C]."""

    points: Bool[Array, " N"]
    classes: Bool[Array, " C"]


class Code(enum.IntEnum):
    """Result codes: failure is data, counted by the runners."""

    OK = 0
    NOT_CONVERGED = 1
    NON_FINITE = 2
    INDEFINITE_KERNEL = 3
    IMPLICIT_UNRELIABLE = 4
    STALLED = 5  # no step that the algorithm knows raises its bound, short of the fixed point
    NOT_MIXED = 6  # a sampler's chains disagree, or are too slow: a warning, the draws are kept


class Info(NamedTuple):
    """Diagnostics of a step. elbo: the lower bound itself (larger is better), in nats, at the state returned.

    residual: distance from the fixed point (C3), 0 where it does not apply. code: a `Code`.
    clipped: number of site precisions that the same state would have negative. A sampler has no bound and no fixed
    point: its elbo is the mean over chains of log p(y | f) at the draws, to be watched, not maximised.
    """

    elbo: Float[Array, ""]
    residual: Float[Array, ""]
    code: Int[Array, ""]
    clipped: Int[Array, ""]


@runtime_checkable
class Posterior(Protocol):
    """What prediction and the objectives need of a fitted q(f)."""

    kl: Float[Array, ""]

    @property
    def marginals(self) -> Marginals | JointMarginals:
        """Marginals at the labelled points."""
        ...

    def predict(self, query: Query) -> Marginals | JointMarginals:
        """Marginals at new inputs (G7)."""
        ...


class Traits(NamedTuple):
    """What the outer loop may ask of an algorithm.

    differentiable_sites: its sites are an explicit function of the likelihood's parameters, so that no gradient is
    stopped at them. evidence_value: `log_evidence` approximates log p(y) and its total derivative means something;
    elsewhere it is a gradient at fixed sites. free_sites: its sites are numbers of their own, in which the likelihood's
    parameters do not appear, so that log Z has no gradient in those. sampled: states are draws of a chain.
    """

    name: str
    differentiable_sites: bool = False
    evidence_value: bool = False
    free_sites: bool = False
    sampled: bool = False


class FixedPoint(NamedTuple):
    """The algorithm as the iteration of a map without damping or clipping, for implicit differentiation.

    read(state) -> the iterated variables; write(state, variables) -> state; update(state, prior, y, mask) -> variables
    after one application of the map.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    update: Callable[[Any, GaussianPrior, Int[Array, " N"], Mask | None], Any]


class InferenceKernel(NamedTuple):
    """One algorithm, as pure functions of one task.

    init(key, prior, y, mask) -> state; step(key, state, prior, y, mask) -> (state, info);
    sites(state) -> the Gaussian sites of q(f), stacked for a sampler's chains; None for an algorithm without any;
    posterior(state, prior) -> q(f) of the state's sites under that prior;
    elbo(state, posterior, y, mask) -> the bound (E1), its expectation taken over the state's own nodes;
    log_evidence(state, prior) -> log Z of the state's sites under that prior (E2), None without sites;
    fixed_point: None for algorithms that have none;
    pool(states) -> for a sampler, one state whose chains are those of several sweeps, stacked along a leading axis;
    statistics(state, y, mask) -> for a sampler, a few scalars of every chain [M, K] by which its mixing is judged.
    """

    init: Callable[[Key[Array, ""], GaussianPrior, Int[Array, " N"], Mask | None], Any]
    step: Callable[[Key[Array, ""], Any, GaussianPrior, Int[Array, " N"], Mask | None], tuple[Any, Info]]
    sites: Callable[[Any], Any] | None
    posterior: Callable[[Any, GaussianPrior], Any]
    elbo: Callable[[Any, Any, Int[Array, " N"], Mask | None], Float[Array, ""]]
    log_evidence: Callable[[Any, GaussianPrior], Float[Array, ""]] | None
    traits: Traits
    fixed_point: FixedPoint | None = None
    pool: Callable[[Any], Any] | None = None
    statistics: Callable[[Any, Int[Array, " N"], Mask | None], Float[Array, "M K"]] | None = None


def run(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
    *,
    steps: int,
) -> Any:
    """Posterior after a fixed number of steps from the prior. `fit` also returns state and diagnostics."""
    state, _ = fit(key, kernel, prior, y, mask, steps=steps)
    return kernel.posterior(state, prior)


def fit(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
    *,
    steps: int,
) -> tuple[Any, Info]:
    """State after a fixed number of steps, and the Info of every step stacked along a leading axis [steps]."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    prior = prepared(kernel, prior)
    start, loop = jax.random.split(key)

    def body(state: Any, step_key: Array) -> tuple[Any, Info]:
        return kernel.step(step_key, state, prior, y, mask)

    return jax.lax.scan(body, kernel.init(start, prior, y, mask), jax.random.split(loop, steps))


def fit_to_tolerance(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
) -> tuple[Any, Info, Int[Array, ""]]:
    """State, last Info and number of steps, once the residual is at most `tolerance` or after `max_steps`.

    The code is NOT_CONVERGED where the tolerance was not reached, STALLED where it will not be. Not differentiable in
    reverse mode.
    """
    prior = prepared(kernel, prior)
    start, loop = jax.random.split(key)
    state, info = kernel.step(jax.random.fold_in(loop, 0), kernel.init(start, prior, y, mask), prior, y, mask)

    def unfinished(carry: tuple[Any, Info, Array]) -> Array:
        _, last, count = carry
        over = (last.code == Code.NON_FINITE) | (last.code == Code.STALLED)  # the same for ever
        return (last.residual > tolerance) & ~over & (count < max_steps)

    def body(carry: tuple[Any, Info, Array]) -> tuple[Any, Info, Array]:
        current, _, count = carry
        advanced, last = kernel.step(jax.random.fold_in(loop, count), current, prior, y, mask)
        return advanced, last, count + 1

    state, info, count = jax.lax.while_loop(unfinished, body, (state, info, jnp.asarray(1)))
    late = ~(info.residual <= tolerance) & (info.code == Code.OK)  # written so that a residual of nan is late
    return state, info._replace(code=jnp.where(late, Code.NOT_CONVERGED, info.code)), count


def settle(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
) -> tuple[Any, Int[Array, ""]]:
    """State and code of an inference for use: run to TOLERANCE, or a sampler's draws of SAMPLER_STEPS sweeps.

    The code of a sampler is NOT_MIXED where nothing else went wrong and the kept half of its sweeps is not `mixed`.
    """
    if kernel.traits.sampled:
        state, each, traces = _sampled(key, kernel, prior, y, mask)
        code = jnp.max(each.code)
        slow = jnp.asarray(False) if traces is None else ~mixed(traces[SAMPLER_STEPS // 2 :])
        return state, jnp.where((code == Code.OK) & slow, Code.NOT_MIXED, code)
    state, info, _ = fit_to_tolerance(key, kernel, prior, y, mask)
    return state, info.code


def fit_pooled(
    key: Key[Array, ""],
    kernel: InferenceKernel,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    mask: Mask | None = None,
) -> tuple[Any, Info]:
    """A sampler's state after SAMPLER_STEPS sweeps with draws of its second half, and the Info of every sweep.

    A posterior of few chains is a mixture of few draws. Sweeps are kept at even distances until there are SAMPLER_DRAWS
    draws in all; every sweep of the second half where these are fewer. A kernel that cannot pool keeps its last state.
    """
    return _sampled(key, kernel, prior, y, mask)[:2]


def _sampled(
    key: Array, kernel: InferenceKernel, prior: GaussianPrior, y: Array, mask: Mask | None
) -> tuple[Any, Info, Array | None]:
    """`fit_pooled`, and the statistics of every sweep [S, M, K], None of a kernel that has none."""
    if kernel.pool is None or kernel.sites is None:
        return *fit(key, kernel, prior, y, mask, steps=SAMPLER_STEPS), None
    prior = prepared(kernel, prior)
    start, loop = jax.random.split(key)

    def sweep(state: Any, step_key: Array) -> tuple[Any, tuple[Any, Info, Array | None]]:
        state, info = kernel.step(step_key, state, prior, y, mask)
        traces = None if kernel.statistics is None else kernel.statistics(state, y, mask)
        return state, (state, info, traces)

    first = kernel.init(start, prior, y, mask)
    _, (states, infos, traces) = jax.lax.scan(sweep, first, jax.random.split(loop, SAMPLER_STEPS))
    chains = jax.tree.leaves(jax.eval_shape(kernel.sites, first))[0].shape[0]
    kept = min(SAMPLER_STEPS // 2, -(-SAMPLER_DRAWS // chains))
    numbers = SAMPLER_STEPS - 1 - SAMPLER_STEPS // 2 // kept * jnp.arange(kept)[::-1]
    states = jax.tree.map(lambda leaf: leaf[numbers], states)
    return kernel.pool(states), infos, traces


def prepared(kernel: InferenceKernel, prior: GaussianPrior) -> GaussianPrior:
    """The prior with its root (G8) where the kernel draws from it: decomposed once, not in every step."""
    return with_root(prior) if kernel.traits.sampled else prior


def sum_over_points(values: Float[Array, " N"], mask: Mask | None) -> Float[Array, ""]:
    """Sum over the points that are real."""
    return jnp.sum(values if mask is None else jnp.where(mask.points, values, 0.0))


def classes_of(mask: Mask | None) -> Bool[Array, " C"] | None:
    """The class mask, or None for all classes."""
    return None if mask is None else mask.classes


def mask_sites(sites: AnySites, mask: Mask | None) -> Any:
    """Sites of the real points and classes; all others say nothing (h = W = 0)."""
    return sites if mask is None else sites.masked(mask.classes[:, None] & mask.points)


def expected_data(
    likelihood: Likelihood,
    y: Int[Array, " N"],
    marginals: Marginals | JointMarginals,
    points: Any,
    mask: Mask | None,
) -> Float[Array, ""]:
    """E_q log p(y | f), summed over the points that are real."""
    return sum_over_points(likelihood.expected_log_prob(y, marginals, points, classes_of(mask)), mask)


def prior_marginals_like(sites: Any, prior: GaussianPrior) -> Marginals | JointMarginals:
    """Marginals of the prior in the form that the posterior with such sites has."""
    marginals = prior_marginals(prior)
    if isinstance(sites, Sites):
        return marginals
    return JointMarginals(marginals.mean, marginals.covariance_blocks())


def require(condition_met: bool, kernel: str, likelihood: object, needs: str) -> None:
    """Raises TypeError where a kernel cannot use a likelihood, naming the kernels that can."""
    if not condition_met:
        usable = ", ".join(usable_kernels(likelihood)) or "a Likelihood"
        raise TypeError(f"{kernel} needs {needs}; {type(likelihood).__name__} offers none: use {usable}")


def usable_kernels(likelihood: object) -> list[str]:
    """Names of the inference kernels that can use a likelihood."""
    offered = {
        "cvi": Likelihood,
        "cavi": AugmentedLikelihood,
        "gibbs": AugmentedLikelihood,
        "laplace": SmoothLikelihood,
        "exact": GaussianLikelihood,
        "gradient": Likelihood,
    }
    return [name for name, protocol in offered.items() if isinstance(likelihood, protocol)]


def finite_code(*values: Array) -> Int[Array, ""]:
    """OK where all values are finite, else NON_FINITE."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(value)) for value in values]))
    return jnp.where(finite, Code.OK, Code.NON_FINITE)


def sites_held(state: Any) -> Any:
    """The `sites` of kernels whose state holds them."""
    return state.sites


def gaussian_posterior(state: Any, prior: GaussianPrior) -> Any:
    """The `posterior` of kernels whose state holds its sites."""
    return condition(prior, state.sites)


def relative_distance(value: Float[Array, "..."], target: Float[Array, "..."], slope: Float[Array, "..."]) -> Array:
    """Largest |value - target| / max(1, |slope|)."""
    return jnp.max(jnp.abs(value - target) / jnp.maximum(1.0, jnp.abs(slope)))
