"""Sparse variational Student-t processes with Gaussian noise (T6, T7 of docs/student_t.md).

q(u) = ST(nu~, m, diag S) at the inducing points. (f, u) is a Student-t process with nu degrees of
freedom, y = f + N(0, s2), and q(f, u) = p(f | u) q(u). The bound

    sum_n E_q[log N(y_n | f_n, s2)] - KL(q(u) || p(u))

has closed forms but for E_q[log(1 + beta / (nu - 2))], which is sampled (docs/student_t.md). u is held in a basis: its
own, or whitened, u = L v with K_zz + e I = L L^T, where the prior is ST(nu, 0, I) and a diagonal S is less of a
restriction. That factor is why inducing_noise e is not 0 here: 1e-4 of the variance keeps it positive definite in
float32, and the model is the same for every e (models/inducing.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Key

from fewshot.models.gaussian import cholesky_inverse, highest_precision
from fewshot.models.inducing import InducingProcess, Parameters
from fewshot.models.kernels import Kernel
from fewshot.models.regression import Prediction
from fewshot.models.student_t import conditional_factor, log_constant, log_gamma_ratio, scale_posterior
from fewshot.models.student_t_fisher import DiagonalStudent, natural_gradient

Scalar = Float[Array, ""] | float


class Model(NamedTuple):
    """What belongs to the model: kernel, inducing inputs, noise, weights of inputs; and log(nu - 2) of the process."""

    process: Parameters
    log_excess: Float[Array, ""]

    @property
    def dof(self) -> Float[Array, ""]:
        """nu."""
        return 2 + jnp.exp(self.log_excess)

    @property
    def noise(self) -> Float[Array, ""]:
        """s2."""
        return jnp.exp(self.process.log_noise)


class Basis(NamedTuple):
    """The inducing variables c of one basis at B inputs: f | c has mean features c, beta = |root c|^2.

    rest [B] is diag Sigma, log_determinant is log|C| of c's prior covariance C.
    """

    features: Float[Array, "B M"]
    rest: Float[Array, " B"]
    root: Float[Array, "M M"]
    log_determinant: Float[Array, ""]


class State(NamedTuple):
    """q, the model, and the memory of both optimisers."""

    q: DiagonalStudent
    model: Model
    q_memory: optax.OptState
    model_memory: optax.OptState


class Method(NamedTuple):
    """An optimiser for q and one for the model; both go down the negative bound."""

    q: optax.GradientTransformation
    model: optax.GradientTransformation


class Mixture(NamedTuple):
    """Draws of normals at Q inputs: means and variances [S, Q], equally likely."""

    mean: Float[Array, "S Q"]
    variance: Float[Array, "S Q"]

    def log_density(self, y: Float[Array, " Q"]) -> Float[Array, " Q"]:
        """log of the average density."""
        terms = Prediction(self.mean.ravel(), self.variance.ravel()).log_density(
            jnp.broadcast_to(y, self.mean.shape).ravel()
        )
        return logsumexp(terms.reshape(self.mean.shape), axis=0) - jnp.log(self.mean.shape[0])


@dataclass(frozen=True)
class SparseStudent:
    """The model's fixed choices: base kernel, basis, inducing noise relative to the variance, draws for the KL."""

    kernel: Kernel
    whitened: bool = True
    inducing_noise: float = 1e-4
    draws: int = 16

    def initial(
        self, inputs: Float[Array, "M D"], noise: float = 0.1, dof: float = 5.0
    ) -> tuple[DiagonalStudent, Model]:
        """Where learning starts on standardised data: q with mean 0, the prior's variances and degrees of freedom."""
        process = InducingProcess(self.kernel, self.inducing_noise).initial(inputs, noise)
        log_excess = jnp.log(jnp.asarray(dof - 2, inputs.dtype))
        zeros = jnp.zeros(inputs.shape[0], inputs.dtype)
        return DiagonalStudent(log_excess, zeros, zeros), Model(process, log_excess)

    @highest_precision
    def basis(self, model: Model, x: Float[Array, "B D"]) -> Basis:
        """K_zz + e I = L L^T; whitened: features k(x, Z) L^-T, root I; else features k(x, Z) K_zz^-1, root L^-1."""
        process = InducingProcess(self.kernel, self.inducing_noise)
        inverses, determinant = cholesky_inverse(process.prior(model.process).covariance[None])
        inverse = inverses[0]
        seen = process.view(model.process, inverse.T, x)
        if self.whitened:
            identity = jnp.eye(inverse.shape[0], dtype=inverse.dtype)
            return Basis(seen.features, seen.rest, identity, jnp.zeros_like(determinant))
        return Basis(seen.features @ inverse, seen.rest, inverse, determinant)


