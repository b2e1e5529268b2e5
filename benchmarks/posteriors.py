"""Every inference of every likelihood against NUTS and the evidence, on two tasks, in one table.

    python benchmarks/posteriors.py [--quick] [--run RUN_DIR] [--out docs/results/posteriors.md]

Tasks: 3 classes with 12 points and 5-way 5-shot, with random features and an RBF kernel; with a run the second has
its kernel and is the first 5-way 5-shot test task of its data set. The evidence is estimated by annealed importance
sampling, KL(q || p) is the evidence less the bound, means are compared in standard deviations of NUTS.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from scipy.stats import norm

from fewshot.evaluation.diagnosis import LabelledTask, labelled_task
from fewshot.evaluation.episodes import Shape, draw_episodes
from fewshot.inference import diagnostics
from fewshot.inference.evidence import Estimate, annealed_evidence, bound
from fewshot.inference.inner import cavi, cvi, fit_to_tolerance, laplace
from fewshot.inference.inner.base import Code
from fewshot.inference.mcmc import GibbsKernel, nuts
from fewshot.inference.predictive import predict
from fewshot.learners import GaussianProcess
from fewshot.models import KERNELS, LIKELIHOODS
from fewshot.models.gaussian import BlockSites
from fewshot.models.likelihoods.base import AugmentedLikelihood, Likelihood, SmoothLikelihood
from fewshot.models.process import LatentProcess
from fewshot.runners.cli import compilation_cache
from fewshot.training.run import load_run

NAMES = ("softmax", "logistic-softmax", "one-vs-each")
REPEATS = 5  # of a compiled fit, whose shortest time is shown
FAMILY = 0.01  # error rate of all comparisons of Gibbs with NUTS in one row
HEADER = ["likelihood", "method", "ELBO", "bound", "KL to the posterior", "mean - NUTS", "sd / NUTS", "NLL", "seconds"]


class Effort(NamedTuple):
    """Chains of NUTS and Gibbs with their warm-up and draws; particles and steps of the evidence; nodes of a bound."""

    nuts: tuple[int, int, int] = (4, 500, 1000)
    gibbs: tuple[int, int, int] = (16, 300, 2000)
    annealing: tuple[int, int] = (256, 2000)
    nodes: int = 2**15


QUICK = Effort((4, 200, 300), (8, 100, 300), (64, 300), 2**12)


def main() -> None:
    """Print the tables, and write them as Markdown."""
    arguments = parse()
    compilation_cache.keep_programs()
    effort = QUICK if arguments.quick else Effort()
    if arguments.sweeps:
        effort = effort._replace(gibbs=(*effort.gibbs[:2], arguments.sweeps))
    parts = [f"# Posteriors of every inference against NUTS\n\n`{command()}` wrote this page.\n\n{notes(effort)}"]
    for name, task in tasks(arguments).items():
        lines: list[dict[str, object]] = []
        remarks: list[str] = []
        for likelihood in arguments.likelihood or NAMES:
            rows, said = compare(arguments.seed, likelihood, task, effort)
            lines += rows
            remarks += said
        parts.append(f"## {name}\n\n{markdown(lines)}\n\n" + "\n".join(f"- {remark}" for remark in remarks))
        print(parts[-1], flush=True)
    if arguments.out:
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.out).write_text("\n\n".join(parts) + "\n")


def tasks(arguments: argparse.Namespace) -> dict[str, LabelledTask]:
    """Both tasks by name."""
    found = {"3 classes, 12 points": random_task(arguments.seed, 3, 4)}
    if arguments.run:
        return {**found, "5-way 5-shot, test task of a run": task_of_run(arguments)}
    return {**found, "5-way 5-shot": random_task(arguments.seed, 5, 5)}


def task_of_run(arguments: argparse.Namespace) -> LabelledTask:
    """The first 5-way 5-shot test task of a run's data set, on its features and with its kernel."""
    run = load_run(arguments.run)
    if not isinstance(run.learner, GaussianProcess):
        raise SystemExit(f"expected a run of a Gaussian process, got learner {run.config.learner}; name another run")
    test = run.splits(arguments.data_root).test
    return labelled_task(run.learner, test, draw_episodes(arguments.seed, "test", test, Shape(5, 5, 15), 1))


def random_task(seed: int, classes: int, shots: int, queries: int = 15, features: int = 16) -> LabelledTask:
    """Classes around centres in ReLU features that overlap; RBF kernel with output scale 10."""
    rng = np.random.default_rng(seed)
    y, y_query = (np.repeat(np.arange(classes), count).astype(np.int32) for count in (shots, queries))
    centres = rng.normal(size=(classes, features))
    labels = np.concatenate([y, y_query])
    x = jnp.asarray(np.maximum(centres[labels] + 1.2 * rng.normal(size=(len(labels), features)), 0), jnp.float32)
    kernel = KERNELS["rbf"]()
    process = LatentProcess(kernel, {**kernel.initial(), "log_scale": np.log(10.0)})
    support, query = x[: len(y)], x[len(y) :]
    prior, between = process.prior(support, classes), process.query(support, query, classes)
    return LabelledTask(prior, jnp.asarray(y), between, y_query)


