"""Checks that a likelihood or an inference keeps its promises, for authors of new ones.

    check_likelihood(MyLikelihood())
    check_inference(my_kernel(MyLikelihood()))

Each returns the names of the checks it made and raises ConformanceError at the first that fails. They run in double
precision on tiny problems, in seconds; the project's own tests ask for more.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from fewshot.inference.inner.base import Code, Inference, Info, Mask, fit, fit_to_tolerance
from fewshot.models.conformance import ConformanceError, passed, same
from fewshot.models.expectations import GaussHermite, MonteCarlo, Points, expect
from fewshot.models.gaussian import GaussianPrior, Marginals
from fewshot.models.gaussian.dense import positive_part
from fewshot.models.likelihoods.base import (
    AugmentedLikelihood,
    ClassLikelihood,
    GaussianLikelihood,
    Likelihood,
    RealLikelihood,
    SmoothLikelihood,
    log_densities,
)

CLASSES = 3
LABELS = np.array([0, 1, 2, 2, 1, 0], np.int32)
NEAR = 1e-3  # of differences
NUMBERS = np.array([0.3, -1.2, 0.8, 2.5, -0.1, 0.0])  # of a likelihood of real labels, with one latent function


Check = Callable[[Any], None]  # of a likelihood or an inference; raises ConformanceError


def check_likelihood(likelihood: object) -> list[str]:
    """What a likelihood promises: what all do, and what each further protocol that it offers says.

    Raises ConformanceError, and TypeError for an object that is no likelihood.
    """
    if not isinstance(likelihood, Likelihood):
        raise TypeError(f"expected a Likelihood, got {type(likelihood).__name__}; see models/likelihoods/base.py")
    checks: list[Check] = [_keeps_its_parameters, _expects, _observes]
    if isinstance(likelihood, ClassLikelihood):
        checks += [_predicts, _expects_at_any_number_of_classes, _ignores_masked_classes, _knows_no_order]
    if isinstance(likelihood, RealLikelihood):
        checks.append(_forecasts)
    if isinstance(likelihood, GaussianLikelihood):
        checks.append(_is_gaussian)
    if isinstance(likelihood, SmoothLikelihood):
        checks.append(_has_local_sites)
        if isinstance(likelihood, ClassLikelihood):
            checks.append(_has_a_curvature)
    if isinstance(likelihood, AugmentedLikelihood):
        checks += [_augments, _draws_latents, _bounds]
    return _run(checks, likelihood)


def check_inference(inference: Inference, *, variational: bool = True) -> list[str]:
    """What an inference promises, its evidence included, at labels of three classes.

    variational: its fixed point is a stationary point of its bound; that of Laplace's approximation is not. Raises
    ConformanceError.
    """
    checks: list[Check] = [_keeps_its_state, _maps_over_tasks]
    if not inference.traits.sampled:
        checks += [_settles, _ignores_padding, _ignores_absent_classes]
        if inference.log_evidence is not None:
            checks.append(_has_an_evidence)
        if variational:
            checks.append(_is_stationary)
    return _run(checks, inference)


def _run(checks: list[Check], subject: object) -> list[str]:
    with jax.enable_x64(True):
        return [passed(check, subject) for check in checks]


def _labels(likelihood: object) -> Array:
    return jnp.asarray(NUMBERS if isinstance(likelihood, RealLikelihood) else LABELS)


def _latents(seed: int, likelihood: object) -> Array:
    classes = 1 if isinstance(likelihood, RealLikelihood) else CLASSES
    return jnp.asarray(1.5 * np.random.default_rng(seed).normal(size=(classes, len(LABELS))))


def _marginals(seed: int, likelihood: object) -> Marginals:
    mean = _latents(seed, likelihood)
    return Marginals(mean, jnp.asarray(np.random.default_rng(seed + 1).uniform(0.05, 1.0, size=mean.shape)))


def _quadrature(likelihood: object) -> Points:
    """Nodes of an expectation over the latents of a point: in one dimension as many as real labels may ask for."""
    single = isinstance(likelihood, RealLikelihood)
    return GaussHermite(200 if single else 30).points(jax.random.key(0), 1 if single else CLASSES, jnp.float64)


# Likelihoods


def _keeps_its_parameters(likelihood: Likelihood) -> None:
    """Each parameter has a prior; at other values it is a likelihood of its kind that has them, and is another one."""
    own = {name: jnp.asarray(value) for name, value in likelihood.parameters().items()}
    priors = likelihood.priors()
    if own.keys() != priors.keys():
        raise ConformanceError(
            f"priors: expected one of each of parameters, {', '.join(own) or 'none'}, got {', '.join(priors) or 'none'}"
        )
    moved = {name: value + 0.1 for name, value in own.items()}
    other = likelihood.with_parameters(moved)
    if type(other) is not type(likelihood):
        name = type(likelihood).__name__
        raise ConformanceError(f"with_parameters: expected a likelihood {name}, got {type(other).__name__}")
    held = other.parameters()
    if held.keys() != own.keys():
        raise ConformanceError(f"with_parameters: expected one with {', '.join(own)}, got {', '.join(held) or 'none'}")
    y, f = _labels(likelihood), _latents(0, likelihood)
    before = likelihood.log_prob(y, f)
    for name, value in own.items():
        if not np.isfinite(priors[name].log_prob(value)):
            raise ConformanceError(f"the prior of {name}: expected a density where learning starts, {value}")
        same(f"with_parameters has the {name} that it is given", held[name], moved[name], 1e-6)
        changed = likelihood.with_parameters({**own, name: moved[name]}).log_prob(y, f)
        if not np.abs(changed - before).max() > 0:
            raise ConformanceError(f"log_prob: expected other densities at another {name}, got the same")


def _forecasts(likelihood: RealLikelihood) -> None:
    """distribution integrates to 1 and is E_q p(y | f); that of a mixture is the mean over its components."""
    grid = jnp.linspace(-60.0, 60.0, 2401)
    wide = Marginals(jnp.full((1, len(grid)), 0.4), jnp.full((1, len(grid)), 0.7))
    density = jnp.exp(likelihood.distribution(wide).log_prob(grid))
    near = jnp.asarray([-3.0, -0.5, 0.4, 1.0, 6.0])
    q, other = (
        Marginals(jnp.full((1, 5), mean), jnp.full((1, 5), variance)) for mean, variance in ((0.4, 0.7), (1, 0.1))
    )
    points = _quadrature(likelihood)
    each = [expect(lambda f: jnp.exp(likelihood.log_prob(near, f)), one, points) for one in (q, other)]
    same("distribution is E_q p(y | f)", jnp.exp(likelihood.distribution(q).log_prob(near)), each[0], 1e-6)
    same("distribution integrates to 1, but for its tails", jnp.sum(density) * (grid[1] - grid[0]), 1.0, 1e-4)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), q, other)
    mixed = jnp.exp(likelihood.distribution(both).log_prob(near))
    same("distribution of a mixture is the mean", mixed, 0.5 * (each[0] + each[1]), 1e-4)


def _predicts(likelihood: ClassLikelihood) -> None:
    """Rows sum to 1 and are E_q p(k | f), normalised over k after the expectation."""
    q = _marginals(0, likelihood)
    q = q._replace(mean=0.3 * q.mean)
    p = _predicted(likelihood, q)
    same("predicted probabilities sum to 1", p.sum(1), 1.0, 1e-5)
    points = GaussHermite(24).points(jax.random.key(0), CLASSES, jnp.float64)
    densities = jax.jit(lambda q: expect(lambda f: jnp.exp(log_densities(likelihood, f)), q, points))(q)
    same("predict is the expected density, normalised", p, (densities / densities.sum(0)).T, 5e-3)


def _predicted(likelihood: ClassLikelihood, q: Marginals, classes: Array | None = None) -> Array:
    """The mean of predict over 64 keys."""
    keys = jax.random.split(jax.random.key(0), 64)
    return jnp.mean(jax.jit(jax.vmap(lambda key: likelihood.predict(key, q, classes)))(keys), axis=0)


def _observes(likelihood: Likelihood) -> None:
    """observation is the distribution of what is observed that log_prob is the density of."""
    y, f = _labels(likelihood), _latents(12, likelihood)
    value = jax.jit(lambda f: likelihood.observation(f).log_prob(likelihood.observed(y, len(f))))(f)
    same("observation has the density log_prob", value, jnp.sum(jax.jit(likelihood.log_prob)(y, f)), 1e-8)


def _expects(likelihood: Likelihood) -> None:
    """expected_log_prob is that of quadrature, and log_prob at zero variance."""
    y, q = _labels(likelihood), _marginals(2, likelihood)
    expected = jax.jit(lambda q, points=None: likelihood.expected_log_prob(y, q, points))
    points = _quadrature(likelihood)
    reference = jax.jit(lambda q: expect(lambda f: likelihood.log_prob(y, f), q, points))(q)
    same("expected_log_prob without points is that of quadrature", expected(q), reference, 1e-5)
    same("expected_log_prob over given points", expected(q, points), reference, 1e-5)
    certain = q._replace(variance=jnp.zeros_like(q.variance))
    same("at zero variance it is log_prob", expected(certain), jax.jit(likelihood.log_prob)(y, q.mean), 1e-8)


def _expects_at_any_number_of_classes(likelihood: ClassLikelihood) -> None:
    """expected_log_prob without points is there for five classes too, and that of random nodes."""
    y, rng = jnp.asarray([0, 1, 2, 3, 4, 2]), np.random.default_rng(13)
    mean, variance = rng.normal(size=(5, 6)), rng.uniform(0.05, 1.0, size=(5, 6))
    q = Marginals(jnp.asarray(mean), jnp.asarray(variance))
    points = MonteCarlo(2**14).points(jax.random.key(13), 5, jnp.float64)
    reference = jax.jit(lambda q: expect(lambda f: likelihood.log_prob(y, f), q, points))(q)
    found = jax.jit(lambda q: likelihood.expected_log_prob(y, q))(q)
    same("expected_log_prob without points, of five classes, is that of random nodes", found, reference, 5e-3)


def _ignores_masked_classes(likelihood: ClassLikelihood) -> None:
    """A class that does not exist enters no normaliser and is never predicted."""
    real, y, q = jnp.asarray([True, True, False]), jnp.asarray(LABELS % 2), _marginals(3, likelihood)
    q = q._replace(mean=q.mean.at[2].set(9.0))
    small = jax.tree.map(lambda leaf: leaf[:2], q)

    @jax.jit
    def log_prob(q: Marginals, real: Array | None = None) -> tuple[Array, Array]:
        return likelihood.log_prob(y, q.mean, real), likelihood.expected_log_prob(y, q, None, real)

    (value, mean), (small_value, small_mean) = log_prob(q, real), log_prob(small)
    same("a masked class changes no density", value, small_value, 1e-8)
    same("a masked class changes no expectation", mean, small_mean, 1e-8)
    p = _predicted(likelihood, q, real)
    same("a masked class is not predicted", p[:, 2], 0.0, 0.0)
    same("probabilities beside a masked class sum to 1", p.sum(1), 1.0, 1e-5)
    same("a masked class changes no probability", p[:, :2], _predicted(likelihood, small), 1e-2)


def _knows_no_order(likelihood: Likelihood) -> None:
    """Permuting the classes permutes everything."""
    order = np.array([2, 0, 1])
    y, q, expected = _labels(likelihood), _marginals(4, likelihood), jax.jit(likelihood.expected_log_prob)
    moved = expected(jnp.asarray(np.argsort(order))[y], jax.tree.map(lambda leaf: leaf[order], q))
    same("permuting the classes changes no expectation", moved, expected(y, q), 1e-8)


def _is_gaussian(likelihood: GaussianLikelihood) -> None:
    """gaussian_sites are the density up to a constant."""
    y, f, g = _labels(likelihood), _latents(5, likelihood), _latents(6, likelihood)
    shift, precision = likelihood.gaussian_sites(y, len(f))
    sites = [jnp.sum(shift * value - 0.5 * precision * value**2, axis=0) for value in (f, g)]
    log_prob = jax.jit(likelihood.log_prob)
    change = log_prob(y, f) - log_prob(y, g)
    same("gaussian_sites are log_prob up to a constant", sites[0] - sites[1], change, 1e-8)


def _has_local_sites(likelihood: SmoothLikelihood) -> None:
    """local_sites have the slope of log_prob."""
    y, f = _labels(likelihood), _latents(7, likelihood)

    @jax.jit
    def slopes(f: Array) -> tuple[Array, Array]:
        sites = likelihood.local_sites(y, f)
        slope = jax.grad(lambda value: jnp.sum(likelihood.log_prob(y, value)))(f)
        return sites.shift - sites.times(f), slope

    of_sites, slope = slopes(f)
    same("local_sites have the slope of log_prob", of_sites, slope, 1e-8)


def _has_a_curvature(likelihood: SmoothLikelihood) -> None:
    """That of local_sites is the positive part of minus the Hessian of log_prob, or the Fisher information.

    Not asked of likelihoods of real labels, whose protocol knows no label to sum over.
    """
    y, f = _labels(likelihood), _latents(7, likelihood)

    def density(label: Array, point: Array) -> Array:
        return likelihood.log_prob(label[None], point[:, None])[0]

    @jax.jit
    def curvatures(f: Array) -> tuple[Array, Array, Array]:
        sites, labels = likelihood.local_sites(y, f), jnp.arange(len(f))
        units = jnp.broadcast_to(jnp.eye(len(f))[:, :, None], (len(f), *f.shape))
        found = jnp.moveaxis(jax.vmap(sites.times)(units), 2, 0)  # [N, C, C]
        hessian = -jax.vmap(jax.hessian(density, argnums=1))(y, f.T)
        slopes = jax.vmap(lambda point: jax.vmap(jax.grad(density, argnums=1), (0, None))(labels, point))(f.T)
        fisher = jnp.einsum("kn,nkc,nkd->ncd", jax.nn.softmax(log_densities(likelihood, f), axis=0), slopes, slopes)
        return found, positive_part(hessian)[0], fisher

    found, *accepted = curvatures(f)
    error = min(float(jnp.max(jnp.abs(found - one))) for one in accepted)
    name = "local_sites have the positive part of minus the Hessian of log_prob, or the Fisher information"
    same(name, error, 0.0, 1e-6)


def _augments(likelihood: AugmentedLikelihood) -> None:
    """log p(y, aux | f) - log p(aux | y, f) = log p(y | f); the joint's dependence on f is its sites."""
    y, f, g = _labels(likelihood), _latents(8, likelihood), _latents(9, likelihood)
    aux = jax.jit(likelihood.aux_conditional)(jax.random.key(0), y, g)

    @jax.jit
    def densities(f: Array) -> tuple[Array, Array, Array, Array]:
        sites = likelihood.sites(y, aux)
        of_sites = jnp.sum(f * (sites.shift - 0.5 * sites.times(f)), axis=0)
        joint, conditional = likelihood.log_joint(y, aux, f), likelihood.log_conditional(y, aux, f)
        return joint, conditional, likelihood.log_prob(y, f), of_sites

    found = densities(g), densities(f)
    for joint, conditional, log_prob, _ in found:
        same("joint over conditional is the likelihood", joint - conditional, log_prob, 1e-5)
    joint, _, _, of_sites = (one - other for one, other in zip(*found, strict=True))
    same("sites are the joint as a function of f", of_sites, joint, 1e-6)


