"""Base kernels against formulas written out in NumPy, and at the points where kernels usually break."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.test_util import check_grads
from problems import defined
from sklearn.linear_model import LogisticRegression

from fewshot import models
from fewshot.inference.inner import laplace, run
from fewshot.models import kernels
from fewshot.models.likelihoods import Softmax
from fewshot.models.process import LatentProcess

HYPER = {"log_scale": 0.7, "log_lengthscale": -0.3, "log_offset": 0.4}
NAMES = list(models.KERNELS)


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def hyper_of(kernel):
    return {name: jnp.asarray(HYPER[name]) for name in kernel.initial()}


def features(seed, count, size=6):
    """Features of both signs, with a duplicated and an all-zero row."""
    x = np.random.default_rng(seed).normal(0.3, 1.0, (count, size))
    x[1] = x[0]
    x[2] = 0.0
    return x


def reference(name, x, z):
    """K[i, j] one entry at a time, straight from the textbook formula."""
    scale, length, offset = (np.exp(HYPER[key]) for key in ("log_scale", "log_lengthscale", "log_offset"))
    size = x.shape[1]
    gram = np.empty((len(x), len(z)))
    for i, a in enumerate(x):
        for j, b in enumerate(z):
            norms = np.linalg.norm(a) * np.linalg.norm(b)
            distance = np.linalg.norm(a - b) / np.sqrt(size) / length
            units = [v / np.linalg.norm(v) if v.any() else v for v in (a, b)]
            gram[i, j] = {
                "cosine": a @ b / norms if norms else 0.0,
                "linear": a @ b / size,
                "rbf": np.exp(-(distance**2) / 2),
                "rbf-norm": np.exp(-np.sum((units[0] - units[1]) ** 2) / (2 * length**2)),
                "matern52": (1 + 5**0.5 * distance + 5 * distance**2 / 3) * np.exp(-(5**0.5) * distance),
                "poly1": a @ b / size + offset,
                "poly2": (a @ b / size + offset) ** 2,
            }[name.removesuffix("-bn")]
    return scale * gram


@pytest.mark.parametrize("name", NAMES)
def test_gram_is_the_published_formula(name):
    kernel, x, z = models.KERNELS[name](), features(0, 7), features(1, 5)
    gram = jax.jit(kernel.gram)(hyper_of(kernel), jnp.asarray(x), jnp.asarray(z))
    np.testing.assert_allclose(gram, reference(name, x, z), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_diagonal_and_root_agree_with_gram(name):
    kernel, x = models.KERNELS[name](), jnp.asarray(features(2, 9))
    hyper = hyper_of(kernel)
    gram, root, diagonal = jax.jit(lambda h, x: (kernel.gram(h, x, x), kernel.root(h, x), kernel.diagonal(h, x)))(
        hyper, x
    )
    np.testing.assert_allclose(diagonal, np.diag(gram), rtol=1e-12, atol=1e-12)
    assert (root is None) == (name in {"rbf", "rbf-norm", "matern52", "poly2"})
    if root is not None:
        np.testing.assert_allclose(np.asarray(root) @ np.asarray(root).T, gram, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gram_is_symmetric_and_positive_semi_definite(name, dtype):
    kernel, x = models.KERNELS[name](), jnp.asarray(features(3, 40, size=5), dtype)
    gram = jax.jit(kernel.gram)({key: np.dtype(dtype).type(HYPER[key]) for key in kernel.initial()}, x, x)
    assert gram.dtype == dtype
    gram, epsilon = np.asarray(gram, np.float64), float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(gram, gram.T, rtol=0, atol=40 * epsilon * gram.max())
    values = np.linalg.eigvalsh((gram + gram.T) / 2)
    assert values[0] >= -40 * epsilon * values[-1]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_at_coinciding_and_dead_points(name):
    kernel, x = models.KERNELS[name](), jnp.asarray(features(4, 6), "float32")
    hyper = {key: np.float32(HYPER[key]) for key in kernel.initial()}
    weights = np.random.default_rng(0).normal(size=(6, 6)).astype("float32")

    def weighted(hyper, x):
        return (weights * kernel.gram(hyper, x, x)).sum() + kernel.diagonal(hyper, x).sum()

    leaves = jax.tree.leaves(jax.jit(jax.grad(weighted, argnums=(0, 1)))(hyper, x))
    assert all(np.isfinite(leaf).all() for leaf in leaves)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_finite_differences(name):
    kernel, x = models.KERNELS[name](), jnp.asarray(features(5, 6))
    x = x.at[1].add(1e-3).at[2].set(0.5)  # distinct and alive: differentiable for every kernel
    z = jnp.asarray(features(6, 4)).at[2].set(-0.5)
    weights = jnp.asarray(np.random.default_rng(7).normal(size=(6, 4)))
    weighted = jax.jit(lambda hyper, x, z: (weights * kernel.gram(hyper, x, z)).sum())
    check_grads(weighted, (hyper_of(kernel), x, z), order=1, modes=["rev"])


@pytest.mark.parametrize("name", ["rbf", "rbf-norm", "matern52"])
def test_gradient_at_a_coinciding_pair_is_zero(name):
    kernel, ones = models.KERNELS[name](), jnp.ones((1, 4))
    gradient = jax.jit(jax.grad(lambda x: kernel.gram(hyper_of(kernel), x, ones).sum()))(ones)
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


def test_matern_slope_is_exact_down_to_zero_distance():
    np.testing.assert_allclose(jax.jit(jax.grad(kernels.matern52))(0.0), -5 / 6, rtol=1e-15)
    slopes = jax.jit(jax.vmap(jax.grad(kernels.matern52)))(jnp.asarray([1e-12, 1e-6], "float32"))
    np.testing.assert_allclose(slopes, -5 / 6, rtol=1e-5)


def test_zero_features_have_zero_cosine_and_no_gradient():
    kernel, x = models.KERNELS["cosine"](), jnp.zeros((3, 4), "float32").at[0].set(1.0)
    hyper = {"log_scale": jnp.float32(1.0)}
    gram, pull = jax.vjp(lambda x: kernel.gram(hyper, x, x), x)
    np.testing.assert_array_equal(gram[1:], 0.0)
    np.testing.assert_array_equal(pull(jnp.ones_like(gram))[0][1:], 0.0)


def test_distances_survive_a_large_common_offset_in_float32():
    x = np.random.default_rng(8).normal(size=(20, 8)).astype("float32")
    exact = ((x[:, None].astype("float64") - x[None]) ** 2).sum(-1)
    shifted = jax.jit(kernels.squared_distances)(jnp.asarray(x + 64.0), jnp.asarray(x + 64.0))
    np.testing.assert_allclose(shifted, exact, atol=1e-3)


def test_distances_between_equal_rows_are_not_negative():
    x = jnp.asarray(np.random.default_rng(9).normal(size=(200, 8)), "float32")
    assert (jax.jit(kernels.squared_distances)(x, x) >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_the_other_rows(name):
    """In float32, where a shift or a scale taken from far-away rows would be seen."""
    kernel, z, x = models.KERNELS[name](), *(features(seed, 5).astype("float32") for seed in (10, 11))
    gram, hyper = jax.jit(kernel.gram), {key: np.float32(HYPER[key]) for key in kernel.initial()}
    changed = np.concatenate([x[:3], 1e5 * x[3:]])
    np.testing.assert_allclose(gram(hyper, x, z)[:3], gram(hyper, changed, z)[:3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_hyperparameter_has_a_prior_around_its_initial_value(name):
    kernel = models.KERNELS[name]()
    initial, priors = kernel.initial(), kernel.priors()
    assert list(initial) == list(priors)
    for key, prior in priors.items():
        assert isinstance(prior, dist.Distribution)
        assert abs(float(prior.mean) - initial[key]) <= float(prior.variance) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_output_scale_starts_at_the_median_of_its_prior(name):
    kernel = models.KERNELS[name](prior_scale=2.0)
    assert kernel.initial()["log_scale"] == float(kernel.priors()["log_scale"].loc) == np.log(2.0)
    with pytest.raises(ValueError, match=r"prior_scale must be positive, got 0\.0"):
        models.KERNELS[name](prior_scale=0.0)


@pytest.mark.parametrize("constant", [0.0, 0.3])
def test_a_constant_adds_to_all_entries_of_the_cosine(constant):
    plain, kernel, x, z = (
        kernels.Cosine(),
        kernels.Cosine(constant=constant),
        *map(jnp.asarray, (features(0, 7), features(1, 5))),
    )
    hyper = hyper_of(plain)
    wanted = plain.gram(hyper, x, z) + constant * np.exp(HYPER["log_scale"])
    np.testing.assert_allclose(kernel.gram(hyper, x, z), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kernel.diagonal(hyper, x), np.diag(kernel.gram(hyper, x, x)), rtol=1e-12)


def test_powers_of_the_examples_change_scale_and_constant_of_the_cosine():
    kernel = kernels.Cosine(constant=0.3, scale_power=0.5, constant_power=-1.5)
    hyper, x, z = hyper_of(kernel), *map(jnp.asarray, (features(0, 7), features(1, 5)))
    for examples in (1, 4):
        other = kernels.Cosine(constant=0.3 * examples**-1.5)
        wanted = other.gram({"log_scale": hyper["log_scale"] + 0.5 * np.log(examples)}, x, z)
        np.testing.assert_allclose(kernel.gram(kernel.of_task(hyper, examples), x, z), wanted, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kernel.gram(hyper, x, z), kernel.gram(kernel.of_task(hyper, 1), x, z), rtol=1e-12)
    assert kernels.Cosine(constant=0.3).of_task(hyper, 4) is hyper
    with pytest.raises(ValueError, match="scale_power must be finite, got nan"):
        kernels.Cosine(scale_power=np.nan)


@pytest.mark.parametrize("constant", [-0.1, np.nan, np.inf])
def test_a_constant_that_is_no_variance_is_refused(constant):
    with pytest.raises(ValueError, match="constant must be a number from 0 on"):
        kernels.Cosine(constant=constant)


@pytest.mark.long
def test_the_mode_under_a_large_constant_is_logistic_regression_without_a_penalty_of_the_intercept():
    """Weights have the variance C of scikit-learn's penalty |w|^2 / 2C; the constant is the prior of the intercept."""
    rng, scale = np.random.default_rng(0), 2.0
    x, y = rng.normal(size=(14, 3)), np.arange(14) % 3
    units, kernel = x / np.linalg.norm(x, axis=1, keepdims=True), kernels.Cosine(constant=1e6)
    process, labelled = LatentProcess(kernel, {"log_scale": jnp.log(scale)}), jnp.asarray(x[:9])
    posterior = run(jax.random.key(0), laplace(Softmax()), process.prior(labelled, 3), jnp.asarray(y[:9]), steps=30)
    mean = np.asarray(posterior.predict(process.query(labelled, jnp.asarray(x[9:]), 3)).mean).T
    solver = LogisticRegression(C=scale, tol=1e-10, max_iter=1000).fit(units[:9], y[:9])
    wanted = solver.decision_function(units[9:])
    np.testing.assert_allclose(mean - mean.mean(1, keepdims=True), wanted, atol=1e-4)


