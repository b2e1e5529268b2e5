"""Posteriors as ArviZ data, and what ArviZ says of them: R-hat, effective sample sizes, k-hat, PSIS-LOO.

The only file that imports ArviZ: 0.23 (InferenceData), which Python 3.11 gets, and 1.x (DataTree).
"""

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped
from scipy.special import logsumexp

from fewshot.inference.inner.base import Inference, State
from fewshot.inference.inner.mixing import effective_draws
from fewshot.inference.posterior_draws import about_labels, about_queries, log_ratios
from fewshot.models.gaussian import GaussianPrior, Posterior, Query
from fewshot.models.likelihoods import LogisticSoftmax
from fewshot.models.likelihoods.base import Likelihood, log_densities

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
    # ArviZ 0.23 moves a file once a day; of two processes at once the later one finds it gone.
    try:
        import arviz
    except FileNotFoundError:
        import arviz

ArvizData: TypeAlias = Any  # InferenceData or DataTree
Table: TypeAlias = Any  # a table of pandas
Group: TypeAlias = Mapping[str, Shaped[Array | np.ndarray, "..."]]  # of ArviZ's data, by variable

SUMMARY = ["mean", "sd", "mcse_mean", "mcse_sd", "ess_bulk", "ess_tail", "r_hat"]
DIMENSIONS = {
    "f": ["class", "point"],
    "u": ["class", "component"],
    "rate": ["point"],
    "counts": ["class", "point"],
    "omega": ["class", "point"],
    "y": ["point", "class"],  # labels are [N], coded labels [N, C]
    "density": ["query", "class"],
    "f_query": ["class", "query"],
}
TOTAL = "total_log_likelihood"  # ArviZ keeps the name log_likelihood for the group
MOST_K_HAT = 0.7  # above it the smoothed weights have no finite variance in practice (Vehtari et al. 2017)
SHARP = 0.5  # temperatures of logistic-softmax below which Laplace's approximation is not to be trusted
STATISTICS = {"num_steps": "n_steps", "accept_prob": "acceptance_rate", "log_likelihood": TOTAL}  # to ArviZ's names


@runtime_checkable
class HasRun(Protocol):
    """What is asked of an MCMC object that has run, as NumPyro's."""

    def get_samples(self, group_by_chain: bool = False) -> Group:
        """Draws by sample site, [chain, draw, ...] where asked for."""
        ...

    def get_extra_fields(self, group_by_chain: bool = False) -> Group:
        """Statistics of the sampler by name."""
        ...


class LeaveOneOut(NamedTuple):
    """PSIS-LOO: expected log predictive density and its error, effective parameters; k-hat and elpd of points [N]."""

    elpd: float
    se: float
    parameters: float
    pareto_k: np.ndarray
    pointwise: np.ndarray


def to_arviz(
    key: Key[Array, ""],
    posterior_or_mcmc: object,
    likelihood: Likelihood,
    prior: GaussianPrior,
    y: Int[Array, " N"],
    query: Query | None = None,
    draws: int = 1000,
) -> ArvizData:
    """ArviZ data of one task: posterior, posterior_predictive, log_likelihood, sample_stats and observed_data.

    Of a fitted posterior `draws` joint draws of f are taken (of a Gibbs mixture as many in all, a chain a component);
    of an MCMC object that has run all draws are kept. With a query there is a group `predictions`: f_query drawn given
    f, and `density` = p(y_* = k | f_*), whose mean normalised over k is the prediction. Raises TypeError for other
    objects, ValueError for samples without f.
    """
    draw_key, label_key, query_key = jax.random.split(key, 3)
    if isinstance(posterior_or_mcmc, HasRun):
        samples = dict(posterior_or_mcmc.get_samples(group_by_chain=True))
        statistics = _statistics(posterior_or_mcmc.get_extra_fields(group_by_chain=True))
    else:
        if not isinstance(posterior_or_mcmc, Posterior):
            found = type(posterior_or_mcmc).__name__
            raise TypeError(f"expected a posterior or an MCMC object that has run, got {found}")
        draw_all = jax.jit(lambda key: posterior_or_mcmc.draws(key, prior, draws))
        samples, statistics = {"f": draw_all(draw_key)}, {}
    if "f" not in samples:
        raise ValueError(f"expected samples of f, got {', '.join(samples)}; collect f, or sample by mcmc.py")
    of_labels = jax.jit(lambda key, f: about_labels(key, likelihood, y, f))
    groups = {"posterior": samples, **of_labels(label_key, samples["f"])}
    total = jnp.sum(groups["log_likelihood"]["y"], axis=-1)
    groups["sample_stats"] = {**statistics, TOTAL: total}
    if query is not None:
        of_queries = jax.jit(lambda key, f: about_queries(key, likelihood, prior, query, f))
        groups["predictions"] = of_queries(query_key, samples["f"])
    return _dataset(groups, prior.mean.shape, 0 if query is None else query.mean.shape[1])


