"""What answers an episode: the learner protocol, and the one place that compiles and solves a task.

A learner is an NNX module. It turns images into inputs once (`embed`), is fitted to the labelled inputs of a task
(`fit`), and predicts others without fitting again (`predict`). `loss` is what the outer loop drives. Everything that
trains, scores, calibrates, stores and predicts knows learners only.

Letters: N labelled inputs, Q queries, C classes of a task, T tasks of a step.
"""

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from fewshot.inference.inner.base import Code, Mask
from fewshot.inference.outer.loss import ForEach, Outcome, Reduction
from fewshot.models.gaussian import Query
from fewshot.models.kernels import Hyper
from fewshot.models.likelihoods.base import Likelihood

Images = Shaped[Array, "N H W Ch"]
Inputs = Shaped[Array, "N ..."]
Queries = Shaped[Array, "Q ..."]
Labels = Shaped[Array, " N"]


class TrainsOn(enum.Enum):
    """What one optimiser step sees: tasks, batches of images with labels of all training classes, or nothing."""

    EPISODES = "episodes"
    BATCHES = "batches"
    NOTHING = "nothing"


class Traits(NamedTuple):
    """What those who use a learner may ask of it.

    traceable: JAX can compile it; otherwise the host loops over the tasks. transductive: a prediction depends on the
    other queries, so these are never divided. padded: rows may be added to a task that its mask marks as none of it;
    never to one of a transductive learner. trains_on: see `TrainsOn`. class_labels, real_labels: it can be fitted to
    labels that are classes, that are real numbers.
    """

    traceable: bool = True
    transductive: bool = False
    padded: bool = True
    trains_on: TrainsOn = TrainsOn.EPISODES
    class_labels: bool = True
    real_labels: bool = False


class Prediction(NamedTuple):
    """A distribution over the labels of the queries, and the result code of the inference behind it."""

    distribution: dist.Distribution
    code: Int[Array, ""]

    @property
    def probabilities(self) -> Float[Array, "Q C"]:
        """Class probabilities of every query, where the labels are classes."""
        return self.distribution.probs


def categorical(probabilities: Float[Array, "Q C"], *behind: Array) -> Prediction:
    """A prediction of classes; its code is NON_FINITE where a probability, or what is behind it, is not finite."""
    return predicted(dist.CategoricalProbs(probabilities), *behind)


def predicted(distribution: dist.Distribution, *behind: Array) -> Prediction:
    """A prediction of any labels; its code is NON_FINITE where a parameter, or what is behind it, is not finite."""
    finite = jnp.stack([jnp.isfinite(values).all() for values in (*jax.tree.leaves(distribution), *behind)])
    return Prediction(distribution, jnp.where(finite.all(), Code.OK, Code.NON_FINITE))


