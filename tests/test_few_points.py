"""Exact regression with open hyper-parameters: grids, padding, linear algebra of its own, scikit-learn."""

import numpy as np
import pytest
from problems import double
from scipy import stats
from scipy.special import logsumexp
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as OtherRBF
from sklearn.gaussian_process.kernels import ConstantKernel

from fewshot.inference import few_points
from fewshot.inference.few_points import LEVEL, Labelled, averaged, maximised
from fewshot.models.kernels import RBF, Linear

NEW = np.linspace(-3, 3, 7)[:, None]


def labelled(points=6, seed=0, columns=1, padding=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, size=(points, columns))
    y = np.sin(2 * x.sum(axis=1)) + 0.2 * rng.normal(size=points)
    y = (y - y.mean()) / y.std()
    present = np.arange(points + padding) < points
    return Labelled(np.pad(x, ((0, padding), (0, 0)), mode="edge"), np.pad(y, (0, padding), mode="edge"), present)


def rbf(x, z, scale, length):
    return scale * np.exp(-0.5 * ((x - z.T) / length) ** 2)


def on_grid(data, noise=None):
    """Evidence, mean and variance at NEW by sums over a grid, with dense matrices."""
    typical, steps = np.log(np.sqrt(2 * data.x.var())), np.linspace(-4, 4, 25)
    ratios = np.log(0.1) + 2 * steps if noise is None else np.zeros(1)
    grid = np.stack(np.meshgrid(2 * steps, typical + steps, ratios, indexing="ij")).reshape(3, -1)
    scale, length = np.exp(grid[:2, :, None, None])
    known = scale * np.exp(grid[2, :, None, None]) if noise is None else noise
    matrix = rbf(data.x, data.x, scale, length) + LEVEL + known * np.eye(len(data.y))
    cross = rbf(NEW, data.x, scale, length) + LEVEL
    solved = np.linalg.solve(matrix, np.concatenate([np.tile(data.y[:, None], (len(scale), 1, 1)),
                                                     cross.transpose(0, 2, 1)], axis=2))  # fmt: skip
    logs = -0.5 * (solved[:, :, 0] @ data.y + np.linalg.slogdet(2 * np.pi * matrix)[1])
    logs += stats.norm(0, 2).logpdf(grid[0]) + stats.norm(typical, 1).logpdf(grid[1])
    cell = 2 * (steps[1] - steps[0]) ** 2
    if noise is None:
        logs += stats.norm(np.log(0.1), 2).logpdf(grid[2])
        cell *= ratios[1] - ratios[0]
    means = np.einsum("gqn,gn->gq", cross, solved[:, :, 0])
    variances = (scale + LEVEL + known)[:, :, 0] - np.einsum("gqn,gnq->gq", cross, solved[:, :, 1:])
    weights = np.exp(logs - logsumexp(logs))
    mean = weights @ means
    return logsumexp(logs) + np.log(cell), mean, weights @ (variances + means**2) - mean**2


def predicted(process, data, new=NEW):
    found = process.predict(data, process.condition(data), new)
    return np.asarray(found.mean), np.asarray(found.variance)


@double
@pytest.mark.parametrize("noise", [None, 0.05])
def test_the_average_is_the_sum_over_a_grid(noise):
    data = labelled()
    evidence, mean, variance = on_grid(data, noise)
    process = averaged(RBF(), data, noise, seed=0)
    np.testing.assert_allclose(process.log_evidence, evidence, atol=0.1)
    found = predicted(process, data)
    np.testing.assert_allclose((found[0] - mean) / np.sqrt(variance), 0, atol=0.03)
    np.testing.assert_allclose(found[1], variance, rtol=0.06)
    if noise is not None:
        np.testing.assert_allclose(process.points[:, -1], np.log(noise))


@double
def test_a_narrow_explanation_beside_a_broad_one_has_its_share():
    """24 points of a fast sine: all of it noise, or a short length-scale without any; a grid sums over both."""
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-5, 5, 24))[:, None]
    y = np.sin(8 * x[:, 0]) + 0.05 * rng.normal(size=24)
    data = Labelled(x, (y - y.mean()) / y.std(), np.ones(24, bool))
    evidence, mean, variance = on_grid(data)
    for seed in range(3):
        process = averaged(RBF(), data, None, seed)
        np.testing.assert_allclose(process.log_evidence, evidence, atol=0.1)
        found = predicted(process, data)
        np.testing.assert_allclose((found[0] - mean) / np.sqrt(variance), 0, atol=0.1)
        np.testing.assert_allclose(found[1], variance, rtol=0.15)


