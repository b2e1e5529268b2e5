"""The shipped checks: every registered likelihood and kernel passes, planted errors do not."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from fewshot.inference import INFERENCE, conformance
from fewshot.inference.conformance import check_inference, check_likelihood
from fewshot.inference.inner import cvi, exact, laplace
from fewshot.inference.inner.base import usable_inferences
from fewshot.models import LIKELIHOODS
from fewshot.models.conformance import ConformanceError
from fewshot.models.expectations import GaussHermite, fixed_points
from fewshot.models.gaussian import BlockSites
from fewshot.models.gaussian.dense import positive_part
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, OneVsEach, Softmax


@pytest.mark.slow
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_registered_likelihoods_pass(name):
    names = check_likelihood(LIKELIHOODS[name]())
    assert {"predicts", "expects", "observes", "ignores masked classes", "knows no order"} <= set(names)
    assert ("has a curvature" in names) == hasattr(LIKELIHOODS[name], "local_sites")
    assert ("augments" in names) == ("cavi" in usable_inferences(LIKELIHOODS[name]()))


SLOW_KERNELS = [("cvi", Softmax), ("laplace", Softmax), ("cavi", OneVsEach), ("gibbs", OneVsEach)]


@pytest.mark.parametrize(
    "inference, likelihood",
    [
        pytest.param("exact", LabelRegression, marks=pytest.mark.long),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_KERNELS),
    ],
)
def test_registered_kernels_pass(inference, likelihood):
    names = check_inference(INFERENCE[inference](likelihood()), variational=inference != "laplace")
    assert "keeps its state" in names
    assert ("is stationary" in names) == (inference not in ("laplace", "gibbs"))


@jax.tree_util.register_static
@dataclass(frozen=True)
class FewClasses(Softmax):
    def expected_log_prob(self, y, marginals, points=None, classes=None):
        if points is None:  # right for three classes
            points = fixed_points(3, marginals.mean.dtype)
            wide = jnp.zeros((len(points.nodes), len(marginals.mean)))
            points = points._replace(nodes=wide.at[:, :3].set(points.nodes))
        return super().expected_log_prob(y, marginals, points, classes)


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoFormula(Softmax):
    def expected_log_prob(self, y, marginals, points=None, classes=None):
        nodes = fixed_points(len(marginals.mean), marginals.mean.dtype) if points is None else points
        return super().expected_log_prob(y, marginals, nodes, classes)


@pytest.mark.long
def test_a_likelihood_without_a_formula_passes_with_fixed_points():
    assert "expects at any number of classes" in check_likelihood(NoFormula())


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrongSlope(Softmax):
    def local_sites(self, y, f, classes=None):
        sites = super().local_sites(y, f, classes)
        return sites._replace(shift=-sites.shift)


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrongCurvature(Softmax):
    def local_sites(self, y, f, classes=None):
        sites = super().local_sites(y, f, classes)
        wide = sites._replace(slope=3 * sites.slope)
        return wide.shifted(wide.times(f) - sites.times(f))


@jax.tree_util.register_static
@dataclass(frozen=True)
class WrongObservation(Softmax):
    def observation(self, f):
        return super().observation(3 * f)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unmasked(Softmax):
    def log_prob(self, y, f, classes=None):
        return super().log_prob(y, f)


@jax.tree_util.register_static
@dataclass(frozen=True)
class MaskedLate(Softmax):
    def predict(self, key, marginals, classes=None):
        p = super().predict(key, marginals)
        return p if classes is None else jnp.where(classes, p, 0.0)


@jax.tree_util.register_static
@dataclass(frozen=True)
class MaskedEvenly(MaskedLate):
    def predict(self, key, marginals, classes=None):
        p = super().predict(key, marginals, classes)
        lost = 1 - p.sum(1, keepdims=True)
        return p if classes is None else jnp.where(classes, p + lost / classes.sum(), 0.0)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forgetful(LogisticSoftmax):
    def with_parameters(self, values):
        del values
        return self


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Another(LogisticSoftmax):
    def with_parameters(self, values):
        return LogisticSoftmax(jnp.exp(values["log_temperature"]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Renamed(LogisticSoftmax):
    def priors(self):
        return {"log_tau": super().priors()["log_temperature"]}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fixed(LogisticSoftmax):
    def with_parameters(self, values):
        return Fixed(self.temperature).named(values)

    def named(self, values):
        object.__setattr__(self, "kept", dict(values))
        return self

    def parameters(self):
        return getattr(self, "kept", super().parameters())


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoBound(OneVsEach):
    def augmented_bound(self, y, marginals, aux, classes=None):
        return 0.5 * super().augmented_bound(y, marginals, aux, classes)


@pytest.mark.parametrize(
    "likelihood, message",
    [
        (Forgetful(), "with_parameters has the log_temperature that it is given: expected a difference of at most"),
        (Another(), "with_parameters: expected a likelihood Another, got LogisticSoftmax"),
        (Renamed(), "priors: expected one of each of parameters, log_temperature, got log_tau"),
        (Fixed(), "log_prob: expected other densities at another log_temperature, got the same"),
    ],
)
def test_parameters_that_are_not_kept_are_found(likelihood, message):
    with pytest.raises(ConformanceError, match=message):
        check_likelihood(likelihood)


@pytest.mark.long
@pytest.mark.parametrize(
    "likelihood, message",
    [
        (FewClasses(), "expected_log_prob without points, of five classes, is that of random nodes"),
        (WrongSlope(), "local_sites have the slope of log_prob"),
        (WrongCurvature(), "local_sites have the positive part of minus the Hessian of log_prob, or the Fisher"),
        (WrongObservation(), "observation has the density log_prob"),
        (Unmasked(), "a masked class changes no density"),
        (MaskedLate(), "probabilities beside a masked class sum to 1"),
        (MaskedEvenly(), "a masked class changes no probability"),
        (Overconfident(), "predict is the expected density"),
        (WrongSign(), "sites are the joint as a function of f"),
        (NoBound(), "augmented_bound is at most expected_log_prob"),
    ],
)
def test_planted_errors_are_found(likelihood, message):
    with pytest.raises(ConformanceError, match=message):
        check_likelihood(likelihood)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Clipped(LogisticSoftmax):
    def minus(self, label, point):
        return -self.log_prob(label[None], point[:, None])[0]

    def curvature(self, y, f):
        return positive_part(jax.vmap(jax.hessian(self.minus, argnums=1))(y, f.T))

    def local_sites(self, y, f, classes=None):
        slope = -jax.vmap(jax.grad(self.minus, argnums=1))(y, f.T).T
        flat = BlockSites(slope, self.curvature(y, f)[0])
        return flat._replace(shift=slope + flat.times(f))


@pytest.mark.long
@pytest.mark.parametrize("likelihood", [LogisticSoftmax(), Clipped(), OneVsEach()])
def test_a_curvature_may_be_the_fisher_information_or_the_positive_part_of_minus_the_hessian(likelihood):
    with jax.enable_x64(True):
        conformance._has_a_curvature(likelihood)
        if isinstance(likelihood, Clipped):
            y, f = conformance._labels(likelihood), conformance._latents(7, likelihood)
            assert likelihood.curvature(y, f)[1] > 0  # of what the check saw, some is negative


def test_a_kernel_that_does_not_settle_is_found():
    kernel = cvi(Softmax())
    stuck = kernel._replace(step=lambda key, state, prior, y, mask=None: (state, kernel.step(key, state, prior, y)[1]))
    with pytest.raises(ConformanceError, match="settles to 1e-6: got NOT_CONVERGED"):
        check_inference(stuck)


def test_an_object_that_is_no_likelihood_is_refused():
    with pytest.raises(TypeError, match="expected a Likelihood, got int"):
        check_likelihood(3)


REGRESSION = exact(LabelRegression())


def begun(change):
    """Exact regression from other sites: change(sites) -> sites."""

    def init(key, prior, y, mask=None):
        state = REGRESSION.init(key, prior, y, mask)
        return state._replace(sites=change(state.sites))

    return REGRESSION._replace(init=init)


def with_bound(change):
    """With another bound: change(bound, KL) -> bound."""

    def elbo(state, posterior, y, mask=None):
        return change(REGRESSION.elbo(state, posterior, y, mask), posterior.kl)

    def step(key, state, prior, y, mask=None):
        state, info = REGRESSION.step(key, state, prior, y, mask)
        return state, info._replace(elbo=elbo(state, prior.given(state.sites), y, mask))

    return REGRESSION._replace(step=step, elbo=elbo)


def without_classes(key, prior, y, mask=None):
    real = None if mask is None else mask._replace(classes=jnp.ones_like(mask.classes))
    return REGRESSION.init(key, prior, y, real)


def told_twice(key, state, prior, y, mask=None):
    state, info = REGRESSION.step(key, state, prior, y, mask)
    return state, info._replace(elbo=2 * info.elbo)


@pytest.mark.long
@pytest.mark.parametrize(
    "inference, message",
    [
        (
            begun(lambda sites: sites._replace(precision=0.5 * sites.precision)),
            "slope in the (prior mean|scale)",
        ),
        (begun(lambda sites: sites._replace(shift=0.5 * sites.shift)), "slope in the prior mean"),
        (with_bound(lambda bound, kl: bound + kl), "slope in the prior mean"),
        (with_bound(lambda bound, kl: bound - kl), "slope in the prior mean"),
        (REGRESSION._replace(step=told_twice), "info.elbo is the bound of the state"),
        (REGRESSION._replace(log_evidence=lambda *state: -REGRESSION.log_evidence(*state)), "log_evidence"),
        (REGRESSION._replace(init=without_classes), "a masked class does not change the bound"),
    ],
    ids=["half a precision", "half a shift", "no KL", "two KL", "another bound", "negated evidence", "absent classes"],
)
def test_planted_errors_of_an_inference_are_found(inference, message):
    with pytest.raises(ConformanceError, match=message):
        check_inference(inference)


@pytest.mark.long
def test_laplace_keeps_all_promises_but_a_stationary_bound():
    kernel = laplace(Softmax(), expectation=GaussHermite(12))
    assert {"has an evidence", "ignores padding"} <= set(check_inference(kernel, variational=False))
    with jax.enable_x64(True), pytest.raises(ConformanceError, match="the bound is stationary"):
        conformance._is_stationary(kernel)
