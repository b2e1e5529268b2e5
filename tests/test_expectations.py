"""E_q[g(f)]: log-sum-exp against adaptive quadrature, its derivatives, class masks; sampled rules are unbiased."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double
from scipy.integrate import quad
from scipy.special import expit, log_ndtr, logsumexp, softmax
from scipy.stats import norm

from fewshot.models.expectations import (
    FEW_POINTS,
    Exact,
    GaussHermite,
    MonteCarlo,
    Points,
    expect,
    expected_log_sum_exp,
    expected_softmax,
)
from fewshot.models.gaussian import JointMarginals, Marginals

exact_mean = jax.jit(expected_log_sum_exp)
# Observed: 1e-6, 3e-7, 6e-6.
SINGLE_PRECISION = {"value": 5e-6, "mean": 2e-6, "variance": 3e-5}
PADDED, COLUMNS = 5, 6  # one shape for most problems: fewer classes are classes masked


@partial(jax.jit, static_argnames="second")
def value_and_derivatives(marginals, classes, second=True):
    """Value [N], its gradient in mean and variance [C, N], and the Hessian [N, C, C] in the mean."""

    def total(inner):
        return jnp.sum(expected_log_sum_exp(inner, classes))

    def slopes(mean):
        return jax.grad(total)(Marginals(mean, marginals.variance)).mean

    def column(direction):
        return jax.jvp(slopes, (marginals.mean,), (jnp.broadcast_to(direction[:, None], marginals.mean.shape),))[1]

    hessian = jnp.transpose(jax.vmap(column)(jnp.eye(PADDED)), (2, 1, 0)) if second else jnp.zeros((COLUMNS, 1, 1))
    return expected_log_sum_exp(marginals, classes), jax.grad(total)(marginals), hessian


def exactly(marginals, second=True):
    """`value_and_derivatives` of C <= 5 classes and N <= 6 points, padded with other numbers and masked."""
    classes, points = marginals.mean.shape
    missing = ((0, PADDED - classes), (0, COLUMNS - points))
    padded = jax.tree.map(lambda leaf: np.pad(leaf, missing, constant_values=7.0), Marginals(*marginals))
    value, gradient, hessian = jax.device_get(value_and_derivatives(padded, np.arange(PADDED) < classes, second))
    for leaf in gradient:
        np.testing.assert_array_equal(leaf[classes:], 0)  # a masked class carries no gradient
    kept = jax.tree.map(lambda leaf: leaf[:classes, :points], gradient)
    return value[:points], kept, hessian[:points, :classes, :classes]


@jax.jit
def by_quadrature(marginals, points):
    """E log-sum-exp [N], E softmax [C, N] and E[diag p - p p^T] [N, C, C] over product nodes."""

    def moments(f):
        p = jax.nn.softmax(f, axis=0)
        spread = jax.vmap(jnp.diag, 1)(p) - jnp.einsum("cn,dn->ncd", p, p)
        return jax.scipy.special.logsumexp(f, axis=0), p, spread

    # One leaf at a time: `expect` maps f to one array.
    return tuple(expect(lambda f, i=i: moments(f)[i], marginals, points) for i in range(3))


def marginals_on(classes, seed=0, spread=3.0, variances=(0.0, 1e-8, 0.3, 0.999, 1.001, 1000.0)):
    """One point for each variance, each class at its own multiple of it."""
    rng = np.random.default_rng(seed)
    mean = spread * rng.normal(size=(classes, len(variances)))
    return Marginals(mean, np.asarray(variances) * rng.uniform(0.5, 1.5, size=mean.shape))


def normal_mean(function, mean, deviation):
    """E function(d), d ~ N(mean, deviation^2), by adaptive quadrature; the kink of a wide normal is a break point."""
    breaks = [-mean / deviation] if abs(mean) < 11 * deviation else None
    value, _ = quad(
        lambda z: norm.pdf(z) * function(mean + deviation * z), -12, 12, points=breaks, epsabs=1e-13, limit=400
    )
    return value


@pytest.mark.long
@double
def test_two_classes_equal_adaptive_quadrature_of_their_difference():
    """log(e^f + e^g) = g + log(1 + e^(f - g)), and f - g is normal."""
    mean, variance = marginals_on(2)
    references = [
        m[1] + normal_mean(lambda d: np.logaddexp(0.0, d), m[0] - m[1], np.sqrt(v.sum()))
        for m, v in zip(mean.T, variance.T, strict=True)
    ]
    np.testing.assert_allclose(exactly(Marginals(mean, variance))[0], references, rtol=1e-11, atol=1e-11)


@double
def test_expected_softmax_of_two_classes_is_an_integral_over_their_difference():
    mean, variance = marginals_on(2)
    found = jax.jit(expected_softmax)(Marginals(mean, variance))
    for n, (m, v) in enumerate(zip(mean.T, variance.T, strict=True)):
        np.testing.assert_allclose(found[0, n], normal_mean(expit, m[0] - m[1], np.sqrt(v.sum())), atol=1e-11)
    np.testing.assert_allclose(found.sum(axis=0), 1)


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_expected_softmax_is_the_gradient_of_expected_log_sum_exp(classes):
    """In double precision to its rounding, in single with errors that grow in the tails; beside masked classes."""
    for spread in (0.3, 3.0):
        marginals = marginals_on(classes, seed=classes, spread=spread, variances=(0.0, 1e-8, 0.3, 0.999, 3.0, 30.0))
        with jax.enable_x64(True):
            gradient = exactly(marginals, second=False)[1].mean
        padded = jax.tree.map(lambda leaf: np.pad(leaf, ((0, 2), (0, 0)), constant_values=7.0), marginals)
        for tolerances, precision in (((1e-9, 1e-9), np.float64), ((3e-4, 0.03), np.float32)):
            with jax.enable_x64(precision == np.float64):
                given = jax.tree.map(lambda leaf, kind=precision: leaf.astype(kind), Marginals(*padded))
                found = np.asarray(jax.jit(expected_softmax)(given, np.arange(classes + 2) < classes))
            assert found.dtype == precision
            np.testing.assert_array_equal(found[classes:], 0)
            for tolerance, above in zip(tolerances, (1e-3, 1e-5), strict=True):
                real = gradient > above
                np.testing.assert_allclose(np.log(found[:classes][real]), np.log(gradient[real]), atol=tolerance)


@pytest.mark.parametrize("size", [1e-12, 1e4, 1e12])
def test_expected_softmax_of_all_sizes_is_a_probability(size):
    mean = size * np.random.default_rng(0).normal(size=(4, 30)).astype(np.float32)
    variance = np.float32(size) ** 2 * np.repeat([0.0, 1e-6, 1.0], 10).astype(np.float32) * np.ones((4, 1), np.float32)
    found = np.asarray(jax.jit(expected_softmax)(Marginals(mean, variance)))
    assert np.isfinite(found).all() and (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=0), 1, rtol=1e-5)
    if size > 1:  # without a variance the largest mean has it all
        np.testing.assert_allclose(found[:, :10].max(axis=0), 1, rtol=1e-5)


@pytest.mark.long
@double
def test_a_wide_class_beside_a_narrow_one():
    """The hardest case for a grid: one class sets its length, the other one its spacing."""
    mean = np.array([[3.0, 0.0, -20.0, 10.0], [0.0, 0.0, 0.0, 0.0]])
    variance = np.array([[1e-8, 1e-8, 1e-3, 0.5], [30.0, 100.0, 100.0, 300.0]])
    references = [
        m[1] + normal_mean(lambda d: np.logaddexp(0.0, d), m[0] - m[1], np.sqrt(v.sum()))
        for m, v in zip(mean.T, variance.T, strict=True)
    ]
    np.testing.assert_allclose(exactly(Marginals(mean, variance))[0], references, atol=1e-10)


def log_laplace(t, mean, deviation):
    """log E exp(-t e^f) for f ~ N(mean, deviation^2) by a fine trapezoidal rule: the reference's inner integral."""
    z = np.linspace(-10, 10, 501)
    terms = -0.5 * z**2 - t * np.exp(np.minimum(mean + deviation * z, 600.0))
    return logsumexp(terms) + np.log((z[1] - z[0]) / np.sqrt(2 * np.pi))


