"""What is refused, and with which words."""

import jaxtyping
import pytest
from cells import CELLS, CONVERGED_STEPS, SAMPLED, kernel_for, start
from problems import problem

from fewshot.inference import HYPERGRADIENTS, INFERENCE, OBJECTIVES
from fewshot.inference.inner import cavi, cvi, exact, fit, gibbs, gradient, laplace
from fewshot.inference.inner.base import usable_inferences
from fewshot.inference.inner.cvi import Curvature
from fewshot.inference.outer.hypergradients import implicit, sites, unroll
from fewshot.inference.outer.objectives import (
    cavity_evidence,
    check_combination,
    elbo,
    evidence,
    leave_one_out,
    predictive,
)
from fewshot.models import LIKELIHOODS
from fewshot.models.expectations import Exact
from fewshot.models.likelihoods import LabelRegression, OneVsEach, Softmax


@pytest.fixture
def unchecked():
    """Without the run-time type checks of the tests, as a user calls: those would object first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


class NoLikelihood:
    def log_prob(self, y, f):
        return f


@pytest.mark.parametrize(
    "constructor, likelihood, message",
    [
        (exact, Softmax(), "exact needs gaussian_sites; Softmax offers none: use cvi, gradient, laplace"),
        (cavi, Softmax(), "cavi needs augmented latents; Softmax offers none: use cvi, gradient, laplace"),
        (gibbs, LabelRegression(), "gibbs needs .*; LabelRegression offers none: use cvi, exact, gradient"),
        (laplace, LabelRegression(), "laplace needs .*; LabelRegression offers none: use cvi, exact, gradient"),
        (exact, OneVsEach(), "exact needs .*; OneVsEach offers none: use cavi, cvi, gibbs, gradient, laplace"),
        (cvi, NoLikelihood(), "cvi needs .*; NoLikelihood offers none: use a Likelihood"),
        (gradient, NoLikelihood(), "gradient needs .*; NoLikelihood offers none: use a Likelihood"),
    ],
)
def test_likelihoods_that_a_kernel_cannot_use_are_refused(constructor, likelihood, message, unchecked):
    with pytest.raises(TypeError, match=message):
        constructor(likelihood)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.01, float("nan")])
def test_step_lengths_outside_their_range_are_refused(rho):
    with pytest.raises(ValueError, match=r"rho must lie in \(0, 1\]"):
        cvi(Softmax(), rho=rho)


def test_curvatures_that_are_not_offered_are_refused(unchecked):
    with pytest.raises(TypeError, match="EXPECTED needs local_sites; LabelRegression offers none"):
        cvi(LabelRegression(), curvature=Curvature.EXPECTED)
    with pytest.raises(ValueError, match="a mean over nodes, of which Exact has none"):
        cvi(Softmax(), curvature=Curvature.EXPECTED, expectation=Exact())
    with pytest.raises(TypeError, match=r"and a Curvature, got .* and 'sampled'"):
        cvi(Softmax(), curvature="sampled")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_learning_rates_that_are_not_positive_are_refused(rate):
    with pytest.raises(ValueError, match="learning_rate must be positive"):
        gradient(Softmax(), learning_rate=rate)


def test_no_steps_are_refused():
    task = problem(0)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        fit(*start(task)[:1], cvi(Softmax()), *start(task)[1:], steps=0)


NO_SITES, DRAWS, NO_BOUND = "it has no sites", "random draws, through which no gradient", "draws maximise no bound"
NO_FIXED_POINT, NO_VALUE = "it names no fixed point", "its own total derivative is not that of any bound"
NO_CAVITY = "a draw without one of its sites"
REFUSED = {
    "cvi": {("evidence", "unroll"): NO_VALUE, ("evidence", "implicit"): NO_VALUE},
    "cavi": {("evidence", "unroll"): NO_VALUE, ("evidence", "implicit"): NO_VALUE},
    "gibbs": {(objective, mode): DRAWS for objective in OBJECTIVES for mode in ("unroll", "implicit")}
    | {("elbo", "sites"): NO_BOUND, ("cavity-evidence", "sites"): NO_CAVITY, ("leave-one-out", "sites"): NO_CAVITY},
    "laplace": {("evidence", "sites"): "its evidence follows its mode"},
    "exact": {(objective, "implicit"): NO_FIXED_POINT for objective in OBJECTIVES},
    "gradient": {(objective, mode): NO_SITES for objective in OBJECTIVES for mode in ("sites", "implicit")}
    | {(objective, "unroll"): NO_SITES for objective in ("evidence", "cavity-evidence", "leave-one-out")},
}


@pytest.mark.parametrize("hypergradient", HYPERGRADIENTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("inference", INFERENCE)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(inference, objective, hypergradient):
    likelihood = dict(reversed(CELLS))[inference]
    cell = kernel_for(inference, LIKELIHOODS[likelihood]()), OBJECTIVES[objective], HYPERGRADIENTS[hypergradient]
    message = REFUSED[inference].get((objective, hypergradient))
    if message is None:
        check_combination(*cell)
    else:
        with pytest.raises(ValueError, match=f"inference {inference} with objective {objective} and .*{message}"):
            check_combination(*cell)


def test_objectives_and_hypergradients_are_the_ones_tested_here():
    known = (elbo, evidence, predictive, cavity_evidence, leave_one_out)
    assert {one.__name__.replace("_", "-"): one for one in known} == OBJECTIVES
    assert {"sites": sites, "unroll": unroll, "implicit": implicit} == HYPERGRADIENTS
    assert set(INFERENCE) == set(CONVERGED_STEPS) | SAMPLED, "a new inference kernel needs its number of steps here"


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_kernels_named_for_a_likelihood_are_those_that_take_it(likelihood):
    assert set(usable_inferences(LIKELIHOODS[likelihood]())) == {name for name, other in CELLS if other == likelihood}
