"""Products on grids, interpolation, conjugate gradients and Lanczos against dense algebra."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import double

from fewshot.inference import structured
from fewshot.inference.many_points import Exact
from fewshot.inference.structured import GridProcess
from fewshot.models import grids
from fewshot.models.grids import Grid
from fewshot.models.inducing import InducingProcess
from fewshot.models.kernels import RBF, Cosine, Matern52

HYPER = {"log_scale": 0.3, "log_lengthscale": -0.6}


def grid_of(*shape, step=(0.3, 0.2, 0.5)):
    width = len(shape)
    return Grid(jnp.linspace(-1.0, 0.5, width), jnp.asarray(step[:width]), shape)


def parameters_of(kernel, x):
    start = InducingProcess(kernel).initial(x[:0], noise=0.05)
    return start._replace(log_weights=0.2 * jnp.arange(1.0, x.shape[1] + 1), hyper=dict(HYPER))


def scattered(points=20, shape=(9, 8), seed=0):
    """Rows inside a grid of two axes, with targets."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.uniform(-1, 1, size=(points, len(shape))))
    return x, jnp.asarray(np.sin(2 * x[:, 0]) + 0.2 * rng.normal(size=points)), Grid.around(x, shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", [(7,), (3, 4, 2)])
@double
def test_fourier_products_are_those_of_the_dense_matrix(shape):
    kernel, grid = Matern52(), grid_of(*shape)
    weights = jnp.linspace(0.7, 1.4, len(shape))
    dense = kernel.gram(HYPER, grid.points * weights, grid.points * weights)
    values = np.random.default_rng(0).normal(size=(2, len(grid.points)))
    found = grids.grid_product(grids.spectrum(kernel, HYPER, grid, weights), shape, jnp.asarray(values))
    np.testing.assert_allclose(found, values @ np.asarray(dense), atol=1e-12)


@pytest.mark.long
@double
def test_kronecker_products_are_those_of_the_dense_matrix_and_of_an_rbf_kernel():
    grid, kernel = grid_of(5, 4, 3), RBF()
    rng = np.random.default_rng(1)
    factors = [jnp.asarray(rng.normal(size=(size, size))) for size in grid.shape]
    values = jnp.asarray(rng.normal(size=(2, 60)))
    dense = np.kron(np.kron(factors[0], factors[1]), factors[2])
    np.testing.assert_allclose(grids.kronecker_product(factors, values), values @ dense.T, atol=1e-11)
    unscaled = {**HYPER, "log_scale": 0.0, "log_lengthscale": HYPER["log_lengthscale"] + 0.5 * np.log(3)}
    axes = [grid.start[d] + grid.step[d] * jnp.arange(size) for d, size in enumerate(grid.shape)]
    factors = [kernel.gram(unscaled, axis[:, None], axis[:, None]) for axis in axes]
    expected = grids.grid_product(grids.spectrum(kernel, HYPER, grid), grid.shape, values)
    np.testing.assert_allclose(np.exp(0.3) * grids.kronecker_product(factors, values), expected, atol=1e-11)


@pytest.mark.long
@double
def test_interpolation_is_exact_for_quadratics_and_at_grid_points():
    x, _, grid = scattered()
    rows = grids.interpolation(grid, x)

    def value(at):
        return 1 + at[:, 0] - 2 * at[:, 1] + at[:, 0] * at[:, 1] + 3 * at[:, 0] ** 2 - at[:, 1] ** 2

    np.testing.assert_allclose(rows.gather(value(grid.points)), value(x), atol=1e-11)
    inner = [index for index in itertools.product(range(1, 8), range(1, 7))]
    chosen = jnp.asarray([grid.start + grid.step * jnp.asarray(index) for index in inner])
    weights = structured.interpolation_rows(grids.interpolation(grid, chosen))
    expected = np.zeros((len(inner), 72))
    expected[np.arange(len(inner)), [8 * i + j for i, j in inner]] = 1
    np.testing.assert_allclose(weights, expected, atol=1e-12)
    vector = jnp.asarray(np.random.default_rng(2).normal(size=(3, 20)))
    dense = structured.interpolation_rows(rows)
    np.testing.assert_allclose(rows.spread(vector), vector @ dense, atol=1e-12)
    assert np.isnan(grids.interpolation(grid, x + 5).weights).any(axis=1).all()


@pytest.mark.long
@double
def test_the_interpolation_error_falls_with_the_cube_of_the_step():
    x = jnp.linspace(-1, 1, 400)[:, None]
    errors = []
    for size in (35, 67, 131):  # of 32, 64 and 128 cells
        grid = Grid.around(x, (size,))
        dense = RBF().gram(HYPER, x, x)
        rows = structured.interpolation_rows(grids.interpolation(grid, x))
        errors.append(np.abs(rows @ RBF().gram(HYPER, grid.points, grid.points) @ rows.T - dense).max())
    orders = np.log2(np.asarray(errors[:-1]) / errors[1:])
    assert (np.abs(orders - 3) < 0.25).all(), orders


@pytest.mark.long
@double
def test_on_grid_points_everything_is_exact_regression():
    kernel, grid = Matern52(), grid_of(8, 7)
    rng = np.random.default_rng(3)
    inner = rng.permutation([index for index in itertools.product(range(1, 7), range(1, 6))])
    points = jnp.asarray(grid.start + grid.step * inner)
    x, new = points[:20], points[20:]
    y = jnp.asarray(rng.normal(size=20))
    parameters, process = parameters_of(kernel, x), GridProcess(kernel, tolerance=1e-12, lanczos_steps=20)
    exact = Exact(kernel)
    expected = exact.condition(parameters, x, y)
    probes = jnp.sqrt(20.0) * jnp.eye(20)
    value, slopes = jax.jit(jax.value_and_grad(process.log_evidence))(parameters, grid, x, y, probes)
    np.testing.assert_allclose(value, expected.bound, rtol=1e-9)
    dense = jax.jit(jax.grad(exact.bound))(parameters, x, y)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9), slopes, dense)
    found = process.predict(parameters, grid, process.condition(parameters, grid, x, y), x, new)
    wanted = exact.predict(parameters, expected.state, new)
    np.testing.assert_allclose(found.mean, wanted.mean, atol=1e-9)
    np.testing.assert_allclose(found.variance, wanted.variance, atol=1e-9)


