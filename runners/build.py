"""From a configuration to objects, through the registries; and back from a run folder: `load_run`."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, UInt8

import inference
import models
from inference.inner.base import InferenceKernel
from inference.outer.objectives import check_combination
from models.deep_kernel import DeepKernel, starting_values
from models.expectations import MonteCarlo
from models.gaussian import GaussianPrior, Query
from models.likelihoods.base import Likelihood
from runners import run_directory
from runners.configuration import RunConfig, override_targets, prior_mean
from runners.console import plain
from runners.data import check_images, check_own_classes, load_splits
from runners.overrides import LARGEST_LOG, ConfigError, converted
from runners.run_directory import RunDirectory, RunError
from tasks import Splits

EXPORT_AGAIN = "export it again by training with --resume"
WORDS = {"f": "numbers", "i": "whole numbers", "u": "whole numbers", "b": "true or false"}
LARGEST_TEMPERATURE = 1e6

Support = UInt8[Array | np.ndarray, "N H W Ch"] | Float[Array | np.ndarray, "N H W Ch"]
Queries = UInt8[Array | np.ndarray, "Q H W Ch"] | Float[Array | np.ndarray, "Q H W Ch"]


@dataclass(frozen=True)
class Model:
    """All that prediction needs: deep kernel, likelihood, inference, and the temperature of the probabilities.

    own_classes: by split, the classes of a user's own files that it was trained with.
    """

    config: RunConfig
    deep_kernel: DeepKernel
    likelihood: Likelihood
    make_inference: Callable[[Likelihood], InferenceKernel]
    temperature: float = 1.0
    own_classes: Mapping[str, Sequence[str]] | None = None

    @property
    def inference(self) -> InferenceKernel:
        """The inference kernel at the model's likelihood."""
        return self.make_inference(self.likelihood)

    def with_draws(self, draws: int) -> "Model":
        """The model with that many draws where it takes Monte-Carlo expectations, in inference and in prediction."""
        make: Any = self.make_inference
        likelihood: Any = self.likelihood
        if "expectation" in inspect.signature(inference.INFERENCE[self.config.inference]).parameters:
            make = functools.partial(make, expectation=MonteCarlo(draws))
        if hasattr(likelihood, "prediction_draws"):
            likelihood = replace(likelihood, prediction_draws=draws)
        return replace(self, make_inference=make, likelihood=likelihood)

    def prior(self, x: Support, classes: int | None = None) -> GaussianPrior:
        """Prior of the latents at images x [N, H, W, Ch]. Raises DataError for NaN or numbers beyond [0, 1]."""
        check_images(x, "the support images")
        return self.deep_kernel.prior(jnp.asarray(x), classes)

    def query(self, x_support: Support, x_query: Queries, classes: int | None = None) -> Query:
        """Query of (G7) from x_support [N, H, W, Ch] to x_query [Q, H, W, Ch]. Raises DataError as `prior`."""
        check_images(x_query, "the query images")
        return self.deep_kernel.query(jnp.asarray(x_support), jnp.asarray(x_query), classes)


def build_model(config: RunConfig, image_shape: tuple[int, int, int]) -> Model:
    """The untrained model of a configuration. Raises ConfigError for combinations that constructors refuse."""
    targets = override_targets(config)
    arguments = {group: converted(config.overrides(group), targets[group]) for group in targets}
    make_inference = _inference(config.inference, tuple(sorted(arguments["inference"].items())))
    try:
        likelihood = models.LIKELIHOODS[config.likelihood](**arguments["likelihood"])
        check_combination(
            make_inference(likelihood),
            inference.OBJECTIVES[config.objective],
            inference.HYPERGRADIENTS[config.hypergradient],
        )
        deep_kernel = _deep_kernel(config, image_shape, arguments["kernel"], arguments["backbone"])
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    return Model(config, deep_kernel, likelihood, make_inference)


@functools.cache
def _inference(name: str, arguments: tuple) -> Callable[[Likelihood], InferenceKernel]:
    """One object for each set of arguments, so that programs compiled with it are found again."""
    return functools.partial(inference.INFERENCE[name], **dict(arguments))


def _deep_kernel(
    config: RunConfig, image_shape: tuple[int, int, int], kernel_arguments: dict, backbone_arguments: dict
) -> DeepKernel:
    make_kernel = models.KERNELS[config.kernel]
    mean = prior_mean(config)
    named = starting_values(make_kernel(), mean).keys() & kernel_arguments.keys()
    starts = {name: kernel_arguments.pop(name) for name in named}
    rngs = nnx.Rngs(keys(config.seed)[0])
    backbone = models.BACKBONES[config.backbone](image_shape, rngs=rngs, **backbone_arguments)
    deep_kernel = DeepKernel(backbone, make_kernel(**kernel_arguments), rngs=rngs, classes=config.way, mean=mean)
    for name, value in starts.items():
        deep_kernel.hyper[name][...] = jnp.asarray(value, jnp.result_type(float))
    return deep_kernel