def samples_to_arviz(mcmc: HasRun) -> ArvizData:
    """ArviZ data of an MCMC object that has run, whatever its model samples: posterior and sample_stats.

    For models with hyper-parameters as sample sites, whose likelihood differs from draw to draw.
    """
    posterior = {name: np.asarray(value) for name, value in mcmc.get_samples(group_by_chain=True).items()}
    fields = _statistics(mcmc.get_extra_fields(group_by_chain=True))
    statistics = {name: np.asarray(value) for name, value in fields.items()}
    return _from_groups({"posterior": posterior, "sample_stats": statistics}, {}, {})


def summary_table(data: ArvizData, var_names: tuple[str, ...] = ("f",)) -> Table:
    """A pandas table, a row for each scalar: mean, sd, their MCSE, bulk and tail ESS, R-hat (NaN for one chain)."""
    with _quiet():  # about statistics that one chain, or constant draws, do not have
        table = arviz.summary(data, var_names=list(var_names), round_to="none")
    return table.reindex(columns=SUMMARY).astype(float)


def psis_loo(data: ArvizData, efficiency: float | None = None) -> LeaveOneOut:
    """Pareto-smoothed importance-sampling leave-one-out (Vehtari, Gelman & Gabry 2017) of `to_arviz`'s data.

    efficiency: effective draws of p(y_n | f) a draw, 1 for independent draws; None finds it, so that correlated chains
    are smoothed over a longer tail. A density that is not normalised over y (one-vs-each), or not one of labels (label
    regression), gives a score that cannot be compared with others: see `label_loo`. See `objection_to_ranking` too.
    """
    known = relative_efficiency(np.asarray(data["log_likelihood"]["y"])) if efficiency is None else efficiency
    with _quiet():  # about large k-hats: they are returned, point by point
        result = arviz.loo(data, pointwise=True, var_name="y", reff=known)
    old = hasattr(result, "elpd_loo")
    elpd, parameters = (result.elpd_loo, result.p_loo) if old else (result.elpd, result.p)
    pointwise = result.loo_i if old else result.elpd_i
    return LeaveOneOut(
        float(elpd), float(result.se), float(parameters), np.asarray(result.pareto_k), np.asarray(pointwise)
    )


def relative_efficiency(log_likelihood: Float[np.ndarray, "M D *points"]) -> float:
    """Effective draws of p(y_n | f) a draw, the mean over the points, at most 1; 1 of chains of fewer than 4 draws."""
    chains, draws = log_likelihood.shape[:2]
    if draws < 4:
        return 1.0
    flat = np.asarray(log_likelihood, np.float64).reshape(chains, draws, -1)
    density = np.exp(flat - flat.max((0, 1)))
    effective = np.asarray(effective_draws(jnp.asarray(density.swapaxes(0, 1))))
    return float(min(effective.mean() / (chains * draws), 1.0))


