"""A run: from a configuration to a learner, through the registries; and back from a run folder: `load_run`.

Configuration ends here. Below this package nothing knows a flag, a name of a registry or a run folder.
"""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key

from fewshot import inference, learners, models
from fewshot.evaluation.text import plain
from fewshot.inference.inner.base import Inference
from fewshot.learners import GaussianProcess, Learner
from fewshot.models.backbones import Backbone
from fewshot.models.deep_kernel import DeepKernel, starting_values
from fewshot.models.likelihoods.base import Likelihood
from fewshot.tasks import Splits
from fewshot.tasks.curves import has_real_labels
from fewshot.training import run_directory
from fewshot.training.configuration import (
    GAUSSIAN_PROCESS,
    OF_GAUSSIAN_PROCESS,
    RunConfig,
    data_of,
    override_targets,
    prior_mean,
)
from fewshot.training.data import check_own_classes, load_splits
from fewshot.training.overrides import LARGEST_LOG, Arguments, ConfigError, converted
from fewshot.training.plugins import load_plugins
from fewshot.training.run_directory import RunDirectory, RunError, train_anew
from fewshot.training.weights import WeightTree

WORDS = {"f": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "true or false"}
SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = float(np.finfo(np.float32).tiny), 1e6


@dataclass(frozen=True)
class Run:
    """What a run is: its configuration, its learner, and the temperature of the learner's probabilities.

    The temperature belongs to tasks of the configuration's shape. own_classes: by split, the classes of a user's own
    files that it was trained with.
    """

    config: RunConfig
    learner: Learner
    temperature: float = 1.0
    own_classes: Mapping[str, Sequence[str]] | None = None

    def splits(self, data_root: str | None = None) -> Splits:
        """The data set of the run. Raises DataError, also where a user's own classes are not where they were."""
        splits = load_splits(self.config.dataset, data_root)
        check_own_classes(splits, self.own_classes)
        return splits


def build_run(config: RunConfig, image_shape: tuple[int, int, int], classes: int = 0) -> Run:
    """The untrained run of a configuration; `classes` is the number of training classes.

    A learner other than the Gaussian process is told `way` and `classes` where its constructor takes them.
    Raises ConfigError for combinations that constructors refuse.
    """
    targets = override_targets(config)
    arguments = {group: converted(config.overrides(group), targets[group]) for group in targets}
    rngs = nnx.Rngs(keys(config.seed)[0])
    try:
        backbone = models.BACKBONES[config.backbone](image_shape, rngs=rngs, **arguments["backbone"])
        if config.learner == GAUSSIAN_PROCESS:
            return Run(config, _gaussian_process(config, backbone, rngs, arguments))
        make: Callable[..., Learner] = learners.LEARNERS[config.learner]
        # Asked of __init__: a class's own signature is hidden by Flax's metaclass.
        takes = inspect.signature(make.__init__).parameters
        sizes = {name: size for name, size in {"way": config.way, "classes": classes}.items() if name in takes}
        return Run(config, make(backbone, rngs=rngs, **sizes, **arguments["learner"]))
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def _gaussian_process(
    config: RunConfig, backbone: Backbone, rngs: nnx.Rngs, arguments: Mapping[str, Arguments]
) -> GaussianProcess:
    return GaussianProcess(
        _deep_kernel(config, backbone, rngs, dict(arguments["kernel"])),
        models.ALL_LIKELIHOODS[config.likelihood](**arguments["likelihood"]),
        _inference(config.inference, tuple(sorted(arguments["inference"].items()))),
        objective=inference.OBJECTIVES[config.objective],
        hypergradient=inference.HYPERGRADIENTS[config.hypergradient],
        inner_steps=config.inner_steps,
    )


@functools.cache
def _inference(name: str, arguments: tuple) -> Callable[[Likelihood], Inference]:
    """One object for each set of arguments, so that programs compiled with it are found again."""
    return functools.partial(inference.INFERENCE[name], **dict(arguments))


def _deep_kernel(config: RunConfig, backbone: Backbone, rngs: nnx.Rngs, kernel_arguments: Arguments) -> DeepKernel:
    make_kernel = models.KERNELS[config.kernel]
    mean = prior_mean(config)
    if mean is None:
        kernel_arguments.pop("mean", None)
    named = starting_values(make_kernel(), mean).keys() & kernel_arguments.keys()
    starts = {name: kernel_arguments.pop(name) for name in named}
    deep_kernel = DeepKernel(backbone, make_kernel(**kernel_arguments), rngs=rngs, classes=config.way, mean=mean)
    for name, value in starts.items():
        deep_kernel.hyper[name][...] = jnp.asarray(value, jnp.result_type(float))
    return deep_kernel


def keys(seed: int) -> Key[Array, " 2"]:
    """Keys of the network's first weights and of the outer loop."""
    return jax.random.split(jax.random.key(seed), 2)


def export(directory: RunDirectory, run: Run, step: int) -> None:
    """Write the weights that `load_run` reads."""
    directory.save_weights(exported(run, step))


def exported(run: Run, step: int) -> WeightTree:
    """What `with_weights` reads: the numbers of a run, and the optimiser steps behind them."""
    return {
        "learner": nnx.to_pure_dict(nnx.state(run.learner)),
        "temperature": np.asarray(run.temperature, np.float64),
        "step": np.asarray(step, np.int64),
    }