def test_normalisation_is_asked_for_by_three_kernels_only():
    wanted = {name: (make().normalise_features, make().affine) for name, make in models.KERNELS.items()}
    asked = {name: pair for name, pair in wanted.items() if any(pair)}
    assert asked == {"cosine-bn": (True, True), "poly1": (True, False), "poly2": (True, False)}


def test_every_kernel_is_registered():
    assert defined(kernels.Kernel) == {type(make()) for make in models.KERNELS.values()}


SCALES = {"float32": [1e-30, 1e-19, 1e10, 1e19, 1e30, 3e37], "float64": [1e-300, 1e-160, 1e30, 1e154, 1e300]}
BOUNDED = ["cosine", "cosine-bn", "rbf", "rbf-norm", "matern52"]


def scaled_rows(dtype, scale):
    """Two pairs of equal rows, one pair of them at another scale, and rows of ordinary size."""
    x = np.random.default_rng(12).normal(size=(6, 5))
    x[1] = x[0]
    x[3:5] = x[2]
    x[2:4] *= scale
    return x.astype(dtype)


@pytest.mark.parametrize("dtype, scale", [(dtype, scale) for dtype, scales in SCALES.items() for scale in scales])
def test_cosine_is_right_at_any_scale(dtype, scale):
    x = scaled_rows(dtype, scale)
    units = x / np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    hyper = {"log_scale": jnp.asarray(HYPER["log_scale"], dtype)}
    gram = np.asarray(models.KERNELS["cosine"]().gram(hyper, jnp.asarray(x), jnp.asarray(x)))
    wanted = np.exp(HYPER["log_scale"]) * units @ units.T
    np.testing.assert_allclose(gram, wanted, rtol=0, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["rbf", "matern52"])