def label_loo(data: ArvizData, likelihood: Likelihood) -> LeaveOneOut:
    """PSIS-LOO of the probability of every label, which is the same quantity for every likelihood.

    log p(y_n | others) - log sum_k p(k | others), both over the draws with the same smoothed weights: equal to
    `psis_loo` where the density is normalised over the label; it makes a composite one, and that of coded labels,
    comparable. The effective parameters are those of `psis_loo`.
    """
    own, f = np.asarray(data["log_likelihood"]["y"], np.float64), jnp.asarray(np.asarray(data["posterior"]["f"]))
    every = jax.lax.map(lambda one: log_densities(likelihood, one), f.reshape(-1, *f.shape[2:]), batch_size=256)
    efficiency = relative_efficiency(own)
    log_weights = _smoothed_log_weights(own.reshape(-1, own.shape[-1]), efficiency)
    chosen = logsumexp(log_weights + own.reshape(log_weights.shape), axis=0)
    total = logsumexp(log_weights[:, None] + np.asarray(every, np.float64), axis=(0, 1))
    plain, pointwise = psis_loo(data, efficiency), chosen - total
    error = float(np.sqrt(len(pointwise) * np.var(pointwise)))
    return LeaveOneOut(float(pointwise.sum()), error, plain.parameters, plain.pareto_k, pointwise)


def objection_to_ranking(found: LeaveOneOut, y: Int[Array, " N"] | Int[np.ndarray, " N"]) -> str | None:
    """Why methods must not be ranked by this leave-one-out, in one line; None where they may be.

    The smoothed weights are reliable up to a k-hat of MOST_K_HAT. A class with one labelled point has none left without
    it: the score then asks for a class that nothing is known of, and the least certain model wins. Judge by the NLL of
    held-out queries instead.
    """
    bad = ~(np.asarray(found.pareto_k) <= MOST_K_HAT)  # written so that nan is bad
    counts = np.bincount(np.asarray(y))
    single = np.flatnonzero(counts == 1)
    if single.size:
        return (
            f"expected at least two labelled points of every class, got one of class {single[0]}; "
            "judge by the NLL of queries"
        )
    if bad.any():
        return (
            f"expected a k-hat of at most {MOST_K_HAT} at every point, got more at {bad.sum()} of {bad.size}; "
            "judge by the NLL of queries"
        )
    return None


def doubt_about_laplace(likelihood: Likelihood) -> str | None:
    """Why Laplace's approximation of this likelihood is not to be trusted, in one line; None where nothing is known.

    Logistic-softmax at a small temperature: its curvature at the mode says little of a posterior that is flat where the
    logistic is 0. At 0.2 Laplace is 12 to 19 nats from the evidence.
    """
    if not isinstance(likelihood, LogisticSoftmax) or float(likelihood.temperature) >= SHARP:
        return None
    return (
        f"expected a temperature of at least {SHARP} for laplace, got {float(likelihood.temperature):.2g}: "
        "at 0.2 it is 12 to 19 nats from the evidence; try cvi or gibbs"
    )


def _smoothed_log_weights(
    log_likelihood: Float[np.ndarray, "D N"], efficiency: float = 1.0
) -> Float[np.ndarray, "D N"]:
    """Pareto-smoothed log weights 1 / p(y_n | f) of every point."""
    with _quiet():
        if hasattr(arviz, "psislw"):  # 0.23
            return np.asarray(arviz.psislw(-log_likelihood.T, efficiency)[0]).T
        # 1.x; its releases may differ in the sign of what they are given.
        array_stats = importlib.import_module("arviz_stats.base").array_stats
        found = [
            np.asarray(array_stats.psislw(sign * log_likelihood.T, r_eff=efficiency, axis=-1)[0]).T
            for sign in (1.0, -1.0)
        ]
    falling = [np.sum((weights - weights.mean(0)) * log_likelihood) for weights in found]
    return found[int(np.argmin(falling))]


