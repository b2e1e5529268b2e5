"""Classification with many labels a class, seen through inducing points (docs/sparse.md, P11 to P13).

q(v) of every class is N(0, I) times one Gaussian site of shift sum_n h_n phi_n and precision sum_n W_n phi_n phi_n^T,
with h and W as `cvi` has them (C1). A step towards the sums at the current q is one along the natural gradient (C2);
sums over a batch times N / B are unbiased for it. Batches with a falling rate come first, then steps on all rows whose
length is safeguarded by the bound. Kernel parameters and inducing points are held: nothing of size N x N is formed.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Code, Mask
from fewshot.models import inducing
from fewshot.models.expectations import ExpectationRule, MonteCarlo, Points
from fewshot.models.gaussian import Marginals, highest_precision
from fewshot.models.inducing import InducingPosterior, View, Weights
from fewshot.models.likelihoods.base import Labels, Likelihood
from fewshot.models.process import LatentProcess

BLOCK = 2048  # rows whose expectations are held at once
DELAY, POWER = 5.0, 0.75  # rate of batch t: (DELAY / (DELAY + t))^POWER, whose sum diverges and whose squares sum
FIRST_STEP, SHORTEST_STEP = 0.5, 1e-3
DRAWS = MonteCarlo()


class Sites(NamedTuple):
    """What the rows say of v: natural parameters of q(v) less those of the prior."""

    shift: Float[Array, "C M"]
    precision: Float[Array, "C M M"]

    @classmethod
    def zero(cls, classes: int, seen: View) -> "Sites":
        """Sites that say nothing: q is the prior."""
        count, dtype = seen.features.shape[1], seen.features.dtype
        return cls(jnp.zeros((classes, count), dtype), jnp.zeros((classes, count, count), dtype))

    def weights(self) -> Weights:
        """q(v); NaN where the precision of q is not positive definite."""
        return inducing.weights_of(self.shift, self.precision)

    def moved(self, length: Float[Array, ""] | float, target: "Sites") -> "Sites":
        """(C2): (1 - rho) sites + rho target."""
        return jax.tree.map(lambda old, new: old + length * (new - old), self, target)

    def less(self, other: "Sites") -> "Sites":
        """The difference."""
        return jax.tree.map(jnp.subtract, self, other)

    @highest_precision
    def inner(self, other: "Sites", weights: Weights) -> Float[Array, ""]:
        """Inner product of two changes in the Fisher metric of q(v) (P13), by whitened changes R^-1 (dh - dB m)."""

        def whitened(change: Sites) -> tuple[Array, Array]:
            slope = change.shift - jnp.einsum("cmk,ck->cm", change.precision, weights.mean)
            spread = weights.inverse @ change.precision @ jnp.swapaxes(weights.inverse, 1, 2)
            return jnp.einsum("cmk,ck->cm", weights.inverse, slope), spread

        (one, spread), (two, other_spread) = whitened(self), whitened(other)
        return jnp.sum(one * two) + 0.5 * jnp.sum(spread * other_spread)


class Rows(NamedTuple):
    """Labelled rows: what they have of the inducing variables, labels, and the weight of each (0: padding)."""

    seen: View
    y: Labels
    weight: Float[Array, " N"]

    def at(self, chosen: Int[Array, " B"], weight: float) -> "Rows":
        """Some of them, each with `weight` times as much."""
        seen, y, own = jax.tree.map(lambda leaf: leaf[chosen], tuple(self))
        return Rows(seen, y, own * weight)

    def blocks(self) -> "Rows":
        """The same in blocks of at most BLOCK rows, along a new first axis; padding has weight 0."""
        points = len(self.y)
        size = min(BLOCK, points)
        filling = -points % size
        padded = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, filling)] + [(0, 0)] * (leaf.ndim - 1), "edge"), self)
        padded = padded._replace(weight=jnp.pad(self.weight, (0, filling)))
        return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), padded)


class Fitted(NamedTuple):
    """Inducing points, the posterior seen through them, the result code, and the residual (P13)."""

    inputs: Float[Array, "M D"]
    posterior: InducingPosterior
    code: Int[Array, ""]
    residual: Float[Array, ""]


class Found(NamedTuple):
    """At one q: E_q[log p(y | f)], and the sites that (C1) asks for."""

    data: Float[Array, ""]
    target: Sites


@dataclass(frozen=True)
class ManyLabels:
    """How a task of many labels is solved: `inducing` points, chosen at random from its rows.

    batch_steps natural-gradient steps on batches of `batch` rows, then at most `steps` on all of them until the
    residual (P13) is at most `tolerance` times the root of the number of labels. expectation: rule
    for E_q[log p(y | f)], as in `cvi`. Classes are independent in q. Raises ValueError for numbers that make no sense.
    """

    inducing: int = 256
    batch: int = 512
    batch_steps: int = 100
    steps: int = 50
    tolerance: float = 1e-2
    expectation: ExpectationRule = DRAWS

    def __post_init__(self) -> None:
        for name, least in (("inducing", 1), ("batch", 1), ("batch_steps", 0), ("steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"expected a whole number of at least {least} as {name}, got {value!r:.40}")
        if not self.tolerance > 0:
            raise ValueError(f"expected a positive number as tolerance, got {self.tolerance!r:.40}")

    def choose(self, key: Key[Array, ""], x: Float[Array, "N D"], mask: Mask | None = None) -> Float[Array, "M D"]:
        """Inducing points at random rows; real ones as long as there are any."""
        order = jax.random.uniform(key, (len(x),))
        order = order if mask is None else jnp.where(mask.points, order, order + 1.0)
        return x[jnp.argsort(order)[: self.inducing]]

    def fit(
        self,
        key: Key[Array, ""],
        process: LatentProcess,
        likelihood: Likelihood,
        x: Float[Array, "N D"],
        y: Labels,
        classes: int,
        mask: Mask | None = None,
    ) -> Fitted:
        """The posterior seen through inducing points at random rows."""
        choice, solving = jax.random.split(key)
        return self.fit_at(solving, self.choose(choice, x, mask), process, likelihood, x, y, classes, mask)

    def fit_at(
        self,
        key: Key[Array, ""],
        inputs: Float[Array, "M D"],
        process: LatentProcess,
        likelihood: Likelihood,
        x: Float[Array, "N D"],
        y: Labels,
        classes: int,
        mask: Mask | None = None,
    ) -> Fitted:
        """The same at given inducing points [M, D]."""
        prior = process.prior(inputs, classes)._replace(root=None)
        kernel, hyper = process.kernel, process.hyper
        whitener = inducing.whitening(kernel, hyper, inputs)
        seen = inducing.view(kernel, hyper, x, inputs, whitener, hyper.get("mean", 0.0))
        nodes, batches = jax.random.split(key)
        model = _Model(likelihood, self.expectation.points(nodes, classes, x.dtype), mask)
        rows = Rows(seen, y, jnp.ones(len(x), x.dtype) if mask is None else mask.points.astype(x.dtype))
        sites = model.by_batches(batches, rows, Sites.zero(classes, seen), min(self.batch, len(x)), self.batch_steps)
        limit = self.tolerance * jnp.sqrt(jnp.sum(rows.weight))
        end = model.by_all(sites, rows, self.steps, limit)
        code = jnp.where(end.residual <= limit, Code.OK, jnp.where(end.stalled, Code.STALLED, Code.NOT_CONVERGED))
        code = jnp.where(jnp.isfinite(end.bound), code, Code.NON_FINITE)
        return Fitted(inputs, InducingPosterior(prior, whitener, end.sites.weights(), end.bound), code, end.residual)


class _Progress(NamedTuple):
    """Sites with their bound, the way to the target there, and its length; how far to go next; whether that is over."""

    sites: Sites
    bound: Float[Array, ""]
    direction: Sites
    residual: Float[Array, ""]
    length: Float[Array, ""]
    stalled: Bool[Array, ""]
    steps: Int[Array, ""]


@dataclass(frozen=True)
class _Model:
    """A likelihood with the nodes of its expectations, and what is real in a padded task."""

    likelihood: Likelihood
    nodes: Points | None
    mask: Mask | None

    @highest_precision
    def sums(self, weights: Weights, rows: Rows, clip: bool) -> Found:
        """E_q[log p(y | f)] of some rows, and what (C1) asks for at them, summed (P11)."""
        marginals = Marginals(*weights.predict(rows.seen))
        classes = None if self.mask is None else self.mask.classes

        def data(q: Marginals) -> Array:
            each = self.likelihood.expected_log_prob(rows.y, q, self.nodes, classes)
            return jnp.sum(jnp.where(rows.weight > 0, rows.weight * each, 0.0))

        value, slopes = jax.value_and_grad(data)(marginals)
        precision = -2 * slopes.variance
        precision = jnp.maximum(precision, 0.0) if clip else precision
        shift = slopes.mean + precision * (marginals.mean - rows.seen.mean)
        if classes is not None:
            shift, precision = (jnp.where(classes[:, None], part, 0.0) for part in (shift, precision))
        features = rows.seen.features
        spread = jnp.swapaxes(precision[:, :, None] * features, 1, 2) @ features
        return Found(value, Sites(shift @ features, spread))

    def by_batches(self, key: Key[Array, ""], rows: Rows, sites: Sites, batch: int, steps: int) -> Sites:
        """Steps (C2) on batches drawn with replacement, at a falling rate; no precision is negative."""
        points = len(rows.y)

        def one(sites: Sites, numbered: tuple[Array, Array]) -> tuple[Sites, None]:
            chosen = jax.random.randint(numbered[1], (batch,), 0, points)
            some = rows.at(chosen, points / batch)
            rate = (DELAY / (DELAY + numbered[0])) ** POWER
            return sites.moved(rate, self.sums(sites.weights(), some, clip=True).target), None

        numbers = jnp.arange(steps, dtype=sites.shift.dtype) + 1
        return jax.lax.scan(one, sites, (numbers, jax.random.split(key, steps)))[0]

    def by_all(self, sites: Sites, rows: Rows, steps: int, limit: Float[Array, ""]) -> _Progress:
        """Steps on all rows until the residual is at most the limit; a step that would lower the bound is refused.

        A precision that is negative at a row is kept: only that of q must be positive definite, and where it would not
        be the bound is NaN, which is refused too.
        """
        blocks = rows.blocks()
        counted = jnp.sum(rows.weight)

        def judged(sites: Sites) -> tuple[Weights, Array, Sites, Array]:
            weights = sites.weights()
            empty = Found(jnp.zeros((), sites.shift.dtype), jax.tree.map(jnp.zeros_like, sites))
            found = jax.lax.scan(
                lambda total, some: (jax.tree.map(jnp.add, total, self.sums(weights, some, clip=False)), None),
                empty,
                blocks,
            )[0]
            direction = found.target.less(sites)
            return weights, found.data - weights.kl(), direction, jnp.sqrt(direction.inner(direction, weights))

        def advance(now: _Progress) -> _Progress:
            proposal = jax.tree.map(lambda site, way: site + now.length * way, now.sites, now.direction)
            weights, bound, direction, residual = judged(proposal)
            slack = 100 * jnp.finfo(bound.dtype).eps * (jnp.abs(bound) + counted)
            accepted = bound >= now.bound - slack
            longer = _secant(now.length, now.direction, now.direction.less(direction), weights)
            length = jnp.where(accepted, longer, 0.5 * now.length)
            there = _Progress(proposal, bound, direction, residual, length, jnp.asarray(False), now.steps + 1)
            here = now._replace(length=length, stalled=length < SHORTEST_STEP, steps=now.steps + 1)
            return jax.tree.map(partial(jnp.where, accepted), there, here)

        def unfinished(now: _Progress) -> Array:
            return (now.residual > limit) & ~now.stalled & (now.steps < steps) & jnp.isfinite(now.bound)

        _, bound, direction, residual = judged(sites)
        first = jnp.asarray(FIRST_STEP, sites.shift.dtype)
        start = _Progress(sites, bound, direction, residual, first, jnp.asarray(False), jnp.asarray(0))
        return jax.lax.while_loop(unfinished, advance, start)


def _secant(length: Array, way: Sites, change: Sites, weights: Weights) -> Float[Array, ""]:
    """Barzilai-Borwein length <s, s> / <s, y> with s = length * way and y the change of the way; at most 3 and 1 x."""
    squared, curvature = length * way.inner(way, weights), way.inner(change, weights)
    most = jnp.minimum(1.0, 3 * length)
    return jnp.where(curvature * most > squared, squared / jnp.where(curvature > 0, curvature, 1.0), most)
