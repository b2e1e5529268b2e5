"""One task's posteriors as tables: each method against NUTS, and each likelihood under the same kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fewshot.evaluation.diagnosis import Found, LabelledTask, Tell, silent, under_likelihood
from fewshot.evaluation.text import format_table
from fewshot.inference import diagnostics
from fewshot.inference.inner.base import Code, Info
from fewshot.learners import GaussianProcess
from fewshot.models.likelihoods.base import Likelihood

SAME_KERNEL = "The same kernel under every likelihood, the others at their first parameters and prior mean"


class MethodRow(NamedTuple):
    """What one method found. Differences of means are in standard deviations of NUTS; None where there is no number."""

    r_hat: float | None
    ess_bulk: float
    ess_tail: float
    mcse: float
    k_hat: float | None
    elpd_loo: float
    elpd_loo_se: float
    loo_k: float
    mean_difference: float
    total_variation: float
    nll: float


class LikelihoodRow(NamedTuple):
    """Leave-one-out scores of the labels under a likelihood; the difference is to the first one's.

    objection: why leaving labels out says nothing here, None where it does.
    """

    sampler: str
    ess_bulk: float
    elpd_loo: float
    elpd_loo_se: float
    difference: float
    difference_se: float
    loo_k: float
    objection: str | None
    nll: float


def method_row(found: Found, reference: Found, task: LabelledTask) -> MethodRow:
    """The numbers of one method beside those of a reference."""
    summary = found.summary
    distance = np.abs(summary["mean"] - reference.summary["mean"]) / reference.summary["sd"]
    many = found.f.shape[0] > 1
    return MethodRow(
        r_hat=float(summary["r_hat"].max()) if many else None,
        ess_bulk=float(summary["ess_bulk"].min()),
        ess_tail=float(summary["ess_tail"].min()),
        mcse=float((summary["mcse_mean"] / summary["sd"]).max()),
        k_hat=found.pareto_k,
        elpd_loo=found.loo.elpd,
        elpd_loo_se=found.loo.se,
        loo_k=float(found.loo.pareto_k.max()),
        mean_difference=float(distance.max()),
        total_variation=float(0.5 * np.abs(found.probabilities - reference.probabilities).sum(1).mean()),
        nll=task.nll(found.probabilities),
    )


def methods_table(rows: Mapping[str, MethodRow]) -> str:
    """A row for each method."""
    cells: dict[str, Callable[[MethodRow], str]] = {
        "R-hat": lambda row: _number(row.r_hat, 3),
        "ESS bulk": lambda row: _number(row.ess_bulk, 0),
        "ESS tail": lambda row: _number(row.ess_tail, 0),
        "MCSE/sd": lambda row: _number(row.mcse, 3),
        "k-hat": lambda row: _number(row.k_hat, 2),
        "PSIS-LOO": lambda row: f"{row.elpd_loo:.2f} +- {row.elpd_loo_se:.2f}",
        "LOO k-hat": lambda row: _number(row.loo_k, 2),
        "|mean - NUTS|/sd": lambda row: _number(row.mean_difference, 3),
        "TV to NUTS": lambda row: _number(row.total_variation, 4),
        "query NLL": lambda row: _number(row.nll, 4),
    }
    return format_table(["", *cells], [[name, *(cell(row) for cell in cells.values())] for name, row in rows.items()])


def notes(learner: GaussianProcess, likelihood: str, inference: str, temperature: float, path: Info) -> str:
    """What the numbers mean, and what went wrong; likelihood and inference are names."""
    lines = [
        "R-hat, ESS, MCSE: of the worst latent. TV: mean total variation of the query probabilities. k-hat: of the",
        "variational posterior against the exact joint; above 0.7 importance weights could not repair it.",
        f"Predictions are at temperature 1 (the run's is {temperature:.3f}).",
    ]
    doubt = diagnostics.doubt_about_laplace(learner.likelihood) if inference == "laplace" else None
    if doubt:
        lines.append(f"Do not trust this approximation: {doubt}.")
    code = Code(int(np.max(path.code)))
    if code != Code.OK:
        lines.append(f"The run's own inference reported {code.name.lower().replace('_', ' ')}.")
    if likelihood == "one-vs-each":
        lines.append("One-vs-each is not normalised over labels: this PSIS-LOO compares its methods alone.")
    if not learner.inference.traits.sampled:
        lines.append(f"Residual of the run's own inference after {len(path.elbo)} steps: {path.residual[-1]:.1e}.")
    return "\n".join(lines)


def likelihood_rows(
    own: tuple[str, Likelihood, Found],
    others: Mapping[str, Likelihood],
    task: LabelledTask,
    seed: int,
    draws: int,
    tell: Tell = silent,
) -> dict[str, LikelihoodRow]:
    """Rows of the run's likelihood, whose NUTS draws `own` has, and of others with the same kernel."""
    name, likelihood, found = own
    reference = diagnostics.label_loo(found.data, likelihood)
    scores = {name: _score("nuts", found, task, reference, reference)}
    for number, (other, another) in enumerate(others.items()):
        tell(f"the labels under {other}")
        key = jax.random.fold_in(jax.random.key(seed), number)
        sampler, one = under_likelihood(key, another, task.under(another), draws)
        scores[other] = _score(sampler, one, task, diagnostics.label_loo(one.data, another), reference)
    return scores