def compare(seed: int, name: str, task: LabelledTask, effort: Effort) -> tuple[list[dict[str, object]], list[str]]:
    """Rows of one likelihood, and what is to be said about them."""
    likelihood = LIKELIHOODS[name]()
    task = task.under(likelihood)
    evidence_key, nuts_key, gibbs_key, *keys = jax.random.split(jax.random.key(seed), 6)
    evidence = estimate(evidence_key, likelihood, task, effort)
    worth = f"{evidence.value:.3f} +- {evidence.error:.3f}, worth {evidence.effective:.0f} independent particles"
    reference, row = sampled(nuts_key, "nuts", run_nuts, likelihood, task, effort)
    rows = [progress(name, row)]
    remarks = [f"log evidence {worth}", f"smallest bulk ESS of NUTS {reference['ess_bulk'].min():.0f}"]
    if isinstance(likelihood, AugmentedLikelihood):
        drawn, row = sampled(gibbs_key, "gibbs", run_gibbs, likelihood, task, effort)
        rows.append(progress(name, row))
        remarks.append(agreement(drawn, reference))
    for method, kernel in kernels(likelihood).items():
        row = variational(keys, method, kernel, likelihood, task, effort, evidence, reference)
        rows.append(progress(name, row))
    diagonal, block = (next(row for row in rows if row["method"] == method) for method in ("cvi", "cvi, block"))
    error = np.hypot(diagonal["bound_error"], block["bound_error"])
    remarks.append(f"block sites raise the bound of cvi by {block['bound'] - diagonal['bound']:.4f} +- {error:.4f}")
    return rows, [f"{name}: {remark}" for remark in remarks]


def estimate(key: jax.Array, likelihood: Likelihood, task: LabelledTask, effort: Effort) -> Estimate:
    """log p(y)."""
    particles, steps = effort.annealing

    @jax.jit
    def run(key: jax.Array) -> Estimate:
        return annealed_evidence(key, task.prior, likelihood, task.y, particles=particles, steps=steps)

    return jax.device_get(run(key))


def run_nuts(key: jax.Array, likelihood: Likelihood, task: LabelledTask, effort: Effort) -> MCMC:
    """NUTS that has run."""
    count, warmup, draws = effort.nuts
    mcmc = nuts(task.prior, likelihood, task.y, num_warmup=warmup, num_samples=draws, num_chains=count)
    mcmc.run(key)
    return mcmc


def run_gibbs(key: jax.Array, likelihood: AugmentedLikelihood, task: LabelledTask, effort: Effort) -> MCMC:
    """Gibbs sampling that has run."""
    count, warmup, draws = effort.gibbs
    kernel = GibbsKernel(task.prior, likelihood, task.y)
    settings: dict[str, object] = {"num_warmup": warmup, "num_samples": draws, "num_chains": count}
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **settings)
    mcmc.run(key)
    return mcmc


def sampled(
    key: jax.Array,
    method: str,
    sampler: Callable[..., MCMC],
    likelihood: Likelihood,
    task: LabelledTask,
    effort: Effort,
) -> tuple[Any, dict[str, object]]:
    """Summary of f by a sampler, and its row; seconds with compilation."""
    start = time.perf_counter()
    mcmc = sampler(key, likelihood, task, effort)
    jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - start
    data = diagnostics.to_arviz(key, mcmc, likelihood, task.prior, task.y, task.query)
    row = {"method": method, "nll": task.nll(diagnostics.probabilities(data)), "seconds": seconds}
    return diagnostics.summary_table(data), row


def agreement(drawn: Any, reference: Any) -> str:
    """Means and standard deviations of all latents by Gibbs and by NUTS, in their joint Monte-Carlo error."""
    scores = [
        np.abs(drawn[value] - reference[value]) / np.hypot(drawn[error], reference[error])
        for value, error in (("mean", "mcse_mean"), ("sd", "mcse_sd"))
    ]
    largest, count = np.max(scores), 2 * len(drawn)
    limit = norm.isf(FAMILY / (2 * count))
    verdict = f"{'below' if largest < limit else 'ABOVE'} the limit {limit:.2f}"
    worst = f"smallest bulk ESS {drawn['ess_bulk'].min():.0f}"
    return f"Gibbs against NUTS, largest of {count} differences {largest:.2f} standard errors, {verdict}; {worst}"


def kernels(likelihood: Likelihood) -> dict[str, object]:
    """Variational methods of a likelihood."""
    found = {"cvi": cvi(likelihood), "cvi, block": cvi(likelihood, sites=BlockSites)}
    if isinstance(likelihood, AugmentedLikelihood):
        found["cavi"] = cavi(likelihood)
    if isinstance(likelihood, SmoothLikelihood):
        found["laplace"] = laplace(likelihood)
    return found


