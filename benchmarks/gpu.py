"""One GPU: is it correct, and how fast, in one call of under eight minutes with a short table last.

    python benchmarks/gpu.py [--data-root DIR] [--json FILE] [--seconds 450]      and with --quick a rehearsal on a CPU

1. Correct: a few training steps of Conv4 against the same steps on the CPU, at every precision of its convolutions.
2. Training of Conv4 on 84x84x3, 5-way 1-shot, 16 queries a class: episodes a second for T tasks a step, many steps a
   dispatch, against the two roofs: operations at the measured peak of that precision, and bytes at the measured memory
   bandwidth (counted as in roofline.py; bfloat16 stores the convolutions' output in half the bytes).
3. What stands between: the convolution's own gradients against autodiff's, and the factorisations of the inner loop.
4. Polya-Gamma draws a second.
5. With --data-root (omniglot.npz): a complete run of 60,000 episodes, its minutes and its accuracy.

What the time left does not allow is skipped and named.
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from roofline import count
from timing import clock, markdown

from fewshot.inference.inner import cvi
from fewshot.inference.outer.objectives import leave_one_out
from fewshot.inference.outer.svi import Trainer, make_trainer
from fewshot.learners import GaussianProcess
from fewshot.models import KERNELS, Conv4, Softmax
from fewshot.models.convolution import conv3x3
from fewshot.models.deep_kernel import DeepKernel
from fewshot.models.gaussian import GaussianPrior, Sites
from fewshot.models.polya_gamma import sample_polya_gamma_one
from fewshot.runners import meta_train
from fewshot.tasks import make_dataset, sample_task
from fewshot.training.configuration import RunConfig

WAY, SHOT, QUERY, INNER_STEPS = 5, 1, 16, 10
IMAGES = WAY * (SHOT + QUERY)
TOLERANCE = {"tensorfloat32": 1e-2, "float32": 1e-3, "bfloat16": 5e-2}  # of the loss, relative, after a few steps


class Sizes(NamedTuple):
    """What is run: images, tasks a step, steps a dispatch for one task, seconds a timing, sizes of the peaks."""

    shape: tuple[int, int, int] = (84, 84, 3)
    width: int = 64
    tasks: tuple[int, ...] = (16, 64, 4, 1)
    together: int = 64
    seconds: float = 1.5
    matrix: int = 8192
    triad: int = 1 << 27
    draws: int = 10_000_000
    checked: tuple[int, int, int] = (28, 28, 1)
    precisions: tuple[str, ...] = ("tensorfloat32", "float32", "bfloat16")


CHECKED_TASKS, CHECKED_STEPS = 2, 3
# A rehearsal: what is timed is what was checked, so that little is compiled.
QUICK = Sizes((16, 16, 1), 4, (2,), 6, 0.1, 256, 1 << 18, 100_000, (16, 16, 1), ("tensorfloat32", "bfloat16"))


def main() -> None:
    arguments = parse()
    sizes, end = (QUICK if arguments.quick else Sizes()), time.monotonic() + arguments.seconds
    results: dict[str, object] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    print(f"{results['device']}, jax {jax.__version__}", flush=True)
    sections: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
        "correct": partial(correctness, sizes),
        "peaks": partial(peaks, sizes),
        "training": lambda: training(sizes, results["peaks"][0]),
        "between": partial(between, sizes),
        "polya-gamma": partial(polya_gamma, sizes),
        "omniglot": partial(omniglot, arguments.data_root, arguments.episodes),
    }
    for name, section in sections.items():
        results[name] = []
        for row in section():
            results[name].append(row)
            print(f"[{end - time.monotonic():4.0f} s left] {name}: {row}", flush=True)
            if time.monotonic() > end and name in ("training", "between"):
                results.setdefault("skipped", []).append(f"what was left of {name}")
                break
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")
    print(summary(results))
    if not all(row["agrees"] for row in results["correct"]):
        raise SystemExit("losses differ from the CPU's by more than the tolerance")


def trainer(shape: tuple[int, int, int], width: int, tasks: int, precision: str) -> Trainer:
    """Training on random images of 64 classes that stay on the device."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(64), SHOT + QUERY)
    patterns = rng.integers(0, 256, (64, *shape))[labels]
    noisy = np.clip(patterns + rng.normal(0, 30, (len(labels), *shape)), 0, 255).astype(np.uint8)
    network = Conv4(shape, rngs=nnx.Rngs(0), width=width, precision=precision)
    deep_kernel = DeepKernel(network, KERNELS["rbf"](), rngs=nnx.Rngs(1), classes=WAY)
    return make_trainer(
        jax.random.key(0),
        GaussianProcess(deep_kernel, Softmax(), cvi, objective=leave_one_out, inner_steps=INNER_STEPS),
        jax.tree_util.Partial(_draw, make_dataset(noisy, labels)),
        optax.adam(1e-3),
        tasks_per_step=tasks,
    )


