"""Test images that are corrupted, each once, so that support and query see the same."""

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from fewshot.evaluation import metrics
from fewshot.evaluation.episodes import SPLITS, Episodes
from fewshot.evaluation.metrics import Metrics
from fewshot.evaluation.scoring import embed, score
from fewshot.learners import Learner
from fewshot.tasks import DataError, Dataset
from fewshot.tasks.corruptions import corrupt_dataset, parse_corruption

SEVERITIES = range(1, 6)


def corrupted(corruption: str | None, seed: int, clean: Dataset, severity: int | None = None) -> Dataset:
    """The data set with every image corrupted as NAME:SEVERITY says, or at another severity; None changes nothing.

    An image is changed by a key of its number. Raises DataError for features, which are no images.
    """
    if corruption is None:
        return clean
    if clean.images.dtype != np.uint8:
        raise DataError(f"expected images as bytes for --corruption, got {clean.images.dtype}; features have none")
    name, given = parse_corruption(corruption)
    return corrupt_dataset(corruption_key(seed), clean, name, severity or given)


def corruption_key(seed: int) -> PRNGKeyArray:
    """The key that test images are corrupted by: none of those that episodes are drawn by."""
    return jax.random.fold_in(jax.random.key(seed), len(SPLITS))


def by_severity(
    learner: Learner, temperature: float, corruption: str, seed: int, clean: Dataset, episodes: Episodes
) -> dict[int, Metrics]:
    """Accuracy, its interval and the Brier score on the same episodes at every severity, 0 for clean images."""
    images = {0: clean} | {severity: corrupted(corruption, seed, clean, severity) for severity in SEVERITIES}
    found = {}
    for severity, dataset in images.items():
        scores = score(learner, embed(learner, dataset), episodes).tempered(temperature)
        found[severity] = scores.accuracies() | {"brier": metrics.brier(scores.probabilities, scores.labels)}
    return found
