"""Compare a run's own inference with long MCMC on one test task: ArviZ data files, a table and plots.

python runners/diagnose.py RUN_DIR [--out DIR] [--way C] [--shot S] [--seed N] [--draws N]      every flag: --help
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import MCMC

import tasks
from inference import diagnostics
from inference.inner.base import MAX_STEPS, SAMPLER_STEPS, Code, Info, fit
from inference.mcmc import GibbsKernel, nuts
from inference.outer.checkpoint import CheckpointError
from models.deep_kernel import gaussian_prior, gaussian_query
from models.gaussian import GaussianPrior, Query
from models.likelihoods.base import AugmentedLikelihood
from runners import automatic, compilation_cache
from runners.build import Model, load_run
from runners.console import format_table, one_line_errors
from runners.data import EVALUATION_SEED, Shape, draw_episodes, load_splits, queries
from runners.flags import OneLineParser, count_or_auto
from runners.overrides import ConfigError
from runners.run_directory import RunError
from runners.scoring import embed_images
from tasks import DataError

CHAINS = 4

MOST_LATENTS, MOST_TRACES, MOST_QUERIES = 30, 4, 12  # shown in one plot


@dataclass(frozen=True)
class DiagnoseConfig:
    """The flags of diagnose.py; None and 0 stand for the run's own value, an `out` of None for RUN_DIR/diagnostics."""

    run_dir: str
    out: str | None = None
    way: int = 0
    shot: int = 0
    query: int = 0
    seed: int = EVALUATION_SEED
    draws: int = 4000
    data_root: str | None = None


class LabelledTask(NamedTuple):
    """One test task: prior and labels [N] of the support, query and its labels [Q]."""

    prior: GaussianPrior
    y: jax.Array
    query: Query
    y_query: np.ndarray


class Found(NamedTuple):
    """What one method found: ArviZ data, summary of f, PSIS-LOO, k-hat (None for samplers), p(y_* | data) [Q, C]."""

    data: Any
    summary: Any
    loo: diagnostics.LeaveOneOut
    pareto_k: float | None
    probabilities: np.ndarray

    @property
    def f(self) -> np.ndarray:
        """Draws [chains, draws, C, N]."""
        return np.asarray(self.data["posterior"]["f"])


def main(config: DiagnoseConfig) -> dict[str, Any]:
    """Diagnose, print the table, write files; numbers by method. Raises ConfigError, DataError or RunError."""
    if config.draws < 100 * CHAINS:
        raise ConfigError(f"--draws must be at least {100 * CHAINS}, a hundred for each of {CHAINS} chains")
    model = load_run(config.run_dir)
    out = _output_folder(config)
    task, shape = _task(model, config)
    own = f"{model.config.inference} (the run's own)"
    found, path = _diagnose(model, task, own, config)
    print(
        f"\nOne {shape.way}-way {shape.shot}-shot task of {model.config.dataset} (seed {config.seed}), likelihood "
        f"{model.config.likelihood}: latents of the {len(task.y)} labelled points, each method against NUTS"
    )
    rows = {name: _numbers(one, found["nuts"], task) for name, one in found.items()}
    print(_table(rows))
    print(_notes(model, path))
    out.mkdir(parents=True, exist_ok=True)
    for name, one in found.items():
        stem = "own" if name == own else name
        diagnostics.save(one.data, out / f"{stem}.nc")
        one.summary.to_csv(out / f"{stem}.csv")
    _plot(out, found, task, path)
    print(f"Data (netCDF), tables (CSV) and plots are in {out}.")
    return {"out": str(out), "code": int(np.max(path.code)), "methods": rows}


def _output_folder(config: DiagnoseConfig) -> Path:
    out = Path(config.out) if config.out else Path(config.run_dir) / "diagnostics"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"expected --out to be a new or empty folder, got {out}; choose another or remove it")
    return out


def _task(model: Model, config: DiagnoseConfig) -> tuple[LabelledTask, Shape]:
    """The first test episode of a seed, as evaluate.py draws it."""
    way, shot = config.way or model.config.way, config.shot or model.config.shot
    dataset = load_splits(model.config.dataset, config.data_root).test
    shape = Shape(way, shot, config.query or queries(dataset, shot, automatic.TEST_QUERIES))
    indices = jax.tree.map(lambda values: values[0], draw_episodes(config.seed, "test", dataset, shape, 1).indices)
    images = tasks.flat_images(dataset)
    support, new = (
        embed_images(model.deep_kernel, images[positions]) for positions in (indices.x_support, indices.x_query)
    )
    kernel, hyper = model.deep_kernel.kernel, model.deep_kernel.hyperparameters()
    prior = gaussian_prior(kernel, hyper, support, way)
    query = gaussian_query(kernel, hyper, support, new, way)
    return LabelledTask(prior, indices.y_support, query, np.asarray(indices.y_query)), shape


