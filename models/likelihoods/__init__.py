"""Likelihoods of integer labels given latent logits, one file each."""

from models.likelihoods.label_regression import LabelRegression
from models.likelihoods.logistic_softmax import LogisticSoftmax
from models.likelihoods.one_vs_each import OneVsEach
from models.likelihoods.softmax import Softmax

__all__ = ["LabelRegression", "LogisticSoftmax", "OneVsEach", "Softmax"]