def frullani_mean(mean, variance):
    """log s = int_0^inf (e^-t - e^(-s t)) / t dt, in expectation over s = sum_c e^f_c, with t = e^u."""
    deviation = np.sqrt(variance)

    def integrand(u):
        total = sum(log_laplace(np.exp(u), m, d) for m, d in zip(mean, deviation, strict=True))
        return np.exp(-np.exp(u)) - np.exp(total)

    reach = 12 * deviation.max() + np.abs(mean).max()
    value, _ = quad(integrand, -reach - 30, reach + 6, points=[-reach, 0.0, reach], epsabs=1e-10, limit=300)
    return value


@pytest.mark.long
@double
def test_many_classes_equal_nested_quadrature():
    mean, variance = marginals_on(20, seed=1, variances=(1.0,))
    references = [frullani_mean(m, v) for m, v in zip(mean.T, variance.T, strict=True)]
    np.testing.assert_allclose(exact_mean(Marginals(mean, variance)), references, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@double
def test_three_classes_equal_product_quadrature_with_both_derivatives():
    """Value, gradient E softmax and (1/2) E[p - p^2], second derivative E[diag p - p p^T]."""
    marginals = marginals_on(3, seed=2, spread=1.5, variances=(1e-8, 1e-4, 0.3, 0.999, 1.001, 2.0))
    points = GaussHermite(40).points(jax.random.key(0), 3, jnp.float64)
    value, p, spread = jax.device_get(by_quadrature(marginals, points))
    exact, gradient, hessian = exactly(marginals)
    np.testing.assert_allclose(exact, value, atol=1e-9)
    np.testing.assert_allclose(gradient.mean, p, atol=1e-8)
    np.testing.assert_allclose(gradient.variance, 0.5 * np.einsum("ncc->cn", spread), atol=1e-7)
    np.testing.assert_allclose(hessian, spread, atol=1e-7)


@pytest.mark.long
@double
@pytest.mark.parametrize("classes", [2, 5])
def test_derivatives_obey_the_heat_equation_and_shift_invariance(classes):
    """d/dv = 1/2 d^2/dm^2 for any expectation under a normal; probabilities sum to 1; shifts change nothing else."""
    marginals = marginals_on(classes, seed=3, variances=(1e-3, 0.3, 0.999, 1.001, 4.0, 100.0))
    value, gradient, hessian = exactly(marginals)
    np.testing.assert_allclose(gradient.variance, 0.5 * np.einsum("ncc->cn", hessian), atol=1e-9)
    np.testing.assert_allclose(gradient.mean.sum(0), 1.0, atol=1e-9)
    np.testing.assert_allclose(hessian.sum(-1), 0.0, atol=1e-9)
    assert (gradient.mean > 0).all() and (gradient.variance > 0).all()
    shifted, _, _ = exactly(marginals._replace(mean=marginals.mean + 50.0))
    np.testing.assert_allclose(shifted - 50.0, value, atol=1e-10)


@pytest.mark.long
@double
def test_gradient_of_two_classes_is_the_expected_sigmoid():
    mean, variance = marginals_on(2, seed=4, variances=(0.3, 1.001, 16.0, 400.0))
    gradient = exactly(Marginals(mean, variance))[1].mean
    for n, (m, v) in enumerate(zip(mean.T, variance.T, strict=True)):
        centre, deviation = m[0] - m[1], np.sqrt(v.sum())
        reference = normal_mean(expit, centre, deviation)
        np.testing.assert_allclose(gradient[:, n], [reference, 1 - reference], atol=1e-10)


@double
def test_without_variance_it_is_log_sum_exp_and_softmax():
    mean = np.random.default_rng(5).normal(size=(4, 6)) * np.array([0.1, 1, 3, 10, 100, 1000])
    value, gradient, _ = exactly(Marginals(mean, np.zeros_like(mean)))
    np.testing.assert_allclose(value, logsumexp(mean, axis=0), rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(gradient.mean, softmax(mean, axis=0), atol=1e-11)


@pytest.mark.long
def test_single_precision_is_near_double_precision():
    """Error of value and both gradients, the value's relative to the size of the logits."""
    marginals = marginals_on(5, seed=6, variances=(1e-6, 0.1, 0.99, 1.01, 30.0, 1000.0))
    with jax.enable_x64(True):
        value, gradient, _ = exactly(marginals)
    single, single_gradient, _ = exactly(jax.tree.map(np.float32, marginals), second=False)
    assert single.dtype == np.float32
    size = 1 + np.abs(marginals.mean).max(0) + np.sqrt(marginals.variance).max(0)
    assert np.max(np.abs(single - value) / size) < SINGLE_PRECISION["value"]
    assert np.max(np.abs(single_gradient.mean - gradient.mean)) < SINGLE_PRECISION["mean"]
    assert np.max(np.abs(single_gradient.variance - gradient.variance)) < SINGLE_PRECISION["variance"]


@pytest.mark.long
@double
def test_any_class_may_be_masked():
    marginals = marginals_on(5, seed=7)
    real = np.array([False, True, True, False, True])
    value, gradient, _ = value_and_derivatives(marginals, real)
    kept, kept_gradient, _ = exactly(jax.tree.map(lambda leaf: leaf[real], marginals))
    np.testing.assert_allclose(value, kept, rtol=1e-12)
    np.testing.assert_allclose(exact_mean(marginals), exactly(marginals)[0], rtol=1e-12)  # no mask = all classes
    for by_mask, by_hand in zip(gradient, kept_gradient, strict=True):
        np.testing.assert_allclose(by_mask[real], by_hand, atol=1e-12)
        np.testing.assert_array_equal(by_mask[~real], 0)


def test_exact_rule_has_no_nodes():
    assert Exact().points(jax.random.key(0), 5, jnp.float32) is None


def test_nodes_of_the_sampled_rule_are_antithetic_and_weigh_one():
    points = MonteCarlo(64).points(jax.random.key(0), 5, jnp.float32)
    assert points.nodes.shape == (64, 5) and points.nodes.dtype == jnp.float32
    np.testing.assert_array_equal(points.nodes[:32], -points.nodes[32:])
    np.testing.assert_allclose(points.weights.sum(), 1.0, rtol=1e-6)
    assert np.isfinite(points.nodes).all()
    other = MonteCarlo(64).points(jax.random.key(1), 5, jnp.float32)
    assert not np.allclose(points.nodes, other.nodes)


def test_sampled_rule_is_exact_for_linear_functions():
    marginals = jax.tree.map(jnp.asarray, jax.tree.map(np.float32, marginals_on(3, variances=(1.0, 4.0))))
    points = MonteCarlo(32).points(jax.random.key(2), 3, jnp.float32)
    np.testing.assert_allclose(
        jax.jit(partial(expect, lambda f: 2 * f))(marginals, points), 2 * marginals.mean, rtol=1e-5
    )


@pytest.mark.parametrize("rule, classes, message", [(GaussHermite(), 4, "at most 3"), (GaussHermite(), 20, "got 20")])
def test_product_rule_refuses_many_classes(rule, classes, message):
    with pytest.raises(ValueError, match=message):
        rule.points(jax.random.key(0), classes)


@pytest.mark.parametrize("draws", [0, 1, 7, -2])
def test_sampled_rule_refuses_odd_numbers(draws):
    with pytest.raises(ValueError, match=f"even number of draws .* got {draws}"):
        MonteCarlo(draws)


KEYS = 200


def estimates(draws, classes, dtype):
    """E log-sum-exp [KEYS, N] and E softmax [KEYS, C, N] by the sampled rule, one row for each key."""
    marginals = marginals_on(classes, seed=8, spread=1.0, variances=(0.3, 4.0, 30.0))
    marginals = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), marginals)

    def one(key):
        points = MonteCarlo(draws).points(key, classes, dtype)
        first, second, _ = by_quadrature(marginals, points)
        return first, second

    return marginals, jax.device_get(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(9), KEYS)))


