"""Likelihoods of integer labels given latent logits, one file each."""

from models.likelihoods.label_regression import LabelRegression
from models.likelihoods.softmax import Softmax

__all__ = ["LabelRegression", "Softmax"]
