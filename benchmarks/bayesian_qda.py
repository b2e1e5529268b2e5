"""Bayesian discriminant analysis with a prior learned from other classes, as MetaQDA (Zhang et al., 2021) has it.

Features of class k are N(mu_k, S_k), mu_k ~ N(m, S_k / kappa) and S_k inverse-Wishart with dof nu and scale matrix
(nu - D - 1) v I, so that E S_k = v I; v and the variance v / kappa of class means come from other classes. Both mu_k
and S_k are integrated out (Murphy, 2007, section 9). With n features of mean xb,

    kappa' = kappa + n,   m' = (kappa m + n xb) / kappa',
    x | class  ~  t_{nu'}(m', (kappa' + 1) / (kappa' nu') Psi'),   nu' = nu + n - D + 1,
    Psi' = (nu - D - 1) v I + A^T A,   A = [x_i - xb; sqrt(kappa n / kappa') (xb - m)],

in which only the inner products of n + 1 rows are ever factorised.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer
from scipy.special import gammaln, log_softmax, softmax

FLAT = 10.0


class ClassPrior(NamedTuple):
    """m [D]; v, the variance of a feature within a class; and that of the class means, averages over the features."""

    mean: Float[np.ndarray, " D"]
    within: float
    between: float

    def standard(self, features: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "N D"]:
        """Features whose prior has mean 0 and variance 1 within a class."""
        return (features - self.mean) / np.sqrt(self.within)


def class_prior(features: Float[np.ndarray, "N D"], labels: Integer[np.ndarray, " N"]) -> ClassPrior:
    """By moments: v is pooled over classes, and what it adds to the variance of their means is taken off again."""
    classes, y = np.unique(labels, return_inverse=True)
    counts = np.bincount(y)
    means = np.stack([features[y == k].mean(0) for k in range(len(classes))])
    within = ((features - means[y]) ** 2).sum(0) / (len(y) - len(classes))
    between = means.var(0, ddof=1) - within * np.mean(1 / counts)
    return ClassPrior(means.mean(0), float(within.mean()), max(float(between.mean()), 1e-12))


def log_density(
    prior: ClassPrior, dof: float, support: Float[np.ndarray, "n D"], query: Float[np.ndarray, "Q D"]
) -> Float[np.ndarray, " Q"]:
    """log of that density at queries; dof is nu - D - 1 > 0, which says how alike the covariances of classes are."""
    (n, d), kappa = support.shape, prior.within / prior.between
    after, mean = kappa + n, (kappa * prior.mean + support.sum(0)) / (kappa + n)
    own = support.mean(0)
    rows = np.vstack([support - own, np.sqrt(kappa * n / after) * (own - prior.mean)])
    psi, degrees = dof * prior.within, dof + n + 2
    inner = np.eye(n + 1) + rows @ rows.T / psi
    away = query - mean
    seen = away @ rows.T
    distances = ((away**2).sum(1) - (seen * np.linalg.solve(inner, seen.T).T).sum(1) / psi) / psi
    log_determinant = d * np.log(psi) + np.linalg.slogdet(inner)[1] + d * np.log((after + 1) / after)
    constant = gammaln((degrees + d) / 2) - gammaln(degrees / 2) - d / 2 * np.log(np.pi) - log_determinant / 2
    return constant - (degrees + d) / 2 * np.log1p(distances * after / (after + 1))


def bayesian_qda(prior: ClassPrior, dof: float, support: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Probabilities [Q, C], every class as probable beforehand.

    At temperature FLAT, without which they round to 0 and 1; another one is fitted to them anyway.
    """
    densities = np.stack([log_density(prior, dof, support[y == k], query) for k in range(y.max() + 1)], axis=1)
    return softmax(log_softmax(densities, axis=1) / FLAT, axis=1)
