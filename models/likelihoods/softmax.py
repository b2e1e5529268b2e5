"""Softmax likelihood: p(y = k | f) = exp f_k / sum_c exp f_c (MD section 2.2)."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from fewshot.models.expectations import Points, expect, expected_log_sum_exp
from fewshot.models.gaussian import JointMarginals, Marginals, SimplexSites
from fewshot.models.likelihoods.base import CategoricalLabels, NoParameters, one_hot, own, present


@jax.tree_util.register_static
@dataclass(frozen=True)
class Softmax(CategoricalLabels, NoParameters):
    """Softmax of the latent logits. It has no free parameter: a temperature would only rescale the GP.

    prediction_draws: size of the Monte-Carlo rule of `predict`.
    """

    prediction_draws: int = 512

    prior_mean: ClassVar[float | None] = None
    differences_only: ClassVar[bool] = True
    log_concave: ClassVar[bool] = True

    def label_logits(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """f."""
        return f

    def expected_log_prob(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log p(y_n | f_n) = m_{y_n} - E log sum_c exp f_c; exact one-dimensional sums without points.

        Raises ValueError without points for classes that are coupled in q.
        """
        if points is None:
            if isinstance(marginals, JointMarginals):
                raise ValueError("softmax has no deterministic expectation over coupled classes; pass points")
            return own(y, marginals.mean) - expected_log_sum_exp(marginals, classes)
        return own(y, marginals.mean) - expect(lambda f: logsumexp(present(f, classes), axis=0), marginals, points)

    def local_sites(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> SimplexSites:
        """Sites with the slope Y - p and minus the Hessian diag p - p p^T of log p(y | f) at f."""
        p = self.probabilities(f, classes)
        flat = SimplexSites(one_hot(y, f.shape[0], f.dtype) - p, p, jnp.ones_like(f))
        return flat.shifted(flat.times(f))
