"""Softmax likelihood: p(y = k | f) = exp f_k / sum_c exp f_c (MD section 2.2)."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.expectations import Points, expect, expected_log_sum_exp, expected_softmax
from fewshot.models.gaussian import JointMarginals, Marginals, SimplexSites
from fewshot.models.likelihoods.base import CategoricalLabels, NoParameters, one_hot, own, present


@jax.tree_util.register_static
@dataclass(frozen=True)
class Softmax(CategoricalLabels, NoParameters):
    """Softmax of the latent logits. It has no free parameter: a temperature would only rescale the GP.

    prediction_draws: size of the Monte-Carlo rule of `predict`. summed: predict by one-dimensional sums in its place
    where the classes are independent in q: a thousandth of the error, at ten times the time. plug_in: predict p(k | m)
    at the posterior mean m in the place of E_q p(k | f), of every component where q is a mixture. It leaves out the
    variance, which a temperature can make up for, and has no noise.
    """

    prediction_draws: int = 512
    plug_in: bool = False
    summed: bool = False

    prior_mean: ClassVar[float | None] = None
    differences_only: ClassVar[bool] = True
    log_concave: ClassVar[bool] = True

    def label_logits(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """f."""
        return f

    def predict(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """E_q p(k | f), or p(k | m) where it is plugged in."""
        if self.plug_in:
            return self.probabilities(marginals.mean, classes).T
        if self.summed and isinstance(marginals, Marginals):
            return expected_softmax(marginals, classes).T
        return super().predict(key, marginals, classes)

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
