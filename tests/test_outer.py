"""The outer loop: what one training step computes, what it depends on, and what it leaves alone."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.stats import norm

from fewshot.inference import HYPERGRADIENTS, INFERENCE
from fewshot.inference.inner import Code, Info, cvi, exact, gradient
from fewshot.inference.outer.hypergradients import sites, unroll
from fewshot.inference.outer.objectives import EmbeddedTask, Inner, TaskOutcome, elbo, evidence, predictive
from fewshot.inference.outer.svi import _OuterLoop, make_trainer
from fewshot.learners import GaussianProcess
from fewshot.models import KERNELS, MLP, Conv4, LabelRegression, Softmax
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.expectations import GaussHermite
from fewshot.models.process import LatentProcess
from fewshot.tasks import Task

SHAPE, CLASSES, SUPPORT, POINTS, POOL = (4, 4, 1), 3, 3, 9, 4
Y = np.array([0, 1, 2, 0, 1, 2, 2, 1, 0], np.int32)
# Deterministic expectations: nothing but the task depends on a key.
LIKELIHOOD, INFERENCE_KERNEL, STEPS = Softmax(), partial(cvi, expectation=GaussHermite(4)), 3
RATE = 0.1


def images(seed):
    """One task of POINTS images [N, H, W, Ch], bytes; a class has a pattern of its own, seen through noise."""
    rng = np.random.default_rng(seed)
    patterns = rng.uniform(0, 255, size=(CLASSES, *SHAPE))
    return np.clip(patterns[Y] + 40 * rng.normal(size=(POINTS, *SHAPE)), 0, 255).astype(np.uint8)


A, B = images(0), images(1)
POOLS = {"A": [A] * POOL, "B": [B] * POOL, "A or B": [A, A, B, B], "many": [images(s) for s in range(POOL)]}


def draw(pool, key):
    x = pool[jax.random.randint(key, (), 0, POOL)]
    y = jnp.asarray(Y)
    return Task(x[:SUPPORT], y[:SUPPORT], x[SUPPORT:], y[SUPPORT:])


def sampler(name):
    """A task from one of the pools, which is an argument of the compiled step: exchanging it compiles nothing."""
    return jax.tree_util.Partial(draw, jnp.asarray(np.stack(POOLS[name])))


def deep_kernel(kernel="cosine-bn"):
    rngs = nnx.Rngs(3)
    return DeepKernel(MLP(SHAPE, rngs=rngs, width=8), KERNELS[kernel](), rngs=rngs, classes=CLASSES)


def learner():
    return GaussianProcess(deep_kernel(), LIKELIHOOD, INFERENCE_KERNEL, inner_steps=STEPS)


class Training:
    """A trainer whose pool of tasks and whose learning rate can be exchanged without another compilation."""

    def __init__(self, tasks_per_step):
        self.given = learner()
        self.before = leaves_of(self.given)
        optimiser = optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)
        made = make_trainer(jax.random.key(5), self.given, sampler("many"), optimiser, tasks_per_step=tasks_per_step)
        self.trainer = made

    def start(self, rate=RATE):
        def replaced(path, leaf):
            return jnp.full_like(leaf, rate) if "learning_rate" in jax.tree_util.keystr(path) else leaf

        return jax.tree_util.tree_map_with_path(replaced, self.trainer.init())

    def step(self, state, index, pool="many"):
        return self.trainer.step._replace(sampler=sampler(pool))(state, index)

    def learned(self, state):
        return leaves_of(self.trainer.module(state))


def leaves_of(module):
    """Every number in a module by its path, on the host."""
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree.leaves_with_path(nnx.state(module))}


@pytest.fixture(scope="module")
def single():
    return Training(1)


@pytest.fixture(scope="module")
def pair():
    return Training(2)


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], err_msg=name, **tolerance)


# The task of a step


@pytest.mark.long
def test_the_task_of_a_step_does_not_depend_on_its_history(single):
    """Without learning, the loss is a function of the task alone."""
    state, losses = single.start(rate=0.0), []
    for index in range(6):
        state, log = single.step(state, index)
        losses.append(float(log.loss))
    assert len(set(losses)) > 1  # tasks differ
    for index in (4, 1):
        _, log = single.step(single.start(rate=0.0), index)
        assert float(log.loss) == losses[index]


def test_a_step_is_a_function_of_state_and_index(single):
    start = single.start()
    key = np.array(jax.random.key_data(start.rng_key))
    first, log = single.step(start, 3)
    second, again = single.step(single.start(), 3)
    np.testing.assert_array_equal(jax.random.key_data(first.rng_key), key)  # SVI's own key plays no part
    assert jax.tree.map(float, log) == jax.tree.map(float, again)
    assert_same(single.learned(first), single.learned(second), rtol=0)


def test_steps_of_one_dispatch_are_the_steps_one_by_one(single):
    """Every row of the log, and what was learned, to rounding: XLA orders sums in a loop as it likes."""
    state, logs = single.start(), []
    for index in range(2, 5):
        state, log = single.step(state, index)
        logs.append(log)
    together, stacked = single.trainer.step(single.start(), 2, 3)
    assert stacked.loss.shape == (3,)
    expected = jax.tree.map(lambda *values: np.stack(values), *logs)
    jax.tree.map(
        lambda found, wanted: np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6), stacked, expected
    )
    assert_same(single.learned(together), single.learned(state), rtol=1e-4, atol=1e-6)


# The loss


def test_the_loss_is_that_of_the_objective_and_the_priors(single):
    """loss = -[L + log p(phi)] / N, L computed here from the features of the network."""
    state = single.start()
    model, likelihood = single.trainer.module(state).deep_kernel, single.trainer.module(state).likelihood
    _, log = single.step(state, 0, "A")

    @nnx.jit
    def by_hand(model):
        features = model(jnp.asarray(A)[None], train=True)[0]
        y = jnp.asarray(Y)
        task = EmbeddedTask(features[:SUPPORT], y[:SUPPORT], features[SUPPORT:], y[SUPPORT:])
        inner = Inner(INFERENCE_KERNEL(likelihood), STEPS, sites, CLASSES)
        return elbo(jax.random.key(0), inner, likelihood, model.process(), task)

    outcome = by_hand(model)
    assert outcome.points == POINTS
    np.testing.assert_allclose(log.objective, outcome.value / POINTS, rtol=1e-5)
    np.testing.assert_allclose(log.diagnostics["residual"], outcome.info.residual, rtol=1e-3)
    log_prior = norm.logpdf(np.log(10.0), loc=np.log(10.0), scale=prior_scale("log_scale"))
    np.testing.assert_allclose(log.log_prior, log_prior / POINTS, rtol=1e-5)
    np.testing.assert_allclose(log.loss, -(log.objective + log.log_prior), rtol=1e-6)
    assert log.diagnostics["failures"] == 0 and log.diagnostics["clipped"] >= 0


def prior_scale(name, kernel="cosine-bn"):
    return float(KERNELS[kernel]().priors()[name].scale)


@pytest.mark.long
def test_two_tasks_a_step_give_the_mean_of_their_losses_and_gradients(single, pair):
    alone = {name: single.step(single.start(), 0, name) for name in ("A", "B")}
    both = {name: pair.step(pair.start(), 0, name) for name in ("A", "B")}
    for name in ("A", "B"):  # the same task twice is the task
        np.testing.assert_allclose(both[name][1].loss, alone[name][1].loss, rtol=1e-5)
    losses = [float(alone[name][1].loss) for name in ("A", "B")]
    expected = {"A": losses[0], "mixed": np.mean(losses), "B": losses[1]}
    seen = {}
    for index in range(8):
        state, log = pair.step(pair.start(), index, "A or B")
        kind = min(expected, key=lambda name, log=log: abs(expected[name] - float(log.loss)))
        np.testing.assert_allclose(log.loss, expected[kind], rtol=1e-5)
        seen[kind] = state
    assert abs(losses[0] - losses[1]) > 1e-2 and "mixed" in seen
    learned = [single.learned(alone[name][0]) for name in ("A", "B")]
    mean = {name: (learned[0][name] + learned[1][name]) / 2 for name in learned[0]}
    assert_same(pair.learned(seen["mixed"]), mean, rtol=1e-4, atol=2e-6)  # running statistics too


def objective_of_nothing(key, inner, likelihood, process, task):
    """Worth 0 nats whatever is believed: what moves is moved by the priors."""
    del key, inner, likelihood, process
    assert (len(task.support), len(task.y_support), len(task.query)) == (SUPPORT, SUPPORT, POINTS - SUPPORT)
    zero, none = jnp.zeros(()), jnp.zeros((), int)
    return TaskOutcome(zero, len(task.y_support) + len(task.y_query), Info(zero, zero, none + Code.OK, none))


def test_priors_of_the_hyperparameters_enter_with_the_weight_of_one_point():
    model = deep_kernel("rbf")
    model.hyper["log_scale"][...] = jnp.asarray(1.0)
    model.hyper["log_lengthscale"][...] = jnp.asarray(0.5)
    likelihood = LabelRegression(0.5)
    given = GaussianProcess(model, likelihood, exact, objective=objective_of_nothing, inner_steps=1)
    trainer = make_trainer(jax.random.key(0), given, sampler("A"), optax.sgd(1.0))
    before = leaves_of(model)
    state, log = trainer.step(trainer.init(), 0)
    learned, learned_likelihood = trainer.module(state).deep_kernel, trainer.module(state).likelihood
    values = {"log_scale": 1.0, "log_lengthscale": 0.5, "log_noise": np.log(0.5)}
    priors = {**model.kernel.priors(), **likelihood.priors()}
    assert values.keys() == priors.keys()
    log_prior = sum(float(priors[name].log_prob(value)) for name, value in values.items())
    np.testing.assert_allclose(log.loss, -log_prior / POINTS, rtol=1e-5)
    after = {**jax.device_get(learned.hyperparameters()), "log_noise": np.log(learned_likelihood.noise)}
    for name, value in values.items():
        pull = (float(priors[name].loc) - value) / float(priors[name].scale) ** 2
        np.testing.assert_allclose(after[name], value + pull / POINTS, rtol=1e-5, err_msg=name)
    weights = {name: value for name, value in leaves_of(learned).items() if "hyper" not in name}
    assert_same(weights, {name: before[name] for name in weights}, rtol=0)


def test_learning_lowers_the_loss(single):
    state, losses = single.start(), []
    for index in range(30):
        state, log = single.step(state, index, "A")
        losses.append(float(log.loss))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.1  # nats a point


def test_a_task_that_fails_is_counted(pair):
    """Parameters that are not numbers make every inner loop fail; the step still returns and says so."""

    def spoilt(leaf):
        return leaf * jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    broken = jax.tree.map(spoilt, pair.start())
    _, log = pair.step(broken, 0)
    assert log.diagnostics["failures"] == 2


# State


def test_running_statistics_start_from_the_module_and_record_each_step(single):
    state = single.start()
    assert_same(single.learned(state), single.before, rtol=0)
    model = single.trainer.module(state).deep_kernel
    features = np.asarray(jax.jit(lambda x: model.backbone(x / 255.0, True))(jnp.asarray(A, jnp.float32)[None]))[0]
    momentum = model.norm.momentum
    state, _ = single.step(state, 0, "A")
    learned = single.trainer.module(state).deep_kernel
    np.testing.assert_allclose(learned.norm.mean[...], (1 - momentum) * features.mean(0), rtol=1e-4, atol=1e-6)
    expected = momentum + (1 - momentum) * features.var(0)
    np.testing.assert_allclose(learned.norm.variance[...], expected, rtol=1e-4)


def test_the_module_passed_in_is_left_alone(single, pair):
    """By now both have trained: no value has changed, none is a tracer, none was given away to a step."""
    for training in (single, pair):
        state, _ = training.step(training.start(), 0)
        assert_same(leaves_of(training.given), training.before, rtol=0)
        leaves = jax.tree.leaves(nnx.state(training.given))
        assert all(isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        learned = training.learned(state)
        assert any(not np.array_equal(learned[name], training.before[name]) for name in learned)


def test_a_module_taken_from_a_state_survives_the_next_step(single):
    """Steps are given the arrays of their state to write over."""
    state, _ = single.step(single.start(), 0)
    model = single.trainer.module(state)
    values = leaves_of(model)
    single.step(state, 1)
    assert_same(leaves_of(model), values, rtol=0)


def test_a_likelihood_without_parameters_comes_back_itself(single):
    assert single.trainer.module(single.start()).likelihood is LIKELIHOOD


@pytest.mark.long
def test_the_predictive_objective_is_the_log_probability_of_the_queries_labels():
    """Against (R5) by NumPy, for exact inference from the support; queries do not inform each other."""
    likelihood, points = LabelRegression(0.3), np.random.default_rng(0).normal(size=(POINTS, 2))
    process = LatentProcess(KERNELS["linear"](), {"log_scale": jnp.log(2.0)})  # k = 2 x.z / 2
    task = EmbeddedTask(*map(jnp.asarray, (points[:SUPPORT], Y[:SUPPORT], points[SUPPORT:], Y[SUPPORT:])))
    outcome = predictive(jax.random.key(0), Inner(exact(likelihood), 1, sites, CLASSES), likelihood, process, task)
    support, query = points[:SUPPORT], points[SUPPORT:]
    gain = np.linalg.solve(support @ support.T + 0.3 * np.eye(SUPPORT), support @ query.T)
    mean = (2 * np.eye(CLASSES)[Y[:SUPPORT]] - 1).T @ gain
    variance = np.sum(query**2, axis=1) - np.sum(support @ query.T * gain, axis=0)
    logits = 2 * mean / (variance + 0.3)
    own = logits[Y[SUPPORT:], np.arange(POINTS - SUPPORT)] - np.log(np.exp(logits).sum(axis=0))
    np.testing.assert_allclose(outcome.value, own.sum(), rtol=1e-4)
    assert outcome.points == POINTS - SUPPORT


@pytest.mark.parametrize(
    "inference, objective, hypergradient, message",
    [
        (cvi, evidence, unroll, "log Z gives a gradient at fixed sites"),
        (gradient, elbo, sites, "inference gradient .* it has no sites"),
        (gradient, evidence, unroll, "inference gradient .* it has no sites"),
        (gradient, predictive, sites, "inference gradient .* it has no sites"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_at_construction(inference, objective, hypergradient, message):
    with pytest.raises(ValueError, match=message):
        GaussianProcess(deep_kernel(), Softmax(), inference, objective=objective, hypergradient=hypergradient)


# One forward and one backward pass of the network a step

OPERATION = re.compile(r"stablehlo\.(convolution|dot_general)\b")
SIGNATURE = re.compile(r"\((tensor<[^)]*)\) -> (tensor<[^>]*>)")


def products(text):
    """How often each convolution and each matrix product, told apart by its shapes, runs in a StableHLO program.

    A function counts as often as it is called; a loop's body counts as one call, so `inside_loops` looks at those.
    """
    own, calls = {}, {}
    name = None
    for line in text.splitlines():
        if match := re.search(r"func\.func \w+ @([\w.]+)", line):
            name = match[1]
            own[name], calls[name] = Counter(), Counter()
        elif match := OPERATION.search(line):
            own[name][(match[1], *SIGNATURE.search(line).groups())] += 1
        elif match := re.search(r"\bcall @([\w.]+)", line):
            calls[name][match[1]] += 1

    def total(function):
        counts = Counter(own[function])
        for callee, times in calls[function].items():
            for operation, count in total(callee).items():
                counts[operation] += times * count
        return counts

    return total("main")


def convolutions(counts):
    return sum(count for (operation, *_), count in counts.items() if operation == "convolution")


CONV_SHAPE = (16, 16, 1)


def conv_images():
    x = jnp.zeros((POINTS, *CONV_SHAPE), jnp.uint8)
    return Task(x[:SUPPORT], jnp.asarray(Y[:SUPPORT]), x[SUPPORT:], jnp.asarray(Y[SUPPORT:]))


@pytest.fixture(scope="module")
def programs():
    """The training step and, on the same images, value and gradient of the network alone; both lowered.

    The network rounds to bfloat16, so that it can be told from what must not.
    """
    rngs = nnx.Rngs(0)
    network = Conv4(CONV_SHAPE, rngs=rngs, width=5, precision="bfloat16")
    model = DeepKernel(network, KERNELS["rbf"](), rngs=rngs, classes=CLASSES)
    given = GaussianProcess(model, LIKELIHOOD, INFERENCE_KERNEL, inner_steps=STEPS)
    trainer = make_trainer(jax.random.key(0), given, lambda key: conv_images(), optax.adam(1e-3), tasks_per_step=2)
    step = trainer.step.lower(trainer.init(), 0)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x):
        merged = nnx.merge(graph, params, rest, copy=True)
        return jnp.sum(jnp.sin(merged(x, train=True))), nnx.state(merged, nnx.BatchStat)

    x = jnp.zeros((2, POINTS, *CONV_SHAPE), jnp.uint8)
    alone = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, x)
    return step, alone


def test_a_step_runs_the_network_forward_and_backward_once(programs):
    """Every convolution of the network, and every matrix product of its shapes, occurs as often as in one pass."""
    step, alone = (products(program.as_text()) for program in programs)
    assert convolutions(alone) > 0
    assert convolutions(step) == convolutions(alone)
    assert {operation: step[operation] for operation in alone} == dict(alone)


def test_only_the_network_is_less_exact_than_float32(programs):
    """Every convolution is in bfloat16; every product, factorisation and solve of the GP is in exact float32."""
    lines = programs[0].as_text().splitlines()
    convolved = [line for line in lines if "stablehlo.convolution" in line]
    assert convolved and all(line.count("bf16") == 3 for line in convolved)
    multiplied = [line for line in lines if "stablehlo.dot_general" in line]
    assert multiplied and all("HIGHEST, HIGHEST" in line and "bf16" not in line for line in multiplied)
    algebra = [line for line in lines if "cholesky" in line.lower() or "potrf" in line or "triangular_solve" in line]
    assert algebra and not any("bf16" in line for line in algebra)


def test_no_convolution_runs_inside_a_loop(programs):
    """XLA's CPU compiler falls back to scalar code there."""
    text = programs[0].as_text()
    depth, inside = 0, []
    for line in text.splitlines():
        inside.append(depth > 0 and "stablehlo.convolution" in line)
        depth = max(depth + line.count("{") - line.count("}"), 0) if depth or "stablehlo.while" in line else 0
    assert not any(inside)


