"""Few-shot tasks that no data set would have: every pair of inference and likelihood, every kernel, scales 1e-4 to 1e6.

Tasks of a program share a padded shape; masks say which points and classes are real. Counted are predictions that are
NaN, negative or no distribution without a result code that says so, codes that are none, tracebacks, and hangs.
"""

import collections
import faulthandler
import math
import time
import traceback
from functools import partial
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from cells import CELLS
from problems import accepts, hyper_of

from fewshot.inference import INFERENCE
from fewshot.inference.inner.base import Code, Mask
from fewshot.inference.inner.settle import settle
from fewshot.inference.predictive import predict
from fewshot.learners.base import categorical
from fewshot.models import KERNELS, LIKELIHOODS
from fewshot.models.gaussian import GaussianPrior, Query
from fewshot.models.likelihoods import LogisticSoftmax
from fewshot.models.process import LatentProcess

FEATURES, QUERIES, HANG = 6, 4, 60.0
SMALL, MIDDLE, LARGE = (5, 10), (12, 24), (50, 60)  # classes and points of a padded task
LARGE_FOR = (("cvi", "softmax"), ("laplace", "softmax"), ("cavi", "logistic-softmax"), ("exact", "gaussian"))
BATCH = {SMALL: 64, MIDDLE: 16, LARGE: 4}
SHARE = {SMALL: 0.88, MIDDLE: 0.1, LARGE: 0.02}
SCALES = (1e-4, 1e6)  # of the features and, squared, of the kernel
SLICES = 4  # a sweep of Gibbs for logistic-softmax: answers are wanted here, not mixing
MEANS = (0.0, -5.0, 5.0, -50.0)
VALUES = {"log_temperature": (np.log(0.05), np.log(5.0)), "log_noise": (np.log(1e-3), np.log(1e2))}


class Program(NamedTuple):
    """One compilation: the pair, the padded shape, and the precision."""

    inference: str
    likelihood: str
    shape: tuple[int, int]
    double: bool


class Batch(NamedTuple):
    """Tasks of one program: features [B, N + Q, D], labels [B, N], real points [B, N] and classes [B, C]."""

    x: np.ndarray
    y: np.ndarray
    points: np.ndarray
    classes: np.ndarray


def programs():
    """All of them, and the share of the tasks that each gets."""
    found = [Program(*cell, shape, False) for shape in (SMALL, MIDDLE) for cell in CELLS]
    found += [Program(*cell, SMALL, True) for cell in (("cvi", "softmax"), ("gibbs", "logistic-softmax"))]
    found += [Program(*cell, LARGE, False) for cell in LARGE_FOR]
    sharing = collections.Counter(program.shape for program in found)
    return [(program, SHARE[program.shape] / sharing[program.shape]) for program in found]


def features(rng, count):
    """Features [count, D] of one kind: common, equal, on a line, few different ones, sparse, with outliers, zero."""
    x = rng.normal(size=(count, FEATURES))
    kind = rng.integers(8)
    if kind == 1:
        x = np.tile(x[:1], (count, 1))
    elif kind == 2:
        x = rng.normal(size=(count, 1)) * x[:1]
    elif kind == 3:
        x = x[rng.integers(3, size=count)]
    elif kind == 4:
        x = np.maximum(x - 1.5, 0.0)
    elif kind == 5:
        x = x * np.exp(3 * rng.normal(size=(count, 1)))
    elif kind == 6:
        x = np.zeros_like(x)
    return x * np.exp(rng.uniform(*np.log(SCALES)))


def drawn(rng, shape, count):
    """A batch of tasks: 2 or more real classes, any number of points for each, sometimes one label only."""
    classes, points = shape
    x = np.stack([features(rng, points + QUERIES) for _ in range(count)]).astype(np.float32)
    real_classes = rng.integers(2, classes + 1, size=count)
    real_points = rng.integers(1, points + 1, size=count)
    y = rng.integers(0, real_classes[:, None], size=(count, points))
    y = np.where(rng.random((count, 1)) < 0.2, y[:, :1], y)
    return Batch(x, y, np.arange(points) < real_points[:, None], np.arange(classes) < real_classes[:, None])


def at_random(rng, likelihood):
    """The likelihood at parameters far from its first ones, and how it is described."""
    values = {name: rng.uniform(*VALUES[name]) for name in likelihood.parameters()}
    return likelihood.with_parameters({name: jnp.asarray(value) for name, value in values.items()})


def kernel_of(rng, name):
    """A base kernel and its hyper-parameters, some of them extreme."""
    kernel = KERNELS[name]()
    extreme = {key: rng.uniform(-5, 5) for key in kernel.initial()}
    return kernel, hyper_of(kernel, **extreme | {"log_scale": rng.uniform(*np.log(SCALES))})


