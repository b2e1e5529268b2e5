"""The Bayesian baseline of heads.py: by explicit matrices, by the order of examples, and its Gaussian limit."""

import numpy as np
import pytest
from conftest import load_benchmark
from scipy.stats import multivariate_normal, multivariate_t

D, N = 4, 3
DOF = 2.5


@pytest.fixture(scope="module")
def qda():
    return load_benchmark("bayesian_qda")


@pytest.fixture
def task(qda):
    rng = np.random.default_rng(0)
    prior = qda.ClassPrior(rng.normal(size=D), 0.7, 1.9)
    return prior, rng.normal(size=(N, D)), rng.normal(size=(5, D))


def test_the_density_is_that_of_explicit_matrices(qda, task):
    """The textbook's update of (m, kappa, nu, Psi), one formula after the other."""
    prior, support, query = task
    kappa, nu = prior.within / prior.between, DOF + D + 1
    centre = support.mean(0)
    scatter = (support - centre).T @ (support - centre)
    apart = np.outer(centre - prior.mean, centre - prior.mean)
    psi = DOF * prior.within * np.eye(D) + scatter + kappa * N / (kappa + N) * apart
    mean, degrees = (kappa * prior.mean + N * centre) / (kappa + N), nu + N - D + 1
    shape = psi * (kappa + N + 1) / ((kappa + N) * degrees)
    wanted = multivariate_t(mean, shape, degrees).logpdf(query)
    np.testing.assert_allclose(qda.log_density(prior, DOF, support, query), wanted, rtol=1e-10)


def test_the_joint_density_does_not_depend_on_the_order(qda, task):
    prior, support, query = task
    both = []
    for first, second in (query[:2], query[1::-1]):
        one = qda.log_density(prior, DOF, support, first[None])
        both.append(one + qda.log_density(prior, DOF, np.vstack([support, first]), second[None]))
    np.testing.assert_allclose(both[0], both[1], rtol=1e-10)


def test_covariances_that_are_known_leave_a_gaussian(qda, task):
    prior, support, query = task
    after = prior.within / prior.between + N
    mean = (prior.within / prior.between * prior.mean + support.sum(0)) / after
    wanted = multivariate_normal(mean, prior.within * (1 + 1 / after) * np.eye(D)).logpdf(query)
    np.testing.assert_allclose(qda.log_density(prior, 1e9, support, query), wanted, rtol=1e-6)


def test_the_prior_is_found_again(qda):
    """From many classes with few examples each, whose means scatter by more than they themselves do."""
    rng = np.random.default_rng(1)
    labels = np.repeat(np.arange(4000), 3)
    means = 0.5 + np.sqrt(0.3) * rng.normal(size=(4000, D))
    found = qda.class_prior(means[labels] + np.sqrt(2.0) * rng.normal(size=(12000, D)), labels)
    np.testing.assert_allclose([found.within, found.between, *found.mean], [2.0, 0.3, *[0.5] * D], rtol=0.1)


def test_classes_that_lie_apart_are_told_apart(qda):
    rng = np.random.default_rng(2)
    y = np.repeat(np.arange(3), 4)
    x = 10 * np.eye(3)[y] + rng.normal(size=(12, 3))
    p = qda.bayesian_qda(qda.ClassPrior(np.zeros(3), 1.0, 30.0), 5.0, x, y, 10 * np.eye(3))
    np.testing.assert_allclose(p.sum(1), 1.0)
    assert (p.argmax(1) == np.arange(3)).all()