# Root-mean-square error of E log-sum-exp, 5 classes, latent variances around 4: the accuracy that draws buy.
# Observed: 0.13, 0.057, 0.019; independent draws would have 0.26, 0.16, 0.08. Half of 24 is no power of two.
ACCURACY = {24: 0.16, 64: 0.08, 256: 0.026}


@pytest.mark.long
@double
@pytest.mark.parametrize("draws", ACCURACY)
def test_sampled_rule_is_unbiased_and_its_error_falls(draws):
    marginals, samples = estimates(draws, 5, jnp.float64)
    value, gradient, _ = exactly(jax.device_get(marginals))
    for sample, reference in zip(samples, (value, gradient.mean), strict=True):
        error = sample.std(0, ddof=1) / np.sqrt(KEYS)
        assert np.max(np.abs(sample.mean(0) - reference) / error) < 5
    spread = float(np.sqrt(np.mean((samples[0][:, 1] - value[1]) ** 2)))
    print(f"root-mean-square error with {draws} draws: {spread:.4f}")
    assert spread < ACCURACY[draws]


@pytest.mark.long
@double
def test_expectation_of_any_function_under_a_product_rule():
    """Moments of a normal, whatever the shape of the function's result."""
    marginals = Marginals(jnp.asarray([[1.0, 2.0]]), jnp.asarray([[0.5, 3.0]]))
    points = GaussHermite(8).points(jax.random.key(0), 1, jnp.float64)
    assert isinstance(points, Points)
    np.testing.assert_allclose(expect(lambda f: f**2, marginals, points), marginals.mean**2 + marginals.variance)
    np.testing.assert_allclose(expect(jnp.sum, marginals, points), 3.0)
    # 2 classes: E[f_1 f_2] = m_1 m_2
    pair = Marginals(jnp.asarray([[1.0], [2.0]]), jnp.asarray([[0.5], [3.0]]))
    points = GaussHermite(8).points(jax.random.key(0), 2, jnp.float64)
    np.testing.assert_allclose(expect(lambda f: f[0] * f[1], pair, points), [2.0], rtol=1e-12)
    np.testing.assert_allclose(log_ndtr(0.0), np.log(0.5))


