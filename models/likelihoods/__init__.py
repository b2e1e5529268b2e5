"""Likelihoods of integer labels given latent logits, one file each."""

from fewshot.models.likelihoods.label_regression import LabelRegression
from fewshot.models.likelihoods.logistic_softmax import LogisticSoftmax
from fewshot.models.likelihoods.one_vs_each import OneVsEach
from fewshot.models.likelihoods.softmax import Softmax

__all__ = ["LabelRegression", "LogisticSoftmax", "OneVsEach", "Softmax"]
