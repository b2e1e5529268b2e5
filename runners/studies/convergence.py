"""Convergence of the inner loop: steps from the prior to within 0.01 nats of the optimum (MD section 4.3).

python runners/studies/convergence.py [--quick] [--out DIR] [--seed n]

5-way tasks of 64 ReLU features, cosine kernel, 1 and 5 labelled points a class, output scales 0.1 to 100, float64. All
methods start at the prior and share their nodes, so mirror descent, natural and plain gradients climb the same bound:

- mirror descent: cvi, which chooses the length of every step
- natural gradient at a fixed length rho (in the natural parameters a mirror step is one): the best of ten lengths
- plain gradient in (m_u, chol V_u) of the whitened basis: as published (0.005), and at the best of ten learning rates
- CAVI for logistic-softmax and one-vs-each, which climbs a bound of its own: steps to its own optimum

The best is chosen with hindsight for every scale: the one with the fewest steps on the median task; --quick tries
three.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fewshot.inference.inner import Inference, cavi, cvi, fit, gradient
from fewshot.models.gaussian import GaussianPrior
from fewshot.models.kernels import Cosine
from fewshot.models.likelihoods import LogisticSoftmax, OneVsEach, Softmax
from fewshot.models.likelihoods.base import AugmentedLikelihood
from fewshot.runners.studies.reporting import Row, folder, new_figure, run_as_script, save, write

NAME, WAY, FEATURES, NEAR = "convergence", 5, 64, 0.01
SCALES = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
MIRROR, NATURAL = "mirror descent", "natural gradient, best of {} lengths"
PUBLISHED, PLAIN = "plain gradient, 0.005", "plain gradient, best of {} rates"
CAVI: dict[str, AugmentedLikelihood] = {"CAVI, logistic-softmax": LogisticSoftmax(), "CAVI, one-vs-each": OneVsEach()}
LENGTHS = tuple(float(rho) for rho in np.linspace(0.1, 1.0, 10))
RATES = tuple(float(rate) for rate in np.geomspace(1e-3, 1.0, 10))
SHORT, LONG, OPTIMUM = 100, 2000, 300  # steps that are looked at, of the published gradient, and to the optimum

Gaps = Float[np.ndarray, "scales E steps"]


class Climb(NamedTuple):
    """Distances to the optimum in nats after every step, and the length or rate that was best at every scale."""

    gaps: Gaps
    chosen: tuple[float, ...] | None = None


class Needed(TypedDict):
    """Steps over the tasks, None for more than were looked at, and the last median gap in nats."""

    median: float | None
    largest: float | None
    looked_at: int
    gap: float


class ConvergenceRow(Needed, total=False):
    """What one method needed at one scale; chosen: its best step length or rate there."""

    shot: Required[int]
    scale: Required[float]
    method: Required[str]
    chosen: float


def main(quick: bool = False, out: str | None = None, seed: int = 0) -> Sequence[Row]:
    """One row for each shot, scale and method; table.md, results.json and convergence.png in the folder."""
    path = folder(NAME, quick, out)
    shots, scales, tasks, thin = ((1,), (1.0, 30.0), 3, 4) if quick else ((1, 5), SCALES, 10, 1)
    with jax.enable_x64(True):
        curves = {shot: climbs(seed, shot, scales, tasks, thin) for shot in shots}
    rows = [
        row_of(shot, scale, name, climb, i)
        for shot, methods in curves.items()
        for i, scale in enumerate(scales)
        for name, climb in methods.items()
    ]
    title = f"Steps to within {NEAR} nats of the optimum: median (largest) of {tasks} tasks"
    write(path, rows, {title: _table(rows, scales)}, quick=quick, seed=seed, tasks=tasks)
    _plot(curves, scales, path / "convergence.png")
    return rows


def row_of(shot: int, scale: float, name: str, climb: Climb, number: int) -> ConvergenceRow:
    """What a method needed at one scale, the `number`-th of its climb."""
    row: ConvergenceRow = {"shot": shot, "scale": scale, "method": name, **steps_needed(climb.gaps[number])}
    if climb.chosen:
        row["chosen"] = climb.chosen[number]
    return row


def climbs(seed: int, shot: int, scales: tuple[float, ...], tasks: int, thin: int) -> dict[str, Climb]:
    """Every method's; of the ten lengths and rates every `thin`-th is tried."""
    correlations, y = problems(seed, shot, tasks)
    covariances = jnp.asarray(scales)[:, None, None, None] * correlations
    keys = jax.random.split(jax.random.key(seed), tasks)
    values = partial(bounds, keys=keys, covariances=covariances, y=y)
    best = np.asarray(values(cvi(Softmax()), OPTIMUM)).max(axis=-1, keepdims=True)
    lengths, rates = LENGTHS[::-thin], RATES[::-thin]

    def gap(kernel: Inference, steps: int = SHORT) -> Gaps:
        return np.asarray(best - values(kernel, steps))

    found = {
        MIRROR: Climb(gap(cvi(Softmax()))),
        NATURAL.format(len(lengths)): fewest({rho: gap(cvi(Softmax(), rho=rho)) for rho in lengths}),
        PUBLISHED: Climb(gap(gradient(Softmax(), learning_rate=0.005), LONG // thin)),
        PLAIN.format(len(rates)): fewest({rate: gap(gradient(Softmax(), learning_rate=rate)) for rate in rates}),
    }
    for name, likelihood in CAVI.items():
        own = np.asarray(values(cavi(likelihood), OPTIMUM))
        found[name] = Climb((own.max(axis=-1, keepdims=True) - own)[..., :SHORT])
    return found


def problems(seed: int, shot: int, tasks: int) -> tuple[Float[Array, "E N N"], Int[Array, " N"]]:
    """Cosine similarities of ReLU features around one centre a class, with a spread between 0.5 and 2; labels."""
    rng = np.random.default_rng([seed, shot])
    y = np.repeat(np.arange(WAY), shot)
    centres = rng.normal(size=(tasks, WAY, FEATURES))
    noise = rng.uniform(0.5, 2.0, (tasks, 1, 1)) * rng.normal(size=(tasks, len(y), FEATURES))
    x = jnp.asarray(np.maximum(centres[:, y] + noise, 0.0))
    return jax.vmap(lambda one: Cosine().gram({"log_scale": 0.0}, one, one))(x), jnp.asarray(y)


@partial(jax.jit, static_argnums=(0, 1))
def bounds(
    kernel: Inference, steps: int, keys: Array, covariances: Float[Array, "scales E N N"], y: Int[Array, " N"]
) -> Float[Array, "scales E steps"]:
    """The bound after every step from the prior."""

    def one(key: Array, covariance: Array) -> Array:
        prior = GaussianPrior(jnp.zeros((WAY, len(y)), covariance.dtype), covariance)
        return fit(key, kernel, prior, y, steps=steps)[1].elbo

    return jax.vmap(lambda at_scale: jax.vmap(one)(keys, at_scale))(covariances)


def fewest(contestants: Mapping[float, Gaps]) -> Climb:
    """At every scale the contestant whose median task needs the fewest steps; the smaller last gap where they tie."""
    stacked = np.stack(list(contestants.values()))
    count = np.median(first_near(stacked), axis=-1)
    last = np.median(np.where(np.isfinite(stacked[..., -1]), stacked[..., -1], np.inf), axis=-1)
    best = [np.lexsort((last[:, i], count[:, i]))[0] for i in range(stacked.shape[1])]
    return Climb(stacked[best, np.arange(stacked.shape[1])], tuple(list(contestants)[i] for i in best))


def first_near(values: Float[np.ndarray, "... steps"]) -> Float[np.ndarray, "..."]:
    """Number of steps after which the gap is at most NEAR and stays there; infinite where it does not."""
    far = ~(values <= NEAR)
    steps = values.shape[-1]
    last_far = np.where(far.any(-1), steps - np.argmax(far[..., ::-1], axis=-1), 0)
    return np.where(last_far == steps, np.inf, last_far + 1.0)


def steps_needed(values: Float[np.ndarray, "E steps"]) -> Needed:
    """Median and largest number of steps over the tasks (None: more than were looked at), and the last median gap."""
    counts = first_near(values)
    median, largest = (float(value) if np.isfinite(value) else None for value in (np.median(counts), counts.max()))
    gap = float(np.median(values[:, -1]))
    return {"median": median, "largest": largest, "looked_at": values.shape[-1], "gap": gap}


def _table(rows: list[ConvergenceRow], scales: tuple[float, ...]) -> list[list[str]]:
    lines = []
    for shot in dict.fromkeys(row["shot"] for row in rows):
        for method in dict.fromkeys(row["method"] for row in rows):
            mine = [row for row in rows if (row["shot"], row["method"]) == (shot, method)]
            lines.append([method, str(shot), *(_count(row) for row in mine)])
    return [["method", "shot", *(f"scale {scale:g}" for scale in scales)], *lines]


def _count(row: ConvergenceRow) -> str:
    found = row["median"], row["largest"]
    median, largest = (f"> {row['looked_at']}" if steps is None else f"{steps:g}" for steps in found)
    return f"{median} ({largest})"


def _plot(curves: dict[int, dict[str, Climb]], scales: tuple[float, ...], path: Path) -> None:
    """Median gap against steps; a panel for each shot and scale."""
    figure, axes = new_figure(len(curves), len(scales), (2.5, 2.4), sharex=True, sharey=True)
    for row, (shot, methods) in zip(axes, curves.items(), strict=True):
        for i, panel in enumerate(row):
            for name, climb in methods.items():
                median = np.median(climb.gaps[i, :, :SHORT], axis=0)
                panel.plot(np.arange(1, SHORT + 1), np.maximum(median, 1e-6), label=name)
            panel.axhline(NEAR, color="black", linewidth=0.6, linestyle=":")
            panel.set(xscale="log", yscale="log", ylim=(1e-5, 300), title=f"{shot}-shot, scale {scales[i]:g}")
    for panel in axes[-1]:
        panel.set_xlabel("steps")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.supylabel("nats below the optimum")
    save(figure, path)


if __name__ == "__main__":
    run_as_script(NAME, main, __doc__)
