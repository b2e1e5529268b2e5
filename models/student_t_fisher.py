"""Fisher information of ST(nu, m, diag S) on M values and its natural gradient (T4, T5 of docs/student_t.md).

With n = nu + M:

    F_mm = n nu / ((n + 2)(nu - 2)) diag(1 / S)          F_nu,S = (M + 2) / (n (n + 2)(nu - 2)) 1 / S
    F_SS = [ n diag(1 / S^2) - (1 / S)(1 / S)^T ] / (2 (n + 2))            F_m,nu = F_m,S = 0
    F_nu,nu = J + 2 M (M + 2)^2 / (nu n^2 (n + 2)(nu - 2)^2)

J, the information on nu once S is unknown too, is what the natural gradient divides by.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

DOF_LIMIT = 1e4  # the t is then normal to about M^2 / 10^4 nats
TERMS = 15  # of the recurrence of `trigamma_rest`; behind them the series is exact to rounding for x > 1


class DiagonalStudent(NamedTuple):
    """ST(nu, m, diag S) of M values in unconstrained numbers: log(nu - 2), m and log S."""

    log_excess: Float[Array, ""]
    mean: Float[Array, " M"]
    log_scale: Float[Array, " M"]

    @property
    def dof(self) -> Float[Array, ""]:
        """nu."""
        return 2 + jnp.exp(self.log_excess)

    @property
    def scale(self) -> Float[Array, " M"]:
        """S, the variances."""
        return jnp.exp(self.log_scale)


class Fisher(NamedTuple):
    """Blocks of the Fisher matrix: dof is F_nu,nu, dof_scale [M] F_nu,S, location [M] the diagonal of F_mm."""

    dof: Float[Array, ""]
    dof_scale: Float[Array, " M"]
    location: Float[Array, " M"]
    scale: Float[Array, "M M"]


def trigamma_rest(x: Float[Array, ""]) -> Float[Array, ""]:
    """psi'(x) - 1 / x - 1 / (2 x^2) for x > 1, without cancellation.

    With g for it, g(x) - g(x + 1) = 1 / (2 x^2 (x + 1)^2); far out g(x) = 1/(6 x^3) - 1/(30 x^5) + 1/(42 x^7) - ...
    """
    near = x + jnp.arange(TERMS)
    far = 1 / (x + TERMS) ** 2
    series = (x + TERMS) * far**2 * (1 / 6 - far * (1 / 30 - far * (1 / 42 - far * (1 / 30 - far * 5 / 66))))
    return jnp.sum(1 / (2 * near**2 * (near + 1) ** 2)) + series


def dof_information(dof: Float[Array, ""], count: int) -> Float[Array, ""]:
    """J = 1/4 [ psi'(nu/2) - psi'(n/2) - 2 M (n + 2) / (nu n^2) ], the Schur complement of F_nu,nu.

    Its terms of order M / nu^2 cancel down to M^2 / nu^4; what is left of them is 2 M^2 / (nu n)^2.
    """
    total = dof + count
    rest = trigamma_rest(0.5 * dof) - trigamma_rest(0.5 * total)
    return 0.25 * (2 * count**2 / (dof * total) ** 2 + rest)


def fisher(dof: Float[Array, ""], scale: Float[Array, " M"]) -> Fisher:
    """All blocks in (nu, m, S)."""
    count = scale.shape[0]
    total = dof + count
    coupling = (count + 2) / (total * (total + 2) * (dof - 2))
    corner = dof_information(dof, count) + 2 * count * (total + 2) / dof * coupling**2
    location = total * dof / ((total + 2) * (dof - 2)) / scale
    inverse = 1 / scale
    block = (total * jnp.diag(inverse**2) - jnp.outer(inverse, inverse)) / (2 * (total + 2))
    return Fisher(corner, coupling * inverse, location, block)


def natural_slopes(at: DiagonalStudent, slopes: DiagonalStudent) -> DiagonalStudent:
    """F^-1 times a gradient, in the unconstrained numbers, in O(M).

    In log S the scale block is (n I - 1 1^T) / (2 (n + 2)), whose inverse is 2 (n + 2) / n (I + 1 1^T / nu); in
    log(nu - 2) the coupling is c = (M + 2) / (n (n + 2)) for every value, and J becomes (nu - 2)^2 J.
    """
    dof, count = at.dof, at.mean.shape[0]
    total = dof + count
    sum_slopes = jnp.sum(slopes.log_scale)
    reduced = slopes.log_excess - 2 * (count + 2) / (dof * total) * sum_slopes
    log_excess = reduced / ((dof - 2) ** 2 * dof_information(dof, count))
    left = slopes.log_scale - (count + 2) / (total * (total + 2)) * log_excess
    log_scale = 2 * (total + 2) / total * (left + jnp.sum(left) / dof)
    mean = slopes.mean * at.scale * (total + 2) * (dof - 2) / (total * dof)
    return DiagonalStudent(log_excess, mean, log_scale)


def natural_gradient(rate: float | Float[Array, ""], radius: float = 1.0) -> optax.GradientTransformation:
    """Natural-gradient descent on a DiagonalStudent, as an optax transformation.

    A step is -rate F^-1 g, shortened to Fisher length `radius` (its square is twice the KL between the two, for short
    steps): far from the optimum F^-1 g is longer than F is valid. nu - 2 changes by a factor of e at most and stays
    below DOF_LIMIT: infinity is at a finite Fisher distance, so a short step in that sense can lead beyond all numbers.

    Raises ValueError for a rate or radius that is not positive, and for an update without the current DiagonalStudent.
    A rate that is an array (optax.inject_hyperparams) is not looked at.
    """
    if not (radius > 0 and (isinstance(rate, jax.Array) or rate > 0)):
        raise ValueError(f"expected a positive rate and radius, got {rate} and {radius}")

    def update(
        slopes: DiagonalStudent, state: optax.OptState, at: DiagonalStudent | None = None
    ) -> tuple[DiagonalStudent, optax.OptState]:
        if at is None:
            raise ValueError("expected the current DiagonalStudent, got None: pass it as the third argument of update")
        direction = natural_slopes(at, slopes)
        square = sum(jnp.sum(one * other) for one, other in zip(slopes, direction, strict=True))
        length = rate * jnp.sqrt(square)
        step = rate * jnp.where(length > radius, radius / length, 1.0)
        room = math.log(DOF_LIMIT) - at.log_excess
        log_excess = jnp.minimum(jnp.clip(-step * direction.log_excess, -1.0, 1.0), room)
        return DiagonalStudent(log_excess, -step * direction.mean, -step * direction.log_scale), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)