def compiled(program):
    """(keys, prior, query, y, mask, likelihood) -> probabilities [B, Q, C] and codes [B]."""
    make = INFERENCE[program.inference]
    settings = {"chains": 5} if accepts(make, "chains") else {}

    def one(likelihood, key, prior, query, y, mask):
        kernel = make(likelihood, **settings)
        state, code = settle(key, kernel, prior, y, mask)
        found = predict(key, likelihood, kernel.posterior(state, prior), query, mask.classes)
        checked = categorical(found, query.cross, query.variance)
        return found, jnp.where(checked.code == Code.OK, code, checked.code)

    return jax.jit(lambda likelihood, *task: jax.vmap(partial(one, likelihood))(*task))


@partial(jax.jit, static_argnums=(0, 2, 3))
def process(kernel, hyper, classes, points, x, mean):
    """Priors and queries of a batch."""

    def one(x):
        latent = LatentProcess(kernel, hyper)
        prior, query = latent.prior(x[:points], classes), latent.query(x[:points], x[points:], classes)
        return GaussianPrior(prior.mean + mean, prior.covariance), Query(query.mean + mean, query.cross, query.variance)

    return jax.vmap(one)(x)


def faults(probabilities, codes, classes):
    """What is wrong with the answers of a batch, task by task, though the code says that they can be used."""
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(probabilities).all(axis=(1, 2))
        known = np.isin(codes, [int(code) for code in Code])
        total = np.abs(probabilities.sum(-1) - 1).max(-1) < 1e-3
        inside = (probabilities >= 0).all(axis=(1, 2)) & (np.where(classes[:, None], 0, probabilities) == 0).all((1, 2))
    told = codes == Code.NON_FINITE
    found = {"bad code": ~known, "NaN": ~finite & ~told, "no distribution": finite & ~told & ~(total & inside)}
    return {name: np.flatnonzero(bad) for name, bad in found.items() if bad.any()}


def solved(rng, program, function):
    """One batch of one program; its faults by name, described, and the counts of its result codes."""
    names = list(KERNELS)
    kernel, hyper = kernel_of(rng, names[rng.integers(len(names))])
    classes, points = program.shape
    batch = drawn(rng, program.shape, BATCH[program.shape])
    likelihood, mean = at_random(rng, LIKELIHOODS[program.likelihood]()), rng.choice(MEANS)
    dtype = jnp.result_type(float)
    prior, query = process(kernel, hyper, classes, points, jnp.asarray(batch.x, dtype), jnp.asarray(mean, dtype))
    mask = Mask(jnp.asarray(batch.points), jnp.asarray(batch.classes))
    keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), len(batch.x))
    answers = function(likelihood, keys, prior, query, jnp.asarray(batch.y, jnp.int32), mask)
    probabilities, codes = map(np.asarray, answers)
    told = f"{program}: {type(kernel).__name__} {hyper}, mean {mean}, {likelihood}"
    found = [(fault, f"{told}, tasks {which}") for fault, which in faults(probabilities, codes, batch.classes).items()]
    return found, collections.Counter(codes.tolist())


def attempt(rng, program, function):
    """`solved`, where a traceback is a fault too, and its seconds of processor time: other programs may run beside."""
    begun = time.process_time()
    try:
        found, codes = solved(rng, program, function)
    except Exception:
        found, codes = [("traceback", f"{program}: {traceback.format_exc()}")], collections.Counter()
    return found, codes, time.process_time() - begun


def tasks_of(number, count):
    """How many of `count` tasks one program has: whole batches, so that all programs together have as many or more."""
    program, share = programs()[number]
    size = BATCH[program.shape]
    return math.ceil(count * share / size) * size


def run_program(number, count, seed):
    """The share that one program has of `count` tasks: faults, result codes, how many tasks, and a line about it."""
    program, rng = programs()[number][0], np.random.default_rng([seed, number])
    batches = tasks_of(number, count) // BATCH[program.shape]
    faults_found, codes_found, seconds_of_all = [], collections.Counter(), 0.0
    faulthandler.dump_traceback_later(1200, exit=False)  # says where a program that never ends is
    with jax.enable_x64(program.double), mock.patch.object(LogisticSoftmax, "most_slices", SLICES):
        function = compiled(program)
        for index in range(batches):
            found, codes, seconds = attempt(rng, program, function)
            if index and seconds > HANG:  # the first one compiles
                found.append(("hang", f"{program}: {seconds:.0f} s"))
            faults_found, codes_found = faults_found + found, codes_found + codes
            seconds_of_all += seconds
    faulthandler.cancel_dump_traceback_later()
    function.clear_cache()  # and not those of the priors, which programs share
    told = f"{'-'.join(program[:2])} {program.shape}: {batches} batches, {seconds_of_all:.0f} s of processor time"
    return faults_found, codes_found, sum(codes_found.values()), told