def _draws_latents(likelihood: AugmentedLikelihood) -> None:
    """The mean slope of the sites over draws of aux is that of log p(y | f), within five standard errors."""
    y, f = _labels(likelihood), 0.7 * _latents(10, likelihood)

    def slope(key: Array) -> Array:
        sites = likelihood.sites(y, likelihood.aux_conditional(key, y, f))
        return sites.shift - sites.times(f)

    slopes = jax.jit(jax.vmap(slope))(jax.random.split(jax.random.key(1), 10_000))
    expected = jax.jit(jax.grad(lambda value: jnp.sum(likelihood.log_prob(y, value))))(f)
    error = jnp.std(slopes, axis=0) / 100
    excess = jnp.abs(jnp.mean(slopes, axis=0) - expected) / jnp.where(error > 0, error, 1.0)
    same("aux_conditional draws from p(aux | y, f), in standard errors", excess, 0.0, 5.0)


def _bounds(likelihood: AugmentedLikelihood) -> None:
    """The bound rises with q(aux), stays below E log p(y | f); its slope in the mean is that of the sites."""
    y, q = _labels(likelihood), _marginals(11, likelihood)

    def update(aux: PyTree, _: None) -> tuple[PyTree, Array]:
        aux = likelihood.aux_posterior(y, q, aux)
        return aux, likelihood.augmented_bound(y, q, aux)

    @jax.jit
    def updated() -> tuple[Array, Array, Array, Array]:
        aux, path = jax.lax.scan(update, likelihood.aux_posterior(y, q, None), length=100)
        slope = jax.grad(lambda mean: jnp.sum(likelihood.augmented_bound(y, q._replace(mean=mean), aux)))(q.mean)
        sites = likelihood.expected_sites(y, aux)
        return path, likelihood.expected_log_prob(y, q), slope, sites.shift - sites.times(q.mean)

    path, most, slope, of_sites = updated()
    same("aux_posterior never lowers the bound", jnp.maximum(path[:-1] - path[1:], 0.0), 0.0, 1e-9)
    same("augmented_bound is at most expected_log_prob", jnp.maximum(path - most, 0.0), 0.0, 1e-8)
    same("expected_sites have the slope of the bound", slope, of_sites, 1e-6)


