"""Fitted classifiers as files: safetensors with JSON beside the arrays, never a pickle.

    inputs [N, ...], y [N], groups [N], key [2], temperatures [G], weights [G]   the posterior is found from them again
    about                    the learner, the encoder, the classes, a version
    shipped/..., shipped     where shipped weights answer: their file

Shipped weights are in the file, so that another version of the package, with others, still answers alike. Another
learner is not: a description of it is, or where it lies with the SHA-256 of its content. A file may come from somebody
else, so all of it is checked: names, types, shapes and ranges, and nothing in it is executed.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from fewshot.conditioning import Kept
from fewshot.evaluation.text import plain
from fewshot.heads import (
    HEADS,
    Built,
    GaussianProcessHead,
    Head,
    PretrainedHead,
    StoredHead,
    fingerprint_of,
)
from fewshot.inputs import name_of
from fewshot.learners import Learner
from fewshot.models.networks.encoders import ENCODERS, Encoder
from fewshot.pretrained import SPECIAL, Content
from fewshot.training import weights
from fewshot.training.run import LARGEST_TEMPERATURE, SMALLEST_TEMPERATURE
from fewshot.training.run_directory import RunError

# 1 has no `answers`; neither 1 nor 2 has shipped weights, nor powers of features, which were 1; none before 4 has
# groups: each example was shown.
SCHEMA_VERSION = 4
OLDER = (1, 2, 3)
SHIPPED = "shipped"
GIVEN = "given"  # of a Learner that whoever loads the file has
MOST_CLASSES, MOST_LETTERS = 100_000, 10_000
LARGEST_LABEL = 2**63 - 1


class SavedError(ValueError):
    """A file that cannot be used, or a classifier that no file can hold; the message is one line."""


@dataclass(frozen=True)
class About:
    """What the JSON of a file says.

    kind: of the head, "given" for a Learner; parameters: those of the head; answers: the shipped weights that answer,
    by name, which may be special ones of the head's; fingerprint: SHA-256 of what only pointed at is and answers.
    The others are parameters of the estimator; features and feature_names belong to a table.
    """

    kind: str
    parameters: dict[str, object]
    answers: str | None
    fingerprint: str
    encoder: str | None
    temperature: float | str
    temperature_of_fewer: float | None
    balanced: bool | None
    draws: int | str | None
    features: int | None
    feature_names: list[str] | None


def described(learner: Head | Learner, answering: Head | Learner) -> tuple[str, dict[str, object], str | None, str]:
    """Kind and parameters of a learner, name and fingerprint of what answers for it."""
    name = answering.name if isinstance(answering, PretrainedHead) else None
    if isinstance(answering, Learner):
        return GIVEN, {}, name, fingerprint_of(answering)
    assert isinstance(learner, Head)
    parameters = {"name": learner.name} if isinstance(learner, PretrainedHead) else answering.get_params(deep=False)
    return learner.kind, parameters, name, answering.fingerprint()


def save(path: Path, about: About, classes: Shaped[np.ndarray, " C"], kept: Kept, answering: Head | Learner) -> None:
    """Write a file, in one move. Raises SavedError for labels that JSON does not have; OSError."""
    labels = classes.tolist()
    if not _are_labels(labels):
        raise SavedError(
            f"expected labels that a file can hold, got {labels[0]!r:.40} of {classes.dtype}; convert them to words"
        )
    stored = {"schema_version": SCHEMA_VERSION, "classes": labels, **asdict(about)}
    try:
        text = json.dumps(stored, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise SavedError(f"expected parameters of words and numbers, got others ({error}); set them so") from error
    tree: weights.WeightTree = {name: array for name, array in kept._asdict().items()}
    metadata = {"about": text}
    if isinstance(answering, PretrainedHead):
        content = answering.kept().content
        tree[SHIPPED], metadata[SHIPPED] = content.tree, json.dumps(content.metadata)
    weights.save(path, tree, metadata)


class Stored(NamedTuple):
    """What a file says, its classes, what the posterior is found from, and the shipped weights that answer."""

    about: About
    classes: Shaped[np.ndarray, " C"]
    kept: Kept
    shipped: Content | None


def load(path: Path) -> Stored:
    """The content of a file. Raises SavedError for one that is damaged or foreign."""
    try:
        arrays, metadata = weights.load(path)
    except (ValueError, OSError) as error:
        raise SavedError(f"expected a saved classifier in {path}, got {plain(error)[:200]}") from error
    stored = _parsed(metadata.get("about", ""))
    if isinstance(stored, dict) and stored.get("schema_version") in OLDER:
        _bring_up_to_date(stored, arrays)
    if not isinstance(stored, dict) or stored.get("schema_version") != SCHEMA_VERSION:
        version = repr(stored.get("schema_version"))[:40] if isinstance(stored, dict) else "none"
        raise SavedError(f"expected a saved classifier of schema version {SCHEMA_VERSION} in {path}, got {version}")
    names = {field.name for field in fields(About)} | {"schema_version", "classes"}
    if wrong := names ^ stored.keys():
        _refuse(path, "about", f"the fields {', '.join(sorted(names))}", sorted(wrong, key=str)[0])
    for name, value in stored.items():
        if expected := _expected_of(name, value):
            _refuse(path, name, expected, value)
    about = About(**{field.name: stored[field.name] for field in fields(About)})
    shipped = _shipped(path, arrays.pop(SHIPPED, None), _parsed(metadata.get(SHIPPED, "null")))
    kept = _checked_arrays(path, arrays, len(stored["classes"]))
    return Stored(about, np.array(stored["classes"]), kept, shipped)


def _bring_up_to_date(stored: dict[str, Any], arrays: dict[Any, Any]) -> None:
    """Give what an older version wrote the values that it meant."""
    parameters = stored.get("parameters")
    if stored["schema_version"] < 3 and stored.get("kind") == GaussianProcessHead.kind and isinstance(parameters, dict):
        parameters.setdefault("power", 1.0)
    stored.setdefault("answers", None)
    stored.setdefault("balanced", False)
    arrays.setdefault("groups", np.arange(np.size(arrays.get("y", ()))))
    stored["schema_version"] = SCHEMA_VERSION


def learner_of(
    about: About, shipped: Content | None, given: Head | Learner | None, path: Path
) -> tuple[Head | Learner, Head | Learner]:
    """The learner that a file describes, or the given one if it is the same, and what answers.

    Where other weights are shipped than when the file was written, those in the file answer. Raises SavedError.
    """
    if given is None and about.kind == GIVEN:
        raise SavedError(f"expected learner=, the Learner that {path} was fitted with, got none; it is not in the file")
    try:
        learner = HEADS[about.kind](**about.parameters) if given is None else given
        answering = _located(learner) if about.answers is None else _special(learner, about.answers)
        kind, _, _, fingerprint = described(learner, answering)
        if fingerprint != about.fingerprint and shipped is not None and isinstance(answering, PretrainedHead):
            answering = StoredHead(answering.name, shipped)
            fingerprint = answering.fingerprint()
    except RunError as error:
        moved = "; where the run has moved, say so: load(FILE, learner=TrainedRun(DIR)), or predict.py FILE --run DIR"
        raise SavedError(f"{path}: learner: {plain(error)[:300]}{moved}") from error
    except (TypeError, ValueError, OSError) as error:
        raise SavedError(f"{path}: learner: {plain(error)[:300]}") from error
    if (kind, fingerprint) != (about.kind, about.fingerprint):
        got = kind if kind != about.kind else f"another with SHA-256 {fingerprint[:12]}..."
        if given is None and isinstance(answering, PretrainedHead):
            got += f": the weights {answering.name} have changed since"
        raise SavedError(f"{path}: expected the {about.kind} learner {about.fingerprint[:12]}, got {got}; fit again")
    return learner, answering


def _located(learner: Head | Learner) -> Head | Learner:
    return learner.located() if isinstance(learner, Head) else learner


def _special(learner: Head | Learner, name: str) -> PretrainedHead:
    """The shipped weights of that name, which belong to those of the learner. Raises ValueError."""
    own = learner.name if isinstance(learner, PretrainedHead) else None
    if own is None or name not in (own, *SPECIAL.get(own, ())):
        raise ValueError(f"expected weights that belong to {own or 'shipped ones'}, got {name[:80]!r}")
    return PretrainedHead(name)


def encoder_of(about: About, given: str | Encoder | None, path: Path) -> str | Encoder | None:
    """The encoder that a file names, or the given one. Raises SavedError for a name that leads elsewhere."""
    name = name_of(given)
    if given is None and about.encoder is not None and about.encoder not in ENCODERS:
        wanted = plain(about.encoder)[:80]
        raise SavedError(
            f"{path} names the encoder {wanted}, which is not opened unasked; pass encoder= if you trust it"
        )
    if given is not None and name != about.encoder:
        raise SavedError(f"{path}: expected the encoder {plain(str(about.encoder))[:80]}, got {name}")
    return about.encoder if given is None else given


def check_fit(build: Callable[[], Built], about: About, kept: Kept, path: Path) -> None:
    """Raises SavedError where a learner cannot be built, or the inputs of a file are not what it makes of images."""
    try:
        learner = build().learner
    except (TypeError, ValueError, OSError) as error:
        raise SavedError(f"{path}: learner: {plain(error)[:300]}") from error
    blank = jax.ShapeDtypeStruct((1, *learner.image_shape), jnp.result_type(float))
    expected = jax.eval_shape(learner.embed, blank).shape[1:]
    if kept.inputs.shape[1:] != expected:
        _refuse(path, "inputs", f"shape [N, {', '.join(map(str, expected))}]", kept.inputs.shape)
    if about.features not in (None, learner.image_shape[2]):
        _refuse(path, "features", f"{learner.image_shape[2]} or null", about.features)
    if about.feature_names is not None and len(about.feature_names) != about.features:
        _refuse(path, "feature_names", f"{about.features} names", len(about.feature_names))
    if learner.ways not in (None, kept.y.max() + 1):
        _refuse(path, "classes", f"{learner.ways} labels, which the learner tells apart,", kept.y.max() + 1)


def _shipped(path: Path, tree: object, metadata: object) -> Content | None:
    """The shipped weights of a file, which `parsed` will check. Raises SavedError."""
    if tree is None and metadata is None:
        return None
    if isinstance(tree, dict) and isinstance(metadata, dict) and all(isinstance(one, str) for one in metadata.values()):
        return Content(tree, metadata)
    _refuse(path, SHIPPED, "weights and words about them", "others")


def _checked_arrays(path: Path, arrays: dict[Any, Any], classes: int) -> Kept:
    if wrong := {*Kept._fields} ^ arrays.keys():
        _refuse(path, "arrays", ", ".join(Kept._fields), sorted(map(str, wrong))[0])
    kinds = {"inputs": "uf", "y": "i", "groups": "i", "key": "u", "temperatures": "f", "weights": "f"}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds[name]:
            _refuse(path, name, "an array of numbers", getattr(array, "dtype", "several"))
        if not np.isfinite(array).all():
            _refuse(path, name, "finite numbers", "others")
    kept = Kept(**arrays)
    if kept.inputs.ndim < 2 or kept.y.shape != kept.inputs.shape[:1]:
        _refuse(path, "y", f"a label for each of the inputs {kept.inputs.shape}", kept.y.shape)
    if not np.array_equal(np.unique(kept.y), np.arange(classes)):
        _refuse(path, "y", f"labels from 0 to {classes - 1}, each at least once", "others")
    if not _are_groups(kept.groups, kept.y):
        _refuse(path, "groups", "numbers from 0, those of one class in a group", "others")
    if kept.key.shape != (2,) or kept.key.dtype != np.uint32:
        _refuse(path, "key", "two numbers of 32 bits", f"{kept.key.dtype} {kept.key.shape}")
    nodes = kept.temperatures
    within = (nodes >= SMALLEST_TEMPERATURE) & (nodes <= LARGEST_TEMPERATURE)
    if nodes.ndim != 1 or not len(nodes) or not within.all():
        _refuse(path, "temperatures", f"a list of numbers above 0 and up to {LARGEST_TEMPERATURE:g}", "others")
    if (
        kept.weights.shape != nodes.shape
        or (kept.weights < 0).any()
        or not math.isclose(kept.weights.sum(), 1, rel_tol=1e-3)
    ):
        _refuse(path, "weights", "as many probabilities as temperatures, with sum 1", "others")
    y, groups = kept.y.astype(np.int32), kept.groups.astype(int)
    return kept._replace(y=y, groups=groups, inputs=_in_this_precision(kept.inputs))


def _are_groups(groups: np.ndarray, y: np.ndarray) -> bool:
    """Whether every number from 0 to the largest is there, and no two classes share one."""
    if groups.shape != y.shape:
        return False
    numbers, position = np.unique(groups, return_index=True)
    return np.array_equal(numbers, np.arange(len(numbers))) and np.array_equal(y[position][groups], y)


def _in_this_precision(inputs: np.ndarray) -> np.ndarray:
    return inputs if inputs.dtype.kind == "u" else inputs.astype(jnp.result_type(float))


def _expected_of(name: str, value: object) -> str:
    """What a field must be, in words; empty where it is."""
    optional_name = value is None or _is_word(value)
    good, expected = {
        "schema_version": (type(value) is int, "a whole number"),
        "kind": (isinstance(value, str) and value in (*HEADS, GIVEN), f"one of {', '.join((*HEADS, GIVEN))}"),
        "parameters": (isinstance(value, dict), "an object"),
        "answers": (optional_name, "a name or null"),
        "fingerprint": (isinstance(value, str) and len(value) in (0, 64) and value.isalnum() | (not value), "SHA-256"),
        "encoder": (optional_name, "a name or null"),
        "temperature": (value == "auto" or _is_positive(value), "a positive number or auto"),
        "temperature_of_fewer": (value is None or _is_positive(value), "a positive number or null"),
        "balanced": (value is None or type(value) is bool, "true, false or null"),
        "draws": (
            value in (None, "auto") or (type(value) is int and value in range(2, 10**6, 2)),
            "an even number, auto or null",
        ),
        "features": (value is None or (type(value) is int and 0 < value < 2**31), "a whole number or null"),
        "feature_names": (value is None or (isinstance(value, list) and all(map(_is_word, value))), "names or null"),
        "classes": (_are_labels(value), "two labels or more, different ones of one kind"),
    }[name]
    return "" if good else expected


def _are_labels(value: object) -> bool:
    if not isinstance(value, list) or not 2 <= len(value) <= MOST_CLASSES or len({type(one) for one in value}) > 1:
        return False
    kind = type(value[0])
    if kind not in (str, bool, int, float) or len(set(value)) < len(value):
        return False
    if kind is str:
        return all(len(one) <= MOST_LETTERS and "\0" not in one for one in value)  # NumPy drops that at the end
    return all(math.isfinite(one) and abs(one) <= LARGEST_LABEL for one in value)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_LETTERS


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and SMALLEST_TEMPERATURE <= value <= LARGEST_TEMPERATURE  # type: ignore[operator]


def _parsed(text: str) -> object:
    """The value of a JSON text, None for one that is none: NaN and nesting without end are not JSON."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _plain(value: object) -> object:
    """NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _refuse(path: Path, name: str, expected: str, got: object) -> NoReturn:
    raise SavedError(f"{path}: expected {expected} as {name}, got {plain(str(got))[:60]}; save it again")
