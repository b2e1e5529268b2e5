"""Predictions that several tests of the evaluation share."""

import numpy as np

# Two episodes of two queries. Largest probabilities 0.5, 0.8, 0.4, 0.8; right: yes, no, yes, yes.
PROBABILITIES = np.array([[[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]], [[0.3, 0.3, 0.4], [0.8, 0.1, 0.1]]])
LABELS = np.array([[0, 2], [2, 0]])


def random_predictions(seed, episodes=7, queries=11, classes=4, dtype=np.float64):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.ones(classes), size=(episodes, queries)).astype(dtype)
    return probabilities, rng.integers(0, classes, size=(episodes, queries))


def calibrated_labels(rng, probabilities):
    """Labels [E, Q] drawn independently from probabilities [E, Q, C]."""
    u = rng.uniform(size=(*probabilities.shape[:2], 1))
    return (probabilities.cumsum(-1) < u).sum(-1).clip(max=probabilities.shape[-1] - 1)


def dependent_labels(rng, confidence, episodes, queries, sharing):
    """Right with probability `confidence`; with probability `sharing` a query uses its episode's uniform, else its own.

    Not the floor's own mechanism: pairs have covariance sharing^2 c (1 - c), exactly.
    """
    uses = rng.uniform(size=(episodes, queries)) < sharing
    uniform = np.where(uses, rng.uniform(size=(episodes, 1)), rng.uniform(size=(episodes, queries)))
    return (uniform >= confidence).astype(int)  # label 0 is the predicted class


def constant_predictions(confidence, episodes, queries):
    return np.broadcast_to(np.array([confidence, 1 - confidence]), (episodes, queries, 2)).copy()
