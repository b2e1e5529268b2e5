"""Label regression (DKT): each one-versus-rest label, coded as -1 or 1, is regressed with Gaussian noise."""

import enum
from dataclasses import dataclass, field, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Bool, Float, Int, Key

from fewshot.models.expectations import Points
from fewshot.models.gaussian import JointMarginals, Marginals
from fewshot.models.likelihoods.base import check_positive, one_hot


class Rule(enum.Enum):
    """How class probabilities come from a regression of labels."""

    DENSITY = "density"  # normalised over the label (R5)
    SIGMOID = "sigmoid"  # of every posterior mean, as published (R6)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LabelRegression:
    """Density prod_c N(2 Y_c - 1; f_c, s2), with noise variance s2.

    rule: where class probabilities come from. Raises ValueError for noise that is not positive, TypeError for what
    is no Rule.
    """

    noise: float | Float[Array, ""] = 0.1
    rule: Rule = field(default=Rule.DENSITY, metadata={"static": True})

    prior_mean: ClassVar[float | None] = 0.0
    log_concave: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rule, Rule):
            raise TypeError(f"expected a Rule, got {self.rule!r}; use Rule.DENSITY or Rule.SIGMOID")
        check_positive("noise", self.noise)

    def parameters(self) -> dict[str, float | Array]:
        """log s2."""
        return {"log_noise": jnp.log(jnp.asarray(self.noise))}

    def priors(self) -> dict[str, dist.Distribution]:
        """log s2 ~ N(log 0.1, 1): labels are coded at distance 2."""
        return {"log_noise": dist.Normal(jnp.log(0.1), 1.0)}

    def with_parameters(self, values: dict[str, Array]) -> "LabelRegression":
        """The same with s2 = exp(log_noise)."""
        return replace(self, noise=jnp.exp(values["log_noise"])) if values else self

    def log_prob(
        self, y: Int[Array, " N"], f: Float[Array, "C N"], classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, " N"]:
        """log prod_c N(2 Y_cn - 1; f_cn, s2)."""
        return self.expected_log_prob(y, Marginals(f, jnp.zeros_like(f)), None, classes)

    def expected_log_prob(
        self,
        y: Int[Array, " N"],
        marginals: Marginals | JointMarginals,
        points: Points | None = None,
        classes: Bool[Array, " C"] | None = None,
    ) -> Float[Array, " N"]:
        """Closed form; points are not used."""
        del points
        error = (self.observed(y, marginals.mean.shape[0]) - marginals.mean) ** 2 + marginals.variance
        terms = -0.5 * (jnp.log(2 * jnp.pi * self.noise) + error / self.noise)
        return jnp.sum(terms if classes is None else jnp.where(classes[:, None], terms, 0.0), axis=0)

    def gaussian_sites(self, y: Int[Array, " N"], classes: int) -> tuple[Float[Array, "C N"], Float[Array, "C N"]]:
        """h = (2 Y - 1) / s2 and W = 1 / s2."""
        target = self.observed(y, classes)
        return target / self.noise, jnp.ones_like(target) / self.noise

    def predict(
        self, key: Key[Array, ""], marginals: Marginals | JointMarginals, classes: Bool[Array, " C"] | None = None
    ) -> Float[Array, "Q C"]:
        """softmax_k 2 m_k / (v_k + s2), or s(m_k) / sum_c s(m_c); the key is not used."""
        del key
        logits = 2 * marginals.mean / (marginals.variance + self.noise)
        if self.rule is Rule.SIGMOID:
            logits = jax.nn.log_sigmoid(marginals.mean)
        return jax.nn.softmax(logits if classes is None else jnp.where(classes[:, None], logits, -jnp.inf), axis=0).T

    def observation(self, f: Float[Array, "C N"]) -> dist.Distribution:
        """Coded labels [C, N] given f."""
        return dist.Normal(f, jnp.sqrt(self.noise)).to_event(2)

    def observed(self, y: Int[Array, " N"], classes: int) -> Float[Array, "C N"]:
        """Labels coded 2 Y - 1."""
        return 2 * one_hot(y, classes, jnp.result_type(float)) - 1