# Inferences


def _task(seed: int) -> tuple[GaussianPrior, Array]:
    x = np.random.default_rng(seed).normal(size=(len(LABELS), 4)) + 1.5 * np.eye(CLASSES, 4)[LABELS]
    squares = np.sum((x[:, None] - x) ** 2, axis=-1)
    return GaussianPrior(jnp.full((CLASSES, len(LABELS)), -1.0), jnp.asarray(2.0 * np.exp(-squares / 8))), jnp.asarray(
        LABELS
    )


def _keeps_its_state(inference: Inference) -> None:
    """A step returns a state of the same structure, shapes and types, and a scalar Info."""
    prior, y = _task(0)
    first = jax.eval_shape(inference.init, jax.random.key(0), prior, y, None)
    moved, info = jax.eval_shape(inference.step, jax.random.key(0), first, prior, y, None)
    types = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree) for tree in (first, moved)]
    if types[0] != types[1]:
        raise ConformanceError(f"a step keeps the state's shapes and types: got {types[1]} from {types[0]}")
    if any(leaf.shape for leaf in info):
        raise ConformanceError(f"Info holds scalars: got shapes {[leaf.shape for leaf in info]}")


def _maps_over_tasks(inference: Inference) -> None:
    """vmap over tasks is a loop."""
    tasks = [_task(seed)[0] for seed in (1, 2)]
    y = jnp.asarray(LABELS)

    def means(prior: GaussianPrior) -> Array:
        state, _ = fit(jax.random.key(0), inference, prior, y, steps=3)
        return inference.posterior(state, prior).marginals.mean

    together = jax.jit(jax.vmap(means))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks))
    same("vmap over tasks is a loop", together, jnp.stack([jax.jit(means)(prior) for prior in tasks]), 1e-8)