@pytest.mark.parametrize("scale", [1e10, 1e18, 1e19, 1e20, 1e30, 1e36])
def test_queries_too_long_to_be_squared_are_infinitely_far(name, scale):
    kernel, x = models.KERNELS[name](), jnp.asarray(scaled_rows("float32", scale))
    hyper = {key: jnp.float32(HYPER[key]) for key in kernel.initial()}
    gram = np.asarray(kernel.gram(hyper, x, x[:2]))
    np.testing.assert_array_equal(gram[2:4], 0.0)
    assert np.isfinite(gram).all() and (gram[:2] == gram[0, 0]).all()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_gradients_of_cosine_at_rows_too_long_or_short_to_be_squared_are_finite(scale):
    kernel, x = models.KERNELS["cosine"](), jnp.asarray(scaled_rows("float32", scale))
    hyper = {"log_scale": np.float32(HYPER["log_scale"])}
    gradients = jax.grad(lambda hyper, x: kernel.gram(hyper, x, x).sum(), argnums=(0, 1))(hyper, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_matern_is_zero_at_infinity():
    squares = jnp.asarray([1e20, 1e38, np.inf], "float32")
    np.testing.assert_array_equal(kernels.matern52(squares), 0.0)
    np.testing.assert_array_equal(jax.vmap(jax.grad(kernels.matern52))(squares), 0.0)


@pytest.mark.parametrize("name", BOUNDED)
def test_features_that_are_no_numbers_do_not_pass_for_zeros(name):
    kernel, x = models.KERNELS[name](), np.ones((3, 4))
    x[1, 2], x[2, 0] = np.nan, np.inf
    gram = kernel.gram(hyper_of(kernel), jnp.asarray(x), jnp.ones((1, 4)))
    assert np.isfinite(gram[0]) and np.isnan(gram[1:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ordinary_rows_keep_their_bits(dtype):
    """What the plain formula gives, without the guard of rows that are too long or too short to be squared."""

    def plain_unit(x):
        squares = (x * x).sum(axis=-1, keepdims=True)
        alive = squares > jnp.finfo(x.dtype).tiny
        return jnp.where(alive, x * jax.lax.rsqrt(jnp.where(alive, squares, 1.0)), 0.0)

    for seed, scale in enumerate((1e-6, 1.0, 1e3, 1e12)):
        x = jnp.asarray(scale * features(seed, 40, size=17), dtype)
        np.testing.assert_array_equal(jax.jit(kernels.unit_norm)(x), jax.jit(plain_unit)(x))
        slopes = [jax.jit(jax.grad(lambda x, f=f: (f(x) * x[::-1]).sum()))(x) for f in (kernels.unit_norm, plain_unit)]
        # XLA rounds a gradient as it pleases, which depends on the program around it.
        np.testing.assert_allclose(*slopes, rtol=0, atol=8 * np.finfo(dtype).eps * np.abs(slopes[1]).max())
