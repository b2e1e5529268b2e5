"""Small problems shared by the numerical tests, and the precision that a test runs in."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fewshot.inference.inner.settle import settle
from fewshot.inference.predictive import predict
from fewshot.learners.base import Learner, categorical
from fewshot.models import KERNELS
from fewshot.models.expectations import Points
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.process import LatentProcess


def double(test):
    """Runs one test with 64-bit numbers; the rest of the session stays at 32 bits."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with jax.enable_x64(True):
            return test(*args, **kwargs)

    return run


class Problem(NamedTuple):
    """A task: prior at N labelled points, labels, and Q new inputs."""

    prior: GaussianPrior
    y: jax.Array
    query: Query


def hyper_of(kernel, **changes):
    return {**kernel.initial(), **{name: float(value) for name, value in changes.items()}}


def relu_features(rng, labels, features, noise=1.0):
    """ReLU-like features with class structure: max(0, class centre + noise)."""
    centres = rng.normal(size=(int(labels.max()) + 1, features))
    return np.maximum(centres[labels] + noise * rng.normal(size=(len(labels), features)), 0.0)


def problem(seed, classes=3, points=9, queries=5, features=6, scale=4.0, kernel="rbf", mean=True):
    """A random task; labels have unequal counts of at least one, the prior mean is not zero unless mean=False."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, points - classes)])
    x = jnp.asarray(relu_features(rng, np.concatenate([labels, rng.integers(0, classes, queries)]), features))
    chosen = KERNELS[kernel]()
    hyper = hyper_of(chosen, log_scale=np.log(scale))
    prior = LatentProcess(chosen, hyper).prior(x[:points], classes)
    query = LatentProcess(chosen, hyper).query(x[:points], x[points:], classes)
    if mean:
        level = jnp.asarray(rng.normal(size=(classes, 1)))
        prior, query = prior._replace(mean=prior.mean + level), query._replace(mean=query.mean + level)
    return Problem(prior, jnp.asarray(labels, jnp.int32), query)


class FixedPrior(Learner):
    """A learner whose inputs are positions in a prior that is given, with any inference kernel."""

    def __init__(self, prior, kernel, likelihood):
        self.given, self.kernel, self.likelihood = nnx.data(prior), kernel, nnx.static(likelihood)

    def fit(self, key, support, y, classes, mask=None):
        covariance = self.given.covariance[jnp.ix_(support, support)]
        prior = GaussianPrior(self.given.mean[:, support], covariance)
        state, code = settle(key, self.kernel, prior, y, mask)
        present = None if mask is None else mask.classes
        return (support, self.kernel.posterior(state, prior), present), code

    def predict(self, key, state, query):
        support, posterior, present = state
        new = Query(
            self.given.mean[:, query],
            self.given.covariance[jnp.ix_(query, support)],
            jnp.diagonal(self.given.covariance)[query],
        )
        return categorical(predict(key, self.likelihood, posterior, new, present))


class FixedPoints:
    """An expectation rule that always gives the same nodes."""

    def __init__(self, points: Points):
        self.fixed = points

    def points(self, key, classes, dtype=None):
        del key, classes, dtype
        return self.fixed


def accepts(constructor, name):
    return name in inspect.signature(constructor).parameters


def defined(kind):
    """The project's classes below one that have none below themselves: what a registry must hold."""
    below = [sub for sub in kind.__subclasses__() if sub.__module__.startswith("fewshot.models.")]
    return set().union(*map(defined, below)) if below else {kind}