def _settles(inference: Inference) -> None:
    """The residual reaches 1e-6, and a step there moves neither the bound nor the posterior mean."""
    prior, y = _task(3)
    state, info = _settled(inference, prior, y)

    @jax.jit
    def stepped(state: PyTree) -> tuple[Info, Array, Array]:
        moved, after = inference.step(jax.random.key(1), state, prior, y, None)
        mean, moved_mean = (inference.posterior(one, prior).marginals.mean for one in (state, moved))
        return after, mean, moved_mean

    after, mean, moved_mean = stepped(state)
    same("a step at the fixed point keeps the bound", after.elbo, info.elbo, 1e-5)
    same("a step at the fixed point keeps the posterior", mean, moved_mean, 1e-4)


@cache
def _settling(inference: Inference) -> Callable[[GaussianPrior, Array], tuple[PyTree, Info, Array]]:
    """Compiled once for all checks."""
    return jax.jit(
        lambda prior, y: fit_to_tolerance(jax.random.key(0), inference, prior, y, tolerance=1e-6, max_steps=5000)
    )


def _settled(inference: Inference, prior: GaussianPrior, y: Array) -> tuple[PyTree, Info]:
    """The state at the fixed point. Raises ConformanceError where it is not reached."""
    state, info, steps = _settling(inference)(prior, y)
    if info.code != Code.OK:
        raise ConformanceError(f"settles to 1e-6: got {Code(int(info.code)).name} after {steps} steps")
    return state, info


