"""What figures call a method and how they draw it, everywhere alike, and which published row is of the same method."""

import colorsys
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

CHANGED = "-augmented"  # in the name of a method whose training images are changed at random
PRINTED = {  # what papers call the methods that they and we have
    "dkt": "DKT, cosine",
    "one-vs-each-gibbs-ml": "one-vs-each Gibbs ML, RBF",
    "one-vs-each-gibbs-pl": "one-vs-each Gibbs PL, RBF",
    "feature-transfer": "Feature Transfer",
    "baseline++": "Baseline++",
    "matching": "MatchingNet",
    "prototypical": "ProtoNet",
    "relation": "RelationNet",
    "maml": "MAML",
    "bayesian-maml": "Bayesian MAML",
    "chaser": "Bayesian MAML (Chaser)",
    "abml": "ABML",
}
DATASETS = {
    "omniglot": "Omniglot",
    "omniglot-emnist": "Omniglot to EMNIST",
    "flowers102": "Flowers 102",
    "flowers102-32": "Flowers 102 at 32 pixels",
    "tinyimagenet": "Tiny ImageNet",
    "tinyimagenet-84": "Tiny ImageNet at 84 pixels",
    "cub": "CUB",
    "mini-imagenet": "mini-ImageNet",
    "mini-imagenet-cub": "mini-ImageNet to CUB",
}


class Style(NamedTuple):
    """A colour and a marker as matplotlib knows them."""

    colour: str
    marker: str


class _Process(NamedTuple):
    """A Gaussian process by the parts of its name."""

    likelihood: str
    inference: str
    objective: str


# Families share a hue: metric learners are reds, transfer is grey, the MAMLs are violets, rules on pixels are browns.
_LEARNERS = {
    "dkt": ("DKT", Style("#ff7f0e", "D")),
    "prototypical": ("ProtoNet", Style("#d62728", "^")),
    "matching": ("MatchingNet", Style("#f06fae", "v")),
    "relation": ("RelationNet", Style("#7f0f1c", "P")),
    "feature-transfer": ("feature transfer", Style("#8c8c8c", "X")),
    "baseline++": ("baseline++", Style("#404040", "p")),
    "maml": ("MAML", Style("#9467bd", "s")),
    "first-order-maml": ("first-order MAML", Style("#c5a3e0", "<")),
    "inductive-maml": ("inductive MAML", Style("#d65fd6", "D")),
    "bayesian-maml": ("Bayesian MAML", Style("#5e3c99", ">")),
    "chaser": ("Bayesian MAML, chaser", Style("#b05fd0", "h")),
    "abml": ("ABML", Style("#3f1f6f", "d")),
    "nearest-mean": ("nearest mean of pixels", Style("#8c564b", "^")),
    "nearest-neighbour": ("nearest neighbour of pixels", Style("#c49c94", "v")),
    "logistic-regression": ("logistic regression on pixels", Style("#5c3a21", "X")),
}
_LIKELIHOODS = {
    "softmax": ("softmax", "#1f77b4"),
    "logistic-softmax": ("logistic-softmax", "#17a5b8"),
    "one-vs-each": ("one-vs-each", "#2ca02c"),
    "label-regression": ("label regression", "#a8a000"),
    "gaussian": ("label regression", "#a8a000"),
}
_INFERENCES = {  # how much darker or, below nothing, lighter than the likelihood's colour
    "cvi": ("CVI", 0.0),
    "exact": ("", 0.0),
    "": ("", 0.0),
    "cvi-block": ("CVI with block sites", -0.6),
    "laplace": ("Laplace", -0.35),
    "cavi": ("CAVI", -0.5),
    "gibbs": ("Gibbs", 0.4),
}
_OBJECTIVES = {
    "": ("", "o"),
    "ml": ("bound", "o"),
    "evidence": ("evidence", "o"),
    "cavities": ("evidence of cavities", "D"),
    "pl": ("predicting queries", "s"),
    "predictive": ("predicting queries", "s"),
    "loo": ("leaving one out", "*"),
    "loo-4-tasks": ("leaving one out, 4 tasks a step", "P"),
}
_OF_SOFTMAX = {"elbo": "ml", "predictive": "pl", "cavity-evidence": "cavities", "leave-one-out": "loo"}
_PATTERN = re.compile(
    "(softmax|logistic-softmax|one-vs-each|label-regression|gaussian)"
    "(?:-(cvi-block|cvi|laplace|cavi|gibbs|exact))?(?:-(ml|evidence|pl|predictive|loo|loo-4-tasks))?"
)
_MARKERS = "os^vDPX"  # of methods that are named nowhere above


def plain(method: str) -> str:
    """The name without what says that training images are changed."""
    return method.replace(CHANGED, "")


def names(methods: Iterable[str]) -> dict[str, str]:
    """Readable names of the methods of one figure; a name that is not known stays.

    CVI, the usual inference, is named where the figure has another one of the same likelihood. That images are changed
    is said where those of some methods are not.
    """
    listed = list(dict.fromkeys(methods))
    processes = [found for found in map(_process, listed) if found]
    others = {one.likelihood for one in processes if one.inference not in ("cvi", "")}
    mixed = len({CHANGED in method for method in listed}) > 1
    return {one: _name(one, others) + (", changed images" if mixed and CHANGED in one else "") for one in listed}


def _name(method: str, others: Iterable[str]) -> str:
    known = _process(method)
    if known is None:
        return _LEARNERS[plain(method)][0] if plain(method) in _LEARNERS else plain(method)
    inference = _INFERENCES[known.inference][0]
    objective = _OBJECTIVES[known.objective][0]
    if objective == "bound" and known.inference in ("gibbs", "exact", ""):
        objective = "evidence"  # exact, or drawn
    hidden = known.inference == "cvi" and known.likelihood not in others
    name = _LIKELIHOODS[known.likelihood][0] + (f" by {inference}" if inference and not hidden else "")
    return f"{name}, {objective}" if objective else name


def style(method: str) -> Style:
    """The same for a method in every figure, whatever else that shows; changed images change nothing."""
    known = _process(method)
    if known:
        colour = _shaded(_LIKELIHOODS[known.likelihood][1], _INFERENCES[known.inference][1])
        return Style(colour, _OBJECTIVES[known.objective][1])
    if plain(method) in _LEARNERS:
        return _LEARNERS[plain(method)][1]
    number = zlib.crc32(plain(method).encode())
    return Style(_hue(number % 360), _MARKERS[number // 360 % len(_MARKERS)])


def _process(method: str) -> _Process | None:
    if method in _OF_SOFTMAX:  # comparisons of objectives name nothing else
        return _Process("softmax", "cvi", _OF_SOFTMAX[method])
    found = _PATTERN.fullmatch(plain(method))
    return _Process(*(part or "" for part in found.groups())) if found else None


def _shaded(colour: str, amount: float) -> str:
    """Towards black by that share, or towards white where it is negative."""
    end = 0 if amount > 0 else 255
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + abs(amount) * (end - part)):02x}" for part in parts)


def _hue(degrees: int) -> str:
    parts = colorsys.hsv_to_rgb(degrees / 360, 0.75, 0.75)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def measured_as(printed: str, methods: Sequence[str]) -> str | None:
    """Which of the methods a published row is of; one with unchanged images, as papers have them, if there is one."""
    same = [one for one in methods if printed in (one, PRINTED.get(plain(one)))]
    return min(same, key=lambda one: CHANGED in one, default=None)