def variational(
    keys: list[jax.Array],
    method: str,
    kernel: Any,
    likelihood: Likelihood,
    task: LabelledTask,
    effort: Effort,
    evidence: Estimate,
    reference: Any,
) -> dict[str, object]:
    """The row of a fit to tolerance."""
    fit_key, bound_key, predict_key = keys

    @jax.jit
    def fitted(key: jax.Array) -> Any:
        state, info, _ = fit_to_tolerance(key, kernel, task.prior, task.y, tolerance=1e-4, max_steps=1000)
        posterior = kernel.posterior(state, task.prior)
        return info, posterior, posterior.variance

    @jax.jit
    def judged(posterior: Any) -> tuple[Estimate, jax.Array]:
        value = bound(bound_key, likelihood, posterior, task.y, draws=effort.nodes)
        return value, predict(predict_key, likelihood, posterior, task.query)

    info, posterior, variance = jax.block_until_ready(fitted(fit_key))
    seconds = min(clock(lambda: jax.block_until_ready(fitted(fit_key))) for _ in range(REPEATS))
    value, probabilities = jax.device_get(judged(posterior))
    mean, sd = (reference[column].to_numpy().reshape(variance.shape) for column in ("mean", "sd"))
    ratio = np.sqrt(variance) / sd
    return {
        "method": method,
        "code": Code(int(info.code)),
        "elbo": float(info.elbo),
        "bound": float(value.value),
        "bound_error": float(value.error),
        "kl": float(evidence.value - value.value),
        "kl_error": float(np.hypot(evidence.error, value.error)),
        "mean": float(np.max(np.abs(posterior.mean - mean) / sd)),
        "sd": (float(ratio.min()), float(ratio.max())),
        "nll": task.nll(probabilities),
        "seconds": seconds,
    }


def progress(name: str, row: dict[str, object]) -> dict[str, object]:
    """The row with its likelihood; a line to standard error."""
    found = {"likelihood": name, **row}
    print(" | ".join(cells(found)), file=sys.stderr, flush=True)
    return found


def clock(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cells(row: dict[str, object]) -> list[str]:
    """A row in words; a sampler has no bound."""
    ends = [f"{row['nll']:.4f}", f"{row['seconds']:.3g}"]
    if "bound" not in row:
        return [row["likelihood"], row["method"], *[""] * 5, *ends]
    failed = "" if row["code"] == Code.OK else f" ({row['code'].name.lower().replace('_', ' ')})"
    return [
        row["likelihood"],
        row["method"] + failed,
        f"{row['elbo']:.3f}",
        f"{row['bound']:.3f} +- {row['bound_error']:.3f}",
        f"{row['kl']:.3f} +- {row['kl_error']:.3f}",
        f"{row['mean']:.3f}",
        "{:.2f} to {:.2f}".format(*row["sd"]),
        *ends,
    ]


def notes(effort: Effort) -> str:
    """What the columns are."""
    (chains, _, draws), (many, _, sweeps), (particles, steps) = effort.nuts, effort.gibbs, effort.annealing
    return (
        "ELBO: the method's own bound, over its own 256 nodes (cavi: augmented, closed form; laplace: of its\n"
        f"Gaussian). Bound: the same q without augmentation, over {effort.nodes:,} other nodes. KL: log evidence\n"
        "less bound, which is KL(q || p(f | y)). Mean - NUTS: largest difference of a latent's mean, in its\n"
        "posterior standard deviations; sd / NUTS: smallest and largest ratio. NLL: of the queries. Seconds: of a\n"
        f"fit that is compiled, of a sampler with its compilation. NUTS: {chains} chains of {draws:,} draws;\n"
        f"Gibbs: {many} of {sweeps:,} sweeps; evidence: {particles} particles, {steps:,} steps. Logistic-softmax\n"
        "has prior mean -3, the others know differences only. One-vs-each: composite evidence."
    )


def markdown(rows: list[dict[str, object]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [HEADER, ["---"] * len(HEADER), *map(cells, rows)])


def command() -> str:
    """The command line, with what names a folder of this machine left out."""
    words = ["RUN_DIR" if before == "--run" else word for before, word in zip(sys.argv, sys.argv[1:], strict=False)]
    return " ".join(["python benchmarks/posteriors.py", *words])


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few draws: to see that it runs")
    parser.add_argument("--likelihood", choices=NAMES, action="append", help="only this one (repeat for more)")
    parser.add_argument("--sweeps", type=int, default=0, help="of every Gibbs chain (default 2000)")
    parser.add_argument("--run", metavar="RUN_DIR", help="a run whose features and kernel the 5-way 5-shot task has")
    parser.add_argument("--out", metavar="FILE", help="Markdown file to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    main()