def probabilities(data: ArvizData) -> Float[np.ndarray, "Q C"]:
    """p(y_* = k | data) from the group `predictions`: mean density over the draws, normalised over the labels."""
    density = np.asarray(data["predictions"]["density"], np.float64).mean((0, 1))
    return density / density.sum(1, keepdims=True)


def pareto_k(
    key: Key[Array, ""],
    kernel: Inference,
    state: State,
    prior: GaussianPrior,
    likelihood: Likelihood,
    y: Int[Array, " N"],
    draws: int = 2000,
) -> float:
    """PSIS k-hat of a variational posterior against the exact one: below 0.7 importance sampling could repair it.

    q is the prior times sites t, so p(y | f) p(f) / q(f) is prod_n p(y_n | f_n) / t_n(f_n) up to a constant: no matrix
    is needed. Raises TypeError for a sampler, which has no q.
    """
    weights = jax.jit(lambda one: log_ratios(one, kernel, state, prior, likelihood, y, draws))(key)
    return pareto_k_of(np.asarray(weights))


def pareto_k_of(log_weights: Float[np.ndarray, " D"]) -> float:
    """k-hat of the importance weights: ArviZ finds it for weights 1 / p(y_n | f), of which these are one case."""
    weights = np.asarray(log_weights, np.float64)
    if not np.isfinite(weights).all():
        return float("inf")
    groups = {"posterior": {"one": weights[None]}, "log_likelihood": {"y": weights.max() - weights[None, :, None]}}
    return float(psis_loo(_from_groups(groups, {}, {}), 1.0).pareto_k.max())


def save(data: ArvizData, path: str | Path) -> None:
    """Write ArviZ data as a netCDF file."""
    data.to_netcdf(str(path), engine="h5netcdf")


def load(path: str | Path) -> ArvizData:
    """Read what `save` wrote."""
    if hasattr(arviz, "InferenceData"):
        return arviz.from_netcdf(str(path), engine="h5netcdf")
    import xarray  # what 1.x itself is made of

    return xarray.load_datatree(str(path), engine="h5netcdf")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without ArviZ's warnings and log."""
    logger = getattr(arviz, "_log", logging.getLogger("arviz"))  # 0.23 keeps one that `getLogger` does not know
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _statistics(fields: Group) -> Group:
    """Extra fields of one number a draw, by ArviZ's names."""
    kept = {STATISTICS.get(name, name): value for name, value in fields.items() if jnp.ndim(value) == 2}
    if "potential_energy" in kept:
        kept["lp"] = -kept.pop("potential_energy")
    return kept


def _dataset(groups: Mapping[str, Group], shape: tuple[int, ...], queries: int) -> ArvizData:
    sizes = {"class": shape[0], "point": shape[1], "query": queries}
    coordinates = {name: np.arange(size) for name, size in sizes.items() if size}
    plain = {name: {key: np.asarray(value) for key, value in group.items()} for name, group in groups.items()}
    coded = plain["observed_data"]["y"].ndim == 2
    dimensions = {**DIMENSIONS, "y": DIMENSIONS["y"] if coded else ["point"]}
    return _from_groups(plain, coordinates, dimensions)


def _from_groups(
    groups: Mapping[str, Group], coordinates: Mapping[str, np.ndarray], dimensions: Mapping[str, list[str]]
) -> ArvizData:
    """`arviz.from_dict`, which takes groups as arguments in 0.23 and as one nested dict from 1.0."""
    names = {name for group in groups.values() for name in group}
    shared = {
        "coords": coordinates,
        "dims": {name: axes for name, axes in dimensions.items() if name in names},
        "pred_coords": coordinates,
        "pred_dims": {name: axes for name, axes in dimensions.items() if name in groups.get("predictions", {})},
    }
    if hasattr(arviz, "InferenceData"):
        return arviz.from_dict(**groups, **shared)
    return arviz.from_dict(groups, **shared)
