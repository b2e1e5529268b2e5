"""A classifier to use: labelled images in, class probabilities out, with any labels and any counts of at least one.

    fitted = FewShotClassifier(deep_kernel, likelihood, kernel, temperature).fit(key, images, labels)
    fitted.predict_proba(more_images)

Nothing is compiled twice for the same numbers of labelled images and classes: queries go through in chunks of a fixed
size. `add` takes further labelled images without another pass of the network over the old ones.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Key, Shaped

from inference.inner.base import Code, InferenceKernel, settle
from inference.predictive import predict, temper
from models.deep_kernel import DeepKernel, gaussian_prior, gaussian_query
from models.likelihoods.base import Likelihood

CHUNK = 64  # images that pass the network, and queries that are predicted, at a time

Images = Shaped[Array | np.ndarray, "N H W Ch"]
Labels = Shaped[np.ndarray, " L"] | list


class InferenceFailedError(RuntimeError):
    """The inference did not end in finite numbers; the message is one line."""


@dataclass(frozen=True)
class FewShotClassifier:
    """What is learned once, for many tasks: deep kernel, likelihood, inference, temperature of the probabilities.

    `temperature` belongs to the ways and shots that it was fitted for (1 leaves the probabilities as they are).
    """

    deep_kernel: DeepKernel
    likelihood: Likelihood
    kernel: InferenceKernel
    temperature: float = 1.0

    def fit(self, key: Key[Array, ""], images: Images, labels: Labels) -> "FittedClassifier":
        """Condition on labelled images [N, H, W, Ch], bytes or numbers in [0, 1]; labels are any that compare.

        Raises ValueError for numbers of images and labels that differ and for fewer than two classes,
        InferenceFailedError where the posterior is not finite.
        """
        return _conditioned(self, key, embed(self.deep_kernel, images), np.asarray(labels))


@dataclass(frozen=True)
class FittedClassifier:
    """A classifier for one task. classes [C] are the labels in the order of the columns of `predict_proba`.

    features [N, D] and labels [N] are what it was conditioned on; code is the inference's result code.
    """

    classifier: FewShotClassifier
    key: Key[Array, ""]
    features: Array
    labels: np.ndarray
    classes: np.ndarray
    posterior: Any
    code: Code

    def predict_proba(self, images: Images) -> np.ndarray:
        """Probabilities [Q, C] of images [Q, H, W, Ch]; no image depends on the others."""
        model = self.classifier
        new = embed(model.deep_kernel, images)
        parts = [
            _probabilities(
                model.deep_kernel.kernel,
                model.likelihood,
                model.deep_kernel.hyperparameters(),
                self.features,
                self.posterior,
                _padded(new[start : start + CHUNK]),
                jax.random.fold_in(self.key, 1),
            )
            for start in range(0, len(new), CHUNK)
        ]
        probabilities = jnp.concatenate(parts)[: len(new)]
        return np.asarray(temper(probabilities, model.temperature))

    def predict(self, images: Images) -> np.ndarray:
        """The most probable label of every image [Q]."""
        return self.classes[np.argmax(self.predict_proba(images), axis=1)]

    def add(self, images: Images, labels: Labels) -> "FittedClassifier":
        """The classifier with further labelled images, also of new classes; the old images are not needed again."""
        features = jnp.concatenate([self.features, embed(self.classifier.deep_kernel, images)])
        return _conditioned(self.classifier, self.key, features, np.concatenate([self.labels, np.asarray(labels)]))


def embed(deep_kernel: DeepKernel, images: Images) -> Array:
    """Features [N, D] in evaluation mode, CHUNK images at a time."""
    graph, state = nnx.split(deep_kernel)
    chunks = [_padded(jnp.asarray(images[start : start + CHUNK])) for start in range(0, len(images), CHUNK)]
    return jnp.concatenate([_embed(graph, state, chunk) for chunk in chunks])[: len(images)]


@partial(jax.jit, static_argnums=0)
def _embed(graph: Any, state: Any, images: Array) -> Array:
    return nnx.merge(graph, state).features(images)


def _padded(rows: Array) -> Array:
    """CHUNK rows: the last one is repeated."""
    return rows[jnp.minimum(jnp.arange(CHUNK), len(rows) - 1)]


def _conditioned(
    model: FewShotClassifier, key: Key[Array, ""], features: Array, labels: np.ndarray
) -> FittedClassifier:
    if labels.ndim != 1 or len(labels) != len(features):
        raise ValueError(f"expected one label for each of the {len(features)} images, got labels of {labels.shape}")
    classes, y = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"expected images of at least two classes, got {len(classes)}; add labelled images of another")
    kernel, hyper = model.deep_kernel.kernel, model.deep_kernel.hyperparameters()
    posterior, code = _fitted(model.kernel, kernel, len(classes), hyper, features, jnp.asarray(y, jnp.int32), key)
    if code == Code.NON_FINITE:
        raise InferenceFailedError("the posterior is not finite; check the images, or try another inference")
    return FittedClassifier(model, key, features, labels, classes, posterior, Code(int(code)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _fitted(inference: Any, kernel: Any, classes: int, hyper: Any, features: Array, y: Array, key: Array) -> Any:
    prior = gaussian_prior(kernel, hyper, features, classes)
    state, code = settle(key, inference, prior, y)
    return inference.posterior(state, prior), code


@partial(jax.jit, static_argnums=0)
def _probabilities(
    kernel: Any, likelihood: Any, hyper: Any, features: Array, posterior: Any, new: Array, key: Array
) -> Array:
    classes = posterior.marginals.mean.shape[-2]
    return predict(key, likelihood, posterior, gaussian_query(kernel, hyper, features, new, classes))