@pytest.mark.slow
def test_the_compiled_step_holds_the_convolutions_of_one_pass(programs):
    """The same count after XLA's optimisation."""
    counts = [len(re.findall(r" convolution\(", program.compile().as_text())) for program in programs]
    assert counts[0] == counts[1] > 0


def test_the_count_would_see_a_second_pass():
    def network(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def twice(x, kernel):
        inner = jax.jit(network)
        return jnp.sum(inner(x, kernel) + inner(2 * x, kernel))

    x, kernel = jnp.ones((2, 8, 8, 1)), jnp.ones((3, 3, 1, 4))
    once = products(jax.jit(network).lower(x, kernel).as_text())
    assert convolutions(once) == 1
    assert convolutions(products(jax.jit(twice).lower(x, kernel).as_text())) == 2


def test_hypergradients_and_inference_used_here_are_registered():
    assert HYPERGRADIENTS["sites"] is sites and INFERENCE["cvi"] is cvi


def test_no_two_keys_of_two_steps_are_alike():
    """Those that draw the tasks, and those of their inner loops."""
    loop = object.__new__(_OuterLoop)
    vars(loop).update(keys=jax.random.split(jax.random.key(0), 3), tasks_per_step=4)
    keys = [jax.random.key_data(part) for step in (0, 1) for part in loop._keys(jnp.asarray(step))]
    assert len({tuple(key) for key in np.concatenate(keys).tolist()}) == 16
