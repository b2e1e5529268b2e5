"""What answers an episode, one learner a file. The registry holds the command line's names."""

from fewshot.learners.base import Learner, Prediction, TrainsOn, Traits, solve
from fewshot.learners.gaussian_process import GaussianProcess
from fewshot.learners.nearest_neighbour import NearestNeighbour

LEARNERS: dict[str, type[Learner]] = {
    "gaussian-process": GaussianProcess,
    "nearest-neighbour": NearestNeighbour,
}

__all__ = [
    "LEARNERS",
    "GaussianProcess",
    "Learner",
    "NearestNeighbour",
    "Prediction",
    "TrainsOn",
    "Traits",
    "solve",
]