class Learner(nnx.Module):
    """The base of all learners. Subclasses say `fit` and `predict`, those that learn from tasks `loss` too.

    batch_size: images of a batch, where it is trained on batches. diagnostics: the learner's own fields of
    `Outcome.diagnostics`, and how those of several devices are combined.
    """

    traits: ClassVar[Traits] = Traits()
    batch_size: ClassVar[int] = 16
    diagnostics: ClassVar[Mapping[str, Reduction]] = {}

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, Ch) of the images that it reads."""
        raise NotImplementedError(f"{type(self).__name__} has no image_shape")

    @property
    def ways(self) -> int | None:
        """The one number of classes that it can tell apart, None for any."""
        return None

    @property
    def batch_norm(self) -> str:
        """What its batch norms use at test, "" where it has none.

        "inductive": the running statistics of training; "transductive": those of the images predicted together;
        "labelled": those of the task's labelled images.
        """
        if not jax.tree.leaves(nnx.state(self, nnx.BatchStat)):
            return ""
        return "transductive" if self.traits.transductive else "inductive"

    def embed(self, images: Images) -> Inputs:
        """Inputs [N, ...] of images [N, H, W, Ch], each a function of its own image; the images where it adapts."""
        return images

    def fit(
        self, key: Key[Array, ""], support: Inputs, y: Labels, classes: int, mask: Mask | None = None
    ) -> tuple[PyTree, Int[Array, ""]]:
        """State and result code of one task: labels y [N] of inputs [N, ...], 0..C-1, real numbers with C = 1.

        The mask marks what is real in a padded task; None stands for all of it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no fit")

    def predict(self, key: Key[Array, ""], state: PyTree, query: Queries) -> Prediction:
        """The prediction of queries [Q, ...] by a state of `fit`."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")

    def loss(self, keys: Key[Array, " T"], tasks: PyTree, for_each: ForEach) -> Outcome:
        """What the outer loop maximises, of tasks with a leading axis T; `for_each` maps a function over the tasks."""
        raise NotImplementedError(f"{type(self).__name__} does not learn")

    def for_tasks(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """The function of one task as one of several, whose arguments and results have a leading axis."""
        return jax.vmap(function)

    def hyperparameters(self) -> Hyper:
        """Learned scalars that have a prior, unconstrained, by name."""
        return {}

    def priors(self) -> dict[str, dist.Distribution]:
        """The prior of each of `hyperparameters`."""
        return {}

    def report(self) -> dict[str, float]:
        """What a row of the training log says of the learner."""
        return {name: float(value) for name, value in self.hyperparameters().items()}

    def observe(self, tasks: PyTree) -> None:
        """Record the batch statistics of tasks with a leading axis T, and learn nothing."""

    def with_draws(self, draws: int, summed: bool = False) -> "Learner":
        """The learner with as many draws in its Monte-Carlo expectations, if it takes any.

        summed: predictions without noise in the place of draws, where it can.
        """
        del draws, summed
        return self

    def __sklearn_clone__(self) -> "Learner":
        """Itself: an estimator never changes its learner, and programs compiled with it are found again."""
        return self

    def __call__(self, keys: Key[Array, " T"], tasks: PyTree, for_each: ForEach) -> tuple[Outcome, Hyper]:
        """`loss` and `hyperparameters`, as the outer loop asks for them."""
        return self.loss(keys, tasks, for_each), self.hyperparameters()


@runtime_checkable
class LatentLearner(Protocol):
    """A learner with a posterior of latent functions, for detection of unknown classes, ArviZ and NUTS.

    The states of its `fit` hold the `posterior`.
    """

    @property
    def likelihood(self) -> Likelihood:
        """p(y | f)."""
        ...

    def fit(
        self, key: Key[Array, ""], support: Inputs, y: Labels, classes: int, mask: Mask | None = None
    ) -> tuple[PyTree, Int[Array, ""]]:
        """As every learner's."""
        ...

    def latent_query(self, state: PyTree, query: Queries) -> Query:
        """What `state.posterior.predict` needs at queries [Q, ...]."""
        ...

    def squared_distances(self, inputs: Inputs, weights: Float[Array, "N C"], query: Queries) -> Float[Array, "Q C"]:
        """Squared distances of queries [Q, ...] to weighted means of inputs [N, ...], where the kernel sees them."""
        ...


def solve(
    learner: Learner, key: Key[Array, ""], support: Inputs, y: Labels, query: Queries, classes: int
) -> Prediction:
    """`fit` and `predict` of one task; the code is that of the fit, or of the prediction where that failed."""
    fit_key, predict_key = jax.random.split(key)
    state, code = learner.fit(fit_key, support, y, classes)
    found = learner.predict(predict_key, state, query)
    return found._replace(code=jnp.where(found.code == Code.OK, code, found.code))


def apply(function: Callable[..., PyTree], learner: Learner, static: tuple, *arguments: PyTree) -> PyTree:
    """function(learner, *static, *arguments), compiled once for each shape where the learner is traceable.

    Either way it sees JAX arrays. The function is one of a module, the static arguments are hashable.
    """
    if not learner.traits.traceable:
        return function(learner, *static, *jax.tree.map(jnp.asarray, arguments))
    graph, state = nnx.split(learner)
    return traced(function, graph, static, state, *arguments)


@partial(jax.jit, static_argnums=(0, 1, 2))
def traced(
    function: Callable[..., PyTree], graph: nnx.GraphDef, static: tuple, state: nnx.State, *arguments: PyTree
) -> PyTree:
    """The compiled `apply`; its cache tells how many programs there are."""
    return function(nnx.merge(graph, state), *static, *arguments)