@pytest.mark.long
@double
@pytest.mark.parametrize("coupled", [False, True])
def test_few_points_are_laid_out_otherwise_and_have_the_same_expectations(coupled):
    rng = np.random.default_rng(3)
    count = FEW_POINTS + 1
    root = jnp.asarray(rng.normal(size=(count, 3, 3)))
    mean, blocks = jnp.asarray(rng.normal(size=(3, count))), root @ root.swapaxes(1, 2)
    whole = JointMarginals(mean, blocks) if coupled else Marginals(mean, jnp.diagonal(blocks, axis1=1, axis2=2).T)
    points = MonteCarlo(16).points(jax.random.key(0), 3, jnp.float64)

    def expected(q):
        def total(q):
            values = expect(lambda f: jnp.tanh(f) * jnp.exp(f[0]), q, points)
            return jnp.sum(values**2), values

        (_, values), gradient = jax.value_and_grad(total, has_aux=True)(q)
        return values, *gradient

    few = JointMarginals(mean[:, :2], blocks[:2]) if coupled else Marginals(*(part[:, :2] for part in whole))
    for one, all_ in zip(expected(few), expected(whole), strict=True):
        kept = all_[:2] if all_.ndim == 3 else all_[:, :2]
        np.testing.assert_allclose(one, kept, rtol=1e-12, atol=1e-13)