def _diagnose(model: Model, task: LabelledTask, own: str, config: DiagnoseConfig) -> tuple[dict[str, Found], Info]:
    """Every method by name, and the Info of each step of the run's own inference."""
    fit_key, own_key, k_key, gibbs_key, nuts_key, data_key = jax.random.split(jax.random.key(config.seed), 6)
    algorithm, likelihood = model.inference, model.likelihood
    steps = SAMPLER_STEPS if algorithm.traits.sampled else MAX_STEPS
    state, path = jax.jit(lambda key: fit(key, algorithm, task.prior, task.y, steps=steps))(fit_key)
    posterior = algorithm.posterior(state, task.prior)

    def found(source: Any, key: Any, pareto_k: float | None = None) -> Found:
        data = diagnostics.to_arviz(key, source, likelihood, task.prior, task.y, task.query, config.draws)
        return Found(data, diagnostics.summary_table(data), diagnostics.psis_loo(data), pareto_k, _predicted(data))

    pareto_k = None
    if not algorithm.traits.sampled:
        pareto_k = diagnostics.pareto_k(k_key, algorithm, state, task.prior, likelihood, task.y, config.draws)
    methods = {own: found(posterior, own_key, pareto_k)}
    each = config.draws // CHAINS
    if isinstance(likelihood, AugmentedLikelihood):
        sampler = MCMC(
            GibbsKernel(task.prior, likelihood, task.y),
            num_warmup=each // 2,
            num_samples=each,
            num_chains=CHAINS,
            chain_method="vectorized",
            progress_bar=False,
        )
        sampler.run(gibbs_key, extra_fields=("code",))
        methods["gibbs"] = found(sampler, data_key)
    reference = nuts(task.prior, likelihood, task.y, num_warmup=each // 2, num_samples=each, num_chains=CHAINS)
    reference.run(nuts_key, extra_fields=("potential_energy", "num_steps", "accept_prob"))
    methods["nuts"] = found(reference, data_key)
    return methods, jax.device_get(path)


def _predicted(data: Any) -> np.ndarray:
    """p(y_* | data) [Q, C]: mean density over the draws, normalised over the labels."""
    density = np.asarray(data["predictions"]["density"], np.float64).mean((0, 1))
    return density / density.sum(1, keepdims=True)


def _numbers(found: Found, reference: Found, task: LabelledTask) -> dict[str, float | None]:
    """The row of one method. Differences of means are in standard deviations of the reference."""
    summary, chosen = found.summary, found.probabilities[np.arange(len(task.y_query)), task.y_query]
    distance = np.abs(summary["mean"] - reference.summary["mean"]) / reference.summary["sd"]
    many = found.f.shape[0] > 1
    return {
        "r_hat": float(summary["r_hat"].max()) if many else None,
        "ess_bulk": float(summary["ess_bulk"].min()),
        "ess_tail": float(summary["ess_tail"].min()),
        "mcse": float((summary["mcse_mean"] / summary["sd"]).max()),
        "k_hat": found.pareto_k,
        "elpd_loo": found.loo.elpd,
        "elpd_loo_se": found.loo.se,
        "loo_k": float(found.loo.pareto_k.max()),
        "mean_difference": float(distance.max()),
        "total_variation": float(0.5 * np.abs(found.probabilities - reference.probabilities).sum(1).mean()),
        "nll": float(-np.log(chosen).mean()),
    }


def _table(rows: dict[str, dict[str, float | None]]) -> str:
    formats: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
        "r_hat": ("R-hat", lambda row: _number(row["r_hat"], 3)),
        "ess_bulk": ("ESS bulk", lambda row: _number(row["ess_bulk"], 0)),
        "ess_tail": ("ESS tail", lambda row: _number(row["ess_tail"], 0)),
        "mcse": ("MCSE/sd", lambda row: _number(row["mcse"], 3)),
        "k_hat": ("k-hat", lambda row: _number(row["k_hat"], 2)),
        "loo": ("PSIS-LOO", lambda row: f"{row['elpd_loo']:.2f} +- {row['elpd_loo_se']:.2f}"),
        "loo_k": ("LOO k-hat", lambda row: _number(row["loo_k"], 2)),
        "mean": ("|mean - NUTS|/sd", lambda row: _number(row["mean_difference"], 3)),
        "tv": ("TV to NUTS", lambda row: _number(row["total_variation"], 4)),
        "nll": ("query NLL", lambda row: _number(row["nll"], 4)),
    }
    header = ["", *(title for title, _ in formats.values())]
    return format_table(header, [[name, *(text(row) for _, text in formats.values())] for name, row in rows.items()])


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def _notes(model: Model, path: Info) -> str:
    """What the numbers mean, and what went wrong."""
    lines = [
        "R-hat, ESS, MCSE: of the worst latent. TV: mean total variation of the query probabilities. k-hat: of the",
        "variational posterior against the exact joint; above 0.7 importance weights could not repair it.",
        f"Predictions are at temperature 1 (the run's is {model.temperature:.3f}).",
    ]
    code = Code(int(np.max(path.code)))
    if code != Code.OK:
        lines.append(f"The run's own inference reported {code.name.lower().replace('_', ' ')}.")
    if model.config.likelihood == "one-vs-each":
        lines.append("One-vs-each is not normalised over labels: compare its PSIS-LOO with no other likelihood's.")
    if not model.inference.traits.sampled:
        lines.append(f"Residual of the run's own inference after {len(path.elbo)} steps: {path.residual[-1]:.1e}.")
    return "\n".join(lines)


