"""The inner loop's protocol: an inference for one task, the loops that run it, and its result codes.

An inference is a NamedTuple of pure functions. State is the sites plus what the algorithm itself adds, never
K: the outer loop puts the same sites under a new K. Info holds diagnostics of one step.
"""

import enum
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from fewshot.models.expectations import Points
from fewshot.models.gaussian import AnyMarginals, AnySites, GaussianPosterior, GaussianPrior, Posterior, with_root
from fewshot.models.likelihoods.base import Labels, Likelihood

TOLERANCE, MAX_STEPS = 1e-3, 100  # of an inference whose posterior is used, not trained through


State: TypeAlias = PyTree  # of an algorithm: sites plus what it adds, a NamedTuple of its own
L = TypeVar("L")  # a likelihood
S = TypeVar("S", bound=AnySites)
Settings = ParamSpec("Settings")
Constructor = Callable[Concatenate[L, Settings], "Inference"]


class Mask(NamedTuple):
    """What is real in a padded task: points [N] and classes [C].

    examples: labelled ones a class that the task's prior is meant for, None for as many as are real.
    """

    points: Bool[Array, " N"]
    classes: Bool[Array, " C"]
    examples: float | Float[Array, ""] | None = None

    @property
    def examples_a_class(self) -> float | Float[Array, ""]:
        """`examples`, or the mean number of real ones."""
        return jnp.sum(self.points) / jnp.sum(self.classes) if self.examples is None else self.examples


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

    read: Callable[[State], PyTree]
    write: Callable[[State, PyTree], State]
    update: Callable[[State, GaussianPrior, Labels, Mask | None], PyTree]


class Inference(NamedTuple):
    """An inference kernel: one algorithm, as pure functions of one task.

    init(key, prior, y, mask) -> state; step(key, state, prior, y, mask) -> (state, info);
    sites(state) -> the Gaussian sites of q(f), stacked for a sampler's chains; None for an algorithm without any;
    posterior(state, prior) -> q(f) of the state's sites under that prior;
    elbo(state, posterior, y, mask) -> the bound (E1), its expectation taken over the state's own nodes;
    log_evidence(state, prior) -> log Z of the state's sites under that prior (E2), None without sites;
    fixed_point: None for algorithms that have none;
    pool(states) -> for a sampler, one state whose chains are those of several sweeps, stacked along a leading axis;
    statistics(state, y, mask) -> for a sampler, a few scalars of every chain [M, K] by which its mixing is judged.
    """

    init: Callable[[Key[Array, ""], GaussianPrior, Labels, Mask | None], State]
    step: Callable[[Key[Array, ""], State, GaussianPrior, Labels, Mask | None], tuple[State, Info]]
    sites: Callable[[State], AnySites] | None
    posterior: Callable[[State, GaussianPrior], Posterior]
    elbo: Callable[[State, Any, Labels, Mask | None], Float[Array, ""]]
    log_evidence: Callable[[State, GaussianPrior], Float[Array, ""]] | None
    traits: Traits
    fixed_point: FixedPoint | None = None
    pool: Callable[[State], State] | None = None
    statistics: Callable[[State, Labels, Mask | None], Float[Array, "M K"]] | None = None


NEEDS: dict[str, type] = {}  # what the likelihood must offer, by the name of the inference; filled by `constructor`


def constructor(name: str, needs: type, called: str) -> Callable[[Constructor[L, Settings]], Constructor[L, Settings]]:
    """Decorator of a constructor: an inference states what it needs of the likelihood, a protocol, and its name.

    A likelihood that lacks it is refused by a TypeError, which says what is missing and which inferences can use it.
    """
    NEEDS[name] = needs

    def decorate(build: Constructor[L, Settings]) -> Constructor[L, Settings]:
        @wraps(build)
        def checked(likelihood: L, *args: Settings.args, **settings: Settings.kwargs) -> Inference:
            if not isinstance(likelihood, needs):
                usable = ", ".join(usable_inferences(likelihood)) or "a Likelihood"
                raise TypeError(f"{name} needs {called}; {type(likelihood).__name__} offers none: use {usable}")
            return build(likelihood, *args, **settings)

        return checked

    return decorate


def usable_inferences(likelihood: object) -> list[str]:
    """Names of the inferences that can use a likelihood."""
    return [name for name, needs in NEEDS.items() if isinstance(likelihood, needs)]


