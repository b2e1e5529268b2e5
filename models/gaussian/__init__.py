"""Gaussian algebra of latent processes with sites: equations G1-G10. The only files that factorise a matrix."""

from fewshot.models.gaussian.blocks import BlockPosterior
from fewshot.models.gaussian.dense import BlockSites
from fewshot.models.gaussian.diagonal import DiagonalPosterior, Sites
from fewshot.models.gaussian.factors import cholesky_inverse, first_of_logarithm, highest_precision, triangular_root
from fewshot.models.gaussian.low_rank import LowRankPosterior
from fewshot.models.gaussian.marginals import AnyMarginals, JointMarginals, Marginals
from fewshot.models.gaussian.observed import Observed, normal_log_density, observe
from fewshot.models.gaussian.prior import (
    AnySites,
    GaussianPosterior,
    GaussianPrior,
    Posterior,
    Query,
    Root,
    prior_root,
    root_of,
    with_root,
)
from fewshot.models.gaussian.simplex import SimplexSites
from fewshot.models.gaussian.star import StarSites

__all__ = [
    "AnyMarginals",
    "AnySites",
    "BlockPosterior",
    "BlockSites",
    "DiagonalPosterior",
    "GaussianPosterior",
    "GaussianPrior",
    "JointMarginals",
    "LowRankPosterior",
    "Marginals",
    "Observed",
    "Posterior",
    "Query",
    "Root",
    "SimplexSites",
    "Sites",
    "StarSites",
    "cholesky_inverse",
    "first_of_logarithm",
    "highest_precision",
    "normal_log_density",
    "observe",
    "prior_root",
    "root_of",
    "triangular_root",
    "with_root",
]
