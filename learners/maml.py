"""MAML (Finn et al. 2017): a network and a linear head whose start a few steps of gradient descent adapt to a task."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree

from fewshot.inference.inner.base import Mask, finite_code
from fewshot.learners.adapted import ADAPTED, AdaptedLearner, LinearHead
from fewshot.learners.base import Images, Labels, Prediction, Traits, categorical, predicted
from fewshot.learners.network import LabelledTasks, real_classes, real_points, scaled
from fewshot.models.backbones import Backbone
from fewshot.models.gaussian import Marginals
from fewshot.models.kernels import Hyper
from fewshot.models.layers import scalars
from fewshot.models.likelihoods import Normal, Softmax
from fewshot.models.likelihoods.base import RealLikelihood


class MAML(AdaptedLearner):
    """theta_task = theta - inner_rate grad of the mean of -log p(y_n | f_n), `inner_steps` times.

    p is the softmax of `way` logits f. With way 1 labels are real numbers and p is N(f, 1/2), so that the loss is the
    squared error. The outer loop learns theta, head included, by log p of the queries under theta_task, and there the
    variance of the normal too; its gradient goes through the steps.
    """

    traits: ClassVar[Traits] = ADAPTED._replace(real_labels=True)
    first_order: ClassVar[bool] = False

    def __init__(
        self,
        backbone: Backbone,
        *,
        way: int,
        rngs: nnx.Rngs | None = None,
        inner_steps: int = 5,
        inner_rate: float = 0.01,
    ):
        del rngs  # nothing is drawn
        super().__init__(backbone, way, inner_steps, inner_rate)
        self.network = LinearHead(backbone, way)
        self.start = nnx.static(Normal(0.5) if way == 1 else Softmax())
        self.likelihood_parameters = scalars(self.start.parameters())

    @property
    def likelihood(self) -> Normal | Softmax:
        """p(y | f) at its learned parameters."""
        return self.start.with_parameters(self._learned())

    def _learned(self) -> dict[str, Array]:
        return {name: self.likelihood_parameters[name][...] for name in self.start.parameters()}

    def hyperparameters(self) -> Hyper:
        """The log variance of real labels."""
        return {**self._learned()}

    def priors(self) -> dict[str, dist.Distribution]:
        """Its prior."""
        return self.start.priors()

    def fit(
        self,
        key: Key[Array, ""],
        support: Images,
        y: Labels,
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[PyTree, Int[Array, ""]]:
        """The adapted parameters. Raises ValueError for another number of classes than `ways`."""
        del key
        self.check(classes)
        _, parameters, *_ = nnx.split(self.network, nnx.Param, ...)
        weights = real_points(y, mask) / jnp.sum(real_points(y, mask))

        def loss(parameters: PyTree) -> Array:
            found = self.start.log_prob(y, self.logits(parameters, support).T, real_classes(classes, mask))
            return -jnp.sum(weights * found)

        for _ in range(self.inner_steps):
            parameters = self._descended(parameters, jax.grad(loss)(parameters))
        return parameters, finite_code(*jax.tree.leaves(parameters))

    def _descended(self, parameters: PyTree, gradient: PyTree) -> PyTree:
        if self.first_order:
            gradient = jax.lax.stop_gradient(gradient)
        return jax.tree.map(lambda value, slope: value - self.inner_rate * slope, parameters, gradient)

    def logits(self, parameters: PyTree, images: Images, labelled: int | None = None) -> Float[Array, "Q C"]:
        """f [Q, C] of images [Q, H, W, Ch] by adapted parameters; batch norms use the first, `labelled` of them."""
        graph, _, *others = nnx.split(self.network, nnx.Param, ...)
        network = nnx.merge(graph, parameters, others[0], copy=True)
        network.set_attributes(normalised_by=labelled, raise_if_not_found=False)
        return network(images)

    def answers(self, state: PyTree, query: Images) -> Float[Array, "Q C"]:
        """f [Q, C] of queries [Q, H, W, Ch] by a state of `fit`; their batch statistics are their own."""
        return self.logits(state, query)

    def predict(self, key: Key[Array, ""], state: PyTree, query: Images) -> Prediction:
        """p(y | f) of images [Q, H, W, Ch]."""
        del key
        f, likelihood = self.answers(state, query), self.likelihood
        if isinstance(likelihood, RealLikelihood):
            return predicted(likelihood.distribution(Marginals(f.T, jnp.zeros_like(f.T))))
        return categorical(jax.nn.softmax(f))

    def objective(self, key: Key[Array, ""], task: LabelledTasks) -> Float[Array, ""]:
        """sum_q log p(y_q | x_q, theta_task)."""
        adapted, _ = self.fit(key, task.x_support, task.y_support, self.way)
        return jnp.sum(self.likelihood.log_prob(task.y_query, self.answers(adapted, task.x_query).T))


class FirstOrderMAML(MAML):
    """MAML whose outer gradient takes those of the inner steps for constants: d theta_task / d theta = 1."""

    first_order: ClassVar[bool] = True


class InductiveMAML(MAML):
    """MAML whose queries are normalised by the statistics of the labelled images, so that none depends on the others.

    The statistics are those under theta_task, at every layer, and the outer gradient goes through them ("MetaBN" of
    Bronskill et al. 2020). The inner steps normalise the labelled images together, as those of MAML do.
    """

    traits: ClassVar[Traits] = Traits(padded=False)

    @property
    def batch_norm(self) -> str:
        return "labelled" if super().batch_norm else ""

    def fit(
        self, key: Key[Array, ""], support: Images, y: Labels, classes: int, mask: Mask | None = None
    ) -> tuple[PyTree, Int[Array, ""]]:
        """The adapted parameters, and the images whose statistics are used."""
        parameters, code = super().fit(key, support, y, classes, mask)
        return (parameters, support), code

    def answers(self, state: PyTree, query: Images) -> Float[Array, "Q C"]:
        """f [Q, C] of queries [Q, H, W, Ch]."""
        parameters, support = state
        number = len(support)
        return self.logits(parameters, jnp.concatenate([scaled(support), scaled(query)]), number)[number:]
