"""The Gaussian process with a deep kernel: a network, a latent process, a likelihood, an inference.

Its labels are those of the likelihood: classes, or real numbers under a model of the noise.

Training is by one of the objectives of METHODS 4; the network is evaluated once a step, on all images of all tasks.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from fewshot.inference.inner.base import Code, Inference, Mask
from fewshot.inference.inner.settle import settle
from fewshot.inference.many_labels import ManyLabels
from fewshot.inference.outer.hypergradients import HyperGradient, sites
from fewshot.inference.outer.loss import ForEach, Outcome, Reduction
from fewshot.inference.outer.objectives import EmbeddedTask, Inner, Objective, TaskOutcome, check_combination, elbo
from fewshot.inference.predictive import predictive_distribution
from fewshot.learners.base import Images, Labels, Learner, Prediction, Traits, predicted
from fewshot.learners.network import LabelledTasks
from fewshot.models.deep_kernel import DeepKernel, check_images
from fewshot.models.expectations import MonteCarlo
from fewshot.models.gaussian import GaussianPrior, Posterior, Query
from fewshot.models.kernels import Hyper, Kernel
from fewshot.models.layers import scalars
from fewshot.models.likelihoods.base import Likelihood
from fewshot.models.process import LatentProcess

GivenImages = Shaped[Array | np.ndarray, "N H W Ch"]
GivenQueries = Shaped[Array | np.ndarray, "Q H W Ch"]
SEEN_THROUGH_POINTS = ("cvi", "exact")  # inferences of which `ManyLabels` is the form for inducing points


@partial(
    jax.tree_util.register_dataclass, data_fields=["x", "posterior", "present", "examples"], meta_fields=["classes"]
)
@dataclass(frozen=True)
class Conditioned:
    """The process given a task: the features [N, D] that its posterior stands on, and which classes are real.

    These are the labelled ones, or inducing points of a task with many labels. present None: all classes are real.
    examples: labelled ones of a class, on average.
    """

    x: Float[Array, "N D"]
    posterior: Posterior
    present: Bool[Array, " C"] | None
    examples: float | Float[Array, ""]
    classes: int


class GaussianProcess(Learner):
    """A deep-kernel Gaussian process: a classifier, or with a noise model as likelihood a regression (C = 1).

    make_inference(likelihood) -> inference kernel, so that a learned parameter of the likelihood reaches it. objective,
    hypergradient and inner_steps are those of training (`meta_train.py` takes those of `training.defaults`); classes is
    the number of a training task's. many_labels: how `fit` solves tasks with more labels than it has inducing points,
    None for as all others. Raises ValueError for combinations that make no sense (`check_combination`), TypeError for a
    likelihood that the inference cannot use.
    """

    traits: ClassVar[Traits] = Traits(real_labels=True)
    diagnostics: ClassVar[Mapping[str, Reduction]] = {
        "residual": Reduction.MAX,  # of the inner loop's last step: the largest of the tasks
        "failures": Reduction.SUM,  # tasks whose code is not OK
        "clipped": Reduction.SUM,  # site precisions that were set to 0 in the last inner step
    }

    def __init__(
        self,
        deep_kernel: DeepKernel,
        likelihood: Likelihood,
        make_inference: Callable[[Likelihood], Inference],
        *,
        objective: Objective = elbo,
        hypergradient: HyperGradient = sites,
        inner_steps: int = 10,
        many_labels: ManyLabels | None = None,
    ):
        inference = make_inference(likelihood)
        check_combination(inference, objective, hypergradient)
        if many_labels is not None and inference.traits.name not in SEEN_THROUGH_POINTS:
            allowed = " or ".join(SEEN_THROUGH_POINTS)
            raise ValueError(f"expected {allowed} as inference with inducing points, got {inference.traits.name}")
        self.many_labels = many_labels
        self.deep_kernel, self.make_inference = deep_kernel, make_inference
        self.objective, self.hypergradient, self.inner_steps = objective, hypergradient, inner_steps
        self.start = nnx.static(likelihood)
        self.likelihood_parameters = scalars(likelihood.parameters())

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.deep_kernel.backbone.image_shape

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood at its learned parameters."""
        return self.start.with_parameters(self._learned())

    @property
    def inference(self) -> Inference:
        """The inference kernel at the learned likelihood."""
        return self.make_inference(self.likelihood)

    def _learned(self) -> dict[str, Array]:
        return {name: self.likelihood_parameters[name][...] for name in self.start.parameters()}

    def prior(self, x: GivenImages, classes: int | None = None) -> GaussianPrior:
        """Prior of the latents at images x [N, H, W, Ch]; the classes of a training task unless told otherwise.

        Raises ValueError for images that `check_images` refuses: NaN, or numbers beyond [0, 1].
        """
        check_images(x, "the support images")
        return self.deep_kernel.prior(jnp.asarray(x), classes)

    def query(self, x_support: GivenImages, x_query: GivenQueries, classes: int | None = None) -> Query:
        """Query of (G7) from images x_support [N, H, W, Ch] to x_query [Q, H, W, Ch]. Raises ValueError as `prior`."""
        check_images(x_query, "the query images")
        return self.deep_kernel.query(jnp.asarray(x_support), jnp.asarray(x_query), classes)

    def embed(self, images: Images) -> Float[Array, "N D"]:
        """Features [N, D] in evaluation mode."""
        return self.deep_kernel.features(images)

    def fit(
        self,
        key: Key[Array, ""],
        support: Float[Array, "N D"],
        y: Labels,
        classes: int,
        mask: Mask | None = None,
    ) -> tuple[Conditioned, Int[Array, ""]]:
        """The posterior given labelled features, by an inference that is run to a tolerance."""
        present = None if mask is None else mask.classes
        examples = len(support) / classes if mask is None else mask.examples_a_class
        process = self.deep_kernel.process(examples)
        if self.many_labels is not None and len(support) > self.many_labels.inducing:
            found = self.many_labels.fit(key, process, self.likelihood, support, y, classes, mask)
            return Conditioned(found.inputs, found.posterior, present, examples, classes), found.code
        algorithm, prior = self.inference, process.prior(support, classes)
        state, code = settle(key, algorithm, prior, y, mask)
        return Conditioned(support, algorithm.posterior(state, prior), present, examples, classes), code

    def predict(self, key: Key[Array, ""], state: Conditioned, query: Float[Array, "Q D"]) -> Prediction:
        """Labels by (G7), then the likelihood; draws are shared, so no query depends on another."""
        new = self.latent_query(state, query)
        found = predictive_distribution(key, self.likelihood, state.posterior, new, state.present)
        # Products that overflow can still end in finite probabilities.
        return predicted(found, new.cross, new.variance)

    def latent_query(self, state: Conditioned, query: Float[Array, "Q D"]) -> Query:
        """(G7) from the labelled features of a state to others [Q, D]."""
        return self.deep_kernel.process(state.examples).query(state.x, query, state.classes)

    def squared_distances(
        self, inputs: Float[Array, "N D"], weights: Float[Array, "N C"], query: Float[Array, "Q D"]
    ) -> Float[Array, "Q C"]:
        """Those of features to weighted means of others, in the feature space of the kernel of one example a class."""
        return self.deep_kernel.process().squared_distances(inputs, weights, query)

    def loss(self, keys: Key[Array, " T"], tasks: LabelledTasks, for_each: ForEach) -> Outcome:
        """The objective, in nats, of tasks that share one pass of the network; batch statistics are those of a task."""
        features = self.deep_kernel(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)
        process = self.deep_kernel.process(tasks.x_support.shape[1] / self.deep_kernel.number_of(None))
        likelihood = self.start.with_parameters(self._learned())
        found = for_each(lambda *task: self._task(process, likelihood, *task))(keys, features, tasks)
        diagnostics = {
            "residual": jnp.max(found.info.residual),
            "failures": jnp.sum(found.info.code != Code.OK),
            "clipped": jnp.sum(found.info.clipped),
        }
        return Outcome(jnp.mean(found.value), jnp.asarray(found.points)[0], diagnostics)

    def _task(
        self, process: LatentProcess, likelihood: Likelihood, key: Array, features: Array, task: LabelledTasks
    ) -> TaskOutcome:
        shots = task.y_support.shape[0]
        labelled = EmbeddedTask(features[:shots], task.y_support, features[shots:], task.y_query)
        classes = self.deep_kernel.number_of(None)
        inner = Inner(self.make_inference(likelihood), self.inner_steps, self.hypergradient, classes)
        return self.objective(key, inner, likelihood, process, labelled)

    def hyperparameters(self) -> Hyper:
        """Those of the kernel, the prior mean, and those of the likelihood."""
        return {**self.deep_kernel.hyperparameters(), **self._learned()}

    def priors(self) -> dict[str, dist.Distribution]:
        """One weakly informative prior for each, about where the learning begins."""
        return {**self.deep_kernel.priors(), **self.start.priors()}

    def report(self) -> dict[str, float]:
        """Hyper-parameters, the output scale, and the prior's pull on it (d log p / d log s2)."""
        values: dict[str, Array | float] = self.deep_kernel.hyperparameters() | dict(self.likelihood.parameters())
        pull = _prior_pull(self.deep_kernel.kernel, values["log_scale"])
        plain = {name: float(value) for name, value in values.items()}
        return plain | {"scale": math.exp(plain["log_scale"]), "prior_pull": float(pull)}

    def observe(self, tasks: LabelledTasks) -> None:
        """One pass of the network in training mode."""
        self.deep_kernel(jnp.concatenate([tasks.x_support, tasks.x_query], axis=1), train=True)

    def with_draws(self, draws: int, summed: bool = False) -> "GaussianProcess":
        """The learner with as many draws in inference and in prediction, where these are Monte-Carlo expectations.

        summed: predictions without noise in the place of draws, where the likelihood knows a sum.
        """
        make: Callable[..., Inference] = self.make_inference
        likelihood: Any = self.start
        many = self.many_labels and replace(self.many_labels, expectation=MonteCarlo(draws))
        if "expectation" in inspect.signature(make).parameters:
            make = _drawing(make, draws)
        if hasattr(likelihood, "prediction_draws"):
            likelihood = replace(likelihood, prediction_draws=draws)
        if hasattr(likelihood, "summed"):
            likelihood = replace(likelihood, summed=summed)
        return self._changed(likelihood, make, many)

    def with_many_labels(self, many_labels: ManyLabels | None) -> "GaussianProcess":
        """The learner with another way to solve tasks of many labels. Raises ValueError as the constructor."""
        return self._changed(self.start, self.make_inference, many_labels)

    def _changed(
        self, likelihood: Likelihood, make: Callable[..., Inference], many_labels: ManyLabels | None
    ) -> "GaussianProcess":
        changed = GaussianProcess(
            self.deep_kernel,
            likelihood,
            make,
            objective=self.objective,
            hypergradient=self.hypergradient,
            inner_steps=self.inner_steps,
            many_labels=many_labels,
        )
        changed.likelihood_parameters = self.likelihood_parameters
        return changed


@cache
def _drawing(make: Callable[..., Inference], draws: int) -> Callable[[Likelihood], Inference]:
    """One object for each number of draws, so that programs compiled with it are found again."""
    return partial(make, expectation=MonteCarlo(draws))


@partial(jax.jit, static_argnums=0)
def _prior_pull(kernel: Kernel, log_scale: Array) -> Array:
    return jax.grad(kernel.priors()["log_scale"].log_prob)(log_scale)