# Plots: matplotlib is imported here, as it costs a second.


def _plot(out: Path, found: dict[str, Found], task: LabelledTask, path: Info) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    chains = {name: one for name, one in found.items() if name in ("gibbs", "nuts")}
    own = next(iter(found))
    figures = {
        "trace": _trace(plt, chains, task),
        "rank": _rank(plt, chains, task),
        "forest": _forest(plt, found, task),
        "elbo": _path(plt, own, path),
        "predictive": _predictive(plt, found, task),
    }
    for name, figure in figures.items():
        figure.savefig(out / f"{name}.png", dpi=110)
        plt.close(figure)


def _shown(task: LabelledTask) -> list[tuple[int, int]]:
    """Latents traced: of the first point of each class, that class."""
    labels = np.asarray(task.y)
    return [(int(label), int(np.flatnonzero(labels == label)[0])) for label in np.unique(labels)[:MOST_TRACES]]


def _grid(plt: Any, chains: dict[str, Found], task: LabelledTask, draw: Callable[..., None], **text: str) -> Any:
    """A panel for each traced latent (rows) and sampler (columns)."""
    shown = _shown(task)
    figure, axes = plt.subplots(
        len(shown),
        len(chains),
        figsize=(5.5 * len(chains), 1.8 * len(shown) + 0.8),
        squeeze=False,
        layout="constrained",
    )
    for row, (label, point) in zip(axes, shown, strict=True):
        for axis, (name, one) in zip(row, chains.items(), strict=True):
            draw(axis, one.f[:, :, label, point])
            axis.set_title(f"{name}: class {label} at point {point}, its own", fontsize=9)
            axis.tick_params(labelsize=8)
    for axis in axes[-1]:
        axis.set_xlabel(text["x"], fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel(text["y"], fontsize=9)
    return figure


def _trace(plt: Any, chains: dict[str, Found], task: LabelledTask) -> Any:
    """Latents along the chains."""

    def draw(axis: Any, values: np.ndarray) -> None:
        axis.plot(values.T, linewidth=0.5, alpha=0.7)
        axis.margins(x=0)

    return _grid(plt, chains, task, draw, x="draw (one colour a chain)", y="f")


def _rank(plt: Any, chains: dict[str, Found], task: LabelledTask) -> Any:
    """Histograms of each chain's ranks among the draws of all chains: flat where the chains agree."""

    def draw(axis: Any, values: np.ndarray) -> None:
        ranks = values.ravel().argsort().argsort().reshape(values.shape)
        edges = np.linspace(0, values.size, 21)
        for chain in ranks:
            axis.stairs(np.histogram(chain, edges)[0], edges, baseline=None, linewidth=1.2)
        axis.axhline(values.shape[1] / 20, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylim(bottom=0)
        axis.margins(x=0)

    return _grid(plt, chains, task, draw, x="rank among all draws (one colour a chain)", y="draws")


def _forest(plt: Any, found: dict[str, Found], task: LabelledTask) -> Any:
    """Mean and 94% interval of every latent by every method, points by their class."""
    classes, points = task.prior.mean.shape
    pairs = [(label, point) for point in range(points) for label in range(classes)]
    shown = pairs[:MOST_LATENTS]
    figure, axis = plt.subplots(figsize=(8, 0.32 * len(shown) + 1.6), layout="constrained")
    base = np.arange(len(shown))[::-1]
    for number, (name, one) in enumerate(found.items()):
        draws = np.stack([one.f[:, :, label, point].ravel() for label, point in shown])
        low, high = np.quantile(draws, [0.03, 0.97], axis=1)
        height = base + 0.22 * (len(found) - 1 - 2 * number) / 2
        axis.hlines(height, low, high, color=f"C{number}", linewidth=1.5)
        axis.plot(draws.mean(1), height, "o", color=f"C{number}", markersize=4, label=name)
    labels = np.asarray(task.y)
    names = [f"point {point}, class {label}{' *' if labels[point] == label else ''}" for label, point in shown]
    axis.set_yticks(base, names, fontsize=8)
    axis.set_ylim(-0.7, len(shown) - 0.3)
    for edge in range(classes, len(shown), classes):
        axis.axhline(len(shown) - edge - 0.5, color="0.85", linewidth=0.8, zorder=0)
    some = f", {len(shown)} of {len(pairs)}" if len(shown) < len(pairs) else ""
    axis.set_xlabel(f"f: mean and 94% interval (* the point's own class{some})", fontsize=9)
    figure.legend(loc="outside upper center", ncols=len(found), fontsize=9, frameon=False)
    return figure


def _path(plt: Any, own: str, path: Info) -> Any:
    """The bound after every step; a sampler's log likelihood."""
    sampled = own.startswith("gibbs")
    figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    steps = np.arange(1, len(path.elbo) + 1)
    axis.plot(steps, path.elbo, marker=".", markersize=4, linewidth=1)
    axis.set_xlabel("step", fontsize=9)
    axis.set_ylabel("mean log p(y | f) of the chains" if sampled else "ELBO (nats)", fontsize=9)
    axis.set_title(f"{own}: {float(path.elbo[-1]):.3f} after {len(steps)} steps", fontsize=10)
    axis.ticklabel_format(useOffset=False)
    if not sampled and len(steps) > 1:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
    return figure


def _predictive(plt: Any, found: dict[str, Found], task: LabelledTask) -> Any:
    """Probabilities of some queries by every method, side by side; the frame marks the true class."""
    classes = task.prior.mean.shape[0]
    order = np.argsort(task.y_query, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(MOST_QUERIES, len(order))).astype(int)]
    figure, axes = plt.subplots(
        1,
        len(found),
        figsize=((0.55 * classes + 1.2) * len(found) + 1, 0.36 * len(chosen) + 1.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (name, one) in zip(axes[0], found.items(), strict=True):
        values = one.probabilities[chosen]
        axis.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for row, column in np.ndindex(values.shape):
            colour = "white" if values[row, column] > 0.6 else "black"
            axis.text(column, row, f"{values[row, column]:.2f}", ha="center", va="center", fontsize=7, color=colour)
        for row, label in enumerate(task.y_query[chosen]):
            axis.add_patch(plt.Rectangle((label - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="C1", linewidth=1.8))
        axis.set_xticks(range(classes))
        axis.set_yticks(range(len(chosen)), [f"query {index}" for index in chosen], fontsize=8)
        axis.set_title(name.replace(" (", "\n("), fontsize=9)
        axis.set_xlabel("class", fontsize=9)
    figure.suptitle("p(class | data); the true class is framed", fontsize=10)
    return figure


def parse(arguments: Sequence[str] | None = None) -> DiagnoseConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="diagnose.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--out", metavar="DIR", help="new folder for what is written (default RUN_DIR/diagnostics)")
    parser.add_argument("--way", type=count_or_auto, default=0, metavar="C", help="classes (default: as trained)")
    parser.add_argument("--shot", type=count_or_auto, default=0, metavar="S", help="labelled images a class")
    parser.add_argument("--query", type=count_or_auto, default=0, metavar="Q", help="queries a class (default 15)")
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="of the task and all draws (default 0)")
    parser.add_argument("--draws", type=int, default=4000, metavar="N", help="of every method (default 4000)")
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    return DiagnoseConfig(**vars(parser.parse_args(arguments)))


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    with one_line_errors(ConfigError, DataError, RunError, CheckpointError):
        config = parse(arguments)
        compilation_cache.enable()
        main(config)
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
