"""Likelihoods of labels given latent functions, one file each: of classes, and of real numbers (Normal, StudentT)."""

from fewshot.models.likelihoods.label_regression import LabelRegression
from fewshot.models.likelihoods.logistic_softmax import LogisticSoftmax
from fewshot.models.likelihoods.normal import Normal
from fewshot.models.likelihoods.one_vs_each import OneVsEach
from fewshot.models.likelihoods.softmax import Softmax
from fewshot.models.likelihoods.student_t import StudentT

__all__ = ["LabelRegression", "LogisticSoftmax", "Normal", "OneVsEach", "Softmax", "StudentT"]