def keys(seed: int) -> Key[Array, " 2"]:
    """Keys of the network's first weights and of the outer loop."""
    return jax.random.split(jax.random.key(seed), 2)


def export(directory: RunDirectory, model: Model, step: int) -> None:
    """Write the weights that `load_run` reads."""
    directory.save_weights(
        {
            "deep_kernel": nnx.to_pure_dict(nnx.state(model.deep_kernel)),
            "likelihood": dict(model.likelihood.parameters()),
            "temperature": np.float64(model.temperature),
            "step": np.int64(step),
        }
    )


def load_run(run_dir: str | Path) -> Model:
    """The best model of a run folder. Raises RunError for a folder that is missing or damaged."""
    directory = run_directory.load(Path(run_dir))
    stored = directory.load_weights()
    config = RunConfig.from_json(directory.config, run_dir=str(run_dir))
    if "image_shape" not in directory.config:
        raise RunError(f"expected an image_shape in {directory.path / 'config.json'}, got none; train again")
    try:
        model = build_model(config, tuple(directory.config["image_shape"]))  # checked with the rest
    except ConfigError as error:
        raise RunError(f"{directory.path / 'config.json'}: {plain(error)[:300]}; train again") from error
    model = replace(model, own_classes=directory.config.get("classes"))
    return with_weights(model, stored, directory.weights)


def splits_of(model: Model, data_root: str | None) -> Splits:
    """The data set of a run. Raises DataError, also where a user's own classes are not where they were."""
    splits = load_splits(model.config.dataset, data_root)
    check_own_classes(splits, model.own_classes)
    return splits


def with_weights(model: Model, stored: dict[Any, Any], source: Path) -> Model:
    """The model at exported weights. Raises RunError if they are those of another configuration."""
    graph, state = nnx.split(model.deep_kernel)
    expected = {"deep_kernel": nnx.to_pure_dict(state), "likelihood": dict(model.likelihood.parameters())}
    found = {"likelihood": {}, **stored}
    wrong = _shapes({**expected, "temperature": 0.0, "step": 0}) ^ _shapes(found)
    if wrong:
        raise RunError(f"{source} does not fit its config.json (at {min(wrong)[0]}); {EXPORT_AGAIN}")
    _check_numbers(found, {**expected, "temperature": np.ones(()), "step": np.zeros((), int)}, source)
    nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, stored["deep_kernel"]))
    values = {name: jnp.asarray(value) for name, value in stored.get("likelihood", {}).items()}
    return replace(
        model,
        deep_kernel=nnx.merge(graph, state),
        likelihood=model.likelihood.with_parameters(values),
        temperature=float(stored["temperature"]),
    )


def _shapes(tree: Any) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, np.shape(leaf)) for name, leaf in _named_leaves(tree)}


def _named_leaves(tree: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves by their dotted names, in no order: the keys of a file need not compare."""
    named: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        named += _named_leaves(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return named


def _check_numbers(found: Any, expected: Any, source: Path) -> None:
    """Raises RunError for an array of another kind, or with a value that a model cannot have."""
    kinds = {name: np.asarray(leaf).dtype.kind for name, leaf in _named_leaves(expected)}
    for name, leaf in _named_leaves(found):
        array, last = np.asarray(leaf), name.rpartition(".")[2]
        if array.dtype.kind != kinds[name]:
            raise RunError(f"{source}: expected {WORDS[kinds[name]]} as {name}, got {array.dtype}; {EXPORT_AGAIN}")
        low, high = -np.inf, np.inf
        if name == "temperature":
            low, high = float(np.finfo(np.float32).tiny), LARGEST_TEMPERATURE
        elif name == "step" or last == "variance":
            low = 0
        elif name.startswith(("likelihood.", "deep_kernel.hyper.")):
            low, high = -LARGEST_LOG, LARGEST_LOG
        with np.errstate(over="ignore"):  # a double may be infinite in the precision of this process
            values = array.astype(jnp.result_type(float)) if array.dtype.kind == "f" else array
        good = (values >= low) & (values <= high) & np.isfinite(values)  # false for NaN
        if not good.all():
            text = "finite numbers" if (low, high) == (-np.inf, np.inf) else f"numbers from {low:.3g} to {high:.3g}"
            raise RunError(f"{source}: expected {text} in {name}, got {values[~good].flat[0]}; {EXPORT_AGAIN}")


def describe(config: RunConfig) -> str:
    """The choices of a run in words, those made automatically marked by a star."""
    choices = {name: value for name, value in config.to_json().items() if name not in ("settings", "chosen")}
    parts = [f"{name} {value}{'*' if name in config.chosen else ''}" for name, value in choices.items()]
    settings = [f"{name}={json.dumps(value)}" for name, value in config.settings.items()]
    note = "  (* chosen automatically)" if config.chosen else ""
    return ", ".join(parts) + note + "\n" + " ".join(settings)
