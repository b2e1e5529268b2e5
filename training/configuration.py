"""The configuration of a run: the flags of meta_train.py, their checks, and what `auto` becomes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from fewshot import inference, learners, models
from fewshot.evaluation.text import Json, plain
from fewshot.learners import TrainsOn
from fewshot.models.deep_kernel import starting_values
from fewshot.tasks.augmentation import AUGMENTATIONS
from fewshot.tasks.curves import has_real_labels
from fewshot.training import defaults, run_directory
from fewshot.training.optimisers import OPTIMISERS, SCHEDULES, optimiser_of_network
from fewshot.training.overrides import (
    LARGEST_SEED,
    ConfigError,
    Override,
    Setting,
    Settings,
    check_overrides,
    converted,
)

AUTO = "auto"
TRAINING, HELD_OUT = "training", "held-out"  # classes
GAUSSIAN_PROCESS = "gaussian-process"
MATCHING, MAMLS = "matching", ("maml", "first-order-maml")
REGISTRIES: dict[str, Mapping[str, Callable]] = {
    "learner": learners.LEARNERS,
    "likelihood": models.ALL_LIKELIHOODS,
    "inference": inference.INFERENCE,
    "objective": inference.OBJECTIVES,
    "hypergradient": inference.HYPERGRADIENTS,
    "kernel": models.KERNELS,
    "backbone": models.BACKBONES,
}
# The parts of a Gaussian process, which other learners do not have.
OF_GAUSSIAN_PROCESS = ("likelihood", "inference", "objective", "hypergradient", "kernel", "inner_steps")
# Least and largest values of the numbers of a run.
WHOLE = {
    "way": (1, 10_000),  # 1 where labels are real
    "shot": (1, 100_000),
    "query": (0, 100_000),
    "episodes": (1, 10**9),
    "tasks_per_step": (1, 10**6),
    "inner_steps": (1, 10**5),
    "seed": (0, LARGEST_SEED),
}
FIELDS = [*WHOLE, *REGISTRIES]  # that may have been chosen automatically
LARGEST_IMAGE = 1 << 20  # numbers of an image
SPLITS = {"train", "validation", "test"}
# Where a run lives and how it is started are no part of what it computes.
NOT_STORED = {"run_dir", "resume", "tensorboard", "data_root", "coordinator", "processes", "process_id"}


@dataclass(frozen=True)
class TrainerSettings:
    """Fields of `--set trainer.*`: the optimiser, and how often a run is looked at.

    optimiser, schedule: of the network, by the names of `training.optimisers`; hyper-parameters have Adam's.
    validate_every: optimiser steps, 0 for a twentieth of the run but at least 250. *_episodes: sizes of the fixed sets
    of episodes; temperature_classes: training classes that the temperature is fitted on, at most; temperature_from:
    which, "training" for any, "held-out" for a fifth of them that no step is taken on, so that they are as new to the
    network as those of a user. augment: random changes of the training images, one of
    `tasks.augmentation.AUGMENTATIONS`. clip_norm: the largest global norm of a gradient; longer ones are
    scaled down to it (the loss is in nats an image). patience: a run ends early where validation accuracy has not
    improved for that share of its steps, 0 for never.
    steps_per_dispatch: optimiser steps that run as one program, 0 for 1 on CPU and up to 50 elsewhere; numbers differ
    by rounding only.
    """

    learning_rate: float = 2e-3
    kernel_learning_rate: float = 1e-2
    optimiser: str = "adam"
    schedule: str = "cosine"
    clip_norm: float = 20.0
    augment: str = AUTO
    log_every: int = 50
    validate_every: int = 0
    patience: float = 0.0
    validation_episodes: int = 600
    temperature_episodes: int = 600
    temperature_classes: int = 200
    temperature_from: str = TRAINING
    test_episodes: int = 600
    steps_per_dispatch: int = 0

    def __post_init__(self) -> None:
        for name, known in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES)):
            if (value := getattr(self, name)) not in known:
                raise ConfigError(f"trainer.{name} must be one of {', '.join(known)}, got {value!r}")
        if self.augment not in (AUTO, *AUGMENTATIONS):
            raise ConfigError(f"trainer.augment must be one of {', '.join(AUGMENTATIONS)}, got {self.augment!r}")
        if self.temperature_from not in (TRAINING, HELD_OUT):
            raise ConfigError(f"trainer.temperature_from must be training or held-out, got {self.temperature_from!r}")
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("validate_every", "patience", "steps_per_dispatch"):
                if value < 0:
                    raise ConfigError(f"trainer.{entry.name} must be at least 0, got {value}")
            elif not isinstance(value, str) and not value > 0:
                raise ConfigError(f"trainer.{entry.name} must be positive, got {value}")
        optimiser_of_network(self.optimiser, self.schedule, self.learning_rate, steps=1)


@dataclass(frozen=True)
class RunConfig:
    """The flags of meta_train.py. "auto" and 0 are decided by `resolve`, query by the data.

    settings: values of `--set` by their dotted names. chosen: the fields that were decided automatically.
    """

    dataset: str = "glyphs"
    learner: str = GAUSSIAN_PROCESS
    likelihood: str = "softmax"
    inference: str = AUTO
    objective: str = AUTO
    hypergradient: str = AUTO
    kernel: str = AUTO
    backbone: str = "conv4"
    way: int = 5
    shot: int = 1
    query: int = 0
    episodes: int = 0
    tasks_per_step: int = 1
    inner_steps: int = 0
    settings: Settings = field(default_factory=dict)
    seed: int = 0
    run_dir: str | None = None
    resume: bool = False
    tensorboard: bool = False
    data_root: str | None = None
    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    chosen: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Optimiser steps of the run."""
        return -(-self.episodes // self.tasks_per_step)

    @property
    def trainer(self) -> TrainerSettings:
        """The settings of `--set trainer.*`."""
        make: Callable[..., TrainerSettings] = TrainerSettings
        return make(**converted(self.overrides("trainer"), Override.of(TrainerSettings)))

    def overrides(self, group: str) -> Settings:
        """The settings `group.name` by name."""
        return {name.split(".", 1)[1]: value for name, value in self.settings.items() if name.startswith(group + ".")}

    def to_json(self) -> dict[str, Json]:
        """What config.json holds."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_STORED}

    @classmethod
    def from_json(cls, stored: Mapping[str, Json], run_dir: str | None = None) -> "RunConfig":
        """The configuration of a run folder, which may be anybody's.

        Raises ConfigError, naming the file and the field, for fields that are missing or not known, and for values that
        no run has.
        """
        where = plain(str(Path(run_dir) / "config.json")) if run_dir else "config.json"
        known = {entry.name for entry in fields(cls)} - NOT_STORED
        stored = {"learner": GAUSSIAN_PROCESS, **stored}  # the only one of schema version 1
        wrong = known ^ (stored.keys() - {"image_shape", "environment", "classes", "training_classes"})
        if wrong:
            names = plain(", ".join(sorted(wrong)))[:200]
            raise ConfigError(f"expected {where} with the fields of this version, got others ({names}); train again")
        own = stored["learner"] == GAUSSIAN_PROCESS
        for name, value in stored.items():
            expected = _expected_of(name, value) if own else _expected_of_others(name, value)
            if expected:
                advice = (
                    "name the module that registers it in FEWSHOT_PLUGINS, or train again"
                    if name in REGISTRIES
                    else "train again"
                )
                raise ConfigError(f"{where}: expected {expected} as {name}, got {plain(repr(value))[:60]}; {advice}")
        # Runs from before random changes of training images had none, and one prior for all likelihoods.
        settings: dict[str, Setting] = {"trainer.augment": "none", **cast(Settings, stored["settings"])}
        if "inference.covariance" in settings:  # its name until sites were objects
            settings["inference.sites"] = settings.pop("inference.covariance")
        if stored["learner"] == GAUSSIAN_PROCESS:
            settings = {"kernel.prior_scale": 30.0, **settings}
        if stored["learner"] == MATCHING:
            settings = {"learner.context": False, **settings}
        decided = {"chosen": tuple(cast(Sequence[str], stored["chosen"])), "settings": settings}
        make: Callable[..., RunConfig] = cls
        config = make(**{name: stored[name] for name in known} | decided, run_dir=run_dir)
        try:
            check_overrides(config.settings, override_targets(config))
            _ = config.trainer  # its own checks
        except ConfigError as error:
            reason = plain(str(error).removeprefix("--set "))[:300]
            raise ConfigError(f"{where}: settings: {reason}; train again") from error
        return config


class DataOfRun(NamedTuple):
    """What a config.json says of the data: (H, W, Ch), the number of training classes, own classes by split."""

    image_shape: tuple[int, int, int] | None
    training_classes: int
    classes: Mapping[str, Sequence[str]] | None


def data_of(stored: Mapping[str, Json]) -> DataOfRun:
    """The data of a config.json that `RunConfig.from_json` has read without an error."""
    shape = cast(Sequence[int] | None, stored.get("image_shape"))
    return DataOfRun(
        None if shape is None else (shape[0], shape[1], shape[2]),
        cast(int, stored.get("training_classes", 0)),
        cast(Mapping[str, Sequence[str]] | None, stored.get("classes")),
    )


def _expected_of(name: str, value: object) -> str:
    """What the field of a config.json must be, in words; empty where it is."""
    if name in WHOLE:
        least, largest = WHOLE[name]
        good = type(value) is int and least <= value <= largest
        return "" if good else f"a whole number from {least} to {largest}"
    if name in REGISTRIES:
        good = isinstance(value, str) and value in REGISTRIES[name]
        return "" if good else f"one of {', '.join(REGISTRIES[name])}"
    good, expected = {
        "dataset": (isinstance(value, str) and 0 < len(value) < 5000 and value.isprintable(), "a name"),
        "settings": (_is_settings(value), "values of --set by their names"),
        "chosen": (isinstance(value, list | tuple) and all(one in FIELDS for one in value), "a list of fields"),
        "image_shape": (_is_shape(value), "height, width and channels"),
        "training_classes": (type(value) is int and 0 <= value <= 10**7, "a whole number"),
        "classes": (_is_classes(value), "lists of names for train, validation and test"),
        "environment": (isinstance(value, dict), "names and values"),
    }[name]
    return "" if good else expected


def _expected_of_others(name: str, value: object) -> str:
    """The same for learners without the parts of a Gaussian process, which they keep as they are by default."""
    if name in OF_GAUSSIAN_PROCESS:
        default = RunConfig.__dataclass_fields__[name].default
        return "" if value == default else f"{default}, as the learner has none,"
    if name == "episodes" and value == 0 and type(value) is int:  # it learns from nothing
        return ""
    return _expected_of(name, value)


def _is_settings(value: object) -> bool:
    if not isinstance(value, dict) or any(name.count(".") != 1 for name in value):
        return False
    return all(one is None or type(one) in (bool, int, float, str) for one in value.values())


def _is_shape(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return False
    return all(type(one) is int and one > 0 for one in value) and math.prod(value) <= LARGEST_IMAGE


def _is_classes(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != SPLITS:
        return False
    return all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in value.values())


def begun(asked: RunConfig, path: Path) -> RunConfig:
    """The stored configuration of a run that one of several goes on with. Raises ConfigError if it is another's."""
    held = run_directory.load(path).config
    stored = replace(RunConfig.from_json(held, str(path)), resume=True, data_root=asked.data_root)
    for name in ("dataset", "episodes", "seed", "way", "shot"):
        own, wanted = getattr(stored, name), getattr(asked, name)
        if own != wanted:
            raise ConfigError(f"{path} was trained with {name} {own}, got {wanted}; choose another --out")
    return stored


def configured(**flags: Any) -> RunConfig:  # the fields of RunConfig
    """The configuration of some flags; the others are what suits the labels of the data set."""
    if not has_real_labels(flags.get("dataset", RunConfig.dataset)):
        return RunConfig(**flags)
    own = flags.get("learner", GAUSSIAN_PROCESS) == GAUSSIAN_PROCESS
    suited = {name: value for name, value in defaults.REAL_LABELS.items() if own or name != "likelihood"}
    shot = defaults.choose(defaults.SHOT, flags["dataset"])
    return RunConfig(**{**suited, "shot": shot, **flags})


def resolve(config: RunConfig) -> RunConfig:
    """Check all names and numbers and replace `auto`; `query` stays 0 until the data are known.

    Raises ConfigError.
    """
    for kind in REGISTRIES:
        _check_name(kind, getattr(config, kind))
    _check_labels(config)
    decided = _decided(config)
    open_fields = {name: value for name, value in decided.items() if is_open(getattr(config, name))}
    if config.backbone == "conv4" and defaults.choose(defaults.CONV4, config.learner) != "conv4":
        open_fields["backbone"] = defaults.choose(defaults.CONV4, config.learner)
    fill: Callable[..., RunConfig] = replace
    config = fill(config, **open_fields, chosen=config.chosen + tuple(open_fields))
    learns = trains_on(config) is not TrainsOn.NOTHING
    least_inner = int(config.learner == GAUSSIAN_PROCESS)
    limits = {"episodes": int(learns), "tasks_per_step": 1, "inner_steps": least_inner, "query": 0, "seed": 0}
    for name, least in limits.items():
        if getattr(config, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(config, name)}")
        if getattr(config, name) > WHOLE[name][1]:
            raise ConfigError(
                f"--{name.replace('_', '-')} must be at most {WHOLE[name][1]}, got {str(getattr(config, name))[:40]}"
            )
    check_overrides(config.settings, override_targets(config))
    # All of the trainer's settings are stored: a later version with other defaults resumes a run as it began.
    trainer = {f"trainer.{name}": value for name, value in asdict(config.trainer).items()}
    settings = {**config.settings, **trainer}
    if settings["trainer.augment"] == AUTO:
        settings["trainer.augment"] = defaults.choose(defaults.AUGMENT, config.dataset)
    if config.learner == GAUSSIAN_PROCESS:
        settings = {"kernel.prior_scale": defaults.choose(defaults.PRIOR_SCALE, config.likelihood), **settings}
    if config.learner == MATCHING:
        settings = {"learner.context": True, **settings}
    if config.learner in MAMLS and has_real_labels(config.dataset):
        settings = {"learner.inner_rate": defaults.REAL_INNER_RATE, **settings}
    return replace(config, settings=settings, run_dir=config.run_dir or default_run_dir(config))


def _decided(config: RunConfig) -> dict[str, str | int]:
    """What the choices that are left open become. Raises ConfigError for parts that the learner does not have."""
    if config.learner != GAUSSIAN_PROCESS:
        for name in OF_GAUSSIAN_PROCESS:
            if getattr(config, name) != RunConfig.__dataclass_fields__[name].default:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} belongs to the learner {GAUSSIAN_PROCESS}, got it with {config.learner}")
        learns = trains_on(config) is not TrainsOn.NOTHING
        return {"episodes": defaults.choose(defaults.EPISODES, config.dataset)} if learns else {}
    inference_name = config.inference
    if is_open(inference_name):
        inference_name = defaults.choose(defaults.INFERENCE, config.likelihood)
    return {
        "inference": inference_name,
        "objective": defaults.choose(defaults.OBJECTIVE, f"{config.likelihood} {inference_name}"),
        "hypergradient": defaults.choose(defaults.HYPERGRADIENT, inference_name),
        "kernel": defaults.choose(defaults.KERNEL, config.dataset),
        "episodes": defaults.choose(defaults.EPISODES, config.dataset),
        "inner_steps": defaults.choose(defaults.INNER_STEPS, f"{inference_name} {config.dataset}", inference_name),
    }


