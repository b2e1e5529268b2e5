"""The best possible prediction of `gp-curves`: by the process that its tasks are draws of."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float, Key

from fewshot.evaluation.from_points import FromPoints, Points
from fewshot.learners.base import Prediction, predicted
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.regression import predict, regress
from fewshot.tasks.curves import Covariance, ProcessCurves


class KnownProcess(FromPoints):
    """Exact regression by each covariance function of the tasks, weighed by their evidence.

    p(y_* | y) = sum_k p(k | y) N(y_*; m_k, v_k + s2), p(k | y) proportional to p(y | k): no prediction of these tasks
    has a smaller expected NLL.
    """

    def __init__(self, curves: ProcessCurves):
        super().__init__(inputs=1)
        self.curves = curves

    def predict(self, key: Key[Array, ""], state: Points, query: Float[Array, "Q D"]) -> Prediction:
        """A normal, or a mixture of as many as there are covariance functions."""
        del key
        found = [self._given(kind, state, query[:, 0]) for kind in self.curves.kinds]
        if len(found) == 1:
            return predicted(dist.Normal(*found[0][1:]))
        evidence, means, deviations = (jnp.stack(each, -1) for each in zip(*found, strict=True))
        shares = jnp.broadcast_to(jax.nn.softmax(evidence), means.shape)
        return predicted(dist.MixtureSameFamily(dist.CategoricalProbs(shares), dist.Normal(means, deviations)))

    def _given(self, kind: Covariance, state: Points, query: Array) -> tuple[Array, Array, Array]:
        """log p(y | k), and mean and standard deviation of the queries' labels."""
        x, noise = state.x[:, 0], self.curves.noise**2
        regression = regress(GaussianPrior(jnp.zeros((1, len(x))), kind.matrix(x, x)), state.y, noise)
        new = Query(jnp.zeros((1, len(query))), kind.matrix(query, x), jnp.ones(len(query)))
        marginals = predict(regression.posterior, new).noisy(noise)
        return regression.log_evidence, marginals.mean, jnp.sqrt(marginals.variance)
