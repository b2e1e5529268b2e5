"""Base kernels K = s2 k(x, z) on feature vectors: frozen dataclasses that hold no numbers.

The numbers a kernel learns live outside it, in a dict of unconstrained scalars `hyper`, so that the same kernel object
serves a Flax module, a NumPyro model and a hand-written test. Every product runs at the highest matmul precision.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jaxtyping import Array, Float

Hyper = dict[str, Float[Array, ""] | float]

# Prior of log s2. With a deviation of 1.5 the scale ran away on Omniglot: beyond 100 the inner loop no longer converges
# in a few steps, and then the gradient at its sites asks for more and more.
SCALE, LOG_SCALE_DEVIATION = 30.0, 0.5
FAR = 1e12  # a squared distance in length-scales, from which on every stationary kernel is 0


def inner_products(x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """All x.z [N, M]."""
    return jnp.matmul(x, z.T, precision=jax.lax.Precision.HIGHEST)


def squared_distances(x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
    """All |x - z|^2 [N, M], clamped at 0; the gradient at x = z is 0. Infinity where x is too long to be squared.

    Both sides are shifted by the mean of z first: the distances stay the same and far less cancels in float32. The
    shift uses z alone, so a row does not depend on the other rows.
    """
    shift = jax.lax.stop_gradient(z.mean(axis=0))
    x, z = x - shift, z - shift
    squares = (x * x).sum(axis=-1)[:, None] + (z * z).sum(axis=-1)[None, :]
    return jnp.maximum(squares - 2.0 * inner_products(x, z), 0.0)


def unit_norm(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """x / |x| [N, D] at any scale; a zero vector stays zero, with zero gradient (all ReLUs of an image can be off).

    A vector whose squares overflow or vanish is divided by a power of two first, which is exact; it has no gradient.
    """
    half = int(jnp.finfo(x.dtype).maxexp) // 2
    fixed = jax.lax.stop_gradient(x)
    largest = jnp.abs(fixed).max(axis=-1, keepdims=True, initial=0.0)
    long, short = largest > 2.0 ** (half - 16), (largest > 0) & (largest < 2.0 ** (16 - half))
    scale = jnp.where(long, 2.0 ** (half + 16), 2.0 ** (-half - 16)).astype(x.dtype)
    # A choice between two results leaves the bits of the plain one alone, and those of its gradient.
    return jnp.where(long | short, _unit(fixed / scale), _unit(x))


def _unit(x: Array) -> Array:
    """`unit_norm` of vectors that can be squared; others become zero."""
    squares = (x * x).sum(axis=-1, keepdims=True)
    alive = ~(squares <= jnp.finfo(x.dtype).tiny)  # so that NaN stays NaN
    # The inner `where` keeps the unused branch finite: 0 * inf would put NaN into the gradient.
    return jnp.where(alive, x * jax.lax.rsqrt(jnp.where(alive, squares, 1.0)), 0.0)


def per_dimension(x: Float[Array, "N D"]) -> Float[Array, "N D"]:
    """x / sqrt(D) [N, D]: inner products become means over features and do not grow with the feature size."""
    return x / math.sqrt(x.shape[-1])


@dataclass(frozen=True)
class Kernel:
    """A base kernel. `hyper` holds unconstrained scalars; `log_scale` is log s2, a variance, in all of them.

    `normalise_features` asks the deep kernel for batch-normalised features, `affine` for a learned scale and shift
    after that normalisation. `prior_scale` is the median of the prior of s2, at which learning starts.
    """

    normalise_features: bool = False
    affine: bool = False
    prior_scale: float = SCALE

    def __post_init__(self) -> None:
        if not self.prior_scale > 0:
            raise ValueError(f"prior_scale must be positive, got {self.prior_scale}")

    def initial(self) -> dict[str, float]:
        """Where learning starts."""
        return {"log_scale": math.log(self.prior_scale)}

    def priors(self) -> dict[str, dist.Distribution]:
        """One weakly informative prior for each name in `initial`."""
        return {"log_scale": dist.Normal(math.log(self.prior_scale), LOG_SCALE_DEVIATION)}

    def gram(self, hyper: Hyper, x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
        """K [N, M] between the rows of x [N, D] and z [M, D]."""
        raise NotImplementedError(f"{type(self).__name__} has no gram")

    def diagonal(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        """Diagonal [N] of gram(x, x)."""
        raise NotImplementedError(f"{type(self).__name__} has no diagonal")

    def root(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"] | None:
        """S [N, R] with K = S S^T (G8), or None where the kernel has no short feature map."""
        return None

    def of_task(self, hyper: Hyper, examples: float | Float[Array, ""]) -> Hyper:
        """The hyper-parameters for a task with so many labelled examples a class, of those for tasks with one."""
        del examples
        return hyper


class FeatureKernel(Kernel):
    """K = S S^T with an explicit feature map S."""

    def feature_map(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"]:
        """S [N, R]."""
        raise NotImplementedError(f"{type(self).__name__} has no feature_map")

    def root(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"]:
        return self.feature_map(hyper, x)

    def gram(self, hyper: Hyper, x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
        return inner_products(self.feature_map(hyper, x), self.feature_map(hyper, z))

    def diagonal(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        return (self.feature_map(hyper, x) ** 2).sum(axis=-1)


@dataclass(frozen=True)
class Cosine(FeatureKernel):
    """k = x.z / (|x| |z|) + constant; the first part is 0 where either is the zero vector.

    constant: the prior variance, in units of s2, of what a latent function has in common at all inputs. scale_power,
    constant_power: tasks with n labelled examples a class have s2 n^scale_power and constant n^constant_power, so that
    a prior which was chosen for few examples need not be that for many.
    """

    constant: float = 0.0
    scale_power: float = 0.0
    constant_power: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.constant < math.inf:
            raise ValueError(f"constant must be a number from 0 on, got {self.constant}")
        for name in ("scale_power", "constant_power"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite, got {getattr(self, name)}")

    def of_task(self, hyper: Hyper, examples: float | Float[Array, ""]) -> Hyper:
        if not self.scale_power and not self.constant_power:
            return hyper
        log = jnp.log(examples)
        found = {**hyper, "log_scale": hyper["log_scale"] + self.scale_power * log}
        return found | {"constant": self.constant * jnp.exp(self.constant_power * log)}

    def feature_map(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"]:
        features = unit_norm(x)
        if self.constant:
            column = jnp.full((x.shape[0], 1), jnp.sqrt(hyper.get("constant", self.constant)), x.dtype)
            features = jnp.concatenate([features, column], axis=-1)
        return jnp.exp(0.5 * hyper["log_scale"]) * features


@dataclass(frozen=True)
class Linear(FeatureKernel):
    """k = x.z / D."""

    def feature_map(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"]:
        return jnp.exp(0.5 * hyper["log_scale"]) * per_dimension(x)


@dataclass(frozen=True)
class Stationary(Kernel):
    """k = profile(|x - z|^2 / l^2) of x / sqrt(D), or of x / |x| with `unit`."""

    unit: bool = False

    def initial(self) -> dict[str, float]:
        # The median distance between two images of an Omniglot task under an untrained Conv4 (median heuristic).
        return {**super().initial(), "log_lengthscale": -0.45 if self.unit else -0.25}

    def priors(self) -> dict[str, dist.Distribution]:
        return {**super().priors(), "log_lengthscale": dist.Normal(0.0, 1.0)}

    def profile(self, squares: Float[Array, "N M"]) -> Float[Array, "N M"]:
        """k as a function of the squared distance in length-scales; profile(0) = 1."""
        raise NotImplementedError(f"{type(self).__name__} has no profile")

    def gram(self, hyper: Hyper, x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
        prepare = _unit if self.unit else per_dimension
        squares = squared_distances(prepare(x), prepare(z)) * jnp.exp(-2.0 * hyper["log_lengthscale"])
        return jnp.exp(hyper["log_scale"]) * self.profile(squares)

    def diagonal(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        return jnp.full(x.shape[0], jnp.exp(hyper["log_scale"]), x.dtype)


@dataclass(frozen=True)
class RBF(Stationary):
    """k = exp(-r^2 / 2)."""

    def profile(self, squares: Float[Array, "N M"]) -> Float[Array, "N M"]:
        return jnp.exp(-0.5 * squares)


def _matern_argument(squares: Array) -> Array:
    """a, kept where a^2 is finite: exp(-a) is 0 long before, and infinity times that would be NaN."""
    return jnp.sqrt(5.0 * jnp.minimum(squares, FAR))


@jax.custom_jvp
def matern52(squares: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """(1 + a + a^2 / 3) exp(-a) with a = sqrt(5 r^2), as a function of r^2; 0 at infinity."""
    a = _matern_argument(squares)
    return (1.0 + a + a * a / 3.0) * jnp.exp(-a)


@matern52.defjvp
def _matern52_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """dk/d(r^2) = -5/6 (1 + a) exp(-a): no square root is differentiated, so nothing blows up at r = 0."""
    (squares,), (tangent,) = primals, tangents
    a = _matern_argument(squares)
    return matern52(squares), -5.0 / 6.0 * (1.0 + a) * jnp.exp(-a) * tangent


@dataclass(frozen=True)
class Matern52(Stationary):
    """k = (1 + a + a^2 / 3) exp(-a), a = sqrt(5) r."""

    def profile(self, squares: Float[Array, "N M"]) -> Float[Array, "N M"]:
        return matern52(squares)


@dataclass(frozen=True)
class Polynomial(Kernel):
    """k = (x.z / D + offset)^degree on standardised features, offset = exp(log_offset) >= 0."""

    normalise_features: bool = True
    degree: int = 1

    def initial(self) -> dict[str, float]:
        # Offset 1 equals x.x / D of standardised features: the constant and the linear part start equally strong.
        return {**super().initial(), "log_offset": 0.0}

    def priors(self) -> dict[str, dist.Distribution]:
        return {**super().priors(), "log_offset": dist.Normal(0.0, 1.0)}

    def gram(self, hyper: Hyper, x: Float[Array, "N D"], z: Float[Array, "M D"]) -> Float[Array, "N M"]:
        base = inner_products(per_dimension(x), per_dimension(z)) + jnp.exp(hyper["log_offset"])
        return jnp.exp(hyper["log_scale"]) * base**self.degree

    def diagonal(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, " N"]:
        base = (per_dimension(x) ** 2).sum(axis=-1) + jnp.exp(hyper["log_offset"])
        return jnp.exp(hyper["log_scale"]) * base**self.degree

    def root(self, hyper: Hyper, x: Float[Array, "N D"]) -> Float[Array, "N R"] | None:
        if self.degree != 1:  # degree 2 has (D + 1)(D + 2) / 2 features: an eigen-decomposition of K is cheaper
            return None
        constant = jnp.full((x.shape[0], 1), jnp.exp(0.5 * hyper["log_offset"]), x.dtype)
        return jnp.exp(0.5 * hyper["log_scale"]) * jnp.concatenate([per_dimension(x), constant], axis=-1)