def _check_labels(config: RunConfig) -> None:
    """Raises ConfigError where learner, likelihood or way are not made for the labels of the data set."""
    real, own = has_real_labels(config.dataset), config.learner == GAUSSIAN_PROCESS
    trait, labels = ("real_labels", "real labels") if real else ("class_labels", "classes as labels")
    fit = [name for name, make in learners.LEARNERS.items() if getattr(make.traits, trait)]
    if config.learner not in fit:
        raise ConfigError(f"{config.dataset} has {labels}, which {config.learner} does not fit; use {', '.join(fit)}")
    if own and real != (config.likelihood in models.NOISE_MODELS):
        usable = models.NOISE_MODELS if real else models.LIKELIHOODS
        raise ConfigError(
            f"{config.dataset} has {labels}, got likelihood {config.likelihood}; use one of {', '.join(usable)}"
        )
    if real and config.way != 1:
        raise ConfigError(f"--way counts classes, of which {config.dataset} has none; leave it out")
    if real and config.trainer.augment not in (AUTO, "none"):
        raise ConfigError(f"trainer.augment changes images, of which {config.dataset} has none; leave it out")


def trains_on(config: RunConfig) -> TrainsOn:
    """What one optimiser step of the run sees."""
    return learners.LEARNERS[config.learner].traits.trains_on


