"""The cells of likelihood x inference x objective x hyper-gradient: they compute, or are refused with the reason.

The tables in docs/choosing.md are those that this file generates.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import relu_features

from fewshot.inference import HYPERGRADIENTS, INFERENCE, OBJECTIVES
from fewshot.inference.inner.base import usable_inferences
from fewshot.inference.outer.objectives import EmbeddedTask, Inner, refusal
from fewshot.models import KERNELS, LIKELIHOODS
from fewshot.models.process import LatentProcess

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "choosing.md").read_text()
SUPPORT, LABELS = 3, np.array([0, 1, 2, 0, 2, 1], np.int32)


def pairs():
    for likelihood, make in LIKELIHOODS.items():
        for inference in usable_inferences(make()):
            yield likelihood, inference


def reasons(inference):
    """The refusal of each (objective, hyper-gradient), empty where the cell works."""
    likelihood = next(likelihood for likelihood, other in pairs() if other == inference)
    kernel = INFERENCE[inference](LIKELIHOODS[likelihood]())
    return {
        (objective, mode): refusal(kernel, OBJECTIVES[objective], HYPERGRADIENTS[mode])
        for objective in OBJECTIVES
        for mode in HYPERGRADIENTS
    }


def cells():
    for likelihood, inference in pairs():
        for (objective, mode), reason in reasons(inference).items():
            if not reason:
                yield likelihood, inference, objective, mode


CELLS = list(cells())
NAMES = tuple(LIKELIHOODS)  # other tests take one out and put it back last


def representative():
    """Every objective and hyper-gradient of an inference once, and every pair once."""
    modes, known = set(), set()
    for likelihood, inference, objective, mode in CELLS:
        if (inference, objective, mode) not in modes or (likelihood, inference) not in known:
            yield likelihood, inference, objective, mode
        modes.add((inference, objective, mode))
        known.add((likelihood, inference))


def gradient_of(likelihood, inference, objective, mode, steps=3):
    """Value and gradient of a cell in the features and all hyper-parameters, as the outer loop takes them."""
    chosen, start = KERNELS["rbf"](), LIKELIHOODS[likelihood]()
    settings = {"chains": 2} if inference == "gibbs" else {}
    x = jnp.asarray(relu_features(np.random.default_rng(0), LABELS, 4), jnp.float32)
    level = {} if start.prior_mean is None else {"mean": -1.0}
    hyper = {name: jnp.float32(value) for name, value in {**chosen.initial(), **level}.items()}
    parameters = {name: jnp.float32(value) for name, value in start.parameters().items()}

    def value(x, hyper, parameters):
        model = start.with_parameters(parameters)
        inner = Inner(INFERENCE[inference](model, **settings), steps, HYPERGRADIENTS[mode], 3)
        task = EmbeddedTask(x[:SUPPORT], jnp.asarray(LABELS[:SUPPORT]), x[SUPPORT:], jnp.asarray(LABELS[SUPPORT:]))
        return OBJECTIVES[objective](jax.random.key(0), inner, model, LatentProcess(chosen, hyper), task).value

    return partial(jax.value_and_grad(value, argnums=(0, 1, 2)), x, hyper, parameters)


@pytest.mark.slow
@pytest.mark.parametrize("likelihood, inference, objective, mode", list(representative()))
def test_a_cell_has_finite_gradients_that_move_what_is_learned(likelihood, inference, objective, mode):
    value, slopes = jax.jit(gradient_of(likelihood, inference, objective, mode))()
    assert np.isfinite(value)
    for leaf in jax.tree.leaves(slopes):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("likelihood, inference", [("softmax", "cvi"), ("logistic-softmax", "cavi")])
def test_memory_grows_with_the_inner_steps_only_where_they_are_unrolled(likelihood, inference):
    def growth(mode):
        sizes = [
            jax.jit(gradient_of(likelihood, inference, "predictive", mode, steps)).lower().compile().memory_analysis()
            for steps in (3, 50)
        ]
        return sizes[1].temp_size_in_bytes / sizes[0].temp_size_in_bytes

    growths = {mode: growth(mode) for mode in HYPERGRADIENTS}
    print(f"{likelihood}, {inference}: memory of 50 inner steps over that of 3: {growths}")
    assert growths["sites"] < 1.1 and growths["implicit"] < 1.1 and growths["unroll"] > 2


def likelihood_table():
    lines = ["| | " + " | ".join(f"`{name}`" for name in INFERENCE) + " |", "|---" * (len(INFERENCE) + 1) + "|"]
    known = set(pairs())
    for likelihood in NAMES:
        marks = ["yes" if (likelihood, inference) in known else "" for inference in INFERENCE]
        lines.append(f"| `{likelihood}` | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def objective_table():
    columns = [(objective, mode) for objective in OBJECTIVES for mode in HYPERGRADIENTS]
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{objective} {mode}" for objective, mode in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for inference in INFERENCE:
        marks = []
        for reason in map(reasons(inference).get, columns):
            if reason and reason not in notes:
                notes.append(reason)
            marks.append(f"({notes.index(reason) + 1})" if reason else "yes")
        lines.append(f"| `{inference}` | " + " | ".join(marks) + " |")
    return "\n".join([*lines, "", *(f"{number}. {reason}" for number, reason in enumerate(notes, 1))])


@pytest.mark.parametrize("table", [likelihood_table, objective_table])
def test_the_page_holds_the_table(table):
    assert table() in PAGE, f"docs/choosing.md should contain\n\n{table()}"


if __name__ == "__main__":
    print(likelihood_table(), objective_table(), sep="\n\n")
