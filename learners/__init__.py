"""What answers an episode, one learner a file. The registry holds the command line's names."""

from fewshot.learners.abml import ABML
from fewshot.learners.base import Learner, Prediction, TrainsOn, Traits, solve
from fewshot.learners.baseline_plus_plus import BaselinePlusPlus
from fewshot.learners.bayesian_maml import BayesianMAML, Chaser
from fewshot.learners.feature_transfer import FeatureTransfer
from fewshot.learners.gaussian_process import GaussianProcess
from fewshot.learners.logistic_regression import LogisticRegression
from fewshot.learners.maml import MAML, FirstOrderMAML, InductiveMAML
from fewshot.learners.matching import Matching
from fewshot.learners.nearest_mean import NearestMean
from fewshot.learners.nearest_neighbour import NearestNeighbour
from fewshot.learners.neural_process import AttentiveNeuralProcess, ConditionalNeuralProcess, LatentNeuralProcess
from fewshot.learners.prototypical import Prototypical
from fewshot.learners.relation import Relation

LEARNERS: dict[str, type[Learner]] = {
    "gaussian-process": GaussianProcess,
    "prototypical": Prototypical,
    "matching": Matching,
    "relation": Relation,
    "maml": MAML,
    "first-order-maml": FirstOrderMAML,
    "inductive-maml": InductiveMAML,
    "bayesian-maml": BayesianMAML,
    "chaser": Chaser,
    "abml": ABML,
    "feature-transfer": FeatureTransfer,
    "baseline++": BaselinePlusPlus,
    "nearest-mean": NearestMean,
    "nearest-neighbour": NearestNeighbour,
    "logistic-regression": LogisticRegression,
    "cnp": ConditionalNeuralProcess,
    "np": LatentNeuralProcess,
    "anp": AttentiveNeuralProcess,
}

__all__ = [
    "ABML",
    "LEARNERS",
    "MAML",
    "AttentiveNeuralProcess",
    "BaselinePlusPlus",
    "BayesianMAML",
    "Chaser",
    "ConditionalNeuralProcess",
    "FeatureTransfer",
    "FirstOrderMAML",
    "GaussianProcess",
    "InductiveMAML",
    "LatentNeuralProcess",
    "Learner",
    "LogisticRegression",
    "Matching",
    "NearestMean",
    "NearestNeighbour",
    "Prediction",
    "Prototypical",
    "Relation",
    "TrainsOn",
    "Traits",
    "solve",
]
