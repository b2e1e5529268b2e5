"""How beliefs are updated: the inner loop (one task), the outer loop (all tasks), prediction. Registries by name."""

from collections.abc import Callable

from fewshot.inference.inner import Inference, cavi, cvi, exact, gibbs, gradient, laplace
from fewshot.inference.outer.hypergradients import HyperGradient, implicit, sites, unroll
from fewshot.inference.outer.objectives import Objective, cavity_evidence, elbo, evidence, leave_one_out, predictive

INFERENCE: dict[str, Callable[..., Inference]] = {
    "cvi": cvi,
    "cavi": cavi,
    "gibbs": gibbs,
    "laplace": laplace,
    "exact": exact,
    "gradient": gradient,
}
OBJECTIVES: dict[str, Objective] = {
    "elbo": elbo,
    "evidence": evidence,
    "predictive": predictive,
    "cavity-evidence": cavity_evidence,
    "leave-one-out": leave_one_out,
}
HYPERGRADIENTS: dict[str, HyperGradient] = {"sites": sites, "unroll": unroll, "implicit": implicit}
