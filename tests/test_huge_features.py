"""Labelled features too large to be multiplied end in an error, not in numbers; a cosine does not care."""

import numpy as np
import pytest
from flax import nnx

from fewshot.classifier import FewShotClassifier, InferenceFailedError
from fewshot.inference.inner import exact, laplace
from fewshot.learners import GaussianProcess
from fewshot.models import KERNELS, Identity, LabelRegression, Softmax
from fewshot.models.deep_kernel import DeepKernel

LABELS = [0, 0, 1, 1, 2, 2]


def classifier(kernel):
    likelihood = LabelRegression(0.3)
    deep_kernel = DeepKernel(Identity((1, 1, 8)), KERNELS[kernel](), rngs=nnx.Rngs(0))
    return FewShotClassifier(GaussianProcess(deep_kernel, likelihood, exact), temperature=1.0)


def features(count, scale=1.0):
    return (scale * np.random.default_rng(count).normal(size=(count, 1, 1, 8))).astype(np.float32)


@pytest.mark.parametrize("kernel, scale", [("linear", 1e30), ("poly2", 1e10), ("rbf", 1e30), ("matern52", 1e30)])
def test_products_that_overflow_are_an_error(kernel, scale):
    model = classifier(kernel)
    with pytest.raises(InferenceFailedError, match="the posterior is not finite"):
        model.fit(features(6, scale), LABELS)


@pytest.mark.long
@pytest.mark.parametrize("make", [exact, laplace])
def test_queries_whose_products_overflow_are_an_error(make):
    """Laplace's probabilities would be finite, of a linear kernel too."""
    likelihood = Softmax() if make is laplace else LabelRegression(0.3)
    deep_kernel = DeepKernel(Identity((1, 1, 8)), KERNELS["linear"](), rngs=nnx.Rngs(0))
    fitted = FewShotClassifier(GaussianProcess(deep_kernel, likelihood, make)).fit(features(6), LABELS)
    with pytest.raises(InferenceFailedError, match="a prediction is not finite"):
        fitted.predict_proba(features(5, 1e30))
    with pytest.raises(InferenceFailedError, match="a score is not a number"):
        fitted.unknown_score(features(5, 1e30))


@pytest.mark.parametrize("kernel", ["cosine", "rbf", "matern52"])
def test_queries_of_any_size_have_probabilities(kernel):
    fitted = classifier(kernel).fit(features(6), LABELS)
    for scale in (1e10, 1e19, 1e30):
        probabilities = fitted.predict_proba(features(5, scale))
        np.testing.assert_allclose(probabilities.sum(1), 1.0, rtol=1e-5)
        if kernel == "cosine":
            np.testing.assert_allclose(probabilities, fitted.predict_proba(features(5)), atol=1e-5)
        else:
            np.testing.assert_allclose(probabilities, 1 / 3, atol=1e-5)  # nothing is known so far away


def test_cosine_learns_from_features_of_any_size():
    small, large = (classifier("cosine").fit(features(6, scale), LABELS) for scale in (1.0, 1e30))
    np.testing.assert_allclose(small.predict_proba(features(5)), large.predict_proba(features(5)), atol=1e-5)
