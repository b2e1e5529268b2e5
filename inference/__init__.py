"""How beliefs are updated: the inner loop (one task), the outer loop (all tasks), prediction. Registries by name."""

from inference.inner import cvi, exact, gradient
from inference.outer.hypergradients import sites, unroll
from inference.outer.objectives import elbo, evidence, predictive

INFERENCE = {"cvi": cvi, "exact": exact, "gradient": gradient}
OBJECTIVES = {"elbo": elbo, "evidence": evidence, "predictive": predictive}
HYPERGRADIENTS = {"sites": sites, "unroll": unroll}