def _draw(dataset: Any, key: jax.Array) -> Any:
    return sample_task(key, dataset, WAY, SHOT, QUERY)


@functools.cache
def program(shape: tuple[int, int, int], width: int, tasks: int, precision: str, together: int) -> tuple[Any, ...]:
    """The trainer, `together` steps of it as one compiled program, and the seconds of the compilation."""
    made = trainer(shape, width, tasks, precision)
    start = time.perf_counter()
    compiled = made.step.lower(made.init(), 0, together).compile()
    return made, compiled, time.perf_counter() - start


def correctness(sizes: Sizes) -> Iterator[dict[str, object]]:
    """Losses of the first steps here, in one dispatch, and on the CPU, in float32 and one by one."""
    expected = []
    with jax.default_device(jax.devices("cpu")[0]):
        made = trainer(sizes.checked, sizes.width, CHECKED_TASKS, "float32")
        state = made.init()
        for index in range(CHECKED_STEPS):
            state, log = made.step(state, index)
            expected.append(float(log.loss))
    for precision in sizes.precisions:
        made, compiled, _ = program(sizes.checked, sizes.width, CHECKED_TASKS, precision, CHECKED_STEPS)
        _, log = compiled(made.init(), 0, made.step.sampler)
        error = float(np.max(np.abs(np.asarray(log.loss) / np.array(expected) - 1)))
        yield {"precision": precision, "relative error of losses": error, "agrees": error < TOLERANCE[precision]}


def peaks(sizes: Sizes) -> Iterator[dict[str, object]]:
    """Operations a second in products of each precision, and bytes a second of a triad."""
    square = jnp.ones((sizes.matrix, sizes.matrix))
    modes = {
        "tensorfloat32": (square, jax.lax.Precision.HIGH),
        "float32": (square, jax.lax.Precision.HIGHEST),
        "bfloat16": (square.astype(jnp.bfloat16), None),
    }
    row = {}
    for name in sizes.precisions:
        x, precision = modes[name]
        product = jax.jit(lambda x, precision=precision: jnp.matmul(x, x, precision=precision))
        row[name] = 2.0 * sizes.matrix**3 / seconds_of(lambda x=x, product=product: product(x), sizes.seconds)
    b, c = jnp.ones(sizes.triad), jnp.ones(sizes.triad)
    triad = jax.jit(lambda b, c: b + 3.0 * c)
    row["bytes"] = 3 * 4 * sizes.triad / seconds_of(lambda: triad(b, c), sizes.seconds)
    yield row


def training(sizes: Sizes, peak: dict[str, float]) -> Iterator[dict[str, object]]:
    """Episodes a second by precision and tasks a step; the default precision comes first."""
    default, *others = sizes.precisions
    cells = [(default, tasks) for tasks in sizes.tasks]
    cells += [(precision, tasks) for tasks in sizes.tasks for precision in others]
    counted = count(IMAGES, sizes.shape)
    operations = counted.operations * (sizes.width / 64) ** 2  # of the inner blocks, which dominate
    for precision, tasks in cells:
        moved = counted.bytes * sizes.width / 64 / (2 if precision == "bfloat16" else 1)
        roofs = {"operations": peak[precision] / operations, "bytes": peak["bytes"] / moved}
        cell = {"precision": precision, "tasks": tasks}
        try:
            rate, compilation, memory = episodes_a_second(sizes, precision, tasks)
        except (
            jax.errors.JaxRuntimeError
        ) as error:  # too large for the memory, or for a library: the others still count
            yield cell | {"error": str(error).splitlines()[0]}
            continue
        yield cell | {
            "episodes a second": rate,
            "roof of operations": roofs["operations"],
            "roof of bytes": roofs["bytes"],
            "share of the lower": rate / min(roofs.values()),
            "compiled in s": compilation,
            "temporaries in GB": memory / 1e9,
        }