@pytest.mark.long
@double
def test_off_the_grid_solves_and_determinants_are_those_of_the_dense_matrix():
    x, y, grid = scattered()
    process, parameters = GridProcess(RBF(), lanczos_steps=20), parameters_of(RBF(), x)
    product = process.noisy(parameters, grid, grids.interpolation(grid, x))
    dense = np.asarray(product(jnp.eye(20)))
    np.testing.assert_allclose(dense, dense.T, atol=1e-12)
    found = structured.solve(product, y[None], 1e-12, 200)[0]
    np.testing.assert_allclose(found, np.linalg.solve(dense, y), rtol=1e-8)
    exact = np.linalg.slogdet(dense)[1]
    every = jnp.sqrt(20.0) * jnp.eye(20)
    np.testing.assert_allclose(structured.log_determinant(product, every, 20), exact, rtol=1e-9)
    probes = structured.random_probes(jax.random.key(0), 400, 20, x.dtype)
    few = jax.jit(lambda probes: structured.log_determinant(product, probes, 12))
    parts = np.asarray([few(probes[start : start + 40]) for start in range(0, 400, 40)])
    error = parts.std(ddof=1) / np.sqrt(len(parts))
    assert abs(parts.mean() - exact) < 4 * error and error < 0.05 * abs(exact)


@pytest.mark.long
@double
def test_lanczos_is_tridiagonal_and_ends_where_the_space_does():
    rng = np.random.default_rng(4)
    basis = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    matrix = jnp.asarray(basis @ np.diag([1.0, 1.0, 1.0, 2.0, 2.0, 5.0]) @ basis.T)  # three different eigenvalues
    start = jnp.asarray(rng.normal(size=6))
    diagonal, beside = structured.lanczos(lambda v: matrix @ v, start, 5)
    np.testing.assert_allclose(beside[2:], 0.0, atol=1e-12)
    np.testing.assert_allclose(diagonal[3:], 1.0)
    small = np.diag(diagonal[:3]) + np.diag(beside[:2], 1) + np.diag(beside[:2], -1)
    np.testing.assert_allclose(np.linalg.eigvalsh(small), [1.0, 2.0, 5.0], rtol=1e-10)


@pytest.mark.long
def test_it_runs_in_single_precision():
    x, y, grid = (jnp.asarray(part, jnp.float32) if isinstance(part, jax.Array) else part for part in scattered())
    parameters, process = parameters_of(RBF(), x), GridProcess(RBF(), tolerance=1e-4, lanczos_steps=15)
    probes = jnp.sqrt(20.0) * jnp.eye(20)
    value, slopes = jax.jit(jax.value_and_grad(process.log_evidence))(parameters, grid, x, y, probes)
    dense = Exact(RBF()).bound(parameters, x, y)
    assert value.dtype == jnp.float32 and abs(value - dense) < 0.5
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_what_has_no_grid_is_refused():
    with pytest.raises(ValueError, match="a kernel of differences of inputs, got Cosine"):
        grids.spectrum(Cosine(), HYPER, grid_of(4))
    with pytest.raises(ValueError, match="2 numbers of at least 4 grid points, got"):
        Grid.around(jnp.zeros((3, 2)), (5, 3))