def load_run(run_dir: str | Path) -> Run:
    """The best weights of a run folder. Raises RunError for a folder that is missing or damaged.

    Parts of one's own are those that are registered, or that `plugins` registers.
    """
    load_plugins()
    directory = run_directory.load(Path(run_dir))
    stored = directory.load_weights()
    try:
        config = RunConfig.from_json(directory.config, str(run_dir))
    except ConfigError as error:
        raise RunError(str(error)) from error
    data = data_of(directory.config)
    if data.image_shape is None:
        raise RunError(f"expected an image_shape in {directory.path / 'config.json'}, got none; train again")
    try:  # both were checked with the rest
        run = build_run(config, data.image_shape, data.training_classes)
    except ConfigError as error:
        raise RunError(f"{directory.path / 'config.json'}: {plain(error)[:300]}; train again") from error
    run = replace(run, own_classes=data.classes)
    return with_weights(run, stored, directory.weights)


def load_class_run(run_dir: str | Path) -> Run:
    """`load_run`, of a run that was trained on classes. Raises RunError for one on real labels, too."""
    run = load_run(run_dir)
    if has_real_labels(run.config.dataset):
        raise RunError(f"expected a run on classes in {run_dir}, got one on {run.config.dataset}; use FewShotRegressor")
    return run


def with_weights(run: Run, stored: WeightTree, source: Path) -> Run:
    """The run at exported weights. Raises RunError if they are those of another configuration."""
    stored = _of_this_version(stored)
    graph, state = nnx.split(run.learner)
    expected: WeightTree = {"learner": nnx.to_pure_dict(state), "temperature": np.ones(()), "step": np.zeros((), int)}
    wrong = _shapes(expected) ^ _shapes(stored)
    if wrong:
        raise RunError(f"{source} does not fit its config.json (at {min(wrong)[0]}); {train_anew()}")
    _check_numbers(stored, expected, source)
    held = stored.get("learner", {})  # nothing of a learner without numbers, such as a nearest mean of pixels
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, held))
    return replace(run, learner=nnx.merge(graph, state), temperature=float(stored["temperature"]))


def _check_numbers(found: WeightTree, expected: WeightTree, source: Path) -> None:
    """Raises RunError for an array of another kind, or with a value that a run cannot have."""
    kinds = {name: np.asarray(leaf).dtype.kind for name, leaf in _named_leaves(expected)}
    for name, leaf in _named_leaves(found):
        array = np.asarray(leaf)
        if array.dtype.kind != kinds[name]:
            raise RunError(f"{source}: expected {WORDS[kinds[name]]} as {name}, got {array.dtype}; {train_anew()}")
        low, high = _limits(name)
        with np.errstate(over="ignore"):  # a double may be infinite in the precision of this process
            values = array.astype(jnp.result_type(float)) if array.dtype.kind == "f" else array
        good = (values >= low) & (values <= high) & np.isfinite(values)  # false for NaN
        if not good.all():
            text = "finite numbers" if (low, high) == (-np.inf, np.inf) else f"numbers from {low:.3g} to {high:.3g}"
            raise RunError(f"{source}: expected {text} in {name}, got {values[~good].flat[0]}; {train_anew()}")


def _limits(name: str) -> tuple[float, float]:
    """Least and largest values of the stored numbers of a name."""
    if name == "temperature":
        return SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE
    if name.startswith(("learner.likelihood_parameters.", "learner.deep_kernel.hyper.")):
        return -LARGEST_LOG, LARGEST_LOG
    return (0.0, np.inf) if name == "step" or name.endswith(".variance") else (-np.inf, np.inf)


def _of_this_version(stored: WeightTree) -> WeightTree:
    """Weights of schema version 1, which had Gaussian processes alone, under the names of today."""
    if "deep_kernel" not in stored or "learner" in stored:
        return stored
    learner = {"deep_kernel": stored["deep_kernel"]}
    if "likelihood" in stored:
        learner["likelihood_parameters"] = stored["likelihood"]
    others = {name: value for name, value in stored.items() if name not in ("deep_kernel", "likelihood")}
    return {"learner": learner, **others}


def _shapes(tree: WeightTree) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, np.shape(leaf)) for name, leaf in _named_leaves(tree)}


def _named_leaves(tree: WeightTree, prefix: str = "") -> list[tuple[str, Array | np.ndarray]]:
    """Leaves by their dotted names, in no order: the keys of a file need not compare."""
    named: list[tuple[str, Array | np.ndarray]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        named += _named_leaves(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return named


def describe(config: RunConfig) -> str:
    """The choices of a run in words, those made automatically marked by a star."""
    choices = {name: value for name, value in config.to_json().items() if name not in ("settings", "chosen")}
    if config.learner != GAUSSIAN_PROCESS:
        choices = {name: value for name, value in choices.items() if name not in OF_GAUSSIAN_PROCESS}
    parts = [f"{name} {value}{'*' if name in config.chosen else ''}" for name, value in choices.items()]
    settings = [f"{name}={json.dumps(value)}" for name, value in config.settings.items()]
    note = "  (* chosen automatically)" if config.chosen else ""
    return ", ".join(parts) + note + "\n" + " ".join(settings)