@highest_precision
def mean_beta(q: DiagonalStudent, basis: Basis) -> Float[Array, ""]:
    """E_q beta = |root m|^2 + tr(root diag(S) root^T)."""
    return jnp.sum((basis.root @ q.mean) ** 2) + jnp.sum(basis.root**2 @ q.scale)


@highest_precision
def marginals(q: DiagonalStudent, basis: Basis, dof: Scalar) -> Prediction:
    """Mean and variance of f under q: features m, features^2 S + E_q[(nu + beta - 2) / (nu + M - 2)] rest."""
    factor = conditional_factor(dof, mean_beta(q, basis), q.mean.shape[0])
    return Prediction(basis.features @ q.mean, basis.features**2 @ q.scale + factor * basis.rest)


def mean_log_density(q: DiagonalStudent) -> Float[Array, ""]:
    """E_q log q = log constant - 1/2 sum log S - n/2 (psi(n / 2) - psi(nu / 2)), n = nu + M."""
    count = q.mean.shape[0]
    a, b = 0.5 * count, 0.5 * q.dof
    digammas = jax.grad(log_gamma_ratio, argnums=1)(a, b) + a / b
    return log_constant(q.dof, count) - 0.5 * jnp.sum(q.log_scale) - (a + b) * digammas


def draw(key: Key[Array, ""], q: DiagonalStudent, draws: int) -> tuple[Float[Array, " S"], Float[Array, "S M"]]:
    """Scales r [S] and draws [S, M] of q, differentiable in all its numbers."""
    scale_key, normal_key = jax.random.split(key)
    prior = scale_posterior(q.dof)
    gammas = jax.random.gamma(scale_key, prior.shape, (draws,), q.mean.dtype)
    scales = prior.rate / gammas
    normal = jax.random.normal(normal_key, (draws, q.mean.shape[0]), q.mean.dtype)
    return scales, q.mean + jnp.sqrt(scales[:, None] * q.scale) * normal


@highest_precision
def mean_log_tail(key: Key[Array, ""], q: DiagonalStudent, basis: Basis, dof: Scalar, draws: int) -> Float[Array, ""]:
    """E_q log(1 + beta / (nu - 2)), sampled without bias.

    Given r the mean t_r of beta is known, so the line through it is a control variate: log(nu - 2 + beta) -
    (beta - t_r) / (nu - 2 + t_r) has the same mean and no noise of first order.
    """
    scales, values = draw(key, q, draws)
    beta = jnp.sum((values @ basis.root.T) ** 2, axis=-1)
    centre = jnp.sum((basis.root @ q.mean) ** 2) + scales * jnp.sum(basis.root**2 @ q.scale)
    change = (beta - centre) / (dof - 2 + centre)
    return jnp.mean(jnp.log1p(centre / (dof - 2)) + jnp.log1p(change) - change)


def kl(key: Key[Array, ""], q: DiagonalStudent, basis: Basis, dof: Scalar, draws: int) -> Float[Array, ""]:
    """KL(ST(nu~, m, diag S) || ST(nu, 0, C)), unbiased."""
    count = q.mean.shape[0]
    prior = log_constant(dof, count) - 0.5 * basis.log_determinant
    tail = 0.5 * (dof + count) * mean_log_tail(key, q, basis, dof, draws)
    return mean_log_density(q) - prior + tail


