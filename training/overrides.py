"""`--set group.name=value`: which names exist is read off the constructors, so nothing is listed twice."""

import enum
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from fewshot.models.expectations import Exact, ExpectationRule, MonteCarlo
from fewshot.models.gaussian import BlockSites, Sites

Setting: TypeAlias = bool | int | float | str | None  # a value after `--set`
Settings: TypeAlias = Mapping[str, Setting]  # by their dotted names
Arguments: TypeAlias = dict[str, object]  # of a constructor, by name

LARGEST_LOG = 40.0  # of a hyper-parameter that is exponentiated: exp(2 x 40) is a number in float32
LARGEST_SEED = 2**32 - 1  # JAX takes the lower 32 bits of a seed
# Least and largest values by the name of the setting. Constructors say which values make sense; these are the ones
# that a computer can work with: beyond them numbers overflow, or arrays do not fit into any memory.
LIMITS: dict[str, tuple[float, float]] = {
    "width": (1, 1024),
    "degree": (1, 6),
    "chains": (1, 10_000),
    "prediction_draws": (2, 1_000_000),
    "expectation": (-math.inf, 1_000_000),
    "prior_scale": (1e-5, 1e5),
    "constant": (0.0, 1e5),
    "scale_power": (-4.0, 4.0),
    "constant_power": (-4.0, 4.0),
    "temperature": (1e-4, 1e4),
    "noise": (1e-8, 1e8),
    "dof": (0.5, 1e6),
    "momentum": (0.0, 1.0),
    "mean": (-LARGEST_LOG, LARGEST_LOG),
    "learning_rate": (-math.inf, 1e3),
    "kernel_learning_rate": (-math.inf, 1e3),
    "clip_norm": (-math.inf, 1e30),
    "log_every": (-math.inf, 1_000_000),
    "patience": (0.0, 1.0),
    "steps_per_dispatch": (-math.inf, 1_000_000),
    "validation_episodes": (-math.inf, 1_000_000),
    "temperature_episodes": (-math.inf, 1_000_000),
    "test_episodes": (-math.inf, 1_000_000),
}
SITE_KINDS: dict[str, type] = {"diagonal": Sites, "block": BlockSites}
HYPERPARAMETERS = ("log_scale", "log_lengthscale", "log_offset", "log_noise", "log_temperature")


class ConfigError(ValueError):
    """A command line that cannot be used; the message is one line."""


class Override(NamedTuple):
    """One thing that `--set` can change: its name, the type it accepts and its default."""

    name: str
    kind: object
    default: object

    @classmethod
    def of(cls, constructor: Callable) -> list["Override"]:
        """The optional arguments of a constructor that a command line can write down."""
        # A class's own signature can be hidden by its metaclass (Flax modules).
        function = constructor.__init__ if isinstance(constructor, type) else constructor  # type: ignore[misc]
        parameters = inspect.signature(function).parameters.values()
        candidates = [cls(p.name, p.annotation, p.default) for p in parameters if p.default is not p.empty]
        return [override for override in candidates if override.accepted]

    @property
    def accepted(self) -> set[object]:
        """The plain types accepted: bool, int, float, str, NoneType, ExpectationRule; those of `words`."""
        plain = self._kinds & {bool, int, float, str, types.NoneType, ExpectationRule}
        return plain | set(self.words)

    @property
    def words(self) -> dict[str, object]:
        """The objects that a word stands for: members of an enumeration, kinds of sites."""
        found: dict[str, object] = {}
        for kind in self._kinds:
            if isinstance(kind, enum.EnumType):
                found |= {member.value: member for member in typing.cast(type[enum.Enum], kind)}
        return found | {word: site for word, site in SITE_KINDS.items() if type[site] in self._kinds}

    @property
    def _kinds(self) -> set[object]:
        union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        return set(typing.get_args(self.kind)) if union else {self.kind}

    def convert(self, value: Setting) -> object:
        """The value in a type that the constructor accepts. Raises ConfigError."""
        accepted = self.accepted
        if isinstance(value, int | float) and type(value) is not bool and accepted & {int, float, ExpectationRule}:
            self._check_range(value)
        if isinstance(value, str) and value in self.words:
            return self.words[value]
        if type(value) in accepted:
            return value
        if float in accepted and type(value) is int:
            return float(value)
        if str in accepted and value is None:
            return "none"
        if ExpectationRule in accepted and value == "exact":
            return Exact()
        if ExpectationRule in accepted and isinstance(value, int) and type(value) is not bool:
            return self._monte_carlo(value)
        raise ConfigError(f"{self.name}: expected {self._wanted()}, got {value!r} (default {self._default()})")

    def _check_range(self, value: float) -> None:
        least, largest = LIMITS.get(self.name, (-1e30, 1e30) if float in self.accepted else (-(2**31), 2**31 - 1))
        if self.name in HYPERPARAMETERS:
            least, largest = -LARGEST_LOG, LARGEST_LOG
        if not (least <= value <= largest and -1e308 < value < 1e308):  # written so that nan is refused
            span = f"at most {largest:g}" if least == -math.inf else f"between {least:g} and {largest:g}"
            raise ConfigError(
                f"{self.name}: expected a number {span}, got {str(value)[:40]} (default {self._default()})"
            )

    def _monte_carlo(self, draws: int) -> MonteCarlo:
        try:
            return MonteCarlo(draws)
        except ValueError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _wanted(self) -> str:
        words = {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            str: "a word",
            types.NoneType: "none",
            ExpectationRule: "exact or an even number of draws",
        }
        return " or ".join([*(word for kind, word in words.items() if kind in self.accepted), *self.words])

    def _default(self) -> object:
        """The default as a command line writes it."""
        return next((word for word, value in self.words.items() if value is self.default), self.default)


Targets = Mapping[str, list[Override]]


def parse_override(text: str) -> tuple[str, Setting]:
    """`group.name=value` as a dotted name and a plain value. Raises ConfigError."""
    name, equals, value = text.partition("=")
    if not equals or name.count(".") != 1 or not value:
        raise ConfigError(f"expected --set group.name=value, got {text!r}; e.g. --set inference.rho=0.5")
    return name, _plain(value)


def check_overrides(settings: Settings, targets: Targets) -> None:
    """Raises ConfigError, listing the valid names, for one that no constructor of this run has or a wrong type."""
    for dotted in settings:
        group, _, name = dotted.partition(".")
        if group not in targets:
            raise ConfigError(f"--set {dotted}: expected one of the groups {', '.join(targets)}, got {group!r}")
        known = {override.name: override for override in targets[group]}
        if name not in known:
            listed = ", ".join(f"{group}.{entry}" for entry in known) or "none for this choice"
            raise ConfigError(f"--set {dotted}: no such setting; known: {listed}")
        try:
            known[name].convert(settings[dotted])
        except ConfigError as error:
            raise ConfigError(f"--set {group}.{error}") from error


def converted(settings: Settings, targets: list[Override]) -> Arguments:
    """Checked settings of one group as constructor arguments."""
    return {
        override.name: override.convert(settings[override.name]) for override in targets if override.name in settings
    }


def _plain(text: str) -> Setting:
    words: Settings = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