def _has_an_evidence(inference: Inference) -> None:
    """(G6): the slope of log_evidence in the prior mean a at fixed sites, times K, is the posterior mean less a."""
    assert inference.log_evidence is not None
    prior, y = _task(5)
    state, _ = _settled(inference, prior, y)
    evidence = inference.log_evidence

    def at(change: Array) -> Array:
        return evidence(state, prior._replace(mean=prior.mean + change @ prior.covariance))

    slope = jax.jit(jax.grad(at))(jnp.zeros_like(prior.mean))
    moved = jax.jit(lambda state: inference.posterior(state, prior).marginals.mean)(state) - prior.mean
    same("log_evidence has the slope of a normaliser", slope, moved, 1e-6)


def _is_stationary(inference: Inference) -> None:
    """At the fixed point the bound changes with the prior as if q stayed as it is, in a mean and in the scale of K.

    So its slope in q is 0. With alpha = K^-1 (m - a) the partial derivatives of -KL(q || N(a, K)) are alpha in a, and
    in log of a scale of K half of (m - a).alpha - tr(L V), L the precisions of the sites.
    """
    prior, y = _task(6)
    state, info = _settled(inference, prior, y)

    @jax.jit
    def at_rest(state: PyTree) -> tuple[Array, Array, Array | None]:
        """The bound, m - a, and the slope in log of a scale of K that it is to have."""
        q = inference.posterior(state, prior)
        value, mean = inference.elbo(state, q, y, None), q.marginals.mean
        away = mean - prior.mean
        if inference.sites is None:
            return value, away, None
        sites, blocks = inference.sites(state), q.marginals.covariance_blocks()
        trace = sum(jnp.sum(sites.times(blocks[:, :, c].T)[c]) for c in range(blocks.shape[2]))
        return value, away, 0.5 * (jnp.sum(away * (sites.shift - sites.times(mean))) - trace)

    value, away, expected = at_rest(state)
    same("info.elbo is the bound of the state", info.elbo, value, 1e-5)
    direction = jnp.asarray(np.random.default_rng(7).normal(size=prior.mean.shape))

    def bound(mean: float, scale: float) -> Array:
        changed = prior.mean + mean * direction @ prior.covariance
        return _settled(inference, GaussianPrior(changed, prior.covariance * np.exp(scale)), y)[1].elbo

    slope = (bound(NEAR, 0.0) - bound(-NEAR, 0.0)) / (2 * NEAR)
    same("the bound is stationary: its slope in the prior mean", slope, jnp.sum(direction * away), 1e-4)
    if expected is None:
        return
    slope = (bound(0.0, NEAR) - bound(0.0, -NEAR)) / (2 * NEAR)
    same("the bound is stationary: its slope in the scale of K", slope, expected, 1e-4)


