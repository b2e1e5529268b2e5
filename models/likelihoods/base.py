"""What a likelihood must offer. Tier 1 is enough for cvi and NUTS; tier 2, augmented latents, for cavi and gibbs.

Letters: C classes, N points, Q queries, M nodes. y [N] holds labels 0..C-1, f [C, N] the latent logits; where labels
are real numbers C is 1. `classes` [C] marks the classes that exist; a masked class enters no normaliser and is
predicted with probability 0. A likelihood predicts either classes (`ClassLikelihood`) or numbers (`RealLikelihood`).
"""

from typing import ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree, Shaped

from fewshot.models.expectations import MonteCarlo, Points, expect
from fewshot.models.gaussian import AnySites, JointMarginals, Marginals

Labels = Shaped[Array, " N"]  # whole numbers 0..C-1, or real numbers where C = 1
Aux: TypeAlias = PyTree  # augmented latents: a pytree of the likelihood's own
Mine = TypeVar("Mine")


@runtime_checkable
class Likelihood(Protocol):
    """Tier 1: p(y | f) for independent labelled points. Implementations are frozen dataclasses and pytrees.

    prior_mean: where a learned constant mean of f starts; None for none. A class may add `log_concave = True` where
    log p(y | f) is concave in f, so that no precision is negative but by sampling noise, and `differences_only = True`
    where p(y | f) knows differences of logits alone.
    """

    @property
    def prior_mean(self) -> float | None:
        """Where a learned constant mean of f starts, or None."""
        ...

    def parameters(self) -> dict[str, float | Array]:
        """Unconstrained scalars that the outer loop learns, by name; empty where there are none."""
        ...

    def priors(self) -> dict[str, dist.Distribution]:
        """One weakly informative prior for each of `parameters`."""
        ...

    def with_parameters(self, values: dict[str, Array]) -> "Likelihood":
        """The same likelihood at other values of `parameters`."""
        ...

    def log_prob(
        self, y: Labels, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log p(y_n | f_n)."""
        ...

    def expected_log_prob(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q log p(y_n | f_n): over the given nodes, or deterministic where points is None."""
        ...

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """p(observed | f) as a NumPyro distribution whose event is one task's observations."""
        ...

    def observed(self, y: Labels, classes: int) -> Array:
        """The labels in the form that `observation` is a distribution of."""
        ...


@runtime_checkable
class ClassLikelihood(Likelihood, Protocol):
    """A likelihood of labels that are classes."""

    def predict(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """Class probabilities E_q p(y = k | f) of every query; rows sum to 1."""
        ...


@runtime_checkable
class RealLikelihood(Likelihood, Protocol):
    """A likelihood of labels that are real numbers, given one latent function (C = 1): a model of the noise."""

    def distribution(self, marginals: Marginals | JointMarginals) -> dist.Distribution:
        """p(y_* | data) = E_q p(y_* | f_*) of every query, with batch shape [Q].

        The marginals are [1, Q], or [M, 1, Q] of an equal mixture of M posteriors.
        """
        ...


@runtime_checkable
class GaussianLikelihood(Likelihood, Protocol):
    """A likelihood that is itself Gaussian in f: it offers its sites in closed form, which is what `exact` needs."""

    def gaussian_sites(self, y: Labels, classes: int) -> tuple[Array, Array]:
        """Shift and precision [C, N] with p(y_n | f_n) proportional to the product of the sites of point n."""
        ...


@runtime_checkable
class CompositeLikelihood(ClassLikelihood, Protocol):
    """A density that is not normalised over the label: `predict` normalises its expectation, over all of a mixture."""

    def expected_density(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """E_q p(y = k | f) of every query, not normalised."""
        ...


@runtime_checkable
class SmoothLikelihood(Likelihood, Protocol):
    """A likelihood that offers its local Gaussian approximation, which is what `laplace` needs."""

    def local_sites(self, y: Labels, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None) -> AnySites:
        """Sites with the slope of log p(y | f) at f, and a positive semi-definite curvature L: h = slope + L f."""
        ...


@runtime_checkable
class SlicedLikelihood(Protocol):
    """Augmented, with blocks that hardly move each other: Gibbs takes elliptical slices of f as well."""

    most_slices: ClassVar[int]

    def slices(self, points: int | Int[Array, ""]) -> Int[Array, ""]:
        """Slices that a sweep takes with so many labelled points, at most `most_slices`."""
        ...


@runtime_checkable
class AugmentedLikelihood(Likelihood, Protocol):
    """Tier 2: latents `aux` given which the likelihood is a Gaussian site. Two columns of verbs, one recipe.

    Gibbs calls the sampled column (aux_conditional, sites), CAVI the expected one (aux_posterior, expected_sites);
    a method that ends in `_model`, or begins with `log_`, states the same model for NumPyro and for tests.
    """

    def aux_conditional(
        self,
        key: Key[Array, ""],
        y: Labels,
        f: Float[Array, "C N"],
        classes: Bool[Array, " C"] | None = None,
    ) -> Aux:
        """An exact draw of aux given y and f."""
        ...

    def sites(self, y: Labels, aux: Aux, classes: Bool[Array, " C"] | None = None) -> AnySites:
        """p(y, aux | f) as a function of f: its sites."""
        ...

    def aux_posterior(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        aux: Aux = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Aux:
        """Factors q(aux) that raise the bound given q(f); `aux` holds the last ones (None at first)."""
        ...

    def expected_sites(self, y: Labels, aux: Aux, classes: Bool[Array, " C"] | None = None) -> AnySites:
        """exp E_q(aux) log p(y, aux | f) as a function of f: its sites."""
        ...

    def augmented_bound(
        self,
        y: Labels,
        marginals: Marginals | JointMarginals,
        aux: Aux,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """E_q[log p(y_n, aux | f_n) - log q(aux)], at most E_q log p(y_n | f_n)."""
        ...

    def aux_model(self, y: Labels, f: Float[Array, "C N"]) -> None:
        """aux as NumPyro sample sites, and the tilt p(y, aux | f) / p(aux) as a factor."""
        ...

    def log_joint(self, y: Labels, aux: Aux, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(y_n, aux | f_n)."""
        ...

    def log_conditional(self, y: Labels, aux: Aux, f: Float[Array, "C N"]) -> Float[Array, " N"]:
        """log p(aux | y_n, f_n)."""
        ...


class NoParameters:
    """Mixin: nothing is learned."""

    def parameters(self) -> dict[str, float | Array]:
        """None."""
        return {}

    def priors(self) -> dict[str, dist.Distribution]:
        """None."""
        return {}

    def with_parameters(self: Mine, values: dict[str, Array]) -> Mine:
        """Itself."""
        del values
        return self


class IntegerLabels:
    """Mixin: what is observed is the labels themselves."""

    def observed(self, y: Int[Array, " N"], classes: int) -> Int[Array, " N"]:
        """The labels."""
        del classes
        return y


class SampledPrediction:
    """Mixin: predictions are Monte-Carlo expectations over draws that all queries share (common random numbers).

    prediction_draws: how many. Raises ValueError for a number that `MonteCarlo` refuses.
    """

    prediction_draws: int

    def __post_init__(self) -> None:
        self._rule()

    def _rule(self) -> MonteCarlo:
        return MonteCarlo(self.prediction_draws)

    def prediction_points(self, key: Key[Array, ""], mean: Float[Array, "C Q"]) -> Points:
        """The draws for logits of that mean."""
        return self._rule().points(key, mean.shape[0], mean.dtype)


class CategoricalLabels(IntegerLabels, SampledPrediction):
    """Mixin: labels are categorical, p(y = k | f) = exp l_k / sum_c exp l_c with l = `label_logits`(f)."""

    def label_logits(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """l, up to a number that the classes of a point share."""
        raise NotImplementedError

    def probabilities(self, f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None) -> Float[Array, "C N"]:
        """p(y = k | f) of every label k."""
        return jax.nn.softmax(present(self.label_logits(f), classes), axis=0)

    def log_prob(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log p(y_n | f_n) = l_{y_n} - log sum_c exp l_c."""
        logits = self.label_logits(f)
        return own(y, logits) - logsumexp(present(logits, classes), axis=0)

    def log_densities(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """log p(y_n = k | f_n) of every label k."""
        return jax.nn.log_softmax(self.label_logits(f), axis=0)

    def predict(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """E_q p(k | f)."""
        points = self.prediction_points(key, marginals.mean)
        return expect(lambda f: self.probabilities(f, classes), marginals, points).T

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """Labels y [N] given f."""
        return dist.Categorical(logits=self.label_logits(f).T).to_event(1)


def log_densities(likelihood: Likelihood, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
    """log p(y = k | f_n) of every label k; at once where a likelihood can, which is much faster under vmap."""
    if hasattr(likelihood, "log_densities"):
        return likelihood.log_densities(f)
    labels = jnp.broadcast_to(jnp.arange(f.shape[0])[:, None], f.shape)
    return jax.vmap(lambda label: likelihood.log_prob(label, f))(labels)


def check_positive(name: str, value: object) -> None:
    """Raises ValueError for a float that is not positive; whatever else JAX builds trees of is taken as it is."""
    if isinstance(value, float) and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")


def one_hot(y: Int[Array, " N"], classes: int, dtype: jnp.dtype = jnp.float32) -> Float[Array, "C N"]:
    """Y with Y[c, n] = 1 where y_n = c."""
    return jax.nn.one_hot(y, classes, axis=0, dtype=dtype)


def own(y: Int[Array, " N"], values: Float[Array, "C N"]) -> Float[Array, " N"]:
    """The entry of every point's own class."""
    return jnp.sum(one_hot(y, values.shape[0], values.dtype) * values, axis=0)


def present(values: Float[Array, "C N"], classes: Bool[Array, " C"] | None) -> Float[Array, "C N"]:
    """Log weights with -inf for classes that do not exist."""
    return values if classes is None else jnp.where(classes[:, None], values, -jnp.inf)


def present_or_zero(values: Float[Array, "C N"], classes: Bool[Array, " C"] | None) -> Float[Array, "C N"]:
    """Values with 0 for classes that do not exist."""
    return values if classes is None else jnp.where(classes[:, None], values, 0.0)
