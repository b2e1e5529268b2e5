"""Compare a run's own inference with long MCMC on one test task: ArviZ data files, a table and plots.

python runners/diagnose.py RUN_DIR [--out DIR] [--way C] [--shot S] [--compare NAMES]      every flag: --help
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fewshot import models
from fewshot.evaluation.diagnosis import CHAINS, Found, LabelledTask, labelled_task, own_methods, under_likelihood
from fewshot.evaluation.diagnosis_plots import plot
from fewshot.evaluation.episodes import EVALUATION_SEED, Shape, draw_episodes, queries
from fewshot.evaluation.text import format_table
from fewshot.inference import diagnostics
from fewshot.inference.inner.base import Code, Info
from fewshot.learners import GaussianProcess
from fewshot.models.likelihoods.base import Likelihood
from fewshot.runners.cli.flags import OneLineParser, count_or_auto, whole_number
from fewshot.runners.cli.launch import launch
from fewshot.training.overrides import ConfigError
from fewshot.training.run import Run, load_run
from fewshot.training.run_directory import RunError

OTHERS = "all"


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
    compare: str = OTHERS
    data_root: str | None = None

    def others(self, own: str) -> list[str]:
        """Names of the likelihoods to compare with. Raises ConfigError."""
        names = list(models.LIKELIHOODS) if self.compare == OTHERS else self.compare.split(",")
        unknown = [name for name in names if name not in models.LIKELIHOODS and name != "none"]
        if unknown:
            known = ", ".join(models.LIKELIHOODS)
            raise ConfigError(f"--compare: expected all, none, or some of {known}, got {unknown[0]!r}")
        return [name for name in names if name not in (own, "none")]


def main(config: DiagnoseConfig) -> dict[str, Any]:
    """Diagnose, print the table, write files; numbers by method. Raises ConfigError, DataError or RunError."""
    if config.draws < 100 * CHAINS:
        raise ConfigError(f"--draws must be at least {100 * CHAINS}, a hundred for each of {CHAINS} chains")
    run = load_run(config.run_dir)
    learner = run.learner
    if not isinstance(learner, GaussianProcess):
        raise ConfigError(f"diagnose.py looks at posteriors of Gaussian processes, {run.config.learner} has none")
    others, out = config.others(run.config.likelihood), _output_folder(config)
    task, shape = first_test_task(run, learner, config)
    print(f"{config.draws:,} draws of the latents by each method: a minute or two", flush=True)
    own = f"{run.config.inference} (the run's own)"
    methods, path = own_methods(learner, task, own, config.seed, config.draws)
    print(
        f"\nOne {shape.way}-way {shape.shot}-shot task of {run.config.dataset} (seed {config.seed}), likelihood "
        f"{run.config.likelihood}: latents of the {len(task.y)} labelled points, each method against NUTS"
    )
    rows = {name: _numbers(one, methods["nuts"], task) for name, one in methods.items()}
    print(_table(rows))
    print(_notes(run, learner, path))
    scores = _likelihoods(run.config.likelihood, learner.likelihood, others, task, methods["nuts"], config)
    print(_likelihood_table(scores))
    _write(out, own, methods, task, path)
    return {"out": str(out), "code": int(np.max(path.code)), "methods": rows, "likelihoods": scores}


def first_test_task(run: Run, learner: GaussianProcess, config: DiagnoseConfig) -> tuple[LabelledTask, Shape]:
    """The first test episode of a seed, as evaluate.py draws it; 0 stands for the run's own value."""
    way, shot = config.way or run.config.way, config.shot or run.config.shot
    dataset = run.splits(config.data_root).test
    shape = Shape(way, shot, config.query or queries(dataset, shot))
    return labelled_task(learner, dataset, draw_episodes(config.seed, "test", dataset, shape, 1)), shape


def _write(out: Path, own: str, methods: dict[str, Found], task: LabelledTask, path: Info) -> None:
    """Data and summary of every method, and the plots."""
    out.mkdir(parents=True, exist_ok=True)
    for name, one in methods.items():
        stem = "own" if name == own else name
        diagnostics.save(one.data, out / f"{stem}.nc")
        one.summary.to_csv(out / f"{stem}.csv")
    plot(out, methods, task, path)
    print(f"Data (netCDF), tables (CSV) and plots are in {out}.")


def _output_folder(config: DiagnoseConfig) -> Path:
    out = Path(config.out) if config.out else Path(config.run_dir) / "diagnostics"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"expected --out to be a new or empty folder, got {out}; choose another or remove it")
    return out


def _numbers(found: Found, reference: Found, task: LabelledTask) -> dict[str, float | None]:
    """The row of one method. Differences of means are in standard deviations of the reference."""
    summary = found.summary
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
        "nll": task.nll(found.probabilities),
    }


def _likelihoods(
    name: str, likelihood: Likelihood, others: Sequence[str], task: LabelledTask, own: Found, config: DiagnoseConfig
) -> dict[str, dict[str, Any]]:
    """Leave-one-out scores of the labels under the run's likelihood, and under others with the same kernel."""
    reference = diagnostics.label_loo(own.data, likelihood)
    scores = {name: _score("nuts", own, task, reference, reference)}
    for number, other in enumerate(others):
        another, key = models.LIKELIHOODS[other](), jax.random.fold_in(jax.random.key(config.seed), number)
        sampler, one = under_likelihood(key, another, task.under(another), config.draws)
        scores[other] = _score(sampler, one, task, diagnostics.label_loo(one.data, another), reference)
    return scores


