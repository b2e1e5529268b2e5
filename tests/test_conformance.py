"""The shipped checks: every registered likelihood and kernel passes, planted errors do not."""

from dataclasses import dataclass

import jax
import pytest

from fewshot.inference import INFERENCE
from fewshot.inference.conformance import ConformanceError, check_inference, check_likelihood
from fewshot.inference.inner import cvi
from fewshot.inference.inner.base import usable_inferences
from fewshot.models import LIKELIHOODS
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_registered_likelihoods_pass(name):
    names = check_likelihood(LIKELIHOODS[name]())
    assert {"predicts", "expects", "ignores masked classes", "knows no order"} <= set(names)
    assert ("augments" in names) == ("cavi" in usable_inferences(LIKELIHOODS[name]()))


SLOW_KERNELS = [("cvi", Softmax), ("laplace", Softmax), ("cavi", OneVsEach), ("gibbs", OneVsEach)]


@pytest.mark.parametrize(
    "inference, likelihood",
    [("exact", LabelRegression), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_KERNELS)],
)
def test_registered_kernels_pass(inference, likelihood):
    assert "keeps its state" in check_inference(INFERENCE[inference](likelihood()))


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrongSlope(Softmax):
    def local_sites(self, y, f, classes=None):
        sites = super().local_sites(y, f, classes)
        return sites._replace(shift=-sites.shift)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Overconfident(Softmax):
    def predict(self, key, marginals, classes=None):
        return super().predict(key, marginals._replace(variance=0 * marginals.variance), classes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WrongSign(LogisticSoftmax):
    def sites(self, y, aux, classes=None):
        sites = super().sites(y, aux, classes)
        return sites._replace(shift=-sites.shift)


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoBound(OneVsEach):
    def augmented_bound(self, y, marginals, aux, classes=None):
        return 0.5 * super().augmented_bound(y, marginals, aux, classes)


@pytest.mark.long
@pytest.mark.parametrize(
    "likelihood, message",
    [
        (WrongSlope(), "local_sites have the slope of log_prob"),
        (Overconfident(), "L8, predict is the expected density"),
        (WrongSign(), "sites are the joint as a function of f"),
        (NoBound(), "L5, augmented_bound is at most expected_log_prob"),
    ],
)
def test_planted_errors_are_found(likelihood, message):
    with pytest.raises(ConformanceError, match=message):
        check_likelihood(likelihood)


def test_a_kernel_that_does_not_settle_is_found():
    kernel = cvi(Softmax())
    stuck = kernel._replace(step=lambda key, state, prior, y, mask=None: (state, kernel.step(key, state, prior, y)[1]))
    with pytest.raises(ConformanceError, match="K4, settles to 1e-6: got NOT_CONVERGED"):
        check_inference(stuck)


def test_an_object_that_is_no_likelihood_is_refused():
    with pytest.raises(TypeError, match="expected a Likelihood, got int"):
        check_likelihood(3)