def run(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
    *,
    steps: int,
) -> Posterior:
    """Posterior after a fixed number of steps from the prior. `fit` also returns state and diagnostics."""
    state, _ = fit(key, inference, prior, y, mask, steps=steps)
    return inference.posterior(state, prior)


def fit(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
    *,
    steps: int,
) -> tuple[State, Info]:
    """State after a fixed number of steps, and the Info of every step stacked along a leading axis [steps]."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    prior = prepared(inference, prior)
    start, loop = jax.random.split(key)

    def body(state: State, step_key: Array) -> tuple[State, Info]:
        return inference.step(step_key, state, prior, y, mask)

    return jax.lax.scan(body, inference.init(start, prior, y, mask), jax.random.split(loop, steps))


def fit_to_tolerance(
    key: Key[Array, ""],
    inference: Inference,
    prior: GaussianPrior,
    y: Labels,
    mask: Mask | None = None,
    *,
    tolerance: float = TOLERANCE,
    max_steps: int = MAX_STEPS,
) -> tuple[State, Info, Int[Array, ""]]:
    """State, last Info and number of steps, once the residual is at most `tolerance` or after `max_steps`.

    The code is NOT_CONVERGED where the tolerance was not reached, STALLED where it will not be. Not differentiable in
    reverse mode.
    """
    prior = prepared(inference, prior)
    start, loop = jax.random.split(key)
    state, info = inference.step(jax.random.fold_in(loop, 0), inference.init(start, prior, y, mask), prior, y, mask)

    def unfinished(carry: tuple[State, Info, Array]) -> Array:
        _, last, count = carry
        over = (last.code == Code.NON_FINITE) | (last.code == Code.STALLED)  # the same for ever
        return (last.residual > tolerance) & ~over & (count < max_steps)

    def body(carry: tuple[State, Info, Array]) -> tuple[State, Info, Array]:
        current, _, count = carry
        advanced, last = inference.step(jax.random.fold_in(loop, count), current, prior, y, mask)
        return advanced, last, count + 1

    state, info, count = jax.lax.while_loop(unfinished, body, (state, info, jnp.asarray(1)))
    late = ~(info.residual <= tolerance) & (info.code == Code.OK)  # written so that a residual of nan is late
    return state, info._replace(code=jnp.where(late, Code.NOT_CONVERGED, info.code)), count


def prepared(inference: Inference, prior: GaussianPrior) -> GaussianPrior:
    """The prior with its root (G8) where the inference draws from it: decomposed once, not in every step."""
    return with_root(prior) if inference.traits.sampled else prior


def sum_over_points(values: Float[Array, " N"], mask: Mask | None) -> Float[Array, ""]:
    """Sum over the points that are real."""
    return jnp.sum(values if mask is None else jnp.where(mask.points, values, 0.0))


def classes_of(mask: Mask | None) -> Bool[Array, " C"] | None:
    """The class mask, or None for all classes."""
    return None if mask is None else mask.classes


def mask_sites(sites: S, mask: Mask | None) -> S:
    """Sites of the real points and classes; all others say nothing (h = W = 0)."""
    return sites if mask is None else cast(S, sites.masked(mask.classes[:, None] & mask.points))


def expected_data(
    likelihood: Likelihood,
    y: Labels,
    marginals: AnyMarginals,
    points: Points | None,
    mask: Mask | None,
) -> Float[Array, ""]:
    """E_q log p(y | f), summed over the points that are real."""
    return sum_over_points(likelihood.expected_log_prob(y, marginals, points, classes_of(mask)), mask)


def finite_code(*values: Array) -> Int[Array, ""]:
    """OK where all values are finite, else NON_FINITE."""
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(value)) for value in values]))
    return jnp.where(finite, Code.OK, Code.NON_FINITE)


def sites_held(state: State) -> AnySites:
    """The `sites` of inferences whose state holds them."""
    return state.sites


def gaussian_posterior(state: State, prior: GaussianPrior) -> GaussianPosterior:
    """The `posterior` of inferences whose state holds its sites."""
    return prior.given(state.sites)


def relative_distance(value: Float[Array, "..."], target: Float[Array, "..."], slope: Float[Array, "..."]) -> Array:
    """Largest |value - target| / max(1, |slope|)."""
    return jnp.max(jnp.abs(value - target) / jnp.maximum(1.0, jnp.abs(slope)))