def _score(
    sampler: str, one: Found, task: LabelledTask, loo: diagnostics.LeaveOneOut, reference: diagnostics.LeaveOneOut
) -> dict[str, Any]:
    difference = loo.pointwise - reference.pointwise
    return {
        "sampler": sampler,
        "ess_bulk": float(one.summary["ess_bulk"].min()),
        "elpd_loo": loo.elpd,
        "elpd_loo_se": loo.se,
        "difference": float(difference.sum()),
        "difference_se": float(np.sqrt(len(difference) * np.var(difference))),
        "loo_k": float(loo.pareto_k.max()),
        "objection": diagnostics.objection_to_ranking(loo, task.y),
        "nll": task.nll(one.probabilities),
    }


def _likelihood_table(scores: dict[str, dict[str, Any]]) -> str:
    """A row for each likelihood, all with the run's kernel on the same task; by held-out queries where LOO fails."""
    objection = next((row["objection"] for row in scores.values() if row["objection"]), None)
    if objection:
        return _by_queries(scores, objection)
    header = ["", "by", "ESS bulk", "PSIS-LOO of labels", "minus the run's", "LOO k-hat", "query NLL"]
    lines = [
        [
            name,
            row["sampler"],
            _number(row["ess_bulk"], 0),
            f"{row['elpd_loo']:.2f} +- {row['elpd_loo_se']:.2f}",
            f"{row['difference']:+.2f} +- {row['difference_se']:.2f}",
            _number(row["loo_k"], 2),
            _number(row["nll"], 4),
        ]
        for name, row in scores.items()
    ]
    notes = (
        "The same kernel under every likelihood, the others at their first parameters and prior mean. PSIS-LOO of\n"
        "labels: densities normalised over the label, without which that of one-vs-each is composite and that of\n"
        "gaussian one of codes, each on a scale of its own."
    )
    return f"\n{format_table(header, lines)}\n{notes}"


def _by_queries(scores: dict[str, dict[str, Any]], objection: str) -> str:
    """A row for each likelihood, the least NLL of the held-out queries first, where leaving labels out says nothing."""
    ranked = sorted(scores.items(), key=lambda item: item[1]["nll"])
    lines = [[name, row["sampler"], _number(row["ess_bulk"], 0), _number(row["nll"], 4)] for name, row in ranked]
    notes = (
        "The same kernel under every likelihood, the others at their first parameters and prior mean, ranked by the\n"
        f"held-out queries. No ranking by PSIS-LOO: {objection}."
    )
    return f"\n{format_table(['', 'by', 'ESS bulk', 'query NLL'], lines)}\n{notes}"


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


def _notes(run: Run, learner: GaussianProcess, path: Info) -> str:
    """What the numbers mean, and what went wrong."""
    lines = [
        "R-hat, ESS, MCSE: of the worst latent. TV: mean total variation of the query probabilities. k-hat: of the",
        "variational posterior against the exact joint; above 0.7 importance weights could not repair it.",
        f"Predictions are at temperature 1 (the run's is {run.temperature:.3f}).",
    ]
    doubt = diagnostics.doubt_about_laplace(learner.likelihood) if run.config.inference == "laplace" else None
    if doubt:
        lines.append(f"Do not trust this approximation: {doubt}.")
    code = Code(int(np.max(path.code)))
    if code != Code.OK:
        lines.append(f"The run's own inference reported {code.name.lower().replace('_', ' ')}.")
    if run.config.likelihood == "one-vs-each":
        lines.append("One-vs-each is not normalised over labels: this PSIS-LOO compares its methods alone.")
    if not learner.inference.traits.sampled:
        lines.append(f"Residual of the run's own inference after {len(path.elbo)} steps: {path.residual[-1]:.1e}.")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> DiagnoseConfig:
    """The command line. Raises ConfigError."""
    parser = OneLineParser(prog="diagnose.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of a run")
    parser.add_argument("--out", metavar="DIR", help="new folder for what is written (default RUN_DIR/diagnostics)")
    parser.add_argument("--way", type=count_or_auto, default=0, metavar="C", help="classes (default: as trained)")
    parser.add_argument("--shot", type=count_or_auto, default=0, metavar="S", help="labelled images a class")
    parser.add_argument("--query", type=count_or_auto, default=0, metavar="Q", help="queries a class (default 15)")
    parser.add_argument(
        "--seed", type=whole_number, default=EVALUATION_SEED, help="of the task and all draws (default 0)"
    )
    parser.add_argument("--draws", type=int, default=4000, metavar="N", help="of every method (default 4000)")
    parser.add_argument(
        "--compare",
        default=OTHERS,
        metavar="NAMES",
        help="other likelihoods: all (default), none, or names with commas",
    )
    parser.add_argument("--data-root", metavar="DIR", help="where data files are (default $FEWSHOT_DATA)")
    return DiagnoseConfig(**vars(parser.parse_args(arguments)))


def command_line(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 after an error in one line."""
    return launch(parse, main, arguments)


if __name__ == "__main__":
    sys.exit(command_line())