def override_targets(config: RunConfig) -> dict[str, list[Override]]:
    """What `--set` may name: per group the constructors and the starting values that take part in this run."""
    shared = {
        "backbone": Override.of(models.BACKBONES[config.backbone]),
        "trainer": Override.of(TrainerSettings),
    }
    if config.learner != GAUSSIAN_PROCESS:
        return {"learner": Override.of(learners.LEARNERS[config.learner]), **shared}
    kernel = models.KERNELS[config.kernel]
    values = starting_values(kernel(), models.ALL_LIKELIHOODS[config.likelihood]().prior_mean)
    starts = [Override(name, float | None if name == "mean" else float, value) for name, value in values.items()]
    return {
        "inference": Override.of(inference.INFERENCE[config.inference]),
        "likelihood": Override.of(models.ALL_LIKELIHOODS[config.likelihood]),
        "kernel": Override.of(kernel) + starts,
        **shared,
    }


def prior_mean(config: RunConfig) -> float | None:
    """Where the learned prior mean of the latents starts.

    None where the likelihood knows differences only, or with `--set kernel.mean=none`.
    """
    start = models.ALL_LIKELIHOODS[config.likelihood]().prior_mean
    return None if config.settings.get("kernel.mean", start) is None else start


def default_run_dir(config: RunConfig) -> str:
    """runs/<dataset>-<likelihood>-<inference>-<way>way-<shot>shot-<seed>; another learner's name; of a PATH its end."""
    kind, colon, path = config.dataset.partition(":")
    named = f"{kind}-{Path(path).stem}" if colon else config.dataset
    dataset = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in named)
    own = f"{config.likelihood}-{config.inference}" if config.learner == GAUSSIAN_PROCESS else config.learner
    return f"runs/{dataset}-{own}-{config.way}way-{config.shot}shot-{config.seed}"


def is_open(value: object) -> bool:
    """Left for `resolve` to decide."""
    return value in (AUTO, 0)


def _check_name(kind: str, name: str) -> None:
    registry = REGISTRIES[kind]
    if name in registry or (name == AUTO and RunConfig.__dataclass_fields__[kind].default == AUTO):
        return
    raise ConfigError(f"expected a known {kind}, got {name!r}; known: {', '.join(registry)}")