def elbo(
    key: Key[Array, ""],
    student: SparseStudent,
    q: DiagonalStudent,
    model: Model,
    x: Float[Array, "B D"],
    y: Float[Array, " B"],
    weight: Scalar = 1.0,
) -> Float[Array, ""]:
    """The bound on log p(y); of a batch with weight = N / B."""
    basis = student.basis(model, x)
    found = marginals(q, basis, model.dof)
    squares = ((y - found.mean) ** 2 + found.variance) / model.noise
    data = -0.5 * jnp.sum(jnp.log(2 * jnp.pi * model.noise) + squares)
    return weight * data - kl(key, q, basis, model.dof, student.draws)


def predict(student: SparseStudent, q: DiagonalStudent, model: Model, x: Float[Array, "Q D"]) -> Prediction:
    """Mean and variance of f at new inputs, in closed form."""
    return marginals(q, student.basis(model, x), model.dof)


@highest_precision
def predictive_mixture(
    key: Key[Array, ""],
    student: SparseStudent,
    q: DiagonalStudent,
    model: Model,
    x: Float[Array, "Q D"],
    draws: int = 64,
) -> Mixture:
    """Normals of y at new inputs, each point on its own: f | u is ST(nu + M, ...), again a mixture over a scale."""
    u_key, scale_key = jax.random.split(key)
    basis, count = student.basis(model, x), q.mean.shape[0]
    _, values = draw(u_key, q, draws)
    beta = jnp.sum((values @ basis.root.T) ** 2, axis=-1)
    given = scale_posterior(model.dof, beta, count)
    scales = given.rate / jax.random.gamma(scale_key, given.shape, beta.shape, beta.dtype)
    return Mixture(values @ basis.features.T, scales[:, None] * basis.rest + model.noise)


# Optimisers: q by one of these, the model by Adam.


def methods(rate: Scalar, model_rate: float = 1e-2) -> Mapping[str, Method]:
    """The comparison of SVTP: natural gradient or a plain optimiser for q at `rate`, Adam for the model."""
    plain = {"sgd": optax.sgd, "adam": optax.adam, "amsgrad": optax.amsgrad, "adagrad": optax.adagrad}
    optimisers = {"natural": natural_gradient(rate), **{name: make(rate) for name, make in plain.items()}}
    return {name: Method(q, optax.adam(model_rate)) for name, q in optimisers.items()}


def init(method: Method, q: DiagonalStudent, model: Model) -> State:
    """Start both optimisers."""
    return State(q, model, method.q.init(q), method.model.init(model))


def step(
    key: Key[Array, ""],
    student: SparseStudent,
    method: Method,
    state: State,
    x: Float[Array, "B D"],
    y: Float[Array, " B"],
    weight: Scalar = 1.0,
) -> tuple[State, Float[Array, ""]]:
    """One step of q and one of the model on one batch; and the bound before it."""

    def loss(q: DiagonalStudent, model: Model) -> Array:
        return -elbo(key, student, q, model, x, y, weight)

    value, (q_slopes, model_slopes) = jax.value_and_grad(loss, argnums=(0, 1))(state.q, state.model)
    q_change, q_memory = method.q.update(q_slopes, state.q_memory, state.q)
    model_change, model_memory = method.model.update(model_slopes, state.model_memory, state.model)
    q, model = optax.apply_updates((state.q, state.model), (q_change, model_change))
    return State(q, model, q_memory, model_memory), -value


@partial(jax.jit, static_argnames=("student", "method", "batch", "steps"))
def run(
    key: Key[Array, ""],
    student: SparseStudent,
    method: Method,
    state: State,
    x: Float[Array, "N D"],
    y: Float[Array, " N"],
    batch: int,
    steps: int,
) -> tuple[State, Float[Array, " steps"]]:
    """`steps` steps on batches drawn with replacement; a batch of N takes all points every time."""
    points = x.shape[0]

    def one(state: State, key: Array) -> tuple[State, Array]:
        rows_key, step_key = jax.random.split(key)
        rows = jnp.arange(points) if batch == points else jax.random.randint(rows_key, (batch,), 0, points)
        return step(step_key, student, method, state, x[rows], y[rows], points / batch)

    return jax.lax.scan(one, state, jax.random.split(key, steps))