def episodes_a_second(sizes: Sizes, precision: str, tasks: int) -> tuple[float, float, float]:
    """The rate of dispatches of many steps, the seconds of their compilation, and XLA's temporaries."""
    together = max(1, sizes.together // tasks)
    made, compiled, compilation = program(sizes.shape, sizes.width, tasks, precision, together)
    state = made.init()

    def run() -> Any:
        nonlocal state
        state, log = compiled(state, 0, made.step.sampler)
        return log.loss

    rate = together * tasks / seconds_of(run, sizes.seconds)
    return rate, compilation, compiled.memory_analysis().temp_size_in_bytes


def seconds_of(run: Callable[[], Any], least: float) -> float:
    """Seconds of one call: as many in a row as fit into `least`, the queue never empty, after two to warm up."""
    once = [clock(run) for _ in range(2)][-1]
    repeats = max(2, int(least / max(once, 1e-6)))
    start = time.perf_counter()
    last = None
    for _ in range(min(repeats, 1000)):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / min(repeats, 1000)


def between(sizes: Sizes) -> Iterator[dict[str, object]]:
    """Parts of a step of the first number of tasks: one convolution's gradients, and the inner loop's algebra."""
    tasks, (height, columns, _) = sizes.tasks[0], sizes.shape
    x = jax.random.normal(jax.random.key(0), (tasks * IMAGES, height // 2, columns // 2, sizes.width))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, sizes.width, sizes.width))
    dimensions = ("NHWC", "HWIO", "NHWC")
    usual = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=dimensions)
    for name, convolve in (("ours", conv3x3), ("autodiff", usual)):
        gradient = jax.jit(jax.grad(lambda x, kernel, convolve=convolve: (convolve(x, kernel) ** 2).sum(), (0, 1)))
        took = 1e3 * seconds_of(lambda gradient=gradient: gradient(x, kernel), sizes.seconds)
        yield {"part": f"convolution of block 2, forward and gradients, {name}", "ms": took}
    features = jax.random.normal(jax.random.key(2), (tasks, IMAGES, 64))
    covariance = jnp.einsum("tnd,tmd->tnm", features, features, precision="highest")
    prior = GaussianPrior(jnp.zeros((tasks, WAY, IMAGES)), covariance)
    ones = jnp.ones((tasks, WAY, IMAGES))
    parts = {
        "factorisations of a step": jax.jit(
            lambda prior: jnp.linalg.cholesky(prior.covariance[:, None] + jnp.eye(IMAGES) * ones[..., None])
        ),
        "factorisations, solves and marginals of a step": jax.jit(
            lambda prior: jax.vmap(GaussianPrior.given)(prior, Sites(ones, ones)).kl
        ),
    }
    for name, part in parts.items():
        took = 1e3 * INNER_STEPS * seconds_of(lambda part=part: part(prior), sizes.seconds)
        yield {"part": f"{name} of {tasks} tasks ({INNER_STEPS} inner steps)", "ms": took}


def polya_gamma(sizes: Sizes) -> Iterator[dict[str, object]]:
    """PG(1, z) with z ~ N(0, 4)."""
    z = 2 * jax.random.normal(jax.random.key(0), (sizes.draws,))
    keys = iter(jax.random.split(jax.random.key(1), 2000))
    draw = jax.jit(sample_polya_gamma_one)
    took = seconds_of(lambda: draw(next(keys), z), sizes.seconds)
    yield {"million draws a second": 1e-6 * sizes.draws / took}


def omniglot(data_root: str | None, episodes: int) -> Iterator[dict[str, object]]:
    """A complete run, 5-way 1-shot and 4 tasks a step, rendering no glyphs: training, validations and test."""
    if data_root is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        settings = {"trainer.validate_every": max(1, episodes // 20)}
        result = meta_train.main(
            RunConfig(
                dataset="omniglot",
                data_root=data_root,
                episodes=episodes,
                tasks_per_step=4,
                settings=settings,
                run_dir=str(Path(folder) / "run"),
            )
        )
        took = time.perf_counter() - start
    test = result["test"]["trained"]
    kept = {name: test[name] for name in ("accuracy", "accuracy_ci95", "nll", "ece")}
    yield {"episodes": episodes, "minutes": took / 60, **kept}


def summary(results: dict[str, object]) -> str:
    """The short table."""
    lines = []
    for row in results["correct"]:
        verdict = "yes" if row["agrees"] else "NO"
        lines.append([f"losses as on the CPU, {row['precision']}", verdict, f"{row['relative error of losses']:.1e}"])
    for row in results["training"]:
        label = f"episodes a second, {row['precision']}, T = {row['tasks']}"
        if "error" in row:
            lines.append([label, "failed", row["error"][:60]])
        else:
            share = f"{100 * row['share of the lower']:.0f}% of the lower roof"
            lines.append([label, number(row["episodes a second"]), share])
    for row in results["peaks"]:
        for name, value in row.items():
            lines.append([f"measured peak, {name}", number(value / 1e12), "T a second"])
    lines += [[row["part"], f"{row['ms']:.2f}", "ms"] for row in results["between"]]
    lines += [["Polya-Gamma", number(row["million draws a second"]), "M a second"] for row in results["polya-gamma"]]
    for row in results["omniglot"]:
        accuracy = f"{100 * row['accuracy']:.1f} +- {100 * row['accuracy_ci95']:.1f}%"
        lines.append([f"Omniglot, {row['episodes']} episodes", f"{row['minutes']:.1f} min", accuracy])
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    lines += [["largest memory in use", f"{peak / 1e9:.1f}", "GB"]] if peak else []
    lines += [["skipped for want of time", text, ""] for text in results.get("skipped", [])]
    return "\n" + markdown(["", results["device"], ""], lines)


def number(value: float) -> str:
    """Whole where it is large, two digits where it is not."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--seconds", type=float, default=330, help="after which only the Omniglot run is begun")
    parser.add_argument("--data-root", metavar="DIR", help="folder of omniglot.npz; without it there is no such run")
    parser.add_argument("--episodes", type=int, default=60_000, help="of the Omniglot run")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    main()
