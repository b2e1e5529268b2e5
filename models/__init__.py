"""What is believed: Gaussian algebra, likelihoods, kernels, networks. The registries hold the command line's names."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from fewshot.models.backbones import MLP, Backbone, Conv4, Conv4Maps, Identity, ResNet12
from fewshot.models.kernels import RBF, Cosine, Kernel, Linear, Matern52, Polynomial
from fewshot.models.likelihoods import LabelRegression, LogisticSoftmax, Normal, OneVsEach, Softmax, StudentT
from fewshot.models.likelihoods.base import ClassLikelihood, Likelihood, RealLikelihood
from fewshot.models.networks.metric import FeatureMetric

LIKELIHOODS: dict[str, Callable[..., ClassLikelihood]] = {
    "softmax": Softmax,
    "logistic-softmax": LogisticSoftmax,
    "one-vs-each": OneVsEach,
    "gaussian": LabelRegression,
}
# Of labels that are real numbers: models of the noise.
NOISE_MODELS: dict[str, Callable[..., RealLikelihood]] = {"normal": Normal, "student-t": StudentT}
# A view: what a user's module registers above is there too. Iteration begins with the last.
ALL_LIKELIHOODS: Mapping[str, Callable[..., Likelihood]] = MappingProxyType(
    ChainMap[str, Callable[..., Any]](NOISE_MODELS, LIKELIHOODS)
)

KERNELS: dict[str, Callable[..., Kernel]] = {
    "cosine": Cosine,
    "cosine-bn": partial(Cosine, normalise_features=True, affine=True),
    "linear": Linear,
    "rbf": RBF,
    "rbf-norm": partial(RBF, unit=True),
    "matern52": Matern52,
    "poly1": partial(Polynomial, degree=1),
    "poly2": partial(Polynomial, degree=2),
}

BACKBONES: dict[str, Callable[..., Backbone]] = {
    "conv4": Conv4,
    "conv4-maps": Conv4Maps,
    "resnet12": ResNet12,
    "mlp": MLP,
    "identity": Identity,
    "metric": FeatureMetric,
}
