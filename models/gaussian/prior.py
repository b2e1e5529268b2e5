"""The prior N(a, K) of the latents, what it must know of new inputs, its root (G8), and what Gaussian sites must offer.

A *site* is an unnormalised Gaussian factor t(f) = exp(h.f - 1/2 f.W.f) attached to one labelled point; h is its
*shift*, W >= 0 its *precision*. Everything conditional on sites is asked of the prior: `given`, `log_normaliser`,
`draw`. Shapes: C classes, N points, Q queries, R columns of the root.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from fewshot.models.gaussian.factors import highest_precision
from fewshot.models.gaussian.marginals import AnyMarginals, Marginals


class Query(NamedTuple):
    """What G7 needs of Q new inputs: prior mean a_* [C, Q], cross-covariance k_* [Q, N], prior variance k_** [Q].

    root is S_* [Q, R] with k_* = S_* S^T where the kernel has finitely many features, else None.
    """

    mean: Float[Array, "C Q"]
    cross: Float[Array, "Q N"]
    variance: Float[Array, " Q"]
    root: Float[Array, "Q R"] | None = None

    def divided(self, by: Float[Array, ""]) -> "Query":
        """The query of f / by: (G7) is linear in the mean and the cross-covariance."""
        root = None if self.root is None else self.root / by
        return Query(self.mean / by, self.cross / by, self.variance / by**2, root)


@runtime_checkable
class Posterior(Protocol):
    """What prediction, the objectives and diagnostics need of a fitted q(f)."""

    @property
    def kl(self) -> Float[Array, ""]:
        """KL(q || prior)."""
        ...

    @property
    def marginals(self) -> AnyMarginals:
        """Marginals at the labelled points."""
        ...

    def predict(self, query: Query) -> AnyMarginals:
        """Marginals at new inputs (G7)."""
        ...

    def draws(self, key: Key[Array, ""], prior: "GaussianPrior", count: int) -> Float[Array, "M D C N"]:
        """Joint draws of f at the labelled points: M chains, 1 where q is one Gaussian."""
        ...


@runtime_checkable
class GaussianPosterior(Posterior, Protocol):
    """N(a, K) times Gaussian sites: a Posterior with alpha = K^-1 (mean - a), all [C, N]."""

    @property
    def mean(self) -> Float[Array, "C N"]:
        """Mean."""
        ...

    @property
    def variance(self) -> Float[Array, "C N"]:
        """Marginal variances."""
        ...

    @property
    def alpha(self) -> Float[Array, "C N"]:
        """K^-1 (mean - a)."""
        ...

    @property
    def seen(self) -> AnyMarginals:
        """Marginals of what the sites know of f: of differences where they know no more, which cost less."""
        ...


@runtime_checkable
class AnySites(Protocol):
    """What the algebra and the algorithms need of Gaussian sites; `Sites` keep the classes of a point independent."""

    @property
    def shift(self) -> Float[Array, "C N"]:
        """h."""
        ...

    def masked(self, real: Bool[Array, "C N"]) -> "AnySites":
        """Only the real entries keep their site."""
        ...

    def shifted(self, by: Float[Array, "C N"]) -> "AnySites":
        """The same with shift h + by."""
        ...

    def times(self, f: Float[Array, "C N"]) -> Float[Array, "C N"]:
        """The precision times f."""
        ...

    def blocks(self) -> Float[Array, "N C C"]:
        """The precision of every point."""
        ...

    def noise(self, key: Key[Array, ""]) -> Float[Array, "C N"]:
        """A draw of N(0, precision)."""
        ...

    def distance(self, target: Any, marginals: AnyMarginals, slope: Float[Array, "C N"]) -> Float[Array, ""]:
        """Largest difference of precisions in units of the marginal variances, relative to max(1, |slope|)."""
        ...

    def prior_marginals(self, prior: "GaussianPrior") -> AnyMarginals:
        """Marginals of the prior in the form that a posterior with such sites has."""
        ...

    def condition(self, prior: "GaussianPrior") -> GaussianPosterior:
        """Exact posterior of N(a, K) times the sites."""
        ...

    def log_normaliser(self, prior: "GaussianPrior") -> Float[Array, ""]:
        """log Z (G6)."""
        ...

    def deviation(self, prior: "GaussianPrior") -> Float[Array, "C N"]:
        """Posterior mean less prior mean."""
        ...


class GaussianPrior(NamedTuple):
    """N(a, K) for every class: mean a [C, N], covariance K [N, N] (shared) or [C, N, N].

    root is S [N, R] with K = S S^T where the kernel has finitely many features, else None (see `prior_root`).
    """

    mean: Float[Array, "C N"]
    covariance: Float[Array, "*C N N"]
    root: Float[Array, "N R"] | None = None

    @property
    def features(self) -> Float[Array, "N R"] | None:
        """The root where it has fewer columns than rows: factors of size R then do the work of those of size N."""
        short = self.root is not None and self.root.shape[1] < self.root.shape[0]
        return self.root if short else None

    def marginals(self) -> Marginals:
        """Marginals at the labelled points."""
        diagonal = jnp.diagonal(self.covariance, axis1=-2, axis2=-1)
        return Marginals(self.mean, jnp.broadcast_to(diagonal, self.mean.shape))

    @highest_precision
    def given(self, sites: AnySites) -> GaussianPosterior:
        """Exact posterior of N(a, K) times the sites (G1-G5)."""
        return sites.condition(self)

    @highest_precision
    def log_normaliser(self, sites: AnySites) -> Float[Array, ""]:
        """log Z = log of the integral of N(f | a, K) times the sites (G6), summed over classes."""
        return sites.log_normaliser(self)

    @highest_precision
    def draw(self, key: Key[Array, ""], sites: AnySites) -> Float[Array, "C N"]:
        """A draw of f from N(a, K) times the sites, for any W >= 0, zeros included; by a root of K (`with_root`).

        Matheron's rule: f0 from the prior, e ~ N(0, W), f = f0 + V (h + e - W f0). Its mean is (G3); its covariance is
        V K^-1 V + V W V = V.
        """
        prior_key, noise_key = jax.random.split(key)
        root = root_of(self)
        start = self.mean + jax.random.normal(prior_key, (len(self.mean), root.shape[-1]), root.dtype) @ root.T
        return start + sites.shifted(sites.noise(noise_key)).deviation(self._replace(mean=start))


class Root(NamedTuple):
    """K = S S^T (G8) and P = S (S^T S)^+, with which E[u | f] = P^T (f - a); `indefinite` flags a failed K."""

    factor: Float[Array, "N R"]
    pseudo_inverse: Float[Array, "N R"]
    indefinite: Bool[Array, ""]


@highest_precision
def prior_root(prior: GaussianPrior) -> Root:
    """Root of a shared K (G8): the kernel's features where it has them, else an eigen-decomposition of K.

    Directions below N eps lambda_max count as absent; an eigenvalue below minus that sets `indefinite`.
    No gradient passes through the decomposition: with P fixed, d(S S^T) = dK and d(K^+ S) follow from K itself, to
    first order and for a K of constant rank.
    """
    if prior.covariance.ndim != 2:
        raise ValueError("prior_root needs one K [N, N] shared by the classes; call it class by class")
    fixed = jax.lax.stop_gradient(prior.covariance)
    values, vectors = jnp.linalg.eigh(fixed)
    floor = values.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
    present = values > floor
    safe = jnp.where(present, values, 1.0)
    basis = jnp.where(present, vectors, 0.0)
    inverse = basis / jnp.sqrt(safe)
    change = prior.covariance - fixed
    if prior.root is None:
        moved = change @ inverse
        factor = basis * jnp.sqrt(safe) + moved - 0.5 * basis @ (basis.T @ moved)
        pseudo_inverse = inverse - 0.5 * inverse @ (inverse.T @ change @ inverse)
    else:
        factor = prior.root
        explained = inverse.T @ factor
        pseudo_inverse = inverse @ (explained - inverse.T @ change @ inverse @ explained)
    return Root(factor, pseudo_inverse, values[0] < -floor)


def root_of(prior: GaussianPrior) -> Float[Array, "N R"]:
    """S with K = S S^T (G8): the one that the prior holds, else one found here."""
    return prior_root(prior).factor if prior.root is None else prior.root


def with_root(prior: GaussianPrior) -> GaussianPrior:
    """The prior with its root, so that it is decomposed once however often it is drawn from."""
    return prior._replace(root=root_of(prior))