def _score(
    sampler: str, one: Found, task: LabelledTask, loo: diagnostics.LeaveOneOut, reference: diagnostics.LeaveOneOut
) -> LikelihoodRow:
    difference = loo.pointwise - reference.pointwise
    return LikelihoodRow(
        sampler=sampler,
        ess_bulk=float(one.summary["ess_bulk"].min()),
        elpd_loo=loo.elpd,
        elpd_loo_se=loo.se,
        difference=float(difference.sum()),
        difference_se=float(np.sqrt(len(difference) * np.var(difference))),
        loo_k=float(loo.pareto_k.max()),
        objection=diagnostics.objection_to_ranking(loo, task.y),
        nll=task.nll(one.probabilities),
    )


def likelihoods_table(scores: Mapping[str, LikelihoodRow]) -> str:
    """A row for each likelihood, all with the run's kernel on the same task; by held-out queries where LOO fails."""
    objection = next((row.objection for row in scores.values() if row.objection), None)
    if objection:
        return _by_queries(scores, objection)
    header = ["", "by", "ESS bulk", "PSIS-LOO of labels", "minus the run's", "LOO k-hat", "query NLL"]
    lines = [
        [
            name,
            row.sampler,
            _number(row.ess_bulk, 0),
            f"{row.elpd_loo:.2f} +- {row.elpd_loo_se:.2f}",
            f"{row.difference:+.2f} +- {row.difference_se:.2f}",
            _number(row.loo_k, 2),
            _number(row.nll, 4),
        ]
        for name, row in scores.items()
    ]
    return (
        f"\n{format_table(header, lines)}\n{SAME_KERNEL}. PSIS-LOO of\n"
        "labels: densities normalised over the label, without which that of one-vs-each is composite and that of\n"
        "gaussian one of codes, each on a scale of its own."
    )


def _by_queries(scores: Mapping[str, LikelihoodRow], objection: str) -> str:
    """A row for each likelihood, the least NLL of the held-out queries first, where leaving labels out says nothing."""
    ranked = sorted(scores.items(), key=lambda item: item[1].nll)
    lines: list[Sequence[str]] = [
        [name, row.sampler, _number(row.ess_bulk, 0), _number(row.nll, 4)] for name, row in ranked
    ]
    return (
        f"\n{format_table(['', 'by', 'ESS bulk', 'query NLL'], lines)}\n{SAME_KERNEL}, ranked by the\n"
        f"held-out queries. No ranking by PSIS-LOO: {objection}."
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"
