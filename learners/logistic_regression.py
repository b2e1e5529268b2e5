"""Logistic regression by scikit-learn on features that are not trained, the head that most people fit first."""

import warnings
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.inference.inner.base import Code, Mask
from fewshot.learners.base import Prediction, TrainsOn, Traits, categorical
from fewshot.learners.network import NetworkLearner, real_classes, real_points
from fewshot.models.backbones import Backbone
from fewshot.models.kernels import inner_products, unit_norm

MAX_ITERATIONS, TOLERANCE = 2000, 1e-6


class LinearClassifier(NamedTuple):
    """Weights [C, D], bias [C], and which classes are real."""

    weights: Float[Array, "C D"]
    bias: Float[Array, " C"]
    present: Bool[Array, " C"]


class LogisticRegression(NetworkLearner):
    """The minimum of C sum_n -log p(y_n | x_n) + 1/2 |weights|^2, the bias free; JAX cannot trace it.

    unit_norm: features are divided by their norm. With two classes the penalty is on the difference of their weights.
    """

    traits: ClassVar[Traits] = Traits(traceable=False, trains_on=TrainsOn.NOTHING)

    def __init__(self, backbone: Backbone, *, rngs: nnx.Rngs | None = None, C: float = 1.0, unit_norm: bool = False):
        del rngs  # nothing is drawn
        if not C > 0:
            raise ValueError(f"expected a positive weight C of the labelled images, got {C}")
        super().__init__(backbone)
        self.C, self.unit_norm = C, unit_norm

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Int[Array, " N"],
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[LinearClassifier, Int[Array, ""]]:
        """Weights and bias; NOT_CONVERGED after MAX_ITERATIONS."""
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression as Solver

        del key
        real = np.asarray(real_points(y, mask))
        solver = Solver(C=self.C, tol=TOLERANCE, max_iter=MAX_ITERATIONS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the code says so
            solver.fit(np.asarray(self._inputs(support), np.float64)[real], np.asarray(y)[real])
        weights, bias = solver.coef_, solver.intercept_
        if len(solver.classes_) == 2:  # one column: the difference
            weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
        found = np.zeros((classes, weights.shape[1])), np.zeros(classes)
        found[0][solver.classes_], found[1][solver.classes_] = weights, bias
        code = Code.OK if solver.n_iter_.max() < MAX_ITERATIONS else Code.NOT_CONVERGED
        weights, bias = (jnp.asarray(part, support.dtype) for part in found)
        return LinearClassifier(weights, bias, real_classes(classes, mask)), jnp.asarray(code)

    def predict(self, key: Key[Array, ""], state: LinearClassifier, query: Float[Array, "Q D"]) -> Prediction:
        """Probabilities [Q, C]."""
        del key
        logits = inner_products(self._inputs(query), state.weights) + state.bias
        return categorical(jax.nn.softmax(jnp.where(state.present, logits, -jnp.inf)))

    def _inputs(self, x: Float[Array, "N D"]) -> Float[Array, "N D"]:
        return unit_norm(x) if self.unit_norm else x