def _ignores_absent_classes(inference: Inference) -> None:
    """A class that is masked changes nothing."""
    prior, _ = _task(8)
    y = jnp.asarray(LABELS % 2)
    mask = Mask(jnp.ones(len(LABELS), bool), jnp.arange(CLASSES) < 2)

    def mean_and_bound(prior: GaussianPrior, mask: Mask | None) -> tuple[Array, Array]:
        state, info = fit(jax.random.key(0), inference, prior, y, mask, steps=5)
        return inference.posterior(state, prior).marginals.mean[:2], info.elbo

    few = jax.jit(mean_and_bound)(prior._replace(mean=prior.mean[:2]), None)
    for name, whole, part in zip(("posterior", "bound"), jax.jit(mean_and_bound)(prior, mask), few, strict=True):
        same(f"a masked class does not change the {name}", whole, part, 1e-8)


def _ignores_padding(inference: Inference) -> None:
    """A point that is masked changes nothing."""
    prior, y = _task(4)
    kept = np.arange(len(LABELS) - 1)
    small = GaussianPrior(prior.mean[:, kept], prior.covariance[np.ix_(kept, kept)])
    mask = Mask(jnp.arange(len(LABELS)) < len(kept), jnp.ones(CLASSES, bool))

    def mean(prior: GaussianPrior, y: Array, mask: Mask | None) -> Array:
        state, _ = fit(jax.random.key(0), inference, prior, y, mask, steps=5)
        return inference.posterior(state, prior).marginals.mean

    whole = jax.jit(mean)(prior, y, mask)[:, kept]
    same("a masked point changes nothing", whole, jax.jit(mean)(small, y[kept], None), 1e-8)
