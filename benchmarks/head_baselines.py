"""What people put on frozen features, each with its own setting and temperature chosen on training classes.

An answer is a function of (setting, support [N, D], labels [N], queries [Q, D]) -> probabilities [Q, C], on unit
features in double precision.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from head_setting import pooled, temperature_of

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import Episodes
from fewshot.evaluation.scoring import Scores

Answer = Callable[[float, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class Baseline(NamedTuple):
    """A method: its settings to choose from, and how many episodes of a table it is run on at most."""

    answer: Answer
    settings: tuple[float, ...]
    most_episodes: int = 10**9
    most_classes: int = 10**9


def class_means(scale: float, support: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """softmax(scale cos(x, mean of the class)); a temperature is one more scale, so one setting is enough."""
    means = np.stack([support[y == k].mean(0) for k in range(y.max() + 1)])
    return _softmax(scale * query @ (means / np.linalg.norm(means, axis=1, keepdims=True)).T)


def logistic_regression(strength: float, support: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Scikit-learn's with C = strength.

    The penalty is round, so the minimum lies in the span of the labelled features: both are turned into its basis
    first, which gives the same probabilities in a tenth of the time.
    """
    from sklearn.linear_model import LogisticRegression

    _, _, basis = np.linalg.svd(support, full_matrices=False)
    fitted = LogisticRegression(C=strength, max_iter=1000).fit(support @ basis.T, y)
    return fitted.predict_proba(query @ basis.T)


def neighbours(smoothing: float, support: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """(votes of the k nearest + smoothing) / (k + C smoothing), k = as many as a class has, 5 at most."""
    count = min(5, int(np.bincount(y).min()))
    nearest = np.argsort(-query @ support.T, axis=1)[:, :count]
    votes = np.stack([(y[nearest] == k).sum(1) for k in range(y.max() + 1)], axis=1) + smoothing
    return votes / votes.sum(1, keepdims=True)


def gaussian_process_classifier(_: float, support: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Scikit-learn's, one against the rest, scale and length-scale of an RBF kernel by its own optimiser."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel

    _, _, basis = np.linalg.svd(support, full_matrices=False)
    rest = np.linalg.norm(query - query @ basis.T @ basis, axis=1, keepdims=True)  # distances stay what they are
    x = np.hstack([support @ basis.T, np.zeros((len(support), 1))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a scale at its bound
        fitted = GaussianProcessClassifier(ConstantKernel(10.0) * RBF(1.0), random_state=0).fit(x, y)
    return fitted.predict_proba(np.hstack([query @ basis.T, rest]))


def _softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


BASELINES = {
    "cosine to class means": Baseline(class_means, (20.0,)),
    "logistic regression": Baseline(logistic_regression, (1.0, 10.0, 100.0)),
    "nearest neighbours": Baseline(neighbours, (0.03, 0.1, 0.3)),
    "GaussianProcessClassifier": Baseline(gaussian_process_classifier, (0.0,), 20, 5),
}


class Chosen(NamedTuple):
    """A method with its setting and temperature for one shape of task."""

    answer: Answer
    setting: float
    temperature: float

    def scores(self, features: np.ndarray, episodes: Episodes) -> Scores:
        return solve(self.answer, self.setting, features, episodes).tempered(self.temperature)


def solve(answer: Answer, setting: float, features: np.ndarray, episodes: Episodes) -> Scores:
    """Probabilities [E, Q, C] on features [I, D]."""
    support, y, query, labels = (
        np.asarray(getattr(episodes.indices, name)) for name in ("x_support", "y_support", "x_query", "y_query")
    )
    each = [answer(setting, features[s], own, features[q]) for s, own, q in zip(support, y, query, strict=True)]
    return Scores(np.stack(each), labels, np.zeros(len(labels), int), 0.0)


def first(episodes: Episodes, count: int) -> Episodes:
    """The first episodes."""
    indices = type(episodes.indices)(*(np.asarray(leaf)[:count] for leaf in episodes.indices))
    return Episodes(episodes.shape, indices, episodes.keys[:count])


def choose(baseline: Baseline, parts: list[tuple[np.ndarray, Episodes]]) -> Chosen:
    """The setting and temperature of least NLL on episodes of the classes to learn from, all data sets together."""
    parts, found = [(x, first(episodes, max(1, baseline.most_episodes // 4))) for x, episodes in parts], []
    for setting in baseline.settings:
        scores = [solve(baseline.answer, setting, *part) for part in parts]
        temperature = temperature_of(scores)
        nll = metrics.nll(*pooled([one.tempered(temperature) for one in scores]))
        found.append((nll, Chosen(baseline.answer, setting, temperature)))
    return min(found, key=lambda one: one[0])[1]