@double
@pytest.mark.parametrize("noise", [None, 0.05])
def test_modes_are_searched_for_along_the_slope(noise, monkeypatch):
    """What is searched by is the evidence at whole points, and its slope by differences of it."""
    data, searched = labelled(points=14), []

    def record(log_likelihood, centre, spread, starts):
        searched.append((log_likelihood, starts))
        return []

    monkeypatch.setattr(few_points, "posterior_modes", record)
    averaged(RBF(), labelled(points=8), noise, seed=0)
    assert not searched  # too few to tell a mode that is narrow
    averaged(RBF(), data, noise, seed=0)
    ((log_likelihood, starts),) = searched
    assert starts.shape == ((5, 3) if noise is None else (4, 2))
    for point in [*starts, np.full(starts.shape[1], -12.0)]:  # the last below the least noise
        value, slope = log_likelihood(point)
        log_noise = max(point[0] + point[2], few_points.LEAST_LOG_NOISE) if noise is None else np.log(noise)
        matrix = rbf(data.x, data.x, *np.exp(point[:2])) + LEVEL + np.exp(log_noise) * np.eye(14)
        assert value == pytest.approx(stats.multivariate_normal(cov=matrix).logpdf(data.y), rel=1e-6)
        differences = [
            log_likelihood(point + step)[0] - log_likelihood(point - step)[0] for step in 1e-4 * np.eye(len(point))
        ]
        np.testing.assert_allclose(slope, np.array(differences) / 2e-4, rtol=1e-4, atol=1e-6 * np.abs(slope).max())


@pytest.mark.long
@double
@pytest.mark.parametrize("kernel", [RBF(), Linear()], ids=["rbf", "linear"])
def test_padding_changes_nothing(kernel):
    for process_of in (lambda data: averaged(kernel, data, None, seed=0), lambda data: maximised(kernel, data, 0.1)):
        few, more = ((process_of(data), data) for data in (labelled(), labelled(padding=5)))
        np.testing.assert_allclose(more[0].points, few[0].points, atol=1e-6)
        np.testing.assert_allclose(more[0].log_evidence, few[0].log_evidence)
        np.testing.assert_allclose(predicted(*more), predicted(*few), atol=1e-8)


@double
def test_a_linear_kernel_is_bayesian_linear_regression_with_a_constant():
    """Also where its factors are of the columns, not of the rows; at the points that were found."""
    data = labelled(9, columns=2)
    process = averaged(Linear(), data, None, seed=0)
    new = np.random.default_rng(1).normal(size=(4, 2))
    rows, asked = (np.c_[x / np.sqrt(2), np.ones(len(x))] for x in (data.x, new))
    means, variances = [], []
    for log_scale, log_noise in process.points:
        prior = np.diag(1 / np.array([*[np.exp(log_scale)] * 2, LEVEL]))
        covariance = np.linalg.inv(prior + rows.T @ rows / np.exp(log_noise))
        means.append(asked @ covariance @ rows.T @ data.y / np.exp(log_noise))
        variances.append(np.sum(asked @ covariance * asked, axis=1) + np.exp(log_noise))
    mean, variance = predicted(process, data, new)
    expected = process.weights @ means
    np.testing.assert_allclose(mean, expected, atol=1e-9)
    np.testing.assert_allclose(variance, process.weights @ (variances + (means - expected) ** 2), atol=1e-9)


@double
@pytest.mark.parametrize("noise", [1e-1, 1e-2, 1e-4, 1e-6])
def test_the_search_finds_the_largest_evidence_at_any_known_noise(noise):
    """Where a search from one start finds that small noise explains nothing: scikit-learn's best of many."""
    x = np.linspace(0, 10, 25)[:, None]
    y = np.sin(x[:, 0])
    y = (y - y.mean()) / y.std()
    found = maximised(RBF(), Labelled(x, y, np.ones(25, bool)), noise)
    other = GaussianProcessRegressor(ConstantKernel() * OtherRBF(), alpha=noise, n_restarts_optimizer=8, random_state=0)
    np.testing.assert_allclose(found.log_evidence, other.fit(x, y).log_marginal_likelihood_value_, atol=1e-3)


@double
def test_what_has_no_finite_evidence_is_said():
    data = labelled()
    broken = data._replace(y=data.y * np.nan)
    for process_of in (lambda: averaged(RBF(), broken, None, seed=0), lambda: maximised(RBF(), broken, None)):
        with pytest.raises(FloatingPointError):
            process_of()


@pytest.mark.long
@double
@pytest.mark.parametrize("rows", [30, 70])
def test_rows_without_noise_are_met(rows):
    """Noise that the posterior lets vanish leaves matrices that nothing can solve: 0.1 to 0.3 beside the labels."""
    x = np.linspace(-3, 3, rows)[:, None]
    y = (x[:, 0] ** 2 - 3) / 2.7
    data = Labelled(x, y, np.ones(rows, bool))
    mean, variance = predicted(averaged(RBF(), data, None, 0), data, x)
    np.testing.assert_allclose(mean, y, atol=1e-3)
    assert (variance > 0).all() and variance.max() < 1e-6


@double
@pytest.mark.parametrize("unit", [pytest.param(1e-3, marks=pytest.mark.long), 1e3])
def test_the_unit_of_inputs_changes_nothing(unit):
    data = labelled()
    expected = predicted(averaged(Linear(), data, None, 0), data)
    scaled = data._replace(x=data.x * unit)
    np.testing.assert_allclose(predicted(averaged(Linear(), scaled, None, 0), scaled, NEW * unit), expected, rtol=1e-6)
